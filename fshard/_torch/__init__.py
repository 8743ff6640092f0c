"""Private PyTorch behind small named functions: no other room touches it."""
