"""Index and size along named axes, and casts between states of a value."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import InvariantToReduced
from fshard.run.autograd.linear_function import LinearOp, apply_linear, is_differentiated
from fshard.run.graphs.blocks import block_shape
from fshard.run.transports.base import current_rank, label_of, labelled
from fshard.spmd.axis_env import current_tracker, resolve_axes
from fshard.spmd.collectives.axis_index_groups import resolve_groups
from fshard.spmd.collectives.collective_plan import CollectivePlan, Transfer, collective
from fshard.spmd.collectives.compile_node import as_node
from fshard.spmd.collectives.wire_dtypes import check_wire_dtypes
from fshard.spmd.types import (
    CASTS,
    VARYING,
    State,
    States,
    TypeSignature,
    format_axes,
    suggest_instead_of_cast,
    suggest_state,
)

TARGET_STATES: dict[str, State] = {
    "varying": VARYING,
    "reduced": ("reduced", "sum"),
    "unreduced": ("unreduced", "sum"),
}


@lru_cache(maxsize=CACHE_SIZE)
def cast_program(
    mesh: Mesh,
    axes: tuple[str, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    wire: torch.dtype | None,
) -> Program:
    """Return the program that keeps a tensor and whose transpose sums over `axes`, in `wire`."""
    src = Spec(mesh, PartitionSpec(), shape=shape, dtype=dtype)
    return Program(src, (InvariantToReduced(axes),), backward_dtype=wire)


def cast_by(op: LinearOp, x: torch.Tensor) -> torch.Tensor:
    """Return `x` unchanged, by an operation whose transpose may sum cotangents.

    It is a view of `x`: PyTorch refuses to write it in place, which would change `x` without its
    gradient. A clone of it may be written.
    """
    with labelled(label_of("fs.pcast", op.mesh)):
        return apply_linear(op, (x,), False)[0]


@collective
def pcast(
    axis_name: Axes,
    *,
    to: str,
    src: str | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Cast a tree of tensors to another state along axes; values do not change.

    Args:
        x: tensors of any shape, or a tree of them.
        axis_name: the axis, or a tuple of axes.
        to: the state of the result: "varying" or "reduced" (from invariant), "unreduced" (from
            varying), or "varying" (from reduced).
        src: the state of `x`; by default varying for `to="unreduced"`, else invariant. Where types
            are tracked it is read off the type.
        forward_dtype: no effect, as nothing is sent forward.
        backward_dtype: dtype in which the transpose sends and adds; gradients have `x.dtype`.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        The same values, in the state `to`.

    Raises:
        ShardingError: a cast that does not exist; a floating `backward_dtype` for integers.

    Transpose: from invariant a sum over the ranks, for a tree in one launch per dtype; from
    varying to unreduced and from reduced to varying nothing. Where types are tracked, missing casts
    to varying are inserted, once for each tensor. After `jax.lax.pcast`.

    >>> import torch
    >>> import fshard as fs
    >>> w, x = torch.tensor(2.0, requires_grad=True), torch.tensor([1.0, 10.0])
    >>> f = fs.shard_map(lambda w, x: fs.pcast(w, "i", to="varying") * x, mesh=fs.Mesh(i=2),
    ...                  in_specs=(fs.P(), fs.P("i")), out_specs=fs.P("i"))
    >>> f(w, x).sum().backward()
    >>> w.grad
    tensor(11.)
    """
    owner, axes = resolve_groups(axis_name, mesh, None, "fs.pcast")
    source = src or ("varying" if to == "unreduced" else "invariant")
    if (source, to) not in CASTS:
        _refuse_cast(src, to, as_axes(axis_name))

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        check_wire_dtypes("fs.pcast", value.dtype, (forward_dtype, backward_dtype))
        if source != "invariant" or not is_differentiated(value):
            return value
        return Transfer(
            cast_program(owner, axes, block_shape(value), value.dtype, backward_dtype), value
        )

    result = TARGET_STATES.get(to)
    signature = TypeSignature(as_axes(axis_name), result, cast_to=to, source=src)
    return CollectivePlan("fs.pcast", leaf, signature)


def _refuse_cast(src: str | None, to: str, axes: tuple[str, ...]) -> NoReturn:
    words = "invariant", "reduced", "unreduced", "varying"
    unknown = [word for word in (to, src or to) if word not in words]
    if unknown:
        fix = suggest_state(unknown[0], words)
    elif src is None or to == "invariant":
        fix = f"fs.psum(x, {format_axes(axes)}) goes from varying or unreduced to invariant"
    else:
        fix = suggest_instead_of_cast(src, to, axes)
    given = f"to={to!r}" if src is None else f"a cast from {src!r} to {to!r}"
    rule = "casts are " + ", ".join(f"{a} to {b}" for a, b in sorted(CASTS))
    fail("fs.pcast", given, rule, fix)


@as_node
def axis_index(axis_name: Axes, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Return this rank's index along axes.

    Args:
        axis_name: the axis, or a tuple of axes, the first one major.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A 0-dim int64 tensor, varying along the axes.

    Raises:
        ShardingError: an unbound or unknown axis; code that no rank runs.

    Not differentiable. After `jax.lax.axis_index` and PyTorch's `dist.get_rank(group)`.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda: fs.axis_index("i")[None], mesh=fs.Mesh(i=3), in_specs=(),
    ...                  out_specs=fs.P("i"))
    >>> f()
    tensor([0, 1, 2])
    """
    owner, axes = resolve_axes(axis_name, mesh, "fs.axis_index")
    rank = current_rank(owner, "fs.axis_index").rank
    index = torch.tensor(owner.index(rank, axes))
    tracker = current_tracker()
    if tracker is not None:
        tracker.record(index, States.varying(axes))
    return index


@as_node
def axis_size(axis_name: Axes, *, mesh: Mesh | None = None) -> int:
    """Return the number of ranks along axes.

    Args:
        axis_name: the axis, or a tuple of axes.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        The product of the axes' sizes.

    Raises:
        ShardingError: an unbound or unknown axis.

    After `jax.lax.axis_size` and PyTorch's `dist.get_world_size(group)`.

    >>> import fshard as fs
    >>> fs.axis_size(("x", "y"), mesh=fs.Mesh(x=2, y=3))
    6
    """
    owner, axes = resolve_axes(axis_name, mesh, "fs.axis_size")
    return owner.axis_size(axes)
