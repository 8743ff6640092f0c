"""Conversions of dtypes and shapes that backends cannot send or reduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._torch.memory import materialized

NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip
"""Dtypes that every backend sends and reduces."""

FINITE = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
"""Floating dtypes without infinity."""

LEAST = torch.iinfo(torch.int64).min
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


def as_number(x: torch.Tensor, reduction: str) -> tuple[torch.Tensor, TensorFunction]:
    """Return a tensor of a dtype that every backend reduces by `reduction`, and the function back.

    Unsigned 64-bit integers are added as signed ones, with the same bits, and compared as signed
    ones with the first bit flipped.
    """
    dtype = x.dtype
    if dtype in NATIVE or dtype.is_complex:
        return x, lambda out: out
    if dtype == torch.uint64:
        signed = x.view(torch.int64)
        if reduction not in ("max", "min"):
            return signed, lambda out: out.view(dtype)
        return signed ^ LEAST, lambda out: (out ^ LEAST).view(dtype)
    wider = torch.uint8 if dtype == torch.bool else (
        torch.float32 if dtype.is_floating_point else torch.int64)  # fmt: skip
    return x.to(wider), lambda out: out.to(dtype)


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast `x`; complex values become their real parts, as the transpose requires."""
    if x.dtype.is_complex and not dtype.is_complex:
        return x.real.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return x.to(dtype)


def _reducing(reduction: str, along: TensorFunction) -> TensorFunction:
    def reduce(x: torch.Tensor) -> torch.Tensor:
        value, restore = as_number(x, reduction)
        return restore(along(value))

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


def reduced(xs: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Reduce tensors in their order, into new memory; 16-bit floats are reduced in float32.

    Stacking them first would copy as many bytes again.
    """
    total, restore = as_number(xs[0], reduction)
    if reduction == "avg":
        return restore(over(reduced([as_number(x, reduction)[0] for x in xs], "sum"), len(xs)))
    if len(xs) == 2:
        return restore(COMBINE[reduction](total, as_number(xs[1], reduction)[0]))
    dtype = total.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = total.to(wide, copy=True)
    out = None if is_recording_below_autograd() else total  # graphs with out= have no derivative
    for x in xs[1:]:
        total = COMBINE[reduction](total, as_number(x, reduction)[0], out=out)
    return restore(total.to(dtype))


def reduce_into(target: torch.Tensor, x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce two tensors, into the memory of the first one if its dtype is reduced as it is.

    New memory costs more than the reduction: its pages are mapped by the first write.
    """
    value, restore = as_number(target, reduction)
    return restore(COMBINE[reduction](value, as_number(x, reduction)[0], out=value))


def over(x: torch.Tensor, divisor: int) -> torch.Tensor:
    """Divide a floating tensor; with a divisor of 1 return it itself."""
    if divisor == 1:
        return x
    value, restore = as_number(x, "avg")
    return restore(value / divisor)


def times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Multiply a floating tensor; with a factor of 1 return it itself."""
    if factor == 1:
        return x
    value, restore = as_number(x, "avg")
    return restore(value * factor)


def largest(dtype: torch.dtype) -> float:
    """Return infinity, or the largest value of a floating dtype without one."""
    return torch.finfo(dtype).max if dtype in FINITE else math.inf


def neutral_like(x: torch.Tensor, kind: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a tensor of the reduction's neutral element, with the shape of `x` by default."""
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


def wire_item(dtype: torch.dtype) -> int:
    """Return the number of elements that are sent for one of a dtype."""
    return 1 if dtype in NATIVE else dtype.itemsize


def as_bytes(flat: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a tensor of a dtype that every backend sends, and the function back."""
    flat = materialized(flat)
    if flat.dtype in NATIVE:
        return flat, lambda out: out
    dtype = flat.dtype
    return flat.view(torch.uint8), lambda out: out.view(dtype)


def merge_leading(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Merge the dims up to the first one from `dim` on whose size is not 1.

    Callers mostly have `x` in that shape already, and need the result in the one that follows.
    """
    if x.ndim > dim and x.shape[dim] != 1:
        return x.flatten(0, dim) if dim else x
    last = next((i for i, size in enumerate(x.shape) if i >= dim and size != 1), x.ndim - 1)
    return x.flatten(0, last) if x.ndim else x.reshape(1)
