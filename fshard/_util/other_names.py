"""Names of JAX, PyTorch and MPI for what fshard names otherwise, for errors of missing names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from fshard._util.errors import did_you_mean

OTHER_NAMES = {
    "DeviceMesh": "fs.Mesh(dp=2, tp=4); a DeviceMesh is taken where a mesh is",
    "NamedSharding": "fs.Spec(mesh, P('x'), shape=...); calls that know the shape take mesh and P",
    "all_reduce": "fs.psum(x, axis)",
    "allgather": "fs.all_gather(x, axis)",
    "allreduce": "fs.psum(x, axis)",
    "alltoall": "fs.all_to_all(x, axis, split_axis, concat_axis)",
    "broadcast": "fs.pbroadcast(x, axis, source)",
    "device_put": "fs.shard(x, mesh, P('x')); of a pair fs.reshard(pair, P('x'))",
    "distribute_tensor": "fs.shard(x, mesh, P('x'))",
    "fully_shard": "fs.state.distribute_module(module, mesh, fsdp='dp')",
    "get_rank": "fs.axis_index(axis)",
    "get_world_size": "fs.axis_size(axis)",
    "grad": "torch.func.grad; for trees of pairs fs.state.value_and_grad",
    "init_device_mesh": "fs.Mesh(dp=2, tp=4); fs.init(mesh) under torchrun",
    "jit": "fs.partition(fn, mesh=mesh, in_specs=...)",
    "lax": "the collectives of jax.lax are functions of fs: fs.psum(x, axis)",
    "make_mesh": "fs.Mesh(dp=2, tp=4)",
    "parallelize_module": "fs.state.distribute_module(module, mesh, styles={...})",
    "permute_tensor": "fs.ppermute(x, axis, perm)",
    "pjit": "fs.partition(fn, mesh=mesh, in_specs=...)",
    "pmap": "fs.shard_map(fn, mesh=mesh, in_specs=..., out_specs=...)",
    "pvary": "fs.pcast(x, axis, to='varying')",
    "reduce_scatter": "fs.psum_scatter(x, axis, tiled=True)",
    "value_and_grad": "fs.state.value_and_grad(fn)",
    "with_sharding_constraint": "fs.constrain(x, P('x'))",
}
"""Name to a call of fshard that does the same."""


def refuse_name(name: str, known: Iterable[str]) -> NoReturn:
    """Raise `AttributeError` for a name that the package does not have, with one that it has."""
    text = f"module 'fshard' has no attribute {name!r}"
    if name.startswith("_"):
        raise AttributeError(text, name=name)
    fix = OTHER_NAMES.get(name) or did_you_mean(name, known, "dir(fshard) lists all names")
    raise AttributeError(f"{text}\n  fix:   {fix}", name=name)
