"""Rules of pooling by windows, and their gradients.

Batch and channels may be sharded, and spatial dims: each rank pools the window of its part of the
result. Of fractional pooling and unpooling spatial dims stay unsharded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import kind_modes, linear_modes
from fshard.ops.core.call import Meta, OpCall, argument, schema_arguments
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.core.windows import Window
from fshard.ops.rules.letters import letters
from fshard.ops.rules.shard_call import ShardCall, call_with, has_empty_shard, zero_results
from fshard.ops.rules.window.window_dims import (
    Span,
    SpatialFactors,
    Windows,
    padded,
    per_plane,
    planes,
    spans,
    spatial_dims,
    spatial_value,
)
from fshard.ops.strategy.local_call import Args, Kwargs, LocalCall, RankContext, with_argument

AVERAGES = "avg_pool1d avg_pool2d avg_pool3d"
MAXIMA = """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices
"""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Numbers of one spatial dim of a pooling operation, of `size` elements."""

    size: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @staticmethod
    def of(call: OpCall, dim: int, size: int) -> _Pool:
        """Return the pooling along one dim of a call."""
        kernel = spatial_value(call, "kernel_size", dim, 1)
        return _Pool(size, kernel, spatial_value(call, "stride", dim, kernel),
                     spatial_value(call, "padding", dim, 0),
                     spatial_value(call, "dilation", dim, 1))  # fmt: skip

    def window(self, name: str, of: str, length: int) -> Window:
        """Return the window of a result of `length` elements."""
        low, extent = -self.padding, self.dilation * (self.kernel - 1)
        return Window(name, of, length, self.size, self.stride, low, low + extent)

    def counts(self, span: Span, padding: bool) -> list[int]:
        """Return the number of elements that each average of a span divides by."""
        starts = [i * self.stride - self.padding for i in range(span.start, span.stop)]
        if padding:
            return [min(x + self.kernel, self.size + self.padding) - x for x in starts]
        return [min(x + self.kernel, self.size) - max(x, 0) for x in starts]


def _pools(
    call: OpCall, x: Meta, output: Meta
) -> tuple[tuple[_Pool, ...], Windows, SpatialFactors]:
    """Return numbers, windows and factors of the spatial dims of a call on `x`."""
    count = spatial_dims(call)
    names = letters(2 * count, "cn")
    pools = tuple(_Pool.of(call, i, x.shape[i - count]) for i in range(count))
    windows = tuple(
        pool.window(names[count + i], names[i], output.shape[i - count])
        for i, pool in enumerate(pools)
    )
    return pools, windows, SpatialFactors.of(windows, names)


@dataclass(frozen=True, slots=True)
class _LocalPool:
    """Local pooling of a window, padded by `value` where it is at an end of the dim."""

    windows: Windows
    pools: tuple[_Pool, ...]

    def windowed(
        self, call: LocalCall, x: str, parts: Sequence[Span | None], value: float
    ) -> LocalCall:
        """Return the call on the padded window, without padding along sharded dims."""
        pairs = [part.reach[2:] if part else (0, 0) for part in parts]
        padding = [0 if part else p.padding for part, p in zip(parts, self.pools, strict=True)]
        call = with_argument(*call, x, padded(argument(*call, x), pairs, value))
        return with_argument(*call, "padding", padding)


@dataclass(frozen=True, slots=True)
class _LocalAverage(_LocalPool):
    """Rewrite: average the padded window, and correct the counts at the ends of the dim."""

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        parts = spans(self.windows, ctx.result, ctx.rank)
        if not any(parts):
            return call
        weight = self.weight(call, parts, call[1][0])
        op, args, kwargs = self.windowed(call, "self", parts, 0.0)
        if weight is None:
            return op, args, kwargs
        return (lambda *args, **kwargs: op(*args, **kwargs) * weight), args, kwargs

    def weight(
        self, call: LocalCall, parts: Sequence[Span | None], like: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the quotients of the kernel's size and the counts, None where all are 1."""
        op, args, kwargs = call
        names = [parameter.name for parameter in schema_arguments(op)]
        if "divisor_override" in names and argument(op, args, kwargs, "divisor_override"):
            return None
        padding = argument(op, args, kwargs, "count_include_pad")
        weight = None
        for i, (part, pool) in enumerate(zip(parts, self.pools, strict=True)):
            counts = pool.counts(part, padding) if part else [pool.kernel]
            if any(count != pool.kernel for count in counts):
                shape = [-1 if dim == i else 1 for dim in range(len(parts))]
                row = like.new_tensor([pool.kernel / count for count in counts]).view(shape)
                weight = row if weight is None else weight * row
        return weight


@register_rule(*AVERAGES.split())
def avg_pool(call: OpCall) -> Rule:
    """Rule `ncbd->ncef` of average pooling: `e` and `f` are windows of `b` and `d`.

    Integers are averaged by planes: a quotient that is rounded has no correction for its count.
    """
    x = call.operands[0]
    if not is_inexact(x):
        return per_plane(call)
    pools, windows, factors = _pools(call, x, call.result)
    lead = planes(x, len(pools))
    return Rule(
        ((*lead, *factors.read),),
        ((*lead, *factors.output),),
        modes=linear_modes(0),
        local=ShardCall(rewrites=(_LocalAverage(windows, pools),)),
        slices=factors.windows,
    )


def lowest(dtype: torch.dtype) -> float:
    """Return the value that is below all others."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def global_indices(
    local: torch.Tensor, sizes: Sequence[int], sides: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return flat indices into a plane, from those into a part of it.

    Args:
        local: flat indices into the part.
        sizes: the sizes of the part's dims.
        sides: for each dim the position of the part in the plane, and the size of the plane.
            Positions beyond an end, of padding, become the nearest ones that exist.
    """
    rest, result, scale = local, torch.zeros_like(local), 1
    for size, (offset, full) in zip(reversed(sizes), reversed(sides), strict=True):
        position = (rest % size + offset).clamp(0, full - 1)
        rest, result, scale = rest // size, result + position * scale, scale * full
    return result


@dataclass(frozen=True, slots=True)
class _LocalMaximum(_LocalPool):
    """Rewrite: take maxima of the padded window; indices become those into the global plane."""

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        parts = spans(self.windows, ctx.result, ctx.rank)
        if not any(parts):
            return call
        op, args, kwargs = self.windowed(call, "self", parts, lowest(call[1][0].dtype))
        if len(ctx.results) == 1:
            return op, args, kwargs
        sides = [
            (part.reach.start - part.reach.before if part else 0, pool.size)
            for part, pool in zip(parts, self.pools, strict=True)
        ]
        sizes = args[0].shape[-len(parts) :]

        def run(*args: Any, **kwargs: Any) -> Any:
            values, indices = op(*args, **kwargs)
            return values, global_indices(indices, sizes, sides)

        return run, args, kwargs


@register_rule(*MAXIMA.split())
def max_pool(call: OpCall) -> Rule:
    """Rule `ncbd->ncef` of maximum pooling: `e` and `f` are windows of `b` and `d`.

    An unreduced maximum passes, unless indices are requested.
    """
    x = call.operands[0]
    pools, windows, factors = _pools(call, x, call.result)
    lead = planes(x, len(pools))
    modes = kind_modes(0, {"max": "max"}) if len(call.results) == 1 else ()
    return Rule(((*lead, *factors.read),), ((*lead, *factors.output),) * len(call.results),
                modes=modes, local=ShardCall(rewrites=(_LocalMaximum(windows, pools),)),
                slices=factors.windows)  # fmt: skip


# -- other pooling ----------------------------------------------------------------------------


@register_rule("max_unpool2d", "max_unpool3d")
def max_unpool(call: OpCall) -> Rule:
    """Rule of unpooling, linear in its first operand: spatial dims stay unsharded."""
    return per_plane(call, linear_modes(0))


@register_rule("fractional_max_pool2d", "fractional_max_pool3d")
def fractional_max_pool(call: OpCall) -> Rule:
    """Rule of fractional pooling: spatial dims stay unsharded.

    The random samples have a dim for the batch, also where the first operand has none.
    """
    rule = per_plane(call)
    lead = rule.operands[0][: -spatial_dims(call)]
    samples = ((),) * (2 - len(lead)) + lead + ((),)
    return replace(rule, operands=(rule.operands[0], samples))


# -- gradients --------------------------------------------------------------------------------


@register_rule("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(call: OpCall) -> Rule:
    """Rule of average pooling's gradient, added up where windows overlap."""
    output, x = call.operands
    pools, windows, factors = _pools(call, x, output)
    return gradient_rule(call, factors, _LocalAverageBackward(windows, pools))


def gradient_rule(call: OpCall, factors: SpatialFactors, local: Any) -> Rule:
    """Return the rule of a gradient of windows; operands after the first two are indices."""
    lead = planes(call.operands[1], len(factors.read))
    output, read = (*lead, *factors.output), (*lead, *factors.read)
    dims = (output, read, *[output] * (len(call.operands) - 2))
    return Rule(dims, (read,), modes=linear_modes(0), local=local, slices=factors.windows)


Parts = Sequence[Span | None]
"""The windows that a rank reads of each spatial dim, None for dims that are not sharded."""


class LocalGradient(ABC):
    """Local gradient of an operation on windows; the operation's own if no dim is sharded."""

    __slots__ = ()
    windows: Windows

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        parts = spans(self.windows, ctx.operands[0], ctx.rank)
        if has_empty_shard(ctx):
            return zero_results(args, kwargs, ctx)[0]
        if not any(parts):
            return op(*args, **kwargs)
        return self.gradient(op, args, kwargs, parts)

    @abstractmethod
    def gradient(self, op: Any, args: Args, kwargs: Kwargs, parts: Parts) -> Any:
        """Return the gradient of the window that the rank reads."""


@dataclass(frozen=True, slots=True)
class _LocalAverageBackward(LocalGradient, _LocalAverage):  # type: ignore[misc]
    """Local gradient of an average of a padded window."""

    def gradient(self, op: Any, args: Args, kwargs: Kwargs, parts: Parts) -> Any:
        """Return the gradient of the window that the rank reads."""
        call: LocalCall = op, tuple(args), dict(kwargs)
        grad = argument(*call, "grad_output")
        weight = self.weight(call, parts, grad)
        op, args, kwargs = self.windowed(call, "self", parts, 0.0)
        if weight is not None:
            out = call_with(op, args, kwargs, grad_output=grad * weight)
        else:
            out = op(*args, **kwargs)
        pairs = [part.reach[2:] if part else (0, 0) for part in parts]
        return padded(out, [(-before, -after) for before, after in pairs])


@dataclass(frozen=True, slots=True)
class LocalMaximumBackward(LocalGradient):
    """Local gradient of a maximum: gradients are added to the elements that indices name."""

    windows: Windows

    def gradient(self, op: Any, args: Args, kwargs: Kwargs, parts: Parts) -> Any:
        """Return the gradient of the window that the rank reads."""
        grad, x, indices = args[0], args[1], argument(op, args, kwargs, "indices")
        count = len(parts)
        rest, flat, scale = indices, torch.zeros_like(indices), 1
        rows = list(zip(parts, self.windows, x.shape[-count:], strict=True))
        for part, window, size in reversed(rows):
            full, start = (window.size, part.reach.start) if part and window else (size, 0)
            rest, position = rest // full, rest % full - start
            flat, scale = flat + position * scale, scale * size
        zeros = torch.zeros_like(x, dtype=grad.dtype).flatten(-count)
        return zeros.scatter_add(-1, flat.flatten(-count), grad.flatten(-count)).view(x.shape)


@register_rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(call: OpCall) -> Rule:
    """Rule of maximum pooling's gradient, added up where windows overlap."""
    output, x = call.operands[:2]
    _, windows, factors = _pools(call, x, output)
    return gradient_rule(call, factors, LocalMaximumBackward(windows))


@register_rule("fractional_max_pool2d_backward")
def fractional_max_pool_backward(call: OpCall) -> Rule:
    """Rule of fractional pooling's gradient: each plane, linear in the incoming gradient."""
    return per_plane(call, linear_modes(0))
