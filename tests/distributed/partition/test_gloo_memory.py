"""Predicted memory of steps beside the allocations of real processes."""

from __future__ import annotations

import pytest

from tests.helpers.gloo.harness import run_ranks
from tests.helpers.gloo.memory_cases import CASES, LIMIT, NPROC, measured_cases


@pytest.mark.slow
def test_predicted_peaks_are_those_of_the_allocations() -> None:
    """The rank with the least counts: threads of gloo release operands late by chance."""
    ranks = run_ranks(NPROC, measured_cases)
    for name in CASES:
        measured = min(cases[name][0] for cases in ranks)
        for cases in ranks:
            assert cases[name][1] == pytest.approx(measured, rel=0.05), name
    assert min(cases["limited"][0] for cases in ranks) <= LIMIT
    whole, sharded, again, *_ = (held for _, _, held in ranks[0].values())
    assert sharded["parameters"] * NPROC == whole["parameters"] == again["parameters"] * NPROC
    assert (whole["gathered"], sharded["gathered"]) == (0, 4_724_736)
