"""Reductions by axis name: sums, means, extremes, products and where the extremes are.

Names and values are `jax.lax`'s. A tree of tensors is reduced in one launch per dtype, forward
and backward: PyTorch's `all_reduce_coalesced`. With `axis_index_groups` ranks reduce within
their group only; the result then still varies along the axes, from group to group, and is no
value for an out spec that leaves them out. Its cotangents are summed in the group.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import map_leaves
from fshard.program.program import Program
from fshard.program.steps import AllReduce
from fshard.run.autograd.linear_function import is_differentiated
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.axis_index_groups import Groups, resolve_groups
from fshard.spmd.collectives.collective_plan import (
    CollectivePlan,
    Transfer,
    Tree,
    collective,
    require_number,
    require_tensor,
)
from fshard.spmd.collectives.compile_node import tree_as_node
from fshard.spmd.collectives.gather_scatter import gather_transfer
from fshard.spmd.collectives.pcast import axis_index
from fshard.spmd.collectives.wire_dtypes import NO_WIRE_DTYPES, WireDtypes, check_wires
from fshard.spmd.types import VARYING, TypeSignature

__all__ = ["pargmax", "pargmin", "pmax", "pmean", "pmin", "pprod", "psum"]


One = Literal["invariant", "reduced"]


@lru_cache(maxsize=4096)
def _reduction(
    mesh: Mesh,
    axes: tuple[str, ...],
    kind: str,
    shape: torch.Size,
    dtype: torch.dtype,
    to: One,
    wires: WireDtypes = NO_WIRE_DTYPES,
) -> Program:
    src = Spec(mesh, PartitionSpec(unreduced=dict.fromkeys(axes, kind)), shape=shape, dtype=dtype)
    back = wires[1] if to == "reduced" else None
    return Program(src, (AllReduce(axes, to),), forward_dtype=wires[0], backward_dtype=back)


def _one(groups: Groups) -> One:
    """The state of what is one value for all ranks, or in groups only.

    From group to group it is another, and so are its cotangents: they vary in a group as well,
    and are summed in it.
    """
    return "invariant" if groups is None else "reduced"


def _to_one(axis_name: Axes, groups: Groups, *kinds: str) -> TypeSignature:
    """A reduction's: from group to group its result is another, so that it varies."""
    linear = set(kinds) <= {"sum", "avg"}
    if groups is None:
        return TypeSignature(as_axes(axis_name), None, kinds, all_or_none=True, linear=linear)
    return TypeSignature(as_axes(axis_name), VARYING, all_or_none=True, linear=linear)


@collective
def psum(
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """The sum over the ranks along the axes: varying (or unreduced) to invariant.

    `jax.lax.psum`, PyTorch's `all_reduce`, of a tree `all_reduce_coalesced`. Booleans are summed
    as int64, Python numbers are multiplied by the number of ranks. With `forward_dtype` addends
    are sent and added in that dtype. Transpose: `pcast(..., to="varying")`, which moves nothing,
    whatever the `backward_dtype`. Raises `ShardingError` for an unbound or unknown axis, for
    groups that do not have every index once or differ in size, and for floating dtypes of integers.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: psum(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([3.])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.psum")
    wires, to = (forward_dtype, backward_dtype), _one(axis_index_groups)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return require_number(value, "fs.psum") * where.axis_size(axes)
        x = value.to(torch.int64) if value.dtype == torch.bool else value
        check_wires("fs.psum", x.dtype, wires)
        return Transfer(_reduction(where, axes, "sum", x.shape, x.dtype, to, wires), x)

    return CollectivePlan("fs.psum", leaf, _to_one(axis_name, axis_index_groups, "sum"))


@collective
def pmean(
    axis_name: Axes,
    *,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """The mean over the ranks along the axes; integers become the default float.

    `jax.lax.pmean`, PyTorch's `all_reduce` by `avg`. Transpose: a cast to varying and a division
    by the number of ranks. Dtypes as `psum`. Raises as `psum`.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pmean(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1, 2]))
    tensor([1.5000])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.pmean")
    wires, to = (forward_dtype, backward_dtype), _one(axis_index_groups)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return require_number(value, "fs.pmean")
        inexact = value.dtype.is_floating_point or value.dtype.is_complex
        x = value if inexact else value.to(torch.get_default_dtype())
        check_wires("fs.pmean", x.dtype, wires)
        return Transfer(_reduction(where, axes, "avg", x.shape, x.dtype, to, wires), x)

    signature = _to_one(axis_name, axis_index_groups, "sum", "avg")
    return CollectivePlan("fs.pmean", leaf, signature)


@collective
def pmax(
    axis_name: Axes, *, axis_index_groups: Groups = None, mesh: Mesh | None = None
) -> CollectivePlan:
    """The elementwise maximum over the ranks along the axes; ties share the gradient.

    `jax.lax.pmax` (which has no gradient), PyTorch's `all_reduce` by `max`, whose gradient is
    that of `torch.amax`. Raises as `psum`.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pmax(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([2.])
    """
    return _extreme("max", "fs.pmax", axis_name, axis_index_groups, mesh)


@collective
def pmin(
    axis_name: Axes, *, axis_index_groups: Groups = None, mesh: Mesh | None = None
) -> CollectivePlan:
    """The elementwise minimum over the ranks along the axes; ties share the gradient.

    `jax.lax.pmin`, PyTorch's `all_reduce` by `min`; otherwise as `pmax`.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pmin(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 2.0]))
    tensor([1.])
    """
    return _extreme("min", "fs.pmin", axis_name, axis_index_groups, mesh)


def _extreme(
    kind: str, name: str, axis_name: Axes, groups: Groups, mesh: Mesh | None
) -> CollectivePlan:
    where, axes = resolve_groups(axis_name, mesh, groups, name)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return require_number(value, name)
        _need_order(value, name)
        return Transfer(
            _reduction(where, axes, kind, value.shape, value.dtype, _one(groups)), value
        )

    return CollectivePlan(name, leaf, _to_one(axis_name, groups, kind))


def _need_order(x: torch.Tensor, where: str) -> None:
    if x.dtype.is_complex:
        rule, fix = "complex numbers have no order", "x.abs(), or x.real and x.imag one by one"
        fail(where, f"a tensor of {x.dtype}", rule, fix)


@collective
def pprod(
    axis_name: Axes, *, axis_index_groups: Groups = None, mesh: Mesh | None = None
) -> CollectivePlan:
    """The elementwise product over the ranks along the axes; varying to invariant.

    PyTorch's `all_reduce` by `product`, without a counterpart in `jax.lax`. The
    gradient is that of `torch.prod`, also where factors are zero: a tensor that requires it is
    gathered and multiplied on every rank. Python numbers are raised to the number of ranks.
    Raises as `psum`.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pprod(x, "i"), mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([3.0, 2.0]))
    tensor([6.])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.pprod")
    to = _one(axis_index_groups)

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return require_number(value, "fs.pprod") ** where.axis_size(axes)
        if is_differentiated(value):
            return gather_transfer(where, axes, value, to, lambda each: each.prod(0))
        return Transfer(_reduction(where, axes, "product", value.shape, value.dtype, to), value)

    signature = _to_one(axis_name, axis_index_groups, "product")
    return CollectivePlan("fs.pprod", leaf, signature)


@tree_as_node
def pargmax(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """The index along the axes of the rank with the largest element, the lowest of equal ones.

    `jax.lax.pargmax`; what `torch.argmax` is over ranks. int64 and not differentiable. A NaN
    counts as the largest. Takes two reductions. Raises `ShardingError` as `psum`, and for
    leaves that are no tensors.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pargmax(x, "i"), mesh=fs.Mesh(i=3), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([1.0, 5.0, 5.0]))
    tensor([1])
    """
    return _place_of("max", "fs.pargmax", x, axis_name, mesh)


@tree_as_node
def pargmin(x: Tree, axis_name: Axes, *, mesh: Mesh | None = None) -> Tree:
    """The index along the axes of the rank with the smallest element, the lowest of equal ones.

    `jax.lax.pargmin`; what `torch.argmin` is over ranks. Otherwise as `pargmax`.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pargmin(x, "i"), mesh=fs.Mesh(i=3), in_specs=fs.P("i"),
    ...                  out_specs=fs.P())
    >>> f(torch.tensor([3.0, 1.0, 1.0]))
    tensor([1])
    """
    return _place_of("min", "fs.pargmin", x, axis_name, mesh)


def _place_of(kind: str, name: str, x: Tree, axis_name: Axes, mesh: Mesh | None) -> Tree:
    where, axes = resolve_axes(axis_name, mesh, name)
    n = where.axis_size(axes)

    def candidate(value: Any) -> Any:
        """NaN as the extreme: the backends' maxima do not agree on it."""
        if value is None:
            return None
        plain = require_tensor(value, name).detach()
        _need_order(plain, name)
        limit = torch.inf if kind == "max" else -torch.inf
        plain = plain.to(torch.uint8) if plain.dtype == torch.bool else plain
        return (
            plain.nan_to_num(limit, torch.inf, -torch.inf) if plain.is_floating_point() else plain
        )

    def place(mine: Any, best: Any) -> Any:
        return None if mine is None else torch.where(mine == best, axis_index(axes, mesh=where), n)

    mine: Any = map_leaves(candidate, x)
    best = (pmax if kind == "max" else pmin)(mine, axes, mesh=where)
    lowest: Tree = pmin(map_leaves(place, mine, best), axes, mesh=where)
    return lowest
