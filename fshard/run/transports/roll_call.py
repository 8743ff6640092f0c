"""Roll calls of processes through the store: whether all ranks have come to a place in their code.

All ranks pass the places of a function's calls in one order. A rank that comes to a place writes
it to its key in the store. If it takes part in the roll call, it adds itself to a counter, and
waits until all have come, or one has passed or come to a place of another kind: the answer is the
same on all ranks that come, however late they are. A rank that is at a collective that the others
have yet to join will not come to their place any more: it has passed, too.

Calls in a graph of `torch.compile` are not counted, and each rank traces graphs of its own. Once a
rank has traced a function, the numbers of the ranks' calls differ, and none of them takes part in a
roll call of that function.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import is_simulated, own_transport
from fshard.run.transports.process_end import Listener
from fshard.run.transports.torch_distributed import DEFAULT_TIMEOUT, ProcessWorld

PASSED = "passed"
"""Kind of place of a rank that takes no part in its roll call."""
PAUSE = 0.001
"""Seconds between reads of the counter."""
READS = 1, 1, 2, 4, 8
"""Reads of the counter before each of the first reads of all ranks' keys."""
LAST_READS = 16
LAST = 1 << 31
"""Number of a call's last place, which all others precede, however many a rank has taken."""
KEPT_CALLS = 64
"""Roll calls whose counters stay in the store, for ranks that have yet to read them."""


@dataclass(slots=True)
class _Calls:
    """Calls of one function on one mesh by this process.

    Attributes:
        count: their number so far, equal on every rank.
        opened: counters to which this process came first, and which it deletes.
    """

    count: int = 0
    opened: deque[str] = field(default_factory=deque)


_CALLS: WeakKeyDictionary[Listener, dict[str, _Calls]] = WeakKeyDictionary()
"""Calls by the prefix of their keys in the store; each `fs.init` begins anew."""


class RollCalls:
    """Roll calls in one call of a function, by a process; simulated ranks take part in none.

    Args:
        mesh: the mesh, whose ranks all call the function.
        name: the name of the function.
    """

    __slots__ = (
        "_calls", "_prefix", "_traced", "_world", "collectives", "mesh", "name", "place",
    )  # fmt: skip

    def __init__(self, mesh: Mesh, name: str) -> None:
        self.mesh, self.name = mesh, name
        self.place = 0
        """Number of places since the last collective of all ranks."""
        self.collectives = 0
        """Number of these collectives."""
        world = None if is_simulated() else own_transport()
        self._world = world if isinstance(world, ProcessWorld) else None
        if self._world is not None:
            start = f"{self._world.start_count}.{self._world.init_count}"
            self._prefix = f"fshard {start} {dict(mesh.shape)} {mesh.devices} {name} "
            self._traced = f"{self._prefix}traced"
            """Key that a rank sets when it traces the function."""
            if torch.compiler.is_compiling():
                with suppress(RuntimeError):
                    self._world.listener.store.set(self._traced, "")
                self._world = None
                return
            by_prefix = _CALLS.setdefault(self._world.listener, {})
            self._calls = by_prefix.setdefault(self._prefix, _Calls())
            self._calls.count += 1

    def join_collective(self, *, write: bool) -> None:
        """Count a collective of all ranks; `write` lets those that wait for this rank go on."""
        self.collectives, self.place = self.collectives + 1, 0
        if write and self._world is not None:
            self._write(self._calls.count)

    def pass_by(self, *, last: bool = False) -> None:
        """Take no part in the roll call of the next place, or of the last one."""
        self.place = LAST if last else self.place + 1
        if self._world is not None:
            self._write(self._calls.count)

    def end(self) -> None:
        """Take part in no roll call any more: the call of the function has ended."""
        self.collectives = self.place = 0
        if self._world is not None:
            self._write(self._calls.count + 1)

    def have_all_come(self, kind: str, *, last: bool = False) -> bool:
        """Return True if every rank takes part at the next place, the same on those that do.

        Args:
            kind: the kind of the place, a word.
            last: True for the last place of the call.

        Raises:
            ShardingError: If a rank has ended, or has neither come nor passed within the timeout.
        """
        self.place = LAST if last else self.place + 1
        if self._world is None:
            return not torch.compiler.is_compiling()
        calls, store = self._calls, self._world.listener.store
        counter = f"{self._prefix}{calls.count} {self.collectives} {self.place} {kind}"
        try:
            if store.check([self._traced]):
                self._write(calls.count)
                return False
            self._write(calls.count, kind)
            count = store.add(counter, 1)
            if count == 1:
                calls.opened.append(counter)
            if len(calls.opened) > KEPT_CALLS:
                store.delete_key(calls.opened.popleft())
            return count == self.mesh.size or self._wait(counter, kind)
        except RuntimeError:  # the store does not answer, or is that of the fake backend
            return False

    def _write(self, call: int, kind: str = PASSED) -> None:
        """Write the place of this process in a call; the write is sent, and not awaited."""
        assert self._world is not None
        text = f"{call} {self.collectives} {self.place} {kind}"
        with suppress(RuntimeError):
            self._world.listener.store.set(f"{self._prefix}{self._world.process_rank}", text)

    def _wait(self, counter: str, kind: str) -> bool:
        """Return True once a counter has counted all ranks, False once a rank has passed it."""
        assert self._world is not None
        listener = self._world.listener
        store = listener.store
        keys = [f"{self._prefix}{rank}" for rank in self.mesh.ranks]
        own = self._calls.count, self.collectives, self.place
        limit = (self._world.timeout or DEFAULT_TIMEOUT).total_seconds()
        end = time.monotonic() + limit
        for reads in itertools.chain(READS, itertools.repeat(LAST_READS)):
            for _ in range(reads):
                count = store.add(counter, 0)
                if count == self.mesh.size:
                    return True
                time.sleep(PAUSE)
            gone = listener.watch.ended(self.mesh.ranks)  # those may have passed before
            written = [store.get(key).decode().split() for key in keys if store.check([key])]
            places = [(tuple(map(int, numbers)), word) for *numbers, word in written]
            passed = any(place > own or (place == own and word != kind) for place, word in places)
            if passed or store.check([self._traced]):
                return bool(store.add(counter, 0) == self.mesh.size)
            if gone:
                self._fail(f"the processes of ranks {list(gone)} have ended")
            if time.monotonic() > end:
                self._fail(f"{count} of {self.mesh.size} ranks have come in {limit:g} s")
        raise AssertionError("unreachable")

    def _fail(self, given: str) -> NoReturn:
        fail(
            self.name,
            f"{given}; this rank waits for the others, as it has read a varying value",
            "after such a read every rank must have called the function as often, take a gradient "
            "that one takes, and return, within the timeout of fs.init(mesh, timeout=seconds)",
            "call the function, and take its gradients, on every rank; or read the value after the "
            "call, from its result",
        )
