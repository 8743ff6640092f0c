"""TODO."""

from __future__ import annotations

from typing import Any

import torch

from fshard.ops.core.builders import all_modes, wrap_dim
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.view.reshape import ReshapeCall, shape_operand_modes
from fshard.ops.rules.view.view_factors import factor_names, letter_dims
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_local_shape

__all__: list[str] = []


@register_rule("expand", "expand_copy", "expand_as", "broadcast_to")
def expanded(call: OpCall) -> Rule:
    """Dims that are made have a factor that the operand has not."""
    x, result = call.operands[0], call.result
    names = letter_dims(result.ndim)
    more = result.ndim - x.ndim
    own = tuple(
        names[more + at] if size == result.shape[more + at] else ()
        for at, size in enumerate(x.shape)
    )
    return Rule((own, *(names,) * (len(call.operands) - 1)), (names,),
                modes=shape_operand_modes(call),
                local=ReshapeCall(torch.ops.aten.expand.default))  # fmt: skip


@register_rule("prims::broadcast_in_dim")
def broadcast(call: OpCall) -> Rule:
    """Dims go where they are said to; those of one element may be repeated there."""
    x, result = call.operands[0], call.result
    names = letter_dims(result.ndim)
    places = call.get("broadcast_dimensions")
    own = tuple(
        names[at] if size == result.shape[at] else ()
        for at, size in zip(places, x.shape, strict=True)
    )
    return Rule((own,), (names,), modes=all_modes(0), local=with_local_shape("shape"))


def repeat_locally(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Every dim as often as what is made is longer than what is there."""
    x, shape = args[0], ctx.shape()
    more = len(shape) - x.ndim
    times = [
        made if at < more else made // x.shape[at - more] if x.shape[at - more] else 1
        for at, made in enumerate(shape)
    ]
    repeated: torch.Tensor = x.repeat(times)
    return repeated


@register_rule("repeat", "tile")
def repeated(call: OpCall) -> Rule:
    """A dim that is repeated is the times, major, and its own factor."""
    x, result = call.operands[0], call.result
    more = result.ndim - x.ndim
    names = factor_names(x.ndim + result.ndim)
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


def _interleave_locally(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    kept = {key: value for key, value in kwargs.items() if key != "output_size"}
    return op(*args, **kept)


@register_rule("repeat_interleave.self_int")
def interleaved(call: OpCall) -> Rule:
    """Times are minor: an element's copies lie beside each other."""
    x, dim = call.operands[0], call.get("dim")
    names = factor_names(x.ndim + 1)
    own: Dims = tuple((name,) for name in names[:-1])
    if dim is None:
        made: Dims = ((*names[:-1], names[-1]),)
    else:
        at = wrap_dim(dim, x.ndim)
        made = (*own[:at], (*own[at], names[-1]), *own[at + 1 :]) if own else ((names[-1],),)
    return Rule((own,), (made,), unsharded=frozenset(names[-1:]), modes=all_modes(0),
                local=_interleave_locally, sizes=((names[-1], call.get("repeats")),))  # fmt: skip


@register_rule("repeat_interleave.self_Tensor", "repeat_interleave.Tensor")
def interleaved_by(call: OpCall) -> Rule:
    """How often is in a tensor: the dim is whole, and so is what says it."""
    if not call.has("self"):
        return Rule((((),) * call.operands[0].ndim,), (((),),))
    ndim, dim = call.operands[0].ndim, call.get("dim")
    at = None if dim is None else wrap_dim(dim, ndim)
    names = factor_names(ndim)
    own: Dims = tuple((name,) for name in names)
    made: Dims = ((),) if at is None else tuple(() if d == at else own[d] for d in range(ndim))
    lost = frozenset(name for d, name in enumerate(names) if at is None or d == at)
    return Rule(
        (own, ((),) * call.operands[1].ndim),
        (made or ((),),),
        unsharded=lost,
        modes=all_modes(0),
    )
