"""Rules of operations that give the elements of one tensor in another shape.

All elements are moved and none computed with, so that unreduced operands of every kind pass.
Reshapes, and what takes dims, adds them or puts them in another order, run on parts with shapes of
parts. Of a slice every rank has what it has of the dim, which may be another number on each; a
single element is on one rank, and is a sum with zeros of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard.ops.core.builders import all_modes, normalize_dims, unread_modes, wrap_dim
from fshard.ops.core.call import Meta, OpCall, argument, base_name, dry_run
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule, Slice
from fshard.ops.rules.view.view_factors import letters, reshaping
from fshard.ops.strategy.local_call import LocalCall, LocalRewrite, RankContext, with_local_shape

__all__ = ["elements", "keeping", "reshaped"]

aten = torch.ops.aten

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


def _rows(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def keeping(
    call: OpCall,
    *results: Sequence[int | None],
    permuted: Iterable[int] = (),
    shapes: int = 0,
    local: Any = None,
) -> Rule:
    """A rule of one operand whose dims go to results: of every result's dim the one it is.

    Dims that are not in all results are whole. `shapes` operands more are laid as the results.
    """
    ndim = call.operands[0].ndim
    names = letters(ndim)
    made = tuple(tuple(() if at is None else (names[at],) for at in dims) for dims in results)
    lost = {at for at in range(ndim) if not all(at in dims for dims in results)}
    return Rule(
        (tuple((name,) for name in names), *made[:1] * shapes),
        made,
        unsharded=frozenset(names[at] for at in lost),
        permuted=frozenset(names[at] for at in permuted),
        modes=all_modes(0, results=len(results)),
        local=local,
    )


# -- reshapes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shaped(LocalRewrite):
    """What a rank holds, brought to the shape of what it makes.

    That is by `reshape` also where a `view` is asked for, which its memory may not allow.
    """

    op: Any

    def call(self, op: Any, args: Sequence[Any], kwargs: Kwargs, here: RankContext) -> LocalCall:
        """The call with the shape that the rank makes."""
        return self.op, (args[0], list(here.shape())), {}


_RESHAPED, _EXPANDED = _Shaped(aten.reshape.default), _Shaped(aten.expand.default)


@register_rule(
    *_rows("""
    view.default view_copy.default _unsafe_view _reshape_alias _reshape_alias_copy _reshape_copy
    reshape flatten unflatten ravel squeeze squeeze_copy unsqueeze unsqueeze_copy reshape_as view_as
    atleast_1d.default atleast_2d.default atleast_3d.default
    prims::reshape prims::squeeze prims::collapse prims::collapse_view prims::split_dim
"""),
    family="views",
)
def reshaped(call: OpCall) -> Rule:
    """Dims that are merged are one dim of several factors, and so are those that are split."""
    result = call.results[0]
    assert result is not None
    found = reshaping(call.operands[0].shape, result.shape)
    others = (found.after,) * (len(call.operands) - 1)
    return Rule((found.before, *others), (found.after,), unsharded=found.whole, modes=_shaped(call),
                local=_RESHAPED, sizes=found.sizes)  # fmt: skip


def _shaped(call: OpCall) -> tuple[Mode, ...]:
    """The modes of what a second operand, if there is one, gives its shape alone."""
    return (
        all_modes(0)
        if len(call.operands) == 1
        else (*all_modes(0), *unread_modes(1), *all_modes(0, 1))
    )


# -- other orders of dims ------------------------------------------------------------------


@register_rule(
    *_rows("""
    permute permute_copy transpose.int transpose_copy.int t t_copy mT mH numpy_T matrix_H adjoint
    swapaxes swapdims movedim moveaxis prims::transpose
"""),
    family="views",
)
def permuting(call: OpCall) -> Rule:
    """Where every dim goes is asked of the operation, on a tensor with no two sizes alike."""
    sizes = range(2, 2 + call.operands[0].ndim)
    marked = Meta(tuple(sizes), call.operands[0].dtype)
    shape = dry_run(call.op, (marked, *call.args[1:]), call.kwargs, "meta").shape
    return keeping(call, [size - 2 for size in shape])


@register_rule("flip", "fliplr", "flipud", "prims::rev", family="views")
def flipped(call: OpCall) -> Rule:
    """The dims that are turned around keep their elements on other ranks."""
    name, ndim = base_name(call.op), call.operands[0].ndim
    at = {"fliplr": [1], "flipud": [0]}.get(name)
    dims = call.args[1] if at is None and call.args[1:] else call.kwargs.get("dims", at)
    turned = [wrap_dim(dim, ndim) for dim in dims or ()]
    return keeping(call, range(ndim), permuted=_long(call, turned))


@register_rule("roll", family="views")
def rolled(call: OpCall) -> Rule:
    """Without dims the whole tensor is rolled as one dim; all around it, it stays as it is."""
    x, given = call.operands[0], call.get("dims")
    ndim, shifts = x.ndim, call.get("shifts")
    dims: Iterable[int] = normalize_dims(given, ndim)
    if given and x.ndim:
        pairs = zip(dims, shifts if isinstance(shifts, list | tuple) else [shifts], strict=True)
        dims = [dim for dim, shift in pairs if x.shape[dim] and shift % x.shape[dim]]
    return keeping(call, range(ndim), permuted=_long(call, dims))


@register_rule("rot90", family="views")
def turned(call: OpCall) -> Rule:
    """A quarter is a transpose and one dim turned around, a half is both dims turned around."""
    ndim, quarters = call.operands[0].ndim, call.get("k") % 4
    one, other = (wrap_dim(dim, ndim) for dim in call.get("dims"))
    order = list(range(ndim))
    if quarters % 2:
        order[one], order[other] = other, one
    moving = ((), (other,), (one, other), (one,))[quarters]
    return keeping(call, order, permuted=_long(call, moving))


def _long(call: OpCall, dims: Iterable[int]) -> list[int]:
    """Of dims those of more than one element: in others there is nothing to move."""
    return [dim for dim in dims if call.operands[0].ndim and call.operands[0].shape[dim] > 1]


@register_rule("channel_shuffle", "native_channel_shuffle", family="views")
def shuffled(call: OpCall) -> Rule:
    """Channels change places all over their dim."""
    return keeping(call, range(call.operands[0].ndim), permuted=[1])


# -- parts of dims -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sliced(LocalRewrite):
    """What a rank has of a slice of `dim`: every `step`-th element from `start` on in the whole."""

    dim: int
    start: int
    step: int

    def call(self, op: Any, args: Sequence[Any], kwargs: Kwargs, here: RankContext) -> LocalCall:
        """The slice as the rank counts its elements."""
        count = here.shape()[self.dim]
        begin = self.start + here.result_offset(self.dim) * self.step - here.offset(0, self.dim)
        begin = begin if count else 0
        if "narrow" in base_name(op):
            return op, (args[0], self.dim, begin, count), {}
        end = begin + (count - 1) * self.step + 1 if count else 0
        return op, (args[0], self.dim, begin, end, self.step), {}


@register_rule("slice.Tensor", "slice_copy.Tensor", "narrow.default", "narrow_copy", family="views")
def sliced(call: OpCall) -> Rule:
    """The dim that is sliced stays cut: every rank has what it has of it."""
    x, made = call.operands[0], call.results[0]
    assert made is not None
    names = letters(x.ndim + 1)
    dim, own = wrap_dim(call.get("dim"), x.ndim), tuple((name,) for name in names[:-1])
    taken = elements(call, x.shape[dim])
    local = _Sliced(dim, taken.start, taken.step)
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


def select_locally(op: Any, args: Args, kwargs: Kwargs, here: RankContext) -> torch.Tensor:
    """The element where it is on this rank, else zeros, as a sum of no elements."""
    x: torch.Tensor = args[0]
    dim = wrap_dim(argument(op, args, kwargs, "dim"), x.ndim)
    index = argument(op, args, kwargs, "index") % here.operands[0].shape[dim]
    at = index - here.offset(0, dim)
    if 0 <= at < x.shape[dim]:
        return x.select(dim, at)
    return x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype)


@register_rule("select.int", "select_copy.int", family="views")
def selected(call: OpCall) -> Rule:
    """One rank has the elements, which are a sum then: of zeros on all others."""
    x = call.operands[0]
    dim, names = wrap_dim(call.get("dim"), x.ndim), letters(x.ndim)
    own: Dims = tuple((name,) for name in names)
    kind = "max" if x.dtype == torch.bool else "sum"
    return Rule((own,), (own[:dim] + own[dim + 1 :],), reductions=((names[dim], kind),),
                modes=all_modes(0), local=select_locally)  # fmt: skip


@register_rule("unbind.int", "unbind_copy.int", family="views")
def unbound(call: OpCall) -> Rule:
    """The dim that goes is whole."""
    ndim = call.operands[0].ndim
    dim = wrap_dim(call.get("dim"), ndim)
    kept = [at for at in range(ndim) if at != dim]
    return keeping(call, *[kept] * len(call.results))


SPLITS = {"hsplit": 1, "vsplit": 0, "dsplit": 2}


@dataclass(frozen=True, slots=True)
class _Split(LocalRewrite):
    """A rank's part of every piece: they lie one after the other there, too."""

    dim: int

    def call(self, op: Any, args: Sequence[Any], kwargs: Kwargs, here: RankContext) -> LocalCall:
        """A split in the sizes that the pieces have on the rank."""
        sizes = [here.shape(at)[self.dim] for at in range(len(here.results))]
        copies = base_name(op).endswith("copy")
        run = aten.split_with_sizes_copy if copies else aten.split_with_sizes
        return run.default, (args[0], sizes, self.dim), {}


@register_rule(
    *_rows("""
    split.Tensor split.sizes split.default split_copy.Tensor split_with_sizes
    split_with_sizes_copy unsafe_split.Tensor unsafe_split_with_sizes chunk unsafe_chunk
    tensor_split.sections tensor_split.indices hsplit.int hsplit.array vsplit.int vsplit.array
    dsplit.int dsplit.array
"""),
    family="views",
)
def split(call: OpCall) -> Rule:
    """Every piece is a slice of the dim, which stays cut: every rank has its part of each."""
    x = call.operands[0]
    name = base_name(call.op)
    dim = SPLITS[name] if name in SPLITS else wrap_dim(call.get("dim"), x.ndim)
    dim = min(dim, x.ndim - 1)
    names = letters(x.ndim + len(call.results))
    own, pieces, begin = tuple((each,) for each in names[: x.ndim]), list[Slice](), 0
    for each, made in zip(names[x.ndim :], call.results, strict=True):
        assert made is not None
        pieces.append(Slice(each, names[dim], begin, begin + made.shape[dim]))
        begin += made.shape[dim]
    results = tuple((*own[:dim], (each.name,), *own[dim + 1 :]) for each in pieces)
    if len(pieces) == 1:
        results, pieces = (own,), []
    return Rule((own,), results, modes=all_modes(0, results=len(results)), local=_Split(dim),
                slices=tuple(pieces))  # fmt: skip


# -- more elements -------------------------------------------------------------------------


@register_rule(*_rows("expand expand_copy expand_as broadcast_to"), family="views")
def expanded(call: OpCall) -> Rule:
    """Dims that are made have a factor that the operand has not."""
    x, result = call.operands[0], call.results[0]
    assert result is not None
    names: Dims = tuple((name,) for name in letters(result.ndim))
    more = result.ndim - x.ndim
    own = tuple(
        names[more + at] if size == result.shape[more + at] else ()
        for at, size in enumerate(x.shape)
    )
    return Rule((own, *(names,) * (len(call.operands) - 1)), (names,), modes=_shaped(call),
                local=_EXPANDED)  # fmt: skip


@register_rule("prims::broadcast_in_dim", family="views")
def broadcast(call: OpCall) -> Rule:
    """Dims go where they are said to; those of one element may be repeated there."""
    x, result = call.operands[0], call.results[0]
    assert result is not None
    names: Dims = tuple((name,) for name in letters(result.ndim))
    places = call.get("broadcast_dimensions")
    own = tuple(
        names[at] if size == result.shape[at] else ()
        for at, size in zip(places, x.shape, strict=True)
    )
    return Rule((own,), (names,), modes=all_modes(0), local=with_local_shape("shape"))


def repeat_locally(op: Any, args: Args, kwargs: Kwargs, here: RankContext) -> torch.Tensor:
    """Every dim as often as what is made is longer than what is there."""
    x, shape = args[0], here.shape()
    more = len(shape) - x.ndim
    times = [
        made if at < more else made // x.shape[at - more] if x.shape[at - more] else 1
        for at, made in enumerate(shape)
    ]
    repeated: torch.Tensor = x.repeat(times)
    return repeated


@register_rule("repeat", "tile", family="views")
def repeated(call: OpCall) -> Rule:
    """A dim that is repeated is the times, major, and its own factor."""
    x, result = call.operands[0], call.results[0]
    assert result is not None
    more = result.ndim - x.ndim
    names = letters(x.ndim + result.ndim)
    times = iter(names[x.ndim :])
    operand, made = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for at, size in enumerate(result.shape):
        own = (names[at - more],) if at >= more else ()
        if own and x.shape[at - more] == size:
            operand.append(own)
            made.append(own)
        elif own and x.shape[at - more] != 1:
            operand.append(own)
            made.append((next(times), *own))
        else:
            operand += [()] * len(own)
            made.append((next(times),))
    sizes = tuple((dims[0], size // x.shape[at - more]) for at, (dims, size)
                  in enumerate(zip(made, result.shape, strict=True)) if len(dims) == 2
                  and x.shape[at - more])  # fmt: skip
    return Rule((tuple(operand),), (tuple(made),), modes=all_modes(0), local=repeat_locally,
                sizes=sizes)  # fmt: skip


def _interleave_locally(op: Any, args: Args, kwargs: Kwargs, here: RankContext) -> Any:
    kept = {key: value for key, value in kwargs.items() if key != "output_size"}
    return op(*args, **kept)


@register_rule("repeat_interleave.self_int", family="views")
def interleaved(call: OpCall) -> Rule:
    """Times are minor: an element's copies lie beside each other."""
    x, dim = call.operands[0], call.get("dim")
    names = letters(x.ndim + 1)
    own: Dims = tuple((name,) for name in names[:-1])
    if dim is None:
        made: Dims = ((*names[:-1], names[-1]),)
    else:
        at = wrap_dim(dim, x.ndim)
        made = (*own[:at], (*own[at], names[-1]), *own[at + 1 :]) if own else ((names[-1],),)
    return Rule((own,), (made,), unsharded=frozenset(names[-1:]), modes=all_modes(0),
                local=_interleave_locally, sizes=((names[-1], call.get("repeats")),))  # fmt: skip


@register_rule("repeat_interleave.self_Tensor", "repeat_interleave.Tensor", family="views")
def interleaved_by(call: OpCall) -> Rule:
    """How often is in a tensor: the dim is whole, and so is what says it."""
    if not call.has("self"):
        return Rule((((),) * call.operands[0].ndim,), (((),),))
    ndim, dim = call.operands[0].ndim, call.get("dim")
    at = None if dim is None else wrap_dim(dim, ndim)
    names = letters(ndim)
    own: Dims = tuple((name,) for name in names)
    made: Dims = ((),) if at is None else tuple(() if d == at else own[d] for d in range(ndim))
    lost = frozenset(name for d, name in enumerate(names) if at is None or d == at)
    return Rule(
        (own, ((),) * call.operands[1].ndim), (made or ((),),), unsharded=lost, modes=all_modes(0)
    )
