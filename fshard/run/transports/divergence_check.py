"""Comparison of the collectives of processes before they are launched: `check="collectives"`.

Under `torchrun` only; the simulator compares in `arrive`. Before a collective every rank writes the
call to the store of `torch.distributed`, and reads the calls of the other ranks of its group. If
all have come, or if they differ, or if some have returned, raised, ended or timed out, the first
rank to notice writes a verdict, and every rank of the group launches or raises as the first verdict
says: none is in the backend while another has given up. The backend waits in another thread
for as long as it takes, while this one watches the processes of the group: one may end there. It
costs some round trips to the store per collective and serializes launches, so it is for debugging,
not for training.

Without the check gloo itself ends a process that receives more bytes than it expects, which may
happen where ranks pass other shapes: it throws `gloo::EnforceNotMet` in a thread of its own, by
which C++ aborts (SIGABRT). Python does not see that error; other ranks see a closed connection or
a timeout. Other dtypes, or fewer bytes, may give wrong values without any error.
"""

from __future__ import annotations

import atexit
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fshard._torch.process_groups import PrefixStore
from fshard._util.errors import ShardingError
from fshard._util.text import one_line
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import Finish, Group, Parts, as_checked, current_transport
from fshard.run.transports.divergence_report import (
    Fingerprint,
    Position,
    ascending,
    branch_fix,
    diverged,
    ended,
    fingerprint,
    raise_line,
    stranded,
    unsent,
    user_line,
    words,
)
from fshard.run.transports.rank_status import (
    EMPTY,
    Arrival,
    Moment,
    RankStatus,
    Splits,
    arrived_ranks,
    stuck_ranks,
)
from fshard.run.transports.rank_threads import start_waiting
from fshard.run.transports.torch_distributed import BLOCKING, DEFAULT_TIMEOUT, ProcessWorld

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds that ranks may be late for a collective in which others differ already."""
PAUSES = (0.0,) * 20 + (0.001,) * 100
"""Seconds between the first reads of the store, followed by `LAST_PAUSE`."""
LAST_PAUSE = 0.02
WATCH_PAUSE = 0.1
"""Seconds between looks at the processes of a group that is in the backend."""
GRACE = 0.5
"""Seconds in which the end of a process shows after a connection to it has failed."""
GO = ""
"""Text of the verdict that all ranks have come."""


class _CheckedTransport:
    """This process's transport on one mesh, with the check before every collective."""

    def __init__(self, world: ProcessWorld, mesh: Mesh) -> None:
        self.world, self.mesh, self.init_count = world, mesh, world.init_count
        self.rank, self.device = world.process_rank, world.device
        self.status = RankStatus()
        self.inside = False
        self.remark: Callable[[], str] = str
        store = world.listener.store
        prefix = f"fshard {mesh.ranks} {world.start_count}.{world.init_count}"
        self.store: Any = PrefixStore(prefix, store)
        self.groups_with_keys: set[Group] = set()
        self.watched_groups: set[Group] = set()
        self.statuses: dict[int, RankStatus] = {}
        """The last known ones of other ranks."""
        self.watch = world.listener.watch
        self.watch.ended({0, *mesh.ranks})  # rank 0 may keep the store

    @property
    def all_ranks(self) -> range:
        """The ranks of all processes."""
        return self.world.all_ranks

    def accepts(self, device: torch.device) -> bool:
        return self.world.accepts(device)

    def all_gather(self, x: torch.Tensor, group: Group) -> Callable[[], Parts]:
        watched = self._compare(fingerprint("all_gather", x), group)
        return watched(lambda: self.world.all_gather(x, group))

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        watched = self._compare(fingerprint("all_reduce", x, reduction), group)
        return watched(lambda: self.world.all_reduce(x, reduction, group, owned=owned))

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        watched = self._compare(fingerprint("reduce_scatter", x, reduction), group)
        return watched(lambda: self.world.reduce_scatter(x, reduction, group))

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        watched = self._compare(fingerprint("all_to_all", x), group, (tuple(send), tuple(receive)))
        return watched(lambda: self.world.all_to_all(x, send, receive, group))

    # -- the status in the store ------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run one call of a mapped function, whose begin and end are written to the store."""
        self.status.call += 1
        self.status.awaited, self.status.is_origin = None, False
        self.remark, self.inside = str, True
        with self._names_store("before its first collective"):
            self._write_status("running")
        try:
            yield
        except BaseException as error:
            self.report_error(error)
            raise
        else:
            with suppress(dist.DistError):  # a later collective reports it
                self._write_status("returned", "returned")
        finally:
            self.inside = False

    def report_error(self, error: BaseException, line: str | None = None) -> None:
        """Write that this rank raised an error."""
        self.status.awaited = None
        self.status.is_origin = not getattr(error, "same_on_all_ranks", False)
        line = raise_line(error.__traceback__) if line is None else line
        with suppress(dist.DistError):  # the error itself is raised
            self._write_status(f"raised {one_line(error)}{line}", "raised")

    def _write_status(self, position: str, ended: str = "") -> None:
        """Write this rank's position; outside of a call it has returned unless it raises."""
        self.status.position, self.status.remark = position, self.remark()
        self.status.ended = ended or ("" if self.inside else "returned")
        self.store.set(str(self.rank), self.status.text())

    @contextmanager
    def _names_store(self, position: str, line: str = "") -> Iterator[None]:
        """Raise `ShardingError` in place of errors of the store: its process may have ended."""
        try:
            yield
        except dist.DistError as error:
            positions = {self.rank: Position(position, line)}
            keeper = self.world.listener.keeper
            raise self._error_of_ended({0, *self.mesh.ranks}, positions) or stranded(
                "the store of torch.distributed, in which ranks find each other, does not answer",
                self.mesh,
                positions,
                f"{keeper} keeps the store; look at its output: {one_line(error)}",
            ) from error

    # -- the comparison ---------------------------------------------------------------

    def _compare(
        self, call: Fingerprint, order: Group, splits: Splits = None
    ) -> Callable[[Callable[[], Callable[[], T]]], Callable[[], T]]:
        """Wait until all ranks of the group have made the same call, or raise the verdict.

        Returns:
            A function that launches the collective, watched, and returns its `finish`.
        """
        if not all(rank in self.mesh for rank in order):
            return lambda launch: launch()
        group = ascending(order)
        if splits is not None and group != order:
            index = [order.index(rank) for rank in group]
            splits = [splits[0][i] for i in index], [splits[1][i] for i in index]
        key = str(group)
        last = self.status.arrivals.get(key)
        same_call = last is not None and last.moment[0] == self.status.call
        moment = (self.status.call, last.moment[1] + 1 if last is not None and same_call else 0)
        arrival = Arrival(moment, words(call, order), user_line(None, call[0]), splits)
        self.status.arrivals[key] = arrival
        with self._names_store(f"waiting in {arrival.words}", arrival.line):
            self._create_keys(group)
            self.status.awaited = group
            self._write_status(f"waiting in {arrival.words}{arrival.line}")
            try:
                self._await(group, moment)
                self.status.passed[key] = moment
                if group not in self.watched_groups:  # all have written their addresses
                    self.watch.ended(group)
                    self.watched_groups.add(group)
            except ShardingError as error:
                self.report_error(error, arrival.line)
                raise
            finally:
                self.status.awaited = None
            self._write_status(f"running, last in {arrival.words}{arrival.line}")
        return lambda launch: self._launch(launch, group, arrival)

    def _create_keys(self, group: Group) -> None:
        """Create the keys of a group's ranks, so that reading them does not block."""
        if group not in self.groups_with_keys:
            for name in (_verdict_key(group), *map(str, group)):
                self.store.compare_set(name, "", EMPTY)
            self.groups_with_keys.add(group)

    def _await(self, group: Group, moment: Moment) -> None:
        limit = (self.world.timeout or DEFAULT_TIMEOUT).total_seconds()
        begin = time.monotonic()
        differing_since: float | None = None
        for pause in itertools.chain(PAUSES, itertools.repeat(LAST_PAUSE)):
            gone = self.watch.ended(group) if pause == LAST_PAUSE else ()
            verdict, statuses = self._read(group, group)
            if self._is_decided(verdict, group, moment):
                return
            arrived = arrived_ranks(statuses, str(group), moment)
            if arrived is None:
                return
            now = time.monotonic()
            if len({arrival.words for arrival in arrived.values()}) > 1:
                differing_since = differing_since or now
            waited = limit if now - begin > limit else None
            patient = differing_since is None or now - differing_since < PATIENCE
            error = self._error(group, statuses, arrived, waited, patient, gone)
            if error is not None or len(arrived) == len(group):
                text = GO if error is None else str(error)
                verdict = self._write_verdict(group, moment, verdict, text)
                if self._is_decided(verdict, group, moment):
                    return
            elif pause == LAST_PAUSE:
                self._find_cycle()
            time.sleep(pause)

    def _is_decided(self, verdict: str, group: Group, moment: Moment) -> bool:
        """Return True if the verdict is that all go on; raise if it is an error at this moment."""
        if not _is_at(verdict, group, moment):
            return False
        _, text, others = json.loads(verdict)
        if text == GO:
            return True
        # Other groups must get the verdict before this rank raises: it will not come to them.
        self._write_verdicts([(tuple(other), tuple(when)) for other, when in others], text)
        error = ShardingError(text)
        error.same_on_all_ranks = True
        raise error

    def _write_verdict(
        self,
        group: Group,
        moment: Moment,
        old: str,
        text: str,
        others: Sequence[tuple[Group, Moment]] = (),
    ) -> str:
        """Write a verdict unless one was written after `old`; return the one in the store."""
        verdict = json.dumps([moment, text, others])
        stored: bytes = self.store.compare_set(_verdict_key(group), old, verdict)
        return stored.decode()

    def _write_verdicts(self, collectives: Sequence[tuple[Group, Moment]], text: str) -> None:
        """Write one verdict on the collectives of several groups that have none."""
        for group, moment in collectives:
            self._create_keys(group)
            old, _ = self._read(group, ())
            if not _is_at(old, group, moment):
                self._write_verdict(group, moment, old, text, collectives)

    def _find_cycle(self) -> None:
        """If ranks of the mesh wait for each other in a cycle, write a verdict for all of them."""
        statuses = self._read_mesh()
        stuck = stuck_ranks(statuses)
        if self.rank in stuck:
            positions = {
                rank: Position(statuses[rank].position, remark=statuses[rank].remark)
                for rank in stuck
            }
            error = stranded("ranks wait for each other", self.mesh, positions)
            self._write_verdicts(list(dict.fromkeys(stuck.values())), str(error))

    def _read_mesh(self) -> dict[int, RankStatus]:
        """Return the statuses of all ranks of the mesh."""
        ranks = tuple(self.mesh.ranks)
        self._create_keys(ranks)
        return self._read(ranks, ranks)[1]

    def _read(self, group: Group, ranks: Group) -> tuple[str, dict[int, RankStatus]]:
        """Return the verdict of a group and the statuses of ranks."""
        names = [_verdict_key(group), *map(str, ranks)]
        extended = self.store.has_extended_api()
        raw = self.store.multi_get(names) if extended else [self.store.get(n) for n in names]
        verdict, *texts = (value.decode() for value in raw)
        statuses = dict(zip(ranks, map(RankStatus.parse, texts), strict=True))
        self.statuses |= statuses
        return verdict, statuses

    # -- the backend ------------------------------------------------------------------

    def _launch(
        self, launch: Callable[[], Callable[[], T]], group: Group, arrival: Arrival
    ) -> Callable[[], T]:
        """Launch a collective and return its `finish`; while they wait, processes are watched."""

        def watched(function: Callable[[], Any]) -> Any:
            token = BLOCKING.set(lambda wait: self._watched(wait, group, arrival))
            try:
                return function()
            except BaseException as error:
                self.report_error(error, arrival.line)
                raise
            finally:
                BLOCKING.reset(token)

        finish = watched(launch)
        return lambda: watched(finish)

    def _watched(self, wait: Callable[[], T], group: Group, arrival: Arrival) -> T:
        """Return `wait()`, which the backend may not end if a process of the group has ended."""
        results, errors = list[T](), list[BaseException]()

        def run() -> None:
            try:
                results.append(wait())
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(error)

        done = start_waiting(run)
        ended_since: float | None = None
        while not done.acquire(timeout=WATCH_PAUSE):
            # A process may also have ended after its part of the collective.
            if self.watch.ended(group):
                ended_since = ended_since or time.monotonic()
            if ended_since is not None and time.monotonic() - ended_since > PATIENCE:
                break
        if results:
            return results[0]
        positions = {self.rank: Position(f"in {arrival.words}", arrival.line)}
        error = self._error_of_ended(group, positions)
        raise error or errors[0] from (errors[0] if errors and error else None)

    def _error_of_ended(
        self, ranks: Iterable[int], positions: dict[int, Position]
    ) -> ShardingError | None:
        """Return the error of those of `ranks` whose processes have ended, None if none have."""
        deadline = time.monotonic() + GRACE
        while not (gone := self.watch.ended(ranks)):
            if time.monotonic() > deadline:
                return None
            time.sleep(LAST_PAUSE)
        with suppress(dist.DistError):  # else the last known positions
            self._read_mesh()
        known = {rank: self.statuses.get(rank, RankStatus()).position for rank in gone}
        return ended(self.mesh, known, positions)

    # -- the verdict ------------------------------------------------------------------

    def _error(
        self,
        group: Group,
        statuses: dict[int, RankStatus],
        arrived: dict[int, Arrival],
        waited: float | None,
        patient: bool,
        gone: Group,
    ) -> ShardingError | None:
        """Return the error for all ranks of a group, None as long as there is none.

        Args:
            group: the ranks.
            statuses: their statuses.
            arrived: the calls of those that have come.
            waited: the timeout in seconds, once it is over.
            patient: whether to wait for missing ranks although calls differ.
            gone: those whose processes have ended.
        """
        missing = [rank for rank in group if rank not in arrived]
        differ = len({arrival.words for arrival in arrived.values()}) > 1
        if differ and not (missing and patient):
            return diverged(self.mesh, group, _positions(group, statuses, arrived))
        if not missing:
            splits = [arrived[rank].splits for rank in group]
            return unsent(group, [pair for pair in splits if pair is not None])
        positions = _positions(group, statuses, arrived, tuple(missing))
        known = {rank: statuses[rank].position for rank in missing if rank in gone}
        if known:
            return ended(self.mesh, known, positions)
        if any(self._will_not_come(statuses[rank]) for rank in missing):
            head = "ranks wait for others that never come"
            return stranded(head, self.mesh, *self._with_origins(positions, missing))
        if waited is not None:
            return stranded(
                f"ranks waited {waited:g} s for others that did not come",
                self.mesh,
                positions,
                f"{branch_fix(positions)}; for ranks that are only late, fs.init(mesh, "
                "timeout=seconds)",
            )
        return None

    def _with_origins(
        self, positions: dict[int, Position], missing: Sequence[int]
    ) -> tuple[dict[int, Position], str]:
        """Add the ranks of the mesh whose errors made others raise, and return a fix or ""."""
        if not any(self.statuses[rank].ended == "raised" for rank in missing):
            return positions, ""
        statuses = self._read_mesh()
        gone = self.watch.ended(self.mesh.ranks)
        origins = [rank for rank, status in statuses.items() if status.is_origin or rank in gone]
        for rank in origins:
            what = statuses[rank].position
            positions[rank] = Position(f"its process ended ({what})" if rank in gone else what)
        raised = [*origins, *(rank for rank in missing if statuses[rank].ended == "raised")]
        return positions, f"look at the error of rank {raised[0]}"

    def _will_not_come(self, status: RankStatus) -> bool:
        """Return True if a rank has ended the call that this one waits in.

        In backward, which runs after the call, only an error ends it.
        """
        if status.call == self.status.call:
            return status.ended == "raised" or (status.ended == "returned" and self.inside)
        return status.call > self.status.call and self.inside


def _positions(
    group: Group, statuses: dict[int, RankStatus], arrived: dict[int, Arrival], missing: Group = ()
) -> dict[int, Position]:
    """Return the positions of a group's ranks; ranks that have come wait for the `missing`."""
    positions: dict[int, Position] = {}
    for rank in group:
        arrival, remark = arrived.get(rank), statuses[rank].remark
        if arrival is None:
            positions[rank] = Position(statuses[rank].position, remark=remark)
        else:
            what = f"waiting in {arrival.words}" if missing else arrival.words
            positions[rank] = Position(what, arrival.line, missing, remark)
    return positions


def _verdict_key(group: Group) -> str:
    return f"verdict {group}"


def _is_at(verdict: str, group: Group, moment: Moment) -> bool:
    """Return True if a verdict is on the collective, maybe beside others."""
    last, _, others = (None, GO, ()) if verdict == EMPTY else json.loads(verdict)
    return last == [*moment] or [[*group], [*moment]] in others


_CHECKED: dict[Group, _CheckedTransport] = {}


def _report_uncaught() -> None:
    """Write the error that ends this process, so that waiting ranks name it."""
    error: BaseException | None = getattr(sys, "last_value", None)
    for checked in _CHECKED.values():
        if error is not None and checked.world.is_current:
            checked.report_error(error)


@contextmanager
def checked_collectives(mesh: Mesh) -> Iterator[None]:
    """Compare the collectives of a call among the ranks of `mesh` before each is launched.

    Every rank of the mesh enters. If ranks call different collectives, or if some return, raise or
    do not come within the timeout of `fs.init` (10 minutes by default) while others wait, all ranks
    of the group raise one `ShardingError` with the position and source line of each. The backward
    of the calls in the block is compared too. In a simulation, which always compares, and in a
    block inside another one nothing happens.
    """
    transport = current_transport()
    if not isinstance(transport, ProcessWorld) or transport.rank not in mesh:
        yield
        return
    ranks = tuple(mesh.ranks)
    if any(other.world is not transport for other in _CHECKED.values()):
        _CHECKED.clear()  # their process groups were replaced
    checked = _CHECKED.get(ranks)
    if checked is None or checked.init_count != transport.init_count:
        checked = _CHECKED[ranks] = _CheckedTransport(transport, mesh)
        atexit.unregister(_report_uncaught)
        atexit.register(_report_uncaught)  # runs before the end of these process groups
    checked.mesh = mesh
    with as_checked(checked), checked.call():
        yield
