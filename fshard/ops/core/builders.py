"""What rule generators share: names of factors, dims that broadcast, and what is linear in what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from fshard.layout.partition_spec import REDUCTIONS
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.rule import Dims, Mode

__all__ = [
    "MAX_BLOCKS",
    "align_factors",
    "all_modes",
    "dim_factors",
    "is_inexact",
    "is_whole_number",
    "kind_modes",
    "linear_modes",
    "normalize_dims",
    "tensors",
    "unread_modes",
    "valid_dim",
    "wrap_dim",
]  # fmt: skip


MAX_BLOCKS = 16
"""As many ranks as a dim may be cut over evenly where it is worked on block by block."""


def dim_factors(ndim: int, prefix: str = "d") -> Dims:
    """One factor of its own for every dim.

    >>> dim_factors(2)
    (('d0',), ('d1',))
    """
    return tuple((f"{prefix}{at}",) for at in range(ndim))


def align_factors(shape: Sequence[int], result: Sequence[int], factors: Dims) -> Dims:
    """The factors of a tensor that broadcasts to `result`, aligned at the last dims.

    >>> align_factors((1, 3), (4, 2, 3), dim_factors(3))
    ((), ('d2',))
    """
    more = len(result) - len(shape)
    return tuple(
        factors[more + at] if size == result[more + at] else () for at, size in enumerate(shape)
    )


def normalize_dims(dims: Iterable[int] | int | None, ndim: int) -> tuple[int, ...]:
    """Dims as an operation's `dim` argument names them, from 0 on; all for None or none.

    >>> normalize_dims(-1, 3), axes_of([0, -1], 3), axes_of(None, 2), axes_of([], 2)
    ((2,), (0, 2), (0, 1), (0, 1))
    """
    if dims is None:
        return tuple(range(ndim))
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(wrap_dim(dim, ndim) for dim in listed) or tuple(range(ndim))


def wrap_dim(dim: int, ndim: int) -> int:
    """A dim counted from 0; a tensor of no dims is as one of a single dim."""
    return dim % max(ndim, 1)


def valid_dim(dim: int, ndim: int) -> int | None:
    """A dim counted from 0; None where a tensor of so many dims has none of that number.

    >>> valid_dim(-1, 3), place(3, 3)
    (2, None)
    """
    return dim % ndim if -ndim <= dim < ndim else None


def linear_modes(
    *places: int | Sequence[int], results: int = 1, affine: bool = False
) -> tuple[Mode, ...]:
    """Modes of operands that the results are linear in: alone, or several together.

    With `affine` they are linear but for a constant: averages pass then, sums do not.
    """
    made = [(each,) if isinstance(each, int) else tuple(each) for each in places]
    words = ("avg",) if affine else ("sum", "avg")
    return tuple(Mode(each, kind, (kind,) * results) for each in made for kind in words)


def kind_modes(
    operand: int, change: Mapping[str, str | None], results: int = 1
) -> tuple[Mode, ...]:
    """Modes of one operand: unreduced by a key makes the results unreduced by its value.

    Monotone functions pass maxima and minima; decreasing ones exchange them.
    """
    return tuple(Mode((operand,), kind, (to,) * results) for kind, to in change.items())


def is_inexact(x: Meta | torch.Tensor | None) -> bool:
    """Whether a tensor is floating or complex."""
    return x is not None and (x.dtype.is_floating_point or x.dtype.is_complex)


def tensors(call: OpCall) -> tuple[tuple[int, Meta], ...]:
    """The operands of a call that have dims, with their places."""
    return tuple((at, meta) for at, meta in enumerate(call.operands) if meta.ndim)


def is_whole_number(dtype: torch.dtype) -> bool:
    """Whether a dtype is of integers or booleans."""
    return not (dtype.is_floating_point or dtype.is_complex)


def all_modes(*places: int, results: int = 1) -> tuple[Mode, ...]:
    """Modes of operands whose elements are moved and not computed with: every kind passes.

    >>> [str(each) for each in all_modes(0)]
    ['0 sum', '0 avg', '0 max', '0 min', '0 product']
    """
    return tuple(Mode(places, kind, (kind,) * results) for kind in REDUCTIONS)


def unread_modes(place: int, results: int = 1) -> tuple[Mode, ...]:
    """Modes of an operand whose elements do not matter: the results are the same on every rank."""
    return tuple(Mode((place,), kind, (None,) * results) for kind in REDUCTIONS)
