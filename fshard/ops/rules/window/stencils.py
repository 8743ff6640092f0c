"""Finite differences and integrals along sharded dims, decomposed into shifts and sums.

Their rules keep the dim unsharded. Shifts send only the elements next to each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.builders import normalize_dims
from fshard.ops.core.registry import register_decomposition

aten = torch.ops.aten


@register_decomposition(
    aten.gradient.scalarint, aten.gradient.scalararray, aten.gradient.array,
    aten.gradient.scalarrayint, aten.gradient.scalarrayarray,
)  # fmt: skip
def gradient(
    x: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1
) -> tuple[Tensor, ...]:
    """Decompose differences of neighbours, one-sided at the ends, into shifts."""
    dims = normalize_dims(range(x.ndim) if dim is None else dim, x.ndim)
    spacing = 1 if spacing is None else spacing
    widths = list(spacing) if isinstance(spacing, Sequence) else [spacing] * len(dims)
    return tuple(_slope(x, d, width, edge_order) for d, width in zip(dims, widths, strict=True))


def _slope(x: Tensor, dim: int, width: Any, edge_order: int) -> Tensor:
    """Return the derivative along one dim of points at a distance."""
    shape = [-1 if d == dim else 1 for d in range(x.ndim)]
    positions = torch.arange(x.shape[dim], device=x.device).view(shape)
    before, after = x.roll(1, dim), x.roll(-1, dim)
    first, last = after - x, x - before
    if edge_order == 2:
        first = (4 * after - 3 * x - x.roll(-2, dim)) / 2
        last = (3 * x - 4 * before + x.roll(2, dim)) / 2
    inner = torch.where(positions == x.shape[dim] - 1, last, (after - before) / 2)
    result: Tensor = torch.where(positions == 0, first, inner) / width
    return result


@register_decomposition(aten.trapezoid.dx, aten.trapz.dx)
def trapezoid(y: Tensor, dx: Any = 1, dim: int = -1) -> Tensor:
    """Decompose the integral over evenly spaced points into sums."""
    begins, ends = _interval_ends(y, dim)
    result: Tensor = (begins.sum(dim) + ends.sum(dim)) * (dx / 2)
    return result


@register_decomposition(aten.trapezoid.x)
def trapezoid_of_points(y: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Decompose the integral over points at `x` into differences and a sum."""
    dim %= y.ndim
    if x.ndim == 1:
        x = x.view([-1 if d == dim else 1 for d in range(y.ndim)])
    for _ in range(y.ndim - x.ndim):
        x = x.unsqueeze(0)
    (begins, ends), (first, last) = _interval_ends(y, dim), _interval_ends(x, dim)
    return ((begins + ends) * (last - first)).sum(dim) / 2


def _interval_ends(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the values at the first and at the last points of the intervals between points."""
    count = max(x.shape[dim] - 1, 0)
    return x.narrow(dim, 0, count), x.narrow(dim, x.shape[dim] - count, count)


@register_decomposition(aten.conv_tbc)
def conv_tbc(x: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Tensor:
    """Decompose a convolution of (time, batch, channels) into one of (batch, channels, time)."""
    y = torch.nn.functional.conv1d(x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, padding=pad)
    return y.permute(2, 0, 1)
