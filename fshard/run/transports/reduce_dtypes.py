"""Reductions of every dtype: what backends and kernels do not reduce is reduced as another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

__all__ = [
    "NATIVE", "REDUCE", "TensorFunction", "as_dtype", "as_number", "largest", "neutral_like", "over", "reduced",
    "times",
]  # fmt: skip

NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip
"""What every backend moves and reduces as it is."""

FINITE = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
"""Floating dtypes without infinities."""

LEAST = torch.iinfo(torch.int64).min
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def as_number(x: torch.Tensor, op: str) -> tuple[torch.Tensor, TensorFunction]:
    """A tensor as something every backend reduces by `op`, and the way back.

    Unsigned integers of 64 bits are added as signed ones, bit by bit the same, and ordered as
    signed ones with the first bit turned over.
    """
    dtype = x.dtype
    if dtype in NATIVE or dtype.is_complex:
        return x, lambda out: out
    if dtype == torch.uint64:
        signed = x.view(torch.int64)
        if op not in ("max", "min"):
            return signed, lambda out: out.view(dtype)
        return signed ^ LEAST, lambda out: (out ^ LEAST).view(dtype)
    wider = torch.uint8 if dtype == torch.bool else (
        torch.float32 if dtype.is_floating_point else torch.int64)  # fmt: skip
    return x.to(wider), lambda out: out.to(dtype)


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A cast: of complex numbers to real ones the real part, which is what its transpose keeps."""
    if x.dtype.is_complex and not dtype.is_complex:
        return x.real.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return x.to(dtype)


def _reducing(op: str, along: TensorFunction) -> TensorFunction:
    def reduce(x: torch.Tensor) -> torch.Tensor:
        number, restore = as_number(x, op)
        return restore(along(number))

    return reduce


REDUCE: dict[str, TensorFunction] = {
    "sum": _reducing("sum", lambda x: x.sum(0, dtype=x.dtype)),
    "max": _reducing("max", lambda x: x.amax(0)),
    "min": _reducing("min", lambda x: x.amin(0)),
    "product": _reducing("product", lambda x: x.prod(0, dtype=x.dtype)),
}
"""Reductions along dim 0 that keep the dtype."""

COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul,
}  # fmt: skip


def reduced(xs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of tensors that lie apart, one after the other, in memory of its own.

    To stack them first would move as many bytes again. Small floats are reduced as float32.
    """
    total, restore = as_number(xs[0], op)
    if op == "avg":
        return restore(over(reduced([as_number(x, op)[0] for x in xs], "sum"), len(xs)))
    if len(xs) == 2:
        return restore(COMBINE[op](total, as_number(xs[1], op)[0]))
    dtype = total.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = total.to(wide, copy=True)
    for x in xs[1:]:
        COMBINE[op](total, as_number(x, op)[0], out=total)
    return restore(total.to(dtype))


def over(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """A tensor of floating numbers divided by a number, itself where that is 1."""
    if divisor == 1:
        return x
    number, restore = as_number(x, "avg")
    return restore(number / divisor)


def times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """A tensor of floating numbers times a number, itself where that is 1."""
    if factor == 1:
        return x
    number, restore = as_number(x, "avg")
    return restore(number * factor)


def largest(dtype: torch.dtype) -> float:
    """The upper limit of floating numbers: infinity, or what there is in its place."""
    return torch.finfo(dtype).max if dtype in FINITE else math.inf


def neutral_like(x: torch.Tensor, kind: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of the reduction's neutral element, of `x`'s shape unless another is given."""
    value: float | int | bool
    if kind in ("sum", "avg"):
        value = 0
    elif kind == "product":
        value = 1
    elif x.dtype == torch.bool:
        value = kind == "min"
    elif x.dtype.is_floating_point:
        limit = largest(x.dtype)
        value = -limit if kind == "max" else limit
    else:
        info = torch.iinfo(x.dtype)
        value = info.min if kind == "max" else info.max
    return x.new_full(x.shape if shape is None else shape, value)
