"""Several programs on one rank: collectives of one kind in one launch, in rounds and buckets.

Every rank computes the same buckets and rounds from the specs. Within a group all ranks agree on
the wires that are coalesced, and launches have one order, that of `coalesced` and then of
their first leaves: so ranks in several groups never wait for each other in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from fshard._torch.autograd_state import unviewed
from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.plan.batch.coalesce import LeafSteps, buckets, coalesced, rounds, typed_step
from fshard.program.cost.traffic import step_axes
from fshard.program.program import Program
from fshard.run.collective import Wire, launch_wire
from fshard.run.interpreter import stages
from fshard.run.transports.base import Group, Parts, Transport, notify

Locals = list[torch.Tensor]
"""One tensor per leaf: its local, replaced by the result as the programs run."""
FinishAll = Callable[[], tuple[torch.Tensor, ...]]


def launch_all(
    progs: tuple[Program, ...],
    bucket_bytes: int | None,
    transport: Transport,
    xs: Sequence[torch.Tensor],
) -> FinishAll:
    """Launch programs on this rank's locals; return the call that waits for the results.

    While the collectives of a bucket are under way, the bucket before it is finished.

    Args:
        progs: one program per leaf.
        bucket_bytes: bytes of a bucket, None for one bucket.
        transport: this rank's transport.
        xs: one local per leaf.
    """
    ys = list(xs)
    previous: Iterator[None] = iter(())
    remaining = 0
    for bucket in buckets(progs, bucket_bytes):
        current = _run_bucket(progs, bucket, transport, ys)
        next(current, None)
        for _ in previous:
            pass
        previous, remaining = current, len(rounds(progs, bucket)) - 1
    for _ in range(remaining):
        next(previous)

    def finish() -> tuple[torch.Tensor, ...]:
        for _ in previous:
            pass
        return tuple(ys)

    return finish


def _run_bucket(
    progs: tuple[Program, ...], bucket: tuple[int, ...], transport: Transport, ys: Locals
) -> Iterator[None]:
    """Run a bucket's leaves, yielding after each launch; `ys` has the results at the end."""
    leaves = {i: _Leaf(progs[i], transport.rank) for i in bucket}
    for round_steps in rounds(progs, bucket):
        finishes = [
            finish
            for steps in coalesced(progs, round_steps)
            for finish in _launch_steps(progs, steps, leaves, transport, ys)
        ]
        yield
        while finishes:  # frees the buffers of one launch before the next one is unpacked
            finishes.pop(0)()
    for i, leaf in leaves.items():
        ys[i] = leaf.run_until(ys[i])


class _Leaf:
    """Position in the program of one leaf on this rank."""

    __slots__ = ("casts", "done", "stages")

    def __init__(self, prog: Program, rank: int) -> None:
        self.stages = stages(prog, rank)
        self.casts = prog.forward_dtype is not None
        self.done = 0

    def run_until(self, x: torch.Tensor, step: int | None = None) -> torch.Tensor:
        """Run the local stages before step number `step`, or all that remain."""
        stop = len(self.stages) if step is None else step + self.casts
        for stage in self.stages[self.done : stop]:
            assert not isinstance(stage, Wire)
            x = stage(x)
        self.done = min(stop, len(self.stages))
        return x

    def next_wire(self) -> Wire | None:
        """Return the next stage if it is a collective; this rank may take no part in it."""
        stage = self.stages[self.done] if self.done < len(self.stages) else None
        if not isinstance(stage, Wire):
            return None
        self.done += 1
        return stage


Kind = tuple[str, Group, str, torch.dtype, torch.device]
"""Common properties of coalesced wires: operation, group, reduction, dtype and device."""
Member = tuple[int, str, Wire | None]
"""A leaf in a launch, its step's name, and its wire; None if only other ranks send for it."""


def _launch_steps(
    progs: tuple[Program, ...],
    steps: LeafSteps,
    leaves: dict[int, _Leaf],
    transport: Transport,
    ys: Locals,
) -> list[Callable[[], None]]:
    """Launch coalesced collectives, once per device of the locals.

    Returns:
        The calls that wait and put the results into `ys`.
    """
    kinds: dict[Kind, list[Member]] = {}
    for i, step in steps:
        prog = progs[i]
        ys[i] = leaves[i].run_until(ys[i], step)
        wire = leaves[i].next_wire()
        group = _group(prog, step, wire, transport.rank)
        if group:
            op, reduction = (wire.op, wire.reduction) if wire else ("all_to_all", "sum")
            kind = op, group, reduction, ys[i].dtype, ys[i].device
            kinds.setdefault(kind, []).append((i, prog.steps[step].name, wire))
    axes = _axes(progs, steps)
    return [_launch_kind(kind, members, axes, transport, ys) for kind, members in kinds.items()]


@lru_cache(maxsize=CACHE_SIZE)
def _axes(progs: tuple[Program, ...], steps: LeafSteps) -> tuple[str, ...]:
    """Return the axes of a launch for observers, equal on all ranks: those of its first step."""
    return step_axes(*typed_step(progs, *steps[0]))


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
    kind: Kind, members: list[Member], axes: tuple[str, ...], transport: Transport, ys: Locals
) -> Callable[[], None]:
    """Launch wires of one kind at once over the kind's group; a single one over its own group."""
    own_wires = [(i, wire) for i, _, wire in members if wire is not None]
    if len(members) == 1:
        launched = [(i, launch_wire(wire, ys[i], transport)) for i, wire in own_wires]

        def finish_one() -> None:
            for i, finish in launched:
                ys[i] = finish()

        return finish_one
    op, group, *_ = kind
    wires = [wire for _, wire in own_wires]
    payloads = [wire.pack(ys[i]) for i, wire in own_wires]
    names = {name for _, name, _ in members}
    sent = sum(wire.sent for wire in wires) * kind[3].itemsize
    notify(names.pop() if len(names) == 1 else op, axes, sent, transport.rank)
    lengths = [payload.numel() for payload in payloads]
    moved = _send(kind, wires, payloads or [ys[members[0][0]].new_empty(0)], transport)
    del payloads

    def finish() -> None:
        parts = _split_result(moved(), group, wires, lengths)
        for (i, wire), part in zip(own_wires, parts, strict=True):
            ys[i] = unviewed(
                wire.unpack(part, ys[i])
            )  # views of one buffer, without common elements

    return finish


def _send(
    kind: Kind, wires: Sequence[Wire], payloads: Sequence[torch.Tensor], transport: Transport
) -> Callable[[], Parts]:
    """Launch concatenated payloads."""
    op, group, reduction, *_ = kind
    match op:
        case "all_gather":
            return transport.all_gather(torch.cat([x.reshape(-1) for x in payloads]), group)
        case "all_reduce":
            flat = torch.cat([x.reshape(-1) for x in payloads])
            return transport.all_reduce(flat, reduction, group)
        case "reduce_scatter":
            rows = torch.cat([x.reshape(len(group), -1) for x in payloads], 1)
            return transport.reduce_scatter(rows, reduction, group)
        case _:
            order = _piece_order(group, tuple(wire.group for wire in wires))
            pieces = [
                torch.split_with_sizes(x, wire.send)
                for x, wire in zip(payloads, wires, strict=False)
            ]
            send, receive = [0] * len(group), [0] * len(group)
            for peer, leaf, own in order:
                send[peer] += wires[leaf].send[own]
                receive[peer] += wires[leaf].receive[own]
            flat = torch.cat([*(pieces[leaf][own] for _, leaf, own in order), payloads[0][:0]])
            return transport.all_to_all(flat, send, receive, group)


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
        case "all_reduce":
            parts = moved.split(lengths)
        case "reduce_scatter":
            parts = moved.split([length // len(group) for length in lengths])
        case _:
            order = _piece_order(group, tuple(wire.group for wire in wires))
            pieces = moved.split([wires[leaf].receive[own] for _, leaf, own in order])
            received: list[dict[int, torch.Tensor]] = [{} for _ in wires]
            for (_, leaf, own), piece in zip(order, pieces, strict=True):
                received[leaf][own] = piece
            parts = [_concat([row[own] for own in sorted(row)], moved) for row in received]
    return parts


def _concat(pieces: Sequence[torch.Tensor], moved: torch.Tensor) -> torch.Tensor:
    """Concatenate pieces; a single one that is not empty is returned itself."""
    full = [piece for piece in pieces if piece.numel()]
    return torch.cat(full) if len(full) > 1 else full[0] if full else moved[:0]
