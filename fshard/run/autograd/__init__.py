"""Gradients of programs and collectives."""
