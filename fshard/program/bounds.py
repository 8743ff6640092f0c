"""`lower_bound`: what any program between two specs must receive and hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from fshard.program.cost import max_local_nbytes
from fshard.spec import Spec

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the busiest rank: bytes that any program receives, and holds at some time."""

    bytes_received: int
    peak_memory: int


def lower_bound(src: Spec, dst: Spec, /) -> Bound:
    """Bytes that the busiest rank must receive and hold on the way from `src` to `dst`.

    A group of ranks that hold one tensor between them (the addends of an unreduced target, or
    a single rank) must receive every element it does not hold complete; and an element with c
    addends on other ranks that ends on t ranks takes (c-1) + (t-1) messages. Both are bounds,
    the result is the larger. It is 0 exactly where a program without communication exists.
    Boxes after Rink et al. (arXiv 2112.01075), reductions after Patarasu and Yuan (2009).

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> mesh = Mesh(x=4)
    >>> lower_bound(Spec(mesh, P(unreduced={"x"}), shape=(8,)), Spec(mesh, P(), shape=(8,)))
    Bound(bytes_received=48, peak_memory=32)
    """
    return _lower_bound(src, dst)


@lru_cache(maxsize=4096)
def _lower_bound(src: Spec, dst: Spec) -> Bound:
    item = min(src.dtype.itemsize, dst.dtype.itemsize)
    mesh, shape = src.mesh, src.mesh.shape
    kept = {
        axis for axis, _ in set(src.partition.unreduced_kinds) & set(dst.partition.unreduced_kinds)
    }
    addends = math.prod(shape[a] for a, _ in src.partition.unreduced_kinds if a not in kept)
    group = tuple(a for a, _ in dst.partition.unreduced_kinds if shape[a] > 1)
    numel = math.prod(src.shape)
    total, covered = _volumes(src, dst, group)
    missing = total if addends > 1 else total - covered
    members = math.prod(shape[axis] for axis in group)
    received = -(-int(missing.max()) // members) if len(missing) else 0
    if addends > 1:
        copies = mesh.size // members // dst.num_shards
        messages = (addends - 1) + (copies - 1)
        received = max(received, -(-numel * messages // mesh.size))
    peak = max(max_local_nbytes(src), max_local_nbytes(dst))
    return Bound(received * item, peak)


def _volumes(src: Spec, dst: Spec, group: tuple[str, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Per rank: the elements of its target box, and how many its group holds complete.

    `group` are the axes along which the target is unreduced: they do not cut the target, and
    where they cut the source the group's boxes are a product of unions of intervals.
    """
    mesh = src.mesh
    coords = torch.cartesian_prod(*(torch.arange(n) for n in (1, 1, *mesh.sizes))).unbind(1)
    place = dict(zip(mesh.axes, coords[2:], strict=True))
    ones = torch.ones(mesh.size, dtype=torch.int64)
    total, covered = ones, ones
    for dim in range(dst.ndim):
        low, high = _interval(dst, dim, place)
        total = total * (high - low)
        inside = torch.zeros_like(ones)
        swept = [axis for axis in src.partition.dims[dim] if axis in group]
        # Walk the group's coordinates along this dim: disjoint intervals, so lengths add up.
        for at in range(math.prod(mesh.shape[axis] for axis in swept)):
            here, rest = dict(place), at
            for axis in reversed(swept):
                rest, mine = divmod(rest, mesh.shape[axis])
                here[axis] = torch.full_like(ones, mine)
            start, stop = _interval(src, dim, here)
            inside += (torch.minimum(high, stop) - torch.maximum(low, start)).clamp(min=0)
        covered = covered * inside
    return total, covered


def _interval(
    spec: Spec, dim: int, place: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    shard = torch.zeros((), dtype=torch.int64)
    for axis in spec.partition.dims[dim]:
        shard = shard * spec.mesh.shape[axis] + place[axis]
    sizes = spec.sizes[dim]
    if sizes is None:
        width = spec.shape[dim] // spec.dim_shards(dim)
        return shard * width, (shard + 1) * width
    stops = torch.tensor(sizes).cumsum(0)
    stop = stops[shard]
    return stop - torch.tensor(sizes)[shard], stop
