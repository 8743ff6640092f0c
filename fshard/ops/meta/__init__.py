"""Shapes and dtypes of results, without running an operation."""
