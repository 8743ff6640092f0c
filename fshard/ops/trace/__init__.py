"""Tracing of functions to graphs, with writes and inner gradients made values."""
