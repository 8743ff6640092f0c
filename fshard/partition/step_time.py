"""What lines of a function take: the modelled time of a step, which ways are compared by."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from fshard.layout.mesh import Mesh
from fshard.ops.propagate.role_costs import compute_time
from fshard.ops.strategy.axis_roles import factor_sizes
from fshard.ops.strategy.strategy import Strategy
from fshard.partition.ir import Line, Move, Operation
from fshard.program.cost.topology import Topology

__all__ = ["lines_time"]

FORWARD_AND_BACKWARD = 3
"""A gradient takes about two products for each of the forward pass."""


def lines_time(lines: Iterable[Line], mesh: Mesh, topology: Topology, *, grad: bool) -> float:
    """Modelled seconds of a step: programs and their transposes, and what ranks compute."""
    times = FORWARD_AND_BACKWARD if grad else 1
    total = 0.0
    for line in lines:
        if isinstance(line, Operation):
            total += times * _work(line.strategy, mesh, topology)
        elif isinstance(line, Move):
            total += line.program.cost(topology).time
            if line.grad and line.program.is_linear:
                total += line.program.T.cost(topology).time
    return total


@lru_cache(maxsize=16384)
def _work(strategy: Strategy, mesh: Mesh, topology: Topology) -> float:
    """Seconds that a rank computes for one operation."""
    sizes = factor_sizes(strategy.rule, strategy.call)
    whole = compute_time(topology, strategy.rule, strategy.call, sizes)
    for axis, role in strategy.roles:
        whole /= mesh.shape[axis] if role.factor is not None else 1
    return whole
