"""Objects that autograd keeps in the places of saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.autograd_state import version_of
from fshard._util.errors import fail


@dataclass(slots=True)
class Kept:
    """Tensor that is kept for the backward pass, with its version then."""

    tensor: torch.Tensor
    version: int
    name: str = ""

    @classmethod
    def of(cls, x: torch.Tensor, name: str = "") -> Kept:
        """Return a tensor without its history, which would be a cycle of references."""
        return cls(x.detach(), version_of(x), name)

    def value(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ShardingError: if it was written in place since.
        """
        if version_of(self.tensor) != self.version:
            fail("the backward pass of a partitioned function",
                 f"{self.name or 'a tensor that it needs'}, written in place after the call",
                 "a tensor from which gradients are computed must not change before them",
                 "call backward() before the write, or write a clone()")  # fmt: skip
        return self.tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """Tensor packed by the hooks around the call."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]

    def value(self) -> torch.Tensor:
        """Return the tensor."""
        return self.unpack(self.packed)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> Place:
        """Return the place of a tensor."""
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    @property
    def end(self) -> int:
        """Offset after the last element."""
        if 0 in self.size:
            return self.offset
        return (
            1
            + self.offset
            + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        )

    def holds(self, other: Place) -> bool:
        """Return True if another place of the same storage is within this one."""
        return self.dtype == other.dtype and self.offset <= other.offset and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Recipe:
    """Part of a value that is recomputed: by a unit, for the rank of an index.

    `base` is the place of the value's tensor, `place` that of the part.
    """

    unit: int
    value: int
    rank: int
    base: Place
    place: Place

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part of the recomputed value `x`."""
        if x.stride() != self.base.stride:
            strided = torch.empty_strided(x.shape, self.base.stride, dtype=x.dtype, device=x.device)
            x = strided.copy_(x)
        offset = x.storage_offset() + self.place.offset - self.base.offset
        return x.as_strided(self.place.size, self.place.stride, offset)


@dataclass(frozen=True, slots=True)
class Internal:
    """Tensor that the operation of a unit saves, the one of an index among all that it saves."""

    unit: int
    index: int
