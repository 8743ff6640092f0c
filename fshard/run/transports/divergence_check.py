"""Comparison of the collectives of processes before they are launched: `check="collectives"`.

Under `torchrun` only; the simulator compares in `arrive`. Before a collective every rank writes the
call to the store of `torch.distributed`, and reads the calls of the other ranks of its group. If
all have come, or if they differ, or if some have returned, raised or timed out, the first rank to
notice writes a verdict, and every rank of the group launches or raises as the first verdict says:
none is in the backend while another has given up. It costs some round trips to the store per
collective and serializes launches, so it is for debugging, not for training.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fshard._torch.process_groups import PrefixStore, default_store
from fshard._util.errors import ShardingError
from fshard._util.text import one_line
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import Finish, Group, Parts, as_checked, current_transport
from fshard.run.transports.divergence_report import (
    Fingerprint,
    Position,
    diverged,
    fingerprint,
    raise_line,
    stranded,
    unsent,
    user_line,
    words,
)
from fshard.run.transports.torch_distributed import ProcessWorld

DEFAULT_TIMEOUT = timedelta(minutes=10)
PATIENCE = 1.0
"""Seconds that ranks may be late for a collective in which others differ already."""
PAUSES = (0.0,) * 20 + (0.001,) * 100
"""Seconds between the first reads of the store, followed by `LAST_PAUSE`."""
LAST_PAUSE = 0.02
EMPTY = "-"
"""Value of a key that no rank has written."""
GO = ""
"""Text of the verdict that all ranks have come."""

Moment = tuple[int, int]
"""Number of a call of a mapped function, and of a group's collective in it; equal on all ranks."""
Splits = tuple[Sequence[int], Sequence[int]] | None


@dataclass(frozen=True, slots=True)
class _Arrival:
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
        awaited: the group whose collective it waits in.
        position: the position as text.
        remark: an additional line for errors.
        arrivals: its last call by group.
        passed: the last moment by group at which it saw all ranks.
    """

    call: int = 0
    ended: str = ""
    awaited: Group | None = None
    position: str = "not yet in a checked call"
    remark: str = ""
    arrivals: dict[str, _Arrival] = field(default_factory=dict)
    passed: dict[str, Moment] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> RankStatus:
        """Return the status that a rank has written."""
        if text == EMPTY:
            return RankStatus()
        fields = json.loads(text)
        fields["arrivals"] = {
            group: _Arrival(**(arrival | {"moment": tuple(arrival["moment"])}))
            for group, arrival in fields["arrivals"].items()
        }
        fields["awaited"] = fields["awaited"] and tuple(fields["awaited"])
        fields["passed"] = {group: tuple(moment) for group, moment in fields["passed"].items()}
        return RankStatus(**fields)


class _CheckedTransport:
    """This process's transport on one mesh, with the check before every collective."""

    def __init__(self, world: ProcessWorld, mesh: Mesh) -> None:
        self.world, self.mesh = world, mesh
        self.rank, self.device = world.process_rank, world.device
        self.status = RankStatus()
        self.inside = False
        self.remark: Callable[[], str] = str
        self.store: Any = PrefixStore(f"fshard {mesh.ranks} {world.start_count}", default_store())
        self.groups_with_keys: set[Group] = set()

    @property
    def all_ranks(self) -> range:
        """The ranks of all processes."""
        return self.world.all_ranks

    def accepts(self, device: torch.device) -> bool:
        return self.world.accepts(device)

    def all_gather(self, x: torch.Tensor, group: Group) -> Callable[[], Parts]:
        self._compare(fingerprint("all_gather", x), group)
        return self.world.all_gather(x, group)

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        self._compare(fingerprint("all_reduce", x, reduction), group)
        return self.world.all_reduce(x, reduction, group, owned=owned)

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        self._compare(fingerprint("reduce_scatter", x, reduction), group)
        return self.world.reduce_scatter(x, reduction, group)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        self._compare(fingerprint("all_to_all", x), group, (tuple(send), tuple(receive)))
        return self.world.all_to_all(x, send, receive, group)

    # -- the status in the store ------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run one call of a mapped function, whose begin and end are written to the store."""
        self.status.call += 1
        self.status.awaited = None
        self.remark, self.inside = str, True
        self._write_status("running")
        try:
            yield
        except BaseException as error:
            self.status.awaited = None
            self._write_status(
                f"raised {one_line(error)}{raise_line(error.__traceback__)}", "raised"
            )
            raise
        else:
            self._write_status("returned", "returned")
        finally:
            self.inside = False

    def _write_status(self, position: str, ended: str = "") -> None:
        self.status.position, self.status.remark = position, self.remark()
        if self.inside:
            self.status.ended = ended
        self.store.set(str(self.rank), json.dumps(asdict(self.status)))

    # -- the comparison ---------------------------------------------------------------

    def _compare(self, call: Fingerprint, group: Group, splits: Splits = None) -> None:
        """Return once all ranks of the group have made the same call, or raise the verdict."""
        if not all(rank in self.mesh for rank in group):
            return
        key = str(group)
        last = self.status.arrivals.get(key)
        same_call = last is not None and last.moment[0] == self.status.call
        moment = (self.status.call, last.moment[1] + 1 if last is not None and same_call else 0)
        arrival = _Arrival(moment, words(call, group), user_line(None, call[0]), splits)
        self.status.arrivals[key] = arrival
        try:
            self._create_keys(group)
            self.status.awaited = group
            self._write_status(f"waiting in {arrival.words}{arrival.line}")
            try:
                self._await(group, moment)
                self.status.passed[key] = moment
            finally:
                self.status.awaited = None
                self._write_status(f"running, last in {arrival.words}{arrival.line}")
        except dist.DistError as error:
            raise stranded(
                "the store of torch.distributed, in which ranks find each other, does not answer",
                self.mesh,
                {self.rank: Position(f"waiting in {arrival.words}", arrival.line)},
                f"look at the rank that keeps the store: {one_line(error)}",
            ) from error

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
            verdict, statuses = self._read(group, group)
            if self._is_decided(verdict, group, moment):
                return
            arrived = _arrived(statuses, str(group), moment)
            if arrived is None:
                return
            now = time.monotonic()
            if len({arrival.words for arrival in arrived.values()}) > 1:
                differing_since = differing_since or now
            waited = limit if now - begin > limit else None
            patient = differing_since is None or now - differing_since < PATIENCE
            error = self._error(group, statuses, arrived, waited, patient)
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
        if not _is_at(verdict, moment):
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
            if not _is_at(old, moment):
                self._write_verdict(group, moment, old, text, collectives)

    def _find_cycle(self) -> None:
        """If ranks of the mesh wait for each other in a cycle, write a verdict for all of them."""
        ranks = tuple(self.mesh.ranks)
        self._create_keys(ranks)
        _, statuses = self._read(ranks, ranks)
        stuck = _stuck(statuses)
        if self.rank in stuck:
            positions = {
                rank: Position(statuses[rank].position, remark=statuses[rank].remark)
                for rank in stuck
            }
            error = stranded("ranks wait for each other", self.mesh, positions)
            self._write_verdicts(list(dict.fromkeys(stuck.values())), str(error))

    def _read(self, group: Group, ranks: Group) -> tuple[str, dict[int, RankStatus]]:
        """Return the verdict of a group and the statuses of ranks."""
        names = [_verdict_key(group), *map(str, ranks)]
        extended = self.store.has_extended_api()
        raw = self.store.multi_get(names) if extended else [self.store.get(n) for n in names]
        verdict, *texts = (value.decode() for value in raw)
        return verdict, dict(zip(ranks, map(RankStatus.parse, texts), strict=True))

    # -- the verdict ------------------------------------------------------------------

    def _error(
        self,
        group: Group,
        statuses: dict[int, RankStatus],
        arrived: dict[int, _Arrival],
        waited: float | None,
        patient: bool,
    ) -> ShardingError | None:
        """Return the error for all ranks of a group, None as long as there is none.

        Args:
            group: the ranks.
            statuses: their statuses.
            arrived: the calls of those that have come.
            waited: the timeout in seconds, once it is over.
            patient: whether to wait for missing ranks although calls differ.
        """
        missing = [rank for rank in group if rank not in arrived]
        differ = len({arrival.words for arrival in arrived.values()}) > 1
        if differ and not (missing and patient):
            return diverged(self.mesh, group, _positions(group, statuses, arrived))
        if not missing:
            splits = [arrived[rank].splits for rank in group]
            return unsent(group, [pair for pair in splits if pair is not None])
        positions = _positions(group, statuses, arrived, tuple(missing))
        if any(self._will_not_come(statuses[rank]) for rank in missing):
            raised = [rank for rank in missing if statuses[rank].ended == "raised"]
            fix = [f"look at the error of rank {rank}" for rank in raised[:1]]
            head = "ranks wait for others that never come"
            return stranded(head, self.mesh, positions, *fix)
        if waited is not None:
            return stranded(
                f"ranks waited {waited:g} s for others that did not come",
                self.mesh,
                positions,
                "move the collective out of the branch that only some ranks take; for ranks that "
                "are only late, fs.init(mesh, timeout=seconds)",
            )
        return None

    def _will_not_come(self, status: RankStatus) -> bool:
        """Return True if a rank has ended the call that this one waits in.

        In backward, which runs after the call, only an error ends it.
        """
        if status.call == self.status.call:
            return status.ended == "raised" or (status.ended == "returned" and self.inside)
        return status.call > self.status.call and self.inside


def _positions(
    group: Group, statuses: dict[int, RankStatus], arrived: dict[int, _Arrival], missing: Group = ()
) -> dict[int, Position]:
    """Return the positions of a group's ranks; those that have come wait for the `missing`."""
    positions: dict[int, Position] = {}
    for rank in group:
        arrival, remark = arrived.get(rank), statuses[rank].remark
        if arrival is None:
            positions[rank] = Position(statuses[rank].position, remark=remark)
        else:
            what = f"waiting in {arrival.words}" if missing else arrival.words
            positions[rank] = Position(what, arrival.line, missing, remark)
    return positions


def _arrived(
    statuses: dict[int, RankStatus], key: str, moment: Moment
) -> dict[int, _Arrival] | None:
    """Return the calls of ranks that have come; None if a rank has seen all and gone on."""
    if any(status.passed.get(key, (0, 0)) >= moment for status in statuses.values()):
        return None
    arrivals = {rank: status.arrivals.get(key) for rank, status in statuses.items()}
    return {rank: a for rank, a in arrivals.items() if a is not None and a.moment == moment}


def _stuck(statuses: dict[int, RankStatus]) -> dict[int, tuple[Group, Moment]]:
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
                if (arrived := _arrived(statuses, str(group), moment)) is not None
                and member not in arrived
            )
        }
        if len(blocked) == len(waiting):
            return blocked
        waiting = blocked


def _verdict_key(group: Group) -> str:
    return f"verdict {group}"


def _is_at(verdict: str, moment: Moment) -> bool:
    return verdict != EMPTY and tuple(json.loads(verdict)[0]) == moment


_CHECKED: dict[Group, _CheckedTransport] = {}


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
    checked = _CHECKED.get(ranks)
    if checked is None or checked.world is not transport:
        if any(other.world is not transport for other in _CHECKED.values()):
            _CHECKED.clear()  # their process groups were replaced
        checked = _CHECKED[ranks] = _CheckedTransport(transport, mesh)
    checked.mesh = mesh
    with as_checked(checked), checked.call():
        yield
