"""Modelled time of a training step, by which choices of layouts are compared."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.ops.propagate.role_costs import compute_time
from fshard.ops.strategy.axis_roles import factor_sizes
from fshard.ops.strategy.strategy import Strategy
from fshard.partition.ir import Line, Operation, Redistribution, backward_programs
from fshard.program.cost.topology import Topology

FORWARD_AND_BACKWARD = 3
"""Work of a step by that of its forward pass: a gradient takes about two products for each."""


def lines_time(lines: Iterable[Line], mesh: Mesh, topology: Topology, *, grad: bool) -> float:
    """Return the modelled seconds of a step: programs, their transposes, and computation.

    With `grad`, the computation of the backward pass is included.
    """
    passes = FORWARD_AND_BACKWARD if grad else 1
    total = 0.0
    for line in lines:
        if isinstance(line, Operation):
            total += passes * _local_compute_time(line.strategy, mesh, topology)
        elif isinstance(line, Redistribution):
            total += line.program.cost(topology).time
        total += sum(prog.cost(topology).time for prog in backward_programs(line))
    return total


@lru_cache(maxsize=CACHE_SIZE)
def _local_compute_time(strategy: Strategy, mesh: Mesh, topology: Topology) -> float:
    """Return the seconds that a rank computes for one operation."""
    sizes = factor_sizes(strategy.rule, strategy.call)
    time = compute_time(topology, strategy.rule, strategy.call, sizes)
    for axis, role in strategy.roles:
        time /= mesh.shape[axis] if role.factor is not None else 1
    return time
