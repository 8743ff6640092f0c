"""Indices into a dim that is cut: which of them fall into a rank's part, and where there.

An index that no part holds is left as wrong as it is on the first or the last rank, so that the
operation refuses it there as it would on whole tensors.
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

__all__ = [
    "EQUAL", "as_first", "counted", "factored", "filled", "locate", "padded", "part_of",
    "ravelled", "selecting", "summing", "total_kind", "unpadded", "unravelled",
]  # fmt: skip

EQUAL = ("sum", "avg", "max", "min", "product")
"""What moves elements about passes every kind of addends and candidates."""


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a dim that a rank holds: `begin` to `end` of `size`."""

    begin: int
    end: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the dim."""
        return self.end - self.begin == self.size

    @property
    def is_empty(self) -> bool:
        """Whether it is nothing of a dim that has something."""
        return self.begin == self.end and self.size > 0


def part_of(ctx: RankContext, operand: int, dim: int) -> Part:
    """What a rank holds of a dim of an operand."""
    size = ctx.operands[operand].shape[dim]
    return Part(ctx.offset(operand, dim), ctx.end(operand, dim), size)


def locate(index: torch.Tensor, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices from where the part begins, 0 for those that fall elsewhere; and which fall there."""
    there = _holds(part, index)
    return torch.where(there, index - part.begin, _away(part, index)), there


def _holds(part: Part, index: torch.Tensor) -> torch.Tensor:
    """Which indices fall into the part; into the last one also those beyond the dim."""
    there = index >= part.begin
    return there & (index < part.end) if part.end < part.size else there


def _away(part: Part, index: torch.Tensor) -> torch.Tensor:
    """What stands for indices that fall elsewhere: far below the first row for wrong ones."""
    return torch.where(index < 0, index - (part.end - part.begin + 1), 0)


def counted(index: torch.Tensor, size: int) -> torch.Tensor:
    """Indices from 0 on for those that count from the end."""
    return torch.where(index < 0, index + size, index)


# -- one row more, which takes what falls elsewhere -------------------------------------------


def padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor with a row of zeros before the first one of a dim."""
    row = x.new_zeros([1 if at == dim else size for at, size in enumerate(x.shape)])
    return torch.cat([row, x], dim)


def unpadded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor without the first row of a dim."""
    return x.narrow(dim, 1, x.shape[dim] - 1)


def filled(index: torch.Tensor, part: Part) -> torch.Tensor:
    """Indices into what is `padded`: from 1 on, 0 for those that fall elsewhere."""
    return torch.where(_holds(part, index), index - (part.begin - 1), _away(part, index))


# -- what is added once -----------------------------------------------------------------------


def as_first(x: torch.Tensor, ctx: RankContext, operand: int, dims: Sequence[int]) -> torch.Tensor:
    """A tensor on the first rank along the axes that cut dims of an operand, zeros on others."""
    spec = ctx.operands[operand]
    at = spec.mesh.coords(ctx.rank)
    axes = [axis for dim in dims for axis in spec.partition.dims[dim]]
    return x if not any(at[axis] for axis in axes) else torch.zeros_like(x)


# -- modes ------------------------------------------------------------------------------------


def selecting(*together: int, constant: bool = False, results: int = 1) -> tuple[Mode, ...]:
    """Modes of what picks elements out of operands, all unreduced alike.

    With `constant` some of them are the same on every rank: averages and extremes of those are
    what they are, sums are not.
    """
    words = ("avg", "max", "min") if constant else EQUAL
    return tuple(Mode(together, kind, (kind,) * results) for kind in words)


def summing(*together: int, results: int = 1) -> tuple[Mode, ...]:
    """Modes of a sum of operands: of all together, and averages of each alone."""
    both = tuple(Mode(together, kind, (kind,) * results) for kind in ("sum", "avg"))
    return both + tuple(Mode((at,), "avg", ("avg",) * results) for at in together)


def total_kind(meta: Meta) -> str:
    """The reduction that puts one rank's elements and the other ranks' zeros together."""
    return "max" if meta.dtype == torch.bool else "sum"


def unravelled(index: torch.Tensor, shape: Sequence[int]) -> list[torch.Tensor]:
    """Of indices into a flattened tensor those into each of its dims."""
    found: list[torch.Tensor] = []
    for at, size in enumerate(shape):
        minor = max(math.prod(shape[at + 1 :]), 1)
        whole = torch.div(index, minor, rounding_mode="floor")
        # The first one is left beyond its dim where the index is beyond the tensor.
        found.append(whole if at == 0 else whole % max(size, 1))
    return found


def ravelled(indices: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Indices into a flattened tensor from those into each of its dims."""
    total = indices[0]
    for index, size in zip(indices[1:], shape[1:], strict=True):
        total = total * size + index
    return total


def factored(ndim: int, dim: int, factor: str) -> list[tuple[str, ...]]:
    """A factor of its own for every dim, and `factor` for one of them."""
    dims = list(dim_factors(ndim))
    if ndim:
        dims[dim] = (factor,)
    return dims
