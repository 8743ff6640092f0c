"""Reductions by axis name: sums, means, extremes, products, and the ranks of extremes.

Names and results are `jax.lax`'s. A tree of tensors is reduced in one launch per dtype, forward and
backward, as by PyTorch's `all_reduce_coalesced`. With `axis_index_groups` ranks reduce within their
group only; the result then still varies along the axes, from group to group, and its cotangents are
summed in the group.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.dtypes import is_inexact
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import map_leaves
from fshard.program.program import Program
from fshard.program.steps import AllReduce
from fshard.run.autograd.linear_function import is_differentiated
from fshard.run.graphs.blocks import block_shape
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.axis_index_groups import Groups, resolve_groups
from fshard.spmd.collectives.collective_plan import (
    CollectivePlan,
    Transfer,
    Tree,
    check_real,
    collective,
    require_number,
    require_tensor,
)
from fshard.spmd.collectives.compile_node import as_node
from fshard.spmd.collectives.gather_scatter import gather_transfer, product_of_rows
from fshard.spmd.collectives.pcast import axis_index
from fshard.spmd.collectives.wire_dtypes import WireDtypes, check_wire_dtypes
from fshard.spmd.types import VARYING, TypeSignature

ResultState = Literal["invariant", "reduced"]


@lru_cache(maxsize=CACHE_SIZE)
def _all_reduce(
    mesh: Mesh,
    axes: tuple[str, ...],
    kind: str,
    shape: torch.Size,
    dtype: torch.dtype,
    to: ResultState,
    wires: WireDtypes,
) -> Program:
    src = Spec(mesh, PartitionSpec(unreduced=dict.fromkeys(axes, kind)), shape=shape, dtype=dtype)
    # The transpose of a sum to an invariant result sends nothing; extremes count ties.
    backward = wires[1] if to == "reduced" or kind in ("max", "min") else None
    return Program(src, (AllReduce(axes, to),), forward_dtype=wires[0], backward_dtype=backward)


@collective
def psum(
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Return the sum over the ranks along axes, on every rank.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them. Booleans are summed as
            int64, Python numbers are multiplied by the number of ranks.
        axis_name: the axis, or a tuple of axes.
        axis_index_groups: lists of indices along the axes; ranks reduce within their group.
        forward_dtype: dtype in which values are sent and added; the result has the dtype of `x`.
        backward_dtype: no effect without groups, as the transpose sends nothing.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`, invariant along the axes.

    Raises:
        ShardingError: an unbound or unknown axis; groups that do not have every index once or
            differ in size; a floating dtype for integers.

    Transpose: `pcast(..., to="varying")`. After `jax.lax.psum`; PyTorch's `all_reduce`, for trees
    `all_reduce_coalesced`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.psum(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([3.])
    """
    wires = forward_dtype, backward_dtype
    return _plan(
        "sum", "fs.psum", axis_name, axis_index_groups, wires, mesh, operator.mul,
        lambda x: x.to(torch.int64) if x.dtype == torch.bool else x,
    )  # fmt: skip


@collective
def pmean(
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Return the mean over the ranks along axes, on every rank.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them. Integers become the default
            float, Python numbers stay.
        axis_name: the axis, or a tuple of axes.
        axis_index_groups: as in `psum`.
        forward_dtype: dtype in which values are sent and added; the result has the dtype of `x`.
        backward_dtype: no effect without groups, as the transpose sends nothing.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`, invariant along the axes.

    Raises:
        ShardingError: as `psum`.

    Transpose: a cast to varying and a division by the number of ranks. After `jax.lax.pmean`;
    PyTorch's `all_reduce` by `avg`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pmean(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1, 2]))
    tensor([1.5000])
    """
    wires = forward_dtype, backward_dtype
    return _plan(
        "avg", "fs.pmean", axis_name, axis_index_groups, wires, mesh,
        converted=lambda x: x if is_inexact(x) else x.to(torch.get_default_dtype()),
    )  # fmt: skip


@collective
def pmax(
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Return the elementwise maximum over the ranks along axes, on every rank.

    Args:
        x: real tensors of any shape, equal on all ranks, or a tree of them; numbers stay.
        axis_name: the axis, or a tuple of axes.
        axis_index_groups: as in `psum`.
        forward_dtype: dtype in which values are sent and compared; the result has the dtype of `x`.
        backward_dtype: dtype in which the gradient counts ties, and in groups adds cotangents.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`, invariant along the axes.

    Raises:
        ShardingError: complex tensors, and as `psum`.

    Gradient: as `torch.amax`; ties share it. After `jax.lax.pmax`, which has no gradient;
    PyTorch's `all_reduce` by `max`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pmax(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([2.])
    """
    wires = forward_dtype, backward_dtype
    return _plan("max", "fs.pmax", axis_name, axis_index_groups, wires, mesh)


@collective
def pmin(
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Return the elementwise minimum over the ranks along axes, on every rank.

    Args:
        x: real tensors of any shape, equal on all ranks, or a tree of them; numbers stay.
        axis_name: the axis, or a tuple of axes.
        axis_index_groups: as in `psum`.
        forward_dtype: dtype in which values are sent and compared; the result has the dtype of `x`.
        backward_dtype: dtype in which the gradient counts ties, and in groups adds cotangents.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`, invariant along the axes.

    Raises:
        ShardingError: complex tensors, and as `psum`.

    Gradient: as `torch.amin`; ties share it. After `jax.lax.pmin`, which has no gradient;
    PyTorch's `all_reduce` by `min`.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pmin(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([1.])
    """
    wires = forward_dtype, backward_dtype
    return _plan("min", "fs.pmin", axis_name, axis_index_groups, wires, mesh)


@collective
def pprod(
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """Return the elementwise product over the ranks along axes, on every rank.

    Args:
        x: tensors of any shape, equal on all ranks, or a tree of them. Python numbers are raised to
            the number of ranks.
        axis_name: the axis, or a tuple of axes.
        axis_index_groups: as in `psum`.
        forward_dtype: dtype of values sent and multiplied; the result has the dtype of `x`.
        backward_dtype: no effect without groups, as the gradient sends nothing.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of tensors of the shapes of `x`, invariant along the axes.

    Raises:
        ShardingError: as `psum`.

    Gradient: as `torch.prod`, also where factors are zero; tensors that require it are
    gathered and multiplied on every rank. PyTorch's `all_reduce` by `product`; `jax.lax` has no
    counterpart.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pprod(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([3.0, 2.0]))
    tensor([6.])
    """
    wires = forward_dtype, backward_dtype
    return _plan("product", "fs.pprod", axis_name, axis_index_groups, wires, mesh, operator.pow)


def _plan(
    kind: str,
    name: str,
    axis_name: Axes,
    groups: Groups,
    wires: WireDtypes,
    mesh: Mesh | None,
    of_number: Callable[[Any, int], Any] = lambda number, _: number,
    converted: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> CollectivePlan:
    """Return the plan of a reduction of tensors, which are converted first, and of numbers."""
    owner, axes = resolve_groups(axis_name, mesh, groups, name)
    # Results of groups differ, and so do their cotangents: within a group they are summed.
    to: ResultState = "invariant" if groups is None else "reduced"

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return of_number(require_number(value, name), owner.axis_size(axes))
        x = converted(value)
        check_wire_dtypes(name, x.dtype, wires)
        if kind in ("max", "min"):
            check_real(x, name)
        if kind == "product" and is_differentiated(x):
            return gather_transfer(owner, axes, x, to, wires, product_of_rows(x, wires))
        return Transfer(_all_reduce(owner, axes, kind, block_shape(x), x.dtype, to, wires), x)

    signature = TypeSignature(
        as_axes(axis_name), None if groups is None else VARYING,
        () if groups is not None else ("sum", "avg") if kind == "avg" else (kind,),
        all_or_none=True, linear=kind in LINEAR,
    )  # fmt: skip
    return CollectivePlan(name, leaf, signature, axes)


@as_node
def pargmax(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """Return the index along axes of the rank with the largest element, on every rank.

    Args:
        x: real tensors of any shape, equal on all ranks, or a tree of them. A NaN counts as the
            largest element; of equal elements the lowest index is returned.
        axis_name: the axis, or a tuple of axes.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of int64 tensors of the shapes of `x`, invariant along the axes.

    Raises:
        ShardingError: leaves that are not tensors, complex tensors, and as `psum`.

    Not differentiable. It takes two reductions. After `jax.lax.pargmax`; `torch.argmax` over ranks.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pargmax(x, "i"), mesh=fs.Mesh(i=3), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 5.0, 5.0]))
    tensor([1])
    """
    return _index_of_extreme("max", "fs.pargmax", x, axis_name, mesh)


@as_node
def pargmin(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """Return the index along axes of the rank with the smallest element, on every rank.

    Args:
        x: real tensors of any shape, equal on all ranks, or a tree of them. A NaN counts as the
            smallest element; of equal elements the lowest index is returned.
        axis_name: the axis, or a tuple of axes.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A tree of int64 tensors of the shapes of `x`, invariant along the axes.

    Raises:
        ShardingError: leaves that are not tensors, complex tensors, and as `psum`.

    Not differentiable. It takes two reductions. After `jax.lax.pargmin`; `torch.argmin` over ranks.

    >>> import torch
    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: fs.pargmin(x, "i"), mesh=fs.Mesh(i=3), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([3.0, 1.0, 1.0]))
    tensor([1])
    """
    return _index_of_extreme("min", "fs.pargmin", x, axis_name, mesh)


def _index_of_extreme(kind: str, name: str, x: Tree, axis_name: Axes, mesh: Mesh | None) -> Tree:
    owner, axes = resolve_axes(axis_name, mesh, name)
    n = owner.axis_size(axes)

    def comparable(value: Any) -> Any:
        """Return the values with NaN as the extreme: backends' maxima disagree on NaN."""
        if value is None:
            return None
        local = require_tensor(value, name).detach()
        check_real(local, name)
        limit = torch.inf if kind == "max" else -torch.inf
        local = local.to(torch.uint8) if local.dtype == torch.bool else local
        return (
            local.nan_to_num(limit, torch.inf, -torch.inf) if local.is_floating_point() else local
        )

    def index_if_best(local: Any, best: Any) -> Any:
        if local is None:
            return None
        return torch.where(local == best, axis_index(axes, mesh=owner), n)

    locals_: Any = map_leaves(comparable, x)
    best = (pmax if kind == "max" else pmin)(locals_, axes, mesh=owner)
    lowest: Tree = pmin(map_leaves(index_if_best, locals_, best), axes, mesh=owner)
    return lowest
