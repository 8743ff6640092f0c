"""Global indices into a sharded dim, translated to one rank's shard.

Indices of other shards become 0. Invalid indices stay invalid on the first or the last rank, so
that PyTorch refuses them inside as it would on the global tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fshard.ops.core.builders import dim_factors
from fshard.ops.core.call import Meta
from fshard.ops.core.rule import Mode
from fshard.ops.strategy.local_call import RankContext

EQUAL = ("sum", "avg", "max", "min", "product")
"""Reductions that commute with moving elements: all."""


@dataclass(frozen=True, slots=True)
class DimShard:
    """One rank's shard of a dim of `size`: elements `begin` to `end`."""

    begin: int
    end: int
    size: int

    @property
    def is_unsharded(self) -> bool:
        """Return True if the shard is the full dim."""
        return self.end - self.begin == self.size

    @property
    def is_empty(self) -> bool:
        """Return True if the shard has no element and the dim has some."""
        return self.begin == self.end and self.size > 0


def dim_shard(ctx: RankContext, operand: int, dim: int) -> DimShard:
    """Return this rank's shard of an operand's dim."""
    size = ctx.operands[operand].shape[dim]
    return DimShard(ctx.offset(operand, dim), ctx.end(operand, dim), size)


def locate(index: torch.Tensor, part: DimShard) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices relative to the shard, 0 for those outside, and a mask of those inside."""
    inside = _is_inside(part, index)
    return torch.where(inside, index - part.begin, _outside(part, index)), inside


def _is_inside(part: DimShard, index: torch.Tensor) -> torch.Tensor:
    """Return a mask of the indices in the shard; the last shard has those beyond the dim too."""
    inside = index >= part.begin
    return inside & (index < part.end) if part.end < part.size else inside


def _outside(part: DimShard, index: torch.Tensor) -> torch.Tensor:
    """Return replacements of indices outside the shard: 0, or far below 0 for invalid ones."""
    return torch.where(index < 0, index - (part.end - part.begin + 1), 0)


def from_start(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return indices with negative ones counted from the end."""
    return torch.where(index < 0, index + size, index)


# -- a spare row for writes outside the shard -------------------------------------------------


def with_spare_row(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Prepend a row of zeros along `dim`, which takes writes outside the shard."""
    row = x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])
    return torch.cat([row, x], dim)


def without_spare_row(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Remove the first row along `dim`."""
    return x.narrow(dim, 1, x.shape[dim] - 1)


def spare_row_index(index: torch.Tensor, part: DimShard) -> torch.Tensor:
    """Return indices into the `with_spare_row` tensor: from 1 on, 0 for those outside the shard."""
    return torch.where(_is_inside(part, index), index - (part.begin - 1), _outside(part, index))


# -- operands that are counted once -----------------------------------------------------------


def zeros_after_first(
    x: torch.Tensor, ctx: RankContext, operand: int, dims: Sequence[int]
) -> torch.Tensor:
    """Return `x` on the first rank along the axes of an operand's `dims`, zeros on others."""
    spec = ctx.operands[operand]
    i = spec.mesh.coords(ctx.rank)
    axes = [axis for dim in dims for axis in spec.partition.dims[dim]]
    return x if not any(i[axis] for axis in axes) else torch.zeros_like(x)


# -- modes ------------------------------------------------------------------------------------


def select_modes(*operands: int, constant: bool = False) -> tuple[Mode, ...]:
    """Return modes of operands from which elements are selected, all unreduced by the same kind.

    With `constant` other operands are invariant: averages and extremes leave those as they are,
    sums do not.
    """
    reductions = ("avg", "max", "min") if constant else EQUAL
    return tuple(Mode(operands, kind, (kind,)) for kind in reductions)


def sum_modes(*operands: int) -> tuple[Mode, ...]:
    """Return modes of a sum of operands: all together, and averages of each alone."""
    modes = tuple(Mode(operands, kind, (kind,)) for kind in ("sum", "avg"))
    return modes + tuple(Mode((i,), "avg", ("avg",)) for i in operands)


def zero_fill_kind(meta: Meta) -> str:
    """Return the reduction that combines one rank's elements with zeros on all others."""
    return "max" if meta.dtype == torch.bool else "sum"


def unravel_index(index: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Return indices into each dim from indices into the flattened tensor."""
    indices: list[torch.Tensor] = []
    for i, size in enumerate(shape):
        minor = max(math.prod(shape[i + 1 :]), 1)
        quotient = torch.div(index, minor, rounding_mode="floor")
        # The first index stays beyond its dim if the flat index is beyond the tensor.
        indices.append(quotient if i == 0 else quotient % max(size, 1))
    return indices


def ravel_index(indices: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Return indices into the flattened tensor from indices into each dim."""
    total = indices[0]
    for index, size in zip(indices[1:], shape[1:], strict=True):
        total = total * size + index
    return total


def factors_with(ndim: int, dim: int, factor: str) -> list[tuple[str, ...]]:
    """Return one factor per dim, named `factor` for `dim`."""
    dims = list(dim_factors(ndim))
    if ndim:
        dims[dim] = (factor,)
    return dims
