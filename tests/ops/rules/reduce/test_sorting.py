"""Rules of sorting, searching and counting, and refusals of generators' draws."""

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

X, ROWS, EDGES = real(5, 4, 3), real(3, 6).sort(-1)[0], torch.linspace(0, 1, 5).double()
ORDERED: dict[str, tuple[Any, ...]] = {
    "sort": (aten.sort.default, X, 0, True),
    "sort, no dims": (aten.sort.default, real()),
    "argsort": (aten.argsort.default, X, -1),
    "msort": (aten.msort, X),
    "topk": (aten.topk, X, 2, 1),
    "topk, no dims": (aten.topk, real(), 1),
    "dropout off": (aten.dropout, real(5, 4), 0.5, False),
    "dropout of nothing": (aten.dropout, real(5, 4), 0.0, True),
    "native_dropout off": (aten.native_dropout, real(5, 4), 0.5, False),
    "alpha_dropout off": (aten.alpha_dropout, real(5, 4), 0.5, False),
    "rrelu off": (aten.rrelu, real(5, 4) - 0.5, 0.1, 0.3, False),
}
COUNTED: dict[str, tuple[Any, ...]] = {
    "searchsorted, rows": (aten.searchsorted.Tensor, ROWS, real(3, 4)),
    "searchsorted, one row": (aten.searchsorted.Tensor, ROWS[0], real(3, 4)),
    "searchsorted, a number": (aten.searchsorted.Scalar, ROWS[0], 0.4),
    "bucketize": (aten.bucketize.Tensor, real(3, 4), ROWS[0]),
    "bucketize, a number": (aten.bucketize.Scalar, 0.5, ROWS[0]),
    "isin": (aten.isin.Tensor_Tensor, below(9, 5, 4), below(9, 6)),
    "isin, an element": (aten.isin.Scalar_Tensor, 2, below(9, 5, 4)),
    "isin, one": (aten.isin.Tensor_Scalar, below(9, 5, 4), 2),
    "histc": (aten.histc, real(5, 4), 6, 0, 1),
    "histc, any range": (aten.histc, real(5, 4), 6),
    "histogram": (aten.histogram.bins_tensor, real(5, 4), EDGES),
    "histogram, any range": (aten.histogram.bin_ct, real(5, 4), 6),
    "histogramdd": (aten.histogramdd, real(5, 2), [2, 3]),
    "one_hot": (aten.one_hot, below(7, 5, 2), 7),
    "one_hot, one": (aten.one_hot, torch.tensor(3), 7),
}


@pytest.mark.parametrize("name", [*ORDERED, *COUNTED])
def test_rules_are_right(name: str) -> None:
    """Values and gradients for even, uneven and empty shards."""
    op, *args = {**ORDERED, **COUNTED}[name]
    assert check_call(op, *args, grad=name in ORDERED) == []


def test_keyword_arguments() -> None:
    """Sides, sorters, inversion, weights, densities."""
    order = torch.arange(6).repeat(3, 1)
    wrong = [
        *check_call(aten.sort.stable, below(3, 5, 4), stable=True, dim=0),
        *check_call(aten.argsort.stable, below(3, 5, 4), stable=True, dim=1),
        *check_call(
            aten.searchsorted.Tensor, ROWS[0], real(3), right=True, out_int32=True, grad=False
        ),
        *check_call(aten.searchsorted.Tensor, ROWS, real(3, 4), sorter=order, grad=False),
        *check_call(aten.isin.Tensor_Tensor, below(9, 5, 4), below(9, 2, 3), invert=True),
        *check_call(aten.histogram.bins_tensor, real(5, 4), EDGES, weight=real(5, 4), grad=False),
        *check_call(aten.histogram.bin_ct, real(5, 4), 6, range=[0.0, 1.0], grad=False),
        *check_call(
            aten.histogram.bin_ct, real(5, 4), 6, range=[0.0, 1.0], density=True, grad=False
        ),
    ]
    assert wrong == []


RULES = {
    "sort": "s d1 d2->s d1 d2,s d1 d2  {s unsharded}",
    "topk": "d0 s d2->d0 () d2,d0 () d2  {s unsharded}",
    "searchsorted, rows": "d0 m,d0 d1->d0 d1  {m sum}",
    "bucketize": "d0 d1,m->d0 d1  {m sum}",
    "isin": "e0 e1,t0->e0 e1  {t0 max}",
    "histc": "d0 d1->1  {d0 sum; d1 sum}",
    "histogram": "d0 d1,1->1,1  {d0 sum; d1 sum}",
    "one_hot": "d0 d1->d0 d1 c",
    "native_dropout off": "d0 d1->d0 d1,d0 d1  {unreduced 0 sum -> sum, invariant; "
    "unreduced 0 avg -> avg, invariant; unreduced 0 max -> max, invariant; "
    "unreduced 0 min -> min, invariant; unreduced 0 product -> product, invariant}",
}


@pytest.mark.parametrize("name", RULES)
def test_rule_texts(name: str) -> None:
    """Sharded, summed and unreduced factors of each rule."""
    op, *args = {**ORDERED, **COUNTED}[name]
    assert str(call_with(op, args, {})[1]) == RULES[name]


MESH = fs.Mesh(x=2)


def sharded(x: torch.Tensor, *dims: str | None) -> fs.Sharded:
    """Return a sharded tensor."""
    return fs.shard(x, fs.Spec(MESH, fs.P(*dims), shape=x.shape, dtype=x.dtype))


def test_sharded_boundaries_are_searched_in_place() -> None:
    """Counts of smaller boundaries are summed over the shards."""
    values, bounds = real(5), real(8).sort()[0]
    result = apply(aten.bucketize.Tensor, values, sharded(bounds, "x"))
    assert str(result.spec) == "i64[5]{unreduced: x}"
    assert torch.equal(fs.unshard(result), torch.bucketize(values, bounds))


@pytest.mark.parametrize("largest", [True, False])
def test_topk_of_a_sharded_dim_sends_candidates_only(largest: bool) -> None:
    """A rank sends its candidates only."""
    x = real(3, 512).requires_grad_()

    def found(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(x, 4, -1, largest)

    result = fs.partition(found, mesh=MESH, in_specs=(fs.P(None, "x"),))
    values, indices = result(x)
    right, places = found(x)
    assert torch.equal(values, right)
    assert torch.equal(indices, places)
    scale = real(3, 4)
    (actual,) = torch.autograd.grad((values * scale).sum(), x)
    assert torch.equal(actual, torch.autograd.grad((right * scale).sum(), x)[0])
    received = [prog.cost(None).bytes_received for prog in result.trace(x).programs]
    assert sum(received) < x.nbytes / 4


@pytest.mark.parametrize("wrong", [-1, 4])
def test_one_hot_refuses_invalid_classes(wrong: int) -> None:
    """Refused by the rank that has the first classes, or the last ones."""
    x = torch.tensor([0, wrong, 1, 2])
    with pytest.raises(RuntimeError, match="Class values must be"):
        aten.one_hot(x, 4)
    with pytest.raises(RuntimeError, match="Class values must be"):
        apply(aten.one_hot, sharded(x, "x"), 4)


KEYED = (
    "with fs.random.keyed(key): around fs.apply, or in a function for fs.partition, draws by the "
    "key"
)
MASKED = f"{KEYED}; p=0.0, or eval() of a module, drops nothing"
INSTEAD = {
    (aten.dropout.default, 0.5, True): MASKED,
    (aten.native_dropout.default, 0.5, None): MASKED,
    (aten.rrelu.default, 0.1, 0.3, True): (
        f"fs.random.uniform(key, spec) draws slopes; {KEYED}; training=False has one slope"
    ),
    (aten.bernoulli.default,): (
        f"fs.random.uniform(key, spec) < p draws by a key, in float32; {KEYED}"
    ),
    (aten.rand_like.default,): f"fs.random.uniform(key, spec) draws by a key; {KEYED}",
    (aten.uniform_.default,): f"fs.random.uniform(key, spec) draws by a key; {KEYED}",
    (aten.randn_like.default,): f"fs.random.normal(key, spec) draws by a key; {KEYED}",
    (aten.normal_.default,): f"fs.random.normal(key, spec) draws by a key; {KEYED}",
    (aten.randint_like.default, 3): (
        f"fs.random.randint(key, spec, low, high) draws by a key; {KEYED}"
    ),
    (aten.multinomial.default, 2): f"fs.random.exponential(key, spec) draws by a key; {KEYED}",
    (aten.poisson.default,): (
        "draw the global tensor with a generator of the same seed on every rank, and fs.shard it"
    ),
}


@pytest.mark.parametrize("call", INSTEAD, ids=lambda call: str(call[0]))
def test_draws_by_a_generator_are_refused(call: tuple[Any, ...]) -> None:
    """The error names the keyed replacement."""
    op, *args = call
    with pytest.raises(ShardingError) as error:
        propagate(op, fs.Spec(MESH, fs.P("x"), shape=(4, 2), dtype=torch.float64), *args)
    assert str(error.value).partition("\n")[2] == (
        "  given: float64[4, 2]\n"
        "  rule:  draws must be keyed: a rank's generator does not draw the values of the global "
        "tensor\n"
        f"  fix:   {INSTEAD[call]}"
    )
