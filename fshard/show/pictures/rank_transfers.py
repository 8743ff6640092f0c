"""Bytes that each rank gets from each other one in a step of a program."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from fshard.layout.spec import Spec
from fshard.program.boxes import local_box, volume
from fshard.program.cost.traffic import step_axes
from fshard.program.exchange_boxes import sent_elements
from fshard.program.halo_boxes import owners_of, shard_pieces, window_pieces
from fshard.program.program import Program, wire_specs
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectivePermute,
    Exchange,
    HaloExchange,
    HaloReduce,
    LocalStep,
    ReduceScatter,
    Step,
)
from fshard.run.collective import permutation

Transfers = Counter[tuple[int, int]]
"""Bytes by sender and receiver."""


def program_transfers(prog: Program, ranks: Iterable[int]) -> Transfers:
    """Return the bytes that some ranks get from each other in all steps of a program.

    Values are counted as if each pair of ranks exchanged them directly: rings and trees pass on
    the same bytes through other ranks.

    Args:
        prog: The program.
        ranks: The ranks, senders and receivers.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=2), P("x"), shape=(4,))
    >>> program_transfers(Program(src, (AllGather("x", 0),)), range(2))
    Counter({(1, 0): 8, (0, 1): 8})
    """
    chosen, wire = [*ranks], wire_specs(prog)
    total: Transfers = Counter()
    for step, src, dst in zip(prog.steps, wire, wire[1:], strict=False):
        if 0 in src.shape or isinstance(step, LocalStep):
            continue
        for receiver in chosen:
            for sender, count in _received(step, src, dst, receiver, chosen):
                if sender != receiver and count and sender in chosen:
                    total[sender, receiver] += count * src.dtype.itemsize
    return total


def _received(
    step: Step, src: Spec, dst: Spec, rank: int, among: list[int]
) -> Iterator[tuple[int, int]]:
    """Yield the elements that a rank gets from others, at least from those of `among`."""
    if isinstance(step, Exchange):
        yield from ((peer, sent_elements(src, dst, peer, rank)) for peer in among)
        return
    if rank not in src.mesh:
        return
    axes = step_axes(step, src, dst)
    group = src.mesh.group(rank, axes)
    peers = [peer for peer in among if peer in group]
    match step:
        case AllGather():
            yield from ((peer, _numel(src, peer)) for peer in peers)
        case ReduceScatter():
            yield from ((peer, _numel(dst, rank)) for peer in peers)
        case AllReduce():
            own = _part(_numel(src, rank), len(group), group.index(rank))
            for peer in peers:
                yield peer, own + _part(_numel(src, rank), len(group), group.index(peer))
        case AllToAll():
            target = local_box(dst, rank)
            for peer in peers:
                both = zip(local_box(src, peer), target, strict=True)
                yield peer, math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in both)
        case CollectivePermute():
            to = permutation(src.mesh, src.partition, dst.partition, axes, group)
            yield group[to.index(group.index(rank))], _numel(dst, rank)
        case HaloExchange():
            owners = owners_of(step, src, dst)
            yield from ((p.owner, volume(p.owned)) for p in window_pieces(step, owners, rank))
        case HaloReduce():
            owners = owners_of(step, src, dst)
            yield from ((p.reader, volume(p.owned)) for p in shard_pieces(step, owners, rank))


def _numel(spec: Spec, rank: int) -> int:
    return math.prod(spec.local_shape(rank))


def _part(numel: int, count: int, index: int) -> int:
    """Return the elements of part `index` of `count` parts, of which the first ones are larger."""
    return numel // count + (index < numel % count)
