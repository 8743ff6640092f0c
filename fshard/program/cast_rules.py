"""The laws of casts among other steps: what they lose, and what they may trade places with."""

from __future__ import annotations

import torch

from fshard.layout.spec import Spec
from fshard.program.steps import CollectivePermute, Remesh, Step

__all__ = ["holds", "passes"]


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of the second dtype is one of the first.

    >>> holds(torch.float32, torch.bfloat16), holds(torch.float32, torch.int32)
    (True, False)
    """
    if _is_small(wide) or _is_small(narrow):  # PyTorch promotes none of these
        return wide == narrow or (_is_small(narrow) and not _is_small(wide) and _inexact(wide))
    if torch.promote_types(wide, narrow) != wide:
        return False
    if not _inexact(wide) or narrow == torch.bool or narrow.is_floating_point or narrow.is_complex:
        return True
    return torch.iinfo(narrow).max <= 2 / torch.finfo(wide).eps


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_small(dtype: torch.dtype) -> bool:
    """Floats of 8 bits: every larger one has their numbers."""
    return dtype.is_floating_point and dtype.itemsize == 1


def passes(step: Step, src: Spec, dst: Spec) -> bool:
    """Whether a cast may trade places with a step from `src` to `dst`.

    It may where numbers are only moved: a sum of rounded numbers is not the rounded sum. Nor may
    the transpose of the step sum, since gradients pass the casts too. What neutral elements or
    shares of an average become is known of sums and products alone.
    """
    if isinstance(step, CollectivePermute | Remesh):
        return True
    p, q = src.partition, dst.partition
    summed = {*p.unreduced_kinds} - {*q.unreduced_kinds}
    spread = {*q.reduced_kinds} - {*p.reduced_kinds}
    changed = {*p.reduced_kinds, *q.unreduced_kinds} - {*q.reduced_kinds, *p.unreduced_kinds}
    return not summed and not spread and all(kind in ("sum", "product") for _, kind in changed)
