"""Transports that send nothing: results have the right shape and dtype.

A model can therefore be traced without ranks, and its collectives be counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from fshard._torch.autograd_state import graph_task_id
from fshard._torch.fake_tensors import FakeTensor, is_recording
from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.program.cost.links import Partners
from fshard.program.cost.model import Cost, collective_time
from fshard.program.cost.rank_overlap import places
from fshard.program.cost.shard_overlap import shard_indices
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import Traffic, all_gather_traffic, all_reduce_traffic
from fshard.run.transports.base import TRACE_DEPTH, Finish, Group, current_transport, refuse_traced

_META_IS_REAL: ContextVar[bool] = ContextVar("fshard_meta_is_real", default=False)


@contextmanager
def meta_as_real() -> Iterator[None]:
    """Treat meta tensors as real ones in the block, since their operations are recorded."""
    token = _META_IS_REAL.set(True)
    try:
        yield
    finally:
        _META_IS_REAL.reset(token)


def has_values(x: torch.Tensor) -> bool:
    """Return False for meta and fake tensors."""
    return not x.is_meta and not isinstance(x, FakeTensor)


def in_graph() -> bool:
    """Return True while `torch.compile` or `make_fx` records a graph of functional collectives.

    A trace of `fs.partition` is not such a graph: it is recorded before collectives are planned.
    """
    return torch.compiler.is_compiling() or (is_recording() and not TRACE_DEPTH.get())


def is_abstract(x: torch.Tensor) -> bool:
    """Return True if `x` is a meta or fake tensor that no recording treats as a real one.

    >>> is_abstract(torch.empty(2, device="meta")), is_abstract(torch.empty(2))
    (True, False)
    """
    return not (has_values(x) or _META_IS_REAL.get() or in_graph())


@dataclass(frozen=True, slots=True)
class ShapeTransport:
    """Transport that sends nothing: every result is zeros of the right shape."""

    rank: int

    def accepts(self, device: torch.device) -> bool:
        """Return True: it accepts tensors of every device."""
        return True

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        """Return a tensor with a new dim 0, one row per rank."""
        return lambda: x.new_zeros((len(group), *x.shape))

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Return a tensor of the same shape."""
        return lambda: x.new_zeros(x.shape)

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Return a tensor of the shape without dim 0."""
        return lambda: x.new_zeros(x.shape[1:])

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """Return a flat tensor of `sum(receive)` elements."""
        return lambda: x.new_zeros(sum(receive))


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """Collective that a rank would launch.

    Attributes:
        op: all_gather, all_reduce, reduce_scatter, all_to_all or, to one rank, ppermute.
        mesh: the mesh.
        axes: the axes along which its ranks differ.
        traffic: bytes and messages of the rank.
        nbytes: bytes of the larger of its operand and its result.
        partners: its messages, along `axes`; None is as many to all of the group.
    """

    op: str
    mesh: Mesh
    axes: tuple[str, ...]
    traffic: Traffic
    nbytes: int
    partners: Partners | None = None

    def cost(self, topology: Topology) -> Cost:
        """Return the cost of the launch, without copies around it."""
        moved = self.traffic
        exchange = self.op in ("all_to_all", "ppermute")
        link = topology.link(self.mesh, self.axes, exchange=exchange, partners=self.partners)
        time = collective_time(topology, link, moved)
        return Cost(time, moved.sent, moved.received, self.nbytes, 1, moved.messages)


@dataclass(frozen=True, eq=False)
class RecordingTransport(ShapeTransport):
    """Transport that sends nothing, and records the collectives of its rank on a mesh."""

    mesh: Mesh
    forward: list[RecordedCollective] = field(default_factory=list)
    backward: list[RecordedCollective] = field(default_factory=list)

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        """Record the collective."""
        n = len(group)
        self._record("all_gather", group, all_gather_traffic(n, x.nbytes), n * x.nbytes)
        return super().all_gather(x, group)

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Record the collective."""
        traffic = all_reduce_traffic(len(group), x.nbytes, x.itemsize)
        self._record("all_reduce", group, traffic, x.nbytes)
        return super().all_reduce(x, reduction, group)

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Record the collective."""
        n = len(group)
        self._record("reduce_scatter", group, all_gather_traffic(n, x.nbytes // n), x.nbytes)
        return super().reduce_scatter(x, reduction, group)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """Record the collective; elements that the rank sends to itself are not traffic."""
        own = group.index(self.rank)
        sent, received = (x.itemsize * (sum(n) - n[own]) for n in (send, receive))
        here, axes = self.mesh.coords(self.rank), group_axes(self.mesh, group)

        def messages_of(counts: Sequence[int]) -> tuple[tuple[tuple[int, ...], int], ...]:
            counted = [(rank, n) for rank, n in zip(group, counts, strict=True) if n]
            others = [(self.mesh.coords(rank), n) for rank, n in counted if rank != self.rank]
            return tuple([(tuple(there[x] - here[x] for x in axes), n) for there, n in others])

        partners = Partners(messages_of(send), messages_of(receive))
        messages = max(1, *map(len, partners))
        op = "ppermute" if messages == 1 and len(group) > 2 else "all_to_all"
        nbytes = x.itemsize * max(sum(send), sum(receive))
        self._record(op, group, Traffic(sent, received, messages, 1), nbytes, partners)
        return super().all_to_all(x, send, receive, group)

    def _record(
        self, op: str, group: Group, traffic: Traffic, nbytes: int, partners: Partners | None = None
    ) -> None:
        axes = group_axes(self.mesh, group)
        if partners and (not any(partners) or len(partners.sends) == len(group) - 1 > 1):
            partners = None
        self.add(RecordedCollective(op, self.mesh, axes, traffic, nbytes, partners))

    def add(self, collective: RecordedCollective) -> None:
        """Record a collective of the phase that runs."""
        phase = self.forward if graph_task_id() == -1 else self.backward
        phase.append(collective)


@lru_cache(maxsize=CACHE_SIZE)
def group_axes(mesh: Mesh, group: Group) -> tuple[str, ...]:
    """Return the mesh axes along which the ranks of a group differ."""
    here = places(mesh, group)
    along = {axis: shard_indices(mesh, (axis,)) for axis in mesh.axes}
    return tuple(axis for axis, row in along.items() if len({row[i] for i in here}) > 1)


def shape_transport(mesh: Mesh, where: str) -> ShapeTransport:
    """Return the transport for abstract tensors on this rank, or on the mesh's first rank.

    Raises:
        ShardingError: in a function that is traced, whose constants the zeros would be.
    """
    if is_recording():
        refuse_traced(mesh, where)
    transport = current_transport()
    if isinstance(transport, ShapeTransport):
        return transport
    return ShapeTransport(mesh.ranks[0] if transport is None else transport.rank)
