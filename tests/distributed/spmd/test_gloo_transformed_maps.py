"""Transforms of `torch.func` around mapped functions on two gloo ranks, and the dense results."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import fshard as fs
from fshard import P
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.transform_cases import CASES, MESH, TRANSFORMS, close


def differing(check: bool) -> dict[str, str]:
    """Return the transforms whose results are not the dense ones; linearize is refused by name."""
    fs.init(MESH)
    warnings.simplefilter("ignore")
    errors = {}
    for name, (body, out, dense) in CASES.items():
        mapped: Any = fs.shard_map(
            body, mesh=MESH, in_specs=(P("x"), P()), out_specs=out, check=check
        )
        for transform, run in TRANSFORMS.items():
            try:
                close(run(mapped), run(dense))
            except AssertionError as error:
                errors[f"{transform} of {name}"] = str(error)[:300]
            except fs.ShardingError as error:
                if transform != "linearize" or "torch.func.jvp(f" not in str(error):
                    raise
    return errors


@pytest.mark.parametrize("check", [True, False])
def test_transforms_of_mapped_functions_on_processes(check: bool) -> None:
    assert run_ranks(2, differing, check, timeout=120) == [{}, {}]
