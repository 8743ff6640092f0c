"""Digests of tensors, by which ranks compare values in a few bytes."""

from __future__ import annotations

from zlib import crc32

import torch


def value_digest(x: torch.Tensor) -> torch.Tensor:
    """Return shape and values as three integers; different ones agree with probability 2^-60.

    >>> value_digest(torch.zeros(2)).equal(value_digest(torch.zeros(1, 2)))
    False
    """
    # Copy: a view as bytes needs contiguous elements; `contiguous` keeps odd strides of size 1.
    flat = x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).cpu()
    words = flat.view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -len(words) % 8)).view(torch.int64)
    index = torch.arange(len(words)) * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1D
    mixed = (words ^ index) * 0x369DEA0F31A53F85
    total = ((mixed ^ (mixed >> 29)) * 0x27BB2EE687B0B0FD).sum()
    # Not hash(), which differs between processes for strings.
    shape = torch.tensor([x.ndim, crc32(str((*x.shape, x.dtype)).encode())])
    return torch.cat([total.reshape(1), shape]).to(x.device)
