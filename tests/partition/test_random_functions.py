"""Random functions on random layouts: values and gradients are those of one device."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.ops.random_functions import RandomCase

RANDOMS = st.randoms(use_true_random=False)
MANY = settings(suppress_health_check=list(HealthCheck))


@given(RANDOMS)
@settings(MANY, max_examples=12)
def test_functions_of_pairs(r: Random) -> None:
    RandomCase(r).on_pairs()


@given(RANDOMS)
@settings(MANY, max_examples=8)
def test_functions_of_tensors(r: Random) -> None:
    RandomCase(r).on_tensors()


@given(RANDOMS)
@settings(MANY, max_examples=10)
def test_functions_op_by_op(r: Random) -> None:
    RandomCase(r, most=5).op_by_op()


@given(RANDOMS)
@settings(MANY, max_examples=4)
def test_rank_local_code(r: Random) -> None:
    RandomCase(r).on_ranks()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(12))
def test_many_functions(seed: int) -> None:
    r = Random(seed)
    for _ in range(100):
        case = RandomCase(r)
        case.on_pairs()
        case.op_by_op()
        case.on_ranks()
