"""Rules of reads and writes by indices: correctness for every role, texts, errors."""

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


def mask(*shape: int) -> torch.Tensor:
    """Return booleans, about half of them true."""
    return real(*shape) > 0.5


X, ORDER = real(5, 4, 3), torch.randperm(12, generator=DRAWS.generator)
ONCE = torch.stack([torch.randperm(4, generator=DRAWS.generator)[:2] for _ in range(15)], -1)

READS: dict[str, tuple[Any, ...]] = {
    "gather": (aten.gather, X, 1, below(4, 5, 2, 3)),
    "gather, fewer rows": (aten.gather, X, 1, below(4, 2, 6, 3)),
    "gather, booleans": (aten.gather, X > 0.5, 0, below(5, 5, 4, 3)),
    "gather, integers": (aten.gather, below(9, 5, 4), -1, below(4, 5, 2)),
    "gather, no dims": (aten.gather, real(), 0, below(1, 2)),
    "gather, empty": (aten.gather, real(3, 0), 0, below(2, 5, 0)),
    "take_along_dim": (aten.take_along_dim, X, below(4, 5, 1, 1, low=-4), 1),
    "take_along_dim, both broadcast": (aten.take_along_dim, real(1, 4, 3), below(4, 5, 2, 1), 1),
    "take_along_dim, flat": (aten.take_along_dim, X, below(60, 2, 3)),
    "index_select": (aten.index_select, X, 1, below(4, 7)),
    "index_select, one": (aten.index_select, X, 2, torch.tensor(1)),
    "index_select, none": (aten.index_select, X, 0, below(5, 0)),
    "index_select, no dims": (aten.index_select, real(), 0, torch.tensor([0])),
    "take": (aten.take, X, below(60, 2, 5, low=-60)),
    "take, no dims": (aten.take, real(), below(1, 3)),
    "index, a middle dim": (aten.index.Tensor, X, [None, below(4, 6, low=-4)]),
    "index, two together": (aten.index.Tensor, X, [below(5, 2, 1, low=-5), below(4, 6)]),
    "index, two apart": (aten.index.Tensor, X, [below(5, 2, 1), None, below(3, 6, low=-3)]),
    "index, one row": (aten.index.Tensor, X, [torch.tensor(2)]),
    "index, nothing": (aten.index.Tensor, X > 0.3, [None, None, below(3, 0)]),
    "masked_scatter": (aten.masked_scatter, real(4, 3), mask(4, 3), real(20)),
    "nonzero_static": (aten.nonzero_static, mask(4, 3)),
}
WRITES: dict[str, tuple[Any, ...]] = {
    "scatter": (aten.scatter.src, X, 1, ONCE.reshape(2, 5, 3).transpose(0, 1), real(5, 2, 3)),
    "scatter, a value": (aten.scatter.value, X, 1, below(4, 5, 2, 3), 2.5),
    "scatter, fewer columns": (aten.scatter.value, X, 1, below(4, 5, 2, 2), 2.5),
    "scatter, no dims": (aten.scatter.value, real(), 0, torch.tensor(0), 2.5),
    "scatter_add": (aten.scatter_add, X, 1, below(4, 5, 6, 3), real(5, 6, 3)),
    "scatter_add, integers": (aten.scatter_add, below(9, 5, 4), 0, below(5, 7, 4), below(9, 7, 4)),
    "index_add": (aten.index_add, X, 1, below(4, 6), real(5, 6, 3)),
    "index_add, one": (aten.index_add, X, 1, torch.tensor(2), real(5, 1, 3)),
    "index_add, no dims": (aten.index_add, real(), 0, torch.tensor([0]), real()),
    "index_copy": (aten.index_copy, X, 1, torch.tensor([2, 0]), real(5, 2, 3)),
    "index_fill": (aten.index_fill, X, 1, torch.tensor([-1, 0]), 2.0),
    "index_fill, a tensor": (aten.index_fill, X, 1, torch.tensor([3, 0]), real()),
    "index_put": (aten.index_put, X, [None, torch.tensor([-1, 2])], real(5, 2, 3)),
    "index_put, broadcast": (aten.index_put, X, [None, torch.tensor([-1, 2])], real(2, 1)),
    "index_put, adding": (aten.index_put, X, [None, below(4, 6)], real(6, 3), True),
    "index_put, adding apart": (
        aten.index_put, X, [below(5, 6), None, below(3, 6)], real(6, 4), True,
    ),
    "index_put, adding a table": (
        aten.index_put, X, [below(5, 2, 1), below(4, 6)], real(2, 6, 3), True,
    ),
    "index_put, one mask": (aten.index_put, X, [mask(5, 4)], real()),
    "index_put, a mask of columns": (aten.index_put, X, [None, mask(4, 3)], real(5, 1), True),
    "put": (aten.put, X, ORDER.reshape(4, 3) * 5, real(4, 3)),
    "put, adding": (aten.put, X, below(60, 4, 3, low=-60), real(4, 3), True),
}  # fmt: skip
NAMED: dict[str, dict[str, Any]] = {"nonzero_static": {"size": 5}}


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_rules_are_right(name: str) -> None:
    """Values and gradients for even, uneven and empty shards."""
    op, *args = {**READS, **WRITES}[name]
    assert check_call(op, *args, **NAMED.get(name, {})) == []


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", ["sum", "prod", "mean", "amax", "amin"])
def test_scatter_reduce(kind: str, include: bool) -> None:
    """Every reduction, with and without the previous values."""
    args = (real(4, 3), 0, below(4, 6, 3), real(6, 3), kind)
    assert check_call(aten.scatter_reduce, *args, include_self=include) == []


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("kind", ["prod", "mean", "amax", "amin"])
def test_index_reduce(kind: str, include: bool) -> None:
    """Every reduction, with and without the previous values."""
    args = (real(4, 3), 0, below(4, 6), real(6, 3), kind)
    assert check_call(aten.index_reduce, *args, include_self=include) == []


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_products_leave_out_other_shards() -> None:
    """Gradients stay finite if the product of other ranks' elements overflows."""
    x, index = real(4, 2), torch.tensor([0, 3, 1, 3, 2, 3])
    large = torch.full((6, 2), 1e60, dtype=torch.float64)
    rows = torch.stack([index, index], 1)
    assert check_call(aten.scatter_reduce, x, 0, rows, large, "prod") == []
    assert check_call(aten.index_reduce, x, 0, index, large, "prod") == []


def test_rules_on_two_axes() -> None:
    """Rows on one axis and columns on the other, or both axes on one dim."""
    x, index = real(5, 4), below(4, 5, 3)
    assert check_call(aten.gather, x, 1, index, grad=False, two_axes=True) == []
    assert check_call(aten.scatter_add, x, 1, index, real(5, 3), grad=False, two_axes=True) == []


PASSES = "; ".join(f"unreduced 0 {kind}" for kind in ("sum", "avg", "max", "min", "product"))
RULES = {
    "gather": "d0 v d2,d0 k d2->d0 k d2  {v sum; " + PASSES + "}",
    "gather, fewer rows": "() v d2,() k d2->() k d2  {v sum; " + PASSES + "}",
    "gather, booleans": "v d1 d2,k d1 d2->k d1 d2  {v max; " + PASSES + "}",
    "take_along_dim, flat": "v0 v1 v2,k0 k1->(k0 k1)  {v0 sum; v1 sum; v2 sum; " + PASSES + "}",
    "index_select": "d0 v d2,k->d0 k d2  {v sum; " + PASSES + "}",
    "index, two apart": "v0 d1 v2,b0 (),b1->b0 b1 d1  {v0 sum; v2 sum; " + PASSES + "}",
    "scatter_add": "d0 v d2,d0 k d2,d0 k d2->d0 v d2  {k sum; unreduced 0+3 sum}",
    "index_add": "d0 v d2,k,d0 k d2->d0 v d2  {k sum; unreduced 0+2 sum; unreduced 0+2 avg; "
    "unreduced 0 avg; unreduced 2 avg}",
    "index_put, adding apart": "v0 d1 v2,b0,b0,b0 d1->v0 d1 v2  {b0 sum; unreduced 0+3 sum; "
    "unreduced 0+3 avg; unreduced 0 avg; unreduced 3 avg}",
    "put, adding": "v0 v1 v2,k0 k1,k0 k1->v0 v1 v2  {k0 sum; k1 sum; unreduced 0+2 sum; "
    "unreduced 0+2 avg; unreduced 0 avg; unreduced 2 avg}",
}
RULES["scatter_add"] = RULES["index_add"].replace("d0 v d2,k,d0", "d0 v d2,d0 k d2,d0")


@pytest.mark.parametrize("name", RULES)
def test_rule_texts(name: str) -> None:
    """Sharded, summed and unreduced factors of each rule."""
    op, *args = {**READS, **WRITES}[name]
    assert str(call_with(op, args, NAMED.get(name, {}))[1]) == RULES[name]


# -- user-visible behaviour --------------------------------------------------------------------

MESH = fs.Mesh(x=2)


def sharded(x: torch.Tensor, *dims: str | None) -> fs.Sharded:
    """Return a sharded tensor."""
    return fs.shard(x, fs.Spec(MESH, fs.P(*dims), shape=x.shape, dtype=x.dtype))


def test_lookup_in_a_sharded_dim_sends_nothing() -> None:
    """The result is an unreduced sum."""
    x, index = real(4, 3), below(4, 6, 3)
    result = apply(aten.gather, sharded(x, "x"), 0, index)
    assert str(result.spec) == "f64[6,3]{unreduced: x}"
    assert torch.equal(fs.unshard(result), x.gather(0, index))


@pytest.mark.parametrize("wrong", [4, 7, -1, -9])
@pytest.mark.parametrize("op", [aten.gather, aten.index_select, aten.scatter_add])
def test_invalid_indices_are_refused(op: Any, wrong: int) -> None:
    """Zeros never replace an invalid index."""
    index = torch.tensor([wrong])
    values = (real(1),) if op is aten.scatter_add else ()
    x = real(4)
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        op(x, 0, index, *values)
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        apply(op, sharded(x, "x"), 0, index, *values)


@pytest.mark.parametrize("wrong", [4, -5])
def test_invalid_negative_indices_are_refused(wrong: int) -> None:
    """Index -4 is the first of four elements, -5 is invalid."""
    x = real(4)
    with pytest.raises(IndexError, match="out of"):
        apply(aten.index.Tensor, sharded(x, "x"), [torch.tensor([wrong])])
    with pytest.raises(IndexError, match="out of"):
        apply(aten.index_put, sharded(x, "x"), [torch.tensor([wrong])], real(1))
    for op, values in ((aten.take, ()), (aten.put, (real(1),))):
        with pytest.raises((RuntimeError, IndexError), match="out of"):
            apply(op, sharded(x, "x"), torch.tensor([wrong]), *values)


def test_value_dependent_shapes_are_refused() -> None:
    """The error names replacements."""
    spec = fs.Spec(MESH, fs.P("x"), shape=(4,), dtype=torch.float64)
    fixes = {
        torch.nonzero: "fs.nonzero(x, size=n); in place of x[mask] fs.masked_select(x, mask, "
        "size=n)",
        aten.unique_consecutive: "torch.where with a mask",
    }
    for op, sized in fixes.items():
        with pytest.raises(ShardingError) as error:
            propagate(op, spec)
        assert str(error.value).partition("\n")[2] == (
            "  given: float64[4]\n"
            "  rule:  the shape of its result depends on values, but a layout must have a shape\n"
            '  fix:   fs.apply(op, pair, mode="auto") runs it on unsharded values; in a function '
            f"for fs.partition {sized}; or fs.shard_map within it"
        )
