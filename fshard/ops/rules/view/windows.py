"""Rules of operations that cut dims into blocks, write into parts, or look at bytes otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from fshard._util.errors import fail
from fshard.ops.core.builders import all_modes, linear_modes, wrap_dim
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule, Slice
from fshard.ops.rules.view.view_factors import letters
from fshard.ops.rules.view.views import elements, keeping
from fshard.ops.strategy.local_call import LocalCall, LocalRewrite, RankContext, with_local_shape

__all__ = ["unfolded"]

Kwargs = Mapping[str, Any]


def _dims(ndim: int) -> Dims:
    return tuple((name,) for name in letters(ndim))


# -- windows -------------------------------------------------------------------------------


def _unfold_locally(op: Any, args: Any, kwargs: Kwargs, here: RankContext) -> torch.Tensor:
    """Windows beside each other are a dim of its own; that many of a rank may be none."""
    x: torch.Tensor = args[0]
    dim = wrap_dim(argument(op, args, kwargs, "dimension"), x.ndim)
    size = argument(op, args, kwargs, "size")
    shape = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim + 1, -1)


@register_rule("unfold", "unfold_copy", family="views")
def unfolded(call: OpCall) -> Rule:
    """Windows that lie beside each other and fill the dim are a factor; of others it is whole."""
    x = call.operands[0]
    size, step = call.get("size"), call.get("step")
    if not x.ndim:
        return Rule(((),), (((),),), modes=all_modes(0))
    dim, own = wrap_dim(call.get("dimension"), x.ndim), _dims(x.ndim)
    if size == step and x.shape[dim] % size == 0:
        inner = letters(x.ndim + 1)[-1]
        blocks = (*own[:dim], (*own[dim], inner), *own[dim + 1 :])
        return Rule((blocks,), ((*own, (inner,)),), unsharded=frozenset({inner}),
                    modes=all_modes(0),
                    local=_unfold_locally)  # fmt: skip
    kept = [None if at == dim else at for at in range(x.ndim)]
    return keeping(call, [*kept, None])


def _pixels_locally(op: Any, args: Any, kwargs: Kwargs, here: RankContext) -> torch.Tensor:
    """Blocks as dims: of tensors without elements the operation loses the sizes."""
    x, shape = args[0], here.shape()
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


@register_rule("pixel_shuffle", "pixel_unshuffle", family="views")
def pixels(call: OpCall) -> Rule:
    """Blocks of pixels between the channels and the image: channels, rows and columns pass."""
    names = letters(call.operands[0].ndim + 2)
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


@dataclass(frozen=True, slots=True)
class _Into(LocalRewrite):
    """What a rank has of a slice of `dim`, written into what it has of the dim."""

    dim: int
    start: int
    step: int

    def call(self, op: Any, args: Any, kwargs: Kwargs, here: RankContext) -> LocalCall:
        """The slice as the rank counts its elements."""
        src = here.operands[1]
        count, at = (
            each[self.dim] for each in (src.local_shape(here.rank), src.offsets(here.rank))
        )
        begin = self.start + at * self.step - here.offset(0, self.dim)
        ends = (begin, begin + (count - 1) * self.step + 1) if count else (0, 0)
        run = _into_complex if here.operands[0].dtype.is_complex else op
        return run, (*args[:2], self.dim, *ends, self.step), {}


def _into_complex(
    x: torch.Tensor, src: torch.Tensor, dim: int, start: int, end: int, step: int
) -> torch.Tensor:
    """The operation has no gradient of complex numbers, a write has."""
    made = x.clone()
    torch.ops.aten.slice(made, dim, start, end, step).copy_(src)
    return made


@register_rule("slice_scatter", family="views")
def into_slice(call: OpCall) -> Rule:
    """The dim that is written into stays cut, and the slice is cut with it."""
    x, src = call.operands
    names = letters(x.ndim + 1)
    dim, own = wrap_dim(call.get("dim"), x.ndim), tuple((name,) for name in names[:-1])
    taken = elements(call, x.shape[dim])
    local = _Into(dim, taken.start, taken.step)
    if src.shape == x.shape:
        return Rule((own, own), (own,), modes=all_modes(1), local=_all_of, unread=frozenset({0}))
    part = Slice(names[-1], names[dim], taken.start, taken.stop, taken.step)
    return Rule((own, (*own[:dim], (part.name,), *own[dim + 1 :])), (own,), modes=all_modes(0, 1),
                local=local, slices=(part,))  # fmt: skip


def _all_of(op: Any, args: Any, kwargs: Kwargs, here: RankContext) -> torch.Tensor:
    """What is written over all that was there, which may lie otherwise."""
    made: torch.Tensor = args[1].to(args[0].dtype, copy=True)
    return made


def _into_one(op: Any, args: Any, kwargs: Kwargs, here: RankContext) -> torch.Tensor:
    """The element where it is on this rank; the others leave what they have."""
    x, src = args[:2]
    dim = wrap_dim(argument(op, args, kwargs, "dim"), x.ndim)
    index = argument(op, args, kwargs, "index") % here.operands[0].shape[dim]
    places = torch.arange(x.shape[dim], device=x.device) == index - here.offset(0, dim)
    places = places.reshape([-1 if at == dim else 1 for at in range(x.ndim)])
    return torch.where(places, src.unsqueeze(dim).to(x.dtype), x)


@register_rule("select_scatter", family="views")
def into_element(call: OpCall) -> Rule:
    """The dim that is written into stays cut: one rank has the element."""
    x = call.operands[0]
    dim, own = wrap_dim(call.get("dim"), x.ndim), _dims(x.ndim)
    return Rule((own, own[:dim] + own[dim + 1 :]), (own,), modes=all_modes(0, 1), local=_into_one)


@register_rule("slice_backward", "select_backward", family="views")
def out_of_part(call: OpCall) -> Rule:
    """The gradient of a slice: zeros around it along its dim, which is whole."""
    grad, result = call.operands[0], call.results[0]
    assert result is not None
    dim = wrap_dim(call.get("dim"), result.ndim)
    own = _dims(result.ndim)
    whole = tuple(() if at == dim else each for at, each in enumerate(own))
    if grad.ndim == result.ndim and grad.shape[dim] == result.shape[dim]:
        return Rule((own,), (own,), modes=all_modes(0), local=_same)
    part = whole if grad.ndim == result.ndim else whole[:dim] + whole[dim + 1 :]
    return Rule((part,), (whole,), modes=all_modes(0), local=with_local_shape("input_sizes"))


def _same(op: Any, args: Any, kwargs: Kwargs, here: RankContext) -> torch.Tensor:
    made: torch.Tensor = args[0].clone()
    return made


@register_rule("unfold_backward", family="views")
def out_of_windows(call: OpCall) -> Rule:
    """Elements of several windows add up along the dim, which is whole."""
    result = call.results[0]
    assert result is not None
    dim, own = wrap_dim(call.get("dim"), result.ndim), _dims(result.ndim)
    whole = tuple(() if at == dim else each for at, each in enumerate(own))
    return Rule(
        ((*whole, ()),), (whole,), modes=linear_modes(0), local=with_local_shape("input_sizes")
    )


# -- the same bytes ------------------------------------------------------------------------


@register_rule("view.dtype", "view_copy.dtype", family="views")
def bits(call: OpCall) -> Rule:
    """Bytes of another dtype: the last dim has more or fewer elements; nothing is linear."""
    x, result = call.operands[0], call.results[0]
    assert result is not None
    own = _dims(x.ndim)
    if not x.ndim or x.shape[-1] == result.shape[-1]:
        return Rule((own,), (own,))
    name = letters(x.ndim + 1)[-1]
    split = (*own[:-1], (*own[-1], name))
    shorter = x.dtype.itemsize > result.dtype.itemsize
    times = max(x.dtype.itemsize, result.dtype.itemsize) // min(
        x.dtype.itemsize, result.dtype.itemsize
    )
    ends = (own, split) if shorter else (split, own)
    return Rule(ends[:1], ends[1:], unsharded=frozenset({name}), sizes=((name, times),))


@register_rule("view_as_real", "view_as_real_copy", family="views")
def as_real(call: OpCall) -> Rule:
    """The two parts are a dim of their own."""
    own = _dims(call.operands[0].ndim)
    return Rule((own,), ((*own, ()),), modes=linear_modes(0))


@register_rule("view_as_complex", "view_as_complex_copy", family="views")
def as_complex(call: OpCall) -> Rule:
    """The last dim holds the two parts of each number."""
    own = _dims(call.operands[0].ndim - 1)
    return Rule(((*own, ()),), (own,), modes=linear_modes(0))


# -- what has no rule ----------------------------------------------------------------------


@register_rule(
    "as_strided", "as_strided_copy", "as_strided_scatter", "resize", "resize_as", family="views"
)
def strided(call: OpCall) -> NoReturn:
    """Which elements strides of memory reach depends on how the whole tensor lies in memory."""
    shapes = ", ".join(str(list(each.shape)) for each in call.operands)
    fail(f"fs.propagate({call.op})", shapes,
         "strides are of a whole tensor's memory, which no rank has: there is no rule for them",
         "say it with dims: view, permute, expand, slice, diagonal or unfold")  # fmt: skip
