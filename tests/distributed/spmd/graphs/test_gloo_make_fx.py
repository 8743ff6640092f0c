"""Graphs that `make_fx` records on two gloo ranks have functional collectives."""

from __future__ import annotations

import fshard as fs
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import one_in
from tests.helpers.spmd.derivatives.recorded_cases import (
    CASES,
    MESH,
    ON_RANKS,
    linear_problems,
    problems,
)


def recorded(every: int) -> list[str]:
    fs.init(MESH)
    rows = dict([*ON_RANKS.items(), *CASES.items()][::every])
    found = [text for name, case in rows.items() for text in problems(name, case, on_rank=True)]
    return found + [text for name, case in rows.items() for text in linear_problems(name, case)]


@one_in(7)
def test_recorded_graphs_have_functional_collectives(every: int) -> None:
    assert run_ranks(2, recorded, every) == [[], []]
