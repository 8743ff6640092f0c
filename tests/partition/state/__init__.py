"""Tests of guards of Python state."""
