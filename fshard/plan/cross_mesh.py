"""Programs between two meshes: from a trainer to an inference engine, to a larger or smaller job.

Where both are grids of the same devices in one order, a common refinement of the two is a mesh on
which to plan. Else one exchange goes from devices to devices, each byte once, from the best placed
holder. What is best done before (to reduce) and after it (to spread what many devices are to
hold, as a broadcast in two steps does) is tried out: Zhuang et al., "On optimizing the
communication of model parallelism" (arXiv 2211.05322).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.refinement import common_refinement
from fshard.layout.spec import Spec
from fshard.plan.search.problem import LAUNCH_COST
from fshard.plan.split_axes import plan_steps
from fshard.program.cost.model import step_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes, traffic
from fshard.program.infer import infer
from fshard.program.steps import Exchange, Remesh, Step

__all__ = ["plan_between"]


def plan_between(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None = None,
    exclude: frozenset[type] = frozenset(),
) -> list[Step] | None:
    """The cheapest steps from `src` to `dst`, of one mesh or of two."""
    options = topology, max_memory, exclude
    if src.mesh == dst.mesh:
        return plan_steps(src, dst, *options)
    fine = common_refinement(src.mesh, dst.mesh)
    if fine is not None and Remesh not in exclude:
        here, there = (
            Spec._of(fine.mesh, fine.refine(end.partition, which), end.shape, end.dtype, end.sizes)
            for which, end in enumerate((src, dst))
        )
        found = plan_steps(here, there, *options)
        if found is None:
            return None
        before: list[Step] = [Remesh(fine.mesh, here.partition)]
        after: list[Step] = [Remesh(dst.mesh, dst.partition)]
        return (before if here != src else []) + found + (after if there != dst else [])
    if Exchange in exclude:
        return None
    return _across(src, dst, *options)


def _across(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None,
    exclude: frozenset[type],
) -> list[Step] | None:
    """One exchange between the meshes, with the steps before and after it that make it cheapest."""
    options = topology, max_memory, exclude
    best: list[Step] | None = None
    least = math.inf
    sources = [plan_steps(src, each, *options) for each in _reduced(src)]
    heads: list[tuple[float, list[Step], Spec]] = []
    for before, there in itertools.product(sources, _narrower(dst)):
        if before is not None:
            steps = [*before, Exchange(there.partition, there.sizes, there.mesh)]
            heads.append((_weight(src, steps, topology, max_memory), steps, there))
    room = LAUNCH_COST / 2 if topology is None else 0.0
    for head, steps, there in sorted(heads, key=lambda each: each[0]):
        if head >= least:
            break
        # Only what is better than the best so far is looked for, ties of messages apart.
        after = plan_steps(there, dst, *options, least - head + room)
        if after is not None:
            weight = head + _weight(there, after, topology, max_memory)
            if weight < least:
                best, least = [*steps, *after], weight
    return best


def _reduced(src: Spec) -> Iterator[Spec]:
    """What may leave the source's mesh: addends of one kind, or with all that is reduced."""
    p = src.partition
    if len({kind for _, kind in p.unreduced_kinds}) < 2:
        yield src._with(partition=PartitionSpec._of(p.dims, p.unreduced_kinds))
    if p.unreduced_kinds:
        bare = src._with(partition=PartitionSpec._of(p.dims))
        yield bare
        yield from _sharded(bare, tuple(axis for axis, _ in p.unreduced_kinds))


def _narrower(dst: Spec) -> Iterator[Spec]:
    """What may arrive on the target's mesh: the target, or shards to be gathered there."""
    p = dst.partition
    bare = dst._with(partition=PartitionSpec._of(p.dims, (), p.reduced_kinds))
    yield bare
    busy = {axis for axes in p.dims for axis in axes} | set(p.unreduced)
    free = [axis for axis in dst.mesh.axes if axis not in busy and dst.mesh.shape[axis] > 1]
    for count in range(1, len(free) + 1):
        for axes in itertools.combinations(free, count):
            kept = tuple(each for each in p.reduced_kinds if each[0] not in axes)
            yield from _sharded(dst._with(partition=PartitionSpec._of(p.dims, (), kept)), axes)


def _sharded(spec: Spec, axes: tuple[str, ...]) -> Iterator[Spec]:
    """The spec with a dim more finely sharded, each dim in turn that allows it evenly."""
    p, n = spec.partition, spec.mesh.axis_size(axes)
    for dim, mine in enumerate(p.dims):
        if spec.sizes[dim] is None and spec.shape[dim] % (spec.dim_shards(dim) * n) == 0:
            dims = (*p.dims[:dim], (*mine, *axes), *p.dims[dim + 1 :])
            yield spec._with(partition=PartitionSpec._of(dims, p.unreduced_kinds, p.reduced_kinds))


def _weight(
    src: Spec, steps: list[Step], topology: Topology | None, max_memory: int | None
) -> float:
    """Seconds, or bytes and then launches; infinite where a layout on the way is too large."""
    weight, spec = 0.0, src
    for step in steps:
        after = infer(step, spec)
        if max_memory is not None and max_local_nbytes(after) > max_memory:
            return math.inf
        if topology is not None:
            weight += step_time(topology, step, spec, after)
        else:
            moved = traffic(step, spec, after)
            weight += moved.received + LAUNCH_COST * moved.launches
        spec = after
    return weight
