"""Hooks of saved tensors, and references to storages that do not keep them alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from fshard._util.errors import fail

__all__ = ["SavedHandle", "SavedTensorHooks", "SavedValues", "StorageWeakRef", "innermost_hooks"]

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


class SavedHandle:
    """Object that a graph saves in the place of a tensor."""

    __slots__ = ("__weakref__",)


class SavedValues:
    """Tensors that graphs of other threads save, for a node of this thread that saves them.

    So the hooks that are active in this thread, as those of a checkpoint, apply to them.

    Attributes:
        values: the tensor of each handle, in the order in which they were saved. Empty but while
            the graphs are recorded or used.

    >>> saved, x = SavedValues(), torch.full((2,), 3.0, requires_grad=True)
    >>> with saved.holding():
    ...     with saved.collecting():
    ...         y = x.square()
    ...     handles, tensors = saved.references()
    >>> tensors
    [tensor([3., 3.])]
    >>> with saved.holding(handles, [10 * tensors[0]]):
    ...     torch.autograd.grad(y.sum(), x)
    (tensor([60., 60.]),)
    """

    def __init__(self) -> None:
        self.values: MutableMapping[SavedHandle, torch.Tensor] = {}

    def collecting(self) -> AbstractContextManager[Any]:
        """Return a context whose operations save handles."""

        def pack(x: torch.Tensor) -> SavedHandle:
            handle = SavedHandle()
            self.values[handle] = x
            return handle

        def unpack(handle: SavedHandle) -> torch.Tensor:
            if handle not in self.values:
                fail("a backward pass", "a tensor of a simulated rank, outside of its function",
                     "under hooks of saved tensors, as those of a checkpoint, a rank's gradients "
                     "must be taken in the function or through its results",
                     "return the tensor")  # fmt: skip
            return self.values[handle]

        return saved_tensors_hooks(pack, unpack)

    def references(self) -> tuple[list[ref[SavedHandle]], list[torch.Tensor]]:
        """Return references to the handles of all tensors, and these without their graphs."""
        if not self.values:
            return [], []
        pairs = [(ref(handle), x.detach()) for handle, x in self.values.items()]
        return [handle for handle, _ in pairs], [x for _, x in pairs]

    @contextmanager
    def holding(
        self, handles: Iterable[ref[SavedHandle]] = (), tensors: Iterable[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Have these tensors, of handles that still exist, in the block."""
        previous, self.values = self.values, WeakKeyDictionary()
        pairs = zip(handles, tensors, strict=True)
        self.values.update({handle: x for h, x in pairs if (handle := h()) is not None})
        try:
            yield
        finally:
            self.values = previous
