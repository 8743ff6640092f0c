"""Rules of operations that give the elements of one tensor in another shape.

All elements are moved and none computed with, so that unreduced operands of every kind pass.
Reshapes, and what takes dims, adds them or puts them in another order, run on parts with shapes of
parts. Of a slice every rank has what it has of the dim, which may be another number on each; a
single element is on one rank, and is a sum with zeros of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fshard.ops.core.builders import all_modes, wrap_dim
from fshard.ops.core.call import OpCall, argument, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule, Slice
from fshard.ops.rules.view.view_factors import factor_names, letter_dims, rule_of_moved_dims
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
    with_local_shape,
)

__all__: list[str] = []

aten = torch.ops.aten


# -- reshapes ------------------------------------------------------------------------------


# -- other orders of dims ------------------------------------------------------------------


# -- parts of dims -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalSlice(LocalRewrite):
    """What a rank has of a slice of `dim`: every `step`-th element from `start` on in the whole."""

    dim: int
    start: int
    step: int

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """The slice as the rank counts its elements."""
        count = ctx.shape()[self.dim]
        begin = self.start + ctx.result_offset(self.dim) * self.step - ctx.offset(0, self.dim)
        begin = begin if count else 0
        if "narrow" in base_name(op):
            return op, (args[0], self.dim, begin, count), {}
        end = begin + (count - 1) * self.step + 1 if count else 0
        return op, (args[0], self.dim, begin, end, self.step), {}


@register_rule("slice.Tensor", "slice_copy.Tensor", "narrow.default", "narrow_copy")
def sliced(call: OpCall) -> Rule:
    """The dim that is sliced stays cut: every rank has what it has of it."""
    x, made = call.operands[0], call.result
    names = factor_names(x.ndim + 1)
    dim, own = wrap_dim(call.get("dim"), x.ndim), tuple((name,) for name in names[:-1])
    taken = elements(call, x.shape[dim])
    local = _LocalSlice(dim, taken.start, taken.step)
    if made.shape == x.shape:
        return Rule((own,), (own,), modes=all_modes(0), local=local)
    part = Slice(names[-1], names[dim], taken.start, taken.stop, taken.step)
    return Rule((own,), ((*own[:dim], (part.name,), *own[dim + 1 :]),), modes=all_modes(0),
                local=local, slices=(part,))  # fmt: skip


def elements(call: OpCall, size: int) -> range:
    """The places that a slice takes of a dim of that size."""
    if call.has("length"):
        start = call.get("start")
        start += size if start < 0 else 0
        return range(start, start + call.get("length"))
    return range(*slice(call.get("start"), call.get("end"), call.get("step")).indices(size))


def select_locally(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """The element where it is on this rank, else zeros, as a sum of no elements."""
    x: torch.Tensor = args[0]
    dim = wrap_dim(argument(op, args, kwargs, "dim"), x.ndim)
    index = argument(op, args, kwargs, "index") % ctx.operands[0].shape[dim]
    at = index - ctx.offset(0, dim)
    if 0 <= at < x.shape[dim]:
        return x.select(dim, at)
    return x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype)


@register_rule("select.int", "select_copy.int")
def selected(call: OpCall) -> Rule:
    """One rank has the elements, which are a sum then: of zeros on all others."""
    x = call.operands[0]
    dim, names = wrap_dim(call.get("dim"), x.ndim), factor_names(x.ndim)
    own: Dims = tuple((name,) for name in names)
    kind = "max" if x.dtype == torch.bool else "sum"
    return Rule((own,), (own[:dim] + own[dim + 1 :],), reductions=((names[dim], kind),),
                modes=all_modes(0), local=select_locally)  # fmt: skip


@register_rule("unbind.int", "unbind_copy.int")
def unbound(call: OpCall) -> Rule:
    """The dim that goes is whole."""
    ndim = call.operands[0].ndim
    dim = wrap_dim(call.get("dim"), ndim)
    kept = [at for at in range(ndim) if at != dim]
    return rule_of_moved_dims(call, *[kept] * len(call.results))


SPLIT_DIM = {"hsplit": 1, "vsplit": 0, "dsplit": 2}


@dataclass(frozen=True, slots=True)
class _LocalSplit(LocalRewrite):
    """A rank's part of every piece: they lie one after the other there, too."""

    dim: int

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """A split in the sizes that the pieces have on the rank."""
        sizes = [ctx.shape(at)[self.dim] for at in range(len(ctx.results))]
        copies = base_name(op).endswith("copy")
        run = aten.split_with_sizes_copy if copies else aten.split_with_sizes
        return run.default, (args[0], sizes, self.dim), {}


SPLITS = """
    split.Tensor split.sizes split.default split_copy.Tensor split_with_sizes
    split_with_sizes_copy unsafe_split.Tensor unsafe_split_with_sizes chunk unsafe_chunk
    tensor_split.sections tensor_split.indices hsplit.int hsplit.array vsplit.int vsplit.array
    dsplit.int dsplit.array
"""


@register_rule(*SPLITS.split())
def split(call: OpCall) -> Rule:
    """Every piece is a slice of the dim, which stays cut: every rank has its part of each."""
    x = call.operands[0]
    name = base_name(call.op)
    dim = SPLIT_DIM[name] if name in SPLIT_DIM else wrap_dim(call.get("dim"), x.ndim)
    dim = min(dim, x.ndim - 1)
    names = factor_names(x.ndim + len(call.results))
    own, pieces, begin = tuple((each,) for each in names[: x.ndim]), list[Slice](), 0
    for each, made in zip(names[x.ndim :], call.results, strict=True):
        assert made is not None
        pieces.append(Slice(each, names[dim], begin, begin + made.shape[dim]))
        begin += made.shape[dim]
    results = tuple((*own[:dim], (each.name,), *own[dim + 1 :]) for each in pieces)
    if len(pieces) == 1:
        results, pieces = (own,), []
    return Rule((own,), results, modes=all_modes(0, results=len(results)), local=_LocalSplit(dim),
                slices=tuple(pieces))  # fmt: skip


# -- more elements -------------------------------------------------------------------------


# -- writing into slices and elements --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalSliceWrite(LocalRewrite):
    """What a rank has of a slice of `dim`, written into what it has of the dim."""

    dim: int
    start: int
    step: int

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """The slice as the rank counts its elements."""
        src = ctx.operands[1]
        count, at = (each[self.dim] for each in (src.local_shape(ctx.rank), src.offsets(ctx.rank)))
        begin = self.start + at * self.step - ctx.offset(0, self.dim)
        ends = (begin, begin + (count - 1) * self.step + 1) if count else (0, 0)
        run = _into_complex if ctx.operands[0].dtype.is_complex else op
        return run, (*args[:2], self.dim, *ends, self.step), {}


def _into_complex(
    x: torch.Tensor, src: torch.Tensor, dim: int, start: int, end: int, step: int
) -> torch.Tensor:
    """The operation has no gradient of complex numbers, a write has."""
    made = x.clone()
    torch.ops.aten.slice(made, dim, start, end, step).copy_(src)
    return made


@register_rule("slice_scatter")
def into_slice(call: OpCall) -> Rule:
    """The dim that is written into stays cut, and the slice is cut with it."""
    x, src = call.operands
    names = factor_names(x.ndim + 1)
    dim, own = wrap_dim(call.get("dim"), x.ndim), tuple((name,) for name in names[:-1])
    taken = elements(call, x.shape[dim])
    local = _LocalSliceWrite(dim, taken.start, taken.step)
    if src.shape == x.shape:
        return Rule((own, own), (own,), modes=all_modes(1), local=_all_of, unread=frozenset({0}))
    part = Slice(names[-1], names[dim], taken.start, taken.stop, taken.step)
    return Rule((own, (*own[:dim], (part.name,), *own[dim + 1 :])), (own,), modes=all_modes(0, 1),
                local=local, slices=(part,))  # fmt: skip


def _all_of(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """What is written over all that was there, which may lie otherwise."""
    made: torch.Tensor = args[1].to(args[0].dtype, copy=True)
    return made


def _into_one(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """The element where it is on this rank; the others leave what they have."""
    x, src = args[:2]
    dim = wrap_dim(argument(op, args, kwargs, "dim"), x.ndim)
    index = argument(op, args, kwargs, "index") % ctx.operands[0].shape[dim]
    places = torch.arange(x.shape[dim], device=x.device) == index - ctx.offset(0, dim)
    places = places.reshape([-1 if at == dim else 1 for at in range(x.ndim)])
    return torch.where(places, src.unsqueeze(dim).to(x.dtype), x)


@register_rule("select_scatter")
def into_element(call: OpCall) -> Rule:
    """The dim that is written into stays cut: one rank has the element."""
    x = call.operands[0]
    dim, own = wrap_dim(call.get("dim"), x.ndim), letter_dims(x.ndim)
    return Rule((own, own[:dim] + own[dim + 1 :]), (own,), modes=all_modes(0, 1), local=_into_one)


@register_rule("slice_backward", "select_backward")
def out_of_part(call: OpCall) -> Rule:
    """The gradient of a slice: zeros around it along its dim, which is whole."""
    grad, result = call.operands[0], call.result
    dim = wrap_dim(call.get("dim"), result.ndim)
    own = letter_dims(result.ndim)
    whole = tuple(() if at == dim else each for at, each in enumerate(own))
    if grad.ndim == result.ndim and grad.shape[dim] == result.shape[dim]:
        return Rule((own,), (own,), modes=all_modes(0), local=_same)
    part = whole if grad.ndim == result.ndim else whole[:dim] + whole[dim + 1 :]
    return Rule((part,), (whole,), modes=all_modes(0), local=with_local_shape("input_sizes"))


def _same(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    made: torch.Tensor = args[0].clone()
    return made
