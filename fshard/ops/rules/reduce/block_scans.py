"""Scans over a sharded dim: blocks are scanned alone, and continue those before them.

cumsum, cumprod, cummax, cummin and logcumsumexp. Only the ends of blocks are sent. In even shards
the dim is decomposed into equal blocks, of which a rank has some; in other shards a mapped function
scans each rank's shard, and the ranks gather one end of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fshard._util.cache import CACHE_SIZE
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.builders import MAX_BLOCKS, wrap_dim
from fshard.ops.core.call import OpCall, base_name
from fshard.ops.core.registry import (
    MappedStrategy,
    register_decomposition,
    register_mapped_strategy,
)
from fshard.ops.rules.reduce.reduction_decompositions import log_sum_exp
from fshard.run.transports.base import current_rank
from fshard.spmd.collectives.gather_scatter import all_gather
from fshard.spmd.mapped_function import MappedFunction

aten = torch.ops.aten
Tensors = tuple[Tensor, ...]


class Scan(NamedTuple):
    """A scan of blocks, whose results are one tensor or several.

    Attributes:
        alone: function of blocks, their dim and the index at which each begins to their own scans.
        ends: function of blocks, their own scans and the dim to what the blocks after them need.
        carried: function of the ends of all blocks, and the dim of blocks, to their scan.
        join: function of blocks, their own scans, their prefixes, and the dim to the scans; a
            prefix is the scan of all elements before, of size 1 in the dim.
        first: the prefix of the first block.
    """

    alone: Callable[[Tensor, int, Tensor], Tensors]
    ends: Callable[[Tensor, Tensors, int], Tensors]
    carried: Callable[[Tensors, int], Tensors]
    join: Callable[[Tensor, Tensors, Tensors, int], Tensors]
    first: tuple[float | int | bool, ...]

    def previous(self, ends: Tensors, block_dim: int) -> Tensors:
        """Return the prefix of each block, with a dim of size 1 after that of blocks."""
        rows = zip(self.carried(ends, block_dim), self.first, strict=True)
        return tuple(_shifted(x, block_dim, first) for x, first in rows)

    def decomposed(self, x: Tensor, dim: int) -> Tensors:
        """Scan a dim by equal blocks, as operations on global tensors."""
        block_dim = wrap_dim(dim, x.ndim)
        count = block_count(x.shape[block_dim]) if x.ndim else 1
        if count == 1:
            return self.alone(x, dim, torch.zeros((), dtype=torch.int64, device=x.device))
        size, inner = x.shape[block_dim] // count, block_dim + 1
        blocks = x.unflatten(block_dim, (count, size))
        begin = torch.arange(0, x.shape[block_dim], size, device=x.device)
        begin = begin.reshape([-1 if d == block_dim else 1 for d in range(blocks.ndim)])
        alone = self.alone(blocks, inner, begin)
        previous = self.previous(self.ends(blocks, alone, inner), block_dim)
        joined = self.join(blocks, alone, previous, inner)
        return tuple(y.flatten(block_dim, inner) for y in joined)

    def on_rank(
        self, x: Tensor, dim: int, axes: tuple[str, ...], index: int, begin: int
    ) -> Tensors:
        """Scan the shard that is at `index` along axes and begins at the global index `begin`."""
        alone = self.alone(x, dim, torch.tensor(begin, device=x.device))
        if x.shape[dim]:
            ends = self.ends(x, alone, dim)
        else:
            ends = tuple(map(_neutral, alone, self.first, (dim,) * len(alone)))
        gathered: Tensors = all_gather(ends, axes, axis=dim)
        previous = tuple(y.select(dim, index) for y in self.previous(gathered, dim))
        if x.shape[dim]:
            return self.join(x, alone, previous, dim)
        # Without elements; but the rank takes part in the gradients of the others.
        return tuple(y + p if y.is_floating_point() else y
                     for y, p in zip(alone, previous, strict=True))  # fmt: skip


def block_count(size: int) -> int:
    """Return the number of equal blocks of a dim, which may be on different ranks; 1 for none.

    >>> block_count(48), block_count(6), block_count(7)
    (16, 2, 1)
    """
    count = math.gcd(size, MAX_BLOCKS)
    return count if size >= 2 * count else 1


def _shifted(ends: Tensor, dim: int, first: float | int | bool) -> Tensor:
    """Return the value before each of `dim`, `first` before the first one."""
    ahead = ends.narrow(dim, 0, ends.shape[dim] - 1)
    no_padding = [0, 0] * (ends.ndim - 1 - dim)
    if isinstance(first, float) or int(float(first)) == first:
        return pad(ahead, [*no_padding, 1, 0], value=first).unsqueeze(dim + 1)
    # Padding takes its value as a double, which the largest int64 is not.
    shape = [-1 if d == dim else 1 for d in range(ends.ndim)]
    is_first = torch.arange(ends.shape[dim], device=ends.device).view(shape) == 0
    shifted = pad(ahead, [*no_padding, 1, 0])
    return torch.where(is_first, torch.full_like(shifted, first), shifted).unsqueeze(dim + 1)


def _neutral(alone: Tensor, first: float | int | bool, dim: int) -> Tensor:
    """Return the end of a block without elements."""
    shape = [size for d, size in enumerate(alone.shape) if d != dim]
    end = torch.full(shape, first, dtype=alone.dtype, device=alone.device)
    return end + alone.sum(dim) if alone.is_floating_point() else end


# -- the scans ------------------------------------------------------------------------------


def _last(x: Tensor, alone: Tensors, dim: int) -> Tensors:
    return tuple(y.select(dim, -1) for y in alone)


def _linear(scan: Callable[..., Tensor], join: Callable[[Tensor, Tensor], Tensor],
            first: float, dtype: torch.dtype | None) -> Scan:  # fmt: skip
    """Return the scan of sums or products."""
    return Scan(
        lambda x, dim, _: (scan(x, dim, dtype=dtype),),
        _last,
        lambda ends, dim: (scan(ends[0], dim, dtype=dtype),),
        lambda x, alone, previous, dim: (join(alone[0], previous[0]),),
        (first,),
    )


def _sums(dtype: torch.dtype | None = None) -> Scan:
    return _linear(torch.cumsum, torch.add, 0, dtype)


def _products(dtype: torch.dtype | None = None) -> Scan:
    return _linear(torch.cumprod, torch.mul, 1, dtype)


def _log_sums_joined(x: Tensor, alone: Tensors, previous: Tensors, dim: int) -> Tensors:
    """Return the scans of blocks whose first elements include the prefixes.

    Where that is the logarithm of zero, its gradient would be NaN.
    """
    before = previous[0]
    has_previous = before != -math.inf
    first = x.narrow(dim, 0, 1)
    joined = torch.logaddexp(first, torch.where(has_previous, before, 0))
    first = torch.where(has_previous, joined, first)
    others = x.narrow(dim, 1, x.shape[dim] - 1)
    return (torch.cat([first, others], dim).logcumsumexp(dim),)


LOG_SUMS = Scan(
    lambda x, dim, _: (x.logcumsumexp(dim),),
    lambda x, alone, dim: (log_sum_exp(x, dim),),
    lambda ends, dim: (ends[0].logcumsumexp(dim),),
    _log_sums_joined,
    (-math.inf,),
)


def _extremes(maximum: bool, dtype: torch.dtype) -> Scan:
    """Return the scan of extremes and their last indices; NaN is the extreme once there is one."""
    scan: Any = torch.cummax if maximum else torch.cummin

    def alone(x: Tensor, dim: int, begin: Tensor) -> Tensors:
        values, indices = scan(x, dim)
        return values, indices + begin

    def carried(ends: Tensors, dim: int) -> Tensors:
        values, positions = scan(ends[0], dim)
        return values, ends[1].gather(dim, positions)

    def join(x: Tensor, alone: Tensors, previous: Tensors, dim: int) -> Tensors:
        own, before = alone[0], previous[0]
        is_own = own >= before if maximum else own <= before
        if x.is_floating_point():
            is_own = own.isnan() | (is_own & ~before.isnan())
        return torch.where(is_own, own, before), torch.where(is_own, alone[1], previous[1])

    return Scan(alone, _last, carried, join, (_identity(dtype, maximum), 0))


def _identity(dtype: torch.dtype, maximum: bool) -> float | int | bool:
    """Return the identity of a maximum, or of a minimum if `maximum` is false."""
    if dtype == torch.bool:
        return not maximum
    if dtype.is_floating_point:
        return -math.inf if maximum else math.inf
    return torch.iinfo(dtype).min if maximum else torch.iinfo(dtype).max


@register_decomposition("cumsum.default")
def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return _sums(dtype).decomposed(x, dim)[0]


@register_decomposition("cumprod.default")
def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return _products(dtype).decomposed(x, dim)[0]


@register_decomposition("logcumsumexp")
def _logcumsumexp(x: Tensor, dim: int) -> Tensor:
    return torch.logcumsumexp(x, dim) if x.is_complex() else LOG_SUMS.decomposed(x, dim)[0]


@register_decomposition("cummax.default")
def _cummax(x: Tensor, dim: int) -> Tensors:
    return _extremes(True, x.dtype).decomposed(x, dim)


@register_decomposition("cummin.default")
def _cummin(x: Tensor, dim: int) -> Tensors:
    return _extremes(False, x.dtype).decomposed(x, dim)


# -- over shards that are not blocks ----------------------------------------------------------


def _scan_of(name: str, dtype: torch.dtype, wide: torch.dtype | None) -> Scan:
    """Return the scan of an operation on tensors of `dtype`, computed in `wide` if given."""
    match name:
        case "cumsum":
            return _sums(wide)
        case "cumprod":
            return _products(wide)
        case "logcumsumexp":
            return LOG_SUMS
        case _:
            return _extremes(name == "cummax", dtype)


@register_mapped_strategy(aten.cumsum.default)
@register_mapped_strategy(aten.cumprod.default)
@register_mapped_strategy(aten.logcumsumexp.default)
@register_mapped_strategy(aten.cummax.default)
@register_mapped_strategy(aten.cummin.default)
def scan_strategy(call: OpCall, specs: Sequence[Spec]) -> MappedStrategy | None:
    """Return the scan of each rank's shard, None where the dim is unsharded or in equal blocks."""
    (spec,) = specs
    p, dim = spec.partition, wrap_dim(call.get("dim"), max(spec.ndim, 1))
    if not spec.ndim or not p.dims[dim] or p.unreduced_kinds or spec.dtype.is_complex:
        return None
    is_even = spec.sizes[dim] is None
    if is_even and block_count(spec.shape[dim]) % spec.mesh.axis_size(p.dims[dim]) == 0:
        return None
    sharded = spec.replace(partition=PartitionSpec(*(axes or None for axes in p.dims)))
    dtypes = tuple(meta.dtype for meta in call.results if meta is not None)
    wide = call.get("dtype") if call.has("dtype") else None
    return _scan_strategy(base_name(call.op), wide, sharded, dim, dtypes)


@lru_cache(maxsize=CACHE_SIZE)
def _scan_strategy(
    name: str, wide: torch.dtype | None, spec: Spec, dim: int, dtypes: tuple[torch.dtype, ...]
) -> MappedStrategy:
    scan, mesh, axes = _scan_of(name, spec.dtype, wide), spec.mesh, spec.partition.dims[dim]

    def scan_of_shards(x: Tensor) -> list[Tensor]:
        rank = current_rank(mesh, name).rank
        index, begin = mesh.index(rank, axes), spec.offsets(rank)[dim]
        return [*scan.on_rank(x, dim, axes, index, begin)]

    results = [spec.replace(dtype=dtype) for dtype in dtypes]
    run = MappedFunction(
        scan_of_shards, "", None, None, results, None, redistribute_inputs=False, check=False
    )
    run.where = "scan_of_shards"
    return MappedStrategy(run, (spec,), 0.0, keeps_sharded=True)
