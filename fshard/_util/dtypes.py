"""Kinds of dtypes."""

from __future__ import annotations

from typing import Protocol

import torch


class Typed(Protocol):
    """Value with a dtype: a tensor, a spec, or the meta of a tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""


def is_inexact_dtype(dtype: torch.dtype) -> bool:
    """Return True for a floating-point or complex dtype."""
    return dtype.is_floating_point or dtype.is_complex


def multiplication_flops(dtype: torch.dtype) -> int:
    """Return the real operations of a multiplication and an addition: 2, or 8 if complex."""
    return 8 if dtype.is_complex else 2


def is_inexact(x: Typed | None) -> bool:
    """Return True for a value of a floating-point or complex dtype."""
    return x is not None and is_inexact_dtype(x.dtype)
