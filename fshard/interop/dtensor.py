"""Pairs as DTensors and meshes as `DeviceMesh`, and back, without copies.

A DTensor's local tensor is the pair's local, in the same memory. Process groups are shared: those
of a `DeviceMesh` are used for collectives along its axes, and `Mesh.to_device_mesh` passes on those
that fshard has.
"""

from __future__ import annotations

from typing import Any

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh, from_device_mesh_hook, read_device_mesh, to_device_mesh_hook
from fshard.layout.sharded import Pair, Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.run.execute import check_local
from fshard.run.transports.base import is_simulated, own_transport
from fshard.run.transports.torch_distributed import ProcessWorld


def from_dtensor(dtensor: Any, /, mesh: Mesh | None = None) -> Sharded:
    """Return a DTensor as a pair; its local is the DTensor's, not a copy.

    The gradient of the local is the DTensor's gradient, in the layout `spec.dual`.

    Args:
        dtensor: the DTensor, with any of its shard orders and uneven or partial placements.
        mesh: the mesh of the pair; by default that of the DTensor's `DeviceMesh`. It must have the
            same ranks on axes of the same sizes.

    Returns:
        The pair.

    Raises:
        ShardingError: the argument is not a DTensor, a placement has no state in fshard (a masked
            partial sum, say), the mesh differs, or a collective of the DTensor is still running.

    >>> import fshard as fs
    >>> def main(dtensor):  # torchrun --nproc-per-node 2 script.py
    ...     pair = fs.from_dtensor(dtensor)
    ...     assert pair.local.data_ptr() == dtensor.to_local().data_ptr()
    """
    where = "fs.from_dtensor"
    placements = getattr(dtensor, "placements", None)
    if placements is None or not hasattr(dtensor, "to_local"):
        fail(where, f"a {type(dtensor).__name__}", "the argument must be a DTensor",
             "fs.from_local(local, mesh, fs.P('x')) of a local tensor")  # fmt: skip
    device_mesh = dtensor.device_mesh
    own, mesh = Mesh.from_device_mesh(device_mesh), read_device_mesh(mesh)
    if mesh is not None and (mesh.sizes, mesh.ranks) != (own.sizes, own.ranks):
        fail(where, f"{mesh} for a DTensor on {own}",
             "the mesh must have the same ranks on axes of the same sizes",
             f"fs.from_dtensor(dtensor), whose mesh is {own}")  # fmt: skip
    spec = Spec.from_placements(mesh or own, placements, dtensor.shape, dtensor.dtype)
    dual = spec.dual
    local = dtensor.to_local(grad_placements=None if dual == spec else dual.placements)
    if hasattr(local, "wait") and type(local) is not torch.Tensor:
        local = local.wait()
    return Sharded(local, spec)


def to_dtensor(pair: Pair, /, device_mesh: Any = None) -> Any:
    """Return a pair as a DTensor; its local is the pair's, not a copy.

    The gradient of the DTensor is that of the pair's local.

    Args:
        pair: `(local, spec)` of a rank under `torchrun`.
        device_mesh: the `DeviceMesh` of the DTensor; by default one of the pair's mesh, which is
            made once and has fshard's process groups.

    Returns:
        The DTensor. An axis that is reduced becomes a `Replicate()`.

    Raises:
        ShardingError: the argument is not a pair of this rank, DTensor has no such layout, or the
            `device_mesh` has other ranks or sizes.

    >>> import fshard as fs
    >>> def main():  # torchrun --nproc-per-node 2 script.py
    ...     spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    ...     fs.init(spec.mesh)
    ...     dtensor = fs.to_dtensor(fs.zeros(spec))
    """
    where = "fs.to_dtensor"
    if not is_pair(pair):
        fail(where, f"a {type(pair).__name__}", "the argument must be a pair (local, spec)",
             "fs.shard(tensor, spec) makes one")  # fmt: skip
    local, spec = pair
    world = _world(where, spec.mesh)
    check_local(local, spec, world, where)
    placements = spec.placements
    if device_mesh is None:
        device_mesh = spec.mesh.to_device_mesh(local.device.type)
    else:
        other = Mesh.from_device_mesh(device_mesh)
        if (other.sizes, other.devices) != (spec.mesh.sizes, spec.mesh.devices):
            fail(where, f"a device mesh of {other}",
                 f"it must have the ranks and sizes of {spec.mesh}",
                 "leave it out: fs.to_dtensor(pair)")  # fmt: skip
    from torch.distributed.tensor import DTensor  # the import takes seconds

    strides = torch.empty(spec.shape, device="meta").stride()
    return DTensor.from_local(
        local,
        device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=strides,
    )


@from_device_mesh_hook.set
def from_device_mesh(device_mesh: Any) -> Mesh:
    """Return the mesh of a `DeviceMesh`, whose process groups are used after `fs.init`.

    Raises:
        ShardingError: the argument is not a `DeviceMesh`.
    """
    ranks = getattr(device_mesh, "mesh", None)
    if not isinstance(ranks, torch.Tensor) or not hasattr(device_mesh, "mesh_dim_names"):
        fail("Mesh.from_device_mesh", f"a {type(device_mesh).__name__}",
             "the argument must be a torch.distributed DeviceMesh",
             'init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))')  # fmt: skip
    names = device_mesh.mesh_dim_names or [f"dim_{dim}" for dim in range(ranks.ndim)]
    mesh = Mesh(dict(zip(names, ranks.shape, strict=True)), devices=ranks.flatten().tolist())
    world = own_transport()
    if isinstance(world, ProcessWorld) and world.is_current and world.process_rank in mesh:
        for axis, group in zip(mesh.axes, _groups_of(device_mesh), strict=False):
            members = tuple(sorted(mesh.group(world.process_rank, axis)))
            world.names.setdefault(members, group.group_name)
    return mesh


@to_device_mesh_hook.set
def to_device_mesh(mesh: Mesh, device_type: str | None) -> Any:
    """Return the `DeviceMesh` of a mesh, made once for each set of process groups.

    Raises:
        ShardingError: this process is not a rank of the mesh under `torchrun`.
    """
    world = _world("Mesh.to_device_mesh", mesh)
    kind = device_type or world.device.type
    cached = world.device_meshes.get((mesh, kind))
    if cached is None:
        from torch.distributed.device_mesh import DeviceMesh

        groups = [world.process_group(mesh.group(world.rank, axis)) for axis in mesh.axes]
        ranks = torch.tensor(mesh.devices, dtype=torch.int).view(mesh.sizes)
        cached = DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], kind, ranks, mesh_dim_names=mesh.axes
        )
        world.device_meshes[mesh, kind] = cached
    return cached


def _groups_of(device_mesh: Any) -> list[Any]:
    """Return the process groups of a `DeviceMesh`, none if it was made without."""
    try:
        return list(device_mesh.get_all_groups())
    except (RuntimeError, AttributeError):  # made with _init_backend=False
        return []


def _world(where: str, mesh: Mesh) -> ProcessWorld:
    """Return this process's transport; raise `ShardingError` unless it is a rank of the mesh."""
    world = own_transport()
    if is_simulated() or not isinstance(world, ProcessWorld):
        fail(where, f"{mesh} in a process that simulates its ranks",
             "DTensor and DeviceMesh must have one process for each rank",
             f"torchrun --nproc-per-node {mesh.size} script.py, and fs.init(mesh)")  # fmt: skip
    if world.rank not in mesh:
        fail(where, f"rank {world.rank}", f"the rank must be one of {mesh}",
             "if rank in mesh.ranks: call it on these ranks alone")  # fmt: skip
    return world
