"""Process groups, stores and placements of `torch.distributed`."""

from __future__ import annotations

import ctypes
import importlib
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

__all__ = [
    "PrefixStore", "TCPStore", "call_below_autograd", "create_group", "default_group",
    "default_store", "init_default_group", "leak_groups", "pending_works",
    "register_meta_kernels", "resolve_group", "strided_shard_type",
]  # fmt: skip

default_group: Callable[[], Any] = partial(attrgetter("_default_pg"), c10d._world)
"""Return the default process group or None, ten times faster than `dist.group.WORLD`."""
default_store: Callable[[], Any] = c10d._get_default_store
init_default_group: Callable[[str], None] = c10d.init_process_group
"""Create the default process group of a backend from `torchrun`'s environment variables."""
resolve_group: Callable[[Any], Any] = c10d._resolve_process_group  # type: ignore[attr-defined]
"""Return the process group of a group name."""
pending_works: Callable[[], int] = torch._C._distributed_c10d._get_work_registry_size
"""Return the number of launched functional collectives that were not waited for."""


def call_below_autograd(op: Callable[..., Any], *args: Any) -> Any:
    """Return `op(*args)` of a functional collective, whose gradient is the caller's.

    PyTorch's kernels of these gradients are Python code, which takes longer than the launch.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def register_meta_kernels() -> None:
    """Register the shapes of functional collectives' results, for recordings on meta tensors."""
    importlib.import_module("torch.distributed._functional_collectives")


def create_group(ranks: Sequence[int], rank: int, prefix: str, timeout: timedelta | None) -> str:
    """Create a process group of `ranks`, called by these ranks alone, and return its name.

    The equivalent of `dist.new_group(use_local_synchronization=True)`, whose names count the groups
    of the process: ranks with different counts, as ranks of several meshes have, would wait for
    each other forever. Here the name is made of the prefix and the ranks.
    """
    name = c10d.GroupName("_".join([prefix, *map(str, ranks)]))
    if name in c10d._world.pg_names.values():
        return name
    parent = c10d._get_default_group()
    kind, store = c10d._world.pg_map[parent]
    backend = c10d.Backend(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(rank),
            list(ranks),
            backend,
            store,
            name,
            timeout=timeout or c10d._get_default_timeout(backend),
            device_id=parent.bound_device_id,
        )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return name


def leak_groups() -> None:
    """Keep the process groups until the process ends, without the wait of their destructors."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(c10d._world.pg_map))


def strided_shard_type() -> Any:
    """Return DTensor's `_StridedShard`, whose import takes seconds."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard
