"""Rules of adaptive pooling, and of its gradients.

Each element of the result pools an interval of its own; each rank computes its part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall, argument, base_name
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.core.windows import Window
from fshard.ops.rules.letters import letters
from fshard.ops.rules.shard_call import has_empty_shard, zero_results
from fshard.ops.rules.window.pooling import (
    LocalGradient,
    LocalMaximumBackward,
    Parts,
    global_indices,
    gradient_rule,
)
from fshard.ops.rules.window.window_dims import (
    Span,
    SpatialFactors,
    Windows,
    planes,
    spans,
    spatial_dims,
)
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

ADAPTIVE = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
"""


@dataclass(frozen=True, slots=True)
class _LocalAdaptive:
    """Local adaptive pooling: one call for each element of the result along sharded dims."""

    windows: Windows

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        x, parts = args[0], spans(self.windows, ctx.result, ctx.rank)
        if 0 in ctx.shape() or has_empty_shard(ctx):
            return zero_results(args, kwargs, ctx)
        if not any(parts):
            return op(*args, **kwargs)
        sizes = list(argument(op, args, kwargs, "output_size"))
        sizes = sizes * (len(parts) if len(sizes) == 1 else 1)
        full = [w.size if w else x.shape[i - len(parts)] for i, w in enumerate(self.windows)]
        return self._pooled(op, x, 0, parts, sizes, [(0, size) for size in full])

    def _pooled(
        self, op: Any, x: torch.Tensor, i: int, parts: Sequence[Span | None], sizes: list[int],
        sides: list[tuple[int, int]],
    ) -> Any:  # fmt: skip
        """Return the pooled part from spatial dim `i` on; values and indices for a maximum."""
        if i == len(parts):
            sizes = [1 if part else size for part, size in zip(parts, sizes, strict=True)]
            out = op(x, sizes)
            if isinstance(out, torch.Tensor):
                return out
            return out[0], global_indices(out[1], x.shape[-len(parts) :], sides)
        part, window, dim = parts[i], self.windows[i], i - len(parts)
        if part is None or window is None:
            return self._pooled(op, x, i + 1, parts, sizes, sides)
        outs = []
        for element in range(part.start, part.stop):
            reach = window.reach(element, element + 1)
            cell = x.narrow(dim, reach.start - part.reach.start, reach.stop - reach.start)
            at = [*sides[:i], (reach.start, window.size), *sides[i + 1 :]]
            outs.append(self._pooled(op, cell, i + 1, parts, sizes, at))
        if isinstance(outs[0], torch.Tensor):
            return torch.cat(outs, dim)
        return tuple(torch.cat(tensors, dim) for tensors in zip(*outs, strict=True))


def _adaptive(call: OpCall, x: Meta, output: Meta) -> tuple[Windows, SpatialFactors]:
    """Return windows and factors of the spatial dims of an adaptive pooling of `x`."""
    count = spatial_dims(call)
    names, windows = letters(2 * count, "cn"), list[Window | None]()
    for i in range(count):
        size, length = x.shape[i - count], output.shape[i - count]
        windows.append(Window(names[count + i], names[i], length, size, size, 0, size - 1,
                              per=max(length, 1)))  # fmt: skip
    return tuple(windows), SpatialFactors.of(tuple(windows), names)


@register_rule(*ADAPTIVE.split())
def adaptive_pool(call: OpCall) -> Rule:
    """Rule `ncbd->ncef` of adaptive pooling: `e` and `f` are windows of `b` and `d`."""
    x = call.operands[0]
    windows, factors = _adaptive(call, x, call.result)
    lead = planes(x, len(windows))
    modes = linear_modes(0) if "avg" in base_name(call.op) and is_inexact(x) else ()
    return Rule(((*lead, *factors.read),), ((*lead, *factors.output),) * len(call.results),
                modes=modes, local=_LocalAdaptive(windows), slices=factors.windows)  # fmt: skip


@register_decomposition(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
)  # fmt: skip
def adaptive_averages(x: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    """Decompose adaptive averages of one element along a dim into means over the dim."""
    count = len(output_size)
    for i, size in enumerate(output_size):
        if size == 1:
            x = x.mean(i - count, keepdim=True)
    if any(size != 1 for size in output_size):
        pool = getattr(torch.nn.functional, f"adaptive_avg_pool{count}d")
        x = pool(x, output_size)
    return x


# -- gradients -------------------------------------------------------------------------------


@register_rule("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(call: OpCall) -> Rule:
    """Rule of an adaptive maximum's gradient, added up where windows overlap."""
    output, x = call.operands[:2]
    windows, factors = _adaptive(call, x, output)
    return gradient_rule(call, factors, LocalMaximumBackward(windows))


@register_rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(call: OpCall) -> Rule:
    """Rule of an adaptive average's gradient, added up where windows overlap."""
    output, x = call.operands
    windows, factors = _adaptive(call, x, output)
    return gradient_rule(call, factors, _LocalAdaptiveBackward(windows))


@dataclass(frozen=True, slots=True)
class _LocalAdaptiveBackward(LocalGradient):
    """Local gradient of adaptive averages: each is spread over the elements that it averages."""

    windows: Windows

    def gradient(self, op: Any, args: Args, kwargs: Kwargs, parts: Parts) -> Any:
        """Return the gradient of the window that the rank reads."""
        grad, x = args
        for i, (part, window) in enumerate(zip(parts, self.windows, strict=True)):
            assert window is not None
            dim = i - len(parts)
            outputs, start = range(grad.shape[dim]), 0
            if part is not None:
                outputs, start = range(part.start, part.stop), part.reach.start
            weights = grad.new_zeros(len(outputs), x.shape[dim])
            for row, element in enumerate(outputs):
                reach = window.reach(element, element + 1)
                weights[row, reach.start - start : reach.stop - start] = 1 / (
                    reach.stop - reach.start
                )
            grad = (grad.movedim(dim, -1) @ weights).movedim(-1, dim)
        return grad
