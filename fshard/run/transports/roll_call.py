"""Roll calls of processes through the store: whether all ranks have come to a place in their code.

A rank that comes adds itself to a counter. One that sees all, or that has waited for long enough,
writes a verdict, and the first verdict holds for every rank, also for one that comes later. Ranks
that do not come take no part, and pay nothing. A rank that has waited for others in vain does not
wait at that place again, unless they came later.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from fshard.layout.mesh import Mesh
from fshard.run.transports.base import is_simulated, own_transport
from fshard.run.transports.process_end import Listener
from fshard.run.transports.rank_status import Moment
from fshard.run.transports.torch_distributed import ProcessWorld

PATIENCE = 1.0
"""Seconds that ranks may be late."""
PAUSE = 0.001
"""Seconds between reads of the store."""
VERDICT = " verdict"
"""End of the key of a verdict; the rest is the key of its counter."""
KEPT_CALLS = 64
"""Roll calls whose keys stay in the store, for ranks that are late."""


@dataclass(slots=True)
class _Calls:
    """Roll calls of a process.

    Attributes:
        counts: number of calls so far of functions by mesh and name.
        missed: the last roll call at a place, if ranks were missing.
        opened: roll calls to which this process came first, whose keys it deletes.
    """

    counts: Counter[tuple[Mesh, str]] = field(default_factory=Counter)
    missed: dict[str, str] = field(default_factory=dict)
    opened: deque[str] = field(default_factory=deque)


_CALLS: WeakKeyDictionary[Listener, _Calls] = WeakKeyDictionary()


def count_call(mesh: Mesh, name: str) -> int:
    """Return the number of this process's calls of a function on a mesh, equal on every rank."""
    world = own_transport()
    if is_simulated() or not isinstance(world, ProcessWorld):
        return 0
    counts = _CALLS.setdefault(world.listener, _Calls()).counts
    counts[mesh, name] += 1
    return counts[mesh, name]


def have_all_come(mesh: Mesh, name: str, moment: Moment, place: str) -> bool:
    """Return True if all ranks of a mesh come within `PATIENCE`, the same on those that come.

    Args:
        mesh: the mesh.
        name: the name of a function.
        moment: number of its call, and of the roll call in it; equal on every rank.
        place: the place in the code, where ranks that were missing are not waited for again.
    """
    world = own_transport()
    if not isinstance(world, ProcessWorld):
        return True
    calls, store = _CALLS.setdefault(world.listener, _Calls()), world.listener.store
    key = f"fshard {world.start_count} {dict(mesh.shape)} {mesh.devices} {name} {moment}"
    verdict = key + VERDICT
    try:
        missed = calls.missed.pop(place, "")
        in_vain = missed and not (store.check([missed]) and store.add(missed, 0) == mesh.size)
        end = time.monotonic() + (0 if in_vain else PATIENCE)
        count = store.add(key, 1)
        if count == 1:
            calls.opened.append(key)
        while not store.check([verdict]):
            if count == mesh.size or time.monotonic() > end:
                vote = "all" if count == mesh.size else "some"
                store.compare_set(verdict, "", vote)
                break
            time.sleep(PAUSE)
            count = store.add(key, 0)
        come: bool = store.get(verdict) == b"all"
        if not come:
            calls.missed[place] = key
        if len(calls.opened) > KEPT_CALLS:
            old = calls.opened.popleft()
            store.delete_key(old)
            store.delete_key(old + VERDICT)
    except RuntimeError:  # the store does not answer, or is that of the fake backend
        return False
    return come
