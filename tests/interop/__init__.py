"""Tests of conversions to and from DTensor, DeviceMesh and JAX."""
