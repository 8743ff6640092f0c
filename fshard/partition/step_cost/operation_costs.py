"""FLOPs and bytes of one operation of PyTorch on one device, from the shapes of its tensors.

Products, convolutions and attention have the formulas of `torch.utils.flop_counter`: two operations
for each multiplication that is added up, eight for a complex one, and attention counts without its
mask. Other operations count one for each element of their largest tensor, copies and rearrangements
none. Every tensor is read or written once; an operation that reads rows by index reads as many as
it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fshard._torch.operators import schema_or_none
from fshard._util.dtypes import is_inexact, multiplication_flops
from fshard.layout.tree import tensors_in

aten = torch.ops.aten
MOVES = frozenset((
    aten.cat, aten.stack, aten.clone, aten.copy_, aten.copy, aten.contiguous, aten._to_copy,
    aten.fill_, aten.zero_, aten.zeros, aten.ones, aten.full, aten.zeros_like, aten.ones_like,
    aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.arange, aten.eye,
    aten.embedding, aten.index, aten.index_select, aten.gather, aten.slice_backward,
    aten.select_backward, aten.constant_pad_nd, aten.roll, aten.flip, aten.repeat, aten.tril,
    aten.triu, aten.masked_select, aten.nonzero, aten._foreach_copy_, aten.one_hot,
    aten.split_with_sizes_copy, aten.scalar_tensor, aten.lift_fresh, aten.diagonal_backward,
    aten.unfold_backward, aten.as_strided_scatter, aten.slice_scatter, aten.select_scatter,
    aten.reflection_pad2d, aten.replication_pad2d, aten.im2col, aten.pixel_shuffle,
))  # fmt: skip
"""Operations that compute nothing."""
EMPTY = frozenset((
    aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided,
    aten.empty_permuted,
))  # fmt: skip
"""Operations that only allocate."""
CREATIONS = frozenset((
    aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
    aten.new_zeros, aten.new_ones, aten.new_full,
))  # fmt: skip
"""Operations that read no values of their first operand."""
ROWS = frozenset((aten.embedding, aten.index, aten.index_select, aten.gather, aten.masked_select))
"""Operations that read a part of their first operand, as much as they return."""
OVERWRITES = frozenset((aten.copy_, aten.fill_, aten.zero_))
"""Operations that do not read their first operand, which they write."""
PRODUCTS = {aten.mv: 0, aten.addmv: 1, aten.dot: 0, aten.vdot: 0}
"""Products with a vector: twice the elements of the operand before the vector, by its index."""


class OperationCost(NamedTuple):
    """FLOPs of an operation, bytes that it reads and writes, and the dtype that it computes in.

    `is_product` is True for products, convolutions and attention.
    """

    flops: int
    nbytes: int
    dtype: torch.dtype
    is_product: bool


def operation_cost(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> OperationCost | None:
    """Return the cost of a call of an operation that has run; None if it runs nothing.

    Args:
        op: the overload.
        args: the arguments, with tensors of any kind.
        kwargs: the keyword arguments.
        out: the result.

    >>> x, w = torch.empty(4, 8), torch.empty(8, 2)
    >>> operation_cost(aten.mm.default, (x, w), {}, x @ w)
    OperationCost(flops=128, nbytes=224, dtype=torch.float32, is_product=True)
    >>> y = torch.empty(4, 2)
    >>> operation_cost(aten.mm.out, (x, w), {"out": y}, y).nbytes
    224
    >>> operation_cost(aten.t.default, (x,), {}, x.t()) is None
    True
    """
    packet = getattr(op, "overloadpacket", op)
    read_kwargs = {name: x for name, x in kwargs.items() if name != "out"}
    results, operands = [*tensors_in(out)], [*tensors_in((args, read_kwargs))]
    if packet in EMPTY or _is_view(op):
        return None
    results = results or _written(op, args)
    if not results:
        return None
    flops = _flops(packet, args, kwargs, out, (*operands, *results))
    written = _nbytes(results)
    if packet in ROWS:
        read = written + _nbytes(operands[1:])
    elif packet in CREATIONS:
        read = 0
    else:
        read = _nbytes(operands[1:] if packet in OVERWRITES else operands)
    computed = [x for x in (*operands, *results) if is_inexact(x)] or results
    is_product = packet in _formulas() or packet in PRODUCTS
    return OperationCost(flops, read + written, computed[0].dtype, is_product)


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; a dim that repeats memory counts once."""
    return sum(x.itemsize * _stored(x) for x in tensors)


def _stored(x: torch.Tensor) -> int:
    if x.layout is not torch.strided:
        return x.numel()
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride or not size)


def _written(op: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation without results writes, as fused optimizers do."""
    schema = schema_or_none(op)
    parameters = schema.arguments if schema is not None else ()
    return [
        x for parameter, arg in zip(parameters, args, strict=False)
        if parameter.alias_info is not None and parameter.alias_info.is_write
        for x in tensors_in(arg)
    ]  # fmt: skip


def _flops(
    packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any,
    tensors: Sequence[torch.Tensor],
) -> int:  # fmt: skip
    formula = _formulas().get(packet)
    if formula is not None:
        return _real_share(tensors) * int(formula(*args, **kwargs, out_val=out))
    if packet in PRODUCTS:
        return _real_share(tensors) * 2 * int(args[PRODUCTS[packet]].numel())
    if packet in MOVES:
        return 0
    if args and isinstance(args[0], list | tuple):  # one operation for every tensor of a list
        return sum(x.numel() for x in tensors_in(args[0]))
    return max(x.numel() for x in tensors)


def _real_share(tensors: Iterable[torch.Tensor]) -> int:
    """Return the real operations of one that formulas count."""
    return multiplication_flops(next(iter(tensors)).dtype) // 2


@lru_cache(maxsize=1)
def _formulas() -> dict[Any, Callable[..., int]]:
    """Return the formulas of PyTorch's counter, and those that it lacks of operations on the CPU.

    They are attention, and layers of LSTMs: a product with both weights for each row and step.
    """
    from torch.utils.flop_counter import (  # the import takes a while
        flop_registry,
        sdpa_backward_flop_count,
        sdpa_flop_count,
    )

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(q.shape, k.shape, v.shape))

    def attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))

    def recurrent(x: Any, weight: Any, hidden: Any, *_: Any, **__: Any) -> int:
        return int(2 * math.prod(x.shape[:-1]) * (weight.numel() + hidden.numel()))

    return {
        **flop_registry,
        aten.mkldnn_rnn_layer: recurrent,
        aten.mkldnn_rnn_layer_backward: lambda *args, **options: 2 * recurrent(*args, **options),
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


@lru_cache(maxsize=4096)
def _is_view(op: Any) -> bool:
    """Return True for operations whose results are views of operands."""
    schema = schema_or_none(op)
    returns = schema.returns if schema is not None else ()
    views = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
    return bool(views) and all(views)
