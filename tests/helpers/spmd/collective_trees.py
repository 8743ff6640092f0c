"""Collectives of trees: their launches, and values and gradients to second order on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard import Mesh
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd.collective_cases import this_rank

F64 = torch.float64
MESH = Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3))
SHAPES = ((12, 12), (12, 1, 12), (12, 0), (12,))
ON_TREES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "psum": (fs.psum, "all_reduce", ""),
    "pmean": (fs.pmean, "all_reduce", ""),
    "pmax": (fs.pmax, "all_reduce", "all_reduce"),
    "pmin": (fs.pmin, "all_reduce", "all_reduce"),
    "pprod": (fs.pprod, "all_gather", ""),
    "pcast": (lambda x, ax, **o: fs.pcast(x, ax, to="varying", **o), "", "all_reduce"),
    "all_gather": (fs.all_gather, "all_gather", "reduce_scatter"),
    "all_gather(1)": (
        lambda x, ax, **o: fs.all_gather(x, ax, axis=-1, tiled=True, **o),
        "all_gather", "reduce_scatter",
    ),
    "psum_scatter": (
        lambda x, ax, **o: fs.psum_scatter(x, ax, tiled=True, **o), "reduce_scatter", "all_gather",
    ),
    "all_to_all": (
        lambda x, ax, **o: fs.all_to_all(x, ax, 0, -1, tiled=True, **o), "all_to_all", "all_to_all",
    ),
    "ppermute": (lambda x, ax, **o: fs.ppermute(x, ax, [(0, 1)], **o), "ppermute", "ppermute"),
    "pbroadcast": (lambda x, ax, **o: fs.pbroadcast(x, ax, 1, **o), "broadcast", "reduce"),
}  # fmt: skip


def leaves(rank: int) -> list[torch.Tensor]:
    return [
        random_global(shape, F64, 10 * rank + i).requires_grad_() for i, shape in enumerate(SHAPES)
    ]


def values_and_gradients(
    run: Callable[[list[torch.Tensor]], list[torch.Tensor]], mesh: Mesh = MESH
) -> Any:
    """Return this rank's results, gradients and gradients of the gradients' squares."""
    xs = leaves(this_rank(mesh))
    ys = run(xs)
    total = sum(((y + 1) ** 2).sum() for y in ys)
    grads = torch.autograd.grad(total, xs, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in grads), xs, allow_unused=True)
    rows = ys, list(grads), second
    return [[None if x is None else x.detach() for x in row] for row in rows]
