"""Custom gradients, hooks and forward mode in mapped functions on two gloo ranks."""

from __future__ import annotations

import warnings

import fshard as fs
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.derivatives.gradient_features import (
    FEATURES,
    MESH,
    differing,
    mapped,
    partitioned,
)


def differing_features() -> list[str]:
    fs.init(MESH)
    warnings.simplefilter("ignore")
    problems = []
    for name, feature in FEATURES.items():
        found = differing("ranks", name, mapped(feature.fn, True))
        problems += [f"{name}: {text}" for text in found]
        found = differing("partition", name, partitioned(feature.fn))
        problems += [f"{name}, partition: {text}" for text in found]
    return problems


def test_features_are_right_or_refused_on_processes() -> None:
    assert run_ranks(2, differing_features, timeout=120) == [[], []]
