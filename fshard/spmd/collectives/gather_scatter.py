"""Gathers, scatters and exchanges by axis name; names and results are `jax.lax`'s.

A tree of tensors of any shapes takes one launch per dtype, forward and backward, whichever of their
dims are gathered or split: pieces that are scattered or exchanged are put along a new dim 0, which
is a view. With `axis_index_groups` ranks move data within their group only, and n is its size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.partition_spec import LINEAR, REDUCTIONS, PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import AllGather, AllToAll, ReduceScatter
from fshard.run.autograd.linear_function import is_differentiated
from fshard.run.graphs.blocks import block_shape
from fshard.spmd.collectives.axis_index_groups import Groups, resolve_groups
from fshard.spmd.collectives.collective_plan import (
    CollectivePlan,
    Transfer,
    check_dim,
    check_real,
    collective,
    require_tensor,
)
from fshard.spmd.collectives.wire_dtypes import WireDtypes, check_wire_dtypes
from fshard.spmd.types import VARYING, State, TypeSignature, suggest_state

# -- programs on a local whose dim 0 (or 1) has an entry for each rank ----------------------


@lru_cache(maxsize=CACHE_SIZE)
def _gather_program(
    mesh: Mesh,
    axes: tuple[str, ...],
    dim: int,
    to: str,
    shape: torch.Size,
    dtype: torch.dtype,
    wires: WireDtypes,
) -> Program:
    global_shape = (*shape[:dim], shape[dim] * mesh.axis_size(axes), *shape[dim + 1 :])
    src = Spec(mesh, PartitionSpec(*[None] * dim, axes), shape=global_shape, dtype=dtype)
    forward, backward = wires
    if to == "invariant":  # the transpose is a slice: it sends nothing
        return Program(src, (AllGather(axes, dim),), forward_dtype=forward)
    step = AllGather(axes, dim, "reduced")
    return Program(src, (step,), forward_dtype=forward, backward_dtype=backward)


@lru_cache(maxsize=CACHE_SIZE)
def _scatter_program(
    mesh: Mesh,
    axes: tuple[str, ...],
    kind: str,
    shape: torch.Size,
    dtype: torch.dtype,
    wires: WireDtypes,
) -> Program:
    src = Spec(mesh, PartitionSpec(unreduced=dict.fromkeys(axes, kind)), shape=shape, dtype=dtype)
    forward, backward = wires
    return Program(src, (ReduceScatter(axes, 0),), forward_dtype=forward, backward_dtype=backward)


@lru_cache(maxsize=CACHE_SIZE)
def _exchange_program(
    mesh: Mesh, axes: tuple[str, ...], shape: torch.Size, dtype: torch.dtype, wires: WireDtypes
) -> Program:
    p = PartitionSpec(axes, *[None] * (len(shape) - 1))
    src = Spec(mesh, p, shape=(mesh.axis_size(axes), *shape[1:]), dtype=dtype)
    forward, backward = wires
    return Program(src, (AllToAll(axes, 0, 1),), forward_dtype=forward, backward_dtype=backward)


def gather_transfer(
    mesh: Mesh,
    axes: tuple[str, ...],
    x: torch.Tensor,
    to: str,
    wires: WireDtypes,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> Transfer:
    """Return the transfer that stacks all ranks' `x` along a new dim 0 and applies `read`."""
    row = x.unsqueeze(0)
    prog = _gather_program(mesh, axes, 0, to, block_shape(row), row.dtype, wires)
    return Transfer(prog, row, read)


def product_of_rows(x: torch.Tensor, wires: WireDtypes) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function to the product along dim 0, in the dtype in which `x` is sent."""
    wire, dtype = wires[0] or x.dtype, x.dtype
    if wire == dtype:
        return lambda rows: rows.prod(0)
    return lambda rows: rows.to(wire).prod(0).to(dtype)


def _insert_dim(y: torch.Tensor, dim: int, tiled: bool) -> torch.Tensor:
    """Move dim 0 in front of `dim`, or with `tiled` merge it into it."""
    moved = y.movedim(0, dim) if dim else y
    return moved.flatten(dim, dim + 1) if tiled else moved.contiguous()


def _extract_dim(x: torch.Tensor, dim: int, n: int, tiled: bool) -> torch.Tensor:
    """Move the entries of `dim`, or with `tiled` its n pieces, to a new dim 0."""
    return (x.unflatten(dim, (n, x.shape[dim] // n)) if tiled else x).movedim(dim, 0)


# -- collectives --------------------------------------------------------------------------


@collective
def all_gather(
    axis_name: Axes,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Gather the ranks' tensors along axes, on every rank.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them.
        axis_name: the axis, or a tuple of axes, the first one major.
        axis: the dim of the result along which the ranks are ordered.
        tiled: concatenate along `axis`; by default stack along a new dim.
        to: the state of the result: "varying", "reduced" or "invariant".
        axis_index_groups: lists of indices along the axes; ranks gather within their group.
        forward_dtype: dtype in which values are gathered; the result has the dtype of `x`.
        backward_dtype: dtype in which the transpose sends and adds; gradients have `x.dtype`.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors with n entries in a new dim `axis`, or with a dim n times as long.

    Raises:
        ShardingError: an unknown axis, dim or `to`; groups that do not have every index once or
            differ in size; a floating dtype for integers.

    Transpose: `psum_scatter`, for `to="invariant"` a slice. With parameters in float32,
    `fs.all_gather(w, axis, forward_dtype=torch.bfloat16).to(torch.bfloat16)` gathers bfloat16 and
    computes in it; the cotangents are added in float32, as by PyTorch's FSDP with
    `reduce_dtype=torch.float32`. After `jax.lax.all_gather`; PyTorch's `all_gather_into_tensor`,
    for trees `all_gather_into_tensor_coalesced`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.all_gather(x, "i", tiled=True, to="invariant"),
    ...                  mesh=fs.Mesh(i=2), in_specs=fs.P("i"), out_specs=fs.P())
    >>> f(torch.arange(4))
    tensor([0, 1, 2, 3])
    """
    owner, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.all_gather")
    wires = forward_dtype, backward_dtype
    if to not in ("varying", "invariant", "reduced"):
        fix = suggest_state(to, ("varying", "invariant", "reduced"))
        fail("fs.all_gather", f"to={to!r}", "to must be varying, invariant or reduced", fix)
    # Values of groups differ, so that the cotangents of one vary in the group.
    gathered = to if axis_index_groups is None else "varying"

    def leaf(value: Any) -> Any:
        x = require_tensor(value, "fs.all_gather")
        name = "a tensor" if tiled else "a result"
        dim = check_dim(axis, x.ndim + (not tiled), "fs.all_gather", "axis", name)
        check_wire_dtypes("fs.all_gather", x.dtype, wires)
        # Along the dim itself, so that parts are concatenated there and not copied again.
        part = x if tiled else x.unsqueeze(dim)
        prog = _gather_program(owner, axes, dim, gathered, block_shape(part), part.dtype, wires)
        return Transfer(prog, part)

    states: dict[str, State | None] = {"varying": VARYING, "reduced": ("reduced", "sum")}
    signature = TypeSignature(as_axes(axis_name), states.get(gathered))
    return CollectivePlan("fs.all_gather", leaf, signature, axes)


@collective
def psum_scatter(
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    kind: str = "sum",
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Reduce over the ranks along axes; each rank keeps one slice of the sum.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them; a sum is not of booleans.
        axis_name: the axis, or a tuple of axes, the first one major.
        scatter_dimension: the dim that is split among the n ranks.
        tiled: split the dim into n equal parts; by default it must have n entries, and is removed.
        kind: the reduction: "sum", "avg", "max", "min" or "product".
        axis_index_groups: lists of indices along the axes; ranks reduce within their group.
        forward_dtype: dtype in which values are sent and reduced; the result has the dtype of `x`.
        backward_dtype: dtype in which the gradient gathers cotangents, and counts ties.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors with an n-th of the dim, or without it; varying along the axes.

    Raises:
        ShardingError: an unknown axis; a dim that n does not divide; booleans; groups that do not
            have every index once or differ in size; a floating dtype for integers; an unknown
            `kind`; an order of complex tensors, an average of integers.

    Transpose: `all_gather`; gradients of other kinds are those of `pmean`, `pmax`, `pmin` and
    `pprod`. After `jax.lax.psum_scatter`, which sums; PyTorch's `reduce_scatter_tensor`, for trees
    `reduce_scatter_tensor_coalesced`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.psum_scatter(x, "i", tiled=True), mesh=fs.Mesh(i=2),
    ...                  in_specs=fs.P(), out_specs=fs.P("i"))
    >>> f(torch.arange(4))
    tensor([0, 2, 4, 6])
    """
    owner, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.psum_scatter")
    wires = forward_dtype, backward_dtype
    if kind not in REDUCTIONS:
        rule = f"kind must be one of {', '.join(REDUCTIONS)}"
        fail("fs.psum_scatter", f"kind={kind!r}", rule, "leave it out, for a sum")
    n = owner.axis_size(axes)

    def leaf(value: Any) -> Any:
        x = require_tensor(value, "fs.psum_scatter")
        dim = check_dim(scatter_dimension, x.ndim, "fs.psum_scatter", "scatter_dimension")
        _check_split("fs.psum_scatter", "scatter_dimension", x, dim, n, tiled)
        check_wire_dtypes("fs.psum_scatter", x.dtype, wires)
        _check_reducible(x, kind)
        rows = _extract_dim(x, dim, n, tiled)
        shape = block_shape(rows, {0: n})
        if kind == "product" and is_differentiated(x):
            prog = _exchange_program(owner, axes, torch.Size((1, *shape)), rows.dtype, wires)
            multiply = product_of_rows(rows, wires)
            return Transfer(prog, rows.unsqueeze(0), lambda y: multiply(y.squeeze(1)))
        prog = _scatter_program(owner, axes, kind, shape, rows.dtype, wires)
        return Transfer(prog, rows, lambda y: y.squeeze(0))

    kinds = ("sum", "avg") if kind == "avg" else (kind,)
    linear = kind in LINEAR
    signature = TypeSignature(as_axes(axis_name), VARYING, kinds, all_or_none=True, linear=linear)
    return CollectivePlan("fs.psum_scatter", leaf, signature, axes)


def _check_reducible(x: torch.Tensor, kind: str) -> None:
    """Raise `ShardingError` for a tensor whose dtype a reduction is not defined for."""
    where = "fs.psum_scatter"
    if kind in ("max", "min"):
        check_real(x, where)
    elif kind == "sum" and x.dtype == torch.bool:
        fix = "x.to(torch.int64), to count them"
        fail(where, f"a tensor of {x.dtype}", "booleans have no sum", fix)
    elif kind == "avg" and not is_inexact(x):
        rule = "an average must be of floating or complex values"
        fail(where, f"a tensor of {x.dtype}", rule, "x.to(torch.float32)")


@collective
def all_to_all(
    axis_name: Axes,
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Send piece i of a dim to rank i of axes, and join the received pieces along another dim.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them.
        axis_name: the axis, or a tuple of axes, the first one major.
        split_axis: the dim that is split among the n ranks.
        concat_axis: the dim of the result along which the ranks' pieces are ordered.
        tiled: divide the split dim by n and multiply the other by n; by default the split dim must
            have n entries, and moves to `concat_axis`.
        axis_index_groups: lists of indices along the axes; ranks exchange within their group.
        forward_dtype: dtype in which values are sent; the result has the dtype of `x`.
        backward_dtype: dtype in which the transpose sends.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors with as many elements as `x`, varying along the axes.

    Raises:
        ShardingError: an unknown axis; a dim that n does not divide; groups that do not have every
            index once or differ in size; a floating dtype for integers.

    Transpose: itself with the dims swapped. After `jax.lax.all_to_all`; PyTorch's
    `all_to_all_single`, which has no coalesced form, while a tree is one exchange per dtype here.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.all_to_all(x, "i", 1, 0, tiled=True), mesh=fs.Mesh(i=2),
    ...                  in_specs=fs.P("i"), out_specs=fs.P(None, "i"))
    >>> f(torch.tensor([[0, 1], [2, 3]]))
    tensor([[0, 1],
            [2, 3]])
    """
    owner, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.all_to_all")
    wires = forward_dtype, backward_dtype
    dims, signature = (split_axis, concat_axis), TypeSignature(as_axes(axis_name))
    return _plan_exchange("fs.all_to_all", owner, axes, dims, tiled, wires, signature)


@collective
def pswapaxes(
    axis_name: Axes,
    axis: int,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Swap the ranks along axes with a dim: entry i goes to rank i, rank j's becomes entry j.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them.
        axis_name: the axis, or a tuple of axes, the first one major.
        axis: the dim, with as many entries as there are ranks.
        axis_index_groups: lists of indices along the axes; ranks exchange within their group.
        forward_dtype: dtype in which values are sent; the result has the dtype of `x`.
        backward_dtype: dtype in which the transpose sends.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`, varying along the axes.

    Raises:
        ShardingError: a dim of another size, and as `all_to_all`.

    Transpose: itself. After `jax.lax.pswapaxes`; PyTorch's `all_to_all_single`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pswapaxes(x, "i", 1), mesh=fs.Mesh(i=2),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([[0, 1], [2, 3]]))
    tensor([[0, 2],
            [1, 3]])
    """
    owner, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.pswapaxes")
    wires = forward_dtype, backward_dtype
    signature = TypeSignature(as_axes(axis_name))
    return _plan_exchange("fs.pswapaxes", owner, axes, (axis, axis), False, wires, signature)


def _plan_exchange(
    name: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    dims: tuple[int, int],
    tiled: bool,
    wires: WireDtypes,
    signature: TypeSignature,
) -> CollectivePlan:
    n = mesh.axis_size(axes)
    option = "axis" if name == "fs.pswapaxes" else "split_axis"

    def leaf(value: Any) -> Any:
        x = require_tensor(value, name)
        split = check_dim(dims[0], x.ndim, name, option)
        concat = check_dim(dims[1], x.ndim, name, "concat_axis")
        _check_split(name, option, x, split, n, tiled)
        check_wire_dtypes(name, x.dtype, wires)
        # One row, split into a piece for each rank; received pieces are a column.
        rows = _extract_dim(x, split, n, tiled).unsqueeze(0)
        prog = _exchange_program(mesh, axes, block_shape(rows, {1: n}), rows.dtype, wires)
        return Transfer(prog, rows, lambda y: _insert_dim(y.squeeze(1), concat, tiled))

    return CollectivePlan(name, leaf, signature, axes)


def _check_split(where: str, option: str, x: torch.Tensor, dim: int, n: int, tiled: bool) -> None:
    size = x.shape[dim]
    if tiled and size % n:
        fail(where, f"{option}={dim} of size {size}",
             f"the {n} ranks along the axes must divide the dim; {size} % {n} = {size % n}",
             f"pad it to {-(-size // n) * n}")  # fmt: skip
    if not tiled and size != n:
        fix = "fs.all_to_all(..., tiled=True)" if where == "fs.pswapaxes" else "tiled=True"
        fail(where, f"{option}={dim} of size {size}",
             f"without tiled=True the dim must have one entry for each of the {n} ranks",
             f"{fix} splits a longer dim")  # fmt: skip
