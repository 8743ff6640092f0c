"""Transforms of `torch.func` around and inside mapped functions."""
