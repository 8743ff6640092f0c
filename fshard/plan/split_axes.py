"""Programs along parts of axes: an axis of 16 over two nodes as 2 between them and 8 inside each.

A finer grid of the same devices has more layouts. It is searched where it can pay: if an axis
leaves a node with part of its length, and if exchanges are excluded, which otherwise reach the
bound on any grid (Rink et al., arXiv 2112.01075, factor all axes into primes).
"""

from __future__ import annotations

import math
from functools import lru_cache

from fshard.layout.mesh import Mesh
from fshard.layout.refinement import Refinement, common_refinement, prime_refinement
from fshard.layout.spec import Spec
from fshard.plan.search.astar import search
from fshard.plan.search.problem import SearchProblem
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.program.steps import Exchange, Remesh, Step

MAX_AXES = 5
"""Most axes of a finer grid: more would make planning noticeably slow."""


def plan_steps(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None = None,
    exclude: frozenset[type] = frozenset(),
    limit: float = math.inf,
    enough: float = 0.0,
) -> list[Step] | None:
    """Return the cheapest steps from `src` to `dst`, along axes of the mesh or parts of them.

    Any that cost at most `enough` will do. None if there are none within the restrictions, or none
    that cost less than `limit`.
    """
    best = search(src, dst, topology, max_memory, exclude, limit, enough)
    if best is not None and best[1] <= enough:
        return best[0]
    fine = node_refinement(src.mesh, topology, Exchange in exclude)
    if fine is None or Remesh in exclude or (best and Program(src, best[0]).is_local):
        return best[0] if best else None
    # A program on the finer mesh has two more steps, so it must save at least 1 %.
    limit = best[1] * 0.99 if best else limit
    start, end = (_refined(spec, fine) for spec in (src, dst))
    finer = search(start, end, topology, max_memory, exclude, limit, enough)
    if finer is None:
        return best[0] if best else None
    return [Remesh(fine.mesh, start.partition), *finer[0], Remesh(src.mesh, dst.partition)]


def least_cost(src: Spec, dst: Spec, topology: Topology) -> float:
    """Return a lower bound of the seconds of `plan_steps`, without a search."""
    problem = SearchProblem(src, dst, topology, None, frozenset())
    least = problem.bound(problem.start)
    fine = node_refinement(src.mesh, topology, False) if least else None
    if fine is None:
        return least
    problem = SearchProblem(_refined(src, fine), _refined(dst, fine), topology, None, frozenset())
    return min(least, problem.bound(problem.start))


def _refined(spec: Spec, fine: Refinement) -> Spec:
    """Return a spec on a finer grid of its devices."""
    p = fine.refine(spec.partition)
    return Spec._of(fine.mesh, p, spec.shape, spec.dtype, spec.sizes)


@lru_cache(maxsize=1024)
def node_refinement(mesh: Mesh, topology: Topology | None, primes: bool) -> Refinement | None:
    """Return a finer grid on which better programs may exist, or None."""
    if primes:
        fine = prime_refinement(mesh)
    else:
        grid = _node_mesh(mesh, topology)
        refinement = None if grid is None else common_refinement(mesh, grid)
        if refinement is None:
            return None
        fine = refinement
    num_axes = sum(size > 1 for size in fine.mesh.sizes)
    return fine if num_axes <= MAX_AXES and len(fine.mesh.axes) > len(mesh.axes) else None


def _node_mesh(mesh: Mesh, topology: Topology | None) -> Mesh | None:
    """Return the devices as a mesh (node, place), if the ranks fill one node after the other."""
    size = topology.node_size if topology is not None else None
    devices = mesh.devices
    if size is None or not isinstance(devices, range) or devices.step != 1:
        return None
    if devices.start % size or mesh.size % size or mesh.size == size:
        return None
    return Mesh({"node": mesh.size // size, "place": size}, devices=devices)
