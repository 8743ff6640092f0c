"""Positions of ranks in their collectives, as they write them to the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from fshard.run.transports.base import Group

EMPTY = "-"
"""Value of a key that no rank has written."""

Moment = tuple[int, int]
"""Number of a call of a mapped function, and of a group's collective in it; equal on all ranks."""
Splits = tuple[Sequence[int], Sequence[int]] | None


@dataclass(frozen=True, slots=True)
class Arrival:
    """Call with which a rank has come to a group's collective."""

    moment: Moment
    words: str
    line: str
    splits: Splits


@dataclass(slots=True)
class RankStatus:
    """Position of a rank, as it writes it to the store.

    Attributes:
        call: number of the mapped call.
        ended: "returned" or "raised" after the call, else "".
        is_origin: whether it raised an error of its own, not one about other ranks.
        awaited: the group whose collective it waits in.
        position: the position as text.
        remark: an additional line for errors.
        arrivals: its last call by group.
        passed: the last moment by group at which it saw all ranks.
    """

    call: int = 0
    ended: str = ""
    is_origin: bool = False
    awaited: Group | None = None
    position: str = "not yet in a checked call"
    remark: str = ""
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    passed: dict[str, Moment] = field(default_factory=dict)

    def text(self) -> str:
        """Return the text that `parse` reads."""
        return json.dumps(self, default=lambda x: {name: getattr(x, name) for name in x.__slots__})

    @staticmethod
    def parse(text: str) -> RankStatus:
        """Return the status that a rank has written."""
        if text == EMPTY:
            return RankStatus()
        fields = json.loads(text)
        fields["arrivals"] = {
            group: Arrival(**(arrival | {"moment": tuple(arrival["moment"])}))
            for group, arrival in fields["arrivals"].items()
        }
        fields["awaited"] = fields["awaited"] and tuple(fields["awaited"])
        fields["passed"] = {group: tuple(moment) for group, moment in fields["passed"].items()}
        return RankStatus(**fields)


def arrived_ranks(
    statuses: dict[int, RankStatus], key: str, moment: Moment
) -> dict[int, Arrival] | None:
    """Return the calls of ranks that have come; None if a rank has seen all and gone on."""
    if any(status.passed.get(key, (0, 0)) >= moment for status in statuses.values()):
        return None
    arrivals = {rank: status.arrivals.get(key) for rank, status in statuses.items()}
    return {rank: a for rank, a in arrivals.items() if a is not None and a.moment == moment}


def stuck_ranks(statuses: dict[int, RankStatus]) -> dict[int, tuple[Group, Moment]]:
    """Return the ranks that wait in a cycle, each with the collective that it waits in."""
    waiting = {
        rank: (status.awaited, status.arrivals[str(status.awaited)].moment)
        for rank, status in statuses.items()
        if status.awaited is not None
    }
    while True:
        blocked = {
            rank: (group, moment)
            for rank, (group, moment) in waiting.items()
            if any(
                member in waiting
                for member in group
                if (arrived := arrived_ranks(statuses, str(group), moment)) is not None
                and member not in arrived
            )
        }
        if len(blocked) == len(waiting):
            return blocked
        waiting = blocked
