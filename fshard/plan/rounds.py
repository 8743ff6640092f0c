"""When which leaves of a batch communicate, and which of them in one launch.

Leaves go in rounds: whoever comes to a collective waits until those that will come to the same
one have come as well, and they are launched as one. All of it follows from specs alone, so that
every rank finds the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard.mesh import Mesh
from fshard.program.cost import max_local_nbytes, step_axes, traffic
from fshard.program.infer import unreduced_kind
from fshard.program.program import Program, wire_specs
from fshard.program.steps import AllGather, AllReduce, ReduceScatter, Step
from fshard.spec import Spec

__all__ = ["Launch", "Leaves", "Steps", "buckets", "launches", "rounds"]

Leaves = tuple[Program | None, ...]
Steps = tuple[tuple[int, int], ...]
"""Steps of several leaves: the leaf, and the place of the step in its program."""


class Launch(NamedTuple):
    """Collectives of several leaves that go out as one.

    `op` is what runs on the wire: all that is uneven or moves from rank to rank is one
    "all_to_all", else all-gathers, all-reduces and reduce-scatters.
    """

    op: str
    axes: tuple[str, ...]
    steps: Steps

    @property
    def where(self) -> str:
        """Among whom, in words."""
        return f"over {', '.join(self.axes)}" if self.axes else "between meshes"


class Kind(NamedTuple):
    """What collectives have in common that can go out as one; `among` are the groups of ranks."""

    op: str
    among: Hashable
    reduction: str
    dtype: torch.dtype


@lru_cache(maxsize=16384)
def kinds(prog: Program | None) -> tuple[tuple[int, Kind], ...]:
    """The steps of a program that communicate, by their place, and their kinds."""
    if prog is None:
        return ()
    specs = wire_specs(prog)
    rows = zip(prog.steps, specs, specs[1:], strict=False)
    return tuple((at, _kind(*row)) for at, row in enumerate(rows) if traffic(*row).launches)


def _kind(step: Step, src: Spec, dst: Spec) -> Kind:
    reduction = ""
    axes = step_axes(step, src, dst)
    match step:
        case AllGather(all_axes, dim) if _is_even(src, dim, src.mesh.axis_size(all_axes)):
            op = "all_gather"
        case AllReduce(all_axes):
            op, reduction = "all_reduce", unreduced_kind(step, src, all_axes)
        case ReduceScatter(all_axes, dim) if _is_even(dst, dim, src.mesh.axis_size(all_axes)):
            op, reduction = "reduce_scatter", unreduced_kind(step, src, all_axes)
        case _:
            # Pieces go from rank to rank: the order of a group's ranks does not matter.
            op, axes = "all_to_all", tuple(sorted(axes, key=src.mesh.axes.index))
    same = src.mesh == dst.mesh
    among = _among(src.mesh, axes) if same else _between(src.mesh, dst.mesh)
    return Kind(op, among, "sum" if reduction == "avg" else reduction, src.dtype)


def _is_even(spec: Spec, dim: int, n: int) -> bool:
    """Whether the shards of a dim are of one size in every group of `n`, those of minor axes."""
    sizes = spec.sizes[dim] or ()
    return all(len({*sizes[at : at + n]}) == 1 for at in range(0, len(sizes), n))


@lru_cache(maxsize=4096)
def _among(mesh: Mesh, axes: tuple[str, ...]) -> Hashable:
    """The groups of ranks along axes, whatever these are called: devices, sizes and strides."""
    stride, strides = mesh.size, {}
    for axis, size in mesh.shape.items():
        stride //= size
        strides[axis] = stride
    grid: list[tuple[int, int]] = []
    for axis in axes:
        size, step = mesh.shape[axis], strides[axis]
        if grid and grid[-1][1] == size * step:
            grid[-1] = grid[-1][0] * size, step
        else:
            grid.append((size, step))
    return mesh.devices, tuple(grid)


@lru_cache(maxsize=256)
def _between(src: Mesh, dst: Mesh) -> Hashable:
    return tuple(sorted({*src.ranks, *dst.ranks}))


@lru_cache(maxsize=16384)
def _weight(prog: Program) -> int:
    """Most bytes that the busiest rank gives to a launch of this program, or gets from one."""
    specs = wire_specs(prog)
    most = 0
    for at, _ in kinds(prog):
        before, after = specs[at : at + 2]
        moved = traffic(prog.steps[at], before, after)
        held = max_local_nbytes(before), max_local_nbytes(after)
        most = max(most, moved.sent, moved.received, *held)
    return most


@lru_cache(maxsize=256)
def buckets(leaves: Leaves, limit: int | None) -> tuple[tuple[int, ...], ...]:
    """The leaves that are under way together: those of the same kinds side by side, in order.

    No bucket has more than `limit` bytes in a round, unless it is one leaf.
    """
    alike: dict[Hashable, list[tuple[int, Program]]] = {}
    for at, leaf in enumerate(leaves):
        if leaf is not None:
            alike.setdefault(tuple(kind for _, kind in kinds(leaf)), []).append((at, leaf))
    found: list[list[int]] = []
    room = 0
    for at, leaf in (each for places in alike.values() for each in places):
        weight = _weight(leaf)
        if not found or (limit is not None and weight > room):
            found.append([])
            room = limit or 0
        found[-1].append(at)
        room = max(0, room - weight)
    return tuple(map(tuple, found))


@lru_cache(maxsize=1024)
def rounds(leaves: Leaves, bucket: tuple[int, ...]) -> tuple[Steps, ...]:
    """In each round the collectives that no other leaf of the bucket will come to later.

    Where every one is waited for by another, the one that most leaves have come to goes.
    """
    todo = {at: list(kinds(leaves[at])) for at in bucket if kinds(leaves[at])}
    found: list[Steps] = []
    while todo:
        first = Counter(own[0][1] for own in todo.values())
        later = {kind for own in todo.values() for _, kind in own[1:]}
        ready = first.keys() - later or {first.most_common(1)[0][0]}
        going = [at for at, own in todo.items() if own[0][1] in ready]
        found.append(tuple((at, todo[at].pop(0)[0]) for at in going))
        todo = {at: own for at, own in todo.items() if own}
    return tuple(found)


@lru_cache(maxsize=256)
def launches(leaves: Leaves, limit: int | None) -> tuple[Launch, ...]:
    """Everything that is launched, in order."""
    found: list[Launch] = []
    for bucket in buckets(leaves, limit):
        for going in rounds(leaves, bucket):
            by_kind: dict[Kind, list[tuple[int, int]]] = {}
            for at, place in going:
                by_kind.setdefault(dict(kinds(leaves[at]))[place], []).append((at, place))
            found += [
                Launch(kind.op, _axes(leaves, steps), tuple(steps))
                for kind, steps in by_kind.items()
            ]
    return tuple(found)


def _axes(leaves: Leaves, steps: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """The axes of the first of several steps."""
    leaf, place = leaves[steps[0][0]], steps[0][1]
    assert leaf is not None
    return step_axes(leaf.steps[place], leaf.specs[place], leaf.specs[place + 1])
