"""Rules of operations that make one tensor of several, or several that fit each other.

Elements are moved and none computed with. Tensors that are put one after the other along a dim have
it whole: where one ends is not where a shard ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fshard.layout.partition_spec import REDUCTIONS
from fshard.ops.core.builders import align_factors, all_modes, wrap_dim
from fshard.ops.core.call import OpCall, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.view.view_factors import factor_names, letter_dims
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

__all__: list[str] = []

Places = Sequence[int]
"""Of every dim of an operand the dim of the result that it is."""


def joined(call: OpCall, places: Sequence[Places], along: int | None) -> Rule:
    """A rule of operands whose dims are those of one result, all but `along` at once."""
    result = call.result
    own = letter_dims(result.ndim)
    # What is of one element may be made so for tensors of fewer dims: those are given it whole.
    held = [
        any(at in each for each in places)
        and (size != 1 or all(at in each for each in places))
        and (at != along or len(places) == 1)
        for at, size in enumerate(result.shape)
    ]
    made: Dims = tuple(each if kept else () for each, kept in zip(own, held, strict=True))
    operands = tuple(tuple(made[at] for at in each) for each in places)
    return Rule(operands, (made,), modes=all_modes(*range(len(call.operands))))


@register_rule("cat.default", "concat.default", "concatenate.default", "prims::cat")
def cat(call: OpCall) -> Rule:
    """Dims but the one along which they lie; what has no elements may have one dim alone."""
    result = call.result
    dim = wrap_dim(call.get("dim"), result.ndim)
    places = [range(each.ndim) if each.ndim == result.ndim else [dim] for each in call.operands]
    return joined(call, places, dim)


@register_rule("stack", "_stack")
def stack(call: OpCall) -> Rule:
    """The tensors lie along a dim of their own."""
    result = call.result
    dim = wrap_dim(call.get("dim"), result.ndim)
    places = [[at for at in range(result.ndim) if at != dim]] * len(call.operands)
    return joined(call, places, dim)


def _hstack(ndim: int) -> tuple[Places, int]:
    return range(ndim), 0 if ndim <= 1 else 1


def _vstack(ndim: int) -> tuple[Places, int]:
    return ([1] if ndim == 1 else range(ndim)), 0


def _dstack(ndim: int) -> tuple[Places, int]:
    return ([1] if ndim == 1 else range(ndim)), 2


def _column_stack(ndim: int) -> tuple[Places, int]:
    return range(ndim), 1


_STACKS = {
    "hstack": _hstack, "vstack": _vstack, "row_stack": _vstack, "dstack": _dstack,
    "column_stack": _column_stack,
}  # fmt: skip


@register_rule(*_STACKS)
def stacked(call: OpCall) -> Rule:
    """Tensors of few dims are given more, and lie along one of them."""
    places = _STACKS[base_name(call.op)]
    given = [places(each.ndim) for each in call.operands]
    return joined(call, [each for each, _ in given], given[0][1])


@register_rule("pad_sequence")
def padded(call: OpCall) -> Rule:
    """Sequences of different lengths, filled up: what comes after their first dims passes."""
    result = call.result
    rest = letter_dims(result.ndim - 2)
    alike = all_modes(*range(len(call.operands)))
    if call.get("padding_value"):
        alike = tuple(mode for mode in alike if mode.kind not in ("sum", "product"))
    return Rule((((), *rest),) * len(call.operands), (((), (), *rest),), modes=alike)


@register_rule("block_diag", "_chunk_cat", "flatten_dense_tensors")
def blocks(call: OpCall) -> Rule:
    """Tensors that lie beside and below each other are whole."""
    operands = tuple(((),) * each.ndim for each in call.operands)
    results = tuple(((),) * each.ndim for each in call.results if each is not None)
    return Rule(operands, results, modes=all_modes(*range(len(operands))))


@register_rule("cartesian_prod")
def products(call: OpCall) -> Rule:
    """The first tensor's elements are major in the rows."""
    own = factor_names(len(call.operands))
    operands: tuple[Dims, ...] = tuple(((name,),) for name in own)
    rows: Dims = (own, ()) if len(own) > 1 else (own,)
    return Rule(operands, (rows,), modes=all_modes(*range(len(own))))


@register_rule("combinations")
def combinations(call: OpCall) -> Rule:
    """Every element meets all that come after it."""
    return Rule(((("a",),),), (((), ()),), unsharded=frozenset("a"), modes=all_modes(0))


# -- several results, each of one operand -------------------------------------------------


def _each_alone(count: int) -> tuple[Mode, ...]:
    """Modes of operands of which each makes the result of its number: all together, or one."""
    alone = () if count == 1 else tuple(
        Mode((at,), kind, tuple(kind if other == at else None for other in range(count)))
        for at in range(count) for kind in REDUCTIONS
    )  # fmt: skip
    return all_modes(*range(count), results=count) + alone


@register_rule("meshgrid")
def grid(call: OpCall) -> Rule:
    """Every operand is a dim of all results; in Cartesian order the first two change places."""
    n = len(call.operands)
    own = letter_dims(n)
    made = own
    if call.has("indexing") and call.get("indexing") == "xy" and n > 1:
        made = (own[1], own[0], *own[2:])
    operands = tuple(own[at : at + 1] * each.ndim for at, each in enumerate(call.operands))
    made = tuple(dim if any(dim in each for each in operands) else () for dim in made)
    return Rule(operands, (made,) * n, modes=_each_alone(n))


def broadcast_locally(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> list[Any]:
    """Every tensor expanded to what the rank makes of it."""
    return [x.expand(ctx.shape(at)) for at, x in enumerate(args[0])]


@register_rule("broadcast_tensors")
def broadcast(call: OpCall) -> Rule:
    """All results have all dims; an operand those along which it is not repeated."""
    result = call.result
    own = letter_dims(result.ndim)
    operands = tuple(align_factors(each.shape, result.shape, own) for each in call.operands)
    n = len(operands)
    return Rule(operands, (own,) * n, modes=_each_alone(n), local=broadcast_locally)
