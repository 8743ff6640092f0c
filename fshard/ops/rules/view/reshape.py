"""Rules of operations that cut dims into blocks, write into parts, or look at bytes otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fshard._util.errors import fail
from fshard.ops.core.builders import all_modes, linear_modes, unread_modes, wrap_dim
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.view.view_factors import (
    factor_names,
    letter_dims,
    reshape_factors,
    rule_of_moved_dims,
)
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
    with_local_shape,
)

aten = torch.ops.aten

__all__ = ["ReshapeCall", "shape_operand_modes"]


# -- reshapes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReshapeCall(LocalRewrite):
    """What a rank holds, brought to the shape of what it makes.

    That is by `reshape` also where a `view` is asked for, which its memory may not allow.
    """

    op: Any

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """The call with the shape that the rank makes."""
        return self.op, (args[0], list(ctx.shape())), {}


RESHAPES = """
    view.default view_copy.default _unsafe_view _reshape_alias _reshape_alias_copy _reshape_copy
    reshape flatten unflatten ravel squeeze squeeze_copy unsqueeze unsqueeze_copy reshape_as view_as
    atleast_1d.default atleast_2d.default atleast_3d.default
    prims::reshape prims::squeeze prims::collapse prims::collapse_view prims::split_dim
"""


@register_rule(*RESHAPES.split())
def reshaped(call: OpCall) -> Rule:
    """Dims that are merged are one dim of several factors, and so are those that are split."""
    result = call.result
    found = reshape_factors(call.operands[0].shape, result.shape)
    others = (found.after,) * (len(call.operands) - 1)
    return Rule((found.before, *others), (found.after,), unsharded=found.whole,
                modes=shape_operand_modes(call),
                local=ReshapeCall(aten.reshape.default), sizes=found.sizes)  # fmt: skip


def shape_operand_modes(call: OpCall) -> tuple[Mode, ...]:
    """The modes of what a second operand, if there is one, gives its shape alone."""
    return (
        all_modes(0)
        if len(call.operands) == 1
        else (*all_modes(0), *unread_modes(1), *all_modes(0, 1))
    )


# -- windows -------------------------------------------------------------------------------


def _unfold_locally(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Windows beside each other are a dim of its own; that many of a rank may be none."""
    x: torch.Tensor = args[0]
    dim = wrap_dim(argument(op, args, kwargs, "dimension"), x.ndim)
    size = argument(op, args, kwargs, "size")
    shape = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim + 1, -1)


@register_rule("unfold", "unfold_copy")
def unfolded(call: OpCall) -> Rule:
    """Windows that lie beside each other and fill the dim are a factor; of others it is whole."""
    x = call.operands[0]
    size, step = call.get("size"), call.get("step")
    if not x.ndim:
        return Rule(((),), (((),),), modes=all_modes(0))
    dim, own = wrap_dim(call.get("dimension"), x.ndim), letter_dims(x.ndim)
    if size == step and x.shape[dim] % size == 0:
        inner = factor_names(x.ndim + 1)[-1]
        blocks = (*own[:dim], (*own[dim], inner), *own[dim + 1 :])
        return Rule((blocks,), ((*own, (inner,)),), unsharded=frozenset({inner}),
                    modes=all_modes(0),
                    local=_unfold_locally)  # fmt: skip
    kept = [None if at == dim else at for at in range(x.ndim)]
    return rule_of_moved_dims(call, [*kept, None])


@register_rule("unfold_backward")
def out_of_windows(call: OpCall) -> Rule:
    """Elements of several windows add up along the dim, which is whole."""
    result = call.result
    dim, own = wrap_dim(call.get("dim"), result.ndim), letter_dims(result.ndim)
    whole = tuple(() if at == dim else each for at, each in enumerate(own))
    return Rule(
        ((*whole, ()),), (whole,), modes=linear_modes(0), local=with_local_shape("input_sizes")
    )


def _pixels_locally(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Blocks as dims: of tensors without elements the operation loses the sizes."""
    x, shape = args[0], ctx.shape()
    batch, order = x.shape[:-3], tuple(range(x.ndim - 3))
    if "unshuffle" not in str(op):
        times = argument(op, args, kwargs, "upscale_factor")
        blocks = (shape[-3], times, times, *x.shape[-2:])
        places = (0, 3, 1, 4, 2)
    else:
        times = argument(op, args, kwargs, "downscale_factor")
        blocks = (x.shape[-3], shape[-2], times, shape[-1], times)
        places = (0, 2, 4, 1, 3)
    made: torch.Tensor = x.reshape(*batch, *blocks)
    return made.permute(*order, *(len(order) + at for at in places)).reshape(shape)


@register_rule("pixel_shuffle", "pixel_unshuffle")
def pixels(call: OpCall) -> Rule:
    """Blocks of pixels between the channels and the image: channels, rows and columns pass."""
    names = factor_names(call.operands[0].ndim + 2)
    batch: Dims = tuple((name,) for name in names[:-5])
    c, p, q, h, w = names[-5:]
    deep: Dims = (*batch, (c, p, q), (h,), (w,))
    wide: Dims = (*batch, (c,), (h, p), (w, q))
    shuffles = "unshuffle" not in str(call.op)
    times = call.get("upscale_factor" if shuffles else "downscale_factor")
    ends = (deep, wide) if shuffles else (wide, deep)
    return Rule(ends[:1], ends[1:], unsharded=frozenset({p, q}), modes=all_modes(0),
                local=_pixels_locally, sizes=((p, times), (q, times)))  # fmt: skip


# -- writing into parts --------------------------------------------------------------------


# -- the same bytes ------------------------------------------------------------------------


@register_rule("view.dtype", "view_copy.dtype")
def bits(call: OpCall) -> Rule:
    """Bytes of another dtype: the last dim has more or fewer elements; nothing is linear."""
    x, result = call.operands[0], call.result
    own = letter_dims(x.ndim)
    if not x.ndim or x.shape[-1] == result.shape[-1]:
        return Rule((own,), (own,))
    name = factor_names(x.ndim + 1)[-1]
    split = (*own[:-1], (*own[-1], name))
    shorter = x.dtype.itemsize > result.dtype.itemsize
    times = max(x.dtype.itemsize, result.dtype.itemsize) // min(
        x.dtype.itemsize, result.dtype.itemsize
    )
    ends = (own, split) if shorter else (split, own)
    return Rule(ends[:1], ends[1:], unsharded=frozenset({name}), sizes=((name, times),))


@register_rule("view_as_real", "view_as_real_copy")
def as_real(call: OpCall) -> Rule:
    """The two parts are a dim of their own."""
    own = letter_dims(call.operands[0].ndim)
    return Rule((own,), ((*own, ()),), modes=linear_modes(0))


@register_rule("view_as_complex", "view_as_complex_copy")
def as_complex(call: OpCall) -> Rule:
    """The last dim holds the two parts of each number."""
    own = letter_dims(call.operands[0].ndim - 1)
    return Rule(((*own, ()),), (own,), modes=linear_modes(0))


# -- what has no rule ----------------------------------------------------------------------


@register_rule("as_strided", "as_strided_copy", "as_strided_scatter", "resize", "resize_as")
def strided(call: OpCall) -> NoReturn:
    """Which elements strides of memory reach depends on how the whole tensor lies in memory."""
    shapes = ", ".join(str(list(each.shape)) for each in call.operands)
    fail(f"fs.propagate({call.op})", shapes,
         "strides are of a whole tensor's memory, which no rank has: there is no rule for them",
         "say it with dims: view, permute, expand, slice, diagonal or unfold")  # fmt: skip
