"""Collectives in groups of ranks, compared with the same operations on rows of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P

GROUPS = [[0, 3], [2, 1]]
MESH = Mesh(i=4)
Rows = Callable[[torch.Tensor], torch.Tensor]
CASES: dict[str, tuple[Callable[..., torch.Tensor], Rows]] = {
    "psum": (fs.psum, lambda rows: rows.sum(0)),
    "pmean": (fs.pmean, lambda rows: rows.mean(0)),
    "pmax": (fs.pmax, lambda rows: rows.amax(0)),
    "pmin": (fs.pmin, lambda rows: rows.amin(0)),
    "pprod": (fs.pprod, lambda rows: rows.prod(0)),
    "varying": (fs.all_gather, lambda rows: rows),
    "invariant": (lambda v, i, **o: fs.all_gather(v, i, to="invariant", **o), lambda rows: rows),
    "reduced": (lambda v, i, **o: fs.all_gather(v, i, to="reduced", **o), lambda rows: rows),
}


@pytest.mark.parametrize("check", [False, True, "strict", "values"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case: str, check: Any) -> None:
    """Ranks use the result differently, so that its cotangents are summed in the group."""
    collective, rows = CASES[case]
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3).requires_grad_()
    weights = torch.arange(1.0, 5.0, dtype=torch.float64)

    def body(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = collective(v[0], "i", axis_index_groups=GROUPS)
        return (y * y.sin() * weight).sum()[None]

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check=check)

    def alone(x: torch.Tensor) -> torch.Tensor:
        output = {r: rows(x[group]) for group in GROUPS for r in group}
        return torch.stack([(output[r] * output[r].sin() * weights[r]).sum() for r in range(4)])

    actual, expected = mapped(x, weights), alone(x)
    torch.testing.assert_close(actual, expected)
    first = [torch.autograd.grad(y.sum(), x, create_graph=True)[0] for y in (actual, expected)]
    torch.testing.assert_close(*first)
    if case not in ("pmax", "pmin"):
        second = [torch.autograd.grad((g**2).sum(), x)[0] for g in first]
        torch.testing.assert_close(*second)
