"""Idioms of PyTorch's own tests of `torch.func`, around functions on two gloo ranks."""

from __future__ import annotations

import warnings

import fshard as fs
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.derivatives import functorch_idioms
from tests.helpers.spmd.derivatives.functorch_idioms import dense
from tests.helpers.spmd.derivatives.gradient_features import MESH, mapped, partitioned


def differing() -> list[dict[str, str]]:
    fs.init(MESH)
    warnings.simplefilter("ignore")
    places = mapped(dense, True), partitioned(dense)
    return [functorch_idioms.differing(f) for f in places]


def test_idioms_on_processes() -> None:
    assert run_ranks(2, differing) == [[{}, {}]] * 2
