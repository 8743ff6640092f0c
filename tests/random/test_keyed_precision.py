"""Draws in `fs.random.keyed`: accurate in half precision too, and refused where PyTorch refuses."""

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
    """Return weights of one likely class and of two thousand rare ones."""
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
def test_rare_events_have_their_probability(name: str, dtype: torch.dtype) -> None:
    """Check means to six standard errors plus the rounding of a weight."""
    draw, mean, deviation = MEANS[name]
    with fs.random.keyed(KEY):
        values = draw(dtype).double()
    error = 6 * deviation / values.numel() ** 0.5 + mean * torch.finfo(dtype).eps
    assert abs(values.mean() - mean) < error


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("replacement", [True, False])
def test_equal_weights_are_drawn_equally(dtype: torch.dtype, replacement: bool) -> None:
    """Draw each of many classes about a hundred times: counts deviate by ten."""
    weights = torch.ones(1000 if replacement else 100, dtype=dtype)
    with fs.random.keyed(KEY):
        if replacement:
            classes = torch.multinomial(weights, 100_000, replacement=True)
        else:
            classes = torch.multinomial(weights.expand(10_000, 100), 1).flatten()
    assert 7.5 < classes.bincount(minlength=len(weights)).double().std() < 12.5


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_exponential_number_is_zero(dtype: torch.dtype) -> None:
    with fs.random.keyed(KEY):
        values = torch.empty(1 << 20, dtype=dtype).exponential_()
    assert values.dtype == dtype
    assert (values > 0).all()
    assert values.log().isfinite().all()


# -- refusals -------------------------------------------------------------------------------

X, W = torch.zeros(4), torch.tensor([1.0, 3.0])
SCALES = "multinomial of weights from"
WEIGHTS = "weights must be finite and not negative, with a positive one in each row"
CLAMP = "weights.clamp(min=0), or logits.softmax(-1)"
COUNTS = "the number of draws must be in 1..2, or with replacement at least 1"
FEWER = "replacement=True, or fewer draws"
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "geometric_ with p=1.0": (lambda: X.geometric_(1.0), "p must be above 0 and below 1",
                              "x.fill_(1) for p=1: the first trial succeeds"),
    "geometric_ with p=0": (lambda: X.geometric_(0), "p must be above 0 and below 1",
                            "x.fill_(1) for p=1: the first trial succeeds"),
    "normal_ with std=-1": (lambda: X.normal_(0, -1), "std must be positive or zero",
                            "std=1.0, say"),
    "torch.normal with std=-1.0": (lambda: torch.normal(X, -1.0), "std must be positive or zero",
                                   "std=1.0, say"),
    "torch.normal with std=-0.5": (lambda: torch.normal(0.0, W - 1.5),
                                   "std must be positive or zero", "std=1.0, say"),
    "log_normal_ with std=0": (lambda: X.log_normal_(0, 0), "std must be positive", "std=1.0, say"),
    "exponential_ with lambd=0": (lambda: X.exponential_(0), "lambd must be positive",
                                  "lambd=1.0, say"),
    "cauchy_ with sigma=-1": (lambda: X.cauchy_(0, -1), "sigma must be positive", "sigma=1.0, say"),
    "uniform_ from 2 to 1": (lambda: X.uniform_(2, 1), "the first limit must not exceed the second",
                             "uniform_(1, 2)"),
    "integers from 0 to 3 in torch.bool": (lambda: X.bool().random_(0, 3),
                                          "the limits must be within 0 to 1", "dtype=torch.int64"),
    "integers from 0 to 65506 in torch.float16": (
        lambda: torch.randint(65506, (3,), dtype=torch.float16),
        "the limits must be within -65504 to 65504", "dtype=torch.int64"),
    "multinomial of torch.int64": (lambda: torch.multinomial(W.long(), 1),
                                   "weights must have a floating-point dtype", "weights.float()"),
    "multinomial, 3 of 2 classes": (lambda: torch.multinomial(W, 3), COUNTS, FEWER),
    "multinomial, 0 of 2 classes": (lambda: torch.multinomial(W, 0), COUNTS, FEWER),
    f"{SCALES} 0 to 0": (lambda: torch.multinomial(W * 0, 1), WEIGHTS, CLAMP),
    f"{SCALES} -1 to 1": (lambda: torch.multinomial(W - 2, 1), WEIGHTS, CLAMP),
    f"{SCALES} nan to nan": (lambda: torch.multinomial(W * torch.nan, 1), WEIGHTS, CLAMP),
}  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_invalid_arguments_are_refused(given: str) -> None:
    run, rule, fix = REFUSED[given]
    with pytest.raises(RuntimeError):
        run()
    with pytest.raises(ShardingError) as error, fs.random.keyed(KEY):
        run()
    assert str(error.value) == message("fs.random.keyed", given, rule, fix)


def test_limit_values_of_arguments_are_accepted() -> None:
    with fs.random.keyed(KEY):
        assert torch.equal(torch.empty(3).uniform_(2, 2), torch.full((3,), 2.0))
        assert torch.equal(torch.empty(3).normal_(2, 0), torch.full((3,), 2.0))
        assert sorted(torch.multinomial(torch.tensor([1.0, 0.0]), 2).tolist()) == [0, 1]
        assert not torch.multinomial(torch.ones(0, 2), 1).numel()
        assert torch.vmap(lambda w: torch.multinomial(w, 1))(torch.ones(3, 2)).shape == (3, 1)


def test_weights_of_one_rank_are_not_checked() -> None:
    """Ranks refuse together or not at all, and traced tensors have no values."""

    def body(key: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return torch.multinomial(w, 1)

    w = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    run = fs.shard_map(body, mesh=fs.Mesh(x=2), in_specs=(fs.P(), fs.P("x")), out_specs=fs.P("x"))
    assert run(KEY, w)[1] == 1
    assert make_fx(body)(KEY, w + 1)(KEY, w)[1] == 1
    spread = fs.partition(body, mesh=fs.Mesh(x=2), in_specs=(fs.P(), fs.P("x")))
    assert spread(KEY, w)[1] == 1
