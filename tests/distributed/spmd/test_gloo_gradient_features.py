"""Custom gradients, hooks and forward mode in mapped functions on two and four gloo ranks."""

from __future__ import annotations

import warnings

import pytest

import fshard as fs
from fshard import Mesh
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import one_in
from tests.helpers.spmd.derivatives.gradient_features import (
    FEATURES,
    differing,
    mapped,
    partitioned,
)


def differing_features(size: int, check: bool, every: int) -> list[str]:
    mesh = Mesh(x=size)
    fs.init(mesh)
    warnings.simplefilter("ignore")
    problems = []
    for name, feature in [*FEATURES.items()][::every]:
        found = differing("ranks", name, mapped(feature.fn, check, mesh))
        problems += [f"{name}: {text}" for text in found]
        if check:
            found = differing("partition", name, partitioned(feature.fn, mesh))
            problems += [f"{name}, partition: {text}" for text in found]
    return problems


@one_in(4)
@pytest.mark.parametrize(
    ("size", "check"), [(2, True), (2, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_features_are_right_or_refused_on_processes(size: int, check: bool, every: int) -> None:
    assert run_ranks(size, differing_features, size, check, every) == [[]] * size
