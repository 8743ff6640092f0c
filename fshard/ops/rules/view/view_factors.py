"""The loops that two shapes of the same elements share: factors of views, merged and split."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fshard.ops.core.builders import all_modes
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Dims, Rule

__all__ = ["factor_names", "letter_dims", "reshape_factors", "rule_of_moved_dims"]


def names() -> Iterator[str]:
    """Names of factors without end; single letters first, which print without spaces."""
    yield from string.ascii_letters
    at = 0
    while True:
        yield f"f{at}"
        at += 1


def factor_names(count: int) -> tuple[str, ...]:
    """Names of so many factors.

    >>> factor_names(3)
    ('a', 'b', 'c')
    """
    return tuple(name for name, _ in zip(names(), range(count), strict=False))


def letter_dims(ndim: int) -> Dims:
    """Return one single-letter factor for each of `ndim` dims.

    >>> letter_dims(2)
    (('a',), ('b',))
    """
    return tuple((name,) for name in factor_names(ndim))


@dataclass(frozen=True, slots=True)
class ReshapeFactors:
    """The factors of a tensor's dims before and after a view, with their lengths.

    `whole` are those of one shape alone: no loop of the other runs along them.
    """

    before: Dims
    after: Dims
    whole: frozenset[str]
    sizes: tuple[tuple[str, int], ...]


def reshape_factors(before: Sequence[int], after: Sequence[int]) -> ReshapeFactors:
    """The finest factors of two shapes of the same elements, row-major.

    From the left, and where that ends from the right, the greatest common divisor of what is left
    of a dim of each is a loop of both. What is then left between belongs to one shape alone, and is
    whole. Shapes without elements share the dims that they begin and end with.

    >>> reshape_factors((6, 4), (2, 12)).before, reshape_factors((6, 4), (2, 12)).after
    ((('a', 'b'), ('c',)), (('a',), ('b', 'c')))
    >>> reshape_factors((1, 4), (4, 1)).before, reshape_factors((2, 9, 2), (6, 6)).after
    (((), ('a',)), (('a', 'b'), ('c', 'd')))
    """
    sides = _FactoredShape(before), _FactoredShape(after)
    given, sizes = names(), dict[str, int]()
    common = _equal if math.prod(before) == 0 else math.gcd
    for step in (1, -1):
        _share(sides, step, common, given, sizes)
    whole: list[str] = []
    if common is math.gcd:
        for side in sides:
            whole += side.fill(given, sizes)
    return ReshapeFactors(sides[0].dims, sides[1].dims, frozenset(whole), tuple(sizes.items()))


class _FactoredShape:
    """One shape while its factors are found: from the left, and from the right."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.rest = list(shape)
        self.begun: list[list[str]] = [[] for _ in shape]
        self.ended: list[list[str]] = [[] for _ in shape]
        self.open = list(range(len(shape)))

    def take(self, step: int, factor: str, size: int) -> None:
        """Give the next dim in this direction a factor; a dim that is told is closed."""
        dim = self.at(step)
        if step == 1:
            self.begun[dim].append(factor)
        else:
            self.ended[dim].insert(0, factor)
        self.rest[dim] //= max(size, 1)
        if self.rest[dim] == 1 or size == 0:
            self.skip(step)

    def at(self, step: int) -> int:
        """The next dim in this direction."""
        return self.open[0 if step == 1 else -1]

    def skip(self, step: int) -> None:
        """Close the next dim in this direction."""
        self.open.pop(0 if step == 1 else -1)

    def fill(self, given: Iterator[str], sizes: dict[str, int]) -> list[str]:
        """Factors of their own for what is left of the dims."""
        made = []
        for dim in self.open:
            if self.rest[dim] > 1:
                made.append(next(given))
                sizes[made[-1]] = self.rest[dim]
                self.begun[dim].append(made[-1])
        return made

    @property
    def dims(self) -> Dims:
        """Of every dim its factors."""
        return tuple((*first, *last) for first, last in zip(self.begun, self.ended, strict=True))


def _equal(one: int, other: int) -> int:
    """Sizes share all of themselves or nothing, which 1 stands for."""
    return one if one == other else 1


def _share(
    sides: tuple[_FactoredShape, _FactoredShape],
    step: int,
    common: Callable[[int, int], int],
    given: Iterator[str],
    sizes: dict[str, int],
) -> None:
    """Find the factors that both shapes have next in this direction, until they have none."""
    one, other = sides
    while one.open and other.open:
        rest = one.rest[one.at(step)], other.rest[other.at(step)]
        size = common(*rest)
        if size == 1 and rest != (1, 1):
            if 1 not in rest:
                return
            (one if rest[0] == 1 else other).skip(step)
            continue
        factor = next(given)
        sizes[factor] = size
        one.take(step, factor, size)
        other.take(step, factor, size)


def rule_of_moved_dims(
    call: OpCall,
    *results: Sequence[int | None],
    permuted: Iterable[int] = (),
    shapes: int = 0,
    local: Any = None,
) -> Rule:
    """A rule of one operand whose dims go to results: of every result's dim the one it is.

    Dims that are not in all results are whole. `shapes` operands more are laid as the results.
    """
    ndim = call.operands[0].ndim
    names = factor_names(ndim)
    made = tuple(tuple(() if at is None else (names[at],) for at in dims) for dims in results)
    lost = {at for at in range(ndim) if not all(at in dims for dims in results)}
    return Rule(
        (tuple((name,) for name in names), *made[:1] * shapes),
        made,
        unsharded=frozenset(names[at] for at in lost),
        permuted=frozenset(names[at] for at in permuted),
        modes=all_modes(0, results=len(results)),
        local=local,
    )
