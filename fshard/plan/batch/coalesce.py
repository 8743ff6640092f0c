"""Coalescing: the order in which leaves of a batch communicate, and the collectives in one launch.

Leaves advance in rounds: a leaf whose next collective is one that other leaves reach later waits
for them, and all of these are one launch. Everything follows from specs alone, so that every rank
computes the same order.
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
from fshard.program.cost.rank_loads import step_load, union_ranks
from fshard.program.cost.rank_overlap import Ranks, Vector, local_bytes
from fshard.program.cost.traffic import step_axes, traffic
from fshard.program.halo_steps import HaloExchange, HaloReduce
from fshard.program.infer import reduction_of
from fshard.program.program import Program, wire_specs
from fshard.program.steps import AllGather, AllReduce, ReduceScatter, Step

Leaves = tuple[Program | None, ...]
LeafSteps = tuple[tuple[int, int], ...]
"""Steps of several leaves: the index of the leaf, and of the step in its program."""
TypedStep = tuple[Step, Spec, Spec]
ALONE_BYTES = 2**23
"""Bytes of a tensor from which on an all-reduce of its own is in its place.

On two CPU cores a step of a model with tensors of 4 MiB takes 3 to 5 % less if they are copied into
a common buffer: every launch of gloo costs its ranks rounds of messages.
"""


class Launch(NamedTuple):
    """Collectives of several leaves that run as one.

    `op` is the operation on the wire: "all_gather", "all_reduce", "reduce_scatter", or "all_to_all"
    for everything that is uneven or sends from rank to rank. `name` is the name of the steps if
    they have the same, else `op`. `ends` are the meshes before and after, each pair once.
    """

    op: str
    name: str
    axes: tuple[str, ...]
    ends: tuple[tuple[Mesh, Mesh], ...]
    steps: LeafSteps

    def scope(self, *, with_mesh: bool = False) -> str:
        """Return the axes or meshes that communicate, as text; with the mesh if `with_mesh`."""
        (src, dst), *more = self.ends
        if any(a != b for a, b in self.ends):
            return "between several meshes" if more else f"from {src} to {dst}"
        return f"over {', '.join(self.axes)}{f' of {src}' if with_mesh else ''}"


class LaunchKey(NamedTuple):
    """Key of collectives that can be one launch; `among` identifies the groups of ranks."""

    op: str
    among: Hashable
    reduction: str
    dtype: torch.dtype


@lru_cache(maxsize=16384)
def launch_keys(prog: Program | None) -> tuple[tuple[int, LaunchKey], ...]:
    """Return the index and the key of each step of a program that communicates."""
    if prog is None:
        return ()
    specs = wire_specs(prog)
    steps = zip(prog.steps, specs, specs[1:], strict=False)
    return tuple((i, _launch_key(*step)) for i, step in enumerate(steps) if traffic(*step).launches)


def _launch_key(step: Step, src: Spec, dst: Spec) -> LaunchKey:
    reduction = ""
    axes = step_axes(step, src, dst)
    match step:
        case AllGather(_, dim) if has_equal_shards(src, dim, src.mesh.axis_size(step.axes)):
            op = "all_gather"
        case AllReduce():
            op, (reduction, _) = "all_reduce", reduction_of(step, src)
        case ReduceScatter(_, dim) if has_equal_shards(dst, dim, src.mesh.axis_size(step.axes)):
            op, (reduction, _) = "reduce_scatter", reduction_of(step, src)
        case _:
            # Pieces are sent from rank to rank: the order of a group's ranks does not matter.
            op, axes = "all_to_all", tuple(sorted(axes, key=src.mesh.axes.index))
    one_group = op == "all_to_all" and src.mesh.axis_size(axes) == src.mesh.size
    along_axes = src.mesh == dst.mesh and not one_group
    among = _rank_grid(src.mesh, axes) if along_axes else _all_ranks(src.mesh, dst.mesh)
    return LaunchKey(op, among, reduction, src.dtype)


def has_equal_shards(spec: Spec, dim: int, n: int) -> bool:
    """Return True if in every group of `n` consecutive shards of a dim all have one size."""
    sizes = spec.sizes[dim] or ()
    return all(len({*sizes[i : i + n]}) == 1 for i in range(0, len(sizes), n))


@lru_cache(maxsize=4096)
def _rank_grid(mesh: Mesh, axes: tuple[str, ...]) -> Hashable:
    """Identify the groups of ranks along `axes` by devices, sizes and strides, not by names."""
    stride, strides = mesh.size, {}
    for axis, size in mesh.shape.items():
        stride //= size
        strides[axis] = stride
    grid: list[tuple[int, int]] = []
    for axis in axes:
        size, axis_stride = mesh.shape[axis], strides[axis]
        if grid and grid[-1][1] == size * axis_stride:
            grid[-1] = grid[-1][0] * size, axis_stride
        else:
            grid.append((size, axis_stride))
    return mesh.devices, tuple(grid)


@lru_cache(maxsize=256)
def _all_ranks(src: Mesh, dst: Mesh) -> Hashable:
    """Return the sorted ranks of both meshes, as a range if they are consecutive."""
    ranks = sorted({*src.ranks, *dst.ranks})
    span = range(ranks[0], ranks[-1] + 1) if ranks else range(0)
    return span if len(span) == len(ranks) else tuple(ranks)


@lru_cache(maxsize=256)
def cost_ranks(leaves: Leaves) -> Ranks:
    """Return the ranks to add up loads for: the ranks of all meshes of the leaves, sorted.

    If all shards are even and on the same devices, one rank stands for all. Otherwise one
    coordinate stands for all of an axis that divides the same dim of every spec into equal blocks,
    unless there are windows, which may differ between blocks.
    """
    specs = [spec for leaf in leaves if leaf is not None for spec in leaf.specs]
    if specs:
        first, even = specs[0].mesh, not any(any(spec.sizes) for spec in specs)
        if even and all(spec.mesh.devices == first.devices for spec in specs):
            return first.ranks[:1]
        steps = [step for leaf in leaves if leaf is not None for step in leaf.steps]
        windows = any(isinstance(step, HaloExchange | HaloReduce) for step in steps)
        if not windows and {spec.mesh for spec in specs} == {first}:
            places = {axis: {_divided_dim(spec, axis) for spec in specs} for axis in first.axes}
            others = tuple(axis for axis, dims in places.items() if len(dims) > 1 or -1 in dims)
            return tuple(sorted(first.groups(others)[0]))
    return union_ranks(spec.mesh for spec in specs)


def _divided_dim(spec: Spec, axis: str) -> int:
    """Return the dim whose major axis this is if its blocks have equal shards, -1 without one."""
    for dim, (axes, sizes) in enumerate(zip(spec.partition.dims, spec.sizes, strict=True)):
        if axes[:1] == (axis,):
            n = spec.mesh.shape[axis]
            return dim if sizes is None or sizes == sizes[: len(sizes) // n] * n else -1
    return -1


@lru_cache(maxsize=4096)
def _peak_bytes(prog: Program, ranks: Ranks) -> Vector:
    """Return each rank's most bytes that this program puts into a launch, or takes from one."""
    specs = wire_specs(prog)
    vectors = [(0,) * len(ranks)]
    for i, _ in launch_keys(prog):
        before, after = specs[i : i + 2]
        moved = step_load(prog.steps[i], before, after, ranks)
        vectors += [moved.sent, moved.received]
        vectors += [local_bytes(before, ranks), local_bytes(after, ranks)]
    return tuple(map(max, zip(*vectors, strict=True)))


@lru_cache(maxsize=256)
def buckets(leaves: Leaves, limit: int | None) -> tuple[tuple[int, ...], ...]:
    """Group the leaves in flight together: leaves with equal launch keys side by side, in order.

    No rank has more than `limit` bytes in a round of a bucket, unless a single leaf has more. Such
    leaves share a bucket if each adds to other ranks, as owners that take turns do. A leaf goes to
    the first of the last `OPEN_BUCKETS` buckets that has room.
    """
    by_keys: dict[Hashable, list[tuple[int, Program]]] = {}
    for i, leaf in enumerate(leaves):
        if leaf is not None:
            by_keys.setdefault(tuple(key for _, key in launch_keys(leaf)), []).append((i, leaf))
    ordered = [leaf for group in by_keys.values() for leaf in group]
    if limit is None:
        return (tuple(i for i, _ in ordered),) if ordered else ()
    ranks = cost_ranks(leaves)
    filled: list[_Bucket] = []
    for i, leaf in ordered:
        nbytes = _peak_bytes(leaf, ranks)
        most = max(nbytes)
        busiest = nbytes.index(most)
        if not any(b.try_add(i, nbytes, most, busiest, limit) for b in filled[-OPEN_BUCKETS:]):
            filled.append(_Bucket(i, nbytes))
    return tuple(tuple(bucket.leaves) for bucket in filled)


OPEN_BUCKETS = 32
"""Number of buckets, the last ones, that are tried for a leaf."""


class _Bucket:
    """Leaves, the bytes that each rank has of them, and the most of one rank and of one leaf."""

    __slots__ = ("filled", "largest", "leaves", "most")

    def __init__(self, leaf: int, nbytes: Vector) -> None:
        self.leaves = [leaf]
        self.filled = nbytes
        self.most = self.largest = max(nbytes)

    def try_add(self, leaf: int, nbytes: Vector, size: int, busiest: int, limit: int) -> bool:
        """Add a leaf and return True if there is room for it.

        `size` are the bytes of its `busiest` rank, which alone exclude most leaves without room.
        """
        largest = max(self.largest, size)

        def fits(most: int) -> bool:
            in_turn = 2 * (most - self.most) <= size and most <= 2 * largest
            return most <= limit or in_turn

        if not fits(max(self.most, self.filled[busiest] + size)):
            return False
        filled = tuple(map(operator.add, self.filled, nbytes))
        most = max(filled)
        if not fits(most):
            return False
        self.leaves.append(leaf)
        self.filled, self.most, self.largest = filled, most, largest
        return True


@lru_cache(maxsize=1024)
def rounds(leaves: Leaves, bucket: tuple[int, ...]) -> tuple[LeafSteps, ...]:
    """Return the collectives of each round, which no other leaf of the bucket reaches later.

    If every next collective is reached later by another leaf, the most common one goes first.
    """
    todo = {i: list(launch_keys(leaves[i])) for i in bucket if launch_keys(leaves[i])}
    result: list[LeafSteps] = []
    while todo:
        first = Counter(steps[0][1] for steps in todo.values())
        later = {key for steps in todo.values() for _, key in steps[1:]}
        ready = first.keys() - later or {first.most_common(1)[0][0]}
        launched = [i for i, steps in todo.items() if steps[0][1] in ready]
        result.append(tuple((i, todo[i].pop(0)[0]) for i in launched))
        todo = {i: steps for i, steps in todo.items() if steps}
    return tuple(result)


@lru_cache(maxsize=1024)
def coalesced(leaves: Leaves, steps: LeafSteps) -> tuple[LeafSteps, ...]:
    """Group the collectives of a round by launch.

    A large all-reduce is a launch of its own, which may run in place.
    """
    by_key: dict[Hashable, list[tuple[int, int]]] = {}
    for leaf, step in steps:
        key: Hashable = dict(launch_keys(leaves[leaf]))[step]
        if _is_large(*typed_step(leaves, leaf, step)):
            key = leaf, step
        by_key.setdefault(key, []).append((leaf, step))
    return tuple(map(tuple, by_key.values()))


def is_large_all_reduce(prog: Program) -> bool:
    """Return True for a program of one all-reduce that is not coalesced."""
    return len(prog.steps) == 1 and _is_large(prog.steps[0], prog.src, prog.dst)


def _is_large(step: Step, src: Spec, _: Spec) -> bool:
    """Return True for an all-reduce that is not coalesced, equally on all ranks."""
    return isinstance(step, AllReduce) and src.local_nbytes(src.mesh.ranks[0]) >= ALONE_BYTES


@lru_cache(maxsize=256)
def launches(leaves: Leaves, limit: int | None) -> tuple[Launch, ...]:
    """Return every launch of a batch, in order."""
    return tuple(
        _describe_launch(leaves, steps)
        for bucket in buckets(leaves, limit)
        for collectives in rounds(leaves, bucket)
        for steps in coalesced(leaves, collectives)
    )


def _describe_launch(leaves: Leaves, steps: LeafSteps) -> Launch:
    """Return the launch of several steps; its axes are those of the first step."""
    op = dict(launch_keys(leaves[steps[0][0]]))[steps[0][1]].op
    typed = [typed_step(leaves, *step) for step in steps]
    names = {step.name for step, _, _ in typed}
    ends = dict.fromkeys((before.mesh, after.mesh) for _, before, after in typed)
    name = names.pop() if len(names) == 1 else op
    return Launch(op, name, step_axes(*typed[0]), tuple(ends), steps)


def typed_step(leaves: Leaves, leaf: int, step: int) -> TypedStep:
    """Return a step of a leaf with the specs before and after it, in the dtype that is sent."""
    prog = leaves[leaf]
    assert prog is not None
    specs = wire_specs(prog)
    return prog.steps[step], specs[step], specs[step + 1]
