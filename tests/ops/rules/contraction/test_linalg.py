"""Rules of linear algebra: correctness for every role, texts."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.helpers.ops.samples import Sample, rand, rule_errors, rule_factors, rule_text

aten = torch.ops.aten


def square() -> torch.Tensor:
    """Return three positive definite matrices."""
    a = rand(3, 3, 3)
    return a @ a.mT + 3 * torch.eye(3, dtype=a.dtype)


def lower() -> torch.Tensor:
    return torch.linalg.cholesky(square())


def upright() -> torch.Tensor:
    return rand(3, 4, 3)


SMOOTH = """
    linalg_cholesky linalg_cholesky_ex linalg_eigh linalg_eigvalsh linalg_inv linalg_inv_ex inverse
    linalg_det linalg_slogdet logdet linalg_matrix_exp linalg_svdvals linalg_cond linalg_lu_factor
    linalg_lu linalg_qr pinverse
""".split()  # noqa: SIM905
ROUGH = """
    _linalg_det _linalg_slogdet _linalg_eigh linalg_eig linalg_eigvals linalg_svd linalg_ldl_factor
    linalg_ldl_factor_ex linalg_lu_factor_ex geqrf
""".split()  # noqa: SIM905
"""Samples without a gradient, or with one that depends on arbitrary signs."""

OTHERS: dict[str, Sample] = {
    "qr of tall ones": lambda: (aten.linalg_qr, upright()),
    "matrix_power": lambda: (aten.linalg_matrix_power, square(), -2),
    "matrix_rank": lambda: (aten.linalg_matrix_rank, square(), 1e-3),
    "matrix_rank of tensors": lambda: (aten.linalg_matrix_rank.atol_rtol_tensor, square(),
                                       {"atol": rand(3).abs()}),
    "lu_unpack": lambda: (aten.lu_unpack, *torch.linalg.lu_factor(square())),
    "householder_product": lambda: (aten.linalg_householder_product, *torch.geqrf(upright())),
    "cholesky_inverse": lambda: (aten.cholesky_inverse, lower()),
    "linalg_vander": lambda: (aten.linalg_vander, rand(3, 4)),
    "tensorinv": lambda: (aten.linalg_tensorinv, rand(4, 2, 2), 1),
    "solve": lambda: (aten.linalg_solve, square(), rand(3, 3, 2)),
    "solve from the right": lambda: (aten.linalg_solve, square(), rand(3, 2, 3), {"left": False}),
    "solve of vectors": lambda: (aten.linalg_solve, square(), rand(3, 3)),
    "solve, broadcasting": lambda: (aten.linalg_solve, square()[:1], rand(3, 3, 2)),
    "solve_ex": lambda: (aten.linalg_solve_ex, square(), rand(3, 3, 2)),
    "solve_triangular": lambda: (aten.linalg_solve_triangular, lower(), rand(3, 3, 2),
                                 {"upper": False}),
    "solve_triangular from the right": lambda: (
        aten.linalg_solve_triangular, lower(), rand(3, 2, 3), {"upper": False, "left": False}),
    "cholesky_solve": lambda: (aten.cholesky_solve, rand(3, 3, 2), lower()),
    "lu_solve": lambda: (aten.linalg_lu_solve, *torch.linalg.lu_factor(square()), rand(3, 3, 2)),
    "ormqr": lambda: (aten.ormqr, *torch.geqrf(upright()), rand(3, 4, 2)),
    "check_errors": lambda: (aten._linalg_check_errors, torch.zeros(3, dtype=torch.int32),
                             "linalg.inv", {"is_matrix": False}),
}  # fmt: skip

UNASKED: dict[str, Sample] = {
    "svd without vectors": lambda: (aten._linalg_svd, upright(), False, False),
    "qr without the first": lambda: (aten.linalg_qr, upright(), "r"),
    "lu_unpack of data": lambda: (aten.lu_unpack, *torch.linalg.lu_factor(square()), True, False),
    "ldl_solve": lambda: (aten.linalg_ldl_solve, *torch.linalg.ldl_factor(square()),
                          rand(3, 3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", SMOOTH)
def test_batches_of_matrices_equal_one_device(name: str) -> None:
    assert rule_errors(lambda: (getattr(aten, name), square())) == []


@pytest.mark.parametrize("name", ROUGH)
def test_batches_without_gradients(name: str) -> None:
    assert rule_errors(lambda: (getattr(aten, name), square()), grad=False) == []


@pytest.mark.parametrize("name", OTHERS)
def test_unbatched_operations(name: str) -> None:
    assert rule_errors(OTHERS[name]) == []


@pytest.mark.parametrize("name", UNASKED)
def test_results_that_are_not_requested(name: str) -> None:
    assert rule_errors(UNASKED[name], grad=False) == []


def test_triangular_solve() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert rule_errors(lambda: (aten.triangular_solve, rand(3, 3, 2), lower(), False)) == []


def test_rule_texts() -> None:
    assert rule_text(aten.linalg_svd, upright()) == "b11->b11,b1,b11"
    assert rule_text(aten.linalg_solve, square(), rand(3, 3, 2)) == (
        "b11,b1k->b1k  {unreduced 1 sum; unreduced 1 avg}"
    )
    assert rule_factors(aten.linalg_solve, square(), rand(3, 2, 3), left=False) == "b11,bk1->bk1"
    assert rule_text(aten.linalg_solve_ex, square(), rand(3, 3, 2)) == (
        "b11,b1k->b1k,b  {k unsharded; unreduced 1 sum -> sum, invariant; "
        "unreduced 1 avg -> avg, invariant}"
    )
    assert rule_text(aten._linalg_svd, upright(), False, False) == "b11->1,b1,1  {b sum}"
