"""Draws in `fs.random.keyed` are as good in half precision as in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fshard as fs

KEY = fs.random.key(7)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def rare(dtype: torch.dtype) -> torch.Tensor:
    """One likely class, and two thousand of which each hardly ever is drawn."""
    weights = torch.full((500, 2000), 1e-6, dtype=dtype)
    weights[:, 0] = 0.5
    return weights


MEANS: dict[str, tuple[Callable[[torch.dtype], torch.Tensor], float, float]] = {
    "multinomial": (lambda d: torch.multinomial(rare(d), 1) == 0, 0.996, 0.063),
    "multinomial again": (
        lambda d: torch.multinomial(rare(d)[:1], 9999, replacement=True) == 0, 0.996, 0.063),
    "gumbel_softmax": (
        lambda d: F.gumbel_softmax(rare(d).log(), hard=True)[:, 0], 0.996, 0.063),
    "bernoulli": (lambda d: torch.bernoulli(torch.full((99_999,), 1e-3, dtype=d)), 1e-3, 0.0316),
    "bernoulli_": (
        lambda d: torch.empty(99_999, dtype=d).bernoulli_(torch.tensor(1e-3, dtype=d)),
        1e-3, 0.0316),
    "bernoulli_ of a number": (
        lambda d: torch.empty(99_999, dtype=d).bernoulli_(1e-3), 1e-3, 0.0316),
    "dropout": (lambda d: F.dropout(torch.ones(99_999, dtype=d), 0.999) > 0, 1e-3, 0.0316),
    "exponential_": (lambda d: torch.empty(99_999, dtype=d).exponential_() < 1e-3, 1e-3, 0.0316),
    "geometric_": (lambda d: torch.empty(99_999, dtype=d).geometric_(0.001) == 1, 1e-3, 0.0316),
    "cauchy_": (lambda d: torch.empty(99_999, dtype=d).cauchy_().abs() > 636.6, 1e-3, 0.0316),
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", MEANS)
def test_rare_events_are_as_rare_as_they_are(name: str, dtype: torch.dtype) -> None:
    """Within six standard errors, and what a weight is rounded to."""
    draw, mean, deviation = MEANS[name]
    with fs.random.keyed(KEY):
        made = draw(dtype).double()
    error = 6 * deviation / made.numel() ** 0.5 + mean * torch.finfo(dtype).eps
    assert abs(made.mean() - mean) < error


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("replacement", [True, False])
def test_equal_weights_are_drawn_equally(dtype: torch.dtype, replacement: bool) -> None:
    """Many of them, a hundred times each: the deviation of counts is ten."""
    weights = torch.ones(1000 if replacement else 200, dtype=dtype)
    with fs.random.keyed(KEY):
        if replacement:
            drawn = torch.multinomial(weights, 100_000, replacement=True)
        else:
            drawn = torch.multinomial(weights.expand(20_000, 200), 1).flatten()
    assert 8.5 < drawn.bincount(minlength=len(weights)).double().std() < 11.5


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_exponential_number_is_zero(dtype: torch.dtype) -> None:
    with fs.random.keyed(KEY):
        drawn = torch.empty(1 << 20, dtype=dtype).exponential_()
    assert drawn.dtype == dtype
    assert (drawn > 0).all()
    assert drawn.log().isfinite().all()
