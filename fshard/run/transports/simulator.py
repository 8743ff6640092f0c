"""Simulated ranks: threads of which one runs at a time.

A rank runs until it waits for a collective that not all ranks of the group have called; then the
next rank in order runs. So a simulation is deterministic, prints in rank order and has no data
races. When no rank can run, an error names the call that each of them waits in.

`arrive` compares each rank's call with the group's first, and raises if they differ;
`divergence_report` writes the errors.

After an error or Ctrl-C ranks end at their next collective; Ctrl-C also raises in the code of the
running rank, and of ranks that it simulates, as soon as that runs Python. Threads of an interrupted
simulation are not reused.
"""

from __future__ import annotations

import contextvars
import ctypes
import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fshard._torch.dynamo import without_compiler
from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._torch.forward_level import linearizing_by_jvp, share_forward_level
from fshard._torch.functorch import forward_ad_level
from fshard._torch.memory import lazy_clone
from fshard._torch.thread_state import ThreadSettings
from fshard._util.errors import ShardingError, fail
from fshard._util.hooks import Hook
from fshard._util.other_names import COLLECTIVES, NO_PROCESS_GROUP
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.sharded import Sharded
from fshard.layout.tree import is_pair, map_leaves
from fshard.run.transports.base import Finish, Group, as_rank, current_transport
from fshard.run.transports.divergence_report import (
    Fingerprint,
    Position,
    ascending,
    diverged,
    fingerprint,
    rank_text,
    stranded,
    unsent,
    user_line,
    words,
)
from fshard.run.transports.rank_threads import core_for_ranks, idle_thread
from fshard.run.transports.reduce_dtypes import reduced


class _Stopped(BaseException):
    """Ends a rank's thread after another rank failed; never reaches users."""


STOP_SECONDS = 1.0
"""Time for ranks to end after Ctrl-C. A call also waits for them for as long, and then again:
after a wait Python sees signals from just before it."""

# -- rendezvous -----------------------------------------------------------------------

Splits = tuple[tuple[int, ...], tuple[int, ...]] | None
"""Elements that a rank of an all-to-all sends to and receives from each rank of its group."""
SAME_RESULT = {"all_gather", "all_reduce"}
"""Collectives with one result for all ranks of a group."""


@dataclass(slots=True, eq=False)
class _Rendezvous:
    """One collective of one group: the ranks' inputs, and once all have come their results."""

    fingerprint: Fingerprint
    group: Group
    inputs: dict[int, tuple[torch.Tensor, Splits, Fingerprint]] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: bool = False


@dataclass(slots=True, eq=False)
class SimulatedRank:
    """Transport of one simulated rank."""

    rank: int
    world: SimulatedWorld
    index: int
    gate: Any = None
    set_schedule: Any = None
    state: str = "ready"
    awaited: _Rendezvous | None = None
    thread: int = 0
    inner: SimulatedWorld | None = None
    result: Any = None
    counts: dict[Group, int] = field(default_factory=dict)
    remark: Callable[[], str] = str

    @property
    def all_ranks(self) -> Collection[int]:
        """All ranks of the simulation."""
        return self.world.mesh.ranks

    def accepts(self, device: torch.device) -> bool:
        """Return True if tensors on `device` can be sent."""
        return True

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        """Gather `x` of all ranks of `group`."""
        return self._launch(fingerprint("all_gather", x), group, x)

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Reduce `x` over the ranks of `group`."""
        return self._launch(fingerprint("all_reduce", x, reduction), group, x)

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Reduce row i of `x` over `group`, for the rank at index i."""
        return self._launch(fingerprint("reduce_scatter", x, reduction), group, x)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """Send pieces of `x` to the ranks of `group`."""
        splits = tuple(send), tuple(receive)
        return self._launch(fingerprint("all_to_all", x), group, x, splits)

    def _launch(
        self, call: Fingerprint, group: Group, x: torch.Tensor, splits: Splits = None
    ) -> Finish:
        meeting = self.world.arrive(self, call, group, x, splits)

        def finish() -> torch.Tensor:
            if not meeting.complete:
                self.world.wait(self, meeting)
            return own_result(meeting.results, self.rank, str(call[1]))

        return finish


class SimulatedWorld:
    """The ranks of one simulation and their unfinished collectives."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.order = [SimulatedRank(rank, self, i) for i, rank in enumerate(mesh.ranks)]
        self.unfinished: dict[tuple[Group, int], _Rendezvous] = {}
        self.error: tuple[int | None, BaseException] | None = None
        self.ended = threading.Lock()
        self.core: int | None = None
        rank = current_transport()
        self.caller = rank if isinstance(rank, SimulatedRank) else None
        self.interrupted = False
        self.ending = threading.Lock()
        self.outer_forward_level, self.is_traced = forward_ad_level(), is_recording_below_autograd()
        self.end_forward_level: Callable[[], None] | None = None

    @property
    def stopped(self) -> bool:
        """True if the ranks must end: here, or where one of them simulates, an error was raised."""
        return self.error is not None or (self.caller is not None and self.caller.world.stopped)

    # -- turns --

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one function per rank; return their results or raise the first error."""
        self.ended.acquire()
        settings, self.core = ThreadSettings.current(), core_for_ranks()
        for rank, function in zip(self.order, functions, strict=True):
            worker = idle_thread()
            context = contextvars.copy_context()
            worker.job = lambda r=rank, f=function, c=context: c.run(self._run_rank, r, f, settings)
            rank.gate, rank.set_schedule = worker.gate, worker.set_schedule
        try:
            if self.caller is not None:
                self.caller.inner = self
            with without_compiler(), linearizing_by_jvp():
                self.order[0].gate.release()
                while not self.ended.acquire(timeout=STOP_SECONDS):
                    pass
        except BaseException as interrupt:
            self._stop(interrupt)
            raise
        finally:
            if self.caller is not None:
                self.caller.inner = None
        if self.caller is not None and self.caller.world.stopped:
            raise _Stopped
        try:
            if self.error is None:
                return [rank.result for rank in self.order]
            rank_id, error = self.error
            if rank_id is not None:
                error.add_note(f"on {rank_text(self.mesh, rank_id)} of a simulated {self.mesh}")
                if NO_PROCESS_GROUP in str(error):
                    error.add_note(f"  rule:  collectives must be fshard's\n  fix:   {COLLECTIVES}")
            try:
                raise error
            finally:
                del error
        finally:
            self._free()

    def _stop(self, interrupt: BaseException) -> None:
        """End the ranks after Ctrl-C, and wait for `STOP_SECONDS`."""
        self._interrupt(interrupt)
        if any(rank.state != "done" for rank in self.order):
            self.ended.acquire(timeout=STOP_SECONDS)

    def _interrupt(self, interrupt: BaseException) -> None:
        """Raise in the code of the running rank, and of the ranks that it simulates."""
        with self.ending:
            self.error, self.interrupted = (None, interrupt), True
            for rank in self.order:
                if rank.inner is not None:
                    rank.inner._interrupt(interrupt)
                if rank.state == "ready" and rank.thread:
                    thread, stopped = ctypes.c_ulong(rank.thread), ctypes.py_object(_Stopped)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, stopped)

    def _free(self) -> None:
        """Drop all tensors, and ranks that have ended: they and the world refer to each other."""
        self.error = None
        if self.end_forward_level is not None:
            self.end_forward_level()
        self.unfinished.clear()
        for rank in self.order:
            rank.result, rank.awaited, rank.remark = None, None, str
        if not self.interrupted:
            self.order.clear()

    def _run_rank(
        self, rank: SimulatedRank, function: Callable[[], Any], settings: ThreadSettings
    ) -> bool:
        """Run one rank to its end; return True if its thread can be reused."""
        rank.thread = threading.get_ident()
        rank.set_schedule(self.core, True)
        try:
            if not self.stopped:
                with as_rank(rank), settings.entered():
                    rank.result = function()
        except _Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            if self.error is None:
                is_shared = getattr(error, "same_on_all_ranks", False)
                self.error = None if is_shared else rank.rank, error
        finally:
            with self.ending:
                rank.state = "done"
                reusable = not self.interrupted
            self._run_next(rank)
        return reusable

    def _run_next(self, rank: SimulatedRank) -> None:
        """Let the next rank run that can, or end the simulation."""
        following = self._next(rank)
        if following is None and any(other.state == "waiting" for other in self.order):
            if self.error is None:
                self.error = (None, self._deadlock())
            following = self._next(rank)
        (self.ended if following is None else following.gate).release()

    def _next(self, rank: SimulatedRank) -> SimulatedRank | None:
        order, n = self.order, len(self.order)
        for i in range(rank.index + 1 - n, rank.index + 1):
            other = order[i]
            if other.state == "ready" or (
                other.state == "waiting"
                and (self.error is not None or (other.awaited and other.awaited.complete))
            ):
                return other
        return None

    # -- collectives --

    def share_forward_level(self) -> None:
        """Let all ranks use the level of forward mode that the running rank has entered."""
        if not self.is_traced and is_recording_below_autograd():
            rule = "ranks must not take turns while one of them records a graph"
            fix = "make_fx around the call"
            fail("a collective in a simulation", "make_fx in the body", rule, fix)
        if forward_ad_level() > self.outer_forward_level and self.end_forward_level is None:
            self.end_forward_level = share_forward_level()

    def arrive(
        self, rank: SimulatedRank, call: Fingerprint, group: Group, x: torch.Tensor, splits: Splits
    ) -> _Rendezvous:
        """Add `x` to the group's next collective; the last rank to come computes the results."""
        if self.stopped:
            raise _Stopped
        members = ascending(group)
        number = rank.counts.get(members, 0)
        rank.counts[members] = number + 1
        key = (members, number)
        meeting = self.unfinished.get(key)
        if meeting is None:
            meeting = self.unfinished[key] = _Rendezvous(call, group)
        if meeting.fingerprint != call or meeting.group != group:
            raise self._diverged(rank, call, group, meeting)
        inputs = meeting.inputs
        inputs[rank.rank] = (x.detach(), splits, call)
        if len(inputs) == len(group):
            del self.unfinished[key]
            _, op, *arguments = call
            tensors, all_splits, _ = zip(*[inputs[member] for member in group], strict=True)
            with torch.no_grad():
                meeting.results = results_of(op, arguments[0], group, tensors, all_splits)
            inputs.clear()
            meeting.complete = True
        return meeting

    def wait(self, rank: SimulatedRank, meeting: _Rendezvous) -> None:
        """Let other ranks run until the collective is complete."""
        rank.state, rank.awaited = "waiting", meeting
        following = self._next(rank)
        if following is None:
            error = self._deadlock()
            rank.state = "ready"
            raise error
        following.gate.release()
        rank.gate.acquire()
        if not meeting.complete:
            raise _Stopped
        rank.state, rank.awaited = "ready", None

    # -- errors --

    def _deadlock(self) -> ShardingError:
        head = "the simulation stands still: ranks wait for others that never come"
        return stranded(head, self.mesh, {rank.rank: _position(rank) for rank in self.order})

    def _diverged(
        self, rank: SimulatedRank, call: Fingerprint, group: Group, meeting: _Rendezvous
    ) -> ShardingError:
        """Return the error of a rank whose call, or order of the group, is not the first one's."""
        inputs, ranks = meeting.inputs, tuple(sorted(group))
        by_rank = {other.rank: other for other in self.order}
        positions = {
            member: _position_in(by_rank[member], inputs[member][2], meeting.group)
            for member in ranks
            if member in inputs
        }
        positions[rank.rank] = _position_in(rank, call, group)
        return diverged(self.mesh, ranks, dict(sorted(positions.items())))


def _position(rank: SimulatedRank) -> Position:
    """Return the position of a rank of a simulation that cannot go on."""
    if rank.awaited is None:
        return Position("returned" if rank.state == "done" else "running", remark=rank.remark())
    inputs, group = rank.awaited.inputs, rank.awaited.group
    position = _position_in(rank, inputs[rank.rank][2], group)
    missing = tuple(member for member in group if member not in inputs)
    return position._replace(action=f"waiting in {position.action}", awaits=missing)


def _position_in(rank: SimulatedRank, call: Fingerprint, group: Group) -> Position:
    return Position(words(call, group), user_line(rank.thread, call[0]), remark=rank.remark())


def results_of(
    op: object, reduction: object, group: Group, inputs: Sequence[torch.Tensor],
    splits: Sequence[Any],
) -> dict[int, torch.Tensor]:  # fmt: skip
    """Return the result of one collective for each rank of `group`.

    Args:
        op: the transport's method, "all_gather", "all_reduce", "reduce_scatter" or "all_to_all".
        reduction: "sum", "avg", "max", "min" or "product" for the two that reduce.
        group: the ranks in the order of the inputs.
        inputs: each rank's tensor.
        splits: for an all-to-all each rank's elements to send and to receive.
    """
    match op:
        case "all_gather":
            return dict.fromkeys(group, torch.stack(list(inputs)))
        case "all_reduce":
            return dict.fromkeys(group, reduced(inputs, str(reduction)))
        case "reduce_scatter":
            kind = str(reduction)
            return {rank: reduced([x[i] for x in inputs], kind) for i, rank in enumerate(group)}
        case _:
            error = unsent(group, splits)
            if error is not None:
                raise error
            sends = [send for send, _ in splits]
            return dict(zip(group, _sent_pieces(inputs, sends), strict=True))


def _sent_pieces(
    inputs: Sequence[torch.Tensor], sends: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Return for each rank the concatenation of the pieces that are sent to it.

    Equal pieces are one transposition; of others, those without elements are left out.
    """
    n, first = len(inputs), sends[0]
    if n > 1 and first.count(first[0]) == n and all(send == first for send in sends):
        pieces = torch.stack(list(inputs)).unflatten(1, (n, first[0])).transpose(0, 1)
        copies: Any = torch.unbind_copy(pieces)  # type: ignore[func-returns-value]
        return [rows.flatten(0, 1) for rows in copies]
    received: list[list[torch.Tensor]] = [[] for _ in inputs]
    for x, send in zip(inputs, sends, strict=True):
        starts = itertools.accumulate(send, initial=0)
        for parts, start, size in zip(received, starts, send, strict=False):
            if size:
                parts.append(x.narrow(0, start, size))
    # A rank outside of the source may be on another device, with an empty tensor.
    return [torch.cat(parts) if parts else x[:0] for parts, x in zip(received, inputs, strict=True)]


def own_result(results: dict[int, torch.Tensor], rank: int, op: str) -> torch.Tensor:
    """Remove a rank's result from `results` and return it, in memory of its own once it is written.

    Ranks with the same tensor get copies of it, the last of them needs none. They are lazy on the
    CPU only: on other devices, foreach and fused kernels write without copying first.
    """
    result = results.pop(rank)
    if not results or op not in SAME_RESULT:
        return result
    return lazy_clone(result) if result.device.type == "cpu" else result.clone()


def run_ranks(
    mesh: Mesh, function: Callable[[SimulatedRank, Any], Any], values: Sequence[Any]
) -> list[Any]:
    """Return `function(transport, value)` of every rank of a simulated mesh, one value each."""
    world = SimulatedWorld(mesh)
    ranks = world.order
    return world.run(
        [lambda r=r, v=v: function(r, v) for r, v in zip(ranks, values, strict=True)]  # type: ignore[misc]
    )


def run_together(
    mesh: Mesh, start: Callable[[SimulatedRank, Any], Finish], values: Sequence[Any]
) -> list[torch.Tensor]:
    """Return `start(transport, value)()` of every rank, run in this thread: all start, then finish.

    Correct where ranks wait for each other only when they finish.
    """
    ranks = SimulatedWorld(mesh).order
    finishes = [start(rank, value) for rank, value in zip(ranks, values, strict=True)]
    return [finish() for finish in finishes]


def simulate(mesh: Mesh, fn: Callable[..., Any], /, *args: Any) -> list[Any]:
    """Run rank-local code as every rank of a mesh, in this process.

    Ranks run in threads, one at a time and in rank order, so that a simulation is deterministic.
    Collectives, `torch.autograd.grad` and `.backward()` in `fn` work as under `torchrun`.

    Args:
        mesh: the mesh whose ranks are simulated.
        fn: the function, called once per rank.
        *args: its arguments, trees. Every rank gets the same ones; of a pair that holds the shards
            of all ranks, its own shard.

    Returns:
        The results of `fn` in rank order.

    Raises:
        ShardingError: ranks call different collectives, or wait for others that never come, or end
            without a wait for something that `fs.start` launched; it names each rank's line.
        Exception: the first error of a rank, with a note that names the rank.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> prog = fs.redistribute(fs.Spec(mesh, fs.P("x"), shape=(4,)),
    ...                        fs.Spec(mesh, fs.P(), shape=(4,)))
    >>> fs.simulate(mesh, lambda: prog(torch.ones(2)).sum().item())
    [4.0, 4.0]
    """
    mesh = as_mesh(mesh, "fs.simulate")
    if not callable(fn):
        fail("fs.simulate", f"a function of type {type(fn).__name__}",
             "the second argument must be a function, which every rank calls",
             "fs.simulate(mesh, fn, *args)")  # fmt: skip

    def part(value: Any, index: int) -> Any:
        if not is_pair(value):
            return value
        shards, spec = value
        return Sharded(shards[index], spec)

    values = [
        map_leaves(lambda leaf, index=index: part(leaf, index), args) for index in range(mesh.size)
    ]
    return run_ranks(mesh, lambda _, own: run_rank_code_hook.call(fn, own), values)


@Hook
def run_rank_code_hook(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return `fn(*args)` as a simulated rank; set by `spmd/axis_env.py`."""
    raise NotImplementedError
