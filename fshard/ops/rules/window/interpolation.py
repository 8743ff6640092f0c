"""Rules of interpolation and its gradients: nearest, linear, bilinear, bicubic and trilinear.

Batch, channels and spatial dims may be sharded: each rank reads the window of its part of the
result. The window of antialiased interpolation is as wide as the filter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch

from fshard._torch.modes import DisableTorchFunction, without_dispatch_modes
from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import all_modes, linear_modes
from fshard.ops.core.call import Meta, OpCall, argument, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.core.windows import Reach, Window
from fshard.ops.rules.letters import letters
from fshard.ops.rules.shard_call import (
    has_empty_shard,
    zero_results,
)
from fshard.ops.rules.window.taps import Tap, gather_taps, scatter_taps
from fshard.ops.rules.window.window_dims import (
    Span,
    SpatialFactors,
    per_plane,
    planes,
    spans,
    spatial_dims,
)
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

aten = torch.ops.aten

LINEAR = "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d"
NEAREST = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
"""
ANTIALIASED = "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa"
MAX_SCALE = 32
"""Maximum scale; PyTorch computes source indices in float32, wrong from a scale of 41 on."""
MARGIN = 32
"""One by the distance to an integer at which rounding may change the nearest element."""
CUBIC = -0.75
"""Coefficient of PyTorch's cubic convolution."""
CUBIC_FILTER = -0.5
"""Coefficient of PyTorch's antialiased cubic convolution."""
RADII = {"linear": 1, "cubic": 2, "lanczos": 3}
"""Radius of an antialiasing filter, in elements of the result where that is the coarser one."""


@dataclass(frozen=True, slots=True)
class _Resampling:
    """Interpolation along one dim.

    Attributes:
        op: the operation, its overload with sizes.
        dim: the spatial dim, of `count`.
        count: number of spatial dims.
        size: number of elements that are read.
        length: number of elements of the result.
        align: True if the centers of the first and last elements are kept in place.
        scale: the scale as given, None if it is that of the sizes.
    """

    op: Any
    dim: int
    count: int
    size: int
    length: int
    align: bool
    scale: float | None

    @property
    def kind(self) -> str:
        """Kind of the interpolation: nearest, exact, cubic, lanczos or linear."""
        name, words = base_name(self.op), ("exact", "nearest", "cubic", "lanczos")
        return next((word for word in words if word in name), "linear")

    @property
    def is_filtered(self) -> bool:
        """True if elements are weighted by an antialiasing filter."""
        return base_name(self.op).endswith("_aa")

    @property
    def ratio(self) -> Fraction:
        """Number of elements read for one of the result."""
        if self.align:
            return Fraction(self.size - 1, self.length - 1) if self.length > 1 else Fraction(0)
        if self.scale:
            return Fraction(1.0 / self.scale).limit_denominator(1 << 40)
        return Fraction(self.size, max(self.length, 1))

    @property
    def repeats(self) -> bool:
        """True if every element is repeated equally often: shards are computed as they are."""
        nearest = self.kind in ("nearest", "exact")
        return nearest and self.ratio.numerator == 1 and self.ratio.denominator <= MAX_SCALE

    def window(self, name: str, of: str) -> Window:
        """Return the window of the result along the dim."""
        p, q = self.ratio.numerator, self.ratio.denominator
        if self.repeats:
            return Window(name, of, self.length, self.size, 1, per=q)
        if self.is_filtered:
            radius = RADII[self.kind] * max(p, q)
            return Window(name, of, self.length, self.size, 2 * p, p + q - 2 * radius,
                          p - q + 2 * radius, p, 2 * q)  # fmt: skip
        if self.kind in ("nearest", "exact"):
            begin = p * MARGIN // 2 if self.kind == "exact" else 0
            margin = 0 if q == 1 else q
            step, low, high, anchor, per = (
                p * MARGIN, begin - margin, begin + margin, p * MARGIN // 2, q * MARGIN,
            )  # fmt: skip
        else:
            begin, per = (0, q) if self.align else (p - q, 2 * q)
            step, anchor = per * p // q, begin + per // 2
            low, high = (begin - per, begin + 2 * per) if self.kind == "cubic" else (
                begin, begin + per)  # fmt: skip
        return Window(name, of, self.length, self.size, step, low, high, anchor, per, "replicate")

    def taps(self, span: Span, dtype: torch.dtype) -> list[Tap]:
        """Return the elements that a span reads, and their weights."""
        first, last = span.reach.start, span.reach.stop - 1
        elements = range(span.start, span.stop)
        if self.is_filtered:
            return filtered_taps(self, span)
        if self.kind in ("nearest", "exact"):
            wide = dtype == torch.float64
            found = nearest_elements(self.op, self.dim, self.count, self.size, self.length,
                                     self.scale, wide)  # fmt: skip
            return [([min(max(found[i], first), last) for i in elements], None)]
        p, q = self.ratio.numerator, self.ratio.denominator
        sources = [i * p / q if self.align else (i + 0.5) * p / q - 0.5 for i in elements]
        if self.kind == "linear":
            sources = [min(max(x, 0.0), self.size - 1) for x in sources]
        floors = [math.floor(x) for x in sources]
        rests = [x - floor for x, floor in zip(sources, floors, strict=True)]
        weights = cubic_weights if self.kind == "cubic" else linear_weights
        rows = zip(*map(weights, rests), strict=True)
        offset = -1 if self.kind == "cubic" else 0
        # At an end of the dim its last element repeats; beyond a window weights are 0.
        return [
            ([min(max(floor + k, first), last) for floor in floors], row)
            for k, row in enumerate(rows, offset)
        ]


@lru_cache(maxsize=CACHE_SIZE)
def filtered_taps(along: _Resampling, span: Span) -> list[Tap]:
    """Return the elements under the filter of each element, and their shares of its sum."""
    ratio, first, last = along.ratio, span.reach.start, span.reach.stop - 1
    scale = max(ratio, Fraction(1))
    radius, half = RADII[along.kind] * scale, Fraction(1, 2)
    rows = list[tuple[int, list[float]]]()
    for i in range(span.start, span.stop):
        center = ratio * (i + half)
        start = max(math.floor(center - radius + half), 0)
        stop = min(math.floor(center + radius + half), along.size)
        weights = [
            filter_weight(along.kind, float((j - center + half) / scale))
            for j in range(start, stop)
        ]
        total = sum(weights)
        rows.append((start, [weight / total for weight in weights]))
    return [
        ([min(max(start + k, first), last) for start, _ in rows],
         [weights[k] if k < len(weights) else 0.0 for _, weights in rows])
        for k in range(max(len(weights) for _, weights in rows))
    ]  # fmt: skip


def filter_weight(kind: str, x: float) -> float:
    """Return the weight of an antialiasing filter at a distance from its center."""
    x, radius = abs(x), RADII[kind]
    if x >= radius:
        return 0.0
    if kind == "linear":
        return 1 - x
    if kind == "lanczos":
        angle = math.pi * x
        return radius * math.sin(angle) * math.sin(angle / radius) / angle**2 if x else 1.0
    return cubic_weight(x, CUBIC_FILTER)


def linear_weights(rest: float) -> tuple[float, float]:
    """Return the weights of the element before a position and of the one after it."""
    return 1 - rest, rest


def cubic_weights(rest: float) -> tuple[float, float, float, float]:
    """Return the weights of the two elements before a position and of the two after it."""
    before, first, second, after = (
        cubic_weight(x, CUBIC) for x in (rest + 1, rest, 1 - rest, 2 - rest)
    )
    return before, first, second, after


def cubic_weight(x: float, a: float) -> float:
    """Return the weight of a cubic convolution of coefficient `a` at a distance of at most 2."""
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


@lru_cache(maxsize=CACHE_SIZE)
def nearest_elements(
    op: Any, dim: int, count: int, size: int, length: int, scale: float | None, wide: bool
) -> tuple[int, ...]:
    """Return the element that each element of a result is, as PyTorch rounds it in this dtype."""
    shape, sizes = [1] * count, [1] * count
    shape[dim], sizes[dim] = size, length
    scales = [scale if i == dim else None for i in range(count)]
    with without_dispatch_modes(), DisableTorchFunction(), torch.no_grad():
        indices = torch.arange(size, dtype=torch.float64 if wide else torch.float32)
        elements = op(indices.view(1, 1, *shape), sizes, *scales)
    return tuple(map(int, elements.flatten().tolist()))


def _resamplings(call: OpCall, read: Meta, output: Meta) -> tuple[_Resampling, ...]:
    """Return the interpolation along each spatial dim of a call or of a gradient's."""
    count = spatial_dims(call)
    align = bool(call.has("align_corners") and call.get("align_corners"))
    if call.has("scale_factors"):
        scales = list(call.get("scale_factors") or [None] * count)
    else:
        names = ("scales_d", "scales_h", "scales_w") if call.has("scales_h") else ("scales",)
        scales = [call.get(name) for name in names if call.has(name)]
    forward = getattr(aten, base_name(call.op).removesuffix("_backward")).default
    return tuple(
        _Resampling(forward, i, count, read.shape[i - count], output.shape[i - count], align,
                    scales[i])
        for i in range(count)
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LocalInterpolation:
    """Local interpolation: along sharded dims of a window, along the others by the operation."""

    dims: tuple[_Resampling, ...]
    windows: tuple[Window, ...]

    def parts(self, ctx: RankContext, output: Any) -> tuple[Span | None, ...]:
        """Return the spans of the dims that are not interpolated by the operation itself."""
        parts = spans(self.windows, output, ctx.rank)
        if self.dims[0].is_filtered and any(parts):
            # PyTorch's kernel is wrong for windows of one column.
            return tuple(
                part or Span(0, dim.length, Reach(0, dim.size))
                for part, dim in zip(parts, self.dims, strict=True)
            )
        return tuple(
            None if dim.repeats else part for part, dim in zip(parts, self.dims, strict=True)
        )

    def rest(self, parts: Sequence[Span | None]) -> tuple[list[Any], list[Any]]:
        """Return `align_corners` where it is a parameter, and the scales of the other dims."""
        align = [] if self.dims[0].kind in ("nearest", "exact") else [self.dims[0].align]
        scales = [None if part else dim.scale for part, dim in zip(parts, self.dims, strict=True)]
        return align, scales

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        if has_empty_shard(ctx) or 0 in ctx.shape():
            return zero_results(args, kwargs, ctx)[0]
        parts, x, count = self.parts(ctx, ctx.result), args[0], len(self.dims)
        for i, part in enumerate(parts):
            if part is not None:
                x = gather_taps(x, i - count, part, self.dims[i].taps(part, x.dtype))
        if all(parts):
            return x
        align, scales = self.rest(parts)
        return self.dims[0].op(x, list(ctx.shape()[-count:]), *align, *scales)


@register_rule(*LINEAR.split(), *NEAREST.split(), *ANTIALIASED.split())
def interpolation(call: OpCall) -> Rule:
    """Rule `ncbd->ncef` of interpolation: `e` and `f` are windows of `b` and `d`."""
    x = call.operands[0]
    dims = _resamplings(call, x, call.result)
    if not is_inexact(x) and dims[0].kind not in ("nearest", "exact"):
        return per_plane(call)  # PyTorch rounds integers in a way of its own
    factors, windows = _factors(dims)
    lead, modes = planes(x, len(dims)), linear_modes(0) if is_inexact(x) else ()
    if dims[0].kind in ("nearest", "exact"):
        modes = all_modes(0)
    return Rule(((*lead, *factors.read),), ((*lead, *factors.output),), modes=modes,
                local=_LocalInterpolation(dims, windows), slices=factors.windows)  # fmt: skip


def _factors(dims: Sequence[_Resampling]) -> tuple[SpatialFactors, tuple[Window, ...]]:
    """Return the factors and windows of the dims.

    A dim of one element has no factor: it is broadcast, and its gradient is a sum.
    """
    names = letters(2 * len(dims), "cn")
    windows = tuple(dim.window(names[len(dims) + i], names[i]) for i, dim in enumerate(dims))
    factors = SpatialFactors.of(windows, names)
    read = tuple(
        () if dim.size == 1 else names for dim, names in zip(dims, factors.read, strict=True)
    )
    sliced = tuple(window for window in windows if window.size > 1)
    return SpatialFactors(read, factors.output, sliced), windows


@dataclass(frozen=True, slots=True)
class _LocalInterpolationBackward(_LocalInterpolation):
    """Local gradient of interpolation, of the window that was read."""

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        if has_empty_shard(ctx) or 0 in ctx.shape():
            return zero_results(args, kwargs, ctx)[0]
        grad, count = argument(op, args, kwargs, "grad_output"), len(self.dims)
        parts = self.parts(ctx, ctx.operands[0])
        if not all(parts):
            align, scales = self.rest(parts)
            local = zip(parts, grad.shape[-count:], ctx.shape()[-count:],
                        strict=True)  # fmt: skip
            size = [output if part else read for part, output, read in local]
            grad = op(grad, list(grad.shape[-count:]), [*grad.shape[:-count], *size], *align,
                      *scales)  # fmt: skip
        for i, part in enumerate(parts):
            if part is not None:
                grad = scatter_taps(grad, i - count, part, self.dims[i].taps(part, grad.dtype))
        return grad


@register_rule(*(f"{name}_backward" for name in f"{LINEAR} {NEAREST} {ANTIALIASED}".split()))
def interpolation_backward(call: OpCall) -> Rule:
    """Rule of interpolation's gradients, added up where windows overlap."""
    grad, x = call.operands[0], call.result
    dims = _resamplings(call, x, grad)
    factors, windows = _factors(dims)
    lead = planes(x, len(dims))
    pairs = zip(factors.output, factors.read, strict=True)
    sums = tuple((output[0], "sum") for output, read in pairs if not read)
    return Rule(((*lead, *factors.output),), ((*lead, *factors.read),), sums, modes=linear_modes(0),
                local=_LocalInterpolationBackward(dims, windows),
                slices=factors.windows)  # fmt: skip
