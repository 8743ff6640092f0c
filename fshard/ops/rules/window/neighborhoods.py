"""Neighborhood attention: an operation of fshard, its sharding rule, and those of its gradients.

Each query attends to the `kernel` keys around it; at the ends of a dim neighborhoods are shifted
inside, so that all have equally many keys (Neighborhood Attention Transformer, arXiv 2204.07143;
dilated: arXiv 2209.15001). Batch, heads and spatial dims may be sharded: keys and values are
windows of the queries, and only their halos are sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fshard._torch.functorch import apply_function, run_with_tangents
from fshard._torch.modes import DisableTorchFunction
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.core.windows import Window
from fshard.ops.rules.letters import letters
from fshard.ops.rules.shard_call import has_empty_shard, zero_results
from fshard.ops.rules.window.neighborhood_blocks import (
    Side,
    attend,
    attend_backward,
    attend_by_windows,
)
from fshard.ops.rules.window.window_dims import SpatialFactors, spans
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext


@torch.library.custom_op("fshard::neighborhood_attention", mutates_args=())
def neighborhood_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel_size: Sequence[int],
    dilation: Sequence[int], is_causal: Sequence[bool], scale: float,
) -> Tensor:  # fmt: skip
    """Return the attention of each query to the keys around it.

    Args:
        query: shape (batch, *spatial, heads, width).
        key: the same shape.
        value: shape (batch, *spatial, heads, value width).
        kernel_size: keys of a neighborhood along each spatial dim.
        dilation: their distance.
        is_causal: whether they end with the query, and are fewer at the begin of the dim.
        scale: the factor of the scores.
    """
    with DisableTorchFunction():
        sides = _sides(query, kernel_size, dilation, is_causal)
        return attend(query, key, value, sides, scale)


@torch.library.custom_op("fshard::neighborhood_attention_backward", mutates_args=())
def neighborhood_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, kernel_size: Sequence[int],
    dilation: Sequence[int], is_causal: Sequence[bool], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value."""
    with DisableTorchFunction():
        sides = _sides(query, kernel_size, dilation, is_causal)
        return attend_backward(grad, query, key, value, sides, scale)


def _sides(
    query: Tensor | Meta, kernels: Sequence[int], dilations: Sequence[int], causal: Sequence[bool]
) -> tuple[Side, ...]:
    """Return the spatial dims of all queries and keys."""
    rows = zip(query.shape[1:-2], kernels, dilations, causal, strict=True)
    return tuple(Side(0, 0, *row) for row in rows)


@neighborhood_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    return value.new_empty((*query.shape[:-1], value.shape[-1]))


@neighborhood_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.options = inputs[len(tensors) :]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = neighborhood_attention_backward(grad, *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None)


def _double_backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
    call = Neighborhoods(*ctx.options)
    return (*call.double_backward(ctx.saved_tensors, cotangents), None, None, None, None)


neighborhood_attention.register_autograd(_backward, setup_context=_save)
neighborhood_attention_backward.register_autograd(_double_backward, setup_context=_save)


def _batched(op: Callable[..., Any], info: Any, in_dims: Sequence[int | None], *args: Any) -> Any:
    """Return the results of an operation under `vmap`, whose batch is a part of the first dim."""
    rows = [
        x if not isinstance(x, Tensor)
        else (x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
              ).flatten(0, 1)
        for x, dim in zip(args, in_dims, strict=True)
    ]  # fmt: skip
    out, sizes = op(*rows), (info.batch_size, -1)
    if isinstance(out, Tensor):
        return out.unflatten(0, sizes), 0
    return tuple(y.unflatten(0, sizes) for y in out), (0,) * len(out)


for _op in (neighborhood_attention, neighborhood_attention_backward):
    _op.register_vmap(partial(_batched, _op))


class Attended(ABC):
    """Attention of neighborhoods whose derivatives of every kind are defined."""

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention."""

    @abstractmethod
    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return the gradients of query, key and value."""

    @abstractmethod
    def plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention, by operations that are differentiable repeatedly."""

    def double_backward(
        self, xs: Sequence[Tensor], cotangents: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the gradients of the inputs `xs` of `backward` for cotangents of its results."""
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]
            grad, query, key, value = inputs
            out = self.plain(query, key, value)
            grads = torch.autograd.grad(out, inputs[1:], grad, create_graph=True)
            return torch.autograd.grad(grads, inputs, cotangents, create_graph=create_graph)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention, differentiably, under transforms of `torch.func`, too."""
        (out,) = apply_function(_Attend, self, query, key, value)
        return out  # type: ignore[no-any-return]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.call = inputs[0]
    ctx.save_for_backward(*inputs[1:])


class _Attend(torch.autograd.Function):
    setup_context = staticmethod(_save_inputs)

    @staticmethod
    def forward(call: Attended, *xs: Tensor) -> tuple[Tensor, ...]:
        return (call.forward(*xs),)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (None, *apply_function(_AttendBackward, ctx.call, grad, *ctx.saved_tensors))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _batched(partial(apply_function, _Attend), info, in_dims, *args)

    @staticmethod
    def duals(level: int, args: Sequence[Any], tangents: Sequence[Any]) -> Any:
        call: Attended = args[0]
        return run_with_tangents(lambda *xs: (call.plain(*xs),), args[1:], tangents[1:])


class _AttendBackward(torch.autograd.Function):
    setup_context = staticmethod(_save_inputs)

    @staticmethod
    def forward(call: Attended, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(call.backward(*xs))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return (None, *ctx.call.double_backward(ctx.saved_tensors, cotangents))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _batched(partial(apply_function, _AttendBackward), info, in_dims, *args)

    @staticmethod
    def duals(level: int, args: Sequence[Any], tangents: Sequence[Any]) -> Any:
        call: Attended = args[0]

        def run(grad: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
            return tuple(torch.func.vjp(call.plain, *xs)[1](grad))

        return run_with_tangents(run, args[1:], tangents[1:])


@dataclass(frozen=True, slots=True)
class Neighborhoods(Attended):
    """Neighborhood attention of global tensors, by the operations, which have sharding rules.

    Attributes:
        kernel_size: keys of a neighborhood along each spatial dim.
        dilation: their distance.
        is_causal: whether they end with the query.
        scale: the factor of the scores.
    """

    kernel_size: Sequence[int]
    dilation: Sequence[int]
    is_causal: Sequence[bool]
    scale: float

    @property
    def options(self) -> tuple[Any, ...]:
        """Arguments of the operations after the tensors."""
        return self.kernel_size, self.dilation, self.is_causal, self.scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run the operation."""
        out: Tensor = neighborhood_attention(query, key, value, *self.options)
        return out

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Run the operation of the gradients."""
        grads: Sequence[Tensor] = neighborhood_attention_backward(
            grad, query, key, value, *self.options
        )
        return grads

    def plain(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention by operations of PyTorch, which have sharding rules."""
        sides = _sides(query, *self.options[:3])
        return attend_by_windows(query, key, value, sides, self.scale)


@dataclass(frozen=True, slots=True)
class _AttendedBlock(Attended):
    """Neighborhood attention of a block of queries to the keys that they read."""

    sides: tuple[Side, ...]
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention by tiles."""
        return attend(query, key, value, self.sides, self.scale)

    def backward(self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return the gradients by tiles."""
        return attend_backward(grad, query, key, value, self.sides, self.scale)

    plain = forward  # of tiles, which are differentiable


# -- rules --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalNeighborhoods:
    """Local attention of a rank's queries to the window of keys that they read, or its gradients.

    `query` is the operand that is the queries.
    """

    windows: tuple[Window, ...]
    sides: tuple[Side, ...]
    query: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        if has_empty_shard(ctx):
            result = zero_results(args, kwargs, ctx)
            return result if self.query else result[0]
        queries = ctx.operands[self.query]
        parts = spans((*self.windows, None, None), queries, ctx.rank)[:-2]
        sides = [
            side if part is None else replace(side, start=part.start, first=part.reach.start)
            for part, side in zip(parts, self.sides, strict=True)
        ]
        block = _AttendedBlock(tuple(sides), args[-1])
        if not self.query:
            return block(*args[:3])
        return list(apply_function(_AttendBackward, block, *args[:4]))


def _rule(call: OpCall, query: Meta) -> tuple[SpatialFactors, tuple[Window, ...], tuple[Side, ...]]:
    """Return the factors, windows and numbers of the spatial dims of a call."""
    count = query.ndim - 3
    names = letters(2 * count, "nhde")
    sides = _sides(query, *map(call.get, ("kernel_size", "dilation", "is_causal")))
    windows = tuple(_window(side, names[count + i], names[i]) for i, side in enumerate(sides))
    return SpatialFactors.of(windows, names), windows, sides


def _window(side: Side, name: str, of: str) -> Window:
    """Return the window of the queries `name` of a dim, of its keys `of`."""
    reach, step = side.dilation * (side.kernel - 1), side.dilation
    if side.causal:
        return Window(name, of, side.size, side.size, 1, -reach, 0, anchor=0)
    low = -step * (side.kernel // 2)
    return Window(name, of, side.size, side.size, 1, low, low + reach, anchor=0,
                  boundary="shifted", period=step * side.kernel)  # fmt: skip


def _dims(factors: Dims, width: str) -> Dims:
    return (("n",), *factors, ("h",), (width,))


@register_rule(torch.ops.fshard.neighborhood_attention.default)
def neighborhood_attention_rule(call: OpCall) -> Rule:
    """Rule `nyhd,nxhd,nxhe->nyhe` of neighborhood attention: `x` are windows of `y`."""
    factors, windows, sides = _rule(call, call.operands[0])
    keys = _dims(factors.read, "d"), _dims(factors.read, "e")
    return Rule((_dims(factors.output, "d"), *keys), (_dims(factors.output, "e"),),
                unsharded=frozenset("d"), modes=linear_modes(2),
                local=_LocalNeighborhoods(windows, sides, 0), slices=factors.windows)  # fmt: skip


@register_rule(torch.ops.fshard.neighborhood_attention_backward.default)
def neighborhood_attention_backward_rule(call: OpCall) -> Rule:
    """Rule of its gradients; where windows overlap, gradients of keys and values add up."""
    factors, windows, sides = _rule(call, call.operands[1])
    inputs = (_dims(factors.output, "d"), _dims(factors.read, "d"), _dims(factors.read, "e"))
    return Rule((_dims(factors.output, "e"), *inputs), inputs, unsharded=frozenset("de"),
                modes=linear_modes(0, results=3),
                local=_LocalNeighborhoods(windows, sides, 1), slices=factors.windows)  # fmt: skip
