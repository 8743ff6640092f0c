"""The simulator: ranks are threads that hand each other one baton.

Only the thread with the baton runs, the others sleep. A rank keeps it until it waits for a
collective that not all of its group have reached; then the next rank in order goes on. So a
simulation is deterministic, prints in rank order and has no data races, and when no rank can
go on it is known who stands where: the error says so instead of hanging.
"""

from __future__ import annotations

import contextvars
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from fshard.errors import ShardingError, fail
from fshard.mesh import Mesh
from fshard.run.settings import ThreadSettings
from fshard.run.transport import REDUCE, Finish, Group, as_rank
from fshard.spec import Sharded
from fshard.tree import is_pair, map_leaves

__all__ = ["run_ranks", "simulate"]


class _Stopped(BaseException):
    """Unwinds a rank's thread after another one failed; never seen by users."""


# -- threads --------------------------------------------------------------------------


class _Worker:
    """A thread that is kept for the next simulation: starting one costs more than a collective."""

    __slots__ = ("gate", "job")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], None] | None = None
        threading.Thread(target=self._loop, daemon=True, name="fshard-rank").start()

    def _loop(self) -> None:
        while True:
            self.gate.acquire()
            job, self.job = self.job, None
            assert job is not None
            job()
            job = None  # what it holds, tensors too, must not wait for the next one
            _IDLE.append(self)


_IDLE: list[_Worker] = []
os.register_at_fork(after_in_child=_IDLE.clear)


# -- meetings -------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Meeting:
    """One collective of one group: what each rank brought, and what each takes away."""

    what: tuple[object, ...]
    group: Group
    brought: dict[int, tuple[torch.Tensor, Any]] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: bool = False


@dataclass(slots=True, eq=False)
class _Rank:
    """A simulated rank, and its transport."""

    rank: int
    world: _World
    gate: Any = field(default_factory=threading.Lock)
    state: str = "ready"
    waits: _Meeting | None = None
    thread: int = 0
    result: Any = None
    count: dict[Group, int] = field(default_factory=dict)

    def moves(self, device: torch.device) -> bool:
        return True

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        return self._meet(("all_gather", x.dtype, tuple(x.shape)), group, x, None)

    def all_reduce(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        return self._meet(("all_reduce", op, x.dtype, tuple(x.shape)), group, x, None)

    def reduce_scatter(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        return self._meet(("reduce_scatter", op, x.dtype, tuple(x.shape)), group, x, None)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        return self._meet(("all_to_all", x.dtype), group, x, (tuple(send), tuple(receive)))

    def _meet(
        self, what: tuple[object, ...], group: Group, x: torch.Tensor, extra: object
    ) -> Finish:
        meeting = self.world.arrive(self, what, group, x, extra)

        def finish() -> torch.Tensor:
            self.world.wait(self, meeting)
            return meeting.results.pop(self.rank)

        return finish


class _World:
    """The ranks of one simulation, the baton, and the meetings under way."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = {rank: _Rank(rank, self) for rank in mesh.ranks}
        self.order = list(self.ranks.values())
        self.meetings: dict[tuple[Group, int], _Meeting] = {}
        self.error: tuple[int | None, BaseException] | None = None
        self.over = threading.Lock()

    # -- the baton --

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank; their results, or the first error."""
        self.over.acquire()
        settings = ThreadSettings.current()
        for rank, function in zip(self.order, functions, strict=True):
            rank.gate.acquire()
            worker = _IDLE.pop() if _IDLE else _Worker()
            context = contextvars.copy_context()
            worker.job = lambda r=rank, f=function, c=context: c.run(self._live, r, f, settings)
            worker.gate.release()
        self.order[0].gate.release()
        try:
            self.over.acquire()
        except BaseException as interrupt:
            # Ctrl-C: the ranks unwind at their next collective.
            self.error = (None, interrupt)
            raise
        if self.error is not None:
            rank_id, error = self.error
            self.error = None
            if rank_id is not None:
                place = ", ".join(f"{a}={c}" for a, c in self.mesh.coords(rank_id).items())
                error.add_note(f"on rank {rank_id} ({place}) of a simulated {self.mesh}")
            try:
                raise error
            finally:
                del error
        results = [rank.result for rank in self.order]
        for rank in self.order:  # ranks and world hold each other: let go of the tensors now
            rank.result = rank.waits = None
        return results

    def _live(self, rank: _Rank, function: Callable[[], Any], settings: ThreadSettings) -> None:
        rank.gate.acquire()
        rank.thread = threading.get_ident()
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
        at = self.order.index(rank) + 1
        for each in (*self.order[at:], *self.order[:at]):
            if each.state == "ready" or (
                each.state == "waiting"
                and (self.error is not None or (each.waits is not None and each.waits.complete))
            ):
                return each
        return None

    # -- meetings --

    def arrive(
        self, rank: _Rank, what: tuple[object, ...], group: Group, x: torch.Tensor, extra: object
    ) -> _Meeting:
        """Bring `x` to the group's next meeting; the last to arrive computes the results."""
        number = rank.count.get(group, 0)
        rank.count[group] = number + 1
        key = (group, number)
        meeting = self.meetings.get(key)
        if meeting is None:
            meeting = self.meetings[key] = _Meeting(what, group)
        if meeting.what != what:
            self._diverged(rank, what, meeting)
        meeting.brought[rank.rank] = (x.detach(), extra)
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
        lines = [self._where(each) for each in self.order]
        error = ShardingError(
            "the simulation stands still: ranks wait for others that never come\n  "
            + "\n  ".join(lines)
            + "\n  rule:  every rank of a group calls the same collectives in the same order"
            "\n  fix:   move the collective out of the branch that only some ranks take"
        )
        error.everywhere = True  # type: ignore[attr-defined]
        return error

    def _diverged(self, rank: _Rank, what: tuple[object, ...], meeting: _Meeting) -> NoReturn:
        lines = [
            f"rank {each.rank}: {_words(meeting.what)}{_user_line(each.thread)}"
            for each in self.order
            if each.rank in meeting.brought
        ]
        lines.append(f"rank {rank.rank}: {_words(what)}{_user_line(threading.get_ident())}")
        error = ShardingError(
            f"ranks of the group {meeting.group} call different collectives\n  "
            + "\n  ".join(lines)
            + "\n  rule:  every rank of a group calls the same collective, with one shape and dtype"
            "\n  fix:   look at what made the ranks differ before these lines"
        )
        error.everywhere = True  # type: ignore[attr-defined]
        raise error

    def _where(self, rank: _Rank) -> str:
        place = ", ".join(f"{a}={c}" for a, c in self.mesh.coords(rank.rank).items())
        head = f"rank {rank.rank} ({place})"
        if rank.waits is not None:
            missing = [each for each in rank.waits.group if each not in rank.waits.brought]
            return (f"{head}: waits in {_words(rank.waits.what)} for {missing}"
                    f"{_user_line(rank.thread)}")  # fmt: skip
        return f"{head}: {'returned' if rank.state == 'done' else 'runs'}"


def _meet(meeting: _Meeting) -> dict[int, torch.Tensor]:
    """Everyone's result of one collective; each in memory of its own."""
    group = meeting.group
    inputs = [meeting.brought[rank][0] for rank in group]
    match meeting.what[0]:
        case "all_gather":
            stacked = torch.stack(inputs)
            return {rank: stacked.clone() if at else stacked for at, rank in enumerate(group)}
        case "all_reduce":
            total = REDUCE[str(meeting.what[1])](torch.stack(inputs))
            return {rank: total.clone() if at else total for at, rank in enumerate(group)}
        case "reduce_scatter":
            reduce = REDUCE[str(meeting.what[1])]
            return {
                rank: reduce(torch.stack([x[at] for x in inputs])) for at, rank in enumerate(group)
            }
        case _:
            splits = [meeting.brought[rank][1] for rank in group]
            for at, (_, receive) in enumerate(splits):
                sent = tuple(send[at] for send, _ in splits)
                if sent != receive:
                    given = f"rank {group[at]} expects {receive} elements, is sent {sent}"
                    fail("all_to_all", given, "what is sent is what is received",
                         "give every rank the same spec")  # fmt: skip
            pieces = [x.split(send) for x, (send, _) in zip(inputs, splits, strict=True)]
            return {
                rank: torch.cat([piece[at] for piece in pieces]) for at, rank in enumerate(group)
            }


def _words(what: tuple[object, ...]) -> str:
    return f"{what[0]}({', '.join(map(str, what[1:]))})"


def _user_line(thread: int) -> str:
    """`at file:line` of the innermost frame of a thread outside of this package and below it."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_code.co_filename
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("fshard", "torch", "threading", "optree") and "<" not in name[:1]:
            return f" at {name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def run_ranks(
    mesh: Mesh, function: Callable[[_Rank, Any], Any], values: Sequence[Any]
) -> list[Any]:
    """`function(transport, value)` as every rank of a simulated mesh, one value per rank."""
    world = _World(mesh)
    ranks = world.order
    return world.run(
        [lambda r=r, v=v: function(r, v) for r, v in zip(ranks, values, strict=True)]  # type: ignore[misc]
    )


def simulate(mesh: Mesh, fn: Callable[..., Any], /, *args: Any) -> list[Any]:
    """Run rank-local code as every rank of `mesh` in this process; the results in rank order.

    Every rank gets the arguments; of a pair, its own part. An error in one rank is raised once,
    with a note that says which; ranks that reach different collectives are an error that says
    where each stands.

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
    return run_ranks(mesh, lambda _, own: fn(*own), values)
