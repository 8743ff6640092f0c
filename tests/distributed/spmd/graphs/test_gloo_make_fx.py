"""Graphs that `make_fx` records on two gloo ranks have functional collectives."""

from __future__ import annotations

import fshard as fs
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.derivatives.recorded_cases import (
    CASES,
    MESH,
    ON_RANKS,
    linear_problems,
    problems,
)


def recorded() -> list[str]:
    fs.init(MESH)
    rows = {**ON_RANKS, **CASES}
    found = [text for name, case in rows.items() for text in problems(name, case, on_rank=True)]
    return found + [text for name, case in rows.items() for text in linear_problems(name, case)]


def test_recorded_graphs_have_functional_collectives() -> None:
    assert run_ranks(2, recorded) == [[], []]
