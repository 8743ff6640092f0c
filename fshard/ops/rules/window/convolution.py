"""Rules of convolutions: conv1d to conv3d, transposed ones, conv_tbc, and their gradients.

Batch, groups and channels may be sharded; input channels are summed, and the bias is counted
once. Spatial dims may be sharded between windows that do not overlap, as those of patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.letters import bias_modes, letters
from fshard.ops.rules.shard_call import ShardCall, has_empty_shard, zeros_with_grad
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


def windows_tile(call: OpCall, dim: int, size: int, kernel: int) -> bool:
    """Return True if windows of size `kernel` along the spatial dim `dim` tile the dim.

    Every element of a dim of `size` is then in exactly one window. The arguments stride, padding,
    output_padding and dilation are read; a number or a list of one is for all dims.
    """

    def value(name: str, default: int) -> int | str:
        values = call.get(name) if call.has(name) else default
        if isinstance(values, list | tuple):
            values = values[dim if len(values) > 1 else 0] if values else default
        return default if values is None else values

    padding = value("padding", 0)
    return (
        kernel > 0
        and size % kernel == 0
        and value("stride", kernel) == kernel
        and (padding in (0, "valid") or (padding == "same" and kernel == 1))
        and value("output_padding", 0) == 0
        and (value("dilation", 1) == 1 or kernel == 1)
    )


@dataclass(frozen=True, slots=True)
class _ConvDims:
    """Dims of a convolution's input, weight, bias and result, and the factors inside windows."""

    x: Dims
    weight: Dims
    bias: Dims
    result: Dims
    unsharded: frozenset[str]


def _dims(call: OpCall, x: Meta, weight: Meta, groups: int) -> _ConvDims:
    """Return dims as in `n(gc)s,(go)ck->n(go)s`; `g` only with several groups.

    A spatial dim with tiling windows is a product of windows, major, and elements in each.
    """
    spatial, transposed = weight.ndim - 2, _transposed(call)
    names = letters(2 * spatial, "cgnok")
    window_dims: list[tuple[str, ...]] = []
    outer_dims: list[tuple[str, ...]] = []
    kernel: list[tuple[str, ...]] = []
    for i in range(spatial):
        size, width = x.shape[x.ndim - spatial + i], weight.shape[2 + i]
        # A transposed convolution writes the window that a convolution reads.
        tiles = windows_tile(call, i, size * width if transposed else size, width)
        inner = (names[spatial + i],) if tiles and width > 1 else ()
        outer_dims.append((names[i],) if tiles else ())
        window_dims.append(outer_dims[-1] + inner)
        kernel.append(inner)
    g = ("g",) if groups > 1 else ()
    ins, outs = (*g, "c"), (*g, "o")
    batch = (("n",),) if x.ndim == weight.ndim else ()
    sides = (outer_dims, window_dims) if transposed else (window_dims, outer_dims)
    weight_dims = (ins, ("o",), *kernel) if transposed else (outs, ("c",), *kernel)
    unsharded = frozenset(f for dim in kernel for f in dim)
    result = (*batch, outs, *sides[1])
    return _ConvDims((*batch, ins, *sides[0]), weight_dims, (outs,), result, unsharded)


def _transposed(call: OpCall) -> bool:
    if call.has("transposed"):
        return bool(call.get("transposed"))
    return "transpose" in schema_of(call.op).name


@dataclass(frozen=True, slots=True)
class _SetGroups:
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


@register_rule(*WITH_GROUPS, *WITHOUT_GROUPS)
def convolution(call: OpCall) -> Rule:
    """Rule `nc11,oc11,o->no11` of convolutions; groups are sharded with their channels."""
    x, weight = call.operands[0], call.operands[1]
    groups = call.get("groups") if call.has("groups") else 1
    dims, bias = _dims(call, x, weight, groups), call.operand_index("bias")
    operands = [dims.x, dims.weight] + ([dims.bias] if bias is not None else [])
    channel = x.ndim - weight.ndim + 1
    changes = (_SetGroups(0, 1, channel, _transposed(call)),) if groups > 1 else ()
    once = () if bias is None else (bias,)
    return Rule(
        tuple(operands), (dims.result,), (("c", "sum"),), dims.unsharded,
        modes=linear_modes(0, 1) if bias is None else bias_modes(bias, (0, 1)),
        local=ShardCall(once, changes, once_dim=channel),
    )  # fmt: skip


@register_rule(aten.conv_tbc)
def conv_tbc(call: OpCall) -> Rule:
    """Rule `1nc,1co,o->1no` of a 1-d convolution of tensors with dims time, batch, channels."""
    operands = (((), ("n",), ("c",)), ((), ("c",), ("o",)), (("o",),))
    return Rule(operands, (((), ("n",), ("o",)),), (("c", "sum"),), modes=bias_modes(2, (0, 1)),
                local=ShardCall((2,), once_dim=2))  # fmt: skip


# -- gradients ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalConvBackward:
    """Local gradients of a convolution; the bias's, which has no input channel, is counted once."""

    parts: ShardCall
    channel: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        gradients = list(self.parts(op, *self._resized(op, args, kwargs, ctx), ctx))
        x, bias = ctx.operands[1], ctx.results[2]
        if bias is None:
            return gradients
        if has_empty_shard(ctx):
            # Without input channels only the bias has a gradient.
            grad = argument(op, args, kwargs, "grad_output")
            gradients[2] = gradients[2] + grad.sum(
                [d for d in range(grad.ndim) if d != self.channel]
            )
        coords, groups = x.mesh.coords(ctx.rank), bias.partition.dims[0]
        later = [a for a in x.partition.dims[self.channel] if a not in groups and coords[a]]
        return [*gradients[:2], zeros_with_grad(gradients[2]) if later else gradients[2]]

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
    dims = _dims(call, x, weight, groups)
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
        dims.unsharded,
        modes=linear_modes(0, results=3),
        local=_LocalConvBackward(ShardCall(rewrites=changes), channel),
    )  # fmt: skip


@register_rule(aten.conv_tbc_backward)
def conv_tbc_backward(call: OpCall) -> Rule:
    """Rule of `conv_tbc`'s gradients: batch and output channels are summed."""
    operands = (((), ("n",), ("o",)), ((), ("n",), ()), ((), (), ("o",)), (("o",),))
    results = (((), ("n",), ()), ((), (), ("o",)), (("o",),))
    return Rule(operands, results, (("n", "sum"), ("o", "sum")), modes=linear_modes(0, results=3),
                local=ShardCall())  # fmt: skip
