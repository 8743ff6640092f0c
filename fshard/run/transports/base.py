"""Transports, which send tensors between ranks; the current rank, labels and observers.

A transport has four collectives over an ordered group of ranks. Each starts at once and returns a
`Finish`, the call that waits for the result. Steps and gradients are written on top of them once,
for all transports.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, NoReturn, Protocol, TypeVar

import torch

from fshard._torch.autograd_state import is_profiling
from fshard._torch.fake_tensors import is_recording_below_autograd
from fshard._torch.process_groups import default_group
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec

T = TypeVar("T")
Group = tuple[int, ...]
Finish = Callable[[], torch.Tensor]
Parts = torch.Tensor | list[torch.Tensor]
"""One tensor per rank, all of one shape: a list, or one tensor with their elements in any shape."""


class Transport(Protocol):
    """Collectives of one rank; a group is an ordered tuple of ranks, this one among them."""

    @property
    def rank(self) -> int:
        """This rank's id."""
        ...

    def accepts(self, device: torch.device) -> bool:
        """Return True if it can send tensors that are on `device`."""
        ...

    def all_gather(self, x: torch.Tensor, group: Group) -> Callable[[], Parts]:
        """Gather every rank's `x`, all of one shape, in the group's order."""
        ...

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Reduce every rank's `x` elementwise by `sum`, `avg`, `max`, `min` or `product`.

        With `owned` the result may be written into `x`, which nothing else reads.
        """
        ...

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Reduce every rank's `x[i]`, where i is this rank's index in the group."""
        ...

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """Send `send[i]` elements of a flat `x` to rank i; concatenate the `receive[i]` from it."""
        ...


def stacked(parts: Parts, shape: Sequence[int]) -> torch.Tensor:
    """Return parts of `shape` stacked along a new dim 0."""
    return parts.view(-1, *shape) if isinstance(parts, torch.Tensor) else torch.stack(parts)


_RANK: ContextVar[Transport | None] = ContextVar("fshard_rank", default=None)
_WORLD: list[Transport] = []
_MAIN: list[weakref.ref[object]] = []  # its process group of all ranks

TRACE_DEPTH: ContextVar[int] = ContextVar("fshard_trace_depth", default=0)
"""Number of functions, one within another, that are being traced as `fs.partition` does."""

CHECKED: ContextVar[Transport | None] = ContextVar("fshard_checked", default=None)
"""This process's transport with a check before every collective, or None where none is on."""


def set_world(transport: Transport | None) -> None:
    """Set this process's own transport, as `fs.init` does."""
    _WORLD[:] = [] if transport is None else [transport]
    _MAIN[:] = [] if transport is None else [weakref.ref(default_group())]


def current_transport() -> Transport | None:
    """Return the transport of the running simulated rank, else this process's own, else None."""
    return _RANK.get() or CHECKED.get() or (_WORLD[0] if _WORLD else None)


def own_transport() -> Transport | None:
    """Return this process's own transport, also in a simulated rank, or None."""
    return _WORLD[0] if _WORLD else None


def direct_transport() -> Transport | None:
    """Return this process's own transport if its collectives are not checked or profiled.

    Recorded collectives can then be replayed without it. None also if its process groups were
    replaced, which raises in the transport, and while `make_fx` records PyTorch's own collectives.
    """
    if is_profiling() or is_recording_below_autograd():
        return None
    if not _WORLD or _RANK.get() is not None or CHECKED.get() is not None:
        return None
    main = default_group()
    if main is None or _MAIN[0]() is not main:
        return None
    return _WORLD[0]


def check_device(device: torch.device, transport: Transport, where: str) -> None:
    """Raise `ShardingError` unless a transport can send tensors on `device`."""
    if not transport.accepts(device):
        fail(where, f"on rank {transport.rank} a local on {device}",
             "its device must be one that a process group has a backend for",
             "move it with .to(...)")  # fmt: skip


@lru_cache(maxsize=1)
def warn_alone() -> None:
    """Warn once if processes of `torchrun` simulate all ranks because `fs.init` is missing."""
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
    """Return True in the code of a simulated rank."""
    return _RANK.get() is not None


@contextmanager
def as_checked(transport: Transport | None) -> Iterator[None]:
    """Run a block with a transport that checks this process's collectives."""
    token = CHECKED.set(transport)
    try:
        yield
    finally:
        CHECKED.reset(token)


def current_rank(mesh: Mesh, where: str) -> Transport:
    """Return the transport of rank-local code.

    Raises:
        ShardingError: outside of ranks, and in a function that is traced: its graph is for all
            ranks, and a rank that waits there would hold the lock of tracing.
    """
    if TRACE_DEPTH.get():
        refuse_traced(mesh, where)
    transport = current_transport()
    if transport is None:
        _no_rank(mesh, where)
    return transport


def _no_rank(mesh: Mesh, where: str) -> NoReturn:
    fail(where, f"one tensor for {mesh}, in a process that is not a rank of it",
         "a local must be one tensor inside shard_map, fs.simulate or after fs.init under "
         f"torchrun, and a tuple of {mesh.size} shards outside",
         "call it inside fs.shard_map, or after fs.init(mesh); a program also takes the tuple of "
         "all shards, as fs.shard makes it")  # fmt: skip


def refuse_traced(mesh: Mesh, where: str) -> NoReturn:
    """Raise `ShardingError` for rank-local code in a function that is traced."""
    label = LABEL.get()
    name = where if label is None else label.name
    fail(name, f"rank-local code of {mesh} in a function that is traced",
         "a traced function must compute on global tensors; its collectives are planned for it",
         f"fs.shard_map(body, mesh=mesh, in_specs=..., out_specs=...)(x) in it, with {name} in "
         "the body")  # fmt: skip


def check_ranks(mesh: Mesh, transport: Transport, where: str) -> None:
    """Raise `ShardingError` for a mesh with ranks that neither simulation nor process group has."""
    running: Collection[int] = getattr(transport, "all_ranks", mesh.ranks)
    if not set(mesh.ranks) <= set(running):
        label = LABEL.get()
        listed = ", ".join(map(str, sorted(running)[:8])) + (", ..." if len(running) > 8 else "")
        fail(where if label is None else label.name, f"{mesh}, on rank {transport.rank}",
             f"the ranks of a mesh must be among those that run, {listed}",
             "fs.simulate(mesh, fn) with a mesh of all ranks, or under torchrun as many processes; "
             "or a mesh of these ranks")  # fmt: skip


def check_group(group: Group, transport: Transport) -> None:
    """Raise `ShardingError` for ranks that do not run: the others would wait for them."""
    label = LABEL.get()
    mesh = Mesh(ranks=len(group), devices=group) if label is None else label.mesh
    check_ranks(mesh, transport, "a collective")


# -- labels ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Label:
    """Name of the user's call and the mesh whose axes it names, for errors.

    Labels are equal if the name, the arguments and the shapes are: ranks of one collective must
    agree on everything that changes its values.

    Attributes:
        name: such as "fs.psum".
        mesh: the mesh.
        line: `file:line` of the call, if the launch comes later.
        checked: the transport that checks it, if the launch comes later.
        arguments: options or steps as text, such as "(perm=[[0, 1]])".
        shapes: shapes of the tensors that it is called on, where those must be equal.
        ends: the source and the target spec of a program.
        module: the path of the module whose forward made the call, if the launch comes later.
    """

    name: str
    mesh: Mesh = field(compare=False)
    line: str = field(default="", compare=False)
    checked: Transport | None = field(default=None, compare=False)
    arguments: str = ""
    shapes: tuple[torch.Size, ...] = ()
    ends: tuple[Spec, ...] = field(default=(), compare=False)
    module: str = field(default="", compare=False)


@lru_cache(maxsize=CACHE_SIZE)
def label_of(
    name: str, mesh: Mesh, arguments: str = "", shapes: tuple[torch.Size, ...] = ()
) -> Label:
    """Return the label of a call that launches at once, cached because creating one costs more."""
    return Label(name, mesh, arguments=arguments, shapes=shapes)


LABEL: ContextVar[Label | None] = ContextVar("fshard_label", default=None)
"""Label of the running launch, read by transports for their errors."""


class labelled:  # noqa: N801 - a context manager; as a generator it would cost twice as much
    """Set the label of launches in the block, unless one is set already.

    A profiler of PyTorch shows the block as a range of the label's name.
    """

    __slots__ = ("label", "range", "token")

    def __init__(self, label: Label | None) -> None:
        self.label = label

    def __enter__(self) -> None:
        self.token = LABEL.set(LABEL.get() or self.label)
        self.range = None
        if self.label is not None and is_profiling():
            self.range = torch.profiler.record_function(self.label.name)
            self.range.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.range is not None:
            self.range.__exit__(*error)
        LABEL.reset(self.token)


def with_label(label: Label, finish: Callable[[], T]) -> Callable[[], T]:
    """Return `finish` with `label` set while it runs."""

    def run() -> T:
        with labelled(label):
            return finish()

    return run


# -- observers ------------------------------------------------------------------------


class Event(NamedTuple):
    """One collective of one rank.

    Attributes:
        op: its name.
        axes: the mesh axes along which its ranks differ.
        nbytes: bytes that the rank sends.
        rank: the rank.
        phase: "forward" or "backward".
        dtype: dtype that is sent, None if it is unknown.
    """

    op: str
    axes: tuple[str, ...]
    nbytes: int
    rank: int
    phase: str
    dtype: torch.dtype | None = None


@dataclass(slots=True, eq=False)
class ObservedCall:
    """Collectives of one call, as observers see them; calls that are equal are one object.

    Attributes:
        events: the collectives, all of one phase.
        label: the label of the call, None for one without.
        line: `file:line` of the call, "" if no frame is the user's.
        module: the path of the module whose forward made the call, "" if nothing records it.
        transposed: the same of the call's gradient, once that was observed.
    """

    events: tuple[Event, ...]
    label: Label | None = None
    line: str = ""
    module: str = ""
    transposed: ObservedCall | None = None


Observer = Callable[[ObservedCall], None]
_OBSERVERS: list[Observer] = []
OBSERVERS: ContextVar[Sequence[Observer]] = ContextVar("fshard_observers", default=_OBSERVERS)
"""Observers of this thread's collectives, by default those of all."""


class Running(NamedTuple):
    """State of this thread that observers see, in one variable: each look-up costs half a µs.

    Attributes:
        phase: phase of the collectives, outside of autograd's backward pass.
        module: path of the module whose forward runs, "" if nothing records it.
        modules: modules whose forward runs, outermost first, with their paths.
    """

    phase: str = "forward"
    module: str = ""
    modules: tuple[tuple[torch.nn.Module, str], ...] = ()


_NOTHING_RUNS = Running()
RUNNING: ContextVar[Running] = ContextVar("fshard_running", default=_NOTHING_RUNS)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Call `observer` for the collectives of every call in the block."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


@contextmanager
def observe_only(*observers: Observer) -> Iterator[None]:
    """Call these observers and no others for collectives of this thread in the block."""
    token = OBSERVERS.set(observers)
    try:
        yield
    finally:
        OBSERVERS.reset(token)


def unobserved() -> AbstractContextManager[None]:
    """Call no observers in the block, whose collectives send nothing."""
    return observe_only()


class backward_phase:  # noqa: N801 - a context manager; as a generator it would cost twice as much
    """Mark collectives in the block as backward of the call in `label`, checked like it."""

    __slots__ = ("label", "tokens")

    def __init__(self, label: Label | None = None) -> None:
        self.label = label

    def __enter__(self) -> None:
        label, checked = self.label, CHECKED.get()
        if label is not None and label.checked:
            checked = label.checked
        running = Running("backward", *RUNNING.get()[1:])
        self.tokens = RUNNING.set(running), LABEL.set(label), CHECKED.set(checked)

    def __exit__(self, *_: object) -> None:
        running, label, checked = self.tokens
        RUNNING.reset(running)
        LABEL.reset(label)
        CHECKED.reset(checked)


def is_observed() -> bool:
    """Return True if an observer is called for collectives of this thread."""
    return bool(OBSERVERS.get())
