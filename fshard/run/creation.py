"""Creation of pairs shard by shard, without communication and without the global tensor.

The shard of a rank is a function of its offsets and shape in the global tensor, so that all layouts
have the same values. Draws of `fs.random` and the factories are such functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.program.program import Program
from fshard.program.steps import AllSlice, Step
from fshard.run.execute import run_typed_hook
from fshard.run.global_tensors import shard_program
from fshard.run.transports.base import current_rank, current_transport, own_transport, warn_alone
from fshard.run.transports.torch_distributed import ProcessWorld

Offsets = tuple[int, ...]
Shape = tuple[int, ...]
CreateShard = Callable[[torch.Tensor, Offsets, Shape], torch.Tensor]
"""Function of a seed, and of a shard's offsets in the global tensor and shape, to the shard."""


def create_pair(where: str, spec: Spec, seed: torch.Tensor, create: CreateShard) -> Sharded:
    """Return the pair of the shards of this process's rank, or of all simulated ranks.

    Args:
        where: function, for errors.
        spec: layout of the result. Along an unreduced axis, coordinate 0 holds the values.
        seed: invariant tensor that the values depend on, passed to `create`.
        create: function that creates one shard; replicas of a simulation are copies of one.

    Raises:
        ShardingError: the rank is not in the mesh of `spec`.
    """
    to_states = _to_states(spec)
    if current_transport() is None:
        warn_alone()
        by_box: dict[tuple[Offsets, Shape], torch.Tensor] = {}
        shards = []
        for rank in spec.mesh.ranks:
            box = spec.offsets(rank), spec.local_shape(rank)
            shards.append(by_box[box].clone() if box in by_box else create(seed, *box))
            by_box.setdefault(box, shards[-1])
        return Sharded(to_states(tuple(shards)), spec)
    rank = rank_on_mesh(spec.mesh, where)
    box = spec.offsets(rank), spec.local_shape(rank)
    seed_spec = Spec(spec.mesh, PartitionSpec(), shape=seed.shape, dtype=seed.dtype)

    def run(seed: torch.Tensor) -> Sharded:
        return Sharded(to_states(create(seed, *box)), spec)

    result: Sharded = run_typed_hook.call(where, seed, seed_spec, spec, run)
    return result


def default_device() -> torch.device:
    """Return PyTorch's default device or, if that is the CPU, the one of this process's backend."""
    device, world = torch.empty(0).device, own_transport()
    if device.type == "cpu" and isinstance(world, ProcessWorld):
        return world.device
    return device


def rank_on_mesh(mesh: Mesh, where: str) -> int:
    """Return the rank that this code runs as; raise `ShardingError` if the mesh lacks it."""
    rank = current_rank(mesh, where).rank
    if rank not in mesh:
        fail(where, f"rank {rank}", f"the operation runs on {mesh}, whose ranks are "
             f"{', '.join(map(str, mesh.ranks[:8]))}{', ...' if mesh.size > 8 else ''}",
             "call it on these ranks alone, or fs.reshard to a mesh with all")  # fmt: skip
    return rank


@lru_cache(maxsize=CACHE_SIZE)
def _to_states(spec: Spec) -> Program:
    """Return the local program from created shards to the states of a spec."""
    steps: list[Step] = [
        step for step in shard_program(spec).steps if not isinstance(step, AllSlice)
    ]
    p = spec.partition
    sharded = PartitionSpec._of(p.dims, (), ())
    created = Spec._of(spec.mesh, sharded, spec.shape, spec.dtype, spec.sizes)
    return Program(created, steps, spec)
