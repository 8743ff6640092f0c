"""Sizes of uneven shards that bodies leave out: exchanged where arguments are uneven."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.uneven_bodies import MESH, SHAPE, SPEC, check_bodies, differences


@pytest.mark.parametrize("check", [True, "strict", "values", "collectives", False])
def test_bodies_equal_one_device(check: Any) -> None:
    check_bodies(check)


def extend(x: torch.Tensor) -> torch.Tensor:
    extended: torch.Tensor = fs.domain.halo_exchange(x, {0: (0, 1)}, axis_name={0: "h"})
    return extended[: len(x)]


def test_even_arguments_exchange_nothing() -> None:
    run = fs.shard_map(extend, mesh=MESH, in_specs=P("h"), out_specs=P("h"))
    with fs.comm_log() as log:
        run(torch.ones(8))
    assert log.counts["all_gather", "h"] == 1  # of the result
    with fs.comm_log() as log:
        fs.local_map(extend, out_specs=SPEC)(fs.shard(torch.ones(SHAPE).double(), SPEC))
    assert log.bytes["all_gather", "h"] == 3 * 8  # an int64 to each of three ranks


def test_sizes_are_exchanged_in_nested_maps_and_recomputed_parts() -> None:
    mesh = Mesh(d=1, h=4)
    spec = fs.Spec(mesh, SPEC.partition, shape=SHAPE, dtype=SPEC.dtype, sizes={0: SPEC.sizes[0]})

    def nested(x: torch.Tensor) -> torch.Tensor:
        inner = fs.shard_map(differences, mesh=None, axis_names={"d"}, in_specs=P(), out_specs=P())
        result: torch.Tensor = inner(x)
        return result

    def recomputed(x: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(differences, x, use_reentrant=False)

    x = fs.random.normal(fs.random.key(0), SHAPE, dtype=torch.float64).requires_grad_()
    results = []
    for body in (differences, nested, recomputed):
        names = {"h"} if body is nested else {"d", "h"}
        mapped = fs.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=names)
        y = mapped(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    torch.testing.assert_close(results[1:], results[:1] * 2)
