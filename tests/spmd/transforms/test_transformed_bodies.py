"""Compositions of transforms, to depth three, around random bodies on random layouts."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.transformed_bodies import TRANSFORMS, TransformedCase


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_compositions_of_transforms_equal_one_device(seed: int) -> None:
    TransformedCase(Random(seed)).run()


def test_cases_compose_every_transform_to_depth_three() -> None:
    cases = [TransformedCase(Random(seed)) for seed in range(300)]
    assert {name for case in cases for name in case.transforms} == {*TRANSFORMS}
    assert {len(case.transforms) for case in cases} == {1, 2, 3}
    assert {row.name for case in cases for row in case.rows} >= {
        "psum", "pmean", "all_gather", "ppermute", "psum_scatter", "matmul", "sum",
    }  # fmt: skip
