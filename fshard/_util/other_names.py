"""Names of JAX, PyTorch and MPI for what fshard names otherwise, for errors of missing names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from fshard._util.errors import did_you_mean

OTHER_NAMES = {
    "ColwiseParallel": "fs.state.colwise('tp')",
    "CommDebugMode": "fs.comm_log()",
    "DDP": "fs.partition(module, mesh=mesh, params=P(), in_specs=P('dp'))",
    "DTensor": "fs.shard(x, mesh, P('x')) makes a pair; fs.from_dtensor(x)",
    "DeviceMesh": "fs.Mesh(dp=2, tp=4); a DeviceMesh is taken where a mesh is",
    "DistributedDataParallel": "fs.partition(module, mesh=mesh, params=P(), in_specs=P('dp'))",
    "FSDP": "fs.state.distribute_module(module, mesh, fsdp='dp')",
    "FullyShardedDataParallel": "fs.state.distribute_module(module, mesh, fsdp='dp')",
    "NamedSharding": "fs.Spec(mesh, P('x'), shape=...); calls that know the shape take mesh and P",
    "PRNGKey": "fs.random.key(0)",
    "Partial": "P(unreduced={'x'}) on the axis x",
    "Replicate": "P(), which leaves the axis out",
    "RowwiseParallel": "fs.state.rowwise('tp')",
    "SequenceParallel": "fs.state.sequence('tp')",
    "Shard": "P('x'), the axis in the place of the dim",
    "ShardTensor": "fs.shard(x, mesh, P('x')) makes a pair; fs.domain has its operations",
    "all_reduce": "fs.psum(x, axis)",
    "allgather": "fs.all_gather(x, axis)",
    "allreduce": "fs.psum(x, axis)",
    "alltoall": "fs.all_to_all(x, axis, split_axis, concat_axis)",
    "broadcast": "fs.pbroadcast(x, axis, source)",
    "checkpoint": "torch.utils.checkpoint.checkpoint; fs.partition(fn, mesh=mesh, remat=...)",
    "device_put": "fs.shard(x, mesh, P('x')); of a pair fs.reshard(pair, P('x'))",
    "distribute_tensor": "fs.shard(x, mesh, P('x'))",
    "fully_shard": "fs.state.distribute_module(module, mesh, fsdp='dp')",
    "get_rank": "fs.axis_index(axis)",
    "get_world_size": "fs.axis_size(axis)",
    "grad": "torch.func.grad; for trees of pairs fs.state.value_and_grad",
    "hessian": "torch.func.hessian",
    "init_device_mesh": "fs.Mesh(dp=2, tp=4); fs.init(mesh) under torchrun",
    "init_process_group": "fs.init(mesh) under torchrun",
    "initialize": "fs.init(mesh) under torchrun",
    "jacfwd": "torch.func.jacfwd",
    "jacrev": "torch.func.jacrev",
    "jit": "fs.partition(fn, mesh=mesh, in_specs=...)",
    "jvp": "torch.func.jvp",
    "lax": "the collectives of jax.lax are functions of fs: fs.psum(x, axis)",
    "linearize": "torch.func.linearize",
    "make_array_from_process_local_data": "fs.from_local(local, mesh, P('x'))",
    "make_mesh": "fs.Mesh(dp=2, tp=4)",
    "parallelize_module": "fs.state.distribute_module(module, mesh, styles={...})",
    "permute_tensor": "fs.ppermute(x, axis, perm)",
    "pjit": "fs.partition(fn, mesh=mesh, in_specs=...)",
    "pmap": "fs.shard_map(fn, mesh=mesh, in_specs=..., out_specs=...)",
    "pvary": "fs.pcast(x, axis, to='varying')",
    "reduce_scatter": "fs.psum_scatter(x, axis, tiled=True)",
    "remat": "torch.utils.checkpoint.checkpoint; fs.partition(fn, mesh=mesh, remat=...)",
    "scatter_tensor": "fs.scatter(x, mesh, P('x'), src=0)",
    "set_mesh": "mesh= of each call; no mesh is ambient",
    "use_mesh": "mesh= of each call; no mesh is ambient",
    "value_and_grad": "fs.state.value_and_grad(fn)",
    "visualize_array_sharding": "fs.visualize(pair)",
    "visualize_sharding": "fs.visualize(pair)",
    "vjp": "torch.func.vjp",
    "vmap": "torch.func.vmap",
    "with_sharding_constraint": "fs.constrain(x, P('x'))",
}
"""Name to a call of fshard that does the same."""
NO_PROCESS_GROUP = "Default process group has not been initialized"
"""Beginning of the error of `torch.distributed` in a simulation."""
COLLECTIVES = (
    "fs.psum(x, axis) in the place of torch.distributed.all_reduce(x), fs.axis_index(axis) of "
    "get_rank(), in the body of a fs.shard_map"
)
"""Fix for calls of `torch.distributed` in functions that fshard runs."""
OPTIMIZER_NAMES = {
    "apply_updates": "optimizer.update returns the new parameters",
    "load_state_dict": "fs.state.load(directory, ...) returns a state",
    "param_groups": "a tree of parameters, and an optimizer, for each group of options",
    "state_dict": "fs.state.save(directory, state) of the tree that optimizer.init returns",
    "step": "state, params = optimizer.update(grads, state, params)",
    "zero_grad": "nothing: fs.state.value_and_grad returns new gradients",
}
"""Attributes of optimizers of PyTorch and optax to expressions of one of `fs.state`."""
PAIR_NAMES = {
    "addressable_shards": "pair.local",
    "device_mesh": "pair.mesh",
    "full_tensor": "fs.unshard(pair)",
    "placements": "pair.spec.placements",
    "redistribute": "fs.reshard(pair, P('x'))",
    "sharding": "pair.spec",
    "to_local": "pair.local",
}
"""Attributes of arrays of JAX and of DTensors to expressions of a pair."""
MESH_NAMES = {
    "__enter__": "mesh=mesh of each call; no mesh is ambient",
    "__exit__": "mesh=mesh of each call; no mesh is ambient",
    "__getitem__": "mesh.submesh('x')",
    "axis_names": "mesh.axes",
    "get_coordinate": "mesh.coords(rank)",
    "get_group": "mesh.groups('x')",
    "get_local_rank": "mesh.coords(rank)['x']; fs.axis_index('x') in a body",
    "mesh_dim_names": "mesh.axes",
    "ndim": "len(mesh.axes)",
}
"""Attributes of meshes of JAX and of a `DeviceMesh` to expressions of a mesh."""


def refuse_name(name: str, known: Iterable[str], package: str = "fshard") -> NoReturn:
    """Raise `AttributeError` for a name that a package does not have, with one that it has."""
    text = f"module {package!r} has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(text, name=name)
    fix = OTHER_NAMES.get(name) or did_you_mean(name, known, f"dir({package}) lists all names")
    raise AttributeError(f"{text}\n  fix:   {fix}", name=name)


def refuse_attribute(value: object, noun: str, name: str, fixes: Mapping[str, str]) -> NoReturn:
    """Raise `AttributeError` for an attribute that a value does not have, with one that it has."""
    fix = f"\n  fix:   {fixes[name]}" if name in fixes else ""
    article = "an" if noun[0] in "AEIO" else "a"
    raise AttributeError(f"{article} {noun} has no attribute {name!r}{fix}", name=name, obj=value)


def refuse_attributes(cls: type, fixes: Mapping[str, str]) -> None:
    """Set the methods of a class that refuse the attributes of `fixes`, special methods too."""

    def refusal(name: str) -> Any:
        def refuse(self: object, *_: object) -> NoReturn:
            raise TypeError(f"{cls.__name__} has no {name}\n  fix:   {fixes[name]}")

        return refuse

    methods = {name: refusal(name) for name in fixes if name.startswith("__")}
    methods["__getattr__"] = lambda self, name: refuse_attribute(self, cls.__name__, name, fixes)
    for name, method in methods.items():
        setattr(cls, name, method)
