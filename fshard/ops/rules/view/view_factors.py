"""Common factors of two shapes with the same elements, shared by the rules of views."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fshard.ops.core.builders import all_modes
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Dims, Rule


def iter_names() -> Iterator[str]:
    """Yield names of factors without end; single letters first, which print without spaces."""
    yield from string.ascii_letters
    number = 0
    while True:
        yield f"f{number}"
        number += 1


def factor_names(count: int) -> tuple[str, ...]:
    """Return the first `count` names of factors.

    >>> factor_names(3)
    ('a', 'b', 'c')
    """
    return tuple(name for name, _ in zip(iter_names(), range(count), strict=False))


def letter_dims(ndim: int) -> Dims:
    """Return one single-letter factor for each of `ndim` dims.

    >>> letter_dims(2)
    (('a',), ('b',))
    """
    return tuple((name,) for name in factor_names(ndim))


@dataclass(frozen=True, slots=True)
class ReshapeFactors:
    """Factors of a tensor's dims before and after a reshape, with their lengths.

    `unsharded` are factors of one shape alone.
    """

    before: Dims
    after: Dims
    unsharded: frozenset[str]
    sizes: tuple[tuple[str, int], ...]


def reshape_factors(before: Sequence[int], after: Sequence[int]) -> ReshapeFactors:
    """Return the finest common factors of two row-major shapes with the same number of elements.

    From the left, then from the right, the greatest common divisor of the remaining sizes of the
    next two dims is a factor of both. The rest in between belongs to one shape alone and stays
    unsharded. Shapes without elements share their equal leading and trailing dims.

    >>> reshape_factors((6, 4), (2, 12)).before, reshape_factors((6, 4), (2, 12)).after
    ((('a', 'b'), ('c',)), (('a',), ('b', 'c')))
    >>> reshape_factors((1, 4), (4, 1)).before, reshape_factors((2, 9, 2), (6, 6)).after
    (((), ('a',)), (('a', 'b'), ('c', 'd')))
    """
    sides = _FactoredShape(before), _FactoredShape(after)
    names, sizes = iter_names(), dict[str, int]()
    common = _equal if math.prod(before) == 0 else math.gcd
    for step in (1, -1):
        _share(sides, step, common, names, sizes)
    unsharded: list[str] = []
    if common is math.gcd:
        for side in sides:
            unsharded += side.fill(names, sizes)
    return ReshapeFactors(sides[0].dims, sides[1].dims, frozenset(unsharded), tuple(sizes.items()))


class _FactoredShape:
    """One shape while its factors are found, from the left and from the right."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.remaining = list(shape)
        self.leading: list[list[str]] = [[] for _ in shape]
        self.trailing: list[list[str]] = [[] for _ in shape]
        self.open = list(range(len(shape)))

    def take(self, step: int, factor: str, size: int) -> None:
        """Give the next dim in this direction a factor; close the dim when it is used up."""
        dim = self.next_dim(step)
        if step == 1:
            self.leading[dim].append(factor)
        else:
            self.trailing[dim].insert(0, factor)
        self.remaining[dim] //= max(size, 1)
        if self.remaining[dim] == 1 or size == 0:
            self.skip(step)

    def next_dim(self, step: int) -> int:
        """Return the next dim in this direction."""
        return self.open[0 if step == 1 else -1]

    def skip(self, step: int) -> None:
        """Close the next dim in this direction."""
        self.open.pop(0 if step == 1 else -1)

    def fill(self, names: Iterator[str], sizes: dict[str, int]) -> list[str]:
        """Give the rest of each dim a factor of its own; return these factors."""
        factors = []
        for dim in self.open:
            if self.remaining[dim] > 1:
                factors.append(next(names))
                sizes[factors[-1]] = self.remaining[dim]
                self.leading[dim].append(factors[-1])
        return factors

    @property
    def dims(self) -> Dims:
        """Factors of each dim."""
        return tuple(
            (*leading, *trailing)
            for leading, trailing in zip(self.leading, self.trailing, strict=True)
        )


def _equal(a: int, b: int) -> int:
    """Return the size if both are equal, else 1."""
    return a if a == b else 1


def _share(
    sides: tuple[_FactoredShape, _FactoredShape], step: int, common: Callable[[int, int], int],
    names: Iterator[str], sizes: dict[str, int],
) -> None:  # fmt: skip
    """Find the common factors of both shapes in one direction, until there are none."""
    before, after = sides
    while before.open and after.open:
        remaining = before.remaining[before.next_dim(step)], after.remaining[after.next_dim(step)]
        size = common(*remaining)
        if size == 1 and remaining != (1, 1):
            if 1 not in remaining:
                return
            (before if remaining[0] == 1 else after).skip(step)
            continue
        factor = next(names)
        sizes[factor] = size
        before.take(step, factor, size)
        after.take(step, factor, size)


def moved_dims_rule(
    call: OpCall, *results: Sequence[int | None], permuted: Iterable[int] = (), shapes: int = 0,
    local: Any = None,
) -> Rule:  # fmt: skip
    """Return the rule of one operand whose dims are moved to `results`.

    Each result lists the operand's dim of each of its dims; dims that are not in all results stay
    unsharded. `shapes` further operands have the layout of the results.
    """
    ndim = call.operands[0].ndim
    names = factor_names(ndim)
    result_dims = tuple(
        tuple(() if dim is None else (names[dim],) for dim in dims) for dims in results
    )
    unsharded = {dim for dim in range(ndim) if not all(dim in dims for dims in results)}
    return Rule((tuple((name,) for name in names), *result_dims[:1] * shapes), result_dims,
                unsharded=frozenset(names[dim] for dim in unsharded),
                permuted=frozenset(names[dim] for dim in permuted),
                modes=all_modes(0, results=len(results)), local=local)  # fmt: skip
