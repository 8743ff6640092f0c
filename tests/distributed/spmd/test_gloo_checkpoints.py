"""`torch.utils.checkpoint` in and around mapped and partitioned functions, on gloo ranks."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import Mesh
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.checkpoint_cases import (
    AROUND,
    differentiated,
    kept_by_call,
    kept_gradients,
    layer,
    results,
)

MESHES = {2: Mesh(x=2, y=1), 4: Mesh(x=2, y=2, devices=(2, 0, 3, 1))}
CASES = {
    2: [("policy", "single"), ("reentrant", "single"), ("reentrant", "nested")],
    4: [("plain", "nested"), ("policy", "nested"), ("plain", "sequence")],
}


def results_of_rank(n: int) -> list[dict[str, list[torch.Tensor]]]:
    fs.init(MESHES[n])
    return [results(MESHES[n], *case) for case in CASES[n]]


@pytest.mark.parametrize("n", MESHES)
def test_checkpoints_equal_one_device(n: int) -> None:
    expected = differentiated(lambda x, w, v: layer(layer(x, w, v), w, v))
    for cases in run_ranks(n, results_of_rank, n):
        for values in (values for case in cases for values in case.values()):
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-10)


def kept_on_rank(n: int) -> dict[tuple[str, bool], tuple[int, tuple[int, int], list[torch.Tensor]]]:
    fs.init(MESHES[n])
    return {
        (name, check): kept_by_call(MESHES[n], around, check)
        for name, around in AROUND.items()
        for check in (True, False)
    }


def test_checkpoints_around_a_call_keep_nothing_of_it() -> None:
    for rows in run_ranks(4, kept_on_rank, 4):
        for (name, _), (kept, runs, gradients) in rows.items():
            is_checkpointed = name != "nothing"
            assert (kept == 0, runs) == (is_checkpointed, (1, 1 + is_checkpointed)), name
            torch.testing.assert_close(gradients, kept_gradients(), rtol=0, atol=1e-10)
