"""Rules of operations that cut dims into blocks, write into parts, or look at bytes otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from fshard.errors import fail
from fshard.ops.build import linear, moved, wrap
from fshard.ops.call import Call, argument
from fshard.ops.local import Here, resized
from fshard.ops.registry import register_rule
from fshard.ops.reshaping import letters
from fshard.ops.rule import Dims, Rule
from fshard.ops.views import keeping

__all__ = ["unfolded"]

Kwargs = Mapping[str, Any]


def _dims(ndim: int) -> Dims:
    return tuple((name,) for name in letters(ndim))


# -- windows -------------------------------------------------------------------------------


def _unfold_locally(op: Any, args: Any, kwargs: Kwargs, here: Here) -> torch.Tensor:
    """Windows beside each other are a dim of its own; that many of a rank may be none."""
    x: torch.Tensor = args[0]
    dim = wrap(argument(op, args, kwargs, "dimension"), x.ndim)
    size = argument(op, args, kwargs, "size")
    shape = (*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim + 1, -1)


@register_rule("unfold", "unfold_copy", family="views")
def unfolded(call: Call) -> Rule:
    """Windows that lie beside each other and fill the dim are a factor; of others it is whole."""
    x = call.operands[0]
    size, step = call.get("size"), call.get("step")
    if not x.ndim:
        return Rule(((),), (((),),), modes=moved(0))
    dim, own = wrap(call.get("dimension"), x.ndim), _dims(x.ndim)
    if size == step and x.shape[dim] % size == 0:
        inner = letters(x.ndim + 1)[-1]
        blocks = (*own[:dim], (*own[dim], inner), *own[dim + 1 :])
        return Rule((blocks,), ((*own, (inner,)),), whole=frozenset({inner}), modes=moved(0),
                    local=_unfold_locally)  # fmt: skip
    kept = [None if at == dim else at for at in range(x.ndim)]
    return keeping(call, [*kept, None])


def _pixels_locally(op: Any, args: Any, kwargs: Kwargs, here: Here) -> torch.Tensor:
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
def pixels(call: Call) -> Rule:
    """Blocks of pixels between the channels and the image: channels, rows and columns pass."""
    names = letters(call.operands[0].ndim + 2)
    batch: Dims = tuple((name,) for name in names[:-5])
    c, p, q, h, w = names[-5:]
    deep: Dims = (*batch, (c, p, q), (h,), (w,))
    wide: Dims = (*batch, (c,), (h, p), (w, q))
    shuffles = "unshuffle" not in str(call.op)
    times = call.get("upscale_factor" if shuffles else "downscale_factor")
    ends = (deep, wide) if shuffles else (wide, deep)
    return Rule(ends[:1], ends[1:], whole=frozenset({p, q}), modes=moved(0),
                local=_pixels_locally, sizes=((p, times), (q, times)))  # fmt: skip


# -- writing into parts --------------------------------------------------------------------


@register_rule("slice_scatter", "select_scatter", family="views")
def into_part(call: Call) -> Rule:
    """The dim that is written into is whole, but where all of it is; others pass."""
    x, src = call.operands
    dim, own = wrap(call.get("dim"), x.ndim), _dims(x.ndim)
    if src.ndim == x.ndim and src.shape[dim] == x.shape[dim]:
        return Rule((own, own), (own,), modes=moved(0, 1))
    whole = tuple(() if at == dim else each for at, each in enumerate(own))
    part = whole if src.ndim == x.ndim else whole[:dim] + whole[dim + 1 :]
    return Rule((whole, part), (whole,), modes=moved(0, 1))


@register_rule("slice_backward", "select_backward", family="views")
def out_of_part(call: Call) -> Rule:
    """The gradient of a slice: zeros around it along its dim, which is whole."""
    grad, result = call.operands[0], call.results[0]
    assert result is not None
    dim = wrap(call.get("dim"), result.ndim)
    own = _dims(result.ndim)
    whole = tuple(() if at == dim else each for at, each in enumerate(own))
    if grad.ndim == result.ndim and grad.shape[dim] == result.shape[dim]:
        return Rule((own,), (own,), modes=moved(0), local=_same)
    part = whole if grad.ndim == result.ndim else whole[:dim] + whole[dim + 1 :]
    return Rule((part,), (whole,), modes=moved(0), local=resized("input_sizes"))


def _same(op: Any, args: Any, kwargs: Kwargs, here: Here) -> torch.Tensor:
    made: torch.Tensor = args[0].clone()
    return made


@register_rule("unfold_backward", family="views")
def out_of_windows(call: Call) -> Rule:
    """Elements of several windows add up along the dim, which is whole."""
    result = call.results[0]
    assert result is not None
    dim, own = wrap(call.get("dim"), result.ndim), _dims(result.ndim)
    whole = tuple(() if at == dim else each for at, each in enumerate(own))
    return Rule(((*whole, ()),), (whole,), modes=linear(0), local=resized("input_sizes"))


# -- the same bytes ------------------------------------------------------------------------


@register_rule("view.dtype", "view_copy.dtype", family="views")
def bits(call: Call) -> Rule:
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
    return Rule(ends[:1], ends[1:], whole=frozenset({name}), sizes=((name, times),))


@register_rule("view_as_real", "view_as_real_copy", family="views")
def as_real(call: Call) -> Rule:
    """The two parts are a dim of their own."""
    own = _dims(call.operands[0].ndim)
    return Rule((own,), ((*own, ()),), modes=linear(0))


@register_rule("view_as_complex", "view_as_complex_copy", family="views")
def as_complex(call: Call) -> Rule:
    """The last dim holds the two parts of each number."""
    own = _dims(call.operands[0].ndim - 1)
    return Rule(((*own, ()),), (own,), modes=linear(0))


# -- what has no rule ----------------------------------------------------------------------


@register_rule(
    "as_strided", "as_strided_copy", "as_strided_scatter", "resize", "resize_as", family="views"
)
def strided(call: Call) -> NoReturn:
    """Which elements strides of memory reach depends on how the whole tensor lies in memory."""
    shapes = ", ".join(str(list(each.shape)) for each in call.operands)
    fail(f"fs.propagate({call.op})", shapes,
         "strides are of a whole tensor's memory, which no rank has: there is no rule for them",
         "say it with dims: view, permute, expand, slice, diagonal or unfold")  # fmt: skip
