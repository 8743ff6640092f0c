"""Blocks of `fs.random.keyed`, as the rooms below `random` see them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fshard._util.hooks import Hook


class KeyedBlock(AbstractContextManager["KeyedBlock"], Protocol):
    """Block in which PyTorch's random functions draw with a key.

    Attributes:
        key: the key.
        first: number of the block's first draw.
        count: number of draws so far; draw n has the key `fold_in(key, first + n)`.
    """

    key: torch.Tensor
    first: int | torch.Tensor
    count: int

    @staticmethod
    def resumed(key: torch.Tensor, first: int | torch.Tensor) -> KeyedBlock:
        """Return a block whose first draw has the key `fold_in(key, first)`."""
        ...


@Hook
def keyed_block_hook() -> KeyedBlock | None:
    """Return the innermost block that may draw here, None if there is none; set by `random`."""
    raise NotImplementedError
