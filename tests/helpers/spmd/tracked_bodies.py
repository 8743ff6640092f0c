"""Bodies of mapped functions whose types are checked on two ranks, and custom operations.

A body takes a tensor that varies along `x` and one that is invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

import fshard as fs
from fshard import Mesh, P
from fshard.spmd.axis_env import current_tracker

__all__ = ["MESH", "Body", "I", "V", "add", "attended", "counted", "fill", "fills", "run_body"]

MESH = Mesh(x=2)
V, I = "{varying: x}", ""  # noqa: E741
Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def run_body(body: Body, check: bool | str = True, grad: bool = True) -> list[Any]:
    """Return, for each rank, states of the result, states that the host read, and the result."""
    results = []

    def mapped(x: torch.Tensor, w: torch.Tensor) -> None:
        y = body(x, w)
        tracker = current_tracker()
        results.append((str(fs.typeof(y).states), str(tracker.read_states), y.detach().clone()))

    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=grad)
    w = torch.tensor([7.0, 8.0], requires_grad=grad)
    f = fs.shard_map(mapped, mesh=MESH, in_specs=(P("x"), P()), out_specs=None, check=check)
    f(x, w)
    return results


def attended(w: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    x = w.expand(1, 2, 2)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=dropout_p)


@torch.library.custom_op("fshard_test::counted", mutates_args=())
def counted(x: torch.Tensor) -> int:
    return int(x.sum())


@torch.library.custom_op("fshard_test::fill", mutates_args={"out"})
def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


@torch.library.custom_op("fshard_test::fills", mutates_args={"outs"})
def fills(outs: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    for out in outs:
        out.copy_(x)


@torch.library.custom_op("fshard_test::add", mutates_args=())
def add(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Multiply; a custom operation named as a linear one."""
    return x * w
