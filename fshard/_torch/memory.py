"""Storages of tensors, results that must not share memory with arguments, flat buffers."""

from __future__ import annotations

import functools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._torch.fake_tensors import FakeTensor, FunctionalTensor
from fshard._torch.functorch import get_unwrapped, is_wrapped
from fshard._torch.modes import DisableTorchFunction, current_dispatch_mode

lazy_clone: Callable[[torch.Tensor], torch.Tensor] = torch._lazy_clone
"""Return a copy that shares memory until one of the two is written."""
flatten_all: Callable[[list[torch.Tensor]], torch.Tensor] = torch._C._nn.flatten_dense_tensors
"""Return the elements of dense tensors one after the other, copied by one call."""
storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
"""Return an id of the storage; raise for sparse tensors and wrappers of `torch.func`."""
copy_all: Callable[[Any, Any], None] = torch._foreach_copy_
"""`copy_all(targets, sources)`: copy tensors by one call."""
_owners: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
Shapes = Sequence[tuple[int, ...]]
ONE_OWNER = 2
"""References to the storage of one tensor: of the tensor and of the storage's Python object."""
sparse_values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values


def storage_address(x: torch.Tensor) -> int:
    """Return the address of the storage object, equal for tensors that share memory."""
    return int(innermost(x).untyped_storage()._cdata)


def has_one_owner(x: torch.Tensor) -> bool:
    """Return True if no other tensor has the memory of `x`.

    >>> x = torch.ones(2)
    >>> has_one_owner(x), has_one_owner(x[:1])
    (True, False)
    """
    return _use_count(x.untyped_storage()) <= ONE_OWNER


WRITABLE = (torch.Tensor, FakeTensor)
"""Types of tensors of which all references are counted, or without values."""


def temporaries(gradients: Sequence[torch.Tensor | None], nbytes: int) -> tuple[int, ...]:
    """Return the indices of gradients of at least `nbytes` that nothing but autograd has.

    The `backward` of an `autograd.Function` may write those. It calls this first, with its own
    arguments: references are counted, and compared with those to a gradient that only autograd has.

    >>> class Identity(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, *xs):
    ...         return tuple([x.detach() for x in xs])
    ...
    ...     @staticmethod
    ...     def backward(ctx, *gradients):
    ...         print(temporaries(gradients, nbytes=0))
    ...         return gradients
    >>> x, y = Identity.apply(*torch.ones(2, 3, requires_grad=True))
    >>> torch.autograd.backward([2 * x, 3 * y], [torch.ones(3), torch.ones(3)])
    (0, 1)
    >>> x, y = Identity.apply(*torch.ones(2, 3, requires_grad=True))
    >>> torch.autograd.backward([x, 3 * y], [kept := torch.ones(3), torch.ones(3)])
    (1,)
    """
    large = [
        i for i, g in enumerate(gradients)
        if g is not None and g.nbytes >= nbytes and type(g) in WRITABLE and g.is_contiguous()
    ]  # fmt: skip
    if any(type(gradients[i]) is FakeTensor for i in large):
        return tuple(large)  # they have no values that others could miss
    # The frames that a debugger has looked at have references, too.
    if not large or current_dispatch_mode() is not None or sys.gettrace() is not None:
        return ()
    counts = [_references(gradients, i) for i in large]
    return tuple([i for i, count in zip(large, counts, strict=True) if count in _temporary()])


def _references(gradients: Sequence[torch.Tensor | None], index: int) -> tuple[int, ...]:
    """Return how many references a tensor, its memory, and the tensor that it views have."""
    x = gradients[index]
    assert x is not None
    counts = sys.getrefcount(x), _owners(x), _use_count(x.untyped_storage())
    base = x._base
    return counts if base is None else (*counts, sys.getrefcount(base), _owners(base))


@functools.cache
def _temporary() -> frozenset[tuple[int, ...]]:
    """Return the `_references` of gradients that only autograd has."""
    counts: set[tuple[int, ...]] = set()

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: torch.Tensor) -> Any:
            return tuple([x.detach() for x in xs])

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            count_all(gradients)
            return gradients

    def count_all(gradients: Sequence[torch.Tensor]) -> None:
        found = [_references(gradients, i) for i in range(len(gradients))]
        counts.update(found)

    with torch.enable_grad():
        weight, other = (torch.zeros(2, 2, requires_grad=True) for _ in range(2))
        x, y = Identity.apply(weight, other)  # type: ignore[no-untyped-call]
        product = torch.nn.functional.linear(torch.zeros(1, 2), x) + y * y
        torch.autograd.grad(product.sum(), [weight, other])
    return frozenset(counts)


def _use_count(storage: torch.UntypedStorage) -> int:
    """Return the number of references to a storage, its Python object's included."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def unaliased(y: torch.Tensor, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `y`, copied if it shares memory with an `x`: writes into one must not change another.

    >>> x = torch.zeros(2)
    >>> unaliased(x[:1], [x]).add_(1), unaliased(x, []) is x, x
    (tensor([1.]), True, tensor([0., 0.]))
    """
    return unaliased_all((y,), xs)[0]


def unaliased_all(
    ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return all `ys`, those copied that share memory with an `x`."""
    with DisableTorchFunction():  # type tracking does not see it
        used = {data_address(x) for x in xs}
        used.discard(0)
        shared = [data_address(y) in used and bool(y.numel() > 0) for y in ys]
    if True not in shared:
        return tuple(ys)
    return tuple(y.clone() if is_shared else y for y, is_shared in zip(ys, shared, strict=True))


def data_address(x: torch.Tensor) -> int:
    """Return the first address of a storage, through wrappers; 0 for a tensor without values.

    For a tensor of a functionalized trace it is the address of the storage object.
    """
    x = innermost(x)
    if type(x) is FakeTensor:
        return 0
    storage = x.untyped_storage()
    return int(storage._cdata) if type(x) is FunctionalTensor else storage.data_ptr()


def innermost(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `x` wraps for transforms of `torch.func`, else `x`."""
    while is_wrapped(x):
        x = get_unwrapped(x)
    return x


def own_memory(x: torch.Tensor) -> torch.Tensor:
    """Return the same values, copied if a dim repeats memory: PyTorch gives those no tangent.

    >>> own_memory(torch.ones(1).expand(3)).stride(), own_memory(torch.ones(2, 3).T).stride()
    ((1,), (1, 3))
    """
    return x.contiguous() if not x.is_contiguous() and 0 in x.stride() else x


def materialized(x: torch.Tensor) -> torch.Tensor:
    """Return the same values in contiguous memory, as their bytes say: no lazy conjugate or sign.

    >>> materialized(torch.ones(2, 2)[:1, :].T).stride()
    (1, 1)
    """
    x = x.resolve_conj().resolve_neg().contiguous()
    # A dim of size 1 may have any stride in a contiguous tensor.
    if x.ndim and x.stride(-1) != 1:
        return x.clone(memory_format=torch.contiguous_format)
    return x


# -- flat memory whose parts are tensors ---------------------------------------------------------


def adjacent_tensors(
    shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return new memory, and the tensors of some shapes that are its parts, in order."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    parts = zip(flat.split(sizes), shapes, strict=True)
    return flat, [part.view(shape) for part, shape in parts]


def joined(xs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the flat tensor of which tensors are the parts in order, None if there is none.

    >>> flat, parts = adjacent_tensors([(2,), (1, 3)], torch.float32, torch.device("cpu"))
    >>> joined(parts).data_ptr() == flat.data_ptr(), joined(parts[::-1])
    (True, None)
    """
    end, address = xs[0].storage_offset(), storage_address(xs[0])
    for x in xs:
        if x.storage_offset() != end or not x.is_contiguous() or storage_address(x) != address:
            return None
        end += x.numel()
    return xs[0].as_strided((end - xs[0].storage_offset(),), (1,))


class FlatBuffer:
    """Flat memory of tensors, used again once nothing else refers to it.

    PyTorch caches no memory of the CPU, and to map new pages costs more than to copy into them.

    >>> buffer = FlatBuffer([(2,), (1, 3)], torch.float32, torch.device("cpu"))
    >>> parts = buffer.parts()
    >>> buffer.flat.shape, [part.shape for part in parts], buffer.is_free()
    (torch.Size([5]), [torch.Size([2]), torch.Size([1, 3])], False)
    >>> del parts
    >>> buffer.is_free()
    True
    """

    __slots__ = ("_references", "_storage", "_uses", "flat", "views")

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        # glibc returns free memory above twice the largest mapped block that was ever freed. After
        # this one, the gradients that are copied into the buffer and freed in every step are not
        # returned: to map their pages anew takes a tenth of a step.
        torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=device)
        self.flat, self.views = adjacent_tensors(shapes, dtype, device)
        self._storage = self.flat.untyped_storage()
        self._uses = _use_count(self._storage)
        self._references = sys.getrefcount(self._storage)

    def is_free(self) -> bool:
        """Return True if nothing refers to the memory but the buffer, and it is as large as before.

        A storage that a user holds is one Python object with the buffer's.
        """
        return (
            _use_count(self._storage) == self._uses
            and sys.getrefcount(self._storage) == self._references
            and self._storage.nbytes() == self.flat.nbytes
        )

    def fits(self, shapes: Shapes, dtype: torch.dtype) -> bool:
        """Return True if the buffer was made for tensors like these."""
        return self.flat.dtype == dtype and [view.shape for view in self.views] == [*shapes]

    def parts(self) -> list[torch.Tensor]:
        """Return new tensors of the parts of the memory, which are not views for autograd."""
        return [view.data for view in self.views]


MAX_KEPT = 32
"""Most lists whose buffers are kept, for sizes that change at each step."""
_KEPT: OrderedDict[int, list[FlatBuffer]] = OrderedDict()
"""Lists of buffers by their identities, the list used last at the end."""


def take_buffer(
    buffers: list[FlatBuffer], shapes: Shapes, dtype: torch.dtype, device: torch.device
) -> FlatBuffer:
    """Return the buffer of a list if it is free and fits, else a new one."""
    try:
        buffer = buffers.pop()  # not after a check: another thread may have taken it then
    except IndexError:
        buffer = None
    if buffer is None or not (buffer.is_free() and buffer.fits(shapes, dtype)):
        buffer = FlatBuffer(shapes, dtype, device)
    return buffer


def keep_buffer(buffers: list[FlatBuffer], buffer: FlatBuffer) -> None:
    """Keep a buffer as the only one of a list, and drop that of the list not used longest."""
    buffers[:] = [buffer]
    _KEPT.pop(id(buffers), None)
    _KEPT[id(buffers)] = buffers
    if len(_KEPT) > MAX_KEPT:
        _KEPT.popitem(last=False)[1].clear()


class BufferPool:
    """Function that returns the parts of flat memory, which is used again once it is free.

    >>> buffers = BufferPool([(2,), (1, 3)], torch.float32, torch.device("cpu"))
    >>> first = buffers()
    >>> address = first[0].data_ptr()
    >>> buffers()[0].data_ptr() == address  # `first` is in use
    False
    """

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self.args = shapes, dtype, device
        self.buffers: list[FlatBuffer] = []

    def __call__(self) -> list[torch.Tensor]:
        """Return tensors without values that something else needs."""
        keeps = not torch.is_inference_mode_enabled() and current_dispatch_mode() is None
        if self.args[2].type != "cpu" or not keeps:
            return adjacent_tensors(*self.args)[1]
        buffer = take_buffer(self.buffers, *self.args)
        parts = buffer.parts()
        keep_buffer(self.buffers, buffer)
        return parts
