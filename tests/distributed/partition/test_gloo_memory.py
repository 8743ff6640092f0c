"""Predicted memory of steps beside the allocations of real processes."""

from __future__ import annotations

import pytest

from tests.helpers.gloo.harness import run_ranks
from tests.helpers.gloo.memory_cases import CASES, NPROC, measured_and_predicted


@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_is_that_of_the_allocations(name: str) -> None:
    for measured, predicted, _ in run_ranks(NPROC, measured_and_predicted, name):
        assert predicted == pytest.approx(measured, rel=0.002)


def test_data_parallel_and_fsdp_hold_what_their_names_say() -> None:
    peaks = {
        name: run_ranks(NPROC, measured_and_predicted, name)[0][2]
        for name in ("data parallel", "fsdp", "fsdp, gathered again")
    }
    whole, sharded, again = peaks.values()
    assert sharded["parameters"] * NPROC == whole["parameters"] == again["parameters"] * NPROC
    assert (whole["gathered"], sharded["gathered"]) == (0, pytest.approx(4_724_736))
    assert again["gathered"] < sharded["gathered"]
