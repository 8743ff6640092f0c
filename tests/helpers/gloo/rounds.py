"""Order of contenders in the rounds of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def rotations(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield the names in the order of each round: each comes first, and after each other, in turn.

    Caches and memory that one contender leaves behind change the time of the next one.

    >>> [*rotations("abc", 4)]
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a'], ['a', 'c', 'b']]
    """
    for i in range(rounds):
        turn = i // 2 % len(names)
        row = [*names[turn:], *names[:turn]]
        yield row[::-1] if i % 2 else row
