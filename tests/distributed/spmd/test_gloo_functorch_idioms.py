"""Idioms of PyTorch's own tests of `torch.func` and checkpoints, on two gloo ranks."""

from __future__ import annotations

import warnings
from typing import Any

import fshard as fs
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.derivatives import checkpoint_idioms, functorch_idioms
from tests.helpers.spmd.derivatives.functorch_idioms import dense
from tests.helpers.spmd.derivatives.gradient_features import MESH, mapped, partitioned


def differing() -> list[Any]:
    fs.init(MESH)
    warnings.simplefilter("ignore")
    places = mapped(dense, True), partitioned(dense)
    linearized = functorch_idioms.differing_linearizations(True)
    idioms = functorch_idioms.IDIOMS, checkpoint_idioms.IDIOMS
    found = [functorch_idioms.differing(place, table) for table in idioms for place in places]
    return [*found, linearized]


def test_idioms_on_processes() -> None:
    assert run_ranks(2, differing) == [[{}, {}, {}, {}, []]] * 2
