"""Errors of ragged exchanges on one of two gloo ranks are raised on both, which then go on."""

from __future__ import annotations

import fshard as fs
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.ragged_cases import REFUSED, refusals, text

MESH = fs.Mesh(i=2)


def refusals_on_rank() -> list[str]:
    fs.init(MESH, timeout=60)
    return refusals(MESH)


def test_all_ranks_raise_the_same_errors() -> None:
    for results in run_ranks(2, refusals_on_rank):
        for item, actual in zip(REFUSED, results, strict=True):
            assert actual == text(item.lines), item.name
