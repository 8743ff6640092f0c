"""Rules of operations that read by indices: gather, index_select, advanced indexing, take.

A dim that the indices count may be cut: every rank looks up those that fall into its part and
gives zeros for the rest, an unreduced sum. After Megatron-LM's vocabulary-parallel embedding
(arXiv 1909.08053), which does so for rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import align_factors, dim_factors, wrap_dim
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.index.local_indices import (
    counted,
    factored,
    locate,
    part_of,
    ravelled,
    selecting,
    total_kind,
    unravelled,
)
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_argument

__all__ = ["broadcast_shape", "index_dims", "whole"]


def whole(call: OpCall) -> Rule:
    """A rule without factors: everything is needed whole."""
    operands: tuple[Dims, ...] = tuple(((),) * each.ndim for each in call.operands)
    return Rule(operands, tuple(None if m is None else ((),) * m.ndim for m in call.results))


def broadcast_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that tensors of these shapes broadcast to."""
    return tuple(torch.broadcast_shapes(*map(tuple, shapes)))


@dataclass(frozen=True, slots=True)
class LocalLookup:
    """A lookup in a tensor that is cut along `dim`: zeros for what falls elsewhere.

    `index` is the argument that has the indices, `after` the number of dims that the result has
    after theirs. Indices may count from the end with `negative`.
    """

    dim: int
    index: str
    after: int = 0
    negative: bool = False

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """The lookup on one rank."""
        part = part_of(ctx, 0, self.dim)
        if part.is_whole:
            return op(*args, **kwargs)
        x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, self.index)
        if part.is_empty:
            return x.new_zeros(ctx.shape())
        mine, there = locate(counted(index, part.size) if self.negative else index, part)
        _, placed, named = with_argument(op, args, kwargs, self.index, mine)
        out = op(*placed, **named)
        return out.masked_fill(~there.reshape((*there.shape, *(1,) * self.after)), 0)


# -- gather and index_select ------------------------------------------------------------------


def _gather(call: OpCall) -> Rule:
    """Dims beside the gathered one pass where both have the same size."""
    x, index = call.operands
    dim = wrap_dim(call.get("dim"), x.ndim)
    if x.ndim != index.ndim or not x.ndim:
        return _selected(call)
    same = [at == dim or x.shape[at] == index.shape[at] for at in range(x.ndim)]
    given = tuple(f if ok else () for f, ok in zip(factored(x.ndim, dim, "v"), same, strict=True))
    read = tuple(f if ok else () for f, ok in zip(factored(x.ndim, dim, "k"), same, strict=True))
    made = Rule((given, read), (read,), (("v", total_kind(x)),), modes=selecting(0),
                local=LocalLookup(dim, "index"))  # fmt: skip
    # A sparse gradient is no tensor that can be cut or summed.
    return replace(made, no_grad=frozenset(made.factors)) if call.get("sparse_grad") else made


def _selected(call: OpCall) -> Rule:
    """What a selection passes where nothing can be cut."""
    return replace(whole(call), modes=selecting(0))


def _take_along_dim(call: OpCall) -> Rule:
    """As `gather`, with dims that broadcast; of flattened tensors without a dim."""
    if call.get("dim") is None:
        return _take(call)
    x, index = call.operands
    made = call.result
    dim = wrap_dim(call.get("dim"), made.ndim)
    beside = [1 if at == dim else size for at, size in enumerate(made.shape)]
    there = factored(made.ndim, dim, "")
    given, read = (
        [f if each.shape[at] == beside[at] else () for at, f in enumerate(there)]
        for each in (x, index)
    )
    given[dim], read[dim], there[dim] = ("v",), ("k",), ("k",)
    return Rule((tuple(given), tuple(read)), (tuple(there),), (("v", total_kind(x)),),
                modes=selecting(0), local=LocalLookup(dim, "indices", negative=True))  # fmt: skip


def _index_select(call: OpCall) -> Rule:
    """All dims beside the selected one pass, and so does the index."""
    x, index = call.operands
    if not x.ndim:
        return _selected(call)
    dim = wrap_dim(call.get("dim"), x.ndim)
    made = factored(x.ndim, dim, "k")
    made[dim] = ("k",) if index.ndim else ()
    given: Dims = tuple(factored(x.ndim, dim, "v"))
    return Rule((given, (("k",),) if index.ndim else ()), (tuple(made),), (("v", total_kind(x)),),
                modes=selecting(0),
                local=LocalLookup(dim, "index", x.ndim - dim - 1))  # fmt: skip


# -- take: indices into the flattened tensor --------------------------------------------------


def _taken(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """A lookup in a flattened tensor that is cut along any of its dims."""
    name = "index" if schema_of(op).name == "aten::take" else "indices"
    x, index = argument(op, args, kwargs, "self"), argument(op, args, kwargs, name)
    shape = ctx.operands[0].shape
    parts = [part_of(ctx, 0, dim) for dim in range(len(shape))]
    if all(part.is_whole for part in parts):
        return op(*args, **kwargs)
    if any(part.is_empty for part in parts):
        return x.new_zeros(ctx.shape())
    if name == "index":
        index = counted(index, math.prod(shape))
    mine, there = zip(*map(locate, unravelled(index, shape), parts), strict=True)
    _, placed, named = with_argument(op, args, kwargs, name, ravelled(mine, x.shape))
    held = functools.reduce(torch.logical_and, there)
    return op(*placed, **named).masked_fill(~held.reshape(ctx.shape()), 0)


def _take(call: OpCall) -> Rule:
    """Every dim of the tensor may be cut: its parts are summed."""
    x, index = call.operands
    given, read = dim_factors(x.ndim, "v"), dim_factors(index.ndim, "k")
    flat = schema_of(call.op).name == "aten::take_along_dim"
    made: Dims = (tuple(f for (f,) in read),) if flat else read
    kind = total_kind(x)
    return Rule((given, read), (made,), tuple((f, kind) for (f,) in given), modes=selecting(0),
                local=_taken)  # fmt: skip


# -- advanced indexing ------------------------------------------------------------------------


def index_dims(ndim: int, indices: Sequence[Meta | None]) -> tuple[Dims, Dims, list[Dims], int]:
    """Factors of a tensor that is indexed, of what is read, of each index, and dims after theirs.

    `v` are dims that indices count, `b` those of the indices, `d` the others.
    """
    given = [(f"v{at}",) if at < len(indices) and indices[at] is not None else (f"d{at}",)
             for at in range(ndim)]  # fmt: skip
    counting = [at for at, each in enumerate(indices) if each is not None]
    shape = broadcast_shape([each.shape for each in indices if each is not None])
    read = dim_factors(len(shape), "b")
    own = [align_factors(each.shape, shape, read) for each in indices if each is not None]
    together = counting == list(range(counting[0], counting[0] + len(counting)))
    before = counting[0] if together else 0
    rest = [f for at, f in enumerate(given) if at not in counting]
    made = (*rest[:before], *read, *rest[before:])
    return tuple(given), made, own, len(rest) - before


def _indexed(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Advanced indexing of a tensor that is cut along dims that indices count."""
    x, given = argument(op, args, kwargs, "self"), list(argument(op, args, kwargs, "indices"))
    cut = [at for at, each in enumerate(given) if each is not None and not ctx.is_unsharded(0, at)]
    parts = {at: part_of(ctx, 0, at) for at in cut}
    if all(part.is_whole for part in parts.values()):
        return op(*args, **kwargs)
    if any(part.is_empty for part in parts.values()):
        return x.new_zeros(ctx.shape())
    held: Any = True
    for at, part in parts.items():
        given[at], there = locate(counted(given[at], part.size), part)
        held = there & held
    after = index_dims(x.ndim, given)[-1]
    _, placed, named = with_argument(op, args, kwargs, "indices", given)
    return op(*placed, **named).masked_fill(~held.reshape((*held.shape, *(1,) * after)), 0)


def _index(call: OpCall) -> Rule:
    """Dims that no index counts pass, those of the indices pass, counted ones are summed."""
    x, indices = call.operands[0], call.get("indices")
    if any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices):
        return _selected(call)
    given, made, own, _ = index_dims(x.ndim, indices)
    kind = total_kind(x)
    counting = [f for (f,) in given if f.startswith("v")]
    return Rule((given, *own), (made,), tuple((f, kind) for f in counting), modes=selecting(0),
                local=_indexed)  # fmt: skip


# -- masks and positions ----------------------------------------------------------------------


register_rule("gather")(_gather)
register_rule("take_along_dim")(_take_along_dim)
register_rule("index_select")(_index_select)
register_rule("take")(_take)
register_rule("index.Tensor", "_unsafe_index.Tensor")(_index)
register_rule("nonzero_static")(whole)
