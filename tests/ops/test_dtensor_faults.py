"""What DTensor is silently wrong about, class by class: fshard is right, or says what is missing.

Each function goes through `apply`, call by call, on every column of layouts: even and uneven, with
empty shards, on two axes and with unreduced operands; its values, and its gradients where it has
some, are those of whole tensors.
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
from fshard.layout.spec import Sharded, Spec
from fshard.partition.apply import apply
from tests.helpers.ops.op_database import COLUMNS, case_of, layouts, try_layout

THREE = Mesh(x=3)
aten = torch.ops.aten


def right(function: Callable[..., Any], *tensors: torch.Tensor, most: int = 4) -> None:
    """Assert that a function is right on layouts of all kinds, and runs on them."""
    case = case_of("function", function, *tensors)
    found = []
    for column in COLUMNS:
        kind = replace(column, limit=most if column.limit > 6 else (most + 1) // 2)
        outcomes = [try_layout(case, specs) for specs in layouts(case, kind)]
        found += [f"{each.word} {each.text}" for each in outcomes if each.word != "ok"]
    assert not found, "\n".join(found[:5])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of both signs."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(*shape: int, below: int, seed: int = 0) -> torch.Tensor:
    """Integers from 0 on."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def unreduced(*shards: torch.Tensor, kind: str = "sum") -> Sharded:
    """A pair whose addends, or candidates, are given."""
    mesh = Mesh(x=len(shards))
    spec = Spec(mesh, P(unreduced={"x": kind}), shape=shards[0].shape, dtype=shards[0].dtype)
    return Sharded(shards, spec)


def value(pair: Any) -> torch.Tensor:
    """The whole of a pair; a number as it is."""
    return fs.unshard(pair) if isinstance(pair, Sharded) else torch.as_tensor(pair)


# -- integers -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_stay_integers_under_sums(dtype: torch.dtype) -> None:
    x = whole(6, 4, below=9).to(dtype)
    right(lambda x: x.sum(), x)
    right(lambda x: x.sum(0), x)
    right(lambda x: x.sum(1, dtype=torch.int32), x)
    right(lambda x: x + 3, x)
    right(lambda x: x.mul(2).sum(-1), x)


def test_sums_of_large_integers_are_exact() -> None:
    """Beyond 2 ** 53 a detour through float64 shows."""
    x = torch.tensor([2**53, 1, 1, 2**53, 1, 3])
    right(lambda x: x.sum(), x)
    pair = unreduced(torch.tensor([2**60]), torch.tensor([1]))
    assert value(apply(aten.mul.Tensor, pair, 3, mode="auto")).item() == 3 * (2**60 + 1)


def test_integer_products_stay_integers() -> None:
    right(lambda a, b: a @ b, whole(4, 6, below=5), whole(6, 2, below=5, seed=1))


def test_a_quotient_of_unreduced_integers_is_that_of_their_sum() -> None:
    pair = unreduced(torch.tensor([3, 5]), torch.tensor([4, 5]))
    for op, args in ((aten.div.Tensor, (2,)), (aten.floor_divide.default, (2,))):
        made = value(apply(op, pair, *args, mode="auto"))
        wanted = op(torch.tensor([7, 10]), *args)
        assert made.dtype == wanted.dtype
        assert made.equal(wanted)


# -- caches -------------------------------------------------------------------------------


def test_numbers_that_are_equal_are_not_one_argument() -> None:
    x = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)
    pair = fs.shard(x, Spec(THREE, P("x"), shape=(6,), dtype=torch.int32))
    numbers = (1, 1.0, True, 0, 0.0, False, torch.tensor(1), torch.tensor(1.0), torch.tensor(True))
    for op in (torch.add, torch.mul, torch.pow):
        for number in (*numbers, *reversed(numbers)):
            made, wanted = value(apply(op, pair, number)), op(x, number)
            assert made.dtype == wanted.dtype, (op, number)
            assert made.equal(wanted), (op, number)


def test_zeros_of_both_signs_are_two_arguments() -> None:
    x = torch.tensor([1.0, -1.0, 2.0])
    pair = fs.shard(x, Spec(THREE, P("x"), shape=(3,)))
    for zero in (0.0, -0.0, 0.0):
        made, wanted = value(apply(torch.div, pair, zero)), torch.div(x, zero)
        assert made.equal(wanted)
        made, wanted = value(apply(torch.copysign, pair, zero)), torch.copysign(x, zero)
        assert made.equal(wanted)


def test_a_tensor_of_no_dims_and_a_number_promote_each_in_its_way() -> None:
    x = torch.tensor([1, 2, 3])
    pair = fs.shard(x, Spec(THREE, P("x"), shape=(3,), dtype=torch.int64))
    none = Spec(THREE, P(), shape=(), dtype=torch.float64)
    for other, plain in (
        (2.0, 2.0),
        (fs.shard(torch.tensor(2.0, dtype=torch.float64), none), torch.tensor(2.0).double()),
        (torch.tensor(2.0, dtype=torch.float16), torch.tensor(2.0, dtype=torch.float16)),
        (2, 2),
    ):
        made, wanted = value(apply(torch.add, pair, other)), torch.add(x, plain)
        assert made.dtype == wanted.dtype
        assert made.equal(wanted)


def test_nan_as_an_argument_is_found_again() -> None:
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


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [5, 2])
def test_cross_entropy_with_class_weights_and_ignored_classes(
    rows: int, weighted: bool, ignored: int
) -> None:
    target = whole(rows, below=3)
    target[:1] = ignored
    target[-1] = 2

    def loss(x: torch.Tensor, y: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y, *[each.detach() for each in w], ignore_index=ignored)

    def nll(x: torch.Tensor, y: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(
            x.log_softmax(-1), y, *[each.detach() for each in w], ignore_index=ignored
        )

    weights = (torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64),) if weighted else ()
    right(loss, draw(rows, 3), target, *weights)
    right(nll, draw(rows, 3), target, *weights)


def test_cross_entropy_of_pixels_of_probabilities_and_smoothed() -> None:
    right(F.cross_entropy, draw(3, 4, 5), whole(3, 5, below=4))
    right(lambda x, y: F.cross_entropy(x, y.softmax(-1)), draw(5, 3), draw(5, 3, seed=1))
    right(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2), draw(5, 3), whole(5, below=3))


def test_losses_of_which_a_shard_has_only_ignored_targets() -> None:
    target = torch.tensor([-100, -100, 0, 2, 1, 1])
    right(F.cross_entropy, draw(6, 3), target)


# -- cosines ------------------------------------------------------------------------------


def test_cosines_over_a_cut_feature_dim() -> None:
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
def test_convolutions_over_cut_width_and_channels(name: str) -> None:
    function, of, kernel = CONVOLUTIONS[name]
    outputs = kernel[1] if "transposed" in name else kernel[0]
    right(function, draw(*of), draw(*kernel, seed=1), draw(outputs, seed=2))


# -- indices ------------------------------------------------------------------------------


def test_gathers_over_cut_dims() -> None:
    x, index = draw(6, 4), whole(6, 4, below=4)
    right(lambda x, i: torch.gather(x, 1, i), x, index)
    right(lambda x, i: torch.gather(x, 0, i), x, whole(3, 4, below=6))
    right(lambda x, i: torch.take_along_dim(x, i, 1), x, index)
    right(lambda x, i: torch.index_select(x, 0, i), x, whole(5, below=6))
    right(lambda x, i: x[i], x, whole(5, below=6))
    right(lambda x, i: x[:, i], x, whole(5, below=4))


def test_scatters_over_cut_dims() -> None:
    x, index = draw(6, 4), whole(3, 4, below=6)
    right(lambda x, i, y: torch.scatter_add(x, 0, i, y), x, index, draw(3, 4, seed=1))
    right(lambda x, i, y: torch.index_add(x, 0, i, y), x, whole(5, below=6), draw(5, 4, seed=1))
    once = torch.tensor([[5, 0, 3, 2], [1, 2, 0, 4], [0, 1, 2, 3]])
    right(lambda x, i, y: torch.scatter(x, 0, i, y), x, once, draw(3, 4, seed=1))
    right(lambda x, i: torch.scatter(x, 0, i, 2.5), x, once)
    right(lambda x, i, y: torch.scatter_reduce(x, 0, i, y, "amax"), x, once, draw(3, 4, seed=1))
    right(lambda x, i, y: torch.index_copy(x, 0, i, y), x, torch.tensor([4, 0]), draw(2, 4, seed=1))


# -- fills --------------------------------------------------------------------------------


def test_fills_of_unreduced_values() -> None:
    """Every addend filled with the number would be n times the number."""
    pair = unreduced(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0, 6.0]))
    assert value(apply(aten.fill_.Scalar, pair, 7.0, mode="auto")).tolist() == [7.0, 7.0]
    assert value(apply(aten.zero_.default, pair, mode="auto")).tolist() == [0.0, 0.0]
    mask = torch.tensor([True, False])
    filled = apply(aten.masked_fill_.Scalar, pair, mask, 1.0, mode="auto")
    assert value(filled).tolist() == [1.0, 12.0]
    assert value(apply(aten.full_like.default, pair, 2.0, mode="auto")).tolist() == [2.0, 2.0]
    assert value(apply(aten.copy_.default, pair, torch.ones(2), mode="auto")).tolist() == [1.0, 1.0]
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


def test_maxima_with_their_places() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [3.0, 0.0, 3.0, 3.0]], dtype=torch.float64)
    right(lambda x: x.max(1), x)
    right(lambda x: x.min(0), x)
    right(lambda x: x.argmax(1), x)
    right(lambda x: x.argmax(), x)


def test_norms_of_infinite_order_of_unreduced_maxima() -> None:
    """The candidate that loses may be the larger one by its absolute value."""
    pair = unreduced(torch.tensor([1.0, -9.0]), torch.tensor([-8.0, 2.0]), kind="max")
    for order, wanted in ((float("inf"), 2.0), (float("-inf"), 1.0), (1.0, 3.0)):
        made = apply(aten.linalg_vector_norm.default, pair, order, mode="auto")
        assert value(made).item() == wanted
    assert value(apply(torch.abs, pair, mode="auto")).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, 3.0, float("inf"), float("-inf")])
def test_norms_of_every_order(order: float) -> None:
    right(lambda x: torch.linalg.vector_norm(x, order), draw(5, 4))
    right(lambda x: torch.linalg.vector_norm(x, order, 0), draw(5, 4))


# -- any, all, NaN, empty shards ----------------------------------------------------------


def test_any_and_all_of_unreduced_values() -> None:
    """Addends that cancel are none; addends of which each is zero somewhere may be all."""
    cancels = unreduced(torch.tensor([1, 2]), torch.tensor([-1, -2]))
    assert not value(apply(aten.any.default, cancels, mode="auto"))
    fills = unreduced(torch.tensor([1, 0]), torch.tensor([0, 2]))
    assert value(apply(aten.all.default, fills, mode="auto"))
    assert value(apply(aten.any.dim, fills, 0, mode="auto"))
    assert value(apply(aten.logical_not.default, cancels, mode="auto")).all()
    candidates = unreduced(torch.tensor([False, True]), torch.tensor([False, False]), kind="max")
    assert value(apply(aten.any.default, candidates, mode="auto"))
    assert not value(apply(aten.all.default, candidates, mode="auto"))


def test_order_is_turned_around_only_where_it_is() -> None:
    """By the negative of unsigned integers it is not, nor by `not` of numbers."""
    numbers = unreduced(torch.tensor([-1, 3]), torch.tensor([0, 0]), kind="max")
    assert value(apply(aten.logical_not.default, numbers, mode="auto")).tolist() == [True, False]
    small = unreduced(*torch.tensor([[0, 3], [2, 1]], dtype=torch.uint8), kind="max")
    assert value(apply(aten.neg.default, small, mode="auto")).tolist() == [254, 253]
    low = unreduced(torch.tensor([-0.1, 2.0]), torch.tensor([0.1, 1.0]), kind="max")
    made = value(apply(aten.softplus.default, low, 1.0, 0.0, mode="auto"))
    torch.testing.assert_close(made, F.softplus(torch.tensor([0.1, 2.0]), 1.0, 0.0))


@pytest.mark.parametrize("place", [0, 4])
def test_nan_in_one_shard_comes_through(place: int) -> None:
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
def test_reductions_with_an_empty_shard(name: str) -> None:
    right(REDUCTIONS[name], draw(2, 3).neg(), most=3)
    right(REDUCTIONS[name], draw(3, 3).neg(), most=3)


# -- numbers ------------------------------------------------------------------------------


def test_a_number_of_an_unreduced_value_is_no_addend() -> None:
    pair = unreduced(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0))
    for op in (aten.item.default, aten._local_scalar_dense.default):
        try:
            made = apply(op, pair, mode="auto")
        except ShardingError:
            continue
        assert made == 7.0
        with pytest.raises(ShardingError):
            apply(op, pair, mode="explicit")


def test_a_number_of_an_invariant_value() -> None:
    pair = fs.shard(torch.tensor(3.0), Spec(THREE, P(), shape=()))
    assert apply(aten.item.default, pair) == 3.0


# -- embeddings ---------------------------------------------------------------------------


def test_an_embedding_used_twice() -> None:
    table, one, other = draw(7, 4), whole(2, 3, below=7), whole(2, 3, below=7, seed=1)
    right(lambda t, i, j: F.embedding(i, t) + 2 * F.embedding(j, t), table, one, other)
    right(lambda t, i, j: F.embedding(i, t) * F.embedding(j, t), table, one, other)
    right(
        lambda t, i, j: (F.embedding(i, t) @ t.T).sum() + F.embedding(j, t).sum(), table, one, other
    )


def test_an_embedding_with_padding() -> None:
    table, index = draw(6, 4), whole(2, 5, below=6)
    right(lambda t, i: F.embedding(i, t, padding_idx=2), table, index)
