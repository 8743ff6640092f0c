"""Comparison of calls between processes, through the store, before their collective.

Backends compare no sizes: gloo aborts a process that receives more bytes than it expects, and
gives memory of others to one that receives fewer. Ranks of a group compare the first call of each
shape. They wait for each other in the store, not in a collective: of ranks of which only some call
with a new shape these wait until the timeout, and name themselves.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from weakref import WeakKeyDictionary

from fshard.layout.mesh import Mesh
from fshard.run.transports.base import CHECKED, Group, Label, is_simulated, own_transport
from fshard.run.transports.divergence_report import Position, diverged, stranded, user_line
from fshard.run.transports.process_end import Listener
from fshard.run.transports.torch_distributed import DEFAULT_TIMEOUT, ProcessWorld

PAUSE = 0.0005
"""Seconds between reads of the counter."""
PAUSES_PER_WATCH = 64
"""Reads of the counter between looks whether processes have ended."""

_COMPARED: WeakKeyDictionary[Listener, tuple[set[Hashable], dict[Group, int]]] = WeakKeyDictionary()
"""Calls that all ranks of a group have compared, and the number of comparisons of each group."""


def compare_once(label: Label, group: Group, call: str) -> None:
    """Raise `ShardingError` on all ranks of a group if their calls differ, the first time of each.

    Simulations and `check="collectives"` compare every call themselves.

    Args:
        label: the label of the call.
        group: the ranks, all of which call this with a new call at the same time.
        call: the call as text, with all that ranks must agree on.
    """
    world = None if is_simulated() or CHECKED.get() is not None else own_transport()
    if not isinstance(world, ProcessWorld) or len(group) < 2:
        return
    compared, counts = _COMPARED.setdefault(world.listener, (set(), {}))
    if (group, call) in compared:
        return
    counts[group] = count = counts.get(group, 0) + 1
    prefix = f"fshard {world.start_count} {group} {count}"
    own = f"{world.rank}\n{user_line(None, label)}\n{call}"
    try:
        _compare(world, label.mesh, group, prefix, own)
    except RuntimeError:  # the store does not answer, or is that of the fake backend
        return
    compared.add((group, call))


def _compare(world: ProcessWorld, mesh: Mesh, group: Group, prefix: str, own: str) -> None:
    """Compare the text of this rank with that of the rank that comes first."""
    store, watch = world.listener.store, world.listener.watch
    counter, other_key = f"{prefix} count", f"{prefix} other"
    first = store.compare_set(prefix, "", own).decode()
    if _call(first) != _call(own):
        store.compare_set(other_key, "", own)
    end = time.monotonic() + (world.timeout or DEFAULT_TIMEOUT).total_seconds()
    reads, count = 0, store.add(counter, 1)
    while count < len(group) and not store.check([other_key]):
        reads += 1
        if time.monotonic() > end or (reads % PAUSES_PER_WATCH == 0 and watch.ended(group)):
            head = f"{count} of the ranks {group} have come to a call that is new to them"
            raise stranded(head, mesh, {world.rank: _position(own, group)},
                           "the same shapes on every rank: drop or pad the last batch")  # fmt: skip
        time.sleep(PAUSE)
        count = store.add(counter, 0)
    if store.check([other_key]):
        texts = sorted((first, store.get(other_key).decode()), key=_rank)
        raise diverged(mesh, group, {_rank(text): _position(text) for text in texts})


def _rank(text: str) -> int:
    return int(text.split("\n", 2)[0])


def _call(text: str) -> str:
    return text.split("\n", 2)[2]


def _position(text: str, awaits: Group = ()) -> Position:
    _, line, call = text.split("\n", 2)
    return Position(call, line, awaits)
