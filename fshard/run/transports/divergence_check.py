"""Collectives of real processes, compared before they are launched.

Before a collective every rank posts what it is about to call in the store of
`torch.distributed`, and reads what the others of its group have posted. Where all have come, or
where they differ, or some have returned, raised or do not come in time, the first to see it
writes a verdict, and every rank of the group goes on or raises as the first verdict says: none
is in the backend while another has given up. It costs some round trips to the store per
collective, and launches wait for each other: for debugging, not for training.
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
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import Finish, Group, Parts, as_checked, current_transport
from fshard.run.transports.divergence_report import (
    Fingerprint,
    Stand,
    diverged,
    fingerprint,
    one_line,
    raise_line,
    stranded,
    unsent,
    user_line,
    words,
)
from fshard.run.transports.torch_distributed import ProcessWorld

__all__ = ["checked_collectives"]

TIMEOUT = timedelta(minutes=10)
PATIENCE = 1.0  # seconds in which ranks may still come to a collective that others differ in
PAUSES = (0.0,) * 20 + (0.001,) * 100  # seconds between looks, and then the last one for good
LAST_PAUSE = 0.02
NOTHING = "-"
GO = ""  # the text of the verdict that all have come

Moment = tuple[int, int]
"""Which call of a mapped function, and which collective of a group in it: the same everywhere."""
Splits = tuple[Sequence[int], Sequence[int]] | None


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What a rank has come to a group's collective with."""

    moment: Moment
    words: str
    line: str
    splits: Splits


@dataclass(slots=True)
class _State:
    """Where a rank stands, as it tells the others; `at` and `passed` by group."""

    call: int = 0
    ended: str = ""
    waits: Group | None = None
    stands: str = "not yet in a checked call"
    remark: str = ""
    at: dict[str, _Arrival] = field(default_factory=dict)
    passed: dict[str, Moment] = field(default_factory=dict)

    @staticmethod
    def read(text: str) -> _State:
        if text == NOTHING:
            return _State()
        given = json.loads(text)
        given["at"] = {
            group: _Arrival(tuple(moment), *rest)
            for group, (moment, *rest) in ((g, each.values()) for g, each in given["at"].items())
        }
        given["waits"] = given["waits"] and tuple(given["waits"])
        given["passed"] = {group: tuple(moment) for group, moment in given["passed"].items()}
        return _State(**given)


class _Checked:
    """This process's transport on one mesh, with the check before every collective."""

    def __init__(self, world: ProcessWorld, mesh: Mesh) -> None:
        self.world, self.mesh, self.rank, self.device = (
            world,
            mesh,
            world.process_rank,
            world.device,
        )
        self.state = _State()
        self.inside = False
        self.remark: Callable[[], str] = str
        self.store: Any = PrefixStore(f"fshard {mesh.ranks} {world.start_count}", default_store())
        self.known: set[Group] = set()

    @property
    def all_ranks(self) -> range:
        """The ranks of all processes."""
        return self.world.all_ranks

    def moves(self, device: torch.device) -> bool:
        return self.world.moves(device)

    def all_gather(self, x: torch.Tensor, group: Group) -> Callable[[], Parts]:
        self._meet(fingerprint("all_gather", x), group)
        return self.world.all_gather(x, group)

    def all_reduce(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        self._meet(fingerprint("all_reduce", x, op), group)
        return self.world.all_reduce(x, op, group)

    def reduce_scatter(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        self._meet(fingerprint("reduce_scatter", x, op), group)
        return self.world.reduce_scatter(x, op, group)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        self._meet(fingerprint("all_to_all", x), group, (tuple(send), tuple(receive)))
        return self.world.all_to_all(x, send, receive, group)

    # -- what is posted ---------------------------------------------------------------

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call of a mapped function: the others are told when it begins and how it ends."""
        self.state.call += 1
        self.state.waits = None
        self.remark, self.inside = str, True
        self._post("running")
        try:
            yield
        except BaseException as error:
            self.state.waits = None
            self._post(f"raised {one_line(error)}{raise_line(error.__traceback__)}", "raised")
            raise
        else:
            self._post("returned", "returned")
        finally:
            self.inside = False

    def _post(self, stands: str, ended: str | None = None) -> None:
        self.state.stands, self.state.remark = stands, self.remark()
        if self.inside:
            self.state.ended = ended or ""
        self.store.set(str(self.rank), json.dumps(asdict(self.state)))

    # -- meeting ----------------------------------------------------------------------

    def _meet(self, call: Fingerprint, group: Group, splits: Splits = None) -> None:
        """Go on once the whole group has come to the same collective; else raise the verdict."""
        if not all(rank in self.mesh for rank in group):
            return
        key = str(group)
        last = self.state.at.get(key)
        again = last is not None and last.moment[0] == self.state.call
        moment = (self.state.call, last.moment[1] + 1 if last is not None and again else 0)
        arrival = _Arrival(moment, words(call, group), user_line(None, call[0]), splits)
        self.state.at[key] = arrival
        try:
            self._introduce(group)
            self.state.waits = group
            self._post(f"waiting in {arrival.words}{arrival.line}")
            try:
                self._await(group, moment)
                self.state.passed[key] = moment
            finally:
                self.state.waits = None
                self._post(f"running, last in {arrival.words}{arrival.line}")
        except dist.DistError as error:
            raise stranded(
                "the store of torch.distributed, in which ranks find each other, does not answer",
                self.mesh,
                {self.rank: Stand(f"waiting in {arrival.words}", arrival.line)},
                f"look at the rank that keeps the store: {one_line(error)}",
            ) from error

    def _introduce(self, group: Group) -> None:
        """Make the keys of a group's ranks, so that reading them waits for nobody."""
        if group not in self.known:
            for name in (_verdict_of(group), *map(str, group)):
                self.store.compare_set(name, "", NOTHING)
            self.known.add(group)

    def _await(self, group: Group, moment: Moment) -> None:
        limit = (self.world.timeout or TIMEOUT).total_seconds()
        begin = time.monotonic()
        differing: float | None = None
        for pause in itertools.chain(PAUSES, itertools.repeat(LAST_PAUSE)):
            verdict, states = self._read(group, group)
            if self._decided(verdict, group, moment):
                return
            here = _arrived(states, str(group), moment)
            if here is None:
                return
            now = time.monotonic()
            if len({each.words for each in here.values()}) > 1:
                differing = differing or now
            late = now - begin > limit
            patient = differing is None or now - differing < PATIENCE
            found = self._judge(group, moment, states, here, limit if late else None, patient)
            if found is not None or len(here) == len(group):
                verdict = self._tell(group, moment, verdict, GO if found is None else str(found))
                if self._decided(verdict, group, moment):
                    return
            elif pause == LAST_PAUSE:
                self._look_around()
            time.sleep(pause)

    def _decided(self, verdict: str, group: Group, moment: Moment) -> bool:
        """Whether the verdict is that all go on; raises where it is another on this meeting."""
        if not _is_of(verdict, moment):
            return False
        _, text, meetings = json.loads(verdict)
        if text == GO:
            return True
        # Who raises is waited for no more: first let all know why.
        self._tell_all([(tuple(group), tuple(at)) for group, at in meetings], text)
        error = ShardingError(text)
        error.everywhere = True
        raise error

    def _tell(
        self,
        group: Group,
        moment: Moment,
        old: str,
        text: str,
        meetings: Sequence[tuple[Group, Moment]] = (),
    ) -> str:
        """Write a verdict, unless there is another than the old one by now; what there is."""
        verdict = json.dumps([moment, text, meetings])
        stored: bytes = self.store.compare_set(_verdict_of(group), old, verdict)
        return stored.decode()

    def _tell_all(self, meetings: Sequence[tuple[Group, Moment]], text: str) -> None:
        """Write one verdict on the meetings of several groups, those that have none."""
        for group, moment in meetings:
            self._introduce(group)
            old, _ = self._read(group, ())
            if not _is_of(old, moment):
                self._tell(group, moment, old, text, meetings)

    def _look_around(self) -> None:
        """Where ranks of the whole mesh wait for each other in a ring, tell all of them."""
        everyone = tuple(self.mesh.ranks)
        self._introduce(everyone)
        _, states = self._read(everyone, everyone)
        stuck = _stuck(states)
        if self.rank in stuck:
            stands = {
                rank: Stand(states[rank].stands, remark=states[rank].remark) for rank in stuck
            }
            error = stranded("ranks wait for each other", self.mesh, stands)
            self._tell_all(list(dict.fromkeys(stuck.values())), str(error))

    def _read(self, group: Group, ranks: Group) -> tuple[str, dict[int, _State]]:
        """The verdict of a group, and where ranks stand."""
        names = [_verdict_of(group), *map(str, ranks)]
        extended = self.store.has_extended_api()
        raw = self.store.multi_get(names) if extended else [self.store.get(n) for n in names]
        verdict, *rest = (each.decode() for each in raw)
        return verdict, dict(zip(ranks, map(_State.read, rest), strict=True))

    # -- what is made of it -----------------------------------------------------------

    def _judge(
        self,
        group: Group,
        moment: Moment,
        states: dict[int, _State],
        here: dict[int, _Arrival],
        waited: float | None,
        patient: bool,
    ) -> ShardingError | None:
        """The error that all of the group raise, or None where all is well so far."""
        missing = [rank for rank in group if rank not in here]
        if len({each.words for each in here.values()}) > 1 and not (missing and patient):
            return diverged(self.mesh, group, _stands(group, states, here))
        if not missing:
            splits = [here[rank].splits for rank in group]
            return unsent(group, [each for each in splits if each is not None])
        stands = _stands(group, states, here, tuple(missing))
        if any(self._will_not_come(states[rank]) for rank in missing):
            raised = [rank for rank in missing if states[rank].ended == "raised"]
            fix = [f"look at the error of rank {rank}" for rank in raised[:1]]
            head = "ranks wait for others that never come"
            return stranded(head, self.mesh, stands, *fix)
        if waited is not None:
            return stranded(
                f"ranks waited {waited:g} s for others that did not come",
                self.mesh,
                stands,
                "move the collective out of the branch that only some ranks take; for ranks that "
                "are only late, fs.init(mesh, timeout=seconds)",
            )
        return None

    def _will_not_come(self, state: _State) -> bool:
        """Whether a rank has ended the call in which this one waits; of backward only errors."""
        if state.call == self.state.call:
            return state.ended == "raised" or (state.ended == "returned" and self.inside)
        return state.call > self.state.call and self.inside


def _stands(
    group: Group, states: dict[int, _State], here: dict[int, _Arrival], missing: Group = ()
) -> dict[int, Stand]:
    """Where everyone stands; those who have come wait for the `missing`, if there are any."""
    stands: dict[int, Stand] = {}
    for rank in group:
        arrival, remark = here.get(rank), states[rank].remark
        if arrival is None:
            stands[rank] = Stand(states[rank].stands, remark=remark)
        else:
            what = f"waiting in {arrival.words}" if missing else arrival.words
            stands[rank] = Stand(what, arrival.line, missing, remark)
    return stands


def _arrived(states: dict[int, _State], key: str, moment: Moment) -> dict[int, _Arrival] | None:
    """Who is at the collective; None where one has seen all the others there and gone on."""
    if any(state.passed.get(key, (0, 0)) >= moment for state in states.values()):
        return None
    at = {rank: state.at.get(key) for rank, state in states.items()}
    return {rank: each for rank, each in at.items() if each is not None and each.moment == moment}


def _stuck(states: dict[int, _State]) -> dict[int, tuple[Group, Moment]]:
    """Ranks that wait for ranks that wait, in a ring: in which collective each of them is."""
    waiting = {
        rank: (state.waits, state.at[str(state.waits)].moment)
        for rank, state in states.items()
        if state.waits is not None
    }
    while True:
        hopeless = {
            rank: (group, moment)
            for rank, (group, moment) in waiting.items()
            if any(
                each in waiting
                for each in group
                if (here := _arrived(states, str(group), moment)) is not None and each not in here
            )
        }
        if len(hopeless) == len(waiting):
            return hopeless
        waiting = hopeless


def _verdict_of(group: Group) -> str:
    return f"verdict {group}"


def _is_of(verdict: str, moment: Moment) -> bool:
    return verdict != NOTHING and tuple(json.loads(verdict)[0]) == moment


_KNOWN: dict[Group, _Checked] = {}


@contextmanager
def checked_collectives(mesh: Mesh) -> Iterator[None]:
    """Compare the collectives of a call among the ranks of `mesh` before each is launched.

    Every rank of the mesh enters. Ranks that call different collectives, that return, raise or
    do not come within the timeout of `fs.init` (10 minutes if it has none) while others wait are
    a `ShardingError` with one text on all of the group: who is where, with the user's lines. The
    backward of what is called in the block is compared as well. A simulation compares always,
    and in a block that is in another the outer one does it: then nothing happens.
    """
    transport = current_transport()
    if not isinstance(transport, ProcessWorld) or transport.rank not in mesh:
        yield
        return
    ranks = tuple(mesh.ranks)
    checked = _KNOWN.get(ranks)
    if checked is None or checked.world is not transport:
        if any(each.world is not transport for each in _KNOWN.values()):
            _KNOWN.clear()  # of process groups that are no more
        checked = _KNOWN[ranks] = _Checked(transport, mesh)
    checked.mesh = mesh
    with as_checked(checked), checked.call():
        yield
