"""When which leaves of a batch communicate, and which of them in one launch.

Leaves go in rounds: whoever comes to a collective waits until those that will come to the same
one have come as well, and they are launched as one. All of it follows from specs alone, so that
every rank finds the same.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import torch

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.program.cost.model import step_axes, traffic
from fshard.program.cost.rank_loads import Ranks, Vector, everyone, held, load
from fshard.program.infer import reduction_of
from fshard.program.program import Program, wire_specs
from fshard.program.steps import AllGather, AllReduce, ReduceScatter, Step

__all__ = [
    "Launch", "Leaves", "Row", "Steps", "buckets", "is_even", "kinds", "launches", "ranks_of",
    "rounds", "row_of", "together",
]  # fmt: skip

Leaves = tuple[Program | None, ...]
Steps = tuple[tuple[int, int], ...]
"""Steps of several leaves: the leaf, and the place of the step in its program."""
Row = tuple[Step, Spec, Spec]


class Launch(NamedTuple):
    """Collectives of several leaves that go out as one.

    `op` is what runs on the wire: all that is uneven or moves from rank to rank is one
    "all_to_all", else all-gathers, all-reduces and reduce-scatters. `name` is that of the steps,
    where they have one, as `fs.comm_log` counts it.
    """

    op: str
    name: str
    axes: tuple[str, ...]
    ends: tuple[tuple[Mesh, Mesh], ...]
    steps: Steps

    def where(self, *, named: bool = False) -> str:
        """Among whom, in words; with the mesh where there are others to tell it `named` from."""
        (src, dst), *more = self.ends
        if any(a != b for a, b in self.ends):
            return "between several meshes" if more else f"from {src} to {dst}"
        return f"over {', '.join(self.axes)}{f' of {src}' if named else ''}"


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
        case AllGather(all_axes, dim) if is_even(src, dim, src.mesh.axis_size(all_axes)):
            op = "all_gather"
        case AllReduce():
            op, (reduction, _) = "all_reduce", reduction_of(step, src)
        case ReduceScatter(all_axes, dim) if is_even(dst, dim, src.mesh.axis_size(all_axes)):
            op, (reduction, _) = "reduce_scatter", reduction_of(step, src)
        case _:
            # Pieces go from rank to rank: the order of a group's ranks does not matter.
            op, axes = "all_to_all", tuple(sorted(axes, key=src.mesh.axes.index))
    one = op == "all_to_all" and src.mesh.axis_size(axes) == src.mesh.size  # group, in any order
    same = src.mesh == dst.mesh and not one
    among = _among(src.mesh, axes) if same else _between(src.mesh, dst.mesh)
    return Kind(op, among, reduction, src.dtype)


def is_even(spec: Spec, dim: int, n: int) -> bool:
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
    """All ranks of both, in one value however many they are in a row."""
    ranks = sorted({*src.ranks, *dst.ranks})
    row = range(ranks[0], ranks[-1] + 1) if ranks else range(0)
    return row if len(row) == len(ranks) else tuple(ranks)


@lru_cache(maxsize=256)
def ranks_of(leaves: Leaves) -> Ranks:
    """The ranks to add up for: those of all meshes of the leaves, sorted.

    One stands for all where all do the same: shards are even, on the same devices.
    """
    specs = [spec for leaf in leaves if leaf is not None for spec in leaf.specs]
    if specs and not any(any(spec.sizes) for spec in specs):
        first = specs[0].mesh
        if all(spec.mesh.devices == first.devices for spec in specs):
            return first.ranks[:1]
    return everyone(spec.mesh for spec in specs)


@lru_cache(maxsize=4096)
def _weight(prog: Program, ranks: Ranks) -> Vector:
    """Most bytes that each rank gives to a launch of this program, or gets from one."""
    specs = wire_specs(prog)
    vectors = [(0,) * len(ranks)]
    for at, _ in kinds(prog):
        before, after = specs[at : at + 2]
        moved = load(prog.steps[at], before, after, ranks)
        vectors += [moved.sent, moved.received, held(before, ranks), held(after, ranks)]
    return tuple(map(max, zip(*vectors, strict=True)))


@lru_cache(maxsize=256)
def buckets(leaves: Leaves, limit: int | None) -> tuple[tuple[int, ...], ...]:
    """The leaves that are under way together: those of the same kinds side by side, in order.

    No rank has more than `limit` bytes in a round of a bucket, unless a leaf has; such leaves go
    together where each adds to what others have on other ranks, owners that take turns. Each
    leaf goes to the first of the last buckets that has room.
    """
    alike: dict[Hashable, list[tuple[int, Program]]] = {}
    for at, leaf in enumerate(leaves):
        if leaf is not None:
            alike.setdefault(tuple(kind for _, kind in kinds(leaf)), []).append((at, leaf))
    places = [each for same in alike.values() for each in same]
    if limit is None:
        return (tuple(at for at, _ in places),) if places else ()
    ranks = ranks_of(leaves)
    found: list[_Bucket] = []
    for at, leaf in places:
        weight = _weight(leaf, ranks)
        own = max(weight)
        busiest = weight.index(own)
        if not any(each.takes(at, weight, own, busiest, limit) for each in found[-OPEN:]):
            found.append(_Bucket(at, weight))
    return tuple(tuple(each.leaves) for each in found)


OPEN = 32
"""Of so many buckets, the last ones, the first that has room is looked for."""


class _Bucket:
    """Leaves, and the bytes that each rank has of them; most on one rank, and most of one leaf."""

    __slots__ = ("filled", "largest", "leaves", "most")

    def __init__(self, leaf: int, weight: Vector) -> None:
        self.leaves = [leaf]
        self.filled = weight
        self.most = self.largest = max(weight)

    def takes(self, leaf: int, weight: Vector, own: int, busiest: int, limit: int) -> bool:
        """Whether there was room for another leaf, which is in it then.

        `own` are the bytes of its `busiest` rank, which alone tells of most that there is none.
        """
        largest = max(self.largest, own)

        def fits(most: int) -> bool:
            in_turn = 2 * (most - self.most) <= own and most <= 2 * largest
            return most <= limit or in_turn

        if not fits(max(self.most, self.filled[busiest] + own)):
            return False
        filled = tuple(map(operator.add, self.filled, weight))
        most = max(filled)
        if not fits(most):
            return False
        self.leaves.append(leaf)
        self.filled, self.most, self.largest = filled, most, largest
        return True


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


@lru_cache(maxsize=1024)
def together(leaves: Leaves, going: Steps) -> tuple[Steps, ...]:
    """The collectives of a round, those that go out as one side by side."""
    by_kind: dict[Kind, list[tuple[int, int]]] = {}
    for at, place in going:
        by_kind.setdefault(dict(kinds(leaves[at]))[place], []).append((at, place))
    return tuple(map(tuple, by_kind.values()))


@lru_cache(maxsize=256)
def launches(leaves: Leaves, limit: int | None) -> tuple[Launch, ...]:
    """Everything that is launched, in order."""
    return tuple(
        _launch(leaves, steps)
        for bucket in buckets(leaves, limit)
        for going in rounds(leaves, bucket)
        for steps in together(leaves, going)
    )


def _launch(leaves: Leaves, steps: Steps) -> Launch:
    """The launch of several steps; its axes are those of the first."""
    op = dict(kinds(leaves[steps[0][0]]))[steps[0][1]].op
    rows = [row_of(leaves, *each) for each in steps]
    names = {step.name for step, _, _ in rows}
    ends = dict.fromkeys((before.mesh, after.mesh) for _, before, after in rows)
    return Launch(
        op,
        names.pop() if len(names) == 1 else op,
        step_axes(*rows[0]),
        tuple(ends),
        steps,
    )


def row_of(leaves: Leaves, at: int, place: int) -> Row:
    """A step of a leaf, between the specs that it sends."""
    leaf = leaves[at]
    assert leaf is not None
    specs = wire_specs(leaf)
    return leaf.steps[place], specs[place], specs[place + 1]
