"""Transforms of `torch.func` around mapped functions on two gloo ranks, and the dense results."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fshard as fs
from fshard import P
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import one_in
from tests.helpers.spmd.transform_cases import (
    CALLS,
    CASES,
    MESH,
    TRANSFORMS,
    calls_of_rank,
    close,
    dense_call,
)


def differing(check: bool, every: int) -> dict[str, str]:
    """Return the transforms whose results are not the dense ones."""
    fs.init(MESH)
    warnings.simplefilter("ignore")
    errors = {}
    mapped: dict[str, Any] = {
        name: fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=out, check=check)
        for name, (body, out, _) in CASES.items()
    }
    calls = {name: (mapped[name], case.dense) for name, case in CASES.items()}
    others = {**CALLS, **calls_of_rank(MESH)} if check else {}
    calls |= {name: (call, dense_call) for name, call in others.items()}
    for first, (name, (call, dense)) in enumerate(calls.items()):
        for transform, run in [*TRANSFORMS.items()][first % every :: every]:
            try:
                close(run(call), run(dense))
            except AssertionError as error:
                errors[f"{transform} of {name}"] = str(error)[:300]
    return errors


@one_in(9)
@pytest.mark.parametrize("check", [True, False])
def test_transforms_of_mapped_functions_on_processes(check: bool, every: int) -> None:
    assert run_ranks(2, differing, check, every) == [{}, {}]
