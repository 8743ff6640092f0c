"""Draws in `fs.random.keyed`: as good in half precision as in float32; what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import ShardingError
from tests.helpers.spec_grid import message

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
    weights = torch.ones(1000 if replacement else 100, dtype=dtype)
    with fs.random.keyed(KEY):
        if replacement:
            drawn = torch.multinomial(weights, 100_000, replacement=True)
        else:
            drawn = torch.multinomial(weights.expand(10_000, 100), 1).flatten()
    assert 7.5 < drawn.bincount(minlength=len(weights)).double().std() < 12.5


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_exponential_number_is_zero(dtype: torch.dtype) -> None:
    with fs.random.keyed(KEY):
        drawn = torch.empty(1 << 20, dtype=dtype).exponential_()
    assert drawn.dtype == dtype
    assert (drawn > 0).all()
    assert drawn.log().isfinite().all()


# -- what is refused ------------------------------------------------------------------------

X, W = torch.zeros(4), torch.tensor([1.0, 3.0])
SCALES = "multinomial of weights from"
WEIGHTS = "weights are finite, none is below zero, and of every row one is above it"
NONE_BELOW = "weights.clamp(min=0), or logits.softmax(-1)"
COUNTS = "without replacement there are from 1 to 2, and with it any number above 0"
FEWER = "replacement=True, or fewer draws"
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "geometric_ with p=1.0": (lambda: X.geometric_(1.0), "p is above 0 and below 1",
                              "x.fill_(1) where p is 1: the first trial succeeds"),
    "geometric_ with p=0": (lambda: X.geometric_(0), "p is above 0 and below 1",
                            "x.fill_(1) where p is 1: the first trial succeeds"),
    "normal_ with std=-1": (lambda: X.normal_(0, -1), "std is above zero or zero",
                            "std=1.0, say"),
    "torch.normal with std=-1.0": (lambda: torch.normal(X, -1.0), "std is above zero or zero",
                                   "std=1.0, say"),
    "log_normal_ with std=0": (lambda: X.log_normal_(0, 0), "std is above zero", "std=1.0, say"),
    "exponential_ with lambd=0": (lambda: X.exponential_(0), "lambd is above zero",
                                  "lambd=1.0, say"),
    "cauchy_ with sigma=-1": (lambda: X.cauchy_(0, -1), "sigma is above zero", "sigma=1.0, say"),
    "uniform_ from 2 to 1": (lambda: X.uniform_(2, 1), "the first limit is not above the second",
                             "uniform_(1, 2)"),
    "numbers from 0 to 3 in torch.bool": (lambda: X.bool().random_(0, 3),
                                          "it holds those from 0 to 1", "dtype=torch.int64"),
    "numbers from 0 to 65506 in torch.float16": (
        lambda: torch.randint(65506, (3,), dtype=torch.float16),
        "it holds those from -65504 to 65504", "dtype=torch.int64"),
    "multinomial of torch.int64": (lambda: torch.multinomial(W.long(), 1),
                                   "weights are of a dtype of floating point", "weights.float()"),
    "multinomial, 3 of 2 classes": (lambda: torch.multinomial(W, 3), COUNTS, FEWER),
    "multinomial, 0 of 2 classes": (lambda: torch.multinomial(W, 0), COUNTS, FEWER),
    f"{SCALES} 0 to 0": (lambda: torch.multinomial(W * 0, 1), WEIGHTS, NONE_BELOW),
    f"{SCALES} -1 to 1": (lambda: torch.multinomial(W - 2, 1), WEIGHTS, NONE_BELOW),
    f"{SCALES} nan to nan": (lambda: torch.multinomial(W * torch.nan, 1), WEIGHTS, NONE_BELOW),
}  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_what_pytorch_refuses_is_refused(given: str) -> None:
    run, rule, fix = REFUSED[given]
    with pytest.raises(RuntimeError):
        run()
    with pytest.raises(ShardingError) as error, fs.random.keyed(KEY):
        run()
    assert str(error.value) == message("fs.random.keyed", given, rule, fix)


def test_limits_that_are_allowed() -> None:
    with fs.random.keyed(KEY):
        assert torch.equal(torch.empty(3).uniform_(2, 2), torch.full((3,), 2.0))
        assert torch.equal(torch.empty(3).normal_(2, 0), torch.full((3,), 2.0))
        assert sorted(torch.multinomial(torch.tensor([1.0, 0.0]), 2).tolist()) == [0, 1]
        assert not torch.multinomial(torch.ones(0, 2), 1).numel()
        assert torch.vmap(lambda w: torch.multinomial(w, 1))(torch.ones(3, 2)).shape == (3, 1)


def test_weights_of_a_part_are_not_looked_at() -> None:
    """Ranks refuse together, or not at all; what is traced has no numbers yet."""

    def body(key: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return torch.multinomial(w, 1)

    w = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    run = fs.shard_map(body, mesh=fs.Mesh(x=2), in_specs=(fs.P(), fs.P("x")), out_specs=fs.P("x"))
    assert run(KEY, w)[1] == 1
    assert make_fx(body)(KEY, w + 1)(KEY, w)[1] == 1
    spread = fs.partition(body, mesh=fs.Mesh(x=2), in_specs=(fs.P(), fs.P("x")))
    assert spread(KEY, w)[1] == 1
