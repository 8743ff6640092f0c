"""Rules of convolutions: conv1d to conv3d, transposed ones, conv_tbc, and their gradients.

Batch, groups and channels may be sharded; input channels are summed, and the bias is counted
once. Spatial dims may be sharded: each rank reads the window of its part of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard._util.errors import Problem, raise_if
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall, argument, schema_arguments
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.core.window_arguments import convolution_problems
from fshard.ops.core.windows import Window
from fshard.ops.rules.letters import bias_modes, letters
from fshard.ops.rules.shard_call import (
    ShardCall,
    StaticRewrite,
    call_with,
    has_empty_shard,
    zero_results,
    zeros_with_grad,
)
from fshard.ops.rules.window.window_dims import (
    Span,
    SpatialFactors,
    Windows,
    padded,
    reads_nothing,
    spans,
    spatial_value,
)
from fshard.ops.strategy.local_call import Args, Kwargs, LocalCall, RankContext, with_argument

aten = torch.ops.aten

WITH_GROUPS = (
    aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose1d, aten.conv_transpose2d,
    aten.conv_transpose3d, aten.convolution, aten._convolution,
    aten._convolution_mode,
)  # fmt: skip
WITHOUT_GROUPS = (
    aten.thnn_conv2d, aten._slow_conv2d_forward, aten.slow_conv3d, aten.slow_conv3d_forward,
    aten.slow_conv_dilated2d, aten.slow_conv_dilated3d, aten.slow_conv_transpose2d,
    aten.slow_conv_transpose3d,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Spatial:
    """One spatial dim of a convolution: stride, extent of a window less one, padding of both ends.

    The padding of a transposed convolution is what its result is cropped by.
    """

    stride: int
    extent: int
    before: int
    after: int

    @staticmethod
    def of(call: OpCall, dim: int, kernel: int) -> _Spatial:
        """Return the convolution along one dim of a call."""
        extent = spatial_value(call, "dilation", dim, 1) * (kernel - 1)
        padding = call.get("padding") if call.has("padding") else 0
        if isinstance(padding, str):
            before = extent // 2 if padding == "same" else 0
            after = extent - before if padding == "same" else 0
        else:
            before = after = spatial_value(call, "padding", dim, 0)
        return _Spatial(spatial_value(call, "stride", dim, 1), extent, before, after)

    def window(self, names: tuple[str, str], read: int, output: int, transposed: bool) -> Window:
        """Return the window of a dim of `read` elements, `output` of the result."""
        if not transposed:
            low, boundary = -self.before, "padded" if read else "zeros"
            return Window(*names[::-1], output, read, self.stride, low, low + self.extent,
                          boundary=boundary)  # fmt: skip
        low = self.before - self.extent + self.stride - 1
        return Window(*names[::-1], output, read, 1, low, self.before, per=self.stride)

    @property
    def is_pointwise(self) -> bool:
        """True if each element of the result is computed of the element at its place."""
        return (self.stride, self.extent, self.before, self.after) == (1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _ConvDims:
    """Dims of a convolution's input, weight, bias and result, its windows, and kernel factors."""

    x: Dims
    weight: Dims
    bias: Dims
    result: Dims
    kernel: frozenset[str]
    slices: tuple[Window, ...]
    local: _LocalWindows


def _dims(call: OpCall, x: Meta, weight: Meta, result: Meta, groups: int) -> _ConvDims:
    """Return dims as in `n(gc)s,(go)ck->n(go)t`; `g` only with several groups.

    Spatial dims of the result are windows of those of the input.
    """
    count, transposed = weight.ndim - 2, _transposed(call)
    names = letters(3 * count, "cgnok")
    numbers = tuple(_Spatial.of(call, i, weight.shape[2 + i]) for i in range(count))
    windows: Windows = tuple(
        None
        if spatial.is_pointwise and x.shape[i - count] == result.shape[i - count]
        else spatial.window((names[i], names[count + i]), x.shape[i - count],
                            result.shape[i - count], transposed)
        for i, spatial in enumerate(numbers)
    )  # fmt: skip
    factors = SpatialFactors.of(windows, names)
    kernel = tuple((names[2 * count + i],) if windows[i] else () for i in range(count))
    g = ("g",) if groups > 1 else ()
    ins, outs = (*g, "c"), (*g, "o")
    batch = (("n",),) if x.ndim == weight.ndim else ()
    weight_dims = (ins, ("o",), *kernel) if transposed else (outs, ("c",), *kernel)
    return _ConvDims(
        (*batch, ins, *factors.read), weight_dims, (outs,), (*batch, outs, *factors.output),
        frozenset(f for dim in kernel for f in dim), factors.windows,
        _LocalWindows(windows, numbers, transposed),
    )  # fmt: skip


def _transposed(call: OpCall) -> bool:
    if call.has("transposed"):
        return bool(call.get("transposed"))
    return "transpose" in schema_of(call.op).name


# -- local calls ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SetGroups(StaticRewrite):
    """Rewrite: set `groups` to the number of groups of this rank's channels."""

    x: int
    weight: int
    channel: int
    transposed: bool
    result: int | None = 0

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        weight = ctx.operands[self.weight].local_shape(ctx.rank)
        sides = ctx.operands[self.x], ctx.results[0] if self.result == 0 else ctx.operands[0]
        side = sides[1] if self.transposed else sides[0]
        assert side is not None
        channels = side.local_shape(ctx.rank)[self.channel]
        return with_argument(*call, "groups", channels // weight[1])


Pairs = list[tuple[int, int]]
"""Elements before and after each spatial dim."""


@dataclass(frozen=True, slots=True)
class _LocalWindows(StaticRewrite):
    """Rewrite: convolve the window of this rank, or crop the result of a transposed convolution.

    The window of a sharded dim has the padding of the dim at its ends.
    """

    windows: Windows
    numbers: tuple[_Spatial, ...]
    transposed: bool

    def _parts(self, ctx: RankContext) -> tuple[Span | None, ...]:
        return spans(self.windows, ctx.result, ctx.rank)

    def is_static(self, call: LocalCall, ctx: RankContext) -> bool:
        """Return True if the rewrite pads and crops nothing."""
        parts = self._parts(ctx)
        return not any(parts) or not (self.transposed or any(map(any, self.paddings(parts)[1])))

    def paddings(self, parts: tuple[Span | None, ...]) -> tuple[list[int], Pairs]:
        """Return the padding that a convolution of windows has, and that it lacks."""
        pairs = [(0, 0) if part else (n.before, n.after)
                 for part, n in zip(parts, self.numbers, strict=True)]  # fmt: skip
        symmetric = [before if before == after else 0 for before, after in pairs]
        return symmetric, [(0, 0) if pair[0] == pair[1] else pair for pair in pairs]

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        parts = self._parts(ctx)
        if not any(parts):
            return call
        if self.transposed:
            return self._cropped(call, parts, ctx)
        op, args, kwargs = call
        if isinstance(argument(*call, "padding"), str):
            op = getattr(aten, f"conv{len(parts)}d").default
        symmetric, rest = self.paddings(parts)
        return with_argument(op, (padded(args[0], rest), *args[1:]), kwargs, "padding", symmetric)

    def frames(self, parts: tuple[Span | None, ...]) -> Pairs:
        """Return for each dim the elements by which a result exceeds that of the bare window.

        A transposed convolution of a window without padding makes elements from `start * stride -
        padding` of the global result on; negative numbers are those to crop.
        """
        pairs: Pairs = []
        for part, n in zip(parts, self.numbers, strict=True):
            if part is None:
                pairs.append((0, 0))
                continue
            start, stop = part.reach.start, part.reach.stop
            first = start * n.stride - n.before
            end = first + (stop - start - 1) * n.stride + n.extent + 1
            pairs.append((first - part.start, part.stop - end))
        return pairs

    def bare(self, call: LocalCall, parts: tuple[Span | None, ...]) -> LocalCall:
        """Return the call of a transposed convolution without padding along sharded dims."""
        for name in ("padding", "output_padding"):
            values = argument(*call, name)
            listed = list(values) * (1 if len(values) > 1 else len(parts))
            kept = [0 if part else value for part, value in zip(parts, listed, strict=True)]
            call = with_argument(*call, name, kept)
        return call

    def _cropped(
        self, call: LocalCall, parts: tuple[Span | None, ...], ctx: RankContext
    ) -> LocalCall:
        pairs = self.frames(parts)
        op, args, kwargs = self.bare(call, parts)

        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            bias = argument(op, args, kwargs, "bias")
            out: torch.Tensor | None = None
            if reads_nothing(parts):
                out = zero_results(args, kwargs, ctx)[0]
            else:
                out = padded(call_with(op, args, kwargs, bias=None), pairs)
            assert out is not None
            if bias is None:
                return out
            result: torch.Tensor = out + bias.view(-1, *[1] * len(parts))
            return result

        return run, args, kwargs


def _check(call: OpCall) -> None:
    """Raise for arguments that PyTorch refuses on devices alone, not in the shapes of results."""
    x, weight = call.operands[0], call.operands[1]
    values = {argument.name: call.get(argument.name) for argument in schema_arguments(call.op)}
    problems = convolution_problems({**values, "input": x}, weight.ndim - 2, _transposed(call))
    if x.dtype != weight.dtype:
        problems.append(Problem(f"input of {x.dtype}, weight of {weight.dtype}",
                                "both must have one dtype", f"weight.to({x.dtype})"))  # fmt: skip
    raise_if(f"fs.propagate({call.op})", problems)


@register_rule(*WITH_GROUPS, *WITHOUT_GROUPS)
def convolution(call: OpCall) -> Rule:
    """Rule `ncbd,ocij->noef` of convolutions; groups are sharded with their channels.

    Spatial dims of the result are windows of those of the input.
    """
    _check(call)
    x, weight = call.operands[0], call.operands[1]
    groups = call.get("groups") if call.has("groups") else 1
    dims, bias = _dims(call, x, weight, call.result, groups), call.operand_index("bias")
    operands = [dims.x, dims.weight] + ([dims.bias] if bias is not None else [])
    channel = x.ndim - weight.ndim + 1
    changes = (_SetGroups(0, 1, channel, _transposed(call)),) if groups > 1 else ()
    once = () if bias is None else (bias,)
    return Rule(
        tuple(operands), (dims.result,), (("c", "sum"),), dims.kernel,
        modes=linear_modes(0, 1) if bias is None else bias_modes(bias, (0, 1)),
        local=ShardCall(once, (*changes, dims.local), once_dim=channel), slices=dims.slices,
        added=frozenset(once),
    )  # fmt: skip


@register_rule(aten.conv_tbc)
def conv_tbc(call: OpCall) -> Rule:
    """Rule `1nc,1co,o->1no` of a 1-d convolution of tensors with dims time, batch, channels."""
    operands = (((), ("n",), ("c",)), ((), ("c",), ("o",)), (("o",),))
    return Rule(operands, (((), ("n",), ("o",)),), (("c", "sum"),), modes=bias_modes(2, (0, 1)),
                local=ShardCall((2,), once_dim=2), added=frozenset((2,)))  # fmt: skip


# -- gradients ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalConvBackward:
    """Local gradients of a convolution; the bias's, which has no input channel, is counted once."""

    parts: ShardCall
    channel: int
    windows: _LocalWindows

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        spanned = spans(self.windows.windows, ctx.operands[0], ctx.rank)
        resized = self._resized(op, args, kwargs, ctx)
        gradients = self._of_windows(op, *resized, ctx, spanned)
        x, bias = ctx.operands[1], ctx.results[2]
        if bias is None:
            return gradients
        if has_empty_shard(ctx) or any(spanned):
            # Without input only the bias has a gradient; a window may not reach all results.
            grad = argument(op, args, kwargs, "grad_output")
            gradients[2] = grad.sum([d for d in range(grad.ndim) if d != self.channel])
        coords, groups = x.mesh.coords(ctx.rank), bias.partition.dims[0]
        later = [a for a in x.partition.dims[self.channel] if a not in groups and coords[a]]
        return [*gradients[:2], zeros_with_grad(gradients[2]) if later else gradients[2]]

    def _of_windows(
        self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext,
        spanned: tuple[Span | None, ...],
    ) -> list[Any]:  # fmt: skip
        """Return the gradients of one rank's window, of the weight and of the bias."""
        if not any(spanned) or has_empty_shard(ctx):
            return list(self.parts(op, args, kwargs, ctx))
        if reads_nothing(spanned):
            return zero_results(args, kwargs, ctx)
        if self.windows.transposed:
            grad = argument(op, args, kwargs, "grad_output")
            frame = [(-before, -after) for before, after in self.windows.frames(spanned)]
            call = self.windows.bare((op, tuple(args), dict(kwargs)), spanned)
            call = with_argument(*call, "grad_output", padded(grad, frame))
            return list(self.parts(*call, ctx))
        padding, _ = self.windows.paddings(spanned)
        return list(self.parts(*with_argument(op, args, kwargs, "padding", padding), ctx))

    def _resized(
        self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = "bias_sizes"
        if argument(op, args, kwargs, name) is None:
            return tuple(args), dict(kwargs)
        size = ctx.operands[0].local_shape(ctx.rank)[self.channel]
        _, new_args, new_kwargs = with_argument(op, args, kwargs, name, [size])
        return new_args, new_kwargs


@register_rule(aten.convolution_backward)
def convolution_backward(call: OpCall) -> Rule:
    """Rule of the gradients of input, weight and bias, each summed over the factors it lacks."""
    x, weight, groups = call.operands[1], call.operands[2], call.get("groups")
    dims = _dims(call, x, weight, call.operands[0], groups)
    channel = x.ndim - weight.ndim + 1
    gradient_dims = (dims.x, dims.weight, dims.bias)
    results = tuple(
        None if meta is None else factors
        for factors, meta in zip(gradient_dims, call.results, strict=True)
    )
    seen = dict.fromkeys(
        f for factors in (dims.result, dims.x, dims.weight) for dim in factors for f in dim
    )
    changes = (_SetGroups(1, 2, channel, _transposed(call), None),) if groups > 1 else ()
    return Rule(
        (dims.result, dims.x, dims.weight), results,
        tuple(sorted((f, "sum") for f in seen if f != "g")),
        dims.kernel,
        modes=linear_modes(0, results=3),
        local=_LocalConvBackward(ShardCall(rewrites=changes), channel, dims.local),
        slices=dims.slices,
    )  # fmt: skip


@register_rule(aten.conv_tbc_backward)
def conv_tbc_backward(call: OpCall) -> Rule:
    """Rule of `conv_tbc`'s gradients: batch and output channels are summed."""
    operands = (((), ("n",), ("o",)), ((), ("n",), ()), ((), (), ("o",)), (("o",),))
    results = (((), ("n",), ()), ((), (), ("o",)), (("o",),))
    return Rule(operands, results, (("n", "sum"), ("o", "sum")), modes=linear_modes(0, results=3),
                local=ShardCall())  # fmt: skip
