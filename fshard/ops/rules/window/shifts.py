"""Rules of shifts, flips and windows along one dim: roll, flip, unfold and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fshard.ops.core.builders import all_modes, linear_modes, normalize_dims, wrap_dim
from fshard.ops.core.call import OpCall, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.core.windows import Window
from fshard.ops.rules.shard_call import ShardCall, call_with, has_empty_shard, zero_results
from fshard.ops.rules.view.view_factors import factor_names, letter_dims, moved_dims_rule
from fshard.ops.rules.window.window_dims import SpatialFactors, Windows
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext


@dataclass(frozen=True, slots=True)
class _LocalRoll:
    """Local roll along the dims that are not sharded; windows of the others are rolled already."""

    shifts: tuple[int, ...]

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
        """Run the operation on one rank."""
        x: torch.Tensor = args[0]
        dims = [d for d, shift in enumerate(self.shifts) if shift and ctx.is_unsharded(0, d)]
        if dims:
            return x.roll([self.shifts[dim] for dim in dims], dims)
        return x if any(self.shifts) else x.clone()


@register_rule("roll")
def roll(call: OpCall) -> Rule:
    """Rule `ab->cb` of `roll` along dim 0, whose windows of equal sizes continue at the other end.

    Without dims the flattened tensor is rolled, which stays unsharded.
    """
    x, dims_arg, shifts = call.operands[0], call.get("dims"), call.get("shifts")
    dims = normalize_dims(dims_arg, x.ndim)
    if not dims_arg or not x.ndim:
        moving = [dim for dim in dims if x.ndim and x.shape[dim] > 1]
        return moved_dims_rule(call, range(x.ndim), permuted=moving)
    total = [0] * x.ndim
    for dim, shift in zip(dims, shifts if isinstance(shifts, list | tuple) else [shifts],
                          strict=True):  # fmt: skip
        total[dim] = (total[dim] + shift) % max(x.shape[dim], 1)
    names = factor_names(2 * x.ndim)
    windows = tuple(
        Window(names[x.ndim + dim], names[dim], size, size, 1, -shift, -shift, anchor=0,
               boundary="circular") if shift else None
        for dim, (shift, size) in enumerate(zip(total, x.shape, strict=True))
    )  # fmt: skip
    factors = SpatialFactors.of(windows, names)
    return Rule((factors.read,), (factors.output,), modes=all_modes(0),
                local=_LocalRoll(tuple(total)), slices=factors.windows)  # fmt: skip


@register_rule("flip", "fliplr", "flipud", "prims::rev")
def flip(call: OpCall) -> Rule:
    """Rule `ab->cb` of a flip of dim 0: a rank reads the interval as far from the other end."""
    x, name = call.operands[0], base_name(call.op)
    fixed = {"fliplr": [1], "flipud": [0]}.get(name)
    dims = call.args[1] if fixed is None and call.args[1:] else call.kwargs.get("dims", fixed)
    flipped = [wrap_dim(dim, x.ndim) for dim in dims or ()] if x.ndim else []
    names = factor_names(2 * x.ndim)
    windows = tuple(
        Window(names[x.ndim + dim], names[dim], size, size, anchor=0, reversed=True)
        if dim in flipped and size > 1 else None
        for dim, size in enumerate(x.shape)
    )  # fmt: skip
    factors = SpatialFactors.of(windows, names)
    return Rule((factors.read,), (factors.output,), modes=all_modes(0), local=ShardCall(),
                slices=factors.windows)  # fmt: skip


# -- unfold -----------------------------------------------------------------------------------


def _unfold_windows(ndim: int, dim: int, length: int, size: int, width: int, step: int) -> Windows:
    """Return the windows of the dims of a tensor that is unfolded along `dim`."""
    names = factor_names(ndim + 2)
    window = Window(names[ndim], names[dim], length, size, step, 0, width - 1)
    return tuple(window if i == dim else None for i in range(ndim))


@register_rule("unfold", "unfold_copy")
def unfold(call: OpCall) -> Rule:
    """Rule `ab->ace` of `unfold`: `c` are windows of `b` and `e` their elements."""
    x = call.operands[0]
    if not x.ndim:
        return Rule(((),), (((),),), modes=all_modes(0))
    dim, names = wrap_dim(call.get("dimension"), x.ndim), letter_dims(x.ndim + 2)
    windows = _unfold_windows(x.ndim, dim, call.result.shape[dim], x.shape[dim], call.get("size"),
                              call.get("step"))  # fmt: skip
    factors = SpatialFactors.of(windows, [name for (name,) in names])
    elements = names[-1]
    return Rule((factors.read,), ((*factors.output, elements),), unsharded=frozenset(elements),
                modes=all_modes(0), local=ShardCall(), slices=factors.windows)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LocalUnfoldBackward:
    """Local gradient of the window that was unfolded."""

    windows: Windows

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        if has_empty_shard(ctx):
            return zero_results(args, kwargs, ctx)[0]
        return call_with(op, args, kwargs, input_sizes=list(ctx.shape()))


@register_rule("unfold_backward")
def unfold_backward(call: OpCall) -> Rule:
    """Rule `ace->ab` of `unfold`'s gradient, added up where windows overlap."""
    x, grad = call.result, call.operands[0]
    dim, names = wrap_dim(call.get("dim"), x.ndim), letter_dims(x.ndim + 2)
    windows = _unfold_windows(x.ndim, dim, grad.shape[dim], x.shape[dim], call.get("size"),
                              call.get("step"))  # fmt: skip
    factors = SpatialFactors.of(windows, [name for (name,) in names])
    return Rule(((*factors.output, names[-1]),), (factors.read,), unsharded=frozenset(names[-1]),
                modes=linear_modes(0), local=_LocalUnfoldBackward(windows),
                slices=factors.windows)  # fmt: skip
