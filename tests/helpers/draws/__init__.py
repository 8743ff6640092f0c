"""Draws of several layouts and the values of JAX."""
