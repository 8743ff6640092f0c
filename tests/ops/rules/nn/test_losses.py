"""Rules of losses: correctness for every role, decompositions, communication."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.ops.core.registry import decomposition_of
from fshard.partition.apply import apply
from tests.helpers.ops.op_checks import call_with, check_call
from tests.helpers.ops.samples import Draws

aten = torch.ops.aten
DRAWS = Draws()
real, below = DRAWS.real, DRAWS.below
NONE, MEAN, SUM = range(3)

X, Y, SIGNS = real(5, 4), real(5, 4), torch.where(real(5, 4) > 0.5, 1.0, -1.0).double()

DIFFERENTIABLE: dict[str, tuple[Any, ...]] = {
    "mse": (aten.mse_loss, X, Y),
    "mse, empty": (aten.mse_loss, real(0, 4), real(0, 4)),
    "mse, no dims": (aten.mse_loss, real(), real()),
    "l1": (aten.l1_loss, X, Y),
    "smooth_l1": (aten.smooth_l1_loss, X, Y),
    "huber": (aten.huber_loss, X, Y),
    "kl_div": (aten.kl_div, X, Y),
    "bce_with_logits": (aten.binary_cross_entropy_with_logits, X, Y, None, None),
    "hinge_embedding": (aten.hinge_embedding_loss, X, SIGNS, 1.0),
    "margin_ranking": (aten.margin_ranking_loss, X, Y, SIGNS, 0.1),
    "poisson_nll": (aten.poisson_nll_loss, X, Y, True, False, 1e-8),
    "poisson_nll, full": (aten.poisson_nll_loss, X, 5 * Y, False, True, 1e-8),
    "cosine_embedding": (aten.cosine_embedding_loss, X, Y, SIGNS[:, 0], 0.1),
    "cosine_embedding, one": (aten.cosine_embedding_loss, X[0], Y[0], SIGNS[0, 0], 0.1),
    "triplet_margin": (aten.triplet_margin_loss, X, Y, real(5, 4), 1.0, 2.0, 1e-6, True),
    "multi_margin": (aten.multi_margin_loss, X, below(4, 5), 1, 1.0, None),
    "multi_margin, one": (aten.multi_margin_loss, X[0], below(4, 1), 1, 1.0, None),
    "multilabel_margin": (aten.multilabel_margin_loss, X, torch.tensor([[1, 2, -1, 0]] * 5)),
}
"""Operations with their arguments up to the reduction, by name."""
VALUES: dict[str, tuple[Any, ...]] = {
    "mse, broadcast": (aten.mse_loss, real(5, 1), real(3, 1, 4)),
    "bce": (aten.binary_cross_entropy, X, Y, None),
    "bce, weights": (aten.binary_cross_entropy, X, Y, real(4)),
    "bce_with_logits, weights": (
        aten.binary_cross_entropy_with_logits, X, Y, real(5, 1), real(4),
    ),
    "soft_margin": (aten.soft_margin_loss, X, SIGNS),
    "multi_margin, weights": (aten.multi_margin_loss, X, below(4, 5), 1, 1.0, real(4)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan() -> Iterator[None]:
    """Fill memory that PyTorch leaves as it is, as some sums of no samples, with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* does not have a deterministic implementation")
        yield
    torch.use_deterministic_algorithms(False)


REDUCTIONS = pytest.mark.parametrize("reduction", [NONE, MEAN, SUM], ids=["none", "mean", "sum"])


@REDUCTIONS
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_rules_are_right(name: str, reduction: int) -> None:
    """Values and gradients for even, uneven and empty shards."""
    op, *args = DIFFERENTIABLE[name]
    assert check_call(op, *args, reduction) == []


@REDUCTIONS
@pytest.mark.parametrize("name", VALUES)
def test_rules_are_right_without_gradients(name: str, reduction: int) -> None:
    """Values of losses for which PyTorch has no or wrong gradients of targets or weights."""
    op, *args = VALUES[name]
    assert check_call(op, *args, reduction, grad=False) == []


@REDUCTIONS
def test_rules_of_gradients_are_right(reduction: int) -> None:
    """Gradients of a mean over all elements, whatever their shards."""
    gradient = real(5, 4) if reduction == NONE else real()
    of_rows = real(5) if reduction == NONE else real()
    classes, labels = below(4, 5), torch.tensor([[1, 2, -1, 0]] * 5)
    is_target = aten.multilabel_margin_loss_forward(X, labels, reduction)[1]
    wrong = [
        *check_call(aten.mse_loss_backward, gradient, X, Y, reduction),
        *check_call(aten.smooth_l1_loss_backward, gradient, X, Y, reduction, 0.5, grad=False),
        *check_call(aten.huber_loss_backward, gradient, X, Y, reduction, 0.5, grad=False),
        *check_call(aten.binary_cross_entropy_backward, gradient, X, Y, real(4), reduction,
                    grad=False),
        *check_call(aten.soft_margin_loss_backward, gradient, X, SIGNS, reduction, grad=False),
        *check_call(aten.multi_margin_loss_backward, of_rows, X, classes, 1, 1.0, real(4),
                    reduction, grad=False),
        *check_call(aten.multilabel_margin_loss_backward, of_rows, X, labels, reduction, is_target,
                    grad=False),
    ]  # fmt: skip
    assert wrong == []


# -- losses over classes ----------------------------------------------------------------------

LOGITS, MAPS, WEIGHT = real(5, 4).log(), real(3, 4, 2).log(), real(4)
LABELS, PIXELS = torch.tensor([1, -100, 0, 3, 3]), below(4, 3, 2)
LIKELY = {
    "nll_loss": (aten.nll_loss, LOGITS, LABELS, None),
    "nll_loss_nd": (aten.nll_loss_nd, MAPS, PIXELS, None),
    "nll_loss, one": (aten.nll_loss, LOGITS[0], LABELS[0], None),
    "cross_entropy": (aten.cross_entropy_loss, LOGITS, LABELS, None),
    "cross_entropy, maps": (aten.cross_entropy_loss, MAPS, PIXELS, None),
    "cross_entropy, probabilities": (aten.cross_entropy_loss, MAPS, real(3, 4, 2), None),
    "cross_entropy, one of them": (aten.cross_entropy_loss, LOGITS[0], real(4), None),
    "cross_entropy, weighted probabilities": (aten.cross_entropy_loss, MAPS, real(3, 4, 2), WEIGHT),
}
WEIGHTED = {
    "nll_loss": (aten.nll_loss, LOGITS, LABELS, WEIGHT),
    "nll_loss_nd": (aten.nll_loss_nd, MAPS, PIXELS, WEIGHT),
    "nll_loss_forward": (aten.nll_loss_forward, LOGITS, LABELS, WEIGHT),
    "nll_loss2d_forward": (aten.nll_loss2d_forward, MAPS[..., None], PIXELS[..., None], WEIGHT),
    "cross_entropy": (aten.cross_entropy_loss, LOGITS, LABELS, WEIGHT),
}


@REDUCTIONS
@pytest.mark.parametrize("name", LIKELY)
def test_likelihood_losses_equal_one_device(name: str, reduction: int) -> None:
    """Values and gradients; an ignored class is on no rank and in no mean."""
    op, *args = LIKELY[name]
    assert check_call(op, *args, reduction, 0 if name == "nll_loss_nd" else -100) == []


@REDUCTIONS
@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_likelihoods(name: str, reduction: int) -> None:
    """Values; PyTorch has no gradients with respect to weights."""
    op, *args = WEIGHTED[name]
    assert check_call(op, *args, reduction, -100, grad=False) == []


@REDUCTIONS
def test_rules_of_likelihood_gradients_are_right(reduction: int) -> None:
    """Samples and classes may be sharded."""
    gradient = real(5) if reduction == NONE else real()
    total = aten.nll_loss_forward(LOGITS, LABELS, WEIGHT, reduction, -100)[1]
    args = (gradient, LOGITS, LABELS, WEIGHT, reduction, -100, total)
    assert check_call(aten.nll_loss_backward, *args, grad=False) == []


def test_samples_and_classes_on_two_axes() -> None:
    """Both sums are unreduced."""
    x, labels = real(3, 4).log(), torch.tensor([1, -100, 3])
    assert check_call(aten.nll_loss, x, labels, None, SUM, -100, grad=False, two_axes=True) == []


RULES = {
    "mse": "d0 d1,d0 d1->  {d0 sum; d1 sum}",
    "cosine_embedding": "d0 c,d0 c,d0->  {d0 sum; c unsharded}",
    "nll_loss": "d0 c,d0->  {d0 unsharded; c sum; unreduced 0 sum; unreduced 0 avg}",
    "cross_entropy": "d0 c,d0->  {d0 unsharded; c unsharded}",
    "cross_entropy, probabilities": "d0 c d1,d0 c d1->  {d0 sum; c unsharded; d1 sum; "
    "unreduced 1 sum; unreduced 1 avg}",
}


@pytest.mark.parametrize("name", RULES)
def test_texts_of_mean_rules(name: str) -> None:
    """A mean of elements is a sum; a mean of labels is weighted by the classes that occur."""
    op, *args = {**DIFFERENTIABLE, **LIKELY}[name]
    assert str(call_with(op, (*args, MEAN), {})[1]) == RULES[name]


# -- decompositions ---------------------------------------------------------------------------


def same_decomposed(op: Any, args: Sequence[Any]) -> bool:
    """Return True if a decomposition gives the values and gradients of the operation."""
    result, right = (
        [leaf.detach().clone().requires_grad_() if i == 0 else leaf for i, leaf in enumerate(args)]
        for _ in range(2)
    )
    decomposed = decomposition_of(op)
    assert decomposed is not None
    actual, expected = decomposed(*result), op(*right)
    scale = real(*actual.shape)
    (matches,) = torch.autograd.grad((actual * scale).sum(), result[0])
    (leaves,) = torch.autograd.grad((expected * scale).sum(), right[0])
    return torch.allclose(actual, expected) and torch.allclose(matches, leaves)


@REDUCTIONS
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_decomposed_cross_entropy(reduction: int, smoothing: float) -> None:
    """Labels and probabilities, with and without weights."""
    op = aten.cross_entropy_loss.default
    pairs = [(LOGITS, LABELS), (MAPS, PIXELS), (LOGITS[0], LABELS[0]), (LOGITS[0], real(4)),
             (MAPS, real(3, 4, 2))]  # fmt: skip
    for (x, target), weight in itertools.product(pairs, (None, WEIGHT)):
        assert same_decomposed(op, (x, target, weight, reduction, -100, smoothing))


@REDUCTIONS
def test_other_decomposed_losses(reduction: int) -> None:
    """Likelihoods, cosines and triplets; ignored samples do not count, even if infinite."""
    far = LOGITS.clone()
    far[1, 0] = -torch.inf
    cases: list[tuple[Any, ...]] = [
        (aten.nll_loss.default, LOGITS, LABELS, WEIGHT, reduction, -100),
        (aten.nll_loss.default, far, LABELS, None, reduction, -100),
        (aten.nll_loss_nd.default, MAPS, PIXELS, None, reduction, 0),
        (aten.cosine_embedding_loss.default, X, Y, SIGNS[:, 0], 0.1, reduction),
        (aten.triplet_margin_loss.default, X, Y, X.flip(0), 1.0, 2.0, 1e-6, True, reduction),
    ]
    for op, *args in cases:
        assert same_decomposed(op, args), op
    decomposed = decomposition_of(aten.nll_loss_forward.default)
    assert decomposed is not None
    result = decomposed(LOGITS, LABELS, WEIGHT, reduction, -100)
    right = aten.nll_loss_forward(LOGITS, LABELS, WEIGHT, reduction, -100)
    assert all(
        torch.allclose(actual, expected) for actual, expected in zip(result, right, strict=True)
    )


# -- user-visible behaviour --------------------------------------------------------------------

MESH = fs.Mesh(x=3)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 4, 1), (0, 9, 0)], ids=str)
@pytest.mark.parametrize("name", ["mse", "bce", "smooth_l1", "bce_with_logits", "soft_margin"])
def test_means_over_uneven_and_empty_shards(name: str, sizes: tuple[int, ...]) -> None:
    """Values and gradients of the mean over all rows, with empty shards."""
    op = {**DIFFERENTIABLE, **VALUES}[name][0]
    x, y = real(9, 2).requires_grad_(), torch.where(real(9, 2) > 0.5, 1.0, 0.0).double()
    remaining = (None,) * {"bce": 1, "bce_with_logits": 2}.get(name, 0)
    spec = fs.Spec(MESH, fs.P("x"), shape=x.shape, dtype=x.dtype, sizes={0: sizes})
    result = apply(op, fs.shard(x, spec), fs.shard(y, spec), *remaining, MEAN)
    assert str(result.spec) == "f64[]{unreduced: x}"
    right = op(x, y, *remaining, MEAN)
    assert torch.allclose(fs.unshard(result), right)
    (matches,) = torch.autograd.grad(fs.unshard(result), x)
    assert torch.allclose(matches, torch.autograd.grad(right, x)[0])


def test_likelihood_of_sharded_classes_sends_nothing() -> None:
    """Also its mean, whose weights are invariant."""
    x = real(4, 6).log().requires_grad_()
    labels, weight = torch.tensor([1, 5, -100, 2]), real(6)
    spec = fs.Spec(MESH, fs.P(None, "x"), shape=x.shape, dtype=x.dtype)
    result = apply(aten.nll_loss, fs.shard(x, spec), labels, weight, MEAN, -100)
    assert str(result.spec) == "f64[]{unreduced: x}"
    right = aten.nll_loss(x, labels, weight, MEAN, -100)
    assert torch.allclose(fs.unshard(result), right)
    (matches,) = torch.autograd.grad(fs.unshard(result), x)
    assert torch.allclose(matches, torch.autograd.grad(right, x)[0])


@pytest.mark.parametrize("wrong", [6, -1])
def test_invalid_classes_are_refused(wrong: int) -> None:
    """Zeros never replace an invalid class."""
    x, labels = real(1, 6), torch.tensor([wrong])
    spec = fs.Spec(MESH, fs.P(None, "x"), shape=x.shape, dtype=x.dtype)
    with pytest.raises(IndexError, match="out of bounds"):
        aten.nll_loss(x, labels, None, SUM, -100)
    with pytest.raises(IndexError, match="out of bounds"):
        apply(aten.nll_loss, fs.shard(x, spec), labels, None, SUM, -100)


# -- in partitioned functions ------------------------------------------------------------------

GRID = fs.Mesh(dp=2, tp=2)
BYTES = fs.Topology("bytes", inner=fs.Link(1e-9, 1e9), launch=1e-9, message=0.0)


def run(function: Any, specs: Sequence[fs.PartitionSpec], *inputs: torch.Tensor) -> list[str]:
    """Return the steps that send, in order; check values and gradients of the function."""
    result = fs.partition(function, mesh=GRID, in_specs=tuple(specs), topology=BYTES)
    value, right = result(*inputs), function(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    assert torch.allclose(value, right)
    matches = torch.autograd.grad(value, leaves)
    assert all(
        torch.allclose(actual, expected)
        for actual, expected in zip(matches, torch.autograd.grad(right, leaves), strict=True)
    )
    steps = [step for prog in result.trace(*inputs).programs for step in prog.steps]
    return [str(step) for step in steps if type(step).__name__ not in FREE]


FREE = {"InvariantToReduced", "ReducedToInvariant", "AllSlice"}


def test_cross_entropy_of_sharded_classes_communicates_as_megatron() -> None:
    """Two values per sample and scalars are reduced; samples are sharded on the other axis."""
    x, w = real(8, 16).requires_grad_(), real(32, 16).requires_grad_()
    labels = below(32, 8)
    labels[:3] = -100
    specs = (fs.P("dp"), fs.P("tp"), fs.P("dp"))

    def loss(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x @ w.T, labels)

    assert run(loss, specs, x, w, labels) == [
        "all_reduce(tp) to reduced",  # maxima
        "all_reduce(tp)",  # sums of exponentials
        "all_reduce(tp)",  # sum of looked-up logits, a scalar
        "all_reduce(dp) to reduced",  # number of samples that count, a scalar
    ]


def test_mean_over_sharded_samples_reduces_one_count() -> None:
    """PyTorch's own kernel runs, and one number is reduced."""
    x, weight = real(8, 6).requires_grad_(), real(6)
    labels = below(6, 8)
    labels[:4] = -100

    def loss(x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(x, labels, weight)

    sent = run(loss, (fs.P("dp"), fs.P("dp"), fs.P()), x, labels, weight)
    assert sent == ["all_reduce(dp) to reduced"]


def test_cosines_of_sharded_features() -> None:
    """Three sums per row are reduced."""
    x, y = real(4096, 8).requires_grad_(), real(4096, 8).requires_grad_()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        signs = torch.ones(4096, dtype=torch.float64)
        return torch.nn.functional.cosine_embedding_loss(x, y, signs)

    sent = run(loss, (fs.P(None, "tp"),) * 2, x, y)
    assert sent == ["reduce_scatter(tp, dim 0)"] * 3


@pytest.mark.parametrize("layout", [fs.P("x", "y"), fs.P("x"), fs.P(None, "y")], ids=str)
def test_likelihood_gradients_are_differentiable(layout: fs.PartitionSpec) -> None:
    """PyTorch's gradient of a mean's gradient is a mean over all samples, not over a rank's."""
    labels, weight = torch.tensor([0, 3, -100, 1]), torch.tensor([0.5, 1, 2, 3]).double()

    def penalty(x: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(x, labels, weight)
        loss = loss + torch.nn.functional.nll_loss(x.tanh(), labels)
        (g,) = torch.autograd.grad(loss.sin(), x, create_graph=True)
        return g.square().sum()

    x = real(4, 4).requires_grad_()
    part = fs.partition(penalty, mesh=fs.Mesh(x=2, y=2), in_specs=layout)
    torch.testing.assert_close(part(x), penalty(x))
    actual, expected = (torch.autograd.grad(fn(x), x) for fn in (part, penalty))
    torch.testing.assert_close(actual, expected)


def test_one_table_as_embedding_and_output() -> None:
    """Rows are sharded: a sum of looked-up rows, then a cross entropy of sharded classes."""
    w, tokens = real(32, 16).requires_grad_(), below(32, 8)

    def loss(w: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.embedding(tokens, w)
        return torch.nn.functional.cross_entropy(h @ w.T, tokens)

    sent = run(loss, (fs.P("tp"), fs.P("dp")), w, tokens)
    assert sent == [
        "all_reduce(tp) to reduced",
        "all_reduce(tp) to reduced",
        "all_reduce(tp)",
        "all_reduce(tp)",
        "all_reduce(dp) to reduced",
    ]
