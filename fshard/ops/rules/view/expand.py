"""Rules of operations that repeat elements.

expand, expand_as, broadcast_to, broadcast_in_dim, repeat, tile, repeat_interleave.
"""

from __future__ import annotations

from typing import Any

import torch

from fshard.ops.core.builders import all_modes, wrap_dim
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.view.reshape import ReshapeCall, shape_operand_modes
from fshard.ops.rules.view.view_factors import factor_names, letter_dims
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, WithLocalShape


@register_rule("expand", "expand_copy", "expand_as", "broadcast_to")
def expand(call: OpCall) -> Rule:
    """Rule `a1->ab` of expansions: new dims have a factor that the operand lacks."""
    x, result = call.operands[0], call.result
    names = letter_dims(result.ndim)
    lead = result.ndim - x.ndim
    dims = tuple(
        names[lead + i] if size == result.shape[lead + i] else () for i, size in enumerate(x.shape)
    )
    return Rule((dims, *(names,) * (len(call.operands) - 1)), (names,),
                modes=shape_operand_modes(call),
                local=ReshapeCall(torch.ops.aten.expand.default))  # fmt: skip


@register_rule("prims::broadcast_in_dim")
def broadcast_in_dim(call: OpCall) -> Rule:
    """Rule of `broadcast_in_dim`: dims are placed as listed, and dims of size 1 may be repeated."""
    x, result = call.operands[0], call.result
    names = letter_dims(result.ndim)
    result_dims = call.get("broadcast_dimensions")
    dims = tuple(
        names[i] if size == result.shape[i] else ()
        for i, size in zip(result_dims, x.shape, strict=True)
    )
    return Rule((dims,), (names,), modes=all_modes(0), local=WithLocalShape("shape"))


def _local_repeat(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    """Repeat each dim by the ratio of the result's local size to the operand's."""
    x, shape = args[0], ctx.shape()
    lead = len(shape) - x.ndim
    times = [
        size if i < lead else size // x.shape[i - lead] if x.shape[i - lead] else 1
        for i, size in enumerate(shape)
    ]
    repeated: torch.Tensor = x.repeat(times)
    return repeated


@register_rule("repeat", "tile")
def repeat(call: OpCall) -> Rule:
    """Rule `ab->(ca)(db)` of `repeat`: repetitions `c` and `d` are factors of their own."""
    x, result = call.operands[0], call.result
    lead = result.ndim - x.ndim
    names = factor_names(x.ndim + result.ndim)
    times = iter(names[x.ndim :])
    operand, result_dims = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for i, size in enumerate(result.shape):
        factor = (names[i - lead],) if i >= lead else ()
        if factor and x.shape[i - lead] == size:
            operand.append(factor)
            result_dims.append(factor)
        elif factor and x.shape[i - lead] != 1:
            operand.append(factor)
            result_dims.append((next(times), *factor))
        else:
            operand += [()] * len(factor)
            result_dims.append((next(times),))
    sizes = tuple((dims[0], size // x.shape[i - lead]) for i, (dims, size)
                  in enumerate(zip(result_dims, result.shape, strict=True)) if len(dims) == 2
                  and x.shape[i - lead])  # fmt: skip
    return Rule((tuple(operand),), (tuple(result_dims),), modes=all_modes(0), local=_local_repeat,
                sizes=sizes)  # fmt: skip


def _local_interleave(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    kwargs_ = {key: value for key, value in kwargs.items() if key != "output_size"}
    return op(*args, **kwargs_)


@register_rule("repeat_interleave.self_int")
def repeat_interleave(call: OpCall) -> Rule:
    """Rule `ab->a(bc)` of `repeat_interleave` by a number: the repetitions are the minor factor."""
    x, dim = call.operands[0], call.get("dim")
    names = factor_names(x.ndim + 1)
    dims: Dims = tuple((name,) for name in names[:-1])
    if dim is None:
        result_dims: Dims = ((*names[:-1], names[-1]),)
    else:
        d = wrap_dim(dim, x.ndim)
        result_dims = (
            (*dims[:d], (*dims[d], names[-1]), *dims[d + 1 :]) if dims else ((names[-1],),)
        )
    return Rule((dims,), (result_dims,), unsharded=frozenset(names[-1:]), modes=all_modes(0),
                local=_local_interleave, sizes=((names[-1], call.get("repeats")),))  # fmt: skip


@register_rule("repeat_interleave.self_Tensor", "repeat_interleave.Tensor")
def repeat_interleave_tensor(call: OpCall) -> Rule:
    """Rule of `repeat_interleave` by a tensor: dim and repetitions stay unsharded."""
    if not call.has("self"):
        return Rule((((),) * call.operands[0].ndim,), (((),),))
    ndim, dim = call.operands[0].ndim, call.get("dim")
    repeated = None if dim is None else wrap_dim(dim, ndim)
    names = factor_names(ndim)
    dims: Dims = tuple((name,) for name in names)
    result_dims: Dims = (
        ((),) if repeated is None else tuple(() if d == repeated else dims[d] for d in range(ndim))
    )
    unsharded = frozenset(name for d, name in enumerate(names) if repeated is None or d == repeated)
    return Rule((dims, ((),) * call.operands[1].ndim), (result_dims or ((),),), unsharded=unsharded,
                modes=all_modes(0))  # fmt: skip
