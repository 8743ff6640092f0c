"""Rules of embeddings: correctness for every role, texts, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.ops.propagate.propagate import propagate
from fshard.partition.apply import apply
from tests.helpers.ops.op_checks import call_with, check_call
from tests.helpers.ops.samples import Draws

aten = torch.ops.aten
DRAWS = Draws()
real, below = DRAWS.real, DRAWS.below

W, BAGS = real(7, 4), torch.tensor([0, 2, 2])
CASES: dict[str, tuple[Any, ...]] = {
    "rows of a table": (aten.embedding, W, below(7, 3, 2)),
    "a padding": (aten.embedding, W, torch.tensor([3, 0, 3, 6, 1]), 3),
    "one row": (aten.embedding, W, torch.tensor(3), 0),
    "no rows": (aten.embedding, W, below(7, 0)),
    "by frequency": (aten.embedding, W, below(7, 9), -1, True),
    "gradient": (aten.embedding_dense_backward, real(3, 2, 4), below(7, 3, 2), 7, -1, False),
    "gradient, a padding": (
        aten.embedding_dense_backward, real(5, 4), torch.tensor([3, 0, 3, 6, 1]), 7, 3, False,
    ),
    "gradient by frequency": (aten.embedding_dense_backward, real(9, 4), below(7, 9), 7, 2, True),
    "bags, sums": (aten.embedding_bag, W, below(7, 6), BAGS, False, 0),
    "bags, means": (aten.embedding_bag, W, below(7, 6), BAGS, False, 1),
    "bags, maxima": (aten.embedding_bag, W, below(7, 6), BAGS, False, 2),
    "bags, weighted": (aten.embedding_bag, W, below(7, 6), BAGS, False, 0, False, real(6)),
    "bags, a padding": (
        aten.embedding_bag.padding_idx, W, torch.tensor([2, 0, 2, 5, 2, 1]), BAGS, False, 1, False,
        None, False, 2,
    ),
    "bags, by frequency": (aten.embedding_bag, W, below(7, 6), BAGS, True, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rules_are_right(name: str) -> None:
    """Values and gradients for even, uneven and empty shards."""
    op, *args = CASES[name]
    assert check_call(op, *args) == []


def test_rules_on_two_axes() -> None:
    """Rows on one axis and width on the other, or both axes on the rows."""
    assert check_call(aten.embedding, W, below(7, 3), grad=False, two_axes=True) == []


RULES = {
    "rows of a table": "vd,i0 i1->i0 i1 d  {v sum; unreduced 0 sum; unreduced 0 avg; "
    "unreduced 0 max; unreduced 0 min; unreduced 0 product}",
    "gradient": "i0 i1 d,i0 i1->vd  {i0 sum; i1 sum; unreduced 0 sum; unreduced 0 avg}",
    "gradient by frequency": "i0 d,i0->vd  {i0 unsharded; unreduced 0 sum; unreduced 0 avg}",
    "bags, means": "vd,1,1->1d,none,none,none  {v sum; unreduced 0 sum; unreduced 0 avg}",
    "bags, maxima": "vd,1,1->1d,none,none,none  {v unsharded}",
}


@pytest.mark.parametrize("name", RULES)
def test_rule_texts(name: str) -> None:
    """Sharded, summed and unreduced factors of each rule."""
    op, *args = CASES[name]
    assert str(call_with(op, args, {})[1]) == RULES[name]


# -- user-visible behaviour --------------------------------------------------------------------

MESH = fs.Mesh(tp=2)


@pytest.mark.parametrize("rows", [8, 7])
def test_a_sharded_weight_may_be_used_twice(rows: int) -> None:
    """Use one weight as embedding and as output weight: values, and the gradient of both uses."""
    w, index = real(rows, 4).requires_grad_(), below(rows, 5)
    spec = fs.Spec(MESH, fs.P("tp"), shape=w.shape, dtype=w.dtype, uneven="chunk")
    pair = fs.shard(w, spec)
    actual = apply(aten.embedding, pair, index)
    expected = apply(aten.embedding, pair, index.flip(0))
    assert str(actual.spec) == "f64[5,4]{unreduced: tp}"
    result = fs.unshard(actual) * fs.unshard(expected)
    full = w[index] * w[index.flip(0)]
    assert torch.allclose(result, full)
    logits = apply(aten.mm, result.detach(), apply(aten.t, pair))
    assert str(logits.spec).startswith("f64[5,")
    weights = real(5, 4)
    (matches,) = torch.autograd.grad((result * weights).sum() + fs.unshard(logits).sum(), w)
    (right,) = torch.autograd.grad((full * weights).sum() + (full.detach() @ w.T).sum(), w)
    assert torch.allclose(matches, right)


def test_max_norm_is_refused() -> None:
    """PyTorch writes the scaled rows into the weight."""
    spec = fs.Spec(MESH, fs.P("tp"), shape=(8, 4), dtype=torch.float64)
    index = fs.Spec(MESH, fs.P(), shape=(3,), dtype=torch.int64)
    with pytest.raises(ShardingError) as error:
        propagate(aten.embedding_renorm_.default, spec, index, 2.5, 2.0)
    assert str(error.value) == (
        "fs.propagate(aten.embedding_renorm.default)\n"
        "  given: max_norm=2.5\n"
        "  rule:  the weight must not be written in place\n"
        "  fix:   scale its rows before the lookup: torch.renorm(weight, 2, 0, max_norm)"
    )


@pytest.mark.parametrize("wrong", [8, -1])
def test_invalid_indices_are_refused(wrong: int) -> None:
    """Zeros never replace an invalid index."""
    w, index = real(8, 4), torch.tensor([wrong])
    pair = fs.shard(w, fs.Spec(MESH, fs.P("tp"), shape=w.shape, dtype=w.dtype))
    with pytest.raises(IndexError, match="out of range"):
        aten.embedding(w, index)
    with pytest.raises(IndexError, match="out of range"):
        apply(aten.embedding, pair, index)


def test_sparse_gradients_are_not_sharded() -> None:
    """Without gradients every dim may be sharded."""
    _, rule, _, _ = call_with(aten.embedding, (W, below(7, 3), -1, False, True), {})
    assert rule.no_grad == frozenset(rule.factors)
    assert check_call(aten.embedding, W, below(7, 3), -1, False, True, grad=False) == []


def test_bags_of_sharded_rows_in_a_partitioned_function() -> None:
    """Nothing is written in place, and only the bags are results."""
    w, index = real(8, 4).requires_grad_(), below(8, 3, 2)

    def bags(w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding_bag(index, w)

    result = fs.partition(bags, mesh=MESH, in_specs=(fs.P("tp"),))(w)
    assert torch.allclose(result, bags(w))
    scale = real(3, 4)
    (matches,) = torch.autograd.grad((result * scale).sum(), w)
    assert torch.allclose(matches, torch.autograd.grad((bags(w) * scale).sum(), w)[0])
