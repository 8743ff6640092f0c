"""The simulator: ranks are threads that hand each other one baton.

Only the thread with the baton runs, the others sleep. A rank keeps it until it waits for a
collective that not all of its group have reached; then the next rank in order goes on. So a
simulation is deterministic, prints in rank order and has no data races, and when no rank can
go on it is known who stands where: the error says so instead of hanging.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard._torch.thread_state import ThreadSettings
from fshard._util.errors import ShardingError
from fshard._util.hooks import Hook
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Sharded
from fshard.layout.tree import is_pair, map_leaves
from fshard.run.transports.base import Finish, Group, as_rank
from fshard.run.transports.divergence_report import (
    Fingerprint,
    Stand,
    diverged,
    fingerprint,
    place,
    stranded,
    unsent,
    user_line,
    words,
)
from fshard.run.transports.reduce_dtypes import reduced

__all__ = ["run_ranks", "run_together", "simulate"]


class _Stopped(BaseException):
    """Unwinds a rank's thread after another one failed; never seen by users."""


# -- threads --------------------------------------------------------------------------


class _Worker:
    """A thread that is kept for the next simulation: starting one costs more than a collective."""

    __slots__ = ("core", "gate", "job")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], None] | None = None
        self.core: int | None = None
        threading.Thread(target=self._loop, daemon=True, name="fshard-rank").start()

    def _loop(self) -> None:
        if hasattr(os, "SCHED_BATCH"):
            with suppress(OSError):
                # Who is woken must not take the core from who wakes it and has Python's lock.
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while True:
            self.gate.acquire()
            job, self.job = self.job, None
            assert job is not None
            job()
            job = None  # what it holds, tensors too, must not wait for the next one
            _IDLE.append(self)

    def stay(self, core: int | None) -> None:
        """Stay on one core, or go back to those of the process."""
        if core != self.core:
            with suppress(OSError):  # where that is not allowed, it is slower
                all_cores = os.sched_getaffinity(os.getpid())
                os.sched_setaffinity(0, all_cores if core is None else {core})
            self.core = core


_IDLE: list[_Worker] = []
os.register_at_fork(after_in_child=_IDLE.clear)


def _core() -> int | None:
    """The core on which ranks stay: the caller's, who waits for them. None for any.

    They take turns: on one core a hand-over costs half, and what a rank reads is in its cache.
    But where operations have threads of their own, these would stay there too.
    """
    if torch.get_num_threads() > 1 or not sys.platform.startswith("linux"):
        return None
    return int(ctypes.CDLL(None).sched_getcpu())


# -- meetings -------------------------------------------------------------------------


ALIKE = {"all_gather", "all_reduce"}
"""The collectives that give every rank of a group the same."""


@dataclass(slots=True, eq=False)
class _Meeting:
    """One collective of one group: what each rank brought, and what each takes away."""

    what: Fingerprint
    group: Group
    brought: dict[int, tuple[torch.Tensor, Any, Fingerprint]] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: bool = False


@dataclass(slots=True, eq=False)
class _Rank:
    """A simulated rank, and its transport."""

    rank: int
    world: _World
    place: int
    gate: Any = None
    stay: Any = None
    state: str = "ready"
    waits: _Meeting | None = None
    thread: int = 0
    result: Any = None
    count: dict[Group, int] = field(default_factory=dict)
    remark: Callable[[], str] = str

    @property
    def everyone(self) -> Collection[int]:
        """All ranks of the simulation."""
        return self.world.ranks

    def moves(self, device: torch.device) -> bool:
        return True

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        return self._meet(fingerprint("all_gather", x), group, x, None)

    def all_reduce(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        return self._meet(fingerprint("all_reduce", x, op), group, x, None)

    def reduce_scatter(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        return self._meet(fingerprint("reduce_scatter", x, op), group, x, None)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        splits = tuple(send), tuple(receive)
        return self._meet(fingerprint("all_to_all", x), group, x, splits)

    def _meet(self, what: Fingerprint, group: Group, x: torch.Tensor, extra: object) -> Finish:
        meeting = self.world.arrive(self, what, group, x, extra)

        def finish() -> torch.Tensor:
            self.world.wait(self, meeting)
            mine = meeting.results.pop(self.rank)
            # One for all has a copy for each when it is written; the last needs none.
            return torch._lazy_clone(mine) if meeting.results and meeting.what[1] in ALIKE else mine

        return finish


class _World:
    """The ranks of one simulation, the baton, and the meetings under way."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = {rank: _Rank(rank, self, at) for at, rank in enumerate(mesh.ranks)}
        self.order = list(self.ranks.values())
        self.meetings: dict[tuple[Group, int], _Meeting] = {}
        self.error: tuple[int | None, BaseException] | None = None
        self.over = threading.Lock()
        self.core: int | None = None

    # -- the baton --

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank; their results, or the first error."""
        self.over.acquire()
        settings, self.core = ThreadSettings.current(), _core()
        for rank, function in zip(self.order, functions, strict=True):
            worker = _IDLE.pop() if _IDLE else _Worker()
            context = contextvars.copy_context()
            worker.job = lambda r=rank, f=function, c=context: c.run(self._live, r, f, settings)
            rank.gate, rank.stay = worker.gate, worker.stay
        self.order[0].gate.release()
        try:
            self.over.acquire()
        except BaseException as interrupt:
            # Ctrl-C: the ranks unwind at their next collective.
            self.error = (None, interrupt)
            raise
        try:
            if self.error is None:
                return [rank.result for rank in self.order]
            rank_id, error = self.error
            if rank_id is not None:
                error.add_note(f"on {place(self.mesh, rank_id)} of a simulated {self.mesh}")
            try:
                raise error
            finally:
                del error
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Hold no tensors any more: ranks and world hold each other until they are collected."""
        self.error = None
        self.meetings.clear()
        for rank in self.order:
            rank.result, rank.waits, rank.remark = None, None, str

    def _live(self, rank: _Rank, function: Callable[[], Any], settings: ThreadSettings) -> None:
        rank.thread = threading.get_ident()
        rank.stay(self.core)
        try:
            if self.error is None:
                with as_rank(rank), settings.entered():
                    rank.result = function()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            if self.error is None:
                self.error = (None if getattr(error, "everywhere", False) else rank.rank, error)
        rank.state = "done"
        self._pass_on(rank)

    def _pass_on(self, rank: _Rank) -> None:
        """Give the baton to the next rank that can go on, or end."""
        following = self._next(rank)
        if following is None and any(each.state == "waiting" for each in self.order):
            if self.error is None:
                self.error = (None, self._standstill())
            following = self._next(rank)
        (self.over if following is None else following.gate).release()

    def _next(self, rank: _Rank) -> _Rank | None:
        order, n = self.order, len(self.order)
        for at in range(rank.place + 1 - n, rank.place + 1):
            each = order[at]
            if each.state == "ready" or (
                each.state == "waiting"
                and (self.error is not None or (each.waits is not None and each.waits.complete))
            ):
                return each
        return None

    # -- meetings --

    def arrive(
        self, rank: _Rank, what: Fingerprint, group: Group, x: torch.Tensor, extra: object
    ) -> _Meeting:
        """Bring `x` to the group's next meeting; the last to arrive computes the results."""
        number = rank.count.get(group, 0)
        rank.count[group] = number + 1
        key = (group, number)
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = _Meeting(what, group)
        if meeting.what != what:
            raise self._diverged(rank, what, meeting)
        meeting.brought[rank.rank] = (x.detach(), extra, what)
        if len(meeting.brought) == len(group):
            del self.meetings[key]
            with torch.no_grad():
                meeting.results = _meet(meeting)
            meeting.brought.clear()
            meeting.complete = True
        return meeting

    def wait(self, rank: _Rank, meeting: _Meeting) -> None:
        """Hand the baton on until the meeting is complete."""
        if meeting.complete:
            return
        rank.state, rank.waits = "waiting", meeting
        following = self._next(rank)
        if following is None:
            error = self._standstill()
            rank.state = "ready"
            raise error
        following.gate.release()
        rank.gate.acquire()
        if not meeting.complete:
            raise _Stopped
        rank.state, rank.waits = "ready", None

    # -- errors --

    def _standstill(self) -> ShardingError:
        head = "the simulation stands still: ranks wait for others that never come"
        return stranded(head, self.mesh, {each.rank: _stand(each) for each in self.order})

    def _diverged(self, rank: _Rank, what: Fingerprint, meeting: _Meeting) -> ShardingError:
        calls = {each: call for each, (_, _, call) in meeting.brought.items()}
        calls[rank.rank] = what
        stands = {
            each: _stand_in(self.ranks[each], calls[each], meeting.group)
            for each in meeting.group
            if each in calls
        }
        return diverged(self.mesh, meeting.group, stands)


def _stand(rank: _Rank) -> Stand:
    """Where a rank stands that waits for others in vain, or that is waited for."""
    if rank.waits is None:
        return Stand("returned" if rank.state == "done" else "running", remark=rank.remark())
    brought, group = rank.waits.brought, rank.waits.group
    stand = _stand_in(rank, brought[rank.rank][2], group)
    missing = tuple(each for each in group if each not in brought)
    return stand._replace(what=f"waiting in {stand.what}", awaits=missing)


def _stand_in(rank: _Rank, call: Fingerprint, group: Group) -> Stand:
    line = user_line(rank.thread, call[0])
    return Stand(words(call, group), line, remark=rank.remark())


def _meet(meeting: _Meeting) -> dict[int, torch.Tensor]:
    """Everyone's result of one collective: each in memory of its own, those that are alike once."""
    group, (_, op, *arguments) = meeting.group, meeting.what
    inputs = [meeting.brought[rank][0] for rank in group]
    match op:
        case "all_gather":
            return dict.fromkeys(group, torch.stack(inputs))
        case "all_reduce":
            return dict.fromkeys(group, reduced(inputs, str(arguments[0])))
        case "reduce_scatter":
            reduction = str(arguments[0])
            return {
                rank: reduced([x[at] for x in inputs], reduction) for at, rank in enumerate(group)
            }
        case _:
            splits = [meeting.brought[rank][1] for rank in group]
            error = unsent(group, splits)
            if error is not None:
                raise error
            pieces = [x.split(send) for x, (send, _) in zip(inputs, splits, strict=True)]
            return {
                rank: torch.cat([piece[at] for piece in pieces]) for at, rank in enumerate(group)
            }


def run_ranks(
    mesh: Mesh, function: Callable[[_Rank, Any], Any], values: Sequence[Any]
) -> list[Any]:
    """`function(transport, value)` as every rank of a simulated mesh, one value per rank."""
    world = _World(mesh)
    ranks = world.order
    return world.run(
        [lambda r=r, v=v: function(r, v) for r, v in zip(ranks, values, strict=True)]  # type: ignore[misc]
    )


def run_together(
    mesh: Mesh, start: Callable[[_Rank, Any], Finish], values: Sequence[Any]
) -> list[torch.Tensor]:
    """`start(transport, value)()` as every rank, in this thread: all start, then all finish.

    For what waits for others only when it finishes; then all have come, and nobody waits.
    """
    ranks = _World(mesh).order
    finishes = [start(rank, value) for rank, value in zip(ranks, values, strict=True)]
    return [finish() for finish in finishes]


def simulate(mesh: Mesh, fn: Callable[..., Any], /, *args: Any) -> list[Any]:
    """Run rank-local code as every rank of `mesh` in this process; the results in rank order.

    Every rank gets the arguments; of a pair, its own part. An error in one rank is raised once,
    with a note that says which; ranks that reach different collectives are an error that says
    where each stands, and so is what `fs.start` launched and no rank has waited for.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> prog = fs.redistribute(fs.Spec(mesh, fs.P("x"), shape=(4,)),
    ...                        fs.Spec(mesh, fs.P(), shape=(4,)))
    >>> simulate(mesh, lambda: prog(torch.ones(2)).sum().item())
    [4.0, 4.0]
    """

    def part(value: Any, place: int) -> Any:
        return Sharded(value[0][place], value[1]) if is_pair(value) else value

    values = [
        map_leaves(lambda leaf, place=place: part(leaf, place), args) for place in range(mesh.size)
    ]
    return run_ranks(mesh, lambda _, own: run_rank_code_hook.call(fn, own), values)


@Hook
def run_rank_code_hook(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return `fn(*args)` as a simulated rank; set by `spmd/axis_env.py`."""
    raise NotImplementedError
