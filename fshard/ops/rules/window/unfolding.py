"""Rules of im2col and col2im, which are `unfold` and `fold`, and are each other's transposes.

Batch and channels may be sharded, and rows of the plane: each rank unfolds the window of its part
of the columns. Folding adds columns up where their windows overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fshard.layout.spec import Spec
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.core.windows import Window
from fshard.ops.rules.shard_call import call_with, has_empty_shard, zero_results
from fshard.ops.rules.window.window_dims import Span, padded, planes, spatial_value
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Plane:
    """Rows and columns of a plane of which windows are columns: windows, and padding."""

    windows: tuple[Window, Window]
    padding: tuple[int, int]

    @staticmethod
    def of(call: OpCall, plane: Meta) -> _Plane:
        """Return the windows of a call, of the rows `b` and the columns `d` of a plane."""
        windows, padding = [], []
        for i, (name, of) in enumerate((("e", "b"), ("f", "d"))):
            size, kernel, stride, pad, dilation = (
                plane.shape[i - 2],
                *(
                    spatial_value(call, word, i, 1)
                    for word in ("kernel_size", "stride", "padding", "dilation")
                ),
            )
            extent = dilation * (kernel - 1)
            length = (size + 2 * pad - extent - 1) // stride + 1
            windows.append(Window(name, of, length, size, stride, -pad, extent - pad))
            padding.append(pad)
        return _Plane((windows[0], windows[1]), (padding[0], padding[1]))

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Lengths of the factors of the columns, which are one dim."""
        return tuple((window.name, len(window)) for window in self.windows)

    def dims(self, plane: Meta) -> tuple[Dims, Dims]:
        """Return the dims of the plane and of the columns."""
        lead = planes(plane, 2)
        return (*lead, ("b",), ("d",)), (*lead[:-1], ("c", "k"), ("e", "f"))

    def span(self, columns: Spec, rank: int) -> Span | None:
        """Return the rows of windows that a rank has, None if columns are not sharded."""
        dim, width = columns.ndim - 1, len(self.windows[1])
        if not columns.partition.dims[dim]:
            return None
        start = columns.offsets(rank)[dim] // width
        stop = start + columns.local_shape(rank)[dim] // width
        return Span(start, stop, self.windows[0].reach(start, stop))


@dataclass(frozen=True, slots=True)
class _LocalUnfold:
    """Local columns of the padded window of rows."""

    plane: _Plane

    def __call__(self, op: object, args: Args, kwargs: Kwargs, ctx: RankContext) -> object:
        """Run the operation on one rank."""
        if has_empty_shard(ctx) or 0 in ctx.shape():
            return zero_results(args, kwargs, ctx)[0]
        span = self.plane.span(ctx.result, ctx.rank)
        if span is None:
            return op(*args, **kwargs)  # type: ignore[operator]
        x = padded(args[0], [span.reach[2:], (0, 0)])
        return call_with(op, (x, *args[1:]), kwargs, padding=[0, self.plane.padding[1]])


@dataclass(frozen=True, slots=True)
class _LocalFold:
    """Local plane of the columns of a rank: the window of rows that they cover."""

    plane: _Plane

    def __call__(self, op: object, args: Args, kwargs: Kwargs, ctx: RankContext) -> object:
        """Run the operation on one rank."""
        if has_empty_shard(ctx) or 0 in ctx.shape():
            return zero_results(args, kwargs, ctx)[0]
        span = self.plane.span(ctx.operands[0], ctx.rank)
        if span is None:
            return op(*args, **kwargs)  # type: ignore[operator]
        columns, (before, after) = self.plane.windows[1], span.reach[2:]
        size = [span.reach.stop - span.reach.start + before + after, columns.size]
        out = call_with(op, args, kwargs, output_size=size, padding=[0, self.plane.padding[1]])
        return padded(out, [(-before, -after), (0, 0)])


@register_rule(aten.im2col)
def im2col(call: OpCall) -> Rule:
    """Rule `ncbd->n(ck)(ef)` of `im2col`: `e` and `f` are windows of `b` and `d`.

    Channels are major to a window's elements.
    """
    plane = _Plane.of(call, call.operands[0])
    read, output = plane.dims(call.operands[0])
    return Rule((read,), (output,), unsharded=frozenset("kd"), modes=linear_modes(0),
                local=_LocalUnfold(plane), sizes=plane.sizes, slices=plane.windows)  # fmt: skip


@register_rule(aten.col2im)
def col2im(call: OpCall) -> Rule:
    """Rule `n(ck)(ef)->ncbd` of `col2im`, which adds up columns at their windows' positions."""
    plane = _Plane.of(call, call.result)
    read, output = plane.dims(call.result)
    return Rule((output,), (read,), unsharded=frozenset("kd"), modes=linear_modes(0),
                local=_LocalFold(plane), sizes=plane.sizes, slices=plane.windows)  # fmt: skip
