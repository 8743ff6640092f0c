"""`sync_module`: the values of one rank on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.tree import flatten, unflatten
from fshard.run.transports.base import current_transport
from fshard.spmd.collectives.permutations import pbroadcast


def sync_module(state: Any, mesh: Mesh, /, *, src: int = 0) -> Any:
    """Return a tree of tensors with the values that one rank holds, by one broadcast.

    Tensors of all dtypes are sent as bytes in one launch. Shapes and dtypes must be equal on all
    ranks. A module is written by its own method:
    `module.load_state_dict(fs.state.sync_module(module.state_dict(), mesh))`.

    Args:
        state: pytree of tensors that every rank holds whole, such as the `params` and `buffers` of
            `fs.state.functional`. Pairs and other leaves stay as they are.
        mesh: the mesh whose ranks take part.
        src: the rank whose values count.

    Returns:
        The tree with tensors in memory of their own, without gradients. In a simulation, where one
        tensor is that of all ranks, copies.

    Raises:
        ShardingError: `src` is not a rank of the mesh.

    After ShardTensor's `sync_module_over_mesh` and the broadcast of DDP's constructor.

    >>> import torch
    >>> import fshard as fs
    >>> fs.state.sync_module({"w": torch.ones(2), "n": torch.tensor(3)}, fs.Mesh(x=2))
    {'w': tensor([1., 1.]), 'n': tensor(3)}
    """
    where = "fs.state.sync_module"
    mesh = as_mesh(mesh, where)
    if src not in mesh.ranks:
        fail(where, f"src={src!r}", f"src must be a rank of {mesh}", f"src={mesh.ranks[0]}")
    leaves, treedef = flatten(state)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    copies = [leaves[i].detach().clone() for i in indices]
    if current_transport() is not None and copies:
        views = [x.reshape(-1).view(torch.uint8) for x in copies]
        source = mesh.index(src, mesh.axes)
        received = pbroadcast(views, mesh.axes, source, mesh=mesh)
        copies = [
            data.view(x.dtype).reshape(x.shape) for data, x in zip(received, copies, strict=True)
        ]
    for i, x in zip(indices, copies, strict=True):
        leaves[i] = x
    return unflatten(treedef, leaves)
