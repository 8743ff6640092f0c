"""Tests of `fs.apply`."""
