"""Rules of slices and elements: reads, splits and writes.

slice, narrow, select, unbind, split, chunk, tensor_split, slice_scatter, select_scatter and the
gradients of slice and select. A rank holds of a slice what it holds of the dim, possibly another
number of elements on each rank; a selected element is on one rank, an unreduced sum with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fshard.ops.core.builders import all_modes, wrap_dim
from fshard.ops.core.call import OpCall, argument, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule, Slice
from fshard.ops.rules.view.view_factors import factor_names, letter_dims, moved_dims_rule
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
    WithLocalShape,
)

aten = torch.ops.aten


# -- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalSlice(LocalRewrite):
    """Local slice of every `step`-th element of `dim` from the global index `start` on."""

    dim: int
    start: int
    step: int

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """Return the slice in local indices."""
        count = ctx.shape()[self.dim]
        begin = self.start + ctx.result_offset(self.dim) * self.step - ctx.offset(0, self.dim)
        begin = begin if count else 0
        if "narrow" in base_name(op):
            return op, (args[0], self.dim, begin, count), {}
        end = begin + (count - 1) * self.step + 1 if count else 0
        return op, (args[0], self.dim, begin, end, self.step), {}


def _sliced_dims(call: OpCall) -> tuple[int, Dims, Dims, Slice]:
    """Return a slice's dim, the factors of its operand and of its result, and the new factor."""
    x = call.operands[0]
    names = factor_names(x.ndim + 1)
    dim, dims = wrap_dim(call.get("dim"), x.ndim), tuple((name,) for name in names[:-1])
    indices = slice_range(call, x.shape[dim])
    piece = Slice(names[-1], names[dim], indices.start, indices.stop, indices.step)
    return dim, dims, (*dims[:dim], (piece.name,), *dims[dim + 1 :]), piece


@register_rule("slice.Tensor", "slice_copy.Tensor", "narrow.default", "narrow_copy")
def slice_rule(call: OpCall) -> Rule:
    """Rule `ab->ac` of slices, `c` a slice of `b`, by which both may be sharded."""
    x = call.operands[0]
    dim, dims, sliced, piece = _sliced_dims(call)
    local = _LocalSlice(dim, piece.start, piece.step)
    if call.result.shape == x.shape:
        return Rule((dims,), (dims,), modes=all_modes(0), local=local)
    return Rule((dims,), (sliced,), modes=all_modes(0),
                local=local, slices=(piece,))  # fmt: skip


def slice_range(call: OpCall, size: int) -> range:
    """Return the indices that a slice reads of a dim of `size`."""
    if call.has("length"):
        start = call.get("start")
        start += size if start < 0 else 0
        return range(start, start + call.get("length"))
    return range(*slice(call.get("start"), call.get("end"), call.get("step")).indices(size))


def _local_select(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Return the element if it is in this rank's shard, else zeros."""
    x: torch.Tensor = args[0]
    dim = wrap_dim(argument(op, args, kwargs, "dim"), x.ndim)
    index = argument(op, args, kwargs, "index") % ctx.operands[0].shape[dim]
    i = index - ctx.offset(0, dim)
    if 0 <= i < x.shape[dim]:
        return x.select(dim, i)
    return x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype)


@register_rule("select.int", "select_copy.int")
def select(call: OpCall) -> Rule:
    """Rule `ab->a` of `select`: the dim may be sharded; the result is then an unreduced sum."""
    x = call.operands[0]
    dim, names = wrap_dim(call.get("dim"), x.ndim), factor_names(x.ndim)
    dims: Dims = tuple((name,) for name in names)
    kind = "max" if x.dtype == torch.bool else "sum"
    return Rule((dims,), (dims[:dim] + dims[dim + 1 :],), reductions=((names[dim], kind),),
                modes=all_modes(0), local=_local_select)  # fmt: skip


@register_rule("unbind.int", "unbind_copy.int")
def unbind(call: OpCall) -> Rule:
    """Rule `ab->a,a` of `unbind`: the removed dim stays unsharded."""
    ndim = call.operands[0].ndim
    dim = wrap_dim(call.get("dim"), ndim)
    others = [i for i in range(ndim) if i != dim]
    return moved_dims_rule(call, *[others] * len(call.results))


SPLIT_DIM = {"hsplit": 1, "vsplit": 0, "dsplit": 2}


@dataclass(frozen=True, slots=True)
class _LocalSplit(LocalRewrite):
    """Local split: a shard has its part of every piece, one after the other."""

    dim: int

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """Return a split into the pieces' local sizes."""
        sizes = [ctx.shape(i)[self.dim] for i in range(len(ctx.results))]
        copies = base_name(op).endswith("copy")
        split_op = aten.split_with_sizes_copy if copies else aten.split_with_sizes
        return split_op.default, (args[0], sizes, self.dim), {}


SPLITS = """
    split.Tensor split.sizes split.default split_copy.Tensor split_with_sizes
    split_with_sizes_copy unsafe_split.Tensor unsafe_split_with_sizes chunk unsafe_chunk
    tensor_split.sections tensor_split.indices hsplit.int hsplit.array vsplit.int vsplit.array
    dsplit.int dsplit.array
"""


@register_rule(*SPLITS.split())
def split(call: OpCall) -> Rule:
    """Rule `ab->ac,ad` of splits: the pieces `c` and `d` are slices of `b`."""
    x = call.operands[0]
    name = base_name(call.op)
    dim = SPLIT_DIM[name] if name in SPLIT_DIM else wrap_dim(call.get("dim"), x.ndim)
    dim = min(dim, x.ndim - 1)
    names = factor_names(x.ndim + len(call.results))
    dims, pieces, start = tuple((name,) for name in names[: x.ndim]), list[Slice](), 0
    for name, meta in zip(names[x.ndim :], call.results, strict=True):
        assert meta is not None
        pieces.append(Slice(name, names[dim], start, start + meta.shape[dim]))
        start += meta.shape[dim]
    results = tuple((*dims[:dim], (piece.name,), *dims[dim + 1 :]) for piece in pieces)
    if len(pieces) == 1:
        results, pieces = (dims,), []
    return Rule((dims,), results, modes=all_modes(0, results=len(results)), local=_LocalSplit(dim),
                slices=tuple(pieces))  # fmt: skip


# -- writing ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalSliceWrite(LocalRewrite):
    """Local write of the rank's part of a slice into its shard of `dim`."""

    dim: int
    start: int
    step: int

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """Return the write in local indices."""
        src = ctx.operands[1]
        count, offset = (
            values[self.dim] for values in (src.local_shape(ctx.rank), src.offsets(ctx.rank))
        )
        begin = self.start + offset * self.step - ctx.offset(0, self.dim)
        bounds = (begin, begin + (count - 1) * self.step + 1) if count else (0, 0)
        write_op = _complex_slice_scatter if ctx.operands[0].dtype.is_complex else op
        return write_op, (*args[:2], self.dim, *bounds, self.step), {}


def _complex_slice_scatter(
    x: torch.Tensor, src: torch.Tensor, dim: int, start: int, end: int, step: int
) -> torch.Tensor:
    """Return `x` with `src` written; `slice_scatter` has no gradient for complex tensors."""
    result = x.clone()
    torch.ops.aten.slice(result, dim, start, end, step).copy_(src)
    return result


@register_rule("slice_scatter")
def slice_scatter(call: OpCall) -> Rule:
    """Rule `ab,ac->ab` of `slice_scatter`: the dim may be sharded, and the slice with it."""
    x, src = call.operands
    dim, dims, sliced, piece = _sliced_dims(call)
    local = _LocalSliceWrite(dim, piece.start, piece.step)
    if src.shape == x.shape:
        return Rule((dims, dims), (dims,), modes=all_modes(1), local=_replaced,
                    unread=frozenset({0}))  # fmt: skip
    return Rule((dims, sliced), (dims,),
                modes=all_modes(0, 1), local=local, slices=(piece,))  # fmt: skip


def _replaced(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Return `src` if it replaces all of `x`, whose layout is irrelevant."""
    result: torch.Tensor = args[1].to(args[0].dtype, copy=True)
    return result


def _local_select_scatter(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Write the element if it is in this rank's shard."""
    x, src = args[:2]
    dim = wrap_dim(argument(op, args, kwargs, "dim"), x.ndim)
    index = argument(op, args, kwargs, "index") % ctx.operands[0].shape[dim]
    is_element = torch.arange(x.shape[dim], device=x.device) == index - ctx.offset(0, dim)
    is_element = is_element.reshape([-1 if i == dim else 1 for i in range(x.ndim)])
    return torch.where(is_element, src.unsqueeze(dim).to(x.dtype), x)


@register_rule("select_scatter")
def select_scatter(call: OpCall) -> Rule:
    """Rule `ab,a->ab` of `select_scatter`: the dim may be sharded; one rank has the element."""
    x = call.operands[0]
    dim, dims = wrap_dim(call.get("dim"), x.ndim), letter_dims(x.ndim)
    return Rule((dims, dims[:dim] + dims[dim + 1 :]), (dims,), modes=all_modes(0, 1),
                local=_local_select_scatter)  # fmt: skip


@register_rule("slice_backward", "select_backward")
def slice_backward(call: OpCall) -> Rule:
    """Rule of the gradients of slice and select: zeros along the dim, which stays unsharded."""
    grad, result = call.operands[0], call.result
    dim = wrap_dim(call.get("dim"), result.ndim)
    dims = letter_dims(result.ndim)
    others = tuple(() if i == dim else factors for i, factors in enumerate(dims))
    if grad.ndim == result.ndim and grad.shape[dim] == result.shape[dim]:
        return Rule((dims,), (dims,), modes=all_modes(0), local=_copied_gradient)
    grad_dims = others if grad.ndim == result.ndim else others[:dim] + others[dim + 1 :]
    return Rule((grad_dims,), (others,), modes=all_modes(0), local=WithLocalShape("input_sizes"))


def _copied_gradient(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    result: torch.Tensor = args[0].clone()
    return result
