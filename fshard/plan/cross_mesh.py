"""Programs between two meshes: from a trainer to an inference server, or to a job of another size.

If both meshes are grids of the same devices in one order, their common refinement is a mesh on
which to plan. Otherwise one exchange sends each byte once, from the closest holder. Steps before it
(which reduce) and after it (which spread replicas, as a two-step broadcast does) are tried:
Zhuang et al., "On optimizing the communication of model parallelism" (arXiv 2211.05322).
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


def plan_between(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None = None,
    exclude: frozenset[type] = frozenset(),
    enough: float = 0.0,
) -> list[Step] | None:
    """Return the cheapest steps from `src` to `dst`, on one mesh or between two, or None.

    On one grid of devices any steps that cost at most `enough` will do.
    """
    options = topology, max_memory, exclude
    if src.mesh == dst.mesh:
        return plan_steps(src, dst, *options, enough=enough)
    fine = common_refinement(src.mesh, dst.mesh)
    if fine is not None and Remesh not in exclude:
        start, end = (
            Spec._of(fine.mesh, fine.refine(s.partition, which), s.shape, s.dtype, s.sizes)
            for which, s in enumerate((src, dst))
        )
        steps = plan_steps(start, end, *options, enough=enough)
        if steps is None:
            return None
        before: list[Step] = [Remesh(fine.mesh, start.partition)]
        after: list[Step] = [Remesh(dst.mesh, dst.partition)]
        return (before if start != src else []) + steps + (after if end != dst else [])
    if Exchange in exclude:
        return None
    return _plan_exchange_between(src, dst, *options)


def _plan_exchange_between(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None,
    exclude: frozenset[type],
) -> list[Step] | None:
    """Return one exchange between the meshes, with the steps around it that make it cheapest."""
    options = topology, max_memory, exclude
    best: list[Step] | None = None
    least = math.inf
    sources = [plan_steps(src, spec, *options) for spec in _departures(src)]
    heads: list[tuple[float, list[Step], Spec]] = []
    for before, arrival in itertools.product(sources, _arrivals(dst)):
        if before is not None:
            steps = [*before, Exchange(arrival.partition, arrival.sizes, arrival.mesh)]
            heads.append((_steps_cost(src, steps, topology, max_memory), steps, arrival))
    room = LAUNCH_COST / 2 if topology is None else 0.0
    for head_cost, steps, arrival in sorted(heads, key=lambda head: head[0]):
        if head_cost >= least:
            break
        # Search only for steps that improve on the best so far, up to ties of messages.
        after = plan_steps(arrival, dst, *options, least - head_cost + room)
        if after is not None:
            cost = head_cost + _steps_cost(arrival, after, topology, max_memory)
            if cost < least:
                best, least = [*steps, *after], cost
    return best


def _departures(src: Spec) -> Iterator[Spec]:
    """Yield the layouts that may leave the source's mesh: unreduced by one kind, or all reduced."""
    p = src.partition
    if len({kind for _, kind in p.unreduced_kinds}) < 2:
        yield src._with(partition=PartitionSpec._of(p.dims, p.unreduced_kinds))
    if p.unreduced_kinds:
        invariant = src._with(partition=PartitionSpec._of(p.dims))
        yield invariant
        yield from _sharded(invariant, tuple(axis for axis, _ in p.unreduced_kinds))


def _arrivals(dst: Spec) -> Iterator[Spec]:
    """Yield the layouts that may arrive on the target's mesh: the target, or shards to gather."""
    p = dst.partition
    yield dst._with(partition=PartitionSpec._of(p.dims, (), p.reduced_kinds))
    busy = {axis for axes in p.dims for axis in axes} | set(p.unreduced)
    free = [axis for axis in dst.mesh.axes if axis not in busy and dst.mesh.shape[axis] > 1]
    for count in range(1, len(free) + 1):
        for axes in itertools.combinations(free, count):
            reduced = tuple(item for item in p.reduced_kinds if item[0] not in axes)
            yield from _sharded(dst._with(partition=PartitionSpec._of(p.dims, (), reduced)), axes)


def _sharded(spec: Spec, axes: tuple[str, ...]) -> Iterator[Spec]:
    """Yield the spec with one dim sharded over `axes` as well, for each dim that they divide."""
    p, n = spec.partition, spec.mesh.axis_size(axes)
    for dim, dim_axes in enumerate(p.dims):
        if spec.sizes[dim] is None and spec.shape[dim] % (spec.dim_shards(dim) * n) == 0:
            dims = (*p.dims[:dim], (*dim_axes, *axes), *p.dims[dim + 1 :])
            yield spec._with(partition=PartitionSpec._of(dims, p.unreduced_kinds, p.reduced_kinds))


def _steps_cost(
    src: Spec, steps: list[Step], topology: Topology | None, max_memory: int | None
) -> float:
    """Return the seconds, or bytes and launches, of steps; infinite above `max_memory`."""
    cost, spec = 0.0, src
    for step in steps:
        after = infer(step, spec)
        if max_memory is not None and max_local_nbytes(after) > max_memory:
            return math.inf
        if topology is not None:
            cost += step_time(topology, step, spec, after)
        else:
            moved = traffic(step, spec, after)
            cost += moved.received + LAUNCH_COST * moved.launches
        spec = after
    return cost
