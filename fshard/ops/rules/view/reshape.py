"""Rules of operations that reinterpret a tensor's shape or bytes.

view, reshape, flatten, unflatten, ravel, squeeze, unsqueeze, atleast_1d, unfold, pixel_shuffle,
pixel_unshuffle, view of another dtype, view_as_real, view_as_complex; as_strided and resize are
refused. Elements are only moved, so that unreduced operands of every kind pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fshard._torch.operators import dereference, reference_of
from fshard._util.errors import fail
from fshard.ops.core.builders import all_modes, linear_modes, unread_modes
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.view.view_factors import factor_names, letter_dims, reshape_factors
from fshard.ops.strategy.local_call import Args, Kwargs, LocalCall, LocalRewrite, RankContext

aten = torch.ops.aten

# -- reshapes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReshapeCall(LocalRewrite):
    """Local reshape or expand to the local shape of the result.

    A `view` becomes a `reshape`: the shard's memory may not allow a view.
    """

    op: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _reshape_call, (reference_of(self.op),)

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """Return the call with the rank's shape."""
        return self.op, (args[0], list(ctx.shape())), {}


def _reshape_call(reference: Any) -> ReshapeCall:
    return ReshapeCall(dereference(reference))


RESHAPES = """
    view.default view_copy.default _unsafe_view _reshape_alias _reshape_alias_copy _reshape_copy
    reshape flatten unflatten ravel squeeze squeeze_copy unsqueeze unsqueeze_copy reshape_as view_as
    atleast_1d.default atleast_2d.default atleast_3d.default
    prims::reshape prims::squeeze prims::collapse prims::collapse_view prims::split_dim
"""


@register_rule(*RESHAPES.split())
def reshape(call: OpCall) -> Rule:
    """Rule `abc->(ab)c` of reshapes: merged and split dims are products of factors."""
    result = call.result
    factors = reshape_factors(call.operands[0].shape, result.shape)
    shapes = (factors.after,) * (len(call.operands) - 1)
    return Rule((factors.before, *shapes), (factors.after,), unsharded=factors.unsharded,
                modes=shape_operand_modes(call),
                local=ReshapeCall(aten.reshape.default), sizes=factors.sizes)  # fmt: skip


def shape_operand_modes(call: OpCall) -> tuple[Mode, ...]:
    """Return the modes of a moved operand and of a second one that gives its shape alone."""
    return (
        all_modes(0)
        if len(call.operands) == 1
        else (*all_modes(0), *unread_modes(1), *all_modes(0, 1))
    )


# -- blocks --------------------------------------------------------------------------------


def _local_pixel_shuffle(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Move blocks by a permutation; PyTorch's operation loses sizes of empty tensors."""
    x, shape = args[0], ctx.shape()
    batch, order = x.shape[:-3], tuple(range(x.ndim - 3))
    if "unshuffle" not in str(op):
        factor = argument(op, args, kwargs, "upscale_factor")
        blocks = (shape[-3], factor, factor, *x.shape[-2:])
        places = (0, 3, 1, 4, 2)
    else:
        factor = argument(op, args, kwargs, "downscale_factor")
        blocks = (x.shape[-3], shape[-2], factor, shape[-1], factor)
        places = (0, 2, 4, 1, 3)
    blocks_first: torch.Tensor = x.reshape(*batch, *blocks)
    return blocks_first.permute(*order, *(len(order) + i for i in places)).reshape(shape)


@register_rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(call: OpCall) -> Rule:
    """Rule `a(bcd)ef->ab(ec)(fd)` of pixel shuffles: blocks `cd` stay unsharded."""
    names = factor_names(call.operands[0].ndim + 2)
    batch: Dims = tuple((name,) for name in names[:-5])
    c, p, q, h, w = names[-5:]
    deep: Dims = (*batch, (c, p, q), (h,), (w,))
    wide: Dims = (*batch, (c,), (h, p), (w, q))
    shuffles = "unshuffle" not in str(call.op)
    factor = call.get("upscale_factor" if shuffles else "downscale_factor")
    ends = (deep, wide) if shuffles else (wide, deep)
    return Rule(ends[:1], ends[1:], unsharded=frozenset({p, q}), modes=all_modes(0),
                local=_local_pixel_shuffle, sizes=((p, factor), (q, factor)))  # fmt: skip


# -- writing into parts --------------------------------------------------------------------


# -- the same bytes ------------------------------------------------------------------------


@register_rule("view.dtype", "view_copy.dtype")
def view_dtype(call: OpCall) -> Rule:
    """Rule of a view of another dtype: the last dim grows or shrinks; nothing is linear."""
    x, result = call.operands[0], call.result
    dims = letter_dims(x.ndim)
    if not x.ndim or x.shape[-1] == result.shape[-1]:
        return Rule((dims,), (dims,))
    name = factor_names(x.ndim + 1)[-1]
    split = (*dims[:-1], (*dims[-1], name))
    shorter = x.dtype.itemsize > result.dtype.itemsize
    ratio = max(x.dtype.itemsize, result.dtype.itemsize) // min(
        x.dtype.itemsize, result.dtype.itemsize
    )
    ends = (dims, split) if shorter else (split, dims)
    return Rule(ends[:1], ends[1:], unsharded=frozenset({name}), sizes=((name, ratio),))


@register_rule("view_as_real", "view_as_real_copy")
def as_real(call: OpCall) -> Rule:
    """Rule `ab->ab1` of `view_as_real`: real and imaginary part are a new unsharded dim."""
    dims = letter_dims(call.operands[0].ndim)
    return Rule((dims,), ((*dims, ()),), modes=linear_modes(0))


@register_rule("view_as_complex", "view_as_complex_copy")
def as_complex(call: OpCall) -> Rule:
    """Rule of `view_as_complex`: the last dim, real and imaginary part, stays unsharded."""
    dims = letter_dims(call.operands[0].ndim - 1)
    return Rule(((*dims, ()),), (dims,), modes=linear_modes(0))


# -- what has no rule ----------------------------------------------------------------------


@register_rule("as_strided", "as_strided_copy", "as_strided_scatter", "resize", "resize_as")
def strided(call: OpCall) -> NoReturn:
    """Refuse strides, whose elements depend on the global tensor's memory."""
    shapes = ", ".join(str(list(meta.shape)) for meta in call.operands)
    fail(f"fs.propagate({call.op})", shapes,
         "strides must not be used: they address the global tensor's memory, which no rank has",
         "use operations on dims: view, permute, expand, slice, diagonal or unfold")  # fmt: skip
