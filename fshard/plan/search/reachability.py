"""Reachability: reject goals that the allowed steps cannot reach, without a search.

A step changes the states of axes, and its type fixes from which to which. A permutation of devices
exchanges axes of equally many devices. If no step leads out of a set of states, the devices along
the axes in these states never become fewer: a goal that has fewer is unreachable. Axes that shard
different dims are in different states.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from fshard.layout.spec import Spec
from fshard.plan.search.search_layout import subsets
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
)

TRANSITIONS = {
    AllGather: ("sharded invariant", "sharded reduced"),
    AllSlice: ("invariant sharded", "reduced sharded"),
    AllReduce: ("unreduced invariant", "unreduced reduced"),
    AllToAll: ("sharded sharded",),
    ReduceScatter: ("unreduced sharded",),
    Exchange: (
        "sharded invariant", "sharded reduced", "sharded unreduced", "sharded sharded",
        "invariant sharded", "invariant reduced", "unreduced sharded", "unreduced invariant",
        "unreduced reduced", "reduced sharded",
    ),
    InvariantToReduced: ("invariant reduced",),
    ReducedToInvariant: ("reduced invariant",),
    ReplicatedToUnreduced: ("invariant unreduced", "reduced unreduced"),
    ShardedToUnreduced: ("sharded unreduced", "reduced sharded"),
}  # fmt: skip
"""State before and after, by step type; types that are not listed keep the states of axes."""


def is_unreachable(src: Spec, dst: Spec, exclude: Collection[type]) -> bool:
    """Return True if no steps but the excluded ones lead from `src` to `dst`, by states of axes.

    Axes become unreduced only if an end is unreduced: the search adds no zeros to move elements.
    False does not mean that `dst` is reachable: other requirements of steps are not checked.

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(x=4), fs.P("x"), shape=(8,))
    >>> replicated = src.replace(partition=fs.P())
    >>> is_unreachable(src, replicated, {AllGather})
    False
    >>> is_unreachable(src, replicated, {AllGather, Exchange})
    True
    """
    sums = bool({*src.partition.unreduced, *dst.partition.unreduced})
    allowed = [
        (old, new)
        for step, texts in TRANSITIONS.items()
        if step not in exclude
        for old, new in map(str.split, texts)
        if sums or new != "unreduced"
    ]
    before, after = _devices_by_state(src), _devices_by_state(dst)
    for states in subsets([state for state, n in before.items() if n > 1]):
        reached, found = {*states}, {*states}
        while found:
            found = {b for a in found for b in after if (_kind(a), _kind(b)) in allowed} - reached
            reached |= found
        if math.prod(after[s] for s in reached) < math.prod(before[s] for s in reached):
            return True
    return False


def _kind(state: str) -> str:
    """Return the state without the dim."""
    return state.split()[0]


def _devices_by_state(spec: Spec) -> dict[str, int]:
    """Return the number of devices along the axes in each state, "sharded 0" that of dim 0."""
    p, axis_size = spec.partition, spec.mesh.axis_size
    devices = {
        **{f"sharded {dim}": spec.dim_shards(dim) for dim in range(spec.ndim)},
        "reduced": axis_size(tuple(p.reduced)),
        "unreduced": axis_size(tuple(p.unreduced)),
    }
    return {**devices, "invariant": spec.mesh.size // math.prod(devices.values())}
