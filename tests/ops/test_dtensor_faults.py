"""Functions on which DTensor is silently wrong: fshard is right or raises.

Each function goes through `apply`, call by call, on every column of layouts: even and uneven, with
empty shards, on two axes and with unreduced operands. Values, and gradients where it has some,
must equal those of global tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.partition.apply import apply
from tests.helpers.ops.op_database import case_of, try_layout
from tests.helpers.ops.op_layouts import COLUMNS, layouts

THREE = Mesh(x=3)
aten = torch.ops.aten


@pytest.fixture(autouse=True, params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=str)
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the number of layouts of a kind that `right` tries; the slow tests try more."""
    monkeypatch.setitem(LIMIT, "most", request.param)


LIMIT = {"most": 2}


def right(function: Callable[..., Any], *tensors: torch.Tensor, most: int = 4) -> None:
    """Assert that a function is right on layouts of all kinds, and runs on them."""
    most = min(most, LIMIT["most"])
    case = case_of("function", function, *tensors)
    matches = []
    for column in COLUMNS:
        kind = replace(column, limit=most if column.limit > 6 else (most + 1) // 2)
        outcomes = [try_layout(case, specs) for specs in layouts(case, kind)]
        matches += [f"{x.word} {x.text}" for x in outcomes if x.word != "ok"]
    assert not matches, "\n".join(matches[:5])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return values of both signs."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naturals(*shape: int, below: int, seed: int = 0) -> torch.Tensor:
    """Return non-negative integers."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def unreduced(*shards: torch.Tensor, kind: str = "sum") -> Sharded:
    """Return a pair with the given unreduced values."""
    mesh = Mesh(x=len(shards))
    spec = Spec(mesh, P(unreduced={"x": kind}), shape=shards[0].shape, dtype=shards[0].dtype)
    return Sharded(shards, spec)


def value(pair: Any) -> torch.Tensor:
    """Return the global tensor of a pair; a number as it is."""
    return fs.unshard(pair) if isinstance(pair, Sharded) else torch.as_tensor(pair)


# -- integers -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_stay_integers_under_sums(dtype: torch.dtype) -> None:
    x = naturals(6, 4, below=9).to(dtype)
    right(lambda x: x.sum(), x)
    right(lambda x: x.sum(0), x)
    right(lambda x: x.sum(1, dtype=torch.int32), x)
    right(lambda x: x + 3, x)
    right(lambda x: x.mul(2).sum(-1), x)


def test_sums_of_large_integers_are_exact() -> None:
    """A detour through float64 would show beyond 2 ** 53."""
    x = torch.tensor([2**53, 1, 1, 2**53, 1, 3])
    right(lambda x: x.sum(), x)
    pair = unreduced(torch.tensor([2**60]), torch.tensor([1]))
    assert value(apply(aten.mul.Tensor, pair, 3, mode="auto")).item() == 3 * (2**60 + 1)


def test_integer_products_stay_integers() -> None:
    right(lambda a, b: a @ b, naturals(4, 6, below=5), naturals(6, 2, below=5, seed=1))


def test_a_quotient_of_unreduced_integers_is_that_of_their_sum() -> None:
    pair = unreduced(torch.tensor([3, 5]), torch.tensor([4, 5]))
    for op, args in ((aten.div.Tensor, (2,)), (aten.floor_divide.default, (2,))):
        result = value(apply(op, pair, *args, mode="auto"))
        expected = op(torch.tensor([7, 10]), *args)
        assert result.dtype == expected.dtype
        assert result.equal(expected)


# -- caches -------------------------------------------------------------------------------


def test_equal_numbers_of_other_types_are_other_arguments() -> None:
    x = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    pair = fs.shard(x, Spec(THREE, P("x"), shape=(6,), dtype=torch.int32))
    numbers = (1, 1.0, True, 0, 0.0, False, torch.tensor(1), torch.tensor(1.0), torch.tensor(True))
    for op in (torch.add, torch.mul, torch.pow):
        for number in (*numbers, *reversed(numbers)):
            result, expected = value(apply(op, pair, number)), op(x, number)
            assert result.dtype == expected.dtype, (op, number)
            assert result.equal(expected), (op, number)


def test_zeros_of_both_signs_are_different_arguments() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    pair = fs.shard(x, Spec(THREE, P("x"), shape=(3,)))
    for zero in (0.0, -0.0, 0.0):
        result, expected = value(apply(torch.div, pair, zero)), torch.div(x, zero)
        assert result.equal(expected)
        result, expected = value(apply(torch.copysign, pair, zero)), torch.copysign(x, zero)
        assert result.equal(expected)


def test_scalar_tensors_and_numbers_promote_differently() -> None:
    x = torch.tensor([1, 2, 3])
    pair = fs.shard(x, Spec(THREE, P("x"), shape=(3,), dtype=torch.int64))
    none = Spec(THREE, P(), shape=(), dtype=torch.float64)
    for expected, plain in (
        (2.0, 2.0),
        (fs.shard(torch.tensor(2.0, dtype=torch.float64), none), torch.tensor(2.0).double()),
        (torch.tensor(2.0, dtype=torch.float16), torch.tensor(2.0, dtype=torch.float16)),
        (2, 2),
    ):
        result, leaves = value(apply(torch.add, pair, expected)), torch.add(x, plain)
        assert result.dtype == leaves.dtype
        assert result.equal(leaves)


def test_nan_arguments_hit_the_cache() -> None:
    pair = fs.shard(torch.ones(3), Spec(THREE, P("x"), shape=(3,)))
    for _ in range(2):
        assert value(apply(torch.add, pair, float("nan"))).isnan().all()


# -- losses -------------------------------------------------------------------------------


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft_margin": lambda x, y: F.soft_margin_loss(x, y.sign().detach()),
    "bce_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "kl_div": lambda x, y: F.kl_div(x, y, log_target=True),
    "kl_div batchmean": lambda x, y: F.kl_div(x, y, reduction="batchmean", log_target=True),
    "poisson": F.poisson_nll_loss,
    "hinge": lambda x, y: F.hinge_embedding_loss(x, y.sign().detach()),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", [5, 2])
def test_mean_losses_over_uneven_and_empty_shards(name: str, rows: int) -> None:
    loss = LOSSES[name]
    right(loss, draw(rows, 3), draw(rows, 3, seed=1).detach())


def test_weighted_binary_losses() -> None:
    weight, positive = draw(5, 3, seed=2).abs(), draw(3, seed=3).abs()
    logits = F.binary_cross_entropy_with_logits
    right(lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w.detach()),
          draw(5, 3), draw(5, 3, seed=1), weight)  # fmt: skip
    right(lambda x, y, w, p: logits(x, y.sigmoid(), w.detach(), pos_weight=p.detach()),
          draw(5, 3), draw(5, 3, seed=1), weight, positive)  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "weighted", "ignored"),  # each two values together
    [(5, True, 1), (2, False, -100),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, False, 1), (2, True, -100)))],
)  # fmt: skip
def test_cross_entropy_with_class_weights_and_ignored_classes(
    rows: int, weighted: bool, ignored: int
) -> None:
    target = naturals(rows, below=3)
    target[:1] = ignored
    target[-1] = 2

    def loss(x: torch.Tensor, y: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y, *[item.detach() for item in w], ignore_index=ignored)

    def nll(x: torch.Tensor, y: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(
            x.log_softmax(-1), y, *[item.detach() for item in w], ignore_index=ignored
        )

    weights = (torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64),) if weighted else ()
    right(loss, draw(rows, 3), target, *weights)
    right(nll, draw(rows, 3), target, *weights)


def test_cross_entropy_of_pixels_of_probabilities_and_smoothed() -> None:
    right(F.cross_entropy, draw(3, 4, 5), naturals(3, 5, below=4))
    right(lambda x, y: F.cross_entropy(x, y.softmax(-1)), draw(5, 3), draw(5, 3, seed=1))
    right(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2), draw(5, 3), naturals(5, below=3))


def test_losses_with_a_shard_of_ignored_targets() -> None:
    target = torch.tensor([-100, -100, 0, 2, 1, 1])
    right(F.cross_entropy, draw(6, 3), target)


# -- cosines ------------------------------------------------------------------------------


def test_cosines_over_a_sharded_feature_dim() -> None:
    right(F.cosine_similarity, draw(4, 6), draw(4, 6, seed=1))
    target = torch.tensor([1, -1, 1, -1])
    right(F.cosine_embedding_loss, draw(4, 6), draw(4, 6, seed=1), target)


def test_cosine_losses_over_uneven_rows() -> None:
    target = torch.tensor([1, -1, 1, -1, 1])
    right(lambda a, b, y: F.cosine_embedding_loss(a, b, y, margin=0.1),
          draw(5, 4), draw(5, 4, seed=1), target)  # fmt: skip


# -- convolutions -------------------------------------------------------------------------


CONVOLUTIONS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "1d": (lambda x, w, b: F.conv1d(x, w, b, padding=1), (2, 4, 8), (6, 4, 3)),
    "1d strided": (lambda x, w, b: F.conv1d(x, w, b, stride=2), (2, 4, 8), (6, 4, 2)),
    "1d grouped": (lambda x, w, b: F.conv1d(x, w, b, groups=2), (2, 4, 8), (6, 2, 3)),
    "1d of single points": (F.conv1d, (2, 4, 8), (6, 4, 1)),
    "2d": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (2, 3, 4, 6), (3, 3, 3, 3)),
    "3d": (F.conv3d, (1, 2, 3, 3, 4), (2, 2, 2, 2, 2)),
    "transposed 1d": (F.conv_transpose1d, (2, 4, 8), (4, 6, 3)),
    "transposed 2d": (F.conv_transpose2d, (2, 4, 3, 4), (4, 3, 2, 2)),
    "depthwise": (lambda x, w, b: F.conv1d(x, w, b, groups=6), (2, 6, 8), (6, 1, 3)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_over_sharded_width_and_channels(name: str) -> None:
    function, of, kernel = CONVOLUTIONS[name]
    outputs = kernel[1] if "transposed" in name else kernel[0]
    right(function, draw(*of), draw(*kernel, seed=1), draw(outputs, seed=2))


# -- indices ------------------------------------------------------------------------------


def test_gathers_over_sharded_dims() -> None:
    x, index = draw(6, 4), naturals(6, 4, below=4)
    right(lambda x, i: torch.gather(x, 1, i), x, index)
    right(lambda x, i: torch.gather(x, 0, i), x, naturals(3, 4, below=6))
    right(lambda x, i: torch.take_along_dim(x, i, 1), x, index)
    right(lambda x, i: torch.index_select(x, 0, i), x, naturals(5, below=6))
    right(lambda x, i: x[i], x, naturals(5, below=6))
    right(lambda x, i: x[:, i], x, naturals(5, below=4))


def test_scatters_over_sharded_dims() -> None:
    x, index = draw(6, 4), naturals(3, 4, below=6)
    right(lambda x, i, y: torch.scatter_add(x, 0, i, y), x, index, draw(3, 4, seed=1))
    right(lambda x, i, y: torch.index_add(x, 0, i, y), x, naturals(5, below=6), draw(5, 4, seed=1))
    once = torch.tensor([[5, 0, 3, 2], [1, 2, 0, 4], [0, 1, 2, 3]])
    right(lambda x, i, y: torch.scatter(x, 0, i, y), x, once, draw(3, 4, seed=1))
    right(lambda x, i: torch.scatter(x, 0, i, 2.5), x, once)
    right(lambda x, i, y: torch.scatter_reduce(x, 0, i, y, "amax"), x, once, draw(3, 4, seed=1))
    right(lambda x, i, y: torch.index_copy(x, 0, i, y), x, torch.tensor([4, 0]), draw(2, 4, seed=1))


# -- fills --------------------------------------------------------------------------------


def test_fills_of_unreduced_values() -> None:
    """Filling every partial sum with a number would multiply it by the number of ranks."""
    pair = unreduced(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0]))
    assert value(apply(aten.fill.Scalar, pair, 7.0, mode="auto")).tolist() == [7.0, 7.0]
    assert value(apply(aten.zero.default, pair, mode="auto")).tolist() == [0.0, 0.0]
    mask = torch.tensor([True, False])
    filled = apply(aten.masked_fill.Scalar, pair, mask, 1.0, mode="auto")
    assert value(filled).tolist() == [1.0, 12.0]
    assert value(apply(aten.full_like.default, pair, 2.0, mode="auto")).tolist() == [2.0, 2.0]
    assert value(apply(aten.copy.default, pair, torch.ones(2), mode="auto")).tolist() == [1.0, 1.0]
    assert value(apply(aten.clamp.default, pair, 0.0, 10.0, mode="auto")).tolist() == [9.0, 10.0]


# -- maxima -------------------------------------------------------------------------------


def test_gradients_of_maxima_with_ties_across_shards() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [3.0, 0.0, 3.0], [2.0, 3.0, 3.0]], dtype=torch.float64)
    right(lambda x: x.amax(), x)
    right(lambda x: x.amax(0), x)
    right(lambda x: x.amin((0, 1)), -x)
    right(lambda x: x.max(), x)
    right(lambda x: x.max(0).values, x)
    right(lambda x: torch.maximum(x, x.flip(0)), x)


def test_maxima_with_indices() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [3.0, 0.0, 3.0, 3.0]], dtype=torch.float64)
    right(lambda x: x.max(1), x)
    right(lambda x: x.min(0), x)
    right(lambda x: x.argmax(1), x)
    right(lambda x: x.argmax(), x)


def test_norms_of_infinite_order_of_unreduced_maxima() -> None:
    """The losing candidate may have the larger absolute value."""
    pair = unreduced(torch.tensor([1.0, -9.0]), torch.tensor([-8.0, 2.0]), kind="max")
    for order, expected in ((float("inf"), 2.0), (float("-inf"), 1.0), (1.0, 3.0)):
        result = apply(aten.linalg_vector_norm.default, pair, order, mode="auto")
        assert value(result).item() == expected
    assert value(apply(torch.abs, pair, mode="auto")).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, 3.0, float("inf"), float("-inf")])
def test_norms_of_every_order(order: float) -> None:
    right(lambda x: torch.linalg.vector_norm(x, order), draw(5, 4))
    right(lambda x: torch.linalg.vector_norm(x, order, 0), draw(5, 4))


# -- any, all, NaN, empty shards ----------------------------------------------------------


def test_any_and_all_of_unreduced_values() -> None:
    """Partial sums may cancel; each may be zero where the total is not."""
    cancels = unreduced(torch.tensor([1, 2]), torch.tensor([-1, -2]))
    assert not value(apply(aten.any.default, cancels, mode="auto"))
    fills = unreduced(torch.tensor([1, 0]), torch.tensor([0, 2]))
    assert value(apply(aten.all.default, fills, mode="auto"))
    assert value(apply(aten.any.dim, fills, 0, mode="auto"))
    assert value(apply(aten.logical_not.default, cancels, mode="auto")).all()
    candidates = unreduced(torch.tensor([False, True]), torch.tensor([False, False]), kind="max")
    assert value(apply(aten.any.default, candidates, mode="auto"))
    assert not value(apply(aten.all.default, candidates, mode="auto"))


def test_only_decreasing_functions_exchange_maxima_and_minima() -> None:
    """The negative of unsigned integers does not reverse order, nor does `not` of numbers."""
    numbers = unreduced(torch.tensor([-1, 3]), torch.tensor([0, 0]), kind="max")
    assert value(apply(aten.logical_not.default, numbers, mode="auto")).tolist() == [True, False]
    small = unreduced(*torch.tensor([[0, 3], [2, 1]], dtype=torch.uint8), kind="max")
    assert value(apply(aten.neg.default, small, mode="auto")).tolist() == [254, 253]
    low = unreduced(torch.tensor([-0.1, 2.0]), torch.tensor([0.1, 1.0]), kind="max")
    result = value(apply(aten.softplus.default, low, 1.0, 0.0, mode="auto"))
    torch.testing.assert_close(result, F.softplus(torch.tensor([0.1, 2.0]), 1.0, 0.0))


@pytest.mark.parametrize("place", [0, 4])
def test_nan_in_one_shard_propagates(place: int) -> None:
    x = draw(5, 2)
    x[place, 1] = float("nan")
    for function in (
        lambda x: x.sum(0), lambda x: x.mean(), lambda x: x.prod(0), lambda x: x.amax(0),
        lambda x: x.amin(), lambda x: x.max(0).values, lambda x: x.argmax(0),
        lambda x: torch.linalg.vector_norm(x, float("inf")), lambda x: x.softmax(0),
        lambda x: x.logsumexp(0), lambda x: x.cumsum(0), lambda x: x.isnan().any(0),
        lambda x: x.var(0), lambda x: torch.maximum(x, x.flip(0)), lambda x: x.nansum(0),
    ):  # fmt: skip
        right(lambda x, f=function: f(x).detach(), x, most=3)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: x.sum(0),
    "prod": lambda x: x.prod(0),
    "mean": lambda x: x.mean(0),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(0),
    "argmin": lambda x: x.argmin(0),
    "any": lambda x: (x > 0).any(0),
    "all": lambda x: (x > -9).all(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(0, correction=0),
    "norm": lambda x: torch.linalg.vector_norm(x, 2, 0),
    "count_nonzero": lambda x: x.count_nonzero(0),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "median": lambda x: x.median(0),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("rows", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_reductions_with_an_empty_shard(name: str, rows: int) -> None:
    right(REDUCTIONS[name], draw(rows, 3).neg(), most=3)


# -- numbers ------------------------------------------------------------------------------


def test_item_of_an_unreduced_value_is_reduced() -> None:
    pair = unreduced(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0))
    for op in (aten.item.default, aten._local_scalar_dense.default):
        try:
            result = apply(op, pair, mode="auto")
        except ShardingError:
            continue
        assert result == 7.0
        with pytest.raises(ShardingError):
            apply(op, pair, mode="explicit")


def test_item_of_an_invariant_value() -> None:
    pair = fs.shard(torch.tensor(3.0), Spec(THREE, P(), shape=()))
    assert apply(aten.item.default, pair) == 3.0


# -- embeddings ---------------------------------------------------------------------------


def test_embedding_used_twice() -> None:
    table, actual, expected = draw(7, 4), naturals(2, 3, below=7), naturals(2, 3, below=7, seed=1)
    right(lambda t, i, j: F.embedding(i, t) + 2 * F.embedding(j, t), table, actual, expected)
    right(lambda t, i, j: F.embedding(i, t) * F.embedding(j, t), table, actual, expected)
    right(
        lambda t, i, j: (F.embedding(i, t) @ t.T).sum() + F.embedding(j, t).sum(),
        table,
        actual,
        expected,
    )


def test_embedding_with_padding() -> None:
    table, index = draw(6, 4), naturals(2, 5, below=6)
    right(lambda t, i: F.embedding(i, t, padding_idx=2), table, index)
