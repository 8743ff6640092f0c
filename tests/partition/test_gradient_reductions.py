"""Redistributions of a partitioned function whose transposes send least: hybrid layouts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import Redistribution
from tests.helpers.ops.block_cases import BYTES

CUBE = Mesh(a=2, b=2, c=2)
AXES = [axes for n in range(4) for axes in itertools.permutations(CUBE.axes, n)]


def product(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x @ w


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_gradients_of_hybrid_weights_are_redistributed_as_if_planned_alone(axes: Any) -> None:
    """The gradient is scattered over the axes of the weight before it is reduced over the rest."""
    w = torch.empty(512, 1024, device="meta", requires_grad=True)
    x = torch.empty(2**16, 512, device="meta")
    part = fs.partition(product, mesh=CUBE, in_specs=(P(axes), P(CUBE.axes)))
    call = part.trace(w, x)
    spec = fs.Spec(CUBE, P(axes), shape=(512, 1024))
    used = spec.replace(partition=P(reduced=set(CUBE.axes)))
    assert [line.program.dst for line in call.lines if isinstance(line, Redistribution)] == [used]
    for cost, prog in (
        (call.cost(), fs.redistribute(spec, used)),
        (call.cost(backward=True), fs.redistribute(used.dual, spec.dual)),
    ):
        assert cost == prog.cost()


def test_gradient_of_a_hybrid_weight_is_that_of_one_device() -> None:
    torch.manual_seed(0)
    w = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    x = torch.randn(256, 4, dtype=torch.float64)
    part = fs.partition(product, mesh=CUBE, in_specs=(P("b"), P(CUBE.axes)), topology=BYTES)
    assert "← reduce_scatter(b, dim 0)" in str(part.explain(w, x))
    grads = [torch.autograd.grad(f(w, x).sin().sum(), w) for f in (part, product)]
    torch.testing.assert_close(*grads)
