"""The operator database through DTensor, all ranks in one process (`LocalTensorMode`)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _local_tensor as local_tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from tests.helpers.ops.op_checks import shards_of
from tests.helpers.ops.op_database import Case, Outcome, results_error

__all__ = ["try_dtensor"]

logging.getLogger("torch.distributed").setLevel(logging.ERROR)


@contextmanager
def _ranks(size: int) -> Iterator[None]:
    """Set up a fake process group of `size` ranks, all in this process."""
    if dist.is_initialized() and dist.get_world_size() != size:
        dist.destroy_process_group()
        _device_mesh.cache_clear()
    if not dist.is_initialized():
        hook = sys.excepthook
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
        sys.excepthook = hook
    with local_tensor.LocalTensorMode(size):
        yield


@lru_cache(maxsize=8)
def _device_mesh(mesh: Mesh) -> DeviceMesh:
    ranks = torch.tensor(mesh.ranks).reshape([mesh.shape[axis] for axis in mesh.axes])
    return DeviceMesh("cpu", ranks, mesh_dim_names=mesh.axes)


def placements(spec: Spec) -> list[Placement]:
    """Return DTensor's placements of a spec, one per axis."""
    matches: list[Placement] = []
    kinds = dict(spec.partition.unreduced_kinds)
    for axis in spec.mesh.axes:
        dims = [dim for dim, axes in enumerate(spec.partition.dims) if axis in axes]
        matches.append(
            Shard(dims[0]) if dims else Partial(kinds[axis]) if axis in kinds else Replicate()
        )
    return matches


def try_dtensor(case: Case, specs: Sequence[Spec]) -> Outcome:
    """Run a case on DTensors with layouts `specs`; compare values."""
    where = f"{case.name} #{case.number} [{', '.join(map(str, specs))}]"
    mesh = specs[0].mesh
    try:
        with _ranks(mesh.size), torch.no_grad():
            inputs = [
                _made(x, spec, i)
                for i, (x, spec) in enumerate(zip(case.tensors, specs, strict=True))
            ]
            out = pytree.tree_leaves(case.function(inputs))
            result = [_whole(item) for item in out]
    except TimeoutError:
        raise
    except Exception as error:
        return Outcome("raises", f"{where}: {type(error).__name__}: {str(error).splitlines()[:1]}")
    for rank in range(mesh.size):
        wrong = results_error([_on(item, rank) for item in result], case.expected)
        if wrong:
            return Outcome("wrong", f"{where}: rank {rank}: {wrong}")
    return Outcome("ok")


def _made(x: torch.Tensor, spec: Spec, seed: int) -> DTensor:
    shards = shards_of(x, spec, seed)
    local = local_tensor.LocalTensor(dict(zip(spec.mesh.ranks, shards, strict=True)))
    return DTensor.from_local(
        local, _device_mesh(spec.mesh), placements(spec), run_check=False,
        shape=x.shape, stride=x.contiguous().stride(),
    )  # fmt: skip


def _whole(value: Any) -> Any:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.wait() if isinstance(full, AsyncCollectiveTensor) else full


def _on(value: Any, rank: int) -> Any:
    """Return a rank's value of a result."""
    while isinstance(value, local_tensor.LocalTensor):
        value = value._local_tensors[rank]
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        node = value.node
        stored = getattr(node, "_local_ints", None)
        return stored[rank] if stored is not None else value
    return value
