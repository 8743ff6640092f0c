"""Repetitions of rows in tables: equal layers become one block."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MIN_ROWS = 3
"""Fewest rows of a layer that is folded."""


class Repetition(NamedTuple):
    """Rows from `start` on, `size` of them, that repeat `layers` times in a row."""

    start: int
    size: int
    layers: int


def repetitions(keys: Sequence[object]) -> Iterator[Repetition]:
    """Yield the repetitions of rows by their keys, and rows that do not repeat one by one.

    At every row the repetition that covers most rows is taken, of equal ones the shortest.

    >>> [*repetitions("xabcabcabcy")][1]
    Repetition(start=1, size=3, layers=3)
    >>> [*repetitions("aaaaaa")]
    [Repetition(start=0, size=1, layers=6)]
    """
    start = 0
    while start < len(keys):
        best = Repetition(start, 1, 1)
        for size in (1, *range(MIN_ROWS, (len(keys) - start) // 2 + 1)):
            if start + size >= len(keys):
                break
            if keys[start + size] == keys[start]:
                count = _count(keys, start, size)
                if count > 1 and count * size > best.layers * best.size:
                    best = Repetition(start, size, count)
        yield best
        start += best.layers * best.size


def _count(keys: Sequence[object], start: int, size: int) -> int:
    """Return how often the rows from `start` on repeat after one another."""
    unit, count = keys[start : start + size], 1
    while keys[start + count * size : start + (count + 1) * size] == unit:
        count += 1
    return count


def without_number(name: str) -> str:
    """Return the name of an operation or a module without the numbers that distinguish it.

    >>> without_number("linear_12"), without_number("Net.layers.3.linear")
    ('linear', 'Net.layers.*.linear')
    """
    return re.sub(r"_\d+$", "", of_any_layer(name))


def of_any_layer(name: str) -> str:
    """Return the path of a module with `*` in the place of numbers; other names are unchanged."""
    return re.sub(r"(?<=\.)\d+", "*", name)
