"""Idioms of PyTorch's own tests of `torch.func`, around simulated and partitioned functions."""

from __future__ import annotations

import pytest

from tests.helpers.spmd.derivatives.functorch_idioms import dense, differing
from tests.helpers.spmd.derivatives.gradient_features import mapped, partitioned

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of linearize


@pytest.mark.parametrize("check", [True, False])
def test_idioms_around_mapped_functions(check: bool) -> None:
    assert differing(mapped(dense, check)) == {}


def test_idioms_around_partitioned_functions() -> None:
    assert differing(partitioned(dense)) == {}
