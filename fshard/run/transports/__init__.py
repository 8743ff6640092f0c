"""Transports: the simulator and `torch.distributed`."""
