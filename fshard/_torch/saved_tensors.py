"""Hooks of saved tensors, and references to storages that do not keep them alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["SavedTensorHooks", "StorageWeakRef", "innermost_hooks"]

SavedTensorHooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions that pack a tensor which autograd saves, and unpack it in the backward pass."""


def innermost_hooks() -> SavedTensorHooks | None:
    """Return the hooks of saved tensors that are active in this thread, None without any.

    >>> from torch.autograd.graph import saved_tensors_hooks
    >>> with saved_tensors_hooks(torch.Tensor.cpu, torch.Tensor.cpu):
    ...     innermost_hooks() == (torch.Tensor.cpu, torch.Tensor.cpu)
    True
    """
    hooks: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks
