"""Adjoints of steps: `transpose(step, src)` returns the step that maps cotangents back.

With `<x, y>` the pairing of a spec with its dual (sharded: the sum over shards; invariant: once;
reduced with unreduced: the sum over ranks), `<A x, y> == <x, A.T y>`. The table is that of JAX's
JEP 17111 (unreduced and reduced types), completed for averages.
"""

from __future__ import annotations

from typing import assert_never

import torch

from fshard._util.dtypes import is_inexact_dtype
from fshard._util.errors import fail
from fshard.layout.partition_spec import LINEAR
from fshard.layout.spec import Spec
from fshard.program.halo_boxes import reversed_halo
from fshard.program.infer import replicated_kind, reverse_all_to_all, unreduced_kind
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    HaloExchange,
    HaloReduce,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)


def is_linear(step: Step, src: Spec) -> bool:
    """Return True if the step, applied to `src`, is a linear map."""
    match step:
        case AllReduce() | ReduceScatter():
            return unreduced_kind(step, src, step.axes) in LINEAR
        case Exchange():
            after = step.partition.unreduced_kinds if step.mesh in (None, src.mesh) else ()
            # States of one side alone are reduced, or embedded in neutral elements.
            return all(kind in LINEAR for _, kind in {*src.partition.unreduced_kinds} ^ {*after})
        case ReplicatedToUnreduced() | ShardedToUnreduced():
            return step.kind in LINEAR
        case Cast():
            return (
                step.dtype == src.dtype
                or _linear_kind(step.dtype) == _linear_kind(src.dtype) != "bool"
            )
        case _:
            return True


def _linear_kind(dtype: torch.dtype) -> str:
    """Return the kind of dtype within which casts are linear both ways."""
    if dtype == torch.bool:
        return "bool"
    return "inexact" if is_inexact_dtype(dtype) else "integer"


def transpose(step: Step, src: Spec, /) -> Step:
    """Return the adjoint of `step` on `src`: a step from the dual of its result to `src.dual`.

    It raises `ShardingError` for a reduction or a cast that is not linear.
    """
    if not is_linear(step, src):
        rule = "a reduction must be a sum or an average to be linear"
        fix = "differentiate by running the program: max and min have a gradient, no transpose"
        if isinstance(step, Cast):
            rule = "a cast must be between floating dtypes, or between integers, to be linear"
            fix = "split the program at the cast"
        fail("transpose", f"{step} of {src}", rule, fix)
    match step:
        case AllGather(axes, dim, "reduced"):
            return ReduceScatter(axes, dim, src.sizes[dim])
        case AllGather(axes, dim):
            return AllSlice(axes, dim, src.sizes[dim])
        case AllSlice(axes, dim):
            kind = replicated_kind(step, src, axes)
            if kind is None:
                return AllGather(axes, dim)
            return ShardedToUnreduced(axes, dim, kind)
        case AllReduce(axes, "reduced"):
            return AllReduce(axes, "reduced", unreduced_kind(step, src, axes))
        case AllReduce(axes):
            return InvariantToReduced(axes, unreduced_kind(step, src, axes))
        case ReduceScatter(axes, dim):
            return AllGather(axes, dim, "reduced", unreduced_kind(step, src, axes))
        case AllToAll():
            return reverse_all_to_all(step, src)
        case CollectivePermute():
            return CollectivePermute(src.dual.partition)
        case Exchange():
            mesh = None if step.mesh in (None, src.mesh) else src.mesh
            return Exchange(src.dual.partition, src.sizes, mesh)
        case HaloExchange() | HaloReduce():
            return reversed_halo(step, src)
        case Remesh():
            return Remesh(src.mesh, src.dual.partition)
        case InvariantToReduced(axes):
            return AllReduce(axes)
        case ReducedToInvariant(axes):
            return ReplicatedToUnreduced(axes, replicated_kind(step, src, axes) or "sum")
        case ReplicatedToUnreduced(axes):
            kind = replicated_kind(step, src, axes)
            return ReducedToInvariant(axes) if kind is None else ReplicatedToUnreduced(axes, kind)
        case ShardedToUnreduced(axes, dim, _, by) if by:
            return ShardedToUnreduced(by, dim, replicated_kind(step, src, by) or "sum", axes)
        case ShardedToUnreduced(axes, dim):
            return AllSlice(axes, dim, src.sizes[dim])
        case Cast():
            return Cast(src.dtype)
        case _:
            assert_never(step)
