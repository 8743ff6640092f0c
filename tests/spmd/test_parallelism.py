"""The parallelisms of large models, written by hand: gradients of one device, counted traffic.

Each body is what a user would write. What it is checked against is the same model on one
device in float64, and the exact collectives of forward and backward, per mesh axis. The
arguments are pairs: parameters stay where they lie, and nothing is gathered at the boundary.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import fshard as fs
from tests.helpers.spmd.parallel_models import (
    CHECKS,
    block,
    block_loss,
    error,
    summed,
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


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_and_traffic(case: Case, check: Check) -> None:
    compare(case, check, measure(case, check), case.mesh.ranks)


@pytest.mark.parametrize("name", ["block by tensor", "data"])
def test_casts_that_types_insert(name: str) -> None:
    """Without a cast in the body: one for each tensor, where it first meets what varies."""
    (case,) = (each for each in CASES if each.name == name)
    if name == "data":
        body = lambda p, batch: fs.pmean(block_loss(p, batch), "dp")  # noqa: E731
        bare = replace(case, body=body, backward={("all_reduce", "dp"): len(BLOCK)})
    else:
        bare = replace(
            case, body=lambda p, batch: error(block(p, batch["x"], leave=summed("tp")), batch)
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
