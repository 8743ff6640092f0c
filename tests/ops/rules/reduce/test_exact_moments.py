"""Weighted means and variances over uneven shards, beside numbers of extended precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.strategies import shard_sizes

PRECISIONS = {torch.float32: 1e-6, torch.float64: 1e-13}
"""Relative errors of variances of values a million times as large as their deviations."""


def expected(x: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any]:
    """Return variance and mean over the first dim, of numbers of 64 bits and more."""
    values, w = x.numpy().astype(np.longdouble), weights.numpy().astype(np.longdouble)
    mean = (w * values).sum(0) / w.sum(0)
    return (w * (values - mean) ** 2).sum(0) / w.sum(0), mean


@settings(max_examples=10)
@given(data=st.data(), dtype=st.sampled_from([*PRECISIONS]), exponent=st.integers(0, 30))
def test_variance_is_precise_where_means_are_large(
    data: st.DataObject, dtype: torch.dtype, exponent: int
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    first, second = torch.rand(2, 24, 2, dtype=torch.float64, generator=generator)
    x, weights = (1e6 + first).to(dtype), (10.0 ** (exponent * (second - 0.5))).to(dtype)
    sizes = data.draw(shard_sizes(24, 4))
    spec = Spec(Mesh(x=4), P("x"), shape=x.shape, dtype=dtype, sizes={0: sizes})
    with fs.comm_log() as log:
        pairs = fs.domain.weighted_var_mean(fs.shard(x, spec), fs.shard(weights, spec), 0)
    assert [*log.bytes] == [("all_reduce", "x")]
    assert log.counts["all_reduce", "x"] == 1
    for pair, value in zip(pairs, expected(x, weights), strict=True):
        error = np.abs(fs.unshard(pair).numpy().astype(np.longdouble) / value - 1).max()
        assert error < PRECISIONS[dtype]


@pytest.mark.parametrize("names", [("x", "y"), (("x", "y"), None)])
def test_gradients_equal_one_device(names: Any) -> None:
    def step(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        variance, mean = fs.domain.weighted_var_mean(x, weights, 0)
        return variance, mean, fs.domain.weighted_mean(x, weights)

    generator = torch.Generator().manual_seed(0)
    x, weights = torch.rand(4, 3, dtype=torch.float64, generator=generator).split((2, 1), 1)
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(step, (x, weights))
    assert torch.autograd.gradcheck(step, (x, weights), check_forward_ad=True)
    mesh, specs = Mesh(x=2, y=2), (P(*names), P(names[0]))
    one = step(x, weights)
    part = fs.partition(step, mesh=mesh, in_specs=specs, out_specs=P())(x, weights)
    torch.testing.assert_close(part, one, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad([y.sum() for y in ys], (x, weights)) for ys in (part, one)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    mean = (weights * x).sum(0) / weights.sum()
    variance = (weights * (x - mean).square()).sum(0) / weights.sum()
    plain = variance.sum() + mean.sum() + mean.mean()
    grad = torch.autograd.grad(plain, (x, weights))
    torch.testing.assert_close(grads[1], grad, rtol=1e-12, atol=1e-12)


def test_weights_that_add_up_to_nothing() -> None:
    spec = Spec(Mesh(x=2), P("x"), shape=(4,))
    x, weights = fs.shard(torch.arange(4.0), spec), fs.shard(torch.zeros(4), spec)
    assert fs.unshard(fs.domain.weighted_mean(x, weights)).isnan()
    half = fs.shard(torch.tensor([0.0, 0.0, 1.0, 3.0]), spec)  # the first rank has none
    variance, mean = map(fs.unshard, fs.domain.weighted_var_mean(x, half))
    torch.testing.assert_close((variance, mean), (torch.tensor(0.1875), torch.tensor(2.75)))


def test_complex_means() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j, 0.5j])
    weights = torch.tensor([1.0, 2.0, 5.0])
    spec = Spec(Mesh(x=2), P("x"), shape=(3,), dtype=x.dtype, sizes={0: (1, 2)})
    mean = fs.unshard(fs.domain.weighted_mean(fs.shard(x, spec), weights))
    torch.testing.assert_close(mean, (weights * x).sum() / 8)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_vmap_equals_a_loop(capfd: pytest.CaptureFixture[str]) -> None:
    x, weights = torch.randn(3, 4, 2, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    spec = Spec(Mesh(x=2), P("x"), shape=(4, 2), dtype=x.dtype)

    def moments(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = fs.domain.weighted_var_mean(fs.shard(x, spec), fs.shard(weights, spec), 0)
        local = fs.domain.weighted_var_mean(x, weights, 0)
        return torch.stack([*map(fs.unshard, pairs), *local])

    for dims, rows in (
        ((0, None), [(row, weights) for row in x]),
        ((None, 0), [(weights, row) for row in x.abs()]),
    ):
        args = (x, weights) if dims[1] is None else (weights, x.abs())
        torch.testing.assert_close(
            torch.func.vmap(moments, dims)(*args), torch.stack([moments(*row) for row in rows])
        )
    assert "performance drop" not in capfd.readouterr().err
