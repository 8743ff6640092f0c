"""`fs.interop.save_dcp`: trees of pairs as checkpoints of `torch.distributed.checkpoint` (DCP).

The other way is `fs.state.load`, which reads DCP's files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fshard._util.errors import fail
from fshard.layout.sharded import Sharded
from fshard.layout.tree import flatten, leaf_names, plain_containers
from fshard.run.transports.base import current_transport, is_simulated
from fshard.state.checkpoints.checkpoint_index import check_names
from fshard.state.checkpoints.save_plan import SavePlan, check_reduced


def save_dcp(directory: str | Path, tree: Any, /) -> None:
    """Save a tree of pairs as a checkpoint of `torch.distributed.checkpoint`.

    Each rank writes its shards, and its share of replicas. DTensors of any layout, such as those of
    FSDP2, and plain tensors are loaded from it by `torch.distributed.checkpoint.load`, pairs by
    `fs.state.load`.

    Args:
        directory: the directory, which all ranks see; it is created.
        tree: pytree of pairs, of tensors that are equal on every rank, and of numbers, strings,
            bools and None. Dicts have strings as keys. DCP names a leaf by its keys joined by dots.
            DCP stores tuples as lists: tuples with tensors load as lists.

    Raises:
        ShardingError: a leaf cannot be saved, or a pair is unreduced. Errors of DCP pass.

    >>> import tempfile
    >>> import torch
    >>> import fshard as fs
    >>> pair = fs.shard(torch.arange(4), fs.Mesh(x=2), fs.P("x"))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     fs.interop.save_dcp(directory, {"w": pair, "step": 3})
    ...     fs.state.load(directory)
    {'w': tensor([0, 1, 2, 3]), 'step': 3}
    """
    # These imports take seconds.
    from torch.distributed.checkpoint.state_dict_saver import save

    from fshard.interop.dcp_planner import BoxPlanner

    where = "fs.interop.save_dcp"
    leaves = flatten(tree)[0]
    check_names(where, tree, leaf_names(tree), leaves)
    check_reduced(where, leaf_names(tree), leaves)
    if is_simulated():
        fail(where, "a simulated rank", "ranks that save must be processes, or not be in a body",
             "save the pairs outside of fs.simulate and fs.shard_map")  # fmt: skip
    by_path = dict(_dcp_items((), plain_containers(tree, leaves)))
    paths, items = [*by_path], [*by_path.values()]
    names = [".".join(map(str, path)) for path in paths]
    transport = current_transport()
    plan = SavePlan.of(items, getattr(transport, "all_ranks", None))
    boxes = {
        (names[index], offsets): local.detach()
        for rank in (plan.ranks if transport is None else (transport.rank,))
        for index, offsets, local in plan.locals(items, rank, transport is None)
    }
    shapes = {names[index]: items[index].shape for index in plan.boxes}
    values = {name: x for i, (name, x) in enumerate(zip(names, items, strict=True))
              if i not in plan.boxes}  # fmt: skip
    planner = BoxPlanner(boxes, shapes, values, dict(zip(names, paths, strict=True)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save({}, checkpoint_id=directory, planner=planner, no_dist=transport is None)


def _dcp_items(path: tuple[Any, ...], node: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the keys and the value of each item of DCP, which keeps lists of plain values whole.

    An empty dict is an item: DCP has no other trace of it.
    """
    if isinstance(node, dict) and node:
        for key, child in node.items():
            yield from _dcp_items((*path, key), child)
    elif isinstance(node, list | tuple) and any(map(_has_items, node)):
        for index, child in enumerate(node):
            yield from _dcp_items((*path, index), child)
    else:
        yield path, node


def _has_items(node: Any) -> bool:
    if isinstance(node, list | tuple):
        return any(map(_has_items, node))
    return isinstance(node, dict | torch.Tensor | Sharded)
