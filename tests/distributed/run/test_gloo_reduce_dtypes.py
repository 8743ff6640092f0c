"""Reductions of dtypes that backends do not support agree with the simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from tests.helpers.gloo.harness import run_ranks

MESH = fs.Mesh(x=2)
OPS = (fs.psum, fs.pmax, fs.pmin, fs.pprod, fs.psum_scatter)
ROWS = [[1, 250, 3, 0], [2, 251, 0, 7]]


def reductions(dtype: torch.dtype, join: bool) -> list[torch.Tensor]:
    """Return all reductions of this rank's row, as bytes."""
    if join:
        fs.init(MESH)
    rank = int(fs.axis_index("x", mesh=MESH))
    if dtype.is_floating_point:
        row = torch.tensor(ROWS[rank], dtype=torch.float32).to(dtype)
    else:
        row = (torch.tensor(ROWS[rank]) - 128 * (dtype.itemsize == 8)).to(dtype)
    run: list[Callable[..., Any]] = list(OPS)
    run += [fs.pmean] if dtype.is_floating_point else []
    output = [op(row, "x", mesh=MESH, **tiled(op)) for op in run]
    assert {item.dtype for item in output} == {dtype}
    return [item.contiguous().view(torch.uint8) for item in output]


def tiled(op: object) -> dict[str, bool]:
    return {"tiled": True} if op is fs.psum_scatter else {}


@pytest.mark.parametrize(
    "dtype",
    [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_reductions_of_rare_dtypes(dtype: torch.dtype) -> None:
    simulated = fs.simulate(MESH, reductions, dtype, False)
    real = run_ranks(2, reductions, dtype, True)
    for local, other_value in zip(simulated, real, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(local, other_value, strict=True))


def test_maximum_of_unsigned_integers() -> None:
    """-127 and 123 as uint64 are the largest and a small value."""
    largest = fs.simulate(MESH, reductions, torch.uint64, False)[0][1].view(torch.uint64)
    assert largest.tolist() == [2**64 - 126, 123, 2**64 - 125, 2**64 - 121]


def of_views(join: bool) -> list[torch.Tensor]:
    """Return collectives of lazily conjugated and negated views."""
    if join:
        fs.init(MESH)
    rank = int(fs.axis_index("x", mesh=MESH))
    row = torch.tensor(ROWS[rank][:2], dtype=torch.complex64) * (1 + 2j)
    results = []
    for view in (row.conj(), row.conj().imag):
        assert view.is_conj() or view.is_neg()
        results += [
            fs.psum(view, "x", mesh=MESH),
            fs.pprod(view, "x", mesh=MESH),
            fs.psum_scatter(view, "x", mesh=MESH),
            fs.all_gather(view, "x", mesh=MESH),
            fs.all_to_all(view, "x", 0, 0, mesh=MESH),
            fs.ppermute(view, "x", [(0, 1), (1, 0)], mesh=MESH),
            fs.pbroadcast(view, "x", 1, mesh=MESH),
        ]
    return [item.resolve_conj().resolve_neg() for item in results]


def test_conjugated_and_negated_views() -> None:
    simulated = fs.simulate(MESH, of_views, False)
    real = run_ranks(2, of_views, True)
    for local, other_value in zip(simulated, real, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(local, other_value, strict=True))
    gathered = torch.tensor([item[:2] for item in ROWS], dtype=torch.complex64) * (1 - 2j)
    assert torch.equal(real[0][3], gathered)
    assert torch.equal(real[1][10], gathered.imag)
