"""Tests of the rules of operations, of propagation, and of what is built on them."""
