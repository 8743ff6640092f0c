"""Rules of operations that write by indices: scatter, index_add, index_put, put.

A dim that the indices count may be cut: every rank writes what falls into its part, and the rest
into a row that is dropped. Where they add, the indices may be cut too: the tensor that is added
to counts on the first rank, and zeros on the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import align_factors, dim_factors, is_inexact, wrap_dim
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.index.gather import index_dims, whole
from fshard.ops.rules.index.local_indices import (
    as_first,
    counted,
    factored,
    filled,
    locate,
    padded,
    part_of,
    ravelled,
    selecting,
    summing,
    unpadded,
    unravelled,
)
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_argument

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class LocalWrite:
    """A tensor that is written to along `dim`, which may be cut, at indices that may be cut.

    `counting` is the dim of the index operand along which they may be cut, where that adds: what
    is written to then counts once. Indices may count from the end with `negative`. `values` is the
    argument that is multiplied: by ones where it falls elsewhere, lest the products overflow there,
    and their gradients be no numbers.
    """

    dim: int
    counting: int | None = None
    negative: bool = False
    values: str = ""

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """The write on one rank."""
        x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "index")
        if self.counting is not None:
            x = as_first(x, ctx, 1, (self.counting,))
        part = part_of(ctx, 0, self.dim)
        if not part.is_whole:
            index = filled(counted(index, part.size) if self.negative else index, part)
            x = padded(x, self.dim)
        _, placed, named = with_argument(op, args, kwargs, "self", x)
        _, placed, named = with_argument(op, placed, named, "index", index)
        if self.values and not part.is_whole:
            given = argument(op, args, kwargs, self.values)
            beside = (1,) * (given.ndim - self.dim - 1) if index.ndim < given.ndim else ()
            there = index.reshape((*index.shape, *beside)) != 0
            ones = torch.where(there, given, 1)
            _, placed, named = with_argument(op, placed, named, self.values, ones)
        out = op(*placed, **named)
        return out if part.is_whole else unpadded(out, self.dim)


def _names(call: OpCall) -> tuple[str, str]:
    """What an operation does with what it writes, and the reduction that parts of it need.

    That is none where the parts would not make the whole.
    """
    name = schema_of(call.op).name.removeprefix("aten::")
    if name in ("scatter_add", "index_add"):
        return "sum", "sum"
    if name in ("scatter_reduce", "index_reduce"):
        kind = call.get("reduce")
        parts = {"sum": "sum", "amax": "max", "amin": "min"}.get(kind, "")
        return kind, parts if call.get("include_self") else ""
    if name == "scatter" and call.has("reduce"):
        return call.get("reduce"), ""
    return "copy", ""


def _modes(call: OpCall, kind: str, values: int | None) -> tuple[Mode, ...]:
    """What passes unreduced: sums are linear in both operands together, copies pick elements."""
    whole_mean = kind == "mean" and not is_inexact(call.results[0])
    if kind in ("sum", "mean") and values is not None and not whole_mean:
        return summing(0, values)
    if kind in ("amax", "amin") and values is not None:
        one = kind.removeprefix("a")
        return (Mode((0, values), one, (one,)),)
    if kind == "copy" and values is not None:
        return (selecting(0, values) + selecting(0, constant=True)
                + selecting(values, constant=True))  # fmt: skip
    return selecting(0, constant=True) if kind == "copy" else ()


# -- scatter: an index for every element ------------------------------------------------------


def _scatter(call: OpCall) -> Rule:
    """Dims beside the scattered one pass where all operands have the same size."""
    x, index = call.operands[:2]
    values = call.operands[2] if len(call.operands) > 2 else None
    kind, parts = _names(call)
    modes = _modes(call, kind, 2 if values is not None else None)
    tensors = [x, index] + ([] if values is None else [values])
    if not x.ndim or any(each.ndim != x.ndim for each in tensors):
        return replace(whole(call), modes=modes)
    dim = wrap_dim(call.get("dim"), x.ndim)

    def dims(factor: str) -> Dims:
        named = factored(x.ndim, dim, factor)
        same = [at == dim or all(x.shape[at] == each.shape[at] for each in tensors)
                for at in range(x.ndim)]  # fmt: skip
        return tuple(f if ok else () for f, ok in zip(named, same, strict=True))

    many = values is None or values.shape[dim] == index.shape[dim]
    read = dims("k") if many else tuple(() if at == dim else f for at, f in enumerate(dims("k")))
    operands = (dims("v"), read) + (() if values is None else (read,))
    local = LocalWrite(dim, values="src" if kind == "prod" and values is not None else "")
    return _written(operands, dims("v"), parts if many else "", modes, local, dim)


def _written(
    operands: tuple[Dims, ...],
    made: Dims,
    parts: str,
    modes: tuple[Mode, ...],
    local: LocalWrite,
    at: int,
) -> Rule:
    """The rule of a write whose indices, along their dim `at`, may be cut where `parts` says."""
    # Extremes share their gradient among ties: those of one part are not all of them.
    grad = frozenset({"k"} if parts in ("max", "min") else ())
    if parts == "sum":
        local = replace(local, counting=at)
    return Rule(operands, (made,), (("k", parts),) if parts else (), modes=modes, no_grad=grad,
                local=local)  # fmt: skip


# -- index_add and its like: an index for every slice -----------------------------------------


def _index_write(call: OpCall) -> Rule:
    """Dims beside the written one pass."""
    x, index = call.operands[:2]
    kind, parts = _names(call)
    name = next((name for name in ("source", "value") if call.has(name)), None)
    values = None if name is None else call.operand_index(name)
    modes = _modes(call, kind, values)
    name = schema_of(call.op).name.removeprefix("aten::")
    if not x.ndim:
        return replace(whole(call), modes=modes)
    dim = wrap_dim(call.get("dim"), x.ndim)
    given = tuple(factored(x.ndim, dim, "v"))
    read: Dims = (("k",),) * index.ndim
    operands: tuple[Dims, ...] = (given, read)
    if values is not None:
        source = call.operands[values]
        beside = tuple(factored(x.ndim, dim, "k")) if source.ndim == x.ndim else ((),) * source.ndim
        if not index.ndim:
            beside = tuple(() if at == dim else f for at, f in enumerate(beside))
        operands += (beside if name != "index_fill" else (),)
    if values is not None and name != "index_fill" and call.operands[values].ndim != x.ndim:
        return replace(whole(call), modes=modes)
    local = LocalWrite(
        dim, negative=name == "index_fill", values="source" if kind == "prod" else ""
    )
    return _written(operands, given, parts if index.ndim else "", modes, local, 0)


# -- index_put --------------------------------------------------------------------------------


def _put_at(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Advanced indexing that writes into a tensor that is cut along dims that indices count."""
    x, given = argument(op, args, kwargs, "self"), list(argument(op, args, kwargs, "indices"))
    counting = [at for at, each in enumerate(given) if each is not None]
    if argument(op, args, kwargs, "accumulate"):
        for place in range(1, len(counting) + 1):
            x = as_first(x, ctx, place, range(len(ctx.operands[place].shape)))
    cut = [at for at in counting if not part_of(ctx, 0, at).is_whole]
    for at in cut:
        part = part_of(ctx, 0, at)
        given[at] = filled(counted(given[at], part.size), part)
        x = padded(x, at)
    _, placed, named = with_argument(op, args, kwargs, "self", x)
    _, placed, named = with_argument(op, placed, named, "indices", given)
    out = op(*placed, **named)
    for at in cut:
        out = unpadded(out, at)
    return out


def _index_put(call: OpCall) -> Rule:
    """Counted dims pass, and so do others; dims of the indices are summed where they accumulate."""
    x, indices, values = call.operands[0], call.get("indices"), call.operands[-1]
    sums = call.get("accumulate")
    modes = _modes(call, "sum" if sums else "copy", len(call.operands) - 1)
    there = [each for each in indices if each is not None]
    if not there:
        return replace(whole(call), modes=modes)
    if any(each.dtype in (torch.bool, torch.uint8) for each in there):
        return _masked_put(call, modes)
    given, made, own, _ = index_dims(x.ndim, indices)
    sizes = _sizes(made, (given, x.shape), *zip(own, (each.shape for each in there), strict=True))
    read = align_factors(values.shape, sizes, made)
    summed = {f for dims in own for dim in dims for f in dim}
    reductions = tuple((f, "sum") for f in sorted(summed)) if sums else ()
    return Rule((given, *own, read), (given,), reductions, modes=modes, local=_put_at)


def _sizes(made: Dims, *known: tuple[Dims, Sequence[int]]) -> tuple[int, ...]:
    """The shape of a tensor of these factors, from tensors that have them too."""
    sizes = {
        dim: size for dims, shape in known for dim, size in zip(dims, shape, strict=True) if dim
    }
    return tuple(sizes.get(dim, 1) for dim in made)


def _masked_put(call: OpCall, modes: tuple[Mode, ...]) -> Rule:
    """One mask: the dims that it covers pass where every element gets the same value."""
    x, indices, values = call.operands[0], call.get("indices"), call.operands[-1]
    at = next(place for place, each in enumerate(indices) if each is not None)
    mask = indices[at]
    if len(call.operands) != 3 or mask.dtype != torch.bool:
        return replace(whole(call), modes=modes)
    given = dim_factors(x.ndim)
    slot = x.ndim - at - mask.ndim
    same = values.ndim <= slot or values.shape[-slot - 1] == 1
    if not same:
        given = (*given[:at], *((),) * mask.ndim, *given[at + mask.ndim :])
    covered = given[at : at + mask.ndim]
    made = (*given[:at], (), *given[at + mask.ndim :])
    read = align_factors(values.shape, (*x.shape[:at], -1, *x.shape[at + mask.ndim :]), made)
    return Rule((given, covered, read), (given,), modes=modes)


# -- put: indices into the flattened tensor ---------------------------------------------------


def _put_flat(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Writing into a flattened tensor that is cut along any of its dims."""
    x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "index")
    shape = ctx.operands[0].shape
    if argument(op, args, kwargs, "accumulate"):
        x = as_first(x, ctx, 1, range(len(ctx.operands[1].shape)))
    parts = [part_of(ctx, 0, dim) for dim in range(len(shape))]
    if not all(part.is_whole for part in parts):
        apart = unravelled(counted(index, math.prod(shape)), shape)
        mine, there = zip(*map(locate, apart, parts), strict=True)
        held = functools.reduce(torch.logical_and, there)
        away = mine[0].clamp(max=0) * (x.numel() + 2)
        index = torch.where(held, ravelled(mine, x.shape) + 1, away)
        flat = padded(x.reshape(-1), 0)
        _, placed, named = with_argument(op, args, kwargs, "self", flat)
        _, placed, named = with_argument(op, placed, named, "index", index)
        return unpadded(op(*placed, **named), 0).reshape(x.shape)
    _, placed, named = with_argument(op, args, kwargs, "self", x)
    return op(*placed, **named)


def _put(call: OpCall) -> Rule:
    """Every dim of the tensor passes; those of the index are summed where they accumulate."""
    x, index, source = call.operands
    sums = call.get("accumulate")
    given, read = dim_factors(x.ndim, "v"), dim_factors(index.ndim, "k")
    modes = _modes(call, "sum" if sums else "copy", 2)
    if index.shape != source.shape:
        return replace(whole(call), modes=modes)
    reductions = tuple((f, "sum") for (f,) in read) if sums else ()
    return Rule((given, read, read), (given,), reductions, modes=modes, local=_put_flat)


# -- masks -----------------------------------------------------------------------------------


def _masked_scatter(call: OpCall) -> Rule:
    """The next element of the source for every one that is masked: nothing can be cut."""
    return replace(whole(call), modes=selecting(0, 2) + selecting(0, constant=True)
                   + selecting(2, constant=True))  # fmt: skip


register_rule("masked_scatter")(_masked_scatter)
register_rule("scatter", "scatter_add", "scatter_reduce")(_scatter)
register_rule("index_add", "index_copy", "index_fill", "index_reduce")(_index_write)
register_rule("index_put", "_unsafe_index_put", "_index_put_impl")(_index_put)
register_rule("put")(_put)
