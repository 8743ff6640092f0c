"""Rules of casts: which dtypes hold the values of others, which steps commute with a cast."""

from __future__ import annotations

import torch

from fshard._util.dtypes import is_inexact_dtype
from fshard.layout.spec import Spec
from fshard.program.steps import CollectivePermute, Remesh, Step


def represents(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return True if every value of dtype `narrow` is a value of dtype `wide`.

    >>> represents(torch.float32, torch.bfloat16), represents(torch.float32, torch.int32)
    (True, False)
    """
    if wide == narrow or narrow == torch.bool:
        return wide == narrow or not _is_small(wide)
    if wide == torch.bool or _is_small(wide):
        return False
    if is_inexact_dtype(narrow):
        # PyTorch promotes neither floats of 8 bits nor uint16, uint32 and uint64.
        return is_inexact_dtype(wide) and (
            _is_small(narrow) or torch.promote_types(wide, narrow) == wide
        )
    integers = torch.iinfo(narrow)
    if is_inexact_dtype(wide):
        return integers.max <= 2 / torch.finfo(wide).eps
    return torch.iinfo(wide).min <= integers.min and integers.max <= torch.iinfo(wide).max


def _is_small(dtype: torch.dtype) -> bool:
    """Return True for floats of 8 bits, whose values all larger floats have."""
    return dtype.is_floating_point and dtype.itemsize == 1


def commutes(step: Step, src: Spec, dst: Spec) -> bool:
    """Return True if a cast commutes with a step from `src` to `dst`.

    The step must not add up values, for a sum of rounded values is not the rounded sum. Nor may its
    transpose, since gradients are cast too. Neutral elements and shares of an average commute only
    for sums and products.
    """
    if isinstance(step, CollectivePermute | Remesh):
        return True
    p, q = src.partition, dst.partition
    summed = {*p.unreduced_kinds} - {*q.unreduced_kinds}
    spread = {*q.reduced_kinds} - {*p.reduced_kinds}
    changed = {*p.reduced_kinds, *q.unreduced_kinds} - {*q.reduced_kinds, *p.unreduced_kinds}
    return not summed and not spread and all(kind in ("sum", "product") for _, kind in changed)
