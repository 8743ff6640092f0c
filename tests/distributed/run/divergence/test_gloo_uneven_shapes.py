"""Collectives on shards of different sizes: refused before they are launched, as in a simulation.

Gloo would abort a process that receives more bytes than it expects, or give others' memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2, y=2)
SPEC = fs.Spec(MESH, P("x"), shape=(4,), sizes={0: (1, 3)})
BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "fs.psum over x": lambda x: fs.psum(x, "x"),
    "fs.pmax over x": lambda x: fs.pmax(x, "x"),
    "fs.all_gather(tiled=True) over x": lambda x: fs.all_gather(x, "x", tiled=True),
    "fs.ppermute(perm=[[0, 1], [1, 0]]) over x": lambda x: fs.ppermute(x, "x", [(0, 1), (1, 0)]),
}


def error_of(name: str, check: bool, locals_: Any) -> str:
    """Return the error of a body on shards of one and three elements."""
    f = fs.shard_map(BODIES[name], mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=check)
    with pytest.raises(fs.ShardingError) as error:
        f((locals_, SPEC))
    return str(error.value)


def errors_on_rank(check: bool) -> list[str]:
    fs.init(MESH)
    local = torch.ones(SPEC.local_shape(torch.distributed.get_rank()))
    return [error_of(name, check, local) for name in BODIES]


@pytest.mark.parametrize("check", [True, False])
def test_other_shapes_are_refused_on_every_rank(check: bool) -> None:
    shards = tuple(torch.ones(SPEC.local_shape(rank)) for rank in MESH.ranks)
    simulated = [error_of(name, check, shards) for name in BODIES]
    for rank, texts in enumerate(run_ranks(4, errors_on_rank, check)):
        group = (rank % 2, rank % 2 + 2)
        for name, text, expected in zip(BODIES, texts, simulated, strict=True):
            head, first, second, *rest = text.split("\n")
            assert head == f"ranks of the group {group} call different collectives"
            for line, member, size in ((first, group[0], 1), (second, group[1], 3)):
                assert line.startswith(f"  rank {member} (x={member // 2}, y={rank % 2}): {name}: ")
                assert f"torch.float32 of ({size},) at {__file__}:" in line
            assert rest == expected.split("\n")[3:]


def uneven_gradients(locals_: Any) -> tuple[Any, ...]:
    """Return a loss and gradients of a body on uneven shards, whose sums have equal shapes."""

    def body(x: Tensor) -> Tensor:
        return fs.psum(x.square().sum(), "x") * fs.pmax(x.detach().sum(), "x")

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P())
    results = []
    for _ in range(2):
        with fs.comm_log() as log:
            local = f((locals_, SPEC)).local
            losses, leaves = ((x if isinstance(x, tuple) else (x,)) for x in (local, locals_))
            grads = torch.autograd.grad(losses, leaves)
        results.append((losses[0].detach(), grads, log.forward.counts))
    return tuple(results)


def uneven_gradients_on_rank() -> tuple[Any, ...]:
    fs.init(MESH)
    rank = torch.distributed.get_rank()
    return uneven_gradients(torch.full(SPEC.local_shape(rank), 2.0).requires_grad_())


def test_equal_shapes_in_uneven_bodies_are_compared_once_and_not_logged() -> None:
    shards = tuple(torch.full(SPEC.local_shape(r), 2.0).requires_grad_() for r in MESH.ranks)
    simulated = uneven_gradients(shards)
    for rank, results in enumerate(run_ranks(4, uneven_gradients_on_rank)):
        for (loss, grads, counts), (total, every, logged) in zip(results, simulated, strict=True):
            assert (loss, counts) == (total, logged)
            torch.testing.assert_close(grads[0], every[rank])
