"""Parallelisms of large models, written by hand: gradients of one device, counted traffic.

Each body is compared with the same model on one device in float64, and its collectives with the
expected ones, forward and backward, per mesh axis. Arguments are pairs, so that parameters stay
sharded and nothing is gathered at the boundary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fshard as fs
from fshard import Mesh, ShardingError
from tests.helpers.spec_grid import message
from tests.helpers.spmd.parallel_models import (
    CHECKS,
    block,
    block_loss,
    error,
    sum_over,
)
from tests.helpers.spmd.parallelism_cases import (
    ACCUMULATED,
    BLOCK,
    CASES,
    Case,
    Check,
    accumulate,
    compare,
    compare_accumulated,
    compare_mixed,
    measure,
    mixed,
)
from tests.helpers.spmd.pipeline import on_one_device, pipeline


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_and_traffic(case: Case, check: Check) -> None:
    compare(case, check, measure(case, check), case.mesh.ranks)


@pytest.mark.parametrize("name", ["block by tensor", "data"])
def test_types_insert_one_cast_per_tensor(name: str) -> None:
    """Without casts in the body, each tensor is cast once, at its first varying operand."""
    (case,) = (item for item in CASES if item.name == name)
    if name == "data":
        body = lambda p, batch: fs.pmean(block_loss(p, batch), "dp")  # noqa: E731
        bare = replace(case, body=body, backward={("all_reduce", "dp"): len(BLOCK)})
    else:
        bare = replace(
            case, body=lambda p, batch: error(block(p, batch["x"], leave=sum_over("tp")), batch)
        )
    compare(bare, True, measure(bare, True), bare.mesh.ranks)


# -- gradients taken in the body --------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ACCUMULATED)
def test_one_all_reduce_per_accumulated_step(name: str, check: Check) -> None:
    compare_accumulated(name, accumulate(name, check))


# -- mixed precision ----------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_travel_in_bf16_and_gradients_in_f32(check: Check) -> None:
    compare_mixed(mixed(check))


@pytest.mark.parametrize("check", [True, False])
def test_pipeline_has_the_gradients_of_one_device(check: bool) -> None:
    mesh = Mesh(i=4)
    torch.testing.assert_close(pipeline(mesh, check, cast=not check), on_one_device(mesh))


def test_unchecked_gradients_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(ShardingError) as error:
        pipeline(Mesh(i=4), False, cast=False)
    assert str(error.value) == message(
        "shard_map(stages)",
        "x: gradients that differ on ranks 0 and 1",
        "along i, which the spec omits, a gradient must be equal: check=False sums none, and under "
        "torchrun every rank keeps its part",
        "fs.pcast(x, 'i', to='varying') before its use; or check=True, which inserts it",
    )
