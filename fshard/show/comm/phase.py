"""Counters of the collectives of one phase, grouped by any of the fields of a launch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fshard.run.transports.base import ObservedCall
from fshard.show.comm.origin import Origin, origin_of

Key = tuple[str, str | tuple[str, ...]]
"""An operation and its axis, or a tuple of several axes: `("all_reduce", "tp")`."""
FIELDS = ("operation", "axes", "dtype", "call", "redistribution", "module", "line")
"""Fields by which launches are grouped."""


class LoggedLaunch(NamedTuple):
    """One collective and its origin, as they are recorded; launches that are equal are counted."""

    operation: str
    axes: tuple[str, ...]
    torch_dtype: torch.dtype | None
    origin: Origin

    @property
    def dtype(self) -> str:
        """The name of the dtype that is sent, "" if it is unknown."""
        return "" if self.torch_dtype is None else str(self.torch_dtype).removeprefix("torch.")

    @property
    def call(self) -> str:
        """The call of fshard, with the layouts of a program."""
        return self.origin.call

    @property
    def redistribution(self) -> str:
        """The source and the target layout of a program."""
        return self.origin.redistribution

    @property
    def module(self) -> str:
        """The path of the module whose forward runs, or ran before the backward pass."""
        return self.origin.module

    @property
    def line(self) -> str:
        """The user's source line."""
        return self.origin.line


Ranks = dict[int, dict[LoggedLaunch, list[int]]]
"""Number and bytes of equal launches, by rank."""


class Phase:
    """Launches and bytes of one phase, per operation and axes, of the busiest rank.

    Operations that did not run count 0. It reads the calls that a log counts, also later ones.
    """

    __slots__ = ("_calls", "_grouped", "_phases")

    def __init__(self, calls: Mapping[ObservedCall, int], *phases: str) -> None:
        self._calls, self._phases = calls, phases
        self._grouped: tuple[int, Ranks] = 0, {}

    def _ranks(self) -> Ranks:
        """Return equal launches by rank; they are grouped again if there are more than before."""
        total = sum(list(self._calls.values()))
        if total != self._grouped[0]:
            self._grouped = total, self._group()
        return self._grouped[1]

    def _group(self) -> Ranks:
        """Return equal launches by rank, in the order of phases."""
        ranks: Ranks = defaultdict(dict)
        calls = [(origin_of(call), call.events, n) for call, n in dict(self._calls).items()]
        for phase in self._phases:
            for origin, events, n in calls:
                for event in events:
                    if event.phase == phase:
                        launch = LoggedLaunch(event.op, event.axes, event.dtype, origin)
                        figures = ranks[event.rank].setdefault(launch, [0, 0])
                        figures[0] += n
                        figures[1] += n * event.nbytes
        return ranks

    @property
    def counts(self) -> Counter[Key]:
        """Number of launches of each operation: a program that all ranks run counts once."""
        return _by_key(self.grouped(0, ("operation", "axes")))

    @property
    def bytes(self) -> Counter[Key]:
        """Bytes that the busiest rank sent in each operation."""
        return _by_key(self.grouped(1, ("operation", "axes")))

    def grouped(self, which: int, fields: Sequence[str]) -> Counter[tuple[Any, ...]]:
        """Return the launches, or with `which=1` the bytes, of the busiest rank by fields."""
        most: Counter[tuple[Any, ...]] = Counter()
        keys: dict[tuple[Any, ...], None] = {}
        ranks = self._ranks()
        for rank in sorted(ranks):
            own: Counter[tuple[Any, ...]] = Counter()
            for launch, figures in ranks[rank].items():
                key = tuple([getattr(launch, field) for field in fields])
                keys[key] = None
                own[key] += figures[which]
            most |= own
        # The union of counters drops zeros, but a launch that sends nothing is a launch.
        return Counter({key: most[key] for key in keys})

    @property
    def total_bytes(self) -> int:
        """Bytes that the busiest rank sent."""
        sums = [sum(n for _, n in launches.values()) for launches in self._ranks().values()]
        return max(sums, default=0)


def _by_key(grouped: Counter[tuple[Any, ...]]) -> Counter[Key]:
    return Counter(
        {(op, axes[0] if len(axes) == 1 else axes): n for (op, axes), n in grouped.items()}
    )
