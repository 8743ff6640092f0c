"""`transpose(step, src) -> step`: the adjoint of a step is again a step.

With `<x, y>` the pairing of a spec with its dual (sharded: the sum over shards; invariant:
once; reduced with unreduced: the sum over ranks), `<A x, y> == <x, A.T y>`. The table is
that of JAX's JEP 17111 (unreduced and reduced types), completed for averages.
"""

from __future__ import annotations

from typing import assert_never

import torch

from fshard._util.errors import fail
from fshard.layout.partition_spec import LINEAR
from fshard.layout.spec import Spec
from fshard.program.infer import replicated_kind, unreduced_kind, way_back
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)

__all__ = ["is_linear", "transpose"]


def is_linear(step: Step, src: Spec) -> bool:
    """Whether the step, applied to `src`, is a linear map."""
    match step:
        case AllReduce() | ReduceScatter():
            return unreduced_kind(step, src, step.axes) in LINEAR
        case Exchange():
            after = step.partition.unreduced_kinds if step.mesh in (None, src.mesh) else ()
            # Those of one side alone are reduced, or put among neutral elements.
            return all(kind in LINEAR for _, kind in {*src.partition.unreduced_kinds} ^ {*after})
        case ReplicatedToUnreduced() | ShardedToUnreduced():
            return step.kind in LINEAR
        case Cast():
            return step.dtype == src.dtype or _numbers(step.dtype) == _numbers(src.dtype) != "bool"
        case _:
            return True


def _numbers(dtype: torch.dtype) -> str:
    """What a cast that is to be linear both ways keeps: integers, or floating and complex."""
    if dtype == torch.bool:
        return "bool"
    return "inexact" if dtype.is_floating_point or dtype.is_complex else "integer"


def transpose(step: Step, src: Spec, /) -> Step:
    """The adjoint of `step` on `src`: a step from the dual of its result to `src.dual`.

    Raises `ShardingError` for a reduction or a cast that is not linear.
    """
    if isinstance(step, Cast) and not is_linear(step, src):
        fail(
            "transpose",
            f"{step} of {src}",
            "a cast must be between floating dtypes, or between integers, to be linear",
            "split the program at the cast",
        )
    if not is_linear(step, src):
        fail(
            "transpose",
            f"{step} of {src}",
            "a reduction must be a sum or an average to be linear",
            "differentiate by running the program: max and min have a gradient, no transpose",
        )
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
            return way_back(step, src)
        case CollectivePermute():
            return CollectivePermute(src.dual.partition)
        case Exchange():
            back = None if step.mesh in (None, src.mesh) else src.mesh
            return Exchange(src.dual.partition, src.sizes, back)
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
