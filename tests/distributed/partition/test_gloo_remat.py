"""`fs.partition(remat=)` on gloo ranks: losses, gradients, launches and saved bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.remat_cases import CASES, LAYERS, launch_order, measured, one_device

MESHES = {2: Mesh(x=2, y=1), 4: Mesh(x=2, y=2, devices=(2, 0, 3, 1))}
NAMES = {
    2: ["FSDP", "FSDP, gathered again", "FSDP, nothing kept"],
    4: ["hybrid", "hybrid, gathered again"],
}


def results_of_rank(
    n: int, names: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[tuple[str, str]]]:
    fs.init(MESHES[n])
    results = {name: measured(MESHES[n], name) for name in names}
    for result in results.values():
        result["predicted"] = result["predicted"].total
    return results, launch_order(MESHES[n])


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_recompute_alike(n: int) -> None:
    expected, expected_grads = one_device()
    ranks = run_ranks(n, results_of_rank, n, NAMES[n])
    for results, order in ranks:
        for name, result in results.items():
            torch.testing.assert_close(result["loss"], expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(
                result["grads"], list(expected_grads), rtol=1e-10, atol=1e-12
            )
            assert result["measured"] == result["predicted"], name
            assert result["launches"] == sum(result["backward"].values()), name
        assert order == ranks[0][1]
        assert order.count(("backward", "all_gather")) == LAYERS
        for name, result in results.items():  # the same values as without recomputation
            base = results[name.partition(",")[0]]
            assert torch.equal(result["loss"], base["loss"])
            assert all(map(torch.equal, result["grads"], base["grads"]))


@pytest.mark.slow
def test_all_cases_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, 2, list(CASES))
    test_ranks_recompute_alike(2)
