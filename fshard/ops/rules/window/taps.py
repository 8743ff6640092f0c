"""Local windows of operations whose elements are weighted sums of a few elements along each dim.

A *tap* gives for every element of a result the position that it reads, and a weight. Interpolation
has one to four of them along each dim, padding by reflection has one. The gradient adds weighted
elements up at the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fshard.ops.rules.window.window_dims import Span

Tap = tuple[Sequence[int], Sequence[float] | None]
"""For every element a position of the global dim, and a weight; None for weights of one."""


def gather_taps(x: torch.Tensor, dim: int, span: Span, taps: Sequence[Tap]) -> torch.Tensor:
    """Return the elements of a span along `dim` of a window."""
    wide, result = _wide(x), None
    for positions, weights in taps:
        part = wide.index_select(dim, _index(x, span, positions))
        part = part if weights is None else part * _column(wide, dim, weights)
        result = part if result is None else result + part
    assert result is not None
    return result.to(x.dtype)


def scatter_taps(grad: torch.Tensor, dim: int, span: Span, taps: Sequence[Tap]) -> torch.Tensor:
    """Return the gradient of a window: the transpose of `gather_taps`."""
    wide, shape = _wide(grad), list(grad.shape)
    shape[dim] = span.reach.stop - span.reach.start
    result = wide.new_zeros(shape)
    for positions, weights in taps:
        part = wide if weights is None else wide * _column(wide, dim, weights)
        result = result.index_add(dim, _index(grad, span, positions), part)
    return result.to(grad.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a dtype in which sums of a few elements do not round to that of `x`."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _index(x: torch.Tensor, span: Span, positions: Sequence[int]) -> torch.Tensor:
    """Return the indices into a window of global positions."""
    start = span.reach.start
    return torch.tensor([position - start for position in positions], device=x.device)


def _column(x: torch.Tensor, dim: int, weights: Sequence[float]) -> Any:
    shape = [1] * x.ndim
    shape[dim] = -1
    return x.new_tensor(weights).view(shape)
