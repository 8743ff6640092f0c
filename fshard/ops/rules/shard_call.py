"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from fshard.layout.spec import Spec
from fshard.ops.core.call import argument, map_instances
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
    with_argument,
)

__all__ = [
    "ExpandArgument", "SetArgument", "SetLocalShape", "ShardCall", "has_empty_shard",
    "zeros_with_grad",
]  # fmt: skip

Change = Callable[[LocalCall, RankContext], LocalCall]


@dataclass(frozen=True, slots=True)
class ShardCall(LocalRewrite):
    """A local call: arguments changed, addends counted once, and zeros where a part is empty.

    Of an axis over which the first result is a sum, the ranks after the first take zeros for the
    operands `once`, unless those are unreduced there themselves. With `zeros` the operation does
    not run on operands of which this rank has nothing: its part of the loop is empty, so that its
    results are, or are sums of nothing. What is added then lies `along` that dim of the result.
    """

    once: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    zeros: bool = True
    along: int = -1

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall | None:
        """The call with its changes, where the rank has a part and adds what there is to add."""
        parts = any(_is_added_before(ctx, at) for at in self.once) or has_empty_shard(ctx)
        parts = parts or _is_empty_shard(ctx.results[0], ctx.rank)
        if parts or not all(
            isinstance(change, SetArgument | SetLocalShape) for change in self.changes
        ):
            return None
        return self._changed(op, args, kwargs, ctx)

    def _changed(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        call: LocalCall = op, tuple(args), dict(kwargs)
        for change in self.changes:
            call = change(call, ctx)
        return call

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run it on a rank."""
        args, kwargs = tuple(args), dict(kwargs)
        later = frozenset(at for at in self.once if _is_added_before(ctx, at))
        if later:
            args, kwargs = _without(args, kwargs, later)
        if _is_empty_shard(ctx.results[0], ctx.rank):
            return nothing(args, kwargs, ctx)
        if self.zeros and has_empty_shard(ctx):
            return nothing(args, kwargs, ctx, dict.fromkeys(self.once, self.along))
        op, args, kwargs = self._changed(op, args, kwargs, ctx)
        return op(*args, **kwargs)


def _is_added_before(ctx: RankContext, place: int) -> bool:
    """Whether a rank before this one adds the operand to the first result."""
    made, given = ctx.results[0], ctx.operands[place]
    assert made is not None
    own = {axis for axis, _ in given.partition.unreduced_kinds}
    coords = made.mesh.coords(ctx.rank)
    return any(
        coords[axis] > 0
        for axis, kind in made.partition.unreduced_kinds
        if kind == "sum" and axis not in own
    )


def _without(
    args: Any, kwargs: Any, places: frozenset[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with zeros for some operands, to which gradients still have a way."""
    seen = iter(range(1 << 30))

    def change(x: torch.Tensor) -> torch.Tensor:
        return zeros_with_grad(x) if next(seen) in places else x

    placed = tuple(map_instances(each, torch.Tensor, change) for each in args)
    return placed, {key: map_instances(each, torch.Tensor, change) for key, each in kwargs.items()}


def zeros_with_grad(x: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of a tensor, NaN and infinities included, differentiable as it is."""
    return torch.where(x.new_zeros((), dtype=torch.bool), x, 0)


def has_empty_shard(ctx: RankContext) -> bool:
    """Whether an operand that has something along a dim has nothing of it on this rank."""
    return any(_is_empty_shard(spec, ctx.rank) for spec in ctx.operands)


def _is_empty_shard(spec: Spec | None, rank: int) -> bool:
    return spec is not None and any(
        not mine and size for mine, size in zip(spec.local_shape(rank), spec.shape, strict=True)
    )


def nothing(
    args: Args, kwargs: Kwargs, ctx: RankContext, addends: Mapping[int, int] = MappingProxyType({})
) -> list[torch.Tensor | None]:
    """Zeros for every result, with a way for gradients to every operand that wants some.

    Every rank takes part in the collectives of the backward pass, those with nothing to do too.
    To the first result are added `addends`, operands that lie along one of its dims.
    """
    given: list[torch.Tensor] = []
    for each in (*args, *kwargs.values()):
        map_instances(each, torch.Tensor, given.append)
    wanted = [zeros_with_grad(x).sum() for x in given if x.requires_grad]
    made: list[torch.Tensor | None] = []
    for spec in ctx.results:
        if spec is None:
            made.append(None)
            continue
        zeros = given[0].new_zeros(spec.local_shape(ctx.rank), dtype=spec.dtype)
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            for each in wanted:
                real = each.real if each.is_complex() and not spec.dtype.is_complex else each
                zeros = zeros + real.to(spec.dtype)
        made.append(zeros)
    first = made[0]
    for place, dim in addends.items():
        assert first is not None
        shape = [-1 if at == dim % first.ndim else 1 for at in range(first.ndim)]
        first = first + given[place].reshape(shape)
    return [first, *made[1:]]


@dataclass(frozen=True, slots=True)
class SetArgument:
    """A change: the argument `name` has this value, which depends on the whole tensors."""

    name: str
    value: Any

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """The call with it."""
        return with_argument(*call, self.name, self.value)


@dataclass(frozen=True, slots=True)
class SetLocalShape:
    """A change: the argument `name`, a shape, becomes that of a result on the rank."""

    name: str
    result: int = 0

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """The call with it."""
        return with_argument(*call, self.name, list(ctx.shape(self.result)))


@dataclass(frozen=True, slots=True)
class ExpandArgument:
    """A change: the argument `name` has the shape of a result on the rank."""

    name: str
    result: int = 0

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """The call with it."""
        x = argument(*call, self.name)
        return with_argument(*call, self.name, x.expand(ctx.shape(self.result)))
