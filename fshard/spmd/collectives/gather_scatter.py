"""Gathers, scatters and exchanges by axis name; names and values are `jax.lax`'s.

A tree of tensors of any shapes goes side by side, in one launch per dtype, forward and backward,
whichever of their dims are gathered or cut: what is scattered or exchanged moves along a new dim 0,
and where that dim comes from is a view.
With `axis_index_groups` ranks move data within their group only, and n is the size of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import AllGather, AllToAll, ReduceScatter
from fshard.spmd.collectives.axis_index_groups import Groups, resolve_groups
from fshard.spmd.collectives.collective_plan import (
    CollectivePlan,
    Transfer,
    check_dim,
    collective,
    require_tensor,
)
from fshard.spmd.collectives.wire_dtypes import NO_WIRE_DTYPES, WireDtypes, check_wires
from fshard.spmd.types import VARYING, State, TypeSignature, suggest_state

__all__ = ["all_gather", "all_to_all", "gather_transfer", "psum_scatter", "pswapaxes"]


# -- programs on a local whose dims 0 (and 1) are the ranks' --------------------------------


@lru_cache(maxsize=4096)
def _gathering(
    mesh: Mesh,
    axes: tuple[str, ...],
    dim: int,
    to: str,
    shape: torch.Size,
    dtype: torch.dtype,
    wires: WireDtypes,
) -> Program:
    whole = (*shape[:dim], shape[dim] * mesh.axis_size(axes), *shape[dim + 1 :])
    src = Spec(mesh, PartitionSpec(*[None] * dim, axes), shape=whole, dtype=dtype)
    there, back = wires
    if to == "invariant":  # the transpose is a slice: it sends nothing
        return Program(src, (AllGather(axes, dim),), forward_dtype=there)
    step = AllGather(axes, dim, "reduced")
    return Program(src, (step,), forward_dtype=there, backward_dtype=back)


@lru_cache(maxsize=4096)
def _scattering(
    mesh: Mesh, axes: tuple[str, ...], shape: torch.Size, dtype: torch.dtype, wires: WireDtypes
) -> Program:
    src = Spec(mesh, PartitionSpec(unreduced=set(axes)), shape=shape, dtype=dtype)
    there, back = wires
    return Program(src, (ReduceScatter(axes, 0),), forward_dtype=there, backward_dtype=back)


@lru_cache(maxsize=4096)
def _exchanging(
    mesh: Mesh, axes: tuple[str, ...], shape: torch.Size, dtype: torch.dtype, wires: WireDtypes
) -> Program:
    src = Spec(mesh, _first(axes, shape), shape=(mesh.axis_size(axes), *shape[1:]), dtype=dtype)
    there, back = wires
    return Program(src, (AllToAll(axes, 0, 1),), forward_dtype=there, backward_dtype=back)


def _first(axes: tuple[str, ...], shape: torch.Size) -> PartitionSpec:
    return PartitionSpec(axes, *[None] * (len(shape) - 1))


def gather_transfer(
    mesh: Mesh,
    axes: tuple[str, ...],
    x: torch.Tensor,
    to: str,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> Transfer:
    """Everyone's `x` along a new dim 0, and what is made of it."""
    piece = x.unsqueeze(0)
    prog = _gathering(mesh, axes, 0, to, piece.shape, piece.dtype, NO_WIRE_DTYPES)
    return Transfer(prog, piece, read)


def _insert(y: torch.Tensor, dim: int, tiled: bool) -> torch.Tensor:
    """Dim 0 in front of `dim`, or merged into it."""
    moved = y.movedim(0, dim) if dim else y
    return moved.flatten(dim, dim + 1) if tiled else moved.contiguous()


def _extract(x: torch.Tensor, dim: int, n: int, tiled: bool) -> torch.Tensor:
    """The n pieces of `dim` (or its n entries) along a new dim 0."""
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
    """Everyone's `x`, stacked along a new dim `axis`, or with `tiled` concatenated along it.

    `jax.lax.all_gather`, PyTorch's `all_gather_into_tensor`, of a tree
    `all_gather_into_tensor_coalesced`. Several axes are gathered in the order given, the first one
    major. `to` is the state of the result: "varying" or "reduced"
    (transpose: `psum_scatter`), or "invariant" (transpose: a slice).

    `forward_dtype` is what is gathered, `backward_dtype` that in which the transpose sends and
    adds; results and gradients have the dtype of `x`. So with parameters kept in float32,
    `all_gather(w, axis, forward_dtype=torch.bfloat16).to(torch.bfloat16)` gathers bfloat16 and
    computes in it; the ranks' bfloat16 cotangents are added in float32, as PyTorch's FSDP does
    with `reduce_dtype=torch.float32`. Raises `ShardingError` for an unknown axis, a dim that is
    none, another `to`, wrong groups, and floating dtypes of integers.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: all_gather(x, "i", tiled=True, to="invariant"),
    ...                  mesh=fs.Mesh(i=2), in_specs=fs.P("i"), out_specs=fs.P())
    >>> f(torch.arange(4))
    tensor([0, 1, 2, 3])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.all_gather")
    wires = forward_dtype, backward_dtype
    if to not in ("varying", "invariant", "reduced"):
        fix = suggest_state(to, ("varying", "invariant", "reduced"))
        fail("fs.all_gather", f"to={to!r}", "to is varying, invariant or reduced", fix)

    def leaf(value: Any) -> Any:
        x = require_tensor(value, "fs.all_gather")
        of = "a tensor" if tiled else "a result"
        dim = check_dim(axis, x.ndim + (not tiled), "fs.all_gather", "axis", of)
        check_wires("fs.all_gather", x.dtype, wires)
        # One value for a group only has cotangents that vary in it, as it does itself.
        gathered = to if axis_index_groups is None else "varying"
        # Along the dim itself: parts that come apart are joined there, and nothing copied again.
        piece = x if tiled else x.unsqueeze(dim)
        return Transfer(
            _gathering(where, axes, dim, gathered, piece.shape, piece.dtype, wires), piece
        )

    gives: dict[str, State | None] = {"varying": VARYING, "reduced": ("reduced", "sum")}
    state = gives.get(to) if axis_index_groups is None else VARYING
    return CollectivePlan("fs.all_gather", leaf, TypeSignature(as_axes(axis_name), state))


@collective
def psum_scatter(
    axis_name: Axes,
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> CollectivePlan:
    """The sum over the ranks along the axes, each rank keeping one slice of it.

    `jax.lax.psum_scatter`, PyTorch's `reduce_scatter_tensor`, of a tree
    `reduce_scatter_tensor_coalesced`. With `tiled` the dim is divided by the number of ranks;
    without, it has that size and is removed. Transpose: `all_gather`.
    `forward_dtype` is what is sent and added, `backward_dtype` what the transpose gathers; the
    result has the dtype of `x`. Raises `ShardingError` for an unknown axis, a dim that does not
    divide, wrong groups, and floating dtypes of integers.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: psum_scatter(x, "i", tiled=True), mesh=fs.Mesh(i=2),
    ...                  in_specs=fs.P(), out_specs=fs.P("i"))
    >>> f(torch.arange(4))
    tensor([0, 2, 4, 6])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.psum_scatter")
    wires = forward_dtype, backward_dtype
    n = where.axis_size(axes)

    def leaf(value: Any) -> Any:
        x = require_tensor(value, "fs.psum_scatter")
        dim = check_dim(scatter_dimension, x.ndim, "fs.psum_scatter", "scatter_dimension")
        _check_split("fs.psum_scatter", "scatter_dimension", x, dim, n, tiled)
        check_wires("fs.psum_scatter", x.dtype, wires)
        if x.dtype == torch.bool:
            fix = "x.to(torch.int64), to count them"
            fail("fs.psum_scatter", f"a tensor of {x.dtype}", "booleans have no sum", fix)
        rows = _extract(x, dim, n, tiled)
        prog = _scattering(where, axes, rows.shape, rows.dtype, wires)
        return Transfer(prog, rows, lambda y: y.squeeze(0))

    signature = TypeSignature(as_axes(axis_name), VARYING, ("sum",), all_or_none=True)
    return CollectivePlan("fs.psum_scatter", leaf, signature)


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
    """Piece i of `x` along `split_axis` to rank i; the pieces received along `concat_axis`.

    `jax.lax.all_to_all`, PyTorch's `all_to_all_single`, which has no coalesced form: here a tree
    is one exchange per dtype. With `tiled` one dim is divided and the
    other multiplied by the number of ranks; without, the split dim has that size and moves to
    `concat_axis`. Transpose: itself, dims swapped. `forward_dtype` and `backward_dtype` are what
    the two send; results have the dtype of `x`. Raises `ShardingError` for an unknown axis, a
    dim that does not divide, wrong groups, and floating dtypes of integers.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: all_to_all(x, "i", 1, 0, tiled=True), mesh=fs.Mesh(i=2),
    ...                  in_specs=fs.P("i"), out_specs=fs.P(None, "i"))
    >>> f(torch.tensor([[0, 1], [2, 3]]))
    tensor([[0, 1],
            [2, 3]])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.all_to_all")
    wires = forward_dtype, backward_dtype
    dims, signature = (split_axis, concat_axis), TypeSignature(as_axes(axis_name))
    return _all_to_all("fs.all_to_all", where, axes, dims, tiled, wires, signature)


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
    """Exchange the ranks along the axes with the dim `axis`, which has as many entries.

    `jax.lax.pswapaxes`, PyTorch's `all_to_all_single`: entry i goes to rank i, and what rank j
    sends becomes entry j. Transpose: itself. Dtypes and errors as `all_to_all`.

    >>> import fshard as fs
    >>> f = fs.shard_map(lambda x: pswapaxes(x, "i", 1), mesh=fs.Mesh(i=2),
    ...                  in_specs=fs.P("i"), out_specs=fs.P("i"))
    >>> f(torch.tensor([[0, 1], [2, 3]]))
    tensor([[0, 2],
            [1, 3]])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, "fs.pswapaxes")
    wires = forward_dtype, backward_dtype
    signature = TypeSignature(as_axes(axis_name))
    return _all_to_all("fs.pswapaxes", where, axes, (axis, axis), False, wires, signature)


def _all_to_all(
    name: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    dims: tuple[int, int],
    tiled: bool,
    wires: WireDtypes,
    signature: TypeSignature,
) -> CollectivePlan:
    n = mesh.axis_size(axes)

    def leaf(value: Any) -> Any:
        x = require_tensor(value, name)
        word = "axis" if name == "fs.pswapaxes" else "split_axis"
        split = check_dim(dims[0], x.ndim, name, word)
        concat = check_dim(dims[1], x.ndim, name, "concat_axis")
        _check_split(name, word, x, split, n, tiled)
        check_wires(name, x.dtype, wires)
        # One row that is cut into a piece for each rank, and becomes a column of theirs.
        rows = _extract(x, split, n, tiled).unsqueeze(0)
        prog = _exchanging(mesh, axes, rows.shape, rows.dtype, wires)
        return Transfer(prog, rows, lambda y: _insert(y.squeeze(1), concat, tiled))

    return CollectivePlan(name, leaf, signature)


def _check_split(where: str, word: str, x: torch.Tensor, dim: int, n: int, tiled: bool) -> None:
    size = x.shape[dim]
    if tiled and size % n:
        fail(
            where,
            f"{word}={dim} of size {size}",
            f"the {n} ranks along the axes divide the dim; {size} % {n} = {size % n}",
            f"pad it to {-(-size // n) * n}",
        )
    if not tiled and size != n:
        fix = "fs.all_to_all(..., tiled=True)" if where == "fs.pswapaxes" else "tiled=True"
        fail(
            where,
            f"{word}={dim} of size {size}",
            f"without tiled=True the dim has one entry for each of the {n} ranks",
            f"{fix} cuts a longer dim",
        )
