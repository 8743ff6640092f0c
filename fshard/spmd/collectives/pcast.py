"""Which place a rank has along named axes, and in which state a value is there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import InvariantToReduced
from fshard.run.autograd.linear_function import Run, apply_linear, is_differentiated
from fshard.run.transports.base import Label, current_rank, labelled
from fshard.run.transports.divergence_report import call_line
from fshard.spmd.axis_env import current_tracker, resolve_axes
from fshard.spmd.collectives.axis_index_groups import resolve_groups
from fshard.spmd.collectives.collective_plan import CollectivePlan, Transfer, collective
from fshard.spmd.collectives.compile_node import as_node
from fshard.spmd.collectives.wire_dtypes import check_wires
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

__all__ = ["axis_index", "axis_size", "cast_to_varying", "pcast"]

GIVES: dict[str, State] = {
    "varying": VARYING,
    "reduced": ("reduced", "sum"),
    "unreduced": ("unreduced", "sum"),
}


@lru_cache(maxsize=4096)
def _using(
    mesh: Mesh,
    axes: tuple[str, ...],
    shape: torch.Size,
    dtype: torch.dtype,
    wire: torch.dtype | None,
) -> Program:
    src = Spec(mesh, PartitionSpec(), shape=shape, dtype=dtype)
    return Program(src, (InvariantToReduced(axes),), backward_dtype=wire)


def cast_to_varying(mesh: Mesh, axes: tuple[str, ...], x: torch.Tensor) -> torch.Tensor:
    """`x` as it is; its cotangents are cast_to_varying along the axes.

    It shares the memory of `x`, and is a view of it: PyTorch refuses to write it in place, which
    would change `x` behind the back of its gradient. A clone of it may be written.
    """
    prog = _using(mesh, axes, x.shape, x.dtype, None)
    with labelled(Label("fs.pcast", mesh, call_line())):
        return apply_linear(Run((prog,)), (x,), everywhere=False)[0]


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
    """The same values in another state; nothing moves now, the transpose may.

    `jax.lax.pcast`; in PyTorch an `autograd.Function` written by hand. From invariant to
    "varying" or "reduced" the transpose is a sum over the ranks, for a whole tree in one launch
    per dtype; from varying to "unreduced" and from reduced to "varying" it is nothing. Where
    types are tracked, casts to varying that are missing are inserted, one for each tensor.
    `src` is the state that `x` has; it is taken to be varying for `to="unreduced"`, else invariant.
    The transpose sends and adds in `backward_dtype`, gradients have the dtype of `x`; as nothing
    moves forward, `forward_dtype` has no effect. Raises `ShardingError` for a cast that does not
    exist, and for floating dtypes of integers.

    >>> import fshard as fs
    >>> w, x = torch.tensor(2.0, requires_grad=True), torch.tensor([1.0, 10.0])
    >>> f = fs.shard_map(lambda w, x: pcast(w, "i", to="varying") * x, mesh=fs.Mesh(i=2),
    ...                  in_specs=(fs.P(), fs.P("i")), out_specs=fs.P("i"))
    >>> f(w, x).sum().backward()
    >>> w.grad
    tensor(11.)
    """
    where, axes = resolve_groups(axis_name, mesh, None, "fs.pcast")
    state = src or ("varying" if to == "unreduced" else "invariant")
    if (state, to) not in CASTS:
        _refuse_cast(src, to, as_axes(axis_name))

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        check_wires("fs.pcast", value.dtype, (forward_dtype, backward_dtype))
        if state != "invariant" or not is_differentiated(value):
            return value
        return Transfer(_using(where, axes, value.shape, value.dtype, backward_dtype), value)

    gives = GIVES.get(to)
    return CollectivePlan(
        "fs.pcast", leaf, TypeSignature(as_axes(axis_name), gives, cast_to=to, source=src)
    )


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
    """This rank's index along the axes, row-major in the order given, as a 0-dim int64 tensor.

    `jax.lax.axis_index`, PyTorch's `dist.get_rank(group)`. Raises `ShardingError` for an unbound
    or unknown axis, and outside of ranks.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda: axis_index("i")[None], mesh=fs.Mesh(i=3), in_specs=(),
    ...                  out_specs=fs.P("i"))
    >>> f()
    tensor([0, 1, 2])
    """
    where, axes = resolve_axes(axis_name, mesh, "fs.axis_index")
    rank = current_rank(where, "fs.axis_index").rank
    index = torch.tensor(where.index(rank, axes))
    tracker = current_tracker()
    if tracker is not None:
        tracker.record(index, States.varying(axes))
    return index


@as_node
def axis_size(axis_name: Axes, *, mesh: Mesh | None = None) -> int:
    """How many ranks there are along the axes.

    `jax.lax.axis_size`, PyTorch's `dist.get_world_size(group)`. Raises `ShardingError` for an
    unbound or unknown axis.

    >>> import fshard as fs
    >>> axis_size(("x", "y"), mesh=fs.Mesh(x=2, y=3))
    6
    """
    where, axes = resolve_axes(axis_name, mesh, "fs.axis_size")
    return where.axis_size(axes)
