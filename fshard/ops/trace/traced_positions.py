"""Indexing at positions that a traced function computes, `x[i]` for a traced int tensor `i`.

PyTorch reads the value of such an index, since its result is a view. A trace has no values: it
records the gather of the elements. A write to the result is put into `x`, and the result is
gathered again where it is used after a write to `x`, as if they shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._torch.functorch import is_batched_at_any_level
from fshard._torch.memory import storage_address
from fshard._torch.modes import DispatchMode
from fshard._util.dtypes import is_inexact
from fshard.layout.tree import tensors_in
from fshard.ops.trace.functionalize import written_operands

Indices = list[Tensor | None]
_INDEX, _INDEX_PUT = torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default


def _select(x: Tensor, dim: int, index: Any) -> tuple[Tensor, int, Any]:
    return x, dim, index


def _narrow(x: Tensor, dim: int, start: Any, length: int) -> tuple[Tensor, int, Any]:
    is_traced = isinstance(start, Tensor)
    return x, dim, start + torch.arange(length, device=start.device) if is_traced else start


_BY_DIM: dict[Any, Callable[..., tuple[Tensor, int, Any]]] = {
    torch.select: _select, Tensor.select: _select, torch.narrow: _narrow, Tensor.narrow: _narrow,
}  # fmt: skip


@dataclass(slots=True, eq=False)
class _Gathered:
    """Elements of `base` at `indices` in a tensor that stands for a view of them."""

    view: Tensor
    base: Tensor
    indices: Indices
    address: int
    """Address of the storage of `view`."""
    is_stale: bool = False
    """True if `base` has been written since."""
    is_written: bool = False
    """True if the written `view` is not in `base` yet, or `view` is gathered again."""


class TracedPositions(DispatchMode):
    """Gathers of elements at traced positions; as a mode it notes which tensors are written.

    Args:
        run: runs a function of PyTorch as the trace does.
        read: returns the value of a call in a tuple, or () if it depends on an argument.
    """

    def __init__(
        self, run: Callable[..., Any], read: Callable[[Any, Sequence[Any], Any], tuple[Any, ...]]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run, self.read = run, read
        self.gathered: list[_Gathered] = []
        self.written: set[int] = set()
        """Addresses of the storages that the running call writes."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.gathered:
            written = tensors_in(written_operands(func, args, kwargs or {}))
            self.written |= {storage_address(x) for x in written}
        return func(*args, **(kwargs or {}))

    def replaced(self, func: Any, args: Sequence[Any], kwargs: Any) -> Callable[[], Any] | None:
        """Return the call that runs in the place of one with a traced position, None for others."""
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            x, index, *value = args
            items = index if isinstance(index, tuple) else (index,)
            if not any(map(_is_position, items)):
                return None
            indices, rest = self._split(x, items)
            if not indices:
                return lambda: self.run(func, x, rest, *value)
            if func is Tensor.__setitem__:
                return lambda: self._write(x, indices, rest, *value)
            return lambda: self._gather(x, indices, rest)
        if func in _BY_DIM and any(isinstance(x, Tensor) for x in (*args[2:], *kwargs.values())):
            x, dim, position = _BY_DIM[func](*args, **kwargs)
            if isinstance(position, Tensor):
                return lambda: self._gather(x, [None] * (dim % x.ndim) + [position])
        return None

    def refresh(self, tensors: Iterable[Tensor]) -> None:
        """Gather tensors again that are used after a write to those whose elements they are."""
        if not any(part.is_stale for part in self.gathered):
            return
        used = {storage_address(x) for x in tensors}
        for part in self.gathered:
            if part.is_stale and part.address in used:
                part.is_stale, part.is_written = False, True
                with torch.enable_grad():  # which a block around the use alone does not end
                    self.run(Tensor.copy_, part.view, self.run(_INDEX, part.base, part.indices))
                part.is_written = False

    def put_back(self) -> None:
        """Put what the last call has written into the tensors whose elements it is."""
        if not self.written:
            return
        written, self.written = self.written, set()
        changed = [x for x in self.gathered if x.address in written and not x.is_written]
        for part in changed:
            part.is_written = True
        for part in self.gathered:  # those of others after them
            if storage_address(part.base) in written and not part.is_written:
                part.is_stale = True
                written.add(part.address)
        for part in changed:
            self.run(_INDEX_PUT, part.base, part.indices, part.view)
            part.is_written = False

    def _gather(self, x: Tensor, indices: Indices, rest: tuple[Any, ...] = ()) -> Any:
        view = self.run(_INDEX, x, indices)
        now = [index if index is None else self.run(Tensor.clone, index) for index in indices]
        self.gathered.append(_Gathered(view, x, now, storage_address(view)))
        return self.run(Tensor.__getitem__, view, rest) if rest else view

    def _write(self, x: Tensor, indices: Indices, rest: tuple[Any, ...], value: Any) -> None:
        part = self.run(_INDEX, x, indices)
        self.run(Tensor.__setitem__, part, rest or (...,), value)
        self.run(_INDEX_PUT, x, indices, part)

    def _split(self, x: Tensor, items: Sequence[Any]) -> tuple[Indices, tuple[Any, ...]]:
        """Return the traced positions by dims of `x`, and the other items of an index."""
        items = [
            torch.as_tensor(x) if isinstance(x, list) or hasattr(x, "__array_interface__") else x
            for x in items
        ]
        dim, indices, rest = 0, Indices(), list[Any]()
        for item in items:
            is_position = _is_position(item)
            is_known = is_position and not is_batched_at_any_level(item)
            known = self.read(Tensor.item, (item,), {}) if is_known else ()
            if is_position and not known:
                indices += [None] * (dim - len(indices)) + [item]
            else:
                rest.append(known[0] if known else item)
            dim += x.ndim - sum(map(_dims, items)) if item is Ellipsis else _dims(item)
        return indices, () if all(map(_is_all, rest)) else tuple(rest)


def _is_all(item: Any) -> bool:
    """Return True for an item of an index that selects all elements: `...` or `:`."""
    is_slice = isinstance(item, slice) and item.start is item.stop is item.step is None
    return item is Ellipsis or is_slice


def _is_position(item: Any) -> bool:
    """Return True for an int tensor without dims; those of bools and bytes are masks."""
    if not isinstance(item, Tensor) or item.ndim or is_inexact(item):
        return False
    return item.dtype not in (torch.bool, torch.uint8)


def _dims(item: Any) -> int:
    """Return the number of dims that an item of an index is for."""
    if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.ndim
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1
