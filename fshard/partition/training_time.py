"""Modelled time of a training step, by which choices of layouts are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import is_inexact
from fshard.layout.mesh import Mesh
from fshard.ops.propagate.role_costs import compute_time
from fshard.ops.strategy.axis_roles import factor_sizes
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.functionalize import has_no_gradient
from fshard.partition.ir import (
    Line,
    Operation,
    Redistribution,
    RegionCall,
    backward_plans,
    backward_programs,
    forward_plans,
    operands_of,
    plan_time,
)
from fshard.program.cost.topology import Topology
from fshard.program.program import program_time

FORWARD_AND_BACKWARD = 3
"""Work of a step by that of its forward pass: a gradient takes about two products for each."""


class StepTime(NamedTuple):
    """Modelled seconds of a step, forward and backward.

    Attributes:
        compute: seconds of operations, and of mapped functions with what they hide.
        activations: seconds of collectives that operations wait for.
        arguments: seconds of collectives of arguments and their gradients, as the gathers of
            sharded parameters and the reductions of gradients.
    """

    compute: float
    activations: float
    arguments: float

    @property
    def in_turn(self) -> float:
        """Seconds of the step if nothing overlaps."""
        return self.compute + self.activations + self.arguments

    def overlapped(self, share: float) -> float:
        """Return the seconds of the step if collectives of arguments run beside the computation.

        Gathers are launched ahead of their uses, and reductions in buckets while the backward pass
        goes on (PyTorch DDP, arXiv 2006.15704; FSDP, arXiv 2304.11277).

        Args:
            share: share of a collective's time in which a device computes on (`Topology.overlap`).
        """
        busy = self.compute + (1 - share) * self.arguments
        return self.activations + max(busy, self.arguments)


def step_times(
    lines: Iterable[Line], mesh: Mesh, topology: Topology, *, grad: bool, inputs: Mapping[int, bool]
) -> StepTime:
    """Return the modelled seconds of a step.

    Args:
        lines: the lines.
        mesh: the mesh that they run on.
        topology: the topology that they are costed on.
        grad: True to include the backward pass.
        inputs: the values of the arguments, and True for one whose gradient is requested.
    """
    compute = activations = arguments = 0.0
    arguments_of, differentiated = (
        {*inputs},
        {value for value, has in inputs.items() if has and grad},
    )
    for line in lines:
        has_gradient = not differentiated.isdisjoint(operands_of(line))
        if has_gradient and not (isinstance(line, Operation) and _is_constant(line.strategy)):
            differentiated.add(getattr(line, "out", -1))
        if isinstance(line, Operation):
            passes = FORWARD_AND_BACKWARD if line.out in differentiated else 1
            compute += passes * local_compute_time(line.strategy, mesh, topology)
        elif isinstance(line, RegionCall):
            compute += region_time(line, topology)
            continue
        time = sum(program_time(prog, topology) for prog in backward_programs(line))
        if isinstance(line, Redistribution):
            time += program_time(line.program, topology)
            if line.source.value in arguments_of:
                arguments_of.add(line.out)
                arguments += time
                continue
        activations += time
    return StepTime(compute, activations, arguments)


def _is_constant(strategy: Strategy) -> bool:
    """Return True if no result of an operation has a gradient."""
    metas = [meta for meta in strategy.call.results if meta is not None]
    return has_no_gradient(strategy.op) or not any(map(is_inexact, metas))


def region_time(line: RegionCall, topology: Topology) -> float:
    """Return the seconds of a mapped function: its products, and the collectives beside them.

    Backward, one of a product's two gradients is computed in parts, too. The work of a function
    that is not a product in parts is unknown, and counts as none.
    """
    mesh = line.region.in_specs[0].mesh
    once = sum(local_compute_time(product, mesh, topology) for product in line.products)
    parts = max(once, line.steps * line.step_bytes / topology.memory)
    total = 0.0 if line.grads is None else once
    for plans in (forward_plans(line), backward_plans(line))[: 1 if line.grads is None else 2]:
        sent = sum(plan_time(plan, topology) for plan in plans)
        total += sent + parts - topology.overlap * min(sent, parts * (1 - 1 / line.steps))
    return total


@lru_cache(maxsize=CACHE_SIZE)
def local_compute_time(strategy: Strategy, mesh: Mesh, topology: Topology) -> float:
    """Return the seconds that a rank computes for one operation."""
    sizes = factor_sizes(strategy.rule, strategy.call)
    products, tensors = compute_time(topology, strategy.rule, strategy.call, sizes)
    for axis, role in strategy.roles:
        n = mesh.shape[axis]
        products /= n if role.factor is not None else 1
        tensors = tuple(
            time / n if state is not None and state.name in ("sharded", "any") else time
            for time, state in zip(tensors, (*role.operands, *role.results), strict=True)
        )
    return max(products, sum(tensors))
