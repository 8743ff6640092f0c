"""Rules of padding by constants, reflection, repetition and periodically, and their gradients.

All dims may be sharded. Constants are added to the first and the last shard of a dim; padding by
other elements reads them from the ranks that have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import all_modes, kind_modes, linear_modes
from fshard.ops.core.call import Meta, OpCall, argument, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule, Slice
from fshard.ops.core.windows import Window, clamped, reflected
from fshard.ops.rules.letters import letters
from fshard.ops.rules.shard_call import call_with, has_empty_shard, zero_results
from fshard.ops.rules.window.taps import Tap, gather_taps, scatter_taps
from fshard.ops.rules.window.window_dims import Span, SpatialFactors, Windows, spans
from fshard.ops.strategy.local_call import Args, Kwargs, LocalCall, LocalRewrite, RankContext

aten = torch.ops.aten

MODES = {"constant": "zeros", "reflect": "reflect", "replicate": "replicate",
         "circular": "circular"}  # fmt: skip
"""Boundary of a window by the mode of a padding."""
MODE_NUMBERS = ("constant", "reflect", "replicate", "circular")
"""Modes by their codes in `_pad_enum`."""
OTHERS = """
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d
"""


def _boundary(call: OpCall) -> str:
    """Return the boundary of a padding's windows."""
    name = base_name(call.op)
    for word, boundary in (("reflection", "reflect"), ("replication", "replicate"),
                           ("circular", "circular")):  # fmt: skip
        if word in name:
            return boundary
    mode = call.get("mode") if call.has("mode") else "constant"
    return MODES[mode if isinstance(mode, str) else MODE_NUMBERS[mode]]


def _pairs(call: OpCall, ndim: int) -> list[tuple[int, int]]:
    """Return the elements before and after each of the last dims of a tensor."""
    values = call.get("pad" if call.has("pad") else "padding")
    count = len(values) // 2
    return [(values[2 * i], values[2 * i + 1]) for i in reversed(range(count))][-ndim:]


# -- constants --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalPad(LocalRewrite):
    """Local padding before the dim's first element and after its last one.

    `before` is the global padding in front of each dim.
    """

    before: tuple[int, ...]

    def call(self, op: object, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """Return the padding by which the rank's result exceeds its operand."""
        pairs = []
        for dim, before in reversed(list(enumerate(self.before))):
            begin = ctx.result_offset(dim) - before
            end = begin + ctx.shape()[dim]
            if begin == end:
                pairs += [0, -ctx.operands[0].local_shape(ctx.rank)[dim]]
            else:
                pairs += [ctx.offset(0, dim) - begin, end - ctx.end(0, dim)]
        value = argument(op, args, kwargs, "value")
        return aten.constant_pad_nd.default, (args[0], pairs, value or 0), {}


@register_rule(aten.constant_pad_nd, aten.pad, aten._pad_enum)
def pad(call: OpCall) -> Rule:
    """Rule of padding: a padded dim is sharded wherever the dim before is.

    Zeros are linear, other constants keep averages and extremes.
    """
    if _boundary(call) != "zeros":
        return pad_by_elements(call)
    x, names = call.operands[0], letters(2 * call.operands[0].ndim)
    dims: Dims = tuple((factor,) for factor in names[: x.ndim])
    pairs = _pairs(call, x.ndim)
    result_dims, slices, fronts = list(dims), list[Slice](), [0] * x.ndim
    for dim, (before, after) in enumerate(pairs, x.ndim - len(pairs)):
        if before or after:
            name = names[x.ndim + dim]
            slices.append(Slice(name, dims[dim][0], -before, x.shape[dim] + after))
            result_dims[dim], fronts[dim] = (name,), before
    value = (call.get("value") if call.has("value") else 0) or 0
    modes = linear_modes(0, affine=value != 0) if is_inexact(x) or value == 0 else ()
    modes += kind_modes(0, {"max": "max", "min": "min"})
    return Rule((dims,), (tuple(result_dims),), modes=modes, local=_LocalPad(tuple(fronts)),
                slices=tuple(slices))  # fmt: skip


# -- elements ---------------------------------------------------------------------------------


def _windows(call: OpCall, read: Meta) -> tuple[Windows, SpatialFactors]:
    """Return the windows of the padded dims of a call on a tensor `read`, and their factors."""
    pairs, boundary = _pairs(call, read.ndim), _boundary(call)
    names, windows = letters(2 * read.ndim), list[Window | None]()
    for i, (before, after) in enumerate(pairs):
        dim = read.ndim - len(pairs) + i
        size = read.shape[dim]
        windows.append(
            Window(names[read.ndim + dim], names[dim], size + before + after, size, 1, -before,
                   -before, boundary=boundary)
            if (before or after) and not _wraps_cropped(boundary, before, after) else None
        )  # fmt: skip
    rows = tuple(windows)
    factors = SpatialFactors.of(rows, names[read.ndim - len(pairs) :])
    unsharded = [_wraps_cropped(boundary, *pair) for pair in pairs]
    read_dims, made_dims = (
        tuple(() if fixed else dim for fixed, dim in zip(unsharded, side, strict=True))
        for side in (factors.read, factors.output)
    )
    return rows, SpatialFactors(read_dims, made_dims, factors.windows)


def _wraps_cropped(boundary: str, before: int, after: int) -> bool:
    """Return True for periodic padding whose period is that of a cropped dim."""
    return boundary == "circular" and min(before, after) < 0 < max(before, after)


@dataclass(frozen=True, slots=True)
class _LocalElements:
    """Local padding by elements of a window, or its gradient.

    Windows of periodic padding have the elements in place already.
    """

    windows: Windows
    pairs: tuple[tuple[int, int], ...]
    name: str

    def taps(self, i: int, span: Span) -> list[Tap]:
        """Return the positions that a span reads along the spatial dim `i`."""
        window = self.windows[i]
        assert window is not None
        at = reflected if window.boundary == "reflect" else clamped
        start, stop = (position + window.low for position in span[:2])
        return [([at(position, window.size) for position in range(start, stop)], None)]

    def rest(self, parts: Sequence[Span | None]) -> list[int]:
        """Return the padding of the dims that are not sharded, as an argument."""
        pairs = [(0, 0) if part else pair for part, pair in zip(parts, self.pairs, strict=True)]
        return [size for pair in reversed(pairs) for size in pair]

    def __call__(self, op: object, args: Args, kwargs: Kwargs, ctx: RankContext) -> object:
        """Run the operation on one rank."""
        if has_empty_shard(ctx) or 0 in ctx.shape():
            return zero_results(args, kwargs, ctx)[0]
        x, parts = args[0], spans(self.windows, ctx.result, ctx.rank)
        for i, part in enumerate(parts):
            if part is not None and self.windows[i].boundary != "circular":  # type: ignore[union-attr]
                x = gather_taps(x, i - len(parts), part, self.taps(i, part))
        rest = self.rest(parts)
        return call_with(op, (x, *args[1:]), kwargs, **{self.name: rest}) if any(rest) else x


def pad_by_elements(call: OpCall) -> Rule:
    """Rule of padding by elements of the dim, which are windows of it."""
    x = call.operands[0]
    windows, factors = _windows(call, x)
    lead: Dims = tuple((name,) for name in letters(2 * x.ndim)[: x.ndim - len(windows)])
    local = _LocalElements(windows, tuple(_pairs(call, x.ndim)),
                           "pad" if call.has("pad") else "padding")  # fmt: skip
    return Rule(((*lead, *factors.read),), ((*lead, *factors.output),), modes=all_modes(0),
                local=local, slices=factors.windows)  # fmt: skip


register_rule(aten._pad_circular, *OTHERS.split())(pad_by_elements)


@dataclass(frozen=True, slots=True)
class _LocalElementsBackward(_LocalElements):
    """Local gradient of padding by elements; gradients of the padding are added to theirs."""

    def __call__(self, op: object, args: Args, kwargs: Kwargs, ctx: RankContext) -> object:
        """Run the operation on one rank."""
        if has_empty_shard(ctx):
            return zero_results(args, kwargs, ctx)[0]
        grad, x = args[:2]
        parts = spans(self.windows, ctx.operands[0], ctx.rank)
        for i, part in enumerate(parts):
            if part is not None:
                grad = scatter_taps(grad, i - len(parts), part, self.taps(i, part))
        rest = self.rest(parts)
        return call_with(op, (grad, x), kwargs, padding=rest) if any(rest) else grad


@register_rule(*(f"{name}_backward" for name in OTHERS.split()))
def pad_backward(call: OpCall) -> Rule:
    """Rule of the gradients of padding, added up where elements are repeated."""
    x = call.operands[1]
    windows, factors = _windows(call, x)
    lead: Dims = tuple((name,) for name in letters(2 * x.ndim)[: x.ndim - len(windows)])
    read = (*lead, *factors.read)
    local = _LocalElementsBackward(windows, tuple(_pairs(call, x.ndim)), "padding")
    return Rule(((*lead, *factors.output), read), (read,), modes=linear_modes(0), local=local,
                slices=factors.windows)  # fmt: skip
