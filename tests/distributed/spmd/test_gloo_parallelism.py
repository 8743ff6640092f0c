"""Parallelisms of large models on gloo: gradients of one device, counted traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd import wire_dtype_cases as wires
from tests.helpers.spmd.parallel_models import CHECKS
from tests.helpers.spmd.parallelism_cases import (
    ACCUMULATED,
    CASES,
    Check,
    Measurement,
    accumulate,
    compare,
    compare_accumulated,
    compare_mixed,
    measure,
    mixed,
)
from tests.helpers.spmd.pipeline import on_one_device, pipeline


def measured(size: int, check: Check) -> list[Measurement]:
    results = []
    for case in CASES:
        if case.mesh.size == size:
            fs.init(case.mesh)
            results.append(measure(case, check))
    return results


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_and_traffic(size: int, check: Check) -> None:
    by_rank = run_ranks(size, measured, size, check)
    for index, case in enumerate(case for case in CASES if case.mesh.size == size):
        for rank in case.mesh.ranks:
            compare(case, check, by_rank[rank][index], [rank])


def in_the_body(name: str, check: Check) -> Any:
    fs.init(ACCUMULATED[name][0])
    return accumulate(name, check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ACCUMULATED)
def test_one_all_reduce_per_accumulated_step(name: str, check: Check) -> None:
    for results in run_ranks(ACCUMULATED[name][0].size, in_the_body, name, check):
        compare_accumulated(name, results)


def mixed_on_rank(check: Check) -> None:
    """Compare on the rank: bf16 results depend on the number of threads."""
    fs.init(Mesh(dp=2))
    compare_mixed(mixed(check))


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_travel_in_bf16_and_gradients_in_f32(check: Check) -> None:
    run_ranks(2, mixed_on_rank, check)


def wires_on_rank(mesh: Mesh) -> list[str]:
    fs.init(mesh)
    return wires.on_rank(mesh)


def test_values_are_cast_once_in_each_direction() -> None:
    mesh = wires.LINE
    assert run_ranks(2, wires_on_rank, mesh) == [[], []]


def pipelines(mesh: Mesh) -> list[list[torch.Tensor]]:
    fs.init(mesh)
    modes = (True, False), (False, True), (False, False)
    return [pipeline(mesh, check, cast=cast) for check, cast in modes]


def test_pipeline_has_the_gradients_of_one_device() -> None:
    mesh = Mesh(i=4)
    expected = on_one_device(mesh)
    by_rank = run_ranks(4, pipelines, mesh)
    for checked, cast, _ in by_rank:
        torch.testing.assert_close(checked, expected)
        torch.testing.assert_close(cast, expected)
    # Without a check or a cast every rank has its part, which a simulation refuses.
    torch.testing.assert_close(sum(parts[2] for *_, parts in by_rank), expected[2])
