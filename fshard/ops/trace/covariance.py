"""Covariances by operations alone: PyTorch's own read numbers, which a traced tensor has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["WITHOUT_NUMBERS"]


def cov(
    input: Tensor,  # noqa: A002 - as it is called there
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """`torch.cov`, whose weights are not checked."""
    x = input if input.ndim == 2 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights
    if fweights is not None and aweights is not None:
        weights = fweights * aweights
    total: Any = x.shape[1] if weights is None else weights.sum()
    weighted = x if weights is None else x * weights
    apart = x - (weighted.sum(1) / total).unsqueeze(1)
    degrees = total - correction
    if weights is not None and aweights is not None and correction:
        degrees = total - correction * (weights * aweights).sum() / total
    degrees = max(degrees, 0) if weights is None else degrees.clamp_min(0)
    other = apart if weights is None else apart * weights
    made: Tensor = (apart @ other.mH) / degrees
    return made.squeeze()


def corrcoef(input: Tensor) -> Tensor:  # noqa: A002 - as it is called there
    """`torch.corrcoef`."""
    made = cov(input)
    if not made.ndim:
        return made / made
    scale = made.diagonal().real.sqrt() if made.is_complex() else made.diagonal().sqrt()
    made = made / scale.unsqueeze(1) / scale
    if made.is_complex():
        return torch.complex(made.real.clamp(-1, 1), made.imag.clamp(-1, 1))
    return made.clamp(-1, 1)


WITHOUT_NUMBERS: dict[Any, Callable[..., Tensor]] = {
    torch.cov: cov, torch.Tensor.cov: cov, torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
}  # fmt: skip
"""Functions of PyTorch that can be traced only as these."""
