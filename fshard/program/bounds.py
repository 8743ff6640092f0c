"""`lower_bound`: what any program between two specs must receive and hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from fshard.errors import raise_if
from fshard.program.cost import max_local_nbytes
from fshard.program.overlap import overlaps
from fshard.program.program import endpoint_problems, wire_problems
from fshard.spec import Spec

__all__ = ["Bound", "lower_bound"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Of the busiest rank: bytes that any program receives, and holds at some time."""

    bytes_received: int
    peak_memory: int


def lower_bound(src: Spec, dst: Spec, /, *, forward_dtype: torch.dtype | None = None) -> Bound:
    """Bytes that the busiest rank must receive and hold on the way from `src` to `dst`.

    A group of ranks that hold one tensor between them (the addends of an unreduced target, or
    a single rank) must receive every element it does not hold complete; and an element with c
    addends on other ranks that ends on t ranks takes (c-1) + (t-1) messages. Both are bounds,
    the result is the larger. With `forward_dtype` they are those of a program that sends it.
    Boxes after Rink et al. (arXiv 2112.01075), reductions after Patarasu and Yuan (2009).

    For even shards it is 0 exactly where a program without communication exists. Uneven sizes
    can make it 0 by coincidence (each rank happens to hold what it needs) where the steps,
    which know axes only, still move something.

    Raises `ShardingError` where the global shapes or the meshes differ.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> mesh = Mesh(x=4)
    >>> lower_bound(Spec(mesh, P(unreduced={"x"}), shape=(8,)), Spec(mesh, P(), shape=(8,)))
    Bound(bytes_received=48, peak_memory=32)
    """
    raise_if("fs.lower_bound", endpoint_problems("lower_bound", src, dst))
    raise_if("fs.lower_bound", wire_problems(src, (forward_dtype,)))
    return _lower_bound(src, dst, forward_dtype)


@lru_cache(maxsize=4096)
def _lower_bound(src: Spec, dst: Spec, wire: torch.dtype | None) -> Bound:
    if wire is not None:
        src, dst = src._with(dtype=wire), dst._with(dtype=wire)
    item = min(src.dtype.itemsize, dst.dtype.itemsize)
    mesh, shape = src.mesh, src.mesh.shape
    kept = {
        axis for axis, _ in set(src.partition.unreduced_kinds) & set(dst.partition.unreduced_kinds)
    }
    addends = math.prod(shape[a] for a, _ in src.partition.unreduced_kinds if a not in kept)
    group = tuple(a for a, _ in dst.partition.unreduced_kinds if shape[a] > 1)
    members = math.prod(shape[axis] for axis in group)
    if addends > 1:
        missing = max_local_nbytes(dst) // dst.dtype.itemsize
    else:
        missing = max(total - held for total, held in overlaps(src, dst, group))
    received = -(-missing // members)
    if addends > 1:
        copies = mesh.size // members // dst.num_shards
        messages = (addends - 1) + (copies - 1)
        received = max(received, -(-math.prod(src.shape) * messages // mesh.size))
    peak = max(max_local_nbytes(src), max_local_nbytes(dst))
    return Bound(received * item, peak)
