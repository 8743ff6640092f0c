"""Local calls that treat empty shards and operands that must be counted once.

One rank's part of a loop may be empty, which PyTorch often refuses, and a bias that every rank
adds to its partial sum would be counted several times; `ShardCall` handles both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import is_inexact
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

Rewrite = Callable[[LocalCall, RankContext], LocalCall]


class StaticRewrite:
    """Rewrite that can be made once, before the tensors are there."""

    def is_static(self, call: LocalCall, ctx: RankContext) -> bool:
        """Return True if the rewrite reads no tensor of this call on this rank."""
        return True


@dataclass(frozen=True, slots=True)
class ShardCall(LocalRewrite):
    """Local call with rewritten arguments, operands counted once, and zeros for empty shards.

    `once` are operands that only the first rank adds to a partial sum of the first result; other
    ranks add zeros, unless the operand is itself unreduced over that axis. `rewrites` change
    arguments. With `skip_empty` the operation does not run if an operand's local shard is empty:
    the results are zeros, plus the operands `once`, which have dim `once_dim` of the result.
    """

    once: tuple[int, ...] = ()
    rewrites: tuple[Rewrite, ...] = ()
    skip_empty: bool = True
    once_dim: int = -1

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall | None:
        """Return the rewritten call, or None if the rank has an empty shard or adds zeros."""
        parts = any(_is_added_before(ctx, i) for i in self.once) or has_empty_shard(ctx)
        if parts or _is_empty_shard(ctx.results[0], ctx.rank):
            return None
        call: LocalCall = op, tuple(args), dict(kwargs)
        for rewrite in self.rewrites:
            if not (isinstance(rewrite, StaticRewrite) and rewrite.is_static(call, ctx)):
                return None
            call = rewrite(call, ctx)
        return call

    def _rewritten(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        call: LocalCall = op, tuple(args), dict(kwargs)
        for rewrite in self.rewrites:
            call = rewrite(call, ctx)
        return call

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation on one rank."""
        args, kwargs = tuple(args), dict(kwargs)
        later = frozenset(i for i in self.once if _is_added_before(ctx, i))
        if later:
            args, kwargs = _without(args, kwargs, later)
        if _is_empty_shard(ctx.results[0], ctx.rank):
            return zero_results(args, kwargs, ctx)
        if self.skip_empty and has_empty_shard(ctx):
            return zero_results(args, kwargs, ctx, dict.fromkeys(self.once, self.once_dim))
        op, args, kwargs = self._rewritten(op, args, kwargs, ctx)
        return op(*args, **kwargs)


def call_with(op: Any, args: Args, kwargs: Kwargs, **values: Any) -> Any:
    """Call `op` with the arguments named in `values` replaced."""
    for name, value in values.items():
        _, args, kwargs = with_argument(op, args, kwargs, name, value)
    return op(*args, **kwargs)


@lru_cache(maxsize=CACHE_SIZE)
def _is_added_before(ctx: RankContext, index: int) -> bool:
    """Return True if an earlier rank adds the operand to the first result."""
    result, operand = ctx.results[0], ctx.operands[index]
    assert result is not None
    unreduced = {axis for axis, _ in operand.partition.unreduced_kinds}
    coords = result.mesh.coords(ctx.rank)
    return any(
        coords[axis] > 0
        for axis, kind in result.partition.unreduced_kinds
        if kind == "sum" and axis not in unreduced
    )


def _without(
    args: Any, kwargs: Any, indices: frozenset[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the operands `indices` by zeros that keep their gradient graph."""
    numbers = iter(range(1 << 30))

    def rewrite(x: torch.Tensor) -> torch.Tensor:
        return zeros_with_grad(x) if next(numbers) in indices else x

    new_args = tuple(map_instances(x, torch.Tensor, rewrite) for x in args)
    return new_args, {key: map_instances(x, torch.Tensor, rewrite) for key, x in kwargs.items()}


def zeros_with_grad(x: torch.Tensor) -> torch.Tensor:
    """Return zeros like `x`, also for NaN and infinities, that are differentiable in `x`."""
    return torch.where(x.new_zeros((), dtype=torch.bool), x, 0)


@lru_cache(maxsize=CACHE_SIZE)
def has_empty_shard(ctx: RankContext) -> bool:
    """Return True if an operand with elements has none on this rank."""
    return any(_is_empty_shard(spec, ctx.rank) for spec in ctx.operands)


@lru_cache(maxsize=CACHE_SIZE)
def _is_empty_shard(spec: Spec | None, rank: int) -> bool:
    return spec is not None and any(
        not local and size for local, size in zip(spec.local_shape(rank), spec.shape, strict=True)
    )


def zero_results(
    args: Args, kwargs: Kwargs, ctx: RankContext, once: Mapping[int, int] = MappingProxyType({})
) -> list[torch.Tensor | None]:
    """Return zeros for every result, connected to all operands that require gradients.

    Every rank takes part in the backward pass's collectives, also those without elements. `once`
    maps operands that are added to the first result to their dim of it.
    """
    tensors: list[torch.Tensor] = []
    for x in (*args, *kwargs.values()):
        map_instances(x, torch.Tensor, tensors.append)
    sources = [zeros_with_grad(x).sum() for x in tensors if x.requires_grad]
    results: list[torch.Tensor | None] = []
    for spec in ctx.results:
        if spec is None:
            results.append(None)
            continue
        zeros = tensors[0].new_zeros(spec.local_shape(ctx.rank), dtype=spec.dtype)
        if is_inexact(spec):
            for x in sources:
                real = x.real if x.is_complex() and not spec.dtype.is_complex else x
                zeros = zeros + real.to(spec.dtype)
        results.append(zeros)
    first = results[0]
    for index, dim in once.items():
        assert first is not None
        shape = [-1 if i == dim % first.ndim else 1 for i in range(first.ndim)]
        first = first + tensors[index].reshape(shape)
    return [first, *results[1:]]


@dataclass(frozen=True, slots=True)
class SetArgument(StaticRewrite):
    """Rewrite: set the argument `name` to a value computed from global shapes."""

    name: str
    value: Any

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        return with_argument(*call, self.name, self.value)


@dataclass(frozen=True, slots=True)
class SetLocalShape(StaticRewrite):
    """Rewrite: set the shape argument `name` to the local shape of a result."""

    name: str
    result: int = 0

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        return with_argument(*call, self.name, list(ctx.shape(self.result)))


@dataclass(frozen=True, slots=True)
class ExpandArgument:
    """Rewrite: expand the tensor argument `name` to the local shape of a result."""

    name: str
    result: int = 0

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        x = argument(*call, self.name)
        return with_argument(*call, self.name, x.expand(ctx.shape(self.result)))
