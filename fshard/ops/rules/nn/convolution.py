"""Rules of convolutions: batch, groups, and channels in and out can be cut, windows need all.

Channels in are summed, so that they leave the result unreduced; the bias is counted once. Where
windows lie one beside the other, as those of patches, spatial dims can be cut between them as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.contraction.einsum_helpers import (
    Parts,
    added,
    are_apart,
    has_nothing,
    letters,
    nil,
)
from fshard.ops.strategy.local_call import LocalCall, RankContext, with_argument

__all__ = ["convolution", "convolution_backward"]

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


@dataclass(frozen=True, slots=True)
class _Letters:
    """The dims of a convolution's tensors: input, weight, bias, result; and factors in windows."""

    x: Dims
    weight: Dims
    bias: Dims
    made: Dims
    whole: frozenset[str]


def _dims(call: OpCall, x: Meta, weight: Meta, groups: int) -> _Letters:
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
    return _Letters((*batch, ins, *sides[0]), own, (outs,), (*batch, outs, *sides[1]), whole)


def _transposed(call: OpCall) -> bool:
    if call.has("transposed"):
        return bool(call.get("transposed"))
    return "transpose" in call.op._schema.name


@dataclass(frozen=True, slots=True)
class _Groups:
    """A change: as many groups as the rank has channels for."""

    x: int
    weight: int
    channel: int
    transposed: bool
    result: int | None = 0

    def __call__(self, call: LocalCall, here: RankContext) -> LocalCall:
        """The call with it."""
        weight = here.operands[self.weight].local_shape(here.rank)
        sides = here.operands[self.x], here.results[0] if self.result == 0 else here.operands[0]
        side = sides[1] if self.transposed else sides[0]
        assert side is not None
        channels = side.local_shape(here.rank)[self.channel]
        return with_argument(*call, "groups", channels // weight[1])


@register_rule(*WITH_GROUPS, *OF_ONE, family="convolution")
def convolution(call: OpCall) -> Rule:
    """Sums over channels in of products; groups are cut with their channels, in and out."""
    x, weight = call.operands[0], call.operands[1]
    groups = call.get("groups") if call.has("groups") else 1
    dims, bias = _dims(call, x, weight, groups), call.operand_index("bias")
    operands = [dims.x, dims.weight] + ([dims.bias] if bias is not None else [])
    channel = x.ndim - weight.ndim + 1
    changes = (_Groups(0, 1, channel, _transposed(call)),) if groups > 1 else ()
    once = () if bias is None else (bias,)
    return Rule(
        tuple(operands), (dims.made,), (("c", "sum"),), dims.whole,
        modes=linear_modes(0, 1) if bias is None else added(bias, (0, 1)),
        local=Parts(once, changes, along=channel),
    )  # fmt: skip


@register_rule(aten.conv_tbc, family="convolution")
def conv_tbc(call: OpCall) -> Rule:
    """A convolution in one dim, of tensors that lie time, batch, channels."""
    operands = (((), ("n",), ("c",)), ((), ("c",), ("o",)), (("o",),))
    return Rule(operands, (((), ("n",), ("o",)),), (("c", "sum"),), modes=added(2, (0, 1)),
                local=Parts((2,), along=2))  # fmt: skip


# -- gradients ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Backward:
    """Gradients of a convolution on one rank: the bias's, which is of no channel in, once."""

    parts: Parts
    channel: int

    def __call__(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> Any:
        """Run it on a rank."""
        made = list(self.parts(op, *self._resized(op, args, kwargs, here), here))
        x, bias = here.operands[1], here.results[2]
        if bias is None:
            return made
        if has_nothing(here):
            # Of no channels in there is no gradient but the bias's.
            grad = argument(op, args, kwargs, "grad_output")
            made[2] = made[2] + grad.sum([d for d in range(grad.ndim) if d != self.channel])
        coords, groups = x.mesh.coords(here.rank), bias.partition.dims[0]
        later = [a for a in x.partition.dims[self.channel] if a not in groups and coords[a]]
        return [*made[:2], nil(made[2]) if later else made[2]]

    def _resized(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], here: RankContext
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = "bias_sizes"
        if argument(op, args, kwargs, name) is None:
            return tuple(args), dict(kwargs)
        size = here.operands[0].local_shape(here.rank)[self.channel]
        _, placed, named = with_argument(op, args, kwargs, name, [size])
        return placed, named


@register_rule(aten.convolution_backward, family="convolution")
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
    changes = (_Groups(1, 2, channel, _transposed(call), None),) if groups > 1 else ()
    return Rule(
        (dims.made, dims.x, dims.weight), results,
        tuple(sorted((f, "sum") for f in seen if f != "g")),
        dims.whole,
        modes=linear_modes(0, results=3),
        local=_Backward(Parts(changes=changes), channel),
    )  # fmt: skip


@register_rule(aten.conv_tbc_backward, family="convolution")
def conv_tbc_backward(call: OpCall) -> Rule:
    """Its batch and channels out: the bias's gradient is of no channel in."""
    operands = (((), ("n",), ("o",)), ((), ("n",), ()), ((), (), ("o",)), (("o",),))
    results = (((), ("n",), ()), ((), (), ("o",)), (("o",),))
    return Rule(operands, results, (("n", "sum"), ("o", "sum")), modes=linear_modes(0, results=3),
                local=Parts())  # fmt: skip
