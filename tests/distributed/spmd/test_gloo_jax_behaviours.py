"""Cases of `jax_cases.py` on gloo, compared with JAX's values."""

from __future__ import annotations

from typing import Any

import pytest

import fshard as fs
from fshard import Mesh
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.jax.jax_bodies import assert_same, expected, numbers
from tests.helpers.jax.jax_cases import CASES

EXPECTED = expected()
MESHES = list(dict.fromkeys(case.mesh for case in CASES.values()))


def on_rank(mesh: Mesh, names: list[str], check: Any) -> list[dict[str, Any]]:
    """Return results and gradients of some cases on one rank."""
    fs.init(mesh)
    return [numbers(CASES[name], check) for name in names]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_values_equal_the_recorded_ones_of_jax(mesh: Mesh, check: bool) -> None:
    names = [n for n, case in CASES.items() if case.mesh == mesh and (check or case.casts)]
    for results in run_ranks(mesh.size, on_rank, mesh, names, check):
        for name, item in zip(names, results, strict=True):
            assert_same(item, EXPECTED[name], name)
