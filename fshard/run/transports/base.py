"""What moves bytes between ranks, which rank this is, and who is told about it.

A transport offers four collectives over an ordered group of ranks. Each starts at once and
returns a `Finish`, the call that waits for the result. Everything else, typed steps and
gradients, is written once on top of them.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NoReturn, Protocol, TypeVar

import torch

from fshard._torch.autograd_state import graph_task_id
from fshard._torch.process_groups import default_group
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh

__all__ = [
    "CHECKED", "LABEL", "Event", "Finish", "Group", "Label", "Parts", "Transport", "as_checked",
    "as_rank", "backward_phase", "check_ranks", "current_rank", "current_transport",
    "direct_transport", "is_simulated", "label_of", "labelled", "notify", "observe",
    "own_transport", "set_world", "stacked", "under", "unobserved", "warn_alone",
]  # fmt: skip

T = TypeVar("T")
Group = tuple[int, ...]
Finish = Callable[[], torch.Tensor]
Parts = torch.Tensor | list[torch.Tensor]
"""Tensors of one shape in their order: the rows of one tensor, or apart where they lie so."""


class Transport(Protocol):
    """One rank's view of whoever moves bytes; groups are ranks, this one among them, in order."""

    @property
    def rank(self) -> int:
        """This rank's id."""
        ...

    def moves(self, device: torch.device) -> bool:
        """Whether it can move tensors that are on `device`."""
        ...

    def all_gather(self, x: torch.Tensor, group: Group) -> Callable[[], Parts]:
        """Everyone's `x`, all of one shape, in the group's order: whoever joins them copies them.

        Stacked along a new dim 0 where they have come so.
        """
        ...

    def all_reduce(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        """The elementwise `sum`, `avg`, `max`, `min` or `product` of everyone's `x`."""
        ...

    def reduce_scatter(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        """Of everyone's `x[i]`, i this rank's place in the group, the reduction."""
        ...

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """A flat `x` in pieces of `send` elements, one to each rank; theirs, concatenated."""
        ...


def stacked(parts: Parts) -> torch.Tensor:
    """Parts along a new dim 0, as they are where they lie so."""
    return parts if isinstance(parts, torch.Tensor) else torch.stack(parts)


_RANK: ContextVar[Transport | None] = ContextVar("fshard_rank", default=None)
_WORLD: list[Transport] = []
_MAIN: list[weakref.ref[object]] = []  # the process group of all ranks that it was made with

CHECKED: ContextVar[Transport | None] = ContextVar("fshard_checked", default=None)
"""This process's own transport with a check before every collective, where one is on, else None.

`CHECKED.get() is None` is all that a path around the transport has to ask.
"""


def set_world(transport: Transport | None) -> None:
    """Make `transport` this process's own: what `fs.init` does under `torchrun`."""
    _WORLD[:] = [] if transport is None else [transport]
    _MAIN[:] = [] if transport is None else [weakref.ref(default_group())]


def current_transport() -> Transport | None:
    """The simulated rank whose code is running, else this process's own, else None."""
    return _RANK.get() or CHECKED.get() or (_WORLD[0] if _WORLD else None)


def own_transport() -> Transport | None:
    """This process's own, whatever code is running; else None."""
    return _WORLD[0] if _WORLD else None


def direct_transport() -> Transport | None:
    """This process's own, if nobody checks or observes what goes over it; else None.

    What was recorded of the operations below it can then be replayed without asking it. None as
    well where its process groups were replaced: then it has to be asked, and raises.
    """
    if _OBSERVERS and _TOLD.get():
        return None
    if not _WORLD or _RANK.get() is not None or CHECKED.get() is not None:
        return None
    main = default_group()  # dist.group.WORLD costs ten times as much
    if main is None or _MAIN[0]() is not main:
        return None
    return _WORLD[0]


@lru_cache(maxsize=1)
def warn_alone() -> None:
    """Say, once, that processes of `torchrun` simulate all ranks each, where they are none."""
    world = os.environ.get("WORLD_SIZE", "1")
    if world.isdigit() and int(world) > 1 and own_transport() is None:
        text = (
            f"torchrun started {world} processes, and each of them simulates all ranks: "
            "fs.init(mesh) makes this one a rank"
        )
        warnings.warn(text, stacklevel=4)


@contextmanager
def as_rank(transport: Transport) -> Iterator[None]:
    """Run a block as the code of one simulated rank."""
    token = _RANK.set(transport)
    try:
        yield
    finally:
        _RANK.reset(token)


def is_simulated() -> bool:
    """Whether the code that is running is that of a simulated rank."""
    return _RANK.get() is not None


@contextmanager
def as_checked(transport: Transport | None) -> Iterator[None]:
    """Run a block with this process's collectives going over a transport that checks them."""
    token = CHECKED.set(transport)
    try:
        yield
    finally:
        CHECKED.reset(token)


def current_rank(mesh: Mesh, where: str) -> Transport:
    """The transport of rank-local code; raises `ShardingError` where there is no rank."""
    transport = current_transport()
    if transport is None:
        _no_rank(mesh, where)
    return transport


def _no_rank(mesh: Mesh, where: str) -> NoReturn:
    fail(where, f"one tensor for {mesh}, in a process that is no rank of it",
         "a local is one tensor inside shard_map, fs.simulate or after fs.init under torchrun, "
         f"and a tuple of {mesh.size} shards outside",
         "call it inside fs.shard_map, or after fs.init(mesh); a program also takes the tuple of "
         "all shards, as fs.shard makes it")  # fmt: skip


def check_ranks(mesh: Mesh, transport: Transport, where: str) -> None:
    """Raise `ShardingError` for a mesh with ranks that are not there: nobody would do its work."""
    there: Collection[int] = getattr(transport, "all_ranks", mesh.ranks)
    if not set(mesh.ranks) <= set(there):
        label = LABEL.get()
        listed = ", ".join(map(str, sorted(there)[:8])) + (", ..." if len(there) > 8 else "")
        fail(where if label is None else label.name, f"{mesh}, on rank {transport.rank}",
             f"the ranks of a mesh are among those that run, which are {listed}",
             "fs.simulate(mesh, fn) with a mesh of all ranks, or under torchrun as many processes; "
             "or a mesh of these ranks")  # fmt: skip


# -- labels ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Label:
    """What the user called, and along axes of which mesh.

    `line` is that of the call and `checked` what checks it, where the launch comes later.
    """

    name: str
    mesh: Mesh = field(compare=False)
    line: str = field(default="", compare=False)
    checked: Transport | None = field(default=None, compare=False)


@lru_cache(maxsize=4096)
def label_of(name: str, mesh: Mesh) -> Label:
    """The label of what is launched at once: one object, which costs less than making another."""
    return Label(name, mesh)


LABEL: ContextVar[Label | None] = ContextVar("fshard_label", default=None)
"""What is being launched: transports that explain who stands where read it."""


class labelled:  # noqa: N801 - read as a word in `with`; a generator would cost twice as much
    """Launch what is launched in the block under a name, or under the one it has already."""

    __slots__ = ("label", "token")

    def __init__(self, label: Label) -> None:
        self.label = label

    def __enter__(self) -> None:
        self.token = LABEL.set(LABEL.get() or self.label)

    def __exit__(self, *_: object) -> None:
        LABEL.reset(self.token)


def under(label: Label, finish: Callable[[], T]) -> Callable[[], T]:
    """`finish`, and what it launches, under a label."""

    def run() -> T:
        with labelled(label):
            return finish()

    return run


# -- observers ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """One collective as one rank ran it: `nbytes` are those it sent."""

    op: str
    axes: tuple[str, ...]
    nbytes: int
    rank: int
    phase: str


_OBSERVERS: list[Callable[[Event], None]] = []
_TOLD: ContextVar[bool] = ContextVar("fshard_told", default=True)
_PHASE: ContextVar[str] = ContextVar("fshard_phase", default="forward")


@contextmanager
def observe(observer: Callable[[Event], None]) -> Iterator[None]:
    """Tell `observer` of every collective that runs in the block."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


@contextmanager
def unobserved() -> Iterator[None]:
    """Tell nobody of what only pretends to run in the block."""
    token = _TOLD.set(False)
    try:
        yield
    finally:
        _TOLD.reset(token)


@contextmanager
def backward_phase(label: Label | None = None) -> Iterator[None]:
    """Mark what runs in the block as backward, of what `label` says: it is checked as that was."""
    tokens = _PHASE.set("backward"), LABEL.set(label)
    checked = CHECKED.set(label.checked) if label is not None and label.checked else None
    try:
        yield
    finally:
        _PHASE.reset(tokens[0])
        LABEL.reset(tokens[1])
        if checked is not None:
            CHECKED.reset(checked)


def notify(op: str, axes: tuple[str, ...], nbytes: int, rank: int) -> None:
    """Tell all observers of one collective; free where there are none."""
    if _OBSERVERS and _TOLD.get():
        # What a checkpoint computes again is no transpose, but runs in the backward pass too.
        again = graph_task_id() != -1
        event = Event(op, axes, nbytes, rank, "backward" if again else _PHASE.get())
        for observer in tuple(_OBSERVERS):
            observer(event)
