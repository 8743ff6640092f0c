"""`fs.random.keyed`: PyTorch's random functions draw with a key, the same on every layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P, ShardingError
from fshard.partition.ir import Operation
from tests.helpers.spec_grid import message

KEY, OTHER = fs.random.key(7), fs.random.key(8)
MESH = fs.Mesh(dp=2, tp=2)
F64 = torch.float64


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=dtype).reshape(shape) / 10


X, WEIGHTS = numbers(6, 8, 16), numbers(3, 5)
aten = torch.ops.aten
DRAWING: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(X, 0.3),
    "dropout in place": lambda: F.dropout(X.clone(), 0.3, inplace=True),
    "torch.dropout": lambda: torch.dropout(X, 0.3, True),
    "torch.dropout_": lambda: torch.dropout_(X.clone(), 0.3, True),
    "native_dropout": lambda: torch.native_dropout(X, 0.3, True),
    "dropout1d": lambda: F.dropout1d(X, 0.4),
    "dropout2d": lambda: F.dropout2d(X[None], 0.4),
    "dropout3d": lambda: F.dropout3d(X[..., None, None], 0.4),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.4, training=True),
    "alpha_dropout in place": lambda: F.alpha_dropout(X.clone(), 0.4, True, inplace=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(X, 0.4, training=True),
    "feature_alpha_dropout_": lambda: torch.feature_alpha_dropout_(X.clone(), 0.4, True),
    "feature_dropout_": lambda: torch.feature_dropout_(X.clone(), 0.4, True),
    "a module": lambda: nn.Dropout(0.3)(X),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.2, is_causal=True),
    "attention's module": lambda: attend(need_weights=True),
    "attention's module, fused": lambda: attend(need_weights=False),
    "a transformer's layer": lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.3)(X),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "rrelu in place": lambda: F.rrelu(-X, training=True, inplace=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(X.cos(), 2, output_size=5),
    "fractional_max_pool3d": lambda: F.fractional_max_pool3d(X[None].cos(), 2, output_size=4,
                                                             return_indices=True),
    "svd_lowrank": lambda: torch.svd_lowrank(X[0], 3),
    "rand": lambda: torch.rand(3, 4),
    "rand of a list": lambda: torch.rand([3, 4], dtype=F64),
    "rand of a size": lambda: torch.rand(size=(3,), layout=torch.strided),
    "rand of nothing": lambda: torch.rand(()),
    "rand into": lambda: torch.rand(3, out=torch.empty(0)),
    "rand with a gradient": lambda: torch.rand(3, requires_grad=True),
    "randn": lambda: torch.randn(3, 4),
    "randint": lambda: torch.randint(10, (5,)),
    "randint from": lambda: torch.randint(3, 10, (5,), dtype=torch.int32),
    "randint by names": lambda: torch.randint(low=3, high=10, size=(5,)),
    "randint by some names": lambda: torch.randint(high=10, size=(5,)),
    "randperm": lambda: torch.randperm(9),
    "rand_like": lambda: torch.rand_like(X),
    "rand_like of aten": lambda: aten.rand_like.default(X),
    "randn_like": lambda: torch.randn_like(input=X, dtype=F64),
    "randint_like": lambda: torch.randint_like(X, 5),
    "randint of fractions": lambda: torch.randint(0, 10, (9,), dtype=torch.float16),
    "randint of booleans": lambda: torch.randint(2, (30,), dtype=torch.bool),
    "randint_like of booleans": lambda: torch.randint_like(X > 3, 2),
    "randint_like in fractions": lambda: torch.randint_like(X.int(), 9, dtype=F64),
    "randint_like from": lambda: torch.randint_like(X.int(), 2, 5),
    "bernoulli": lambda: torch.bernoulli(torch.full((9,), 0.3)),
    "bernoulli of a number": lambda: torch.bernoulli(X, 0.3),
    "bernoulli's method": (X / 100).bernoulli,
    "bernoulli_": lambda: torch.empty(9).bernoulli_(0.2),
    "bernoulli_ of a tensor": lambda: torch.empty(9).bernoulli_(torch.full((9,), 0.3)),
    "uniform_": lambda: torch.empty(9).uniform_(),
    "uniform_ between": lambda: torch.empty(9).uniform_(-1, 3),
    "uniform_ by names": lambda: torch.empty(9).uniform_(**{"from": 2, "to": 3}),
    "normal_": lambda: torch.empty(9).normal_(3, 0.1),
    "normal_ by names": lambda: torch.empty(9).normal_(mean=3, std=0.1),
    "normal of means": lambda: torch.normal(torch.zeros(4), 2.0),
    "normal of deviations": lambda: torch.normal(0.0, torch.ones(4)),
    "normal of both": lambda: torch.normal(torch.zeros(3, 1), torch.ones(4)),
    "normal of a size": lambda: torch.normal(1.0, 2.0, (3,)),
    "random_": lambda: torch.empty(9, dtype=torch.int64).random_(),
    "random_ of booleans": lambda: torch.empty(30, dtype=torch.bool).random_(),
    "random_ to": lambda: torch.empty(9).random_(5),
    "random_ from": lambda: torch.empty(9).random_(3, 5),
    "random_ of fractions": lambda: torch.empty(9).random_(),
    "exponential_": lambda: torch.empty(9).exponential_(2.0),
    "log_normal_": lambda: torch.empty(9).log_normal_(),
    "geometric_": lambda: torch.empty(9).geometric_(0.3),
    "cauchy_": lambda: torch.empty(9).cauchy_(),
    "multinomial": lambda: torch.multinomial(WEIGHTS, 3),
    "multinomial again": lambda: torch.multinomial(WEIGHTS, 9, replacement=True),
    "a distribution": lambda: torch.distributions.Normal(0.0, 1.0).rsample((3,)),
    "a choice": lambda: torch.distributions.Categorical(probs=WEIGHTS).sample((5,)),
    "a linear layer": lambda: nn.Linear(4, 4).weight,
    "a convolution": lambda: nn.Conv2d(2, 3, 3).bias,
    "an embedding": lambda: nn.Embedding(4, 4).weight,
    "trunc_normal_": lambda: nn.init.trunc_normal_(torch.empty(5)),
    "xavier_normal_": lambda: nn.init.xavier_normal_(torch.empty(5, 5)),
    "kaiming_uniform_": lambda: nn.init.kaiming_uniform_(torch.empty(5, 5)),
    "init.uniform_": lambda: nn.init.uniform_(torch.empty(5), 1, 2),
    "init.normal_": lambda: nn.init.normal_(torch.empty(5), 1, 2),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(5, 5)),
    "sparse_": lambda: nn.init.sparse_(torch.empty(5, 5), 0.3),
}  # fmt: skip


def attend(*, need_weights: bool) -> torch.Tensor:
    module = nn.MultiheadAttention(16, 4, dropout=0.3)
    output: torch.Tensor = module(X, X, X, need_weights=need_weights)[0]
    return output


def flat(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.fixture(autouse=True)
def _generators_stay() -> Iterator[None]:
    """Check that no draw changes PyTorch's generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", DRAWING)
def test_random_functions_draw_with_the_key(name: str) -> None:
    """Equal keys draw equal values, another key others; shapes are those of PyTorch."""
    draw = DRAWING[name]
    results = []
    for key in (KEY, KEY, OTHER):
        with fs.random.keyed(key):
            results.append([item.detach() for item in flat(draw())])
    assert all(map(torch.equal, results[0], results[1]))
    assert not all(map(torch.equal, results[0], results[2]))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unkeyed = flat(draw())
    for result, pytorch in zip(results[0], unkeyed, strict=True):
        assert (result.shape, result.dtype) == (pytorch.shape, pytorch.dtype)
        assert result.isfinite().all()


MEANS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    "dropout": (lambda x: F.dropout(x + 1, 0.3), 1.0, 0.655),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.3, True), 0.0, 1.0),
    "normal_": (lambda x: x.normal_(3, 2), 3.0, 2.0),
    "exponential_": (lambda x: x.exponential_(2.0), 0.5, 0.5),
    "geometric_": (lambda x: x.geometric_(0.25), 4.0, 12**0.5),
    "log_normal_": (lambda x: x.log_normal_(0.0, 0.5), 1.1331, 0.604),
    "random_": (lambda x: x.random_(0, 5), 2.0, 2**0.5),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.2), 0.2, 0.4),
    "multinomial": (
        lambda x: torch.multinomial((x[:, :3] + 1).cumsum(-1), 1).to(x.dtype), 4 / 3, 0.7454),
    "multinomial again": (
        lambda x: torch.multinomial((x[:1, :3] + 1).cumsum(-1), 99999, True).to(x.dtype),
        4 / 3, 0.7454),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_means_and_deviations(name: str) -> None:
    """Check 100,000 values to six standard errors."""
    draw, mean, deviation = MEANS[name]
    with fs.random.keyed(KEY):
        output = draw(torch.zeros(100_000, 3 if "multi" in name else 1, dtype=F64))
    error = 6 * deviation / output.numel() ** 0.5
    assert abs(output.mean() - mean) < error
    assert abs(output.std() - deviation) < 6 * error


def test_draw_n_folds_n_into_the_key() -> None:
    """Draw n has the key with n folded in; nested blocks count their own draws."""
    with fs.random.keyed(KEY):
        first = torch.rand(3)
        with fs.random.keyed(OTHER):
            inner = torch.rand(3)
        second = torch.rand(3)
    keys = [fs.random.fold_in(KEY, n) for n in range(2)]
    assert torch.equal(first, fs.random.uniform(keys[0], 3))
    assert torch.equal(second, fs.random.uniform(keys[1], 3))
    assert torch.equal(inner, fs.random.uniform(fs.random.fold_in(OTHER, 0), 3))


def test_inactive_dropout_uses_no_key() -> None:
    with fs.random.keyed(KEY):
        F.dropout(X, 0.0)
        F.dropout(X, 0.5, training=False)
        nn.Dropout(0.5).eval()(X)
        F.scaled_dot_product_attention(X, X, X)
        output = torch.rand(3)
    assert torch.equal(output, fs.random.uniform(fs.random.fold_in(KEY, 0), 3))


def test_explicit_generator_is_used() -> None:
    with fs.random.keyed(KEY):
        output = torch.rand(3, generator=torch.Generator().manual_seed(3))
    assert torch.equal(output, torch.rand(3, generator=torch.Generator().manual_seed(3)))


def test_dropout_multiplies_by_the_mask() -> None:
    x = numbers(5, 4).requires_grad_()
    mask = fs.random.dropout_mask(fs.random.fold_in(KEY, 0), x, 0.3)
    with fs.random.keyed(KEY):
        y = F.dropout(x, 0.3)
    assert torch.equal(y, x * mask)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], mask)


def test_attention_dropout_matches_products() -> None:
    """Compare with products of dropped weights, for grouped queries and a mask."""
    q, k, v = numbers(2, 4, 5, 6), numbers(2, 2, 5, 6).cos(), numbers(2, 2, 5, 6).sin()
    mask = torch.ones(5, 5).tril().bool()
    with fs.random.keyed(KEY):
        output = F.scaled_dot_product_attention(q, k, v, mask, 0.4, enable_gqa=True)
    drop = fs.random.dropout_mask(fs.random.fold_in(KEY, 0), (2, 2, 2, 5, 5), 0.4)
    weights = q.unflatten(1, (2, 2)) @ k.unsqueeze(2).mT / 6**0.5
    weights = weights.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = ((weights * drop) @ v.unsqueeze(2)).flatten(1, 2)
    torch.testing.assert_close(output, expected)


# -- checkpoints ----------------------------------------------------------------------------


def twice(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(F.dropout(x, 0.5)), 0.5)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_draws(inside: bool, nested: bool, reentrant: bool) -> None:
    """Differentiate in the block and after it; later draws are unaffected."""

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(twice, x, use_reentrant=reentrant)
        return output

    def outer(x: torch.Tensor) -> torch.Tensor:
        once = checkpointed(x)
        return checkpointed(once) if nested else twice(once)

    results = []
    for run in (lambda x: checkpoint(outer, x, use_reentrant=reentrant), lambda x: twice(twice(x))):
        x = numbers(8, 8).requires_grad_()
        with fs.random.keyed(KEY):
            y = run(torch.rand(8, 8) * x) * torch.rand(8, 8)
            grad = torch.autograd.grad(y.sum(), x)[0] if inside else None
            rest = torch.rand(3)
        results.append((y, grad if grad is not None else torch.autograd.grad(y.sum(), x)[0], rest))
    assert all(map(torch.equal, *results))


def test_checkpoint_patches_are_undone() -> None:
    before = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    with fs.random.keyed(KEY), fs.random.keyed(OTHER):
        pass
    after = checkpoints._checkpoint_without_reentrant_generator, checkpoints.CheckpointFunction
    assert after == before
    assert before[0].__module__ == "torch.utils.checkpoint"


# -- in bodies ------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [True, "strict", "values", False])
def test_types_and_values_of_draws_in_bodies(check: Any) -> None:
    """An invariant key draws invariant values; a key with the axis index, varying ones."""

    def body(key: torch.Tensor, x: torch.Tensor) -> Any:
        rank_key = fs.random.fold_in(key, fs.axis_index("dp"))
        same, apart = fs.random.uniform(key, 3), fs.random.normal(rank_key, 3)
        like = fs.random.normal(key, x)
        sharded = fs.random.normal(key, fs.Spec(MESH, P("dp", "tp"), shape=(4, 6))).local
        with fs.random.keyed(rank_key):
            dropped = F.dropout(x, 0.5)
        shown = (same, apart, like, sharded, dropped)
        types = [str(fs.typeof(item)) for item in shown] if check else []
        return same, apart, sharded, dropped, types

    x = numbers(4, 6).requires_grad_()
    run = fs.shard_map(body, mesh=MESH, in_specs=(P(), P("dp")), check=check,
                       out_specs=(P(), P("dp"), P("dp", "tp"), P("dp"), None))  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same, apart, sharded, dropped, types = run(KEY, x)
    if check:
        assert types == [
            "f32[3]", "f32[3]{varying: dp}", "f32[2,6]", "f32[2,3]{varying: dp, tp}",
            "f32[2,6]{varying: dp}",
        ]  # fmt: skip
    keys = [fs.random.fold_in(KEY, rank) for rank in range(2)]
    assert torch.equal(same, fs.random.uniform(KEY, 3))
    assert torch.equal(apart, torch.cat([fs.random.normal(key, 3) for key in keys]))
    assert torch.equal(sharded, fs.random.normal(KEY, (4, 6)))
    masks = [fs.random.dropout_mask(fs.random.fold_in(key, 0), (2, 6), 0.5) for key in keys]
    assert torch.equal(dropped, x * torch.cat(masks))
    assert torch.equal(torch.autograd.grad(dropped.sum(), x)[0], torch.cat(masks))


def test_block_around_a_mapped_function_is_refused() -> None:
    """A block around a mapped function would count the draws of all ranks."""
    x = numbers(4, 6).requires_grad_()
    specs = {"mesh": MESH, "in_specs": P("dp"), "out_specs": P("dp")}
    runs: list[Callable[[], Any]] = [
        lambda: fs.shard_map(F.dropout, **specs)(x),
        lambda: fs.shard_map(F.dropout, check=False, **specs)(x),
        lambda: fs.simulate(MESH, lambda: torch.rand(3)),
    ]
    for run in runs:
        with (
            warnings.catch_warnings(action="ignore"),
            pytest.raises(ShardingError) as error,
            fs.random.keyed(KEY),
        ):
            run()
        assert str(error.value) == message(
            "fs.random.keyed",
            "a block around a mapped function",
            "the block must be in the mapped function: it counts the draws of one rank",
            "with fs.random.keyed(key): in the function, with the key as an argument",
        )
    with fs.random.keyed(KEY):
        assert torch.equal(fs.shard_map(torch.tanh, **specs)(x), x.tanh())


@pytest.mark.parametrize("check", [True, False])
def test_checkpoint_in_a_body_repeats_draws(check: bool) -> None:
    """Recomputation of a checkpoint, or of a body, draws the same values."""

    def body(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(fs.random.fold_in(key, fs.axis_index("dp"))):
            y = checkpoint(twice, x, use_reentrant=False) * torch.rand(2, 6)
        return fs.psum(y.sum(), "dp")

    run = fs.shard_map(body, mesh=MESH, in_specs=(P(), P("dp")), out_specs=P(), check=check)
    x = numbers(4, 6).requires_grad_()
    (first,) = torch.autograd.grad(run(KEY, x), x, create_graph=True)
    expected = torch.tensor(0.0)
    for rank, part in enumerate(x.chunk(2)):
        with fs.random.keyed(fs.random.fold_in(KEY, rank)):
            expected = expected + (twice(part) * torch.rand(2, 6)).sum()
    (reference,) = torch.autograd.grad(expected, x, create_graph=True)
    torch.testing.assert_close(first, reference)
    second, second_reference = (
        torch.autograd.grad(item.sum(), x)[0] for item in (first, reference)
    )
    torch.testing.assert_close(second, second_reference)


def test_draw_of_a_spec_requires_an_invariant_key() -> None:
    def body(key: torch.Tensor) -> torch.Tensor:
        rank_key = fs.random.fold_in(key, fs.axis_index("dp"))
        output: torch.Tensor = fs.random.normal(rank_key, fs.Spec(MESH, P("dp"), shape=(4,))).local
        return output

    run = fs.shard_map(body, mesh=MESH, in_specs=P(), out_specs=P("dp"))
    with pytest.raises(ShardingError, match=r"fs\.random\.normal"):
        run(KEY)


# -- refusals -------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "poisson()": (
        lambda: torch.poisson(X),
        "draw before the block, or pass generator=; or write it with draws of fs.random"),
    "lstm()": (
        lambda: nn.LSTM(16, 3, 2, dropout=0.5)(X),
        "dropout=0.0, and F.dropout between the layers, each called alone"),
}  # fmt: skip


@pytest.mark.parametrize("given", REFUSED)
def test_functions_without_a_keyed_form_are_refused(given: str) -> None:
    run, fix = REFUSED[given]
    with pytest.raises(ShardingError) as error, fs.random.keyed(KEY):
        run()
    assert str(error.value) == message(
        "fs.random.keyed",
        given,
        "a random function in the block must have a form that draws with a key",
        fix,
    )


def test_keyed_requires_a_key() -> None:
    with pytest.raises(ShardingError) as error, fs.random.keyed(3):  # type: ignore[arg-type]
        pass
    assert str(error.value) == message(
        "fs.random.keyed", "a key that is int",
        "a key must be an int64 tensor of two words of 32 bits", "fs.random.key(0)")  # fmt: skip


def test_grad_and_vmap_of_a_keyed_function() -> None:
    def loss(w: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return F.dropout(w, 0.5).sum()

    keys = fs.random.split(KEY, 3)
    alone = torch.stack([torch.func.grad(loss)(torch.ones(6), key) for key in keys])
    together = torch.vmap(torch.func.grad(loss))(torch.ones(3, 6), keys)
    assert torch.equal(alone, together)
    assert set(alone.unique().tolist()) == {0.0, 2.0}


def test_draws_follow_the_layout_of_operands() -> None:
    """An unconstrained draw gets the layout of a same-shaped operand that precedes it."""

    def noisy(key: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        with fs.random.keyed(key):
            one = x + (torch.randn(4, 8) * 0.1).tanh()
            two = torch.where(torch.rand(4, 8) < 0.5, x, y.T)
            alone = torch.rand(4, 8)
            early = torch.rand(8, 4) + y
        return one, two, alone, early

    x, y = numbers(4, 8), numbers(8, 4)
    part = fs.partition(noisy, mesh=MESH, in_specs=(P(), P("dp", "tp"), P("tp")))
    output = part.trace(KEY, x, y)
    assert all(map(torch.equal, part(KEY, x, y), noisy(KEY, x, y)))
    drawn = {
        line.name: str(line.strategy.out_specs[0]) for line in output.lines
        if isinstance(line, Operation) and line.name.startswith(("uniform", "normal"))
    }  # fmt: skip
    assert drawn == {
        "normal": "f32[4@dp,8@tp]", "uniform": "f32[4@dp,8@tp]", "uniform_1": "f32[4,8]",
        "uniform_2": "f32[8@tp,4]",
    }  # fmt: skip
