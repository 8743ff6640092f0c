"""Building blocks of rule generators: factors of dims, normalized dims, and unreduced modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fshard.layout.partition_spec import REDUCTIONS
from fshard.ops.core.rule import Dims, Mode

MAX_BLOCKS = 16
"""Upper bound of the number of blocks, hence of shards, of a dim that is computed by blocks."""


def dim_factors(ndim: int, prefix: str = "d") -> Dims:
    """Return a factor of its own for each of `ndim` dims.

    >>> dim_factors(2)
    (('d0',), ('d1',))
    """
    return tuple((f"{prefix}{dim}",) for dim in range(ndim))


def align_factors(shape: Sequence[int], result: Sequence[int], factors: Dims) -> Dims:
    """Return the factors of a tensor that broadcasts to `result`, which has `factors`.

    >>> align_factors((1, 3), (4, 2, 3), dim_factors(3))
    ((), ('d2',))
    """
    lead = len(result) - len(shape)
    return tuple(
        factors[lead + dim] if size == result[lead + dim] else () for dim, size in enumerate(shape)
    )


def normalize_dims(dims: Iterable[int] | int | None, ndim: int) -> tuple[int, ...]:
    """Return the non-negative dims of a `dim` argument; None and () mean all dims.

    >>> normalize_dims(-1, 3), normalize_dims([0, -1], 3), normalize_dims(None, 2)
    ((2,), (0, 2), (0, 1))
    """
    if dims is None:
        return tuple(range(ndim))
    listed = (dims,) if isinstance(dims, int) else tuple(dims)
    return tuple(wrap_dim(dim, ndim) for dim in listed) or tuple(range(ndim))


def wrap_dim(dim: int, ndim: int) -> int:
    """Return a non-negative dim; a tensor without dims counts as one with a single dim."""
    return dim % max(ndim, 1)


def valid_dim(dim: int, ndim: int) -> int | None:
    """Return a non-negative dim, or None if it is out of range for `ndim` dims.

    >>> valid_dim(-1, 3), valid_dim(3, 3)
    (2, None)
    """
    return dim % ndim if -ndim <= dim < ndim else None


def linear_modes(
    *operands: int | Sequence[int], results: int = 1, affine: bool = False
) -> tuple[Mode, ...]:
    """Return modes of operands that the results are linear in: an int alone, a tuple jointly.

    With `affine` the results are linear up to a constant: `avg` passes, `sum` does not.
    """
    groups = [(group,) if isinstance(group, int) else tuple(group) for group in operands]
    words = ("avg",) if affine else ("sum", "avg")
    return tuple(Mode(group, kind, (kind,) * results) for group in groups for kind in words)


def kind_modes(operand: int, change: Mapping[str, str | None]) -> tuple[Mode, ...]:
    """Return modes of one operand: each key of `change` gives a result unreduced by its value.

    Increasing functions map `max` to `max` and `min` to `min`; decreasing ones exchange them.
    """
    return tuple(Mode((operand,), kind, (to,)) for kind, to in change.items())


def all_modes(*operands: int, results: int = 1) -> tuple[Mode, ...]:
    """Return modes of every kind, for operands whose elements are only moved.

    >>> [str(mode) for mode in all_modes(0)]
    ['0 sum', '0 avg', '0 max', '0 min', '0 product']
    """
    return tuple(Mode(operands, kind, (kind,) * results) for kind in REDUCTIONS)


def unread_modes(operand: int) -> tuple[Mode, ...]:
    """Return modes of every kind with an invariant result, for an operand that is unread."""
    return tuple(Mode((operand,), kind, (None,)) for kind in REDUCTIONS)
