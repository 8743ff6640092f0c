"""Several programs on one rank: collectives of one kind in one launch, in rounds and buckets.

Every rank computes the same buckets and rounds from the specs. Within a group all ranks agree on
the wires that are coalesced, and launches are in the order of `coalesced` and then of
their first leaves: so ranks in several groups never wait for each other in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard._torch.autograd_state import is_view, unviewed
from fshard._torch.functorch import transforms_active
from fshard._torch.memory import (
    FlatBuffer,
    copy_all,
    flatten_all,
    joined,
    keep_buffer,
    storage_address,
    take_buffer,
)
from fshard._torch.modes import current_dispatch_mode
from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.plan.batch.coalesce import buckets, coalesced, rounds, typed_step
from fshard.program.cost.traffic import step_axes
from fshard.program.program import Program, wire_specs
from fshard.run.collective import Wire, launch_wire, unchanged
from fshard.run.interpreter import LocalFunction, stages
from fshard.run.transports.base import Group, Parts, Transport
from fshard.run.transports.observed_calls import notify_collective
from fshard.run.transports.shape_only import ShapeTransport

Locals = list[torch.Tensor]
"""One tensor per leaf: its local, replaced by the result as the programs run."""
FinishAll = Callable[[], tuple[torch.Tensor, ...]]


def launch_all(
    plans: Sequence[BucketPlan], transport: Transport, xs: Sequence[torch.Tensor],
    owned: Collection[int] = (),
) -> FinishAll:  # fmt: skip
    """Launch programs on this rank's locals; return the call that waits for the results.

    While the collectives of a bucket are under way, the bucket before it is finished.

    Args:
        plans: the plans of all buckets for this rank.
        transport: this rank's transport.
        xs: one local per leaf.
        owned: the leaves whose locals may be written.
    """
    ys = list(xs)
    previous: Iterator[None] = iter(())
    remaining = 0
    for bucket in plans:
        current = _run_bucket(bucket, transport, ys, owned)
        next(current, None)
        for _ in previous:
            pass
        previous, remaining = current, len(bucket.rounds) - 1
    for _ in range(remaining):
        next(previous)

    def finish() -> tuple[torch.Tensor, ...]:
        for _ in previous:
            pass
        return tuple(ys)

    return finish


Kind = tuple[str, Group, str, torch.dtype]
"""Common properties of coalesced wires: operation, group, reduction and dtype."""
Member = tuple[int, str, Wire | None]
"""A leaf in a launch, its step's name, and its wire; None if only other ranks send for it."""
LeafStages = tuple[tuple[int, tuple[LocalFunction, ...]], ...]
"""Leaves and the local stages that run on each."""


FREED = torch.empty(0)
"""Local whose elements are all in a buffer that is sent."""


class KindPlan(NamedTuple):
    """Coalesced wires of one kind: the members, and what follows from them.

    Attributes:
        kind: their common properties.
        members: the leaves.
        own: the leaves for which this rank has a wire.
        wires: these wires.
        name: name of the steps, for observers.
        sent: bytes that this rank sends.
        buffers: the buffer of the last launch, unless it is under way.
    """

    kind: Kind
    members: tuple[Member, ...]
    own: tuple[tuple[int, Wire], ...]
    wires: tuple[Wire, ...]
    name: str
    sent: int
    buffers: list[FlatBuffer]

    @staticmethod
    def of(kind: Kind, members: Sequence[Member]) -> KindPlan:
        """Return the plan of a launch."""
        own = tuple((i, wire) for i, _, wire in members if wire is not None)
        wires = tuple(wire for _, wire in own)
        names = {name for _, name, _ in members}
        name = names.pop() if len(names) == 1 else kind[0]
        sent = sum(wire.sent for wire in wires) * kind[3].itemsize
        return KindPlan(kind, tuple(members), own, wires, name, sent, [])


class LaunchPlan(NamedTuple):
    """Coalesced steps of one rank: its local stages before them, and the wires of every kind."""

    before: LeafStages
    kinds: tuple[KindPlan, ...]
    axes: tuple[str, ...]


class BucketPlan(NamedTuple):
    """Launches of a bucket's rounds on one rank, and the local stages after them."""

    rounds: tuple[tuple[LaunchPlan, ...], ...]
    after: LeafStages


@lru_cache(maxsize=CACHE_SIZE)
def bucket_plans(
    progs: tuple[Program, ...], bucket_bytes: int | None, rank: int
) -> tuple[BucketPlan, ...]:
    """Return the plans of all buckets for one rank; with None there is one bucket."""
    return tuple(_bucket_plan(progs, bucket, rank) for bucket in buckets(progs, bucket_bytes))


def _bucket_plan(progs: tuple[Program, ...], bucket: tuple[int, ...], rank: int) -> BucketPlan:
    leaves = {i: _Leaf(progs[i], rank) for i in bucket}
    planned = []
    for round_steps in rounds(progs, bucket):
        launches = []
        for steps in coalesced(progs, round_steps):
            before: list[tuple[int, tuple[LocalFunction, ...]]] = []
            kinds: dict[Kind, list[Member]] = {}
            for i, step in steps:
                prog = progs[i]
                before += leaves[i].stages_until(i, step)
                wire = leaves[i].next_wire()
                group = _group(prog, step, wire, rank)
                if group:
                    op, reduction = (wire.op, wire.reduction) if wire else ("all_to_all", "sum")
                    kind = op, group, reduction, wire_specs(prog)[step].dtype
                    kinds.setdefault(kind, []).append((i, prog.steps[step].name, wire))
            axes = step_axes(*typed_step(progs, *steps[0]))  # equal on all ranks
            plans = tuple(KindPlan.of(kind, members) for kind, members in kinds.items())
            launches.append(LaunchPlan(tuple(before), plans, axes))
        planned.append(tuple(launches))
    after = [row for i, leaf in leaves.items() for row in leaf.stages_until(i)]
    return BucketPlan(tuple(planned), tuple(after))


class _Leaf:
    """Position in the program of one leaf on this rank."""

    __slots__ = ("casts", "done", "stages")

    def __init__(self, prog: Program, rank: int) -> None:
        self.stages = stages(prog, rank)
        self.casts = prog.forward_dtype is not None
        self.done = 0

    def stages_until(self, leaf: int, step: int | None = None) -> LeafStages:
        """Return the local stages before step number `step`, or all that remain, as one row."""
        stop = len(self.stages) if step is None else step + self.casts
        functions = []
        for stage in self.stages[self.done : stop]:
            assert not isinstance(stage, Wire)
            if stage is not unchanged:
                functions.append(stage)
        self.done = min(stop, len(self.stages))
        return ((leaf, tuple(functions)),) if functions else ()

    def next_wire(self) -> Wire | None:
        """Return the next stage if it is a collective; this rank may take no part in it."""
        stage = self.stages[self.done] if self.done < len(self.stages) else None
        if not isinstance(stage, Wire):
            return None
        self.done += 1
        return stage


def _run_bucket(
    plan: BucketPlan, transport: Transport, ys: Locals, owned: Collection[int]
) -> Iterator[None]:
    """Run a bucket's leaves, yielding after each launch; `ys` has the results at the end."""
    for launches in plan.rounds:
        finishes = []
        for before, kinds, axes in launches:
            _run_stages(before, ys)
            for kind in kinds:
                finishes += [
                    _launch_kind(same_device, axes, transport, ys, owned)
                    for same_device in _by_device(kind, ys)
                ]
        yield
        while finishes:  # frees the buffers of one launch before the next one is unpacked
            finishes.pop(0)()
    _run_stages(plan.after, ys)


def _run_stages(rows: LeafStages, ys: Locals) -> None:
    for i, functions in rows:
        x = ys[i]
        for function in functions:
            x = function(x)
        ys[i] = x


def _by_device(plan: KindPlan, ys: Locals) -> Iterable[KindPlan]:
    """Split a launch by the device of the locals."""
    if len({ys[i].device for i, _, _ in plan.members}) == 1:
        return (plan,)
    groups: dict[torch.device, list[Member]] = {}
    for member in plan.members:
        groups.setdefault(ys[member[0]].device, []).append(member)
    return [KindPlan.of(plan.kind, members) for members in groups.values()]


def _group(prog: Program, step: int, wire: Wire | None, rank: int) -> Group:
    """Return the ranks of the launch that a wire is coalesced in; () if this is not one of them.

    Between two meshes it is all ranks of both, since each leaf has its own senders and receivers.
    """
    src, dst = prog.specs[step].mesh, prog.specs[step + 1].mesh
    if src != dst:
        return _ranks_of_both(src, dst) if rank in src or rank in dst else ()
    if wire is None:
        return ()
    return _sorted(wire.group) if wire.op == "all_to_all" else wire.group


@lru_cache(maxsize=CACHE_SIZE)
def _ranks_of_both(src: Mesh, dst: Mesh) -> Group:
    return tuple(sorted({*src.ranks, *dst.ranks}))


@lru_cache(maxsize=CACHE_SIZE)
def _sorted(group: Group) -> Group:
    return tuple(sorted(group))


def _launch_kind(
    plan: KindPlan, axes: tuple[str, ...], transport: Transport, ys: Locals,
    owned: Collection[int],
) -> Callable[[], None]:  # fmt: skip
    """Launch wires of one kind at once over the kind's group; a single one over its own group."""
    if len(plan.members) == 1:
        launched = [
            (i, launch_wire(wire, ys[i], transport, owned=i in owned)) for i, wire in plan.own
        ]

        def finish_one() -> None:
            for i, finish in launched:
                ys[i] = finish()

        return finish_one
    op, group, *_ = plan.kind
    payloads = [ys[i] if wire.pack is unchanged else wire.pack(ys[i]) for i, wire in plan.own]
    notify_collective(plan.name, axes, plan.sent, transport.rank, plan.kind[3])
    moved: Callable[[], Sequence[Parts]]
    if op == "all_reduce":
        moved = _all_reduce(plan, payloads, transport, all(i in owned for i, _ in plan.own))
    else:
        lengths = [payload.numel() for payload in payloads]
        empty = [ys[plan.members[0][0]].new_empty(0)]
        result = _send(plan, payloads or empty, transport)
        moved = lambda: _split_result(result(), group, plan.wires, lengths)  # noqa: E731
    del payloads
    if op != "all_to_all":  # only its results have elements of the locals: the others are freed
        for i, _ in plan.own:
            ys[i] = FREED

    def finish() -> None:
        for (i, wire), part in zip(plan.own, moved(), strict=True):
            y = wire.unpack(part, ys[i])
            # Views of one buffer, without common elements.
            ys[i] = unviewed(y) if is_view(y) else y

    return finish


def _all_reduce(
    plan: KindPlan, payloads: list[torch.Tensor], transport: Transport, owned_payloads: bool
) -> Callable[[], Sequence[torch.Tensor]]:
    """Launch an all-reduce of concatenated payloads; return the call that waits for its parts.

    Payloads that may be written are not copied if they are parts of one flat tensor.
    """
    _, group, reduction, _ = plan.kind
    lengths = [payload.numel() for payload in payloads]
    flat = joined(payloads) if owned_payloads else None
    if flat is not None:
        finish_flat = transport.all_reduce(flat, reduction, group, owned=True)

        def own_parts() -> Sequence[torch.Tensor]:
            total = finish_flat()
            in_place = storage_address(total) == storage_address(flat)
            return payloads if in_place else torch.split_with_sizes(total, lengths)

        return own_parts
    # Modes that trace have no rule for a collective that writes its operand.
    owned = current_dispatch_mode() is None or isinstance(transport, ShapeTransport)
    if not (owned and _can_be_kept(payloads)):
        result = transport.all_reduce(flatten_all(payloads), reduction, group, owned=owned)
        return lambda: torch.split_with_sizes(result(), lengths)
    shapes = [x.shape for x in payloads]
    buffer = take_buffer(plan.buffers, shapes, payloads[0].dtype, payloads[0].device)
    copy_all(buffer.views, payloads)
    finish = transport.all_reduce(buffer.flat, reduction, group, owned=True)

    def parts() -> Sequence[torch.Tensor]:
        total = finish()
        keep_buffer(plan.buffers, buffer)
        if total.data_ptr() == buffer.flat.data_ptr():
            return buffer.parts()
        return torch.split_with_sizes(total, lengths)

    return parts


def _can_be_kept(payloads: Sequence[torch.Tensor]) -> bool:
    """Return True if memory of payloads can be used in later launches: plain CPU tensors."""
    return (
        payloads[0].device.type == "cpu"
        and {*map(type, payloads)} <= PLAIN
        and not (
            transforms_active()
            or torch.is_grad_enabled()
            or torch.is_inference_mode_enabled()
            or torch.compiler.is_compiling()
        )
    )


PLAIN = {torch.Tensor, torch.nn.Parameter}


def _send(
    plan: KindPlan, payloads: list[torch.Tensor], transport: Transport
) -> Callable[[], Parts]:
    """Launch concatenated payloads."""
    op, group, reduction, _ = plan.kind
    match op:
        case "all_gather":
            return transport.all_gather(flatten_all(payloads), group)
        case "reduce_scatter":
            rows = torch.cat([x.reshape(len(group), -1) for x in payloads], 1)
            return transport.reduce_scatter(rows, reduction, group)
        case _:
            order = _piece_order(group, tuple(wire.group for wire in plan.wires))
            pieces = [
                _filled_pieces(x, wire.send) for x, wire in zip(payloads, plan.wires, strict=False)
            ]
            send, receive = [0] * len(group), [0] * len(group)
            for peer, leaf, own in order:
                send[peer] += plan.wires[leaf].send[own]
                receive[peer] += plan.wires[leaf].receive[own]
            filled = [pieces[leaf][own] for _, leaf, own in order if own in pieces[leaf]]
            flat = torch.cat([*filled, payloads[0][:0]])
            return transport.all_to_all(flat, send, receive, group)


def _filled_pieces(payload: torch.Tensor, sizes: Sequence[int]) -> dict[int, torch.Tensor]:
    """Split a payload into pieces of `sizes`; return those with elements, by their index."""
    filled = [i for i, size in enumerate(sizes) if size]
    parts = torch.split_with_sizes(payload, [sizes[i] for i in filled]) if filled else ()
    return dict(zip(filled, parts, strict=True))


@lru_cache(maxsize=CACHE_SIZE)
def _piece_order(group: Group, groups: tuple[Group, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return the order of the pieces of a coalesced all-to-all, by peer and then by leaf.

    Returns:
        For each piece the peer's index in `group`, the leaf, and the peer's index in its group.
    """
    indices = [{rank: i for i, rank in enumerate(leaf_group)} for leaf_group in groups]
    return tuple(
        (peer, leaf, index[rank])
        for peer, rank in enumerate(group)
        for leaf, index in enumerate(indices)
        if rank in index
    )


def _split_result(
    moved: Parts, group: Group, wires: Sequence[Wire], lengths: Sequence[int]
) -> Sequence[Parts]:
    """Return the received elements of each wire, as views where they are contiguous."""
    if not isinstance(moved, torch.Tensor):
        return [[*rows] for rows in zip(*(part.split(lengths) for part in moved), strict=True)]
    parts: Sequence[torch.Tensor]
    match wires[0].op if wires else "":
        case "all_gather":
            parts = moved.view(len(group), -1).split(lengths, 1)
        case "reduce_scatter":
            parts = moved.split([length // len(group) for length in lengths])
        case _:
            order = _piece_order(group, tuple(wire.group for wire in wires))
            pieces = _filled_pieces(moved, [wires[leaf].receive[own] for _, leaf, own in order])
            received: list[dict[int, torch.Tensor]] = [{} for _ in wires]
            for i, piece in pieces.items():
                _, leaf, own = order[i]
                received[leaf][own] = piece
            parts = [_concat([row[own] for own in sorted(row)], moved) for row in received]
    return parts


def _concat(pieces: Sequence[torch.Tensor], moved: torch.Tensor) -> torch.Tensor:
    """Concatenate pieces; a single one is returned itself."""
    return torch.cat([*pieces]) if len(pieces) > 1 else pieces[0] if pieces else moved[:0]
