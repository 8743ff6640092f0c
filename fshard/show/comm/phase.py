"""Counters of the collectives of one phase, grouped by any of the fields of a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

from fshard.run.transports.base import Event
from fshard.show.comm.origin import Origin

Key = tuple[str, str | tuple[str, ...]]
"""An operation and its axis, or a tuple of several axes: `("all_reduce", "tp")`."""
K = TypeVar("K", bound=Hashable)


class Launch(NamedTuple):
    """Fields by which launches are grouped; launches of equal fields are counted together."""

    operation: str
    axes: tuple[str, ...]
    dtype: str
    call: str
    module: str
    line: str

    @property
    def key(self) -> Key:
        """The operation and its axis or axes."""
        return self.operation, self.axes[0] if len(self.axes) == 1 else self.axes


def launch_of(event: Event, origin: Origin) -> Launch:
    """Return the fields of a collective."""
    dtype = "" if event.dtype is None else str(event.dtype).removeprefix("torch.")
    return Launch(event.op, event.axes, dtype, *origin)


class Phase:
    """Launches and bytes of one phase, per operation and axes, of the busiest rank.

    Operations that did not run count 0.
    """

    __slots__ = ("_ranks",)

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[Counter[Launch], Counter[Launch]]] = {}

    def _record(self, launch: Launch, event: Event) -> None:
        launches, sent = self._ranks.setdefault(event.rank, (Counter(), Counter()))
        launches[launch] += 1
        sent[launch] += event.nbytes

    @property
    def counts(self) -> Counter[Key]:
        """Number of launches of each operation: a program that all ranks run counts once."""
        return self._grouped(0, lambda launch: launch.key)

    @property
    def bytes(self) -> Counter[Key]:
        """Bytes that the busiest rank sent in each operation."""
        return self._grouped(1, lambda launch: launch.key)

    def _grouped(self, which: int, key_of: Callable[[Launch], K]) -> Counter[K]:
        """Return the launches, or with `which=1` the bytes, of the busiest rank by a key."""
        most: Counter[K] = Counter()
        keys: dict[K, None] = {}
        for rank in sorted(self._ranks):
            own: Counter[K] = Counter()
            for launch, count in self._ranks[rank][which].items():
                keys[key_of(launch)] = None
                own[key_of(launch)] += count
            most |= own
        # The union of counters drops zeros, but a launch that sends nothing is a launch.
        return Counter({key: most[key] for key in keys})

    @property
    def total_bytes(self) -> int:
        """Bytes that the busiest rank sent."""
        return max((sent.total() for _, sent in self._ranks.values()), default=0)
