"""Layouts of operands of which one stays on its rank and the other moves around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fshard._util.errors import fail
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.run.global_tensors import shard
from fshard.spmd.collectives.pcast import pcast


def pairs_on_one_mesh(where: str, operands: Sequence[Any]) -> list[Sharded]:
    """Return operands as pairs, tensors as replicated ones; raise for several meshes."""
    # A `Sharded` is not unpacked: that asks its length, which raises and is slow.
    pairs = [Sharded(*x) if type(x) is tuple and is_pair(x) else x for x in operands]
    mesh = next(x.spec.mesh for x in pairs if isinstance(x, Sharded))
    pairs = [x if isinstance(x, Sharded) else shard(x, mesh, PartitionSpec()) for x in pairs]
    meshes = dict.fromkeys(pair.spec.mesh for pair in pairs)
    if len(meshes) > 1:
        fail(where, f"operands on {' and '.join(map(str, meshes))}",
             "operands must be on one mesh", "fs.reshard(pair, spec) of one of them")  # fmt: skip
    return pairs


def sliced(spec: Spec, dim: int, axes: tuple[str, ...]) -> Spec:
    """Return a layout whose dim is also sharded over `axes`, every shard balanced."""
    dims = spec.partition.dims
    more = tuple(axis for axis in axes if axis not in dims[dim])
    if not more:
        return spec
    n = spec.mesh.axis_size(more)
    sizes = [
        size * (i + 1) // n - size * i // n for size in spec.shard_sizes(dim) for i in range(n)
    ]
    split: list[Any] = [dim or None for dim in dims]
    split[dim] = (*dims[dim], *more)
    return spec.replace(partition=PartitionSpec(*split), sizes={dim: sizes})


def varying(x: Tensor, spec: Spec, used: Sequence[str]) -> Tensor:
    """Return a local whose gradient is summed over the axes that shard another operand alone.

    Args:
        x: the local.
        spec: its layout.
        used: the axes that shard any operand.
    """
    own = {axis for dim in spec.partition.dims for axis in dim}
    axes = tuple(axis for axis in spec.mesh.axes if axis in used and axis not in own)
    return pcast(x, axes, to="varying") if axes and x.is_floating_point() else x
