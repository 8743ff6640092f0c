"""Timeouts of collectives in the backward pass, without a check: the call and its line."""

from __future__ import annotations

import time
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import Ranks

MESH = Mesh(x=2)
CALLS = {
    "ppermute": lambda x: fs.ppermute(x, "x", [(0, 1), (1, 0)]),
    "all_gather": lambda x: fs.all_gather(x, "x"),
    "psum_scatter": lambda x: fs.psum_scatter(x, "x"),
    "all_to_all": lambda x: fs.all_to_all(x, "x", 0, 0, tiled=True),
    "pmax": lambda x: fs.pmax(x, "x"),
}


def gradient_on_rank_0(name: str, calls: int) -> None:
    """Take the gradient of the last of some calls on rank 0 alone, without a tracked type."""
    fs.init(MESH, timeout=2)
    collective = CALLS[name]

    def body(x: Tensor) -> Tensor:
        for _ in range(calls):
            y = collective(x)
        if dist.get_rank() == 1:
            time.sleep(3.5)
            return x.detach()
        return torch.autograd.grad(y.sum(), x)[0]

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=False)
    f(torch.ones(4, 2, requires_grad=True))


SLOW = [pytest.param(name, calls, marks=pytest.mark.slow) for name in CALLS for calls in (1, 3)]


@pytest.mark.parametrize(("name", "calls"), [("all_gather", 1), ("ppermute", 3), *SLOW])
def test_timeout_in_backward_names_the_call(name: str, calls: int) -> None:
    """A call that is repeated is replayed, and its gradient too."""
    with closing(Ranks(2, init=False)) as ranks:
        error = ranks.outcomes(gradient_on_rank_0, name, calls)[0].error
    assert isinstance(error, ShardingError)
    collective = CALLS[name]
    start = gradient_on_rank_0.__code__.co_firstlineno
    call = f"{__file__}:{collective.__code__.co_firstlineno}"
    head = str(error).partition("\n")[0]
    assert head.startswith(f"backward of fs.{name} over x: ")
    assert head.endswith(
        f"among the ranks (0, 1) did not end at {__file__}:{start + 11}, of the call at {call}"
    )
