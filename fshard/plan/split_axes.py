"""Programs along sub-axes: an axis of 16 over two nodes as 2 between them and 8 inside each.

A finer grid of the same devices has more layouts on the way. It is searched where that can pay:
where an axis leaves a node with part of its length, and where exchanges are not to be used, which
else reach the bound on any grid (Rink et al., arXiv 2112.01075, factor all axes into primes).
"""

from __future__ import annotations

import math
from functools import lru_cache

from fshard.layout.mesh import Mesh
from fshard.layout.refinement import Refinement, common_refinement, prime_refinement
from fshard.layout.spec import Spec
from fshard.plan.search.astar import search
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.program.steps import Exchange, Remesh, Step

__all__ = ["plan_steps"]

MOST_AXES = 5
"""Grids with more axes are not searched: planning would be felt."""


def plan_steps(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None = None,
    exclude: frozenset[type] = frozenset(),
    most: float = math.inf,
) -> list[Step] | None:
    """The cheapest steps from `src` to `dst`, along axes of the mesh or parts of them.

    `None` where there are none within the restrictions, or none that weigh less than `most`.
    """
    found = search(src, dst, topology, max_memory, exclude, most)
    fine = _refinement(src.mesh, topology, Exchange in exclude)
    if fine is None or Remesh in exclude or (found and Program(src, found[0]).is_local):
        return found[0] if found else None
    # A mesh of sub-axes is worth its two more lines only where it saves something.
    most = found[1] * 0.99 if found else most
    finer = search(_on(fine, src), _on(fine, dst), topology, max_memory, exclude, most)
    if finer is None:
        return found[0] if found else None
    there, back = Remesh(fine.mesh, fine.refine(src.partition)), Remesh(src.mesh, dst.partition)
    return [there, *finer[0], back]


def _on(fine: Refinement, spec: Spec) -> Spec:
    return Spec._of(fine.mesh, fine.refine(spec.partition), spec.shape, spec.dtype, spec.sizes)


@lru_cache(maxsize=1024)
def _refinement(mesh: Mesh, topology: Topology | None, primes: bool) -> Refinement | None:
    """A finer grid on which better programs may be found; None where there is none."""
    if primes:
        fine = prime_refinement(mesh)
    else:
        grid = _nodes(mesh, topology)
        found = None if grid is None else common_refinement(mesh, grid)
        if found is None:
            return None
        fine = found
    axes = sum(size > 1 for size in fine.mesh.sizes)
    return fine if axes <= MOST_AXES and len(fine.mesh.axes) > len(mesh.axes) else None


def _nodes(mesh: Mesh, topology: Topology | None) -> Mesh | None:
    """The devices as nodes by places in a node, where nodes are filled one after the other."""
    size = topology.node_size if topology is not None else None
    devices = mesh.devices
    if size is None or not isinstance(devices, range) or devices.step != 1:
        return None
    if devices.start % size or mesh.size % size or mesh.size == size:
        return None
    return Mesh({"node": mesh.size // size, "place": size}, devices=devices)
