"""JAX's `Mesh`, `PartitionSpec` and `NamedSharding` to and from meshes, partitions and specs.

| fshard | JAX |
|---|---|
| `Mesh` | `jax.sharding.Mesh`, or `AbstractMesh` where JAX does not have the devices |
| `PartitionSpec` | `jax.sharding.PartitionSpec`, with `unreduced` and `reduced` |
| `Spec` | `NamedSharding`, which has no shape and dtype |

The rank of a device is its JAX id. Whether an axis is `Auto` or `Explicit` says how JAX propagates
shardings, not how a value is laid out, and is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard._util.text import plural
from fshard.layout.mesh import Mesh, read_device_mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec


def to_jax(value: Mesh | PartitionSpec | Spec, /, *, abstract: bool = False) -> Any:
    """Return a mesh, partition or spec as JAX's.

    Args:
        value: the mesh, partition or spec.
        abstract: True for an `AbstractMesh`, which needs no devices.

    Returns:
        A `jax.sharding.Mesh` of JAX's devices whose ids are the ranks, a `PartitionSpec`, or a
        `NamedSharding`. Axes are `Auto`, but `Explicit` in a sharding with unreduced or
        reduced axes, as JAX demands.

    Raises:
        ShardingError: JAX does not have the devices, or no such layout: uneven shards, reductions
            other than sums; lists every such dim and axis. Or the package is missing.

    >>> import fshard as fs
    >>> def as_jax(spec):  # where jax is installed
    ...     assert fs.interop.to_jax(fs.P("dp", None)) == jax.P("dp", None)
    ...     return fs.interop.to_jax(spec, abstract=True)  # a jax.NamedSharding
    """
    where = "fs.interop.to_jax"
    sharding = _jax_sharding(where)
    value = read_device_mesh(value)
    match value:
        case Mesh():
            return _mesh_to_jax(where, sharding, value, abstract)
        case PartitionSpec():
            return _partition_to_jax(where, sharding, value)
        case Spec():
            raise_if(where, [
                Problem(f"dim {dim} of {value}", "the shards of a dim must have equal sizes in JAX",
                        f"pad dim {dim} to a multiple of {value.mesh.axis_size(axes)}")
                for dim, axes in enumerate(value.partition.dims) if value.sizes[dim] is not None
            ])  # fmt: skip
            partition = _partition_to_jax(where, sharding, value.partition)
            # JAX has unreduced and reduced values on explicit axes alone.
            explicit = bool(partition.unreduced or partition.reduced)
            mesh = _mesh_to_jax(where, sharding, value.mesh, abstract, explicit=explicit)
            return sharding.NamedSharding(mesh, partition)
        case _:
            fail(where, f"a {type(value).__name__}", "the argument must be a Mesh, P or Spec",
                 "the spec of a pair: fs.interop.to_jax(pair.spec)")  # fmt: skip


def from_jax(
    value: Any, /, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Mesh | PartitionSpec | Spec:
    """Return JAX's mesh, partition or sharding as a mesh, partition or spec.

    Args:
        value: a `jax.sharding.Mesh`, `AbstractMesh`, `PartitionSpec` or `NamedSharding`, or
            anything with a shape, a dtype and a `NamedSharding`, such as a `jax.Array` or a
            `jax.ShapeDtypeStruct`.
        shape: global shape, for a `NamedSharding`.
        dtype: dtype of the spec; by default that of the value, or `torch.float32`.

    Returns:
        A mesh for a mesh, a partition for a partition, else a spec. The ranks of an `AbstractMesh`
        are `0..n-1`.

    Raises:
        ShardingError: the value is something else, or fshard has no such layout: dims that are
            `UNCONSTRAINED`, axes that are manual, memory other than the device's, a dtype that
            PyTorch lacks; or the shape of a `NamedSharding` is missing.

    >>> import fshard as fs
    >>> def specs(x, mesh):  # a jax.Array and a jax.sharding.Mesh
    ...     spec = fs.interop.from_jax(x)
    ...     assert spec.shape == x.shape and spec.mesh == fs.interop.from_jax(mesh)
    ...     return spec, fs.interop.from_jax(jax.NamedSharding(mesh, jax.P("dp")), shape=(8, 16))
    """
    where = "fs.interop.from_jax"
    sharding = _jax_sharding(where)
    match value:
        case sharding.Mesh() | sharding.AbstractMesh():
            return _mesh_from_jax(where, sharding, value)
        case sharding.PartitionSpec():
            return _partition_from_jax(where, value)
        case sharding.NamedSharding():
            pass
        case _ if isinstance(getattr(value, "sharding", None), sharding.NamedSharding):
            shape = value.shape if shape is None else shape
            dtype = _dtype(where, value.dtype) if dtype is None else dtype
            value = value.sharding
        case _:
            kind = getattr(value, "sharding", value)
            fail(where, f"a {type(kind).__name__}",
                 "the argument must be a Mesh, PartitionSpec or NamedSharding of JAX, or have one",
                 "jax.device_put(x, jax.NamedSharding(mesh, jax.P('x')))")  # fmt: skip
    if shape is None:
        fail(where, "a NamedSharding without shape=", "a spec must have the global shape",
             "fs.interop.from_jax(sharding, shape=(8, 16)), or the array itself")  # fmt: skip
    if value.memory_kind not in _device_memories(sharding, value.mesh):
        fail(where, f"the memory kind {value.memory_kind!r}",
             "a sharding must be of the devices' own memory",
             "sharding.with_memory_kind('device')")  # fmt: skip
    mesh = _mesh_from_jax(where, sharding, value.mesh)
    return Spec(mesh, _partition_from_jax(where, value.spec), shape=shape,
                dtype=torch.float32 if dtype is None else dtype)  # fmt: skip


def _jax_sharding(where: str) -> Any:
    """Return the module; raise `ShardingError` if JAX is not installed."""
    try:
        return import_module("jax.sharding")
    except ImportError:
        fail(where, "no package jax", "shardings of JAX must have JAX",
             "pip install 'fshard[jax]'; fs.interop.to_shardy needs none")  # fmt: skip


# -- to JAX ------------------------------------------------------------------------------------


def _mesh_to_jax(
    where: str, sharding: Any, mesh: Mesh, abstract: bool, explicit: bool = False
) -> Any:
    axis_type = sharding.AxisType.Explicit if explicit else sharding.AxisType.Auto
    types = (axis_type,) * len(mesh.axes)
    if abstract:
        if mesh.devices != range(mesh.size):
            fail(where, f"{mesh} with abstract=True", "an abstract mesh must have the devices "
                 f"range({mesh.size}): JAX keeps none", "abstract=False")  # fmt: skip
        return sharding.AbstractMesh(mesh.sizes, mesh.axes, axis_types=types)
    devices = {device.id: device for device in import_module("jax").devices()}
    missing = [rank for rank in mesh.devices if rank not in devices]
    if missing:
        fail(where, f"{mesh} and {plural(len(devices), 'device')} of JAX",
             f"JAX must have a device with the id of every rank, not only {sorted(devices)}",
             "abstract=True; or XLA_FLAGS=--xla_force_host_platform_device_count="
             f"{max(mesh.devices) + 1} in the environment")  # fmt: skip
    grid = import_module("numpy").array([devices[rank] for rank in mesh.devices])
    return sharding.Mesh(grid.reshape(mesh.sizes), mesh.axes, axis_types=types)


def _partition_to_jax(where: str, sharding: Any, partition: PartitionSpec) -> Any:
    raise_if(where, [
        Problem(f"{axis!r} {state} by {kind} in {partition}",
                f"an axis that is {state} must be so by sum in JAX",
                "fs.redistribute to another layout first")
        for state, kinds in (("unreduced", partition.unreduced_kinds),
                             ("reduced", partition.reduced_kinds))
        for axis, kind in kinds if kind != "sum"
    ])  # fmt: skip
    return sharding.PartitionSpec(
        *partition.partitions,
        unreduced={axis for axis, _ in partition.unreduced_kinds},
        reduced={axis for axis, _ in partition.reduced_kinds},
    )


# -- from JAX ----------------------------------------------------------------------------------


def _mesh_from_jax(where: str, sharding: Any, mesh: Any) -> Mesh:
    raise_if(where, [
        Problem(f"axis {name!r} of {mesh}, which is manual",
                "an axis must not be manual: inside of jax.shard_map values have no global layout",
                "the mesh outside of jax.shard_map")
        for name in mesh.manual_axes
    ])  # fmt: skip
    if not mesh.axis_names:
        fail(
            where, f"the empty mesh {mesh}", "a mesh must have axes", "jax.make_mesh((1,), ('x',))"
        )
    is_concrete = isinstance(mesh, sharding.Mesh)
    devices = [device.id for device in mesh.devices.flat] if is_concrete else None
    return Mesh(dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)), devices=devices)


def _partition_from_jax(where: str, partition: Any) -> PartitionSpec:
    entries = partition.partitions
    raise_if(where, [
        Problem(f"dim {dim} of {partition}, which is UNCONSTRAINED",
                "a dim must be sharded over stated axes or none",
                "None in its place, or what the compiler chose: compiled.output_shardings")
        for dim, entry in enumerate(entries) if entry is type(partition).UNCONSTRAINED
    ])  # fmt: skip
    return PartitionSpec(*entries, unreduced=partition.unreduced, reduced=partition.reduced)


def _dtype(where: str, dtype: Any) -> torch.dtype:
    """Return the dtype of the same name in PyTorch."""
    torch_dtype = getattr(torch, str(dtype), None)
    if not isinstance(torch_dtype, torch.dtype):
        fail(where, f"the dtype {dtype}", "a dtype must have a name that PyTorch knows",
             "dtype=torch.float32, say")  # fmt: skip
    return torch_dtype


def _device_memories(sharding: Any, mesh: Any) -> set[str | None]:
    """Return the kinds of memory that are the devices' own: `unpinned_host` on CPUs."""
    own = {mesh.devices.flat[0].default_memory().kind} if isinstance(mesh, sharding.Mesh) else set()
    return {None, "device", *own}
