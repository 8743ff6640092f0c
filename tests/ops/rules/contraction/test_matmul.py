"""Rules of products: correctness for every role, texts."""

from __future__ import annotations

import warnings

import pytest
import torch

import fshard as fs
from fshard.partition.apply import apply
from tests.helpers.ops.samples import Sample, rand, rule_errors, rule_factors, rule_text

aten = torch.ops.aten
i64, c128 = torch.int64, torch.complex128
INF = float("inf")

PRODUCTS: dict[str, Sample] = {
    "mm": lambda: (aten.mm, rand(4, 3), rand(3, 5)),
    "mm of integers": lambda: (aten.mm, rand(4, 3, dtype=i64), rand(3, 5, dtype=i64)),
    "mm of nothing": lambda: (aten.mm, rand(4, 0), rand(0, 3)),
    "bmm": lambda: (aten.bmm, rand(2, 4, 3), rand(2, 3, 5)),
    "mv": lambda: (aten.mv, rand(4, 3), rand(3)),
    "dot": lambda: (aten.dot, rand(4), rand(4, seed=1)),
    "vdot": lambda: (aten.vdot, rand(4, dtype=c128), rand(4, dtype=c128, seed=1)),
    "matmul broadcasting": lambda: (aten.matmul, rand(2, 1, 4, 3), rand(3, 3, 5)),
    "matmul vector, batch": lambda: (aten.matmul, rand(3), rand(2, 3, 5)),
    "matmul batch, vector": lambda: (aten.matmul, rand(2, 4, 3), rand(3)),
    "matmul of bytes": lambda: (aten._int_mm, rand(32, 16, dtype=torch.int8),
                                rand(16, 32, dtype=torch.int8)),
    "outer": lambda: (aten.outer, rand(4), rand(3)),
    "inner": lambda: (aten.inner, rand(4, 3), rand(2, 3)),
    "inner with a number": lambda: (aten.inner, rand(4, 3), rand()),
    "kron": lambda: (aten.kron, rand(4, 3), rand(2, 3)),
    "kron, other dims": lambda: (aten.kron, rand(4), rand(2, 3)),
    "tensordot": lambda: (aten.tensordot, rand(4, 3, 2), rand(2, 5, 3), [1, 2], [2, 0]),
    "tensordot broadcasting": lambda: (aten.tensordot, rand(4, 3), rand(1, 5), [1], [0]),
    "multi_dot": lambda: (aten.linalg_multi_dot, [rand(4, 3), rand(3, 2), rand(2, 5)]),
    "multi_dot of vectors": lambda: (aten.linalg_multi_dot, [rand(3), rand(3, 2), rand(2)]),
    "bilinear": lambda: (aten.bilinear, rand(4, 3), rand(4, 2), rand(5, 3, 2), rand(5)),
    "_trilinear": lambda: (aten._trilinear, rand(4, 3), rand(5, 3, 2), rand(4, 2),
                           [1, 3], [0], [1, 2], [2, 3]),
    "vecdot": lambda: (aten.linalg_vecdot, rand(4, 1), rand(2, 4, 3), {"dim": 1}),
    "cross": lambda: (aten.cross, rand(4, 3), rand(4, 3, seed=1), 1),
    "linalg_cross": lambda: (aten.linalg_cross, rand(3, 3), rand(1, 3)),
}  # fmt: skip

ADDED: dict[str, Sample] = {
    "addmm": lambda: (aten.addmm, rand(4, 5), rand(4, 3), rand(3, 5)),
    "addmm of a row": lambda: (aten.addmm, rand(5), rand(4, 3), rand(3, 5),
                               {"beta": 2.0, "alpha": 0.5}),
    "addmm of a number": lambda: (aten.addmm, rand(), rand(4, 3), rand(3, 5)),
    "addmm of integers": lambda: (aten.addmm, rand(5, dtype=i64), rand(4, 3, dtype=i64),
                                  rand(3, 5, dtype=i64)),
    "addbmm": lambda: (aten.addbmm, rand(4, 5), rand(2, 4, 3), rand(2, 3, 5)),
    "baddbmm": lambda: (aten.baddbmm, rand(2, 1, 5), rand(2, 4, 3), rand(2, 3, 5)),
    "addmv": lambda: (aten.addmv, rand(1), rand(4, 3), rand(3)),
    "addr": lambda: (aten.addr, rand(4, 3), rand(4), rand(3)),
    "linear": lambda: (aten.linear, rand(2, 4, 3), rand(5, 3), rand(5)),
    "linear of one": lambda: (aten.linear, rand(3), rand(5, 3), rand(5)),
    "linear without": lambda: (aten.linear, rand(4, 3), rand(5, 3)),
    "linear to one": lambda: (aten.linear, rand(4, 3), rand(3)),
    "activated": lambda: (aten._addmm_activation, rand(5), rand(4, 3), rand(3, 5)),
}  # fmt: skip

EINSUMS = (("ij,jk->ik", (4, 3), (3, 5)), ("ij,jk", (4, 3), (3, 5)),
           ("...ij,...jk->...ik", (2, 1, 4, 3), (2, 3, 3, 5)), ("ii->i", (3, 3)), ("ii", (3, 3)),
           ("iij,jk->ik", (3, 3, 2), (2, 4)), ("bhqd,bhkd->bhqk", (2, 2, 4, 3), (2, 2, 5, 3)),
           ("ij,ij,jk->k", (4, 3), (4, 3), (3, 2)), ("...i->...", (2, 4, 3)), ("i...->...", (3, 4)),
           ("bi,ij->b", (1, 3), (3, 4)), ("ij,jk->", (2, 3), (3, 2)),
           ("Zz, z", (4, 3), (3,)))  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_equal_one_device(name: str) -> None:
    assert rule_errors(PRODUCTS[name]) == []


def test_kron_of_columns() -> None:
    """PyTorch's kernel raises for the strides that shards and gathered tensors have."""
    x = rand(4, 4)
    actual = fs.partition(torch.kron, mesh=fs.Mesh(x=4), in_specs=fs.P(None, "x"))(x, x)
    torch.testing.assert_close(actual, torch.kron(x, x))


@pytest.mark.parametrize("name", ADDED)
def test_added_operands_count_once(name: str) -> None:
    assert rule_errors(ADDED[name], grad=name != "activated") == []


@pytest.mark.parametrize(("equation", "shapes"), [(item[0], item[1:]) for item in EINSUMS])
def test_einsum_equals_one_device(equation: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    operands = [rand(*shape, seed=i) for i, shape in enumerate(shapes)]
    assert rule_errors(lambda: (aten.einsum, equation, operands)) == []


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("name", ["cdist", "pdist", "_cdist_forward"])
def test_distances_equal_one_device(name: str, power: float) -> None:
    samples: dict[str, Sample] = {
        "cdist": lambda: (aten.cdist, rand(4, 3), rand(2, 5, 3), power),
        "pdist": lambda: (aten.pdist, rand(4, 3), power),
        "_cdist_forward": lambda: (aten._cdist_forward, rand(4, 3), rand(5, 3), power, None),
    }
    assert rule_errors(samples[name], grad=not name.startswith("_")) == []


@pytest.mark.parametrize("name", ["mm", "kron"])
def test_two_axes(name: str) -> None:
    assert rule_errors(PRODUCTS[name], grad=False, two_axes=True) == []


def test_two_axes_of_a_sum() -> None:
    assert rule_errors(ADDED["linear of one"], two_axes=True) == []


def test_rule_texts() -> None:
    assert rule_factors(aten.matmul, rand(2, 1, 4, 3), rand(3, 3, 5)) == "b1ik,ckj->bcij"
    assert rule_text(aten.mm, rand(4, 3), rand(3, 5)) == (
        "ik,kj->ij  {k sum; unreduced 0 sum; unreduced 0 avg; unreduced 1 sum; unreduced 1 avg}"
    )
    assert rule_text(aten.linear, rand(4, 3), rand(5, 3), rand(5)) == (
        "bk,jk,j->bj  {k sum; unreduced 0 sum; unreduced 0 avg; unreduced 1 sum; unreduced 1 avg; "
        "unreduced 0+2 sum; unreduced 0+2 avg; unreduced 1+2 sum; unreduced 1+2 avg; "
        "unreduced 2 avg}"
    )
    assert rule_factors(aten.kron, rand(4, 3), rand(2, 3)) == "bc,de->(bd)(ce)"
    assert rule_factors(aten.einsum, "...ij,jk", [rand(2, 4, 3), rand(3, 5)]) == "bij,jk->bik"
    assert rule_factors(aten.einsum, "iij->j", [rand(3, 3, 2)]) == "11j->j"
    assert rule_text(aten.cdist, rand(4, 3), rand(5, 3), INF) == "pk,qk->pq  {k max}"
    assert rule_text(aten.cdist, rand(4, 3), rand(5, 3)) == "pk,qk->pq  {k unsharded}"


def test_unreduced_bytes_are_not_accepted_by_wider_sums() -> None:
    """Sums of bytes wrap at 256, sums of their products do not."""
    small = torch.int8
    assert rule_text(aten._int_mm, rand(32, 16, dtype=small), rand(16, 32, dtype=small)) == (
        "ik,kj->ij  {k sum}"
    )


def test_grouped_products_equal_one_device() -> None:
    """Only columns and the contracted dim may be sharded if rows are in groups."""
    ends = torch.tensor([4, 8], dtype=torch.int32)
    rows = rand(8, 32, dtype=torch.bfloat16)
    modes = "unreduced 0 sum; unreduced 0 avg; unreduced 1 sum; unreduced 1 avg}"
    batch = rand(2, 32, 16, dtype=torch.bfloat16)
    assert rule_text(aten._grouped_mm, rows, batch, ends) == f"1k,1kj,1->1j  {{k sum; {modes}"
    full = rand(2, 8, 32, dtype=torch.bfloat16)
    assert rule_text(aten._grouped_mm, full, batch) == f"gik,gkj->gij  {{k sum; {modes}"


def test_cross_uses_the_first_global_dim_of_size_three() -> None:
    """A shard may have a dim of size 3 before the one of the global tensor."""
    x, y = rand(6, 3), rand(6, 3, seed=1)
    mesh = fs.Mesh(x=2)
    spec = fs.Spec(mesh, fs.P("x"), shape=(6, 3), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = apply(torch.cross, fs.shard(x, spec), fs.shard(y, spec))
    assert torch.equal(fs.unshard(result), torch.linalg.cross(x, y))


def test_a_bias_that_is_not_finite_counts_once() -> None:
    mesh = fs.Mesh(x=2)
    make = lambda t, p: fs.shard(t, fs.Spec(mesh, p, shape=t.shape, dtype=t.dtype))  # noqa: E731
    x, w = make(rand(2, 4), fs.P(None, "x")), make(rand(3, 4), fs.P(None, "x"))
    bias = make(torch.tensor([1.0, INF, -INF], dtype=torch.float64), fs.P())
    result = fs.unshard(apply(aten.linear, x, w, bias))
    assert result[:, 1:].tolist() == [[INF, -INF], [INF, -INF]]
    assert result[:, 0].isfinite().all()
