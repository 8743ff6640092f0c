"""Several programs on one rank: collectives of one kind in one launch, round by round, in buckets.

Every rank finds the same buckets and rounds from the specs. Which wires of a round agree is seen
alike by all ranks of a group, and launches are in one order, that of `together` and then of their
first leaves: so ranks that are in several groups never wait for each other in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch

from fshard.layout.mesh import Mesh
from fshard.plan.batch.coalesce import Steps, buckets, rounds, together
from fshard.program.program import Program
from fshard.run.collective import Wire, begin
from fshard.run.interpreter import stages
from fshard.run.transports.base import Group, Parts, Transport, notify

__all__ = ["launch_all"]

Tensors = list[torch.Tensor]
FinishAll = Callable[[], tuple[torch.Tensor, ...]]


def launch_all(
    progs: tuple[Program, ...], limit: int | None, transport: Transport, xs: Sequence[torch.Tensor]
) -> FinishAll:
    """Start programs on this rank's locals, one for each; `limit` are a bucket's bytes.

    All is launched when it returns; while a bucket is under way the one before comes to its end.
    """
    ys = list(xs)
    before: Iterator[None] = iter(())
    left = 0
    for bucket in buckets(progs, limit):
        now = _under_way(progs, bucket, transport, ys)
        next(now, None)
        for _ in before:
            pass
        before, left = now, len(rounds(progs, bucket)) - 1
    for _ in range(left):
        next(before)

    def finish() -> tuple[torch.Tensor, ...]:
        for _ in before:
            pass
        return tuple(ys)

    return finish


def _under_way(
    progs: tuple[Program, ...], bucket: tuple[int, ...], transport: Transport, ys: Tensors
) -> Iterator[None]:
    """The rounds of a bucket: it stops where one is launched, and `ys` are results at its end."""
    leaves = {at: _Leaf(progs[at], transport.rank) for at in bucket}
    for going in rounds(progs, bucket):
        finishes = [
            finish
            for steps in together(progs, going)
            for finish in _launch_steps(progs, steps, leaves, transport, ys)
        ]
        yield
        while finishes:  # what one has moved is let go before the next one's comes
            finishes.pop(0)()
    for at, leaf in leaves.items():
        ys[at] = leaf.run(ys[at])


class _Leaf:
    """Where a leaf's program stands on this rank."""

    __slots__ = ("casts", "done", "stages")

    def __init__(self, prog: Program, rank: int) -> None:
        self.stages = stages(prog, rank)
        self.casts = prog.forward_dtype is not None
        self.done = 0

    def run(self, x: torch.Tensor, place: int | None = None) -> torch.Tensor:
        """What is local before the step at `place`, or all that is left."""
        stop = len(self.stages) if place is None else place + self.casts
        for stage in self.stages[self.done : stop]:
            assert not isinstance(stage, Wire)
            x = stage(x)
        self.done = min(stop, len(self.stages))
        return x

    def wire(self) -> Wire | None:
        """The collective that comes now; none on a rank that takes no part in it."""
        here = self.stages[self.done] if self.done < len(self.stages) else None
        if not isinstance(here, Wire):
            return None
        self.done += 1
        return here


Kind = tuple[str, Group, str, torch.dtype, torch.device]
"""What wires have in common that go in one launch: operation, group, reduction, dtype, device."""
Member = tuple[int, str, Wire | None]
"""A leaf in a launch and its step's name; without a wire where only others' are for this rank."""


def _launch_steps(
    progs: tuple[Program, ...],
    steps: Steps,
    leaves: dict[int, _Leaf],
    transport: Transport,
    ys: Tensors,
) -> list[Callable[[], None]]:
    """Launch collectives of leaves that go out as one; the calls that wait and put results in `ys`.

    Where this rank's leaves lie on several devices it is one launch for each.
    """
    kinds: dict[Kind, list[Member]] = {}
    for at, place in steps:
        prog = progs[at]
        ys[at] = leaves[at].run(ys[at], place)
        wire = leaves[at].wire()
        group = _group(prog, place, wire, transport.rank)
        if group:
            op, reduction = (wire.op, wire.reduction) if wire else ("all_to_all", "sum")
            kind = op, group, reduction, ys[at].dtype, ys[at].device
            kinds.setdefault(kind, []).append((at, prog.steps[place].name, wire))
    return [_launch_kind(*each, transport, ys) for each in kinds.items()]


def _group(prog: Program, place: int, wire: Wire | None, rank: int) -> Group:
    """The ranks of a launch in which a wire can go with others; none if this is no such rank.

    Between two meshes they are all ranks of both: who sends to whom is another for each leaf.
    """
    src, dst = prog.specs[place].mesh, prog.specs[place + 1].mesh
    if src != dst:
        return _both(src, dst) if rank in src or rank in dst else ()
    if wire is None:
        return ()
    return _sorted(wire.group) if wire.op == "all_to_all" else wire.group


@lru_cache(maxsize=256)
def _both(src: Mesh, dst: Mesh) -> Group:
    return tuple(sorted({*src.ranks, *dst.ranks}))


@lru_cache(maxsize=4096)
def _sorted(group: Group) -> Group:
    return tuple(sorted(group))


def _launch_kind(
    kind: Kind, members: list[Member], transport: Transport, ys: Tensors
) -> Callable[[], None]:
    """Launch wires of one kind as one, over the group of the kind; one alone over its own."""
    mine = [(at, wire) for at, _, wire in members if wire is not None]
    if len(members) == 1:
        alone = [(at, begin(wire, ys[at], transport)) for at, wire in mine]

        def finish_one() -> None:
            for at, each in alone:
                ys[at] = each()

        return finish_one
    op, group, *_ = kind
    wires = [wire for _, wire in mine]
    payloads = [wire.pack(ys[at]) for at, wire in mine]
    names = {name for _, name, _ in members}
    sent = sum(wire.sent for wire in wires) * kind[3].itemsize
    notify(names.pop() if len(names) == 1 else op, wires[0].axes if wires else (), sent,
           transport.rank)  # fmt: skip
    lengths = [payload.numel() for payload in payloads]
    moved = _send(kind, wires, payloads or [ys[members[0][0]].new_empty(0)], transport)
    del payloads

    def finish() -> None:
        parts = _take_apart(moved(), group, wires, lengths)
        for (at, wire), part in zip(mine, parts, strict=True):
            ys[at] = _apart(wire.unpack(part, ys[at]))

    return finish


def _send(
    kind: Kind, wires: Sequence[Wire], payloads: Sequence[torch.Tensor], transport: Transport
) -> Callable[[], Parts]:
    """Launch payloads side by side."""
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
            order = _order(group, tuple(wire.group for wire in wires))
            pieces = [
                torch.split_with_sizes(x, wire.send)
                for x, wire in zip(payloads, wires, strict=False)
            ]
            send, receive = [0] * len(group), [0] * len(group)
            for to, leaf, own in order:
                send[to] += wires[leaf].send[own]
                receive[to] += wires[leaf].receive[own]
            flat = torch.cat([*(pieces[leaf][own] for _, leaf, own in order), payloads[0][:0]])
            return transport.all_to_all(flat, send, receive, group)


@lru_cache(maxsize=1024)
def _order(group: Group, groups: tuple[Group, ...]) -> tuple[tuple[int, int, int], ...]:
    """How pieces of an all-to-all lie: the place in the group, the leaf, its place in its own."""
    own = [{rank: at for at, rank in enumerate(each)} for each in groups]
    return tuple(
        (place, leaf, at[rank])
        for place, rank in enumerate(group)
        for leaf, at in enumerate(own)
        if rank in at
    )


def _take_apart(
    moved: Parts, group: Group, wires: Sequence[Wire], lengths: Sequence[int]
) -> Sequence[Parts]:
    """What has come for each wire, views where it lies in one piece."""
    if not isinstance(moved, torch.Tensor):
        return [[*each] for each in zip(*(part.split(lengths) for part in moved), strict=True)]
    parts: Sequence[torch.Tensor]
    match wires[0].op if wires else "":
        case "all_gather":
            parts = moved.split(lengths, 1)
        case "all_reduce":
            parts = moved.split(lengths)
        case "reduce_scatter":
            parts = moved.split([length // len(group) for length in lengths])
        case _:
            order = _order(group, tuple(wire.group for wire in wires))
            pieces = moved.split([wires[leaf].receive[own] for _, leaf, own in order])
            came: list[dict[int, torch.Tensor]] = [{} for _ in wires]
            for (_, leaf, own), piece in zip(order, pieces, strict=True):
                came[leaf][own] = piece
            parts = [_one([each[own] for own in sorted(each)], moved) for each in came]
    return parts


def _one(pieces: Sequence[torch.Tensor], moved: torch.Tensor) -> torch.Tensor:
    """Pieces in one row, not copied where there is but one with anything in it."""
    full = [piece for piece in pieces if piece.numel()]
    return torch.cat(full) if len(full) > 1 else full[0] if full else moved[:0]


def _apart(y: torch.Tensor) -> torch.Tensor:
    """`y` as a tensor of its own for autograd: parts of one launch share memory, not elements."""
    if not y._is_view():
        return y
    fresh: torch.Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return fresh
