"""DTensor's own plans as fshard programs, so that one model costs both.

`plan(src, dst, "greedy")` gets DTensor's transforms of a pair of specs and writes each as the
equivalent fshard step; the program checks that they lead to `dst`. No process group is needed.
DTensor plans for its own model of hardware, whatever topology the program is costed with.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _redistribute as dtensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import chunk_sizes
from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    ReduceScatter,
    ReplicatedToUnreduced,
    Step,
)

__all__ = ["PLANNERS", "DTensorPlan", "as_dtensor", "device_mesh", "plan", "transforms"]

PLANNERS = {"greedy": False, "Dijkstra": True}
"""Argument of `_gen_transform_infos` by planner: True if it searches."""


@dataclass(frozen=True, slots=True)
class DTensorPlan:
    """DTensor's plan as a program, or the reason why there is none."""

    program: Program | None
    reason: str = ""


def plan(src: Spec, dst: Spec, planner: str, *, flattened: bool = False) -> DTensorPlan:
    """Return DTensor's plan from `src` to `dst`.

    With `flattened` every set of axes has the flattened mesh that lets DTensor fuse neighbouring
    collectives of one kind; without, none has.
    """
    for spec in (src, dst):
        if reason := _inexpressible(spec):
            return DTensorPlan(None, f"no placements for {spec}: {reason}")
    try:
        steps = _steps(src, dst, transforms(src, dst, planner, flattened=flattened))
    except (RuntimeError, NotImplementedError, AssertionError, ValueError) as error:
        return DTensorPlan(None, str(error) or type(error).__name__)
    return DTensorPlan(Program(src, steps, dst))


def transforms(src: Spec, dst: Spec, planner: str, *, flattened: bool = False) -> list[Any]:
    """Return DTensor's transforms as it would run them."""
    mesh = device_mesh(src.mesh, flattened)
    ends = as_dtensor(src, mesh), as_dtensor(dst, mesh)
    infos = dtensor._gen_transform_infos_non_cached(*ends, PLANNERS[planner])
    if not flattened:
        return list(infos)
    placements = (end.placements for end in ends)
    return list(dtensor._optimize_transform_infos(infos, mesh, *placements))


# -- specs -----------------------------------------------------------------------------


@lru_cache(maxsize=64)
def device_mesh(mesh: Mesh, flattened: bool = False) -> DeviceMesh:
    """Return the mesh as DTensor's planners see it from rank 0, without process groups."""
    ranks = torch.tensor(list(mesh.devices)).reshape(mesh.sizes)
    rank = mesh.devices[0]
    device_mesh = DeviceMesh(
        "cpu", ranks, mesh_dim_names=mesh.axes, _init_backend=False, _rank=rank
    )
    if flattened:
        mapping: Any = device_mesh._flatten_mapping
        for count in range(2, len(mesh.axes) + 1):
            for axes in itertools.combinations(mesh.axes, count):
                layout = _MeshLayout([device_mesh._get_slice_mesh_layout(axes).collapse()])
                # Planning reads only the layout of such a mesh.
                mapping["_".join(axes)] = SimpleNamespace(_layout=layout)
    return device_mesh


def as_dtensor(spec: Spec, mesh: DeviceMesh) -> DTensorSpec:
    """Return the spec as DTensor's, with its order of axes as `shard_order`."""
    axes = list(spec.mesh.axes)
    partition = spec.partition
    placements: list[Placement] = [Replicate()] * len(axes)
    for axis, kind in partition.unreduced_kinds:
        placements[axes.index(axis)] = Partial(kind)
    order = []
    for dim, names in enumerate(partition.dims):
        mesh_dims = tuple(axes.index(axis) for axis in names)
        for mesh_dim in mesh_dims:
            placements[mesh_dim] = Shard(dim)
        if mesh_dims:
            order.append(ShardOrderEntry(dim, mesh_dims))
    shape = torch.Size(spec.shape)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), spec.dtype)
    return DTensorSpec(mesh, tuple(placements), meta, tuple(order))


def _inexpressible(spec: Spec) -> str:
    """Return the reason why DTensor has no placements for `spec`, or an empty string."""
    if spec.partition.reduced_kinds:
        return "DTensor has no reduced state"
    for dim, sizes in enumerate(spec.sizes):
        if sizes is not None and sizes != _chunks(spec, dim, spec.partition.dims[dim]):
            return f"DTensor shards dim {dim} in chunks"
    return ""


def _chunks(spec: Spec, dim: int, axes: Sequence[str]) -> tuple[int, ...] | None:
    """Return the shard sizes of DTensor, or None if they are equal."""
    sizes = chunk_sizes(spec.shape[dim], [spec.mesh.shape[axis] for axis in axes])
    return None if len(set(sizes)) == 1 else sizes


# -- transforms ------------------------------------------------------------------------


def _steps(src: Spec, dst: Spec, infos: Sequence[Any]) -> list[Step]:
    """Return the step of every transform."""
    dims: list[tuple[str, ...]] = list(src.partition.dims)
    steps: list[Step] = []
    for info in infos:
        mesh_dims = getattr(info, "original_mesh_dims", (info.mesh_dim,))
        axes = tuple(src.mesh.axes[mesh_dim] for mesh_dim in mesh_dims)
        before, after = info.src_dst_placements
        if isinstance(before, Shard):
            dims[before.dim] = tuple(axis for axis in dims[before.dim] if axis not in axes)
        sizes = None
        if isinstance(after, Shard):
            dims[after.dim] += axes
            sizes = _chunks(src, after.dim, dims[after.dim])
        match before, after:
            case Shard(), Replicate():
                steps.append(AllGather(axes, before.dim))
            case Shard(), Shard():
                steps.append(AllToAll(axes, before.dim, after.dim, sizes))
            case Replicate(), Shard():
                steps.append(AllSlice(axes, after.dim, sizes))
            case Partial(), Replicate():
                steps.append(AllReduce(axes))
            case Partial(), Shard():
                steps.append(ReduceScatter(axes, after.dim, sizes))
            case Replicate(), Partial():
                steps.append(ReplicatedToUnreduced(axes, after.reduce_op))
            case _:
                raise NotImplementedError(f"DTensor plans {before} to {after} and cannot run it")
    return steps
