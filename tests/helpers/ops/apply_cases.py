"""Pairs of random tensors, and calls of `fs.apply` that run in a simulation and on processes."""

from __future__ import annotations

from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P, Sharded, Spec

MESH = Mesh(x=2, y=2)


def pair_of(x: torch.Tensor, *entries: Any, mesh: Mesh = MESH, **kinds: Any) -> Sharded:
    """Return the pair of a tensor whose dims are sharded over `entries`."""
    return fs.shard(
        x, Spec(mesh, P(*entries, **kinds), shape=x.shape, dtype=x.dtype, uneven="chunk")
    )


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a random tensor."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rank_local_calls(size: int) -> list[Any]:
    """Apply operations to locals of one rank; return a global result and its gradients."""
    mesh = Mesh(x=size)
    x, w = draw(5, 6).requires_grad_(), draw(6, 4, seed=1).requires_grad_()
    rows = fs.apply(torch.mm, pair_of(x, "x", mesh=mesh), pair_of(w, mesh=mesh))
    sums = fs.apply(torch.mm, pair_of(x, None, "x", mesh=mesh), pair_of(w, "x", mesh=mesh))
    result = fs.unshard(fs.apply(torch.add, sums, rows, mode="auto"))
    result.square().sum().backward()
    return [result.detach(), x.grad, w.grad]
