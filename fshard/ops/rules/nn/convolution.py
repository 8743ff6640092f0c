"""Rules of convolutions: batch, groups, and channels in and out can be cut, windows need all.

Channels in are summed, so that they leave the result unreduced; the bias is counted once. Where
windows lie one beside the other, as those of patches, spatial dims can be cut between them as well.
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
from fshard.ops.rules.einsum_letters import addend_modes, letters
from fshard.ops.rules.shard_call import ShardCall, has_empty_shard, zeros_with_grad
from fshard.ops.strategy.local_call import Args, Kwargs, LocalCall, RankContext, with_argument

__all__ = ["are_apart"]

aten = torch.ops.aten

WITH_GROUPS = (
    aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose1d, aten.conv_transpose2d,
    aten.conv_transpose3d, aten.convolution, aten._convolution,
    aten._convolution_mode,
)  # fmt: skip
OF_ONE = (
    aten.thnn_conv2d, aten._slow_conv2d_forward, aten.slow_conv3d, aten.slow_conv3d_forward,
    aten.slow_conv_dilated2d, aten.slow_conv_dilated3d, aten.slow_conv_transpose2d,
    aten.slow_conv_transpose3d,
)  # fmt: skip


def are_apart(call: OpCall, at: int, size: int, kernel: int) -> bool:
    """Whether windows of `kernel` along the spatial dim `at` lie one beside the other.

    Then all of a dim of `size` is read, every element by one window. Reads the arguments stride,
    padding, output_padding and dilation, of which a number or one in a list is of all dims.
    """

    def value(name: str, default: int) -> int | str:
        given = call.get(name) if call.has(name) else default
        if isinstance(given, list | tuple):
            given = given[at if len(given) > 1 else 0] if given else default
        return default if given is None else given

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
    """The dims of a convolution's tensors: input, weight, bias, result; and factors in windows."""

    x: Dims
    weight: Dims
    bias: Dims
    made: Dims
    whole: frozenset[str]


def _dims(call: OpCall, x: Meta, weight: Meta, groups: int) -> _ConvDims:
    """`n(gc)s` and `(go)ck` make `n(go)s`; groups only where there are some.

    A spatial dim whose windows lie apart is one of windows, major, and of elements in each.
    """
    spatial, transposed = weight.ndim - 2, _transposed(call)
    every = letters(2 * spatial, "cgnok")
    many: list[tuple[str, ...]] = []
    one: list[tuple[str, ...]] = []
    kernel: list[tuple[str, ...]] = []
    for at in range(spatial):
        size, width = x.shape[x.ndim - spatial + at], weight.shape[2 + at]
        # A transposed window makes what another reads.
        apart = are_apart(call, at, size * width if transposed else size, width)
        inner = (every[spatial + at],) if apart and width > 1 else ()
        one.append((every[at],) if apart else ())
        many.append(one[-1] + inner)
        kernel.append(inner)
    g = ("g",) if groups > 1 else ()
    ins, outs = (*g, "c"), (*g, "o")
    batch = (("n",),) if x.ndim == weight.ndim else ()
    sides = (one, many) if transposed else (many, one)
    own = (ins, ("o",), *kernel) if transposed else (outs, ("c",), *kernel)
    whole = frozenset(f for dim in kernel for f in dim)
    return _ConvDims((*batch, ins, *sides[0]), own, (outs,), (*batch, outs, *sides[1]), whole)


def _transposed(call: OpCall) -> bool:
    if call.has("transposed"):
        return bool(call.get("transposed"))
    return "transpose" in schema_of(call.op).name


@dataclass(frozen=True, slots=True)
class _SetGroups:
    """A change: as many groups as the rank has channels for."""

    x: int
    weight: int
    channel: int
    transposed: bool
    result: int | None = 0

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """The call with it."""
        weight = ctx.operands[self.weight].local_shape(ctx.rank)
        sides = ctx.operands[self.x], ctx.results[0] if self.result == 0 else ctx.operands[0]
        side = sides[1] if self.transposed else sides[0]
        assert side is not None
        channels = side.local_shape(ctx.rank)[self.channel]
        return with_argument(*call, "groups", channels // weight[1])


@register_rule(*WITH_GROUPS, *OF_ONE)
def convolution(call: OpCall) -> Rule:
    """Sums over channels in of products; groups are cut with their channels, in and out."""
    x, weight = call.operands[0], call.operands[1]
    groups = call.get("groups") if call.has("groups") else 1
    dims, bias = _dims(call, x, weight, groups), call.operand_index("bias")
    operands = [dims.x, dims.weight] + ([dims.bias] if bias is not None else [])
    channel = x.ndim - weight.ndim + 1
    changes = (_SetGroups(0, 1, channel, _transposed(call)),) if groups > 1 else ()
    once = () if bias is None else (bias,)
    return Rule(
        tuple(operands), (dims.made,), (("c", "sum"),), dims.whole,
        modes=linear_modes(0, 1) if bias is None else addend_modes(bias, (0, 1)),
        local=ShardCall(once, changes, along=channel),
    )  # fmt: skip


@register_rule(aten.conv_tbc)
def conv_tbc(call: OpCall) -> Rule:
    """A convolution in one dim, of tensors that lie time, batch, channels."""
    operands = (((), ("n",), ("c",)), ((), ("c",), ("o",)), (("o",),))
    return Rule(operands, (((), ("n",), ("o",)),), (("c", "sum"),), modes=addend_modes(2, (0, 1)),
                local=ShardCall((2,), along=2))  # fmt: skip


# -- gradients ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalConvBackward:
    """Gradients of a convolution on one rank: the bias's, which is of no channel in, once."""

    parts: ShardCall
    channel: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run it on a rank."""
        made = list(self.parts(op, *self._resized(op, args, kwargs, ctx), ctx))
        x, bias = ctx.operands[1], ctx.results[2]
        if bias is None:
            return made
        if has_empty_shard(ctx):
            # Of no channels in there is no gradient but the bias's.
            grad = argument(op, args, kwargs, "grad_output")
            made[2] = made[2] + grad.sum([d for d in range(grad.ndim) if d != self.channel])
        coords, groups = x.mesh.coords(ctx.rank), bias.partition.dims[0]
        later = [a for a in x.partition.dims[self.channel] if a not in groups and coords[a]]
        return [*made[:2], zeros_with_grad(made[2]) if later else made[2]]

    def _resized(
        self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = "bias_sizes"
        if argument(op, args, kwargs, name) is None:
            return tuple(args), dict(kwargs)
        size = ctx.operands[0].local_shape(ctx.rank)[self.channel]
        _, placed, named = with_argument(op, args, kwargs, name, [size])
        return placed, named


@register_rule(aten.convolution_backward)
def convolution_backward(call: OpCall) -> Rule:
    """Gradients of input, weight and bias: every one sums over what it has not."""
    x, weight, groups = call.operands[1], call.operands[2], call.get("groups")
    dims = _dims(call, x, weight, groups)
    channel = x.ndim - weight.ndim + 1
    made = (dims.x, dims.weight, dims.bias)
    results = tuple(
        None if meta is None else each for each, meta in zip(made, call.results, strict=True)
    )
    seen = dict.fromkeys(
        f for each in (dims.made, dims.x, dims.weight) for dim in each for f in dim
    )
    changes = (_SetGroups(1, 2, channel, _transposed(call), None),) if groups > 1 else ()
    return Rule(
        (dims.made, dims.x, dims.weight), results,
        tuple(sorted((f, "sum") for f in seen if f != "g")),
        dims.whole,
        modes=linear_modes(0, results=3),
        local=_LocalConvBackward(ShardCall(changes=changes), channel),
    )  # fmt: skip


@register_rule(aten.conv_tbc_backward)
def conv_tbc_backward(call: OpCall) -> Rule:
    """Its batch and channels out: the bias's gradient is of no channel in."""
    operands = (((), ("n",), ("o",)), ((), ("n",), ()), ((), (), ("o",)), (("o",),))
    results = (((), ("n",), ()), ((), (), ("o",)), (("o",),))
    return Rule(operands, results, (("n", "sum"), ("o", "sum")), modes=linear_modes(0, results=3),
                local=ShardCall())  # fmt: skip
