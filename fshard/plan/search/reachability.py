"""What the steps that may be used cannot reach, seen at once: else all layouts would be searched.

A step changes the states of axes, in ways that its type fixes; a permutation of devices has axes
trade places, of equally many devices. So where no step leads out of some states the devices along
the axes in them never become fewer: where the goal has fewer, nothing leads to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from fshard.layout.spec import Spec
from fshard.plan.search.problem import subsets
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
)

__all__ = ["is_out_of_reach"]

WAYS = {
    AllGather: ("sharded invariant", "sharded reduced"),
    AllSlice: ("invariant sharded", "reduced sharded"),
    AllReduce: ("unreduced invariant", "unreduced reduced"),
    ReduceScatter: ("unreduced sharded",),
    Exchange: (
        "sharded invariant", "sharded reduced", "sharded unreduced", "invariant sharded",
        "invariant reduced", "unreduced sharded", "unreduced invariant", "unreduced reduced",
        "reduced sharded",
    ),
    InvariantToReduced: ("invariant reduced",),
    ReducedToInvariant: ("reduced invariant",),
    ReplicatedToUnreduced: ("invariant unreduced", "reduced unreduced"),
    ShardedToUnreduced: ("sharded unreduced", "reduced sharded"),
}  # fmt: skip
"""From which state to which the steps of a type bring axes; the other types keep the states."""

STATES = ("sharded", "invariant", "reduced", "unreduced")


def is_out_of_reach(src: Spec, dst: Spec, exclude: Collection[type]) -> bool:
    """Whether no steps but the excluded ones lead from `src` to `dst`, by the states of axes alone.

    False says nothing: what the steps need besides is not looked at.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> src = Spec(Mesh(x=4), P("x"), shape=(8,))
    >>> whole = src.replace(partition=P())
    >>> is_out_of_reach(src, whole, {AllGather, Exchange})
    False
    >>> is_out_of_reach(src, whole, {AllGather, Exchange, ShardedToUnreduced})
    True
    """
    ways = [each.split() for kind, all_ in WAYS.items() if kind not in exclude for each in all_]
    before, after = _devices(src), _devices(dst)
    for states in subsets(STATES):
        had, has = (math.prod(end[each] for each in states) for end in (before, after))
        if has < had and all(there in states for here, there in ways if here in states):
            return True
    return False


def _devices(spec: Spec) -> dict[str, int]:
    """How many devices there are along the axes in each state."""
    p, axis_size = spec.partition, spec.mesh.axis_size
    found = {
        "sharded": spec.num_shards,
        "reduced": axis_size(tuple(p.reduced)),
        "unreduced": axis_size(tuple(p.unreduced)),
    }
    return {**found, "invariant": spec.mesh.size // math.prod(found.values())}
