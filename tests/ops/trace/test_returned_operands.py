"""Tensors in the memory of others under `no_grad`: operands that are returned, and views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(dp=2, tp=2)


def divided_by_norm(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        norm = w.double().norm()
    return x @ w / norm


def divided_by_mean(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with torch.no_grad():
        mean = y.contiguous().to(y.dtype).flatten(1).contiguous().mean()
    return y / mean


def moved(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        on_device = w.to(x.device)
    w.data = on_device  # as Module.to does
    return torch.nn.functional.linear(x.tanh(), w)


def doubled(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with torch.no_grad():
        y.contiguous().mul_(2)
    return y


def viewed(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).relu_()
    with torch.no_grad():
        rows, columns = y.t(), y.chunk(2, 1)
    return y @ rows + torch.cat(columns, 1)


def undropped(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).relu_()
    with torch.no_grad():
        z = torch.nn.functional.dropout(y, 0.5, training=False)
    return y @ z.t() + z.sum(0)


def unchanged(x: Tensor, w: Tensor) -> Tensor:
    """Local operations, or a constraint, that could return their operand: the results are new."""
    with torch.no_grad():
        rolled, row = w.roll(4, 0), w[1::2].sum_to_size(1, 4)
        constrained = fs.constrain(w, P("tp", "dp"))
    return x @ w * rolled * row * constrained


FUNCTIONS = [divided_by_norm, divided_by_mean, moved, doubled, viewed, undropped, unchanged]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients_of_memory_that_no_grad_shares(fn: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Operands that functions return keep their gradients, and views have none."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator).requires_grad_()
    expected = fn(x, w)
    grads = torch.autograd.grad(expected.sin().sum(), (x, w))
    for layouts in (P(), P()), (P("dp"), P("tp", "dp")), (P("dp"), P("dp")):
        actual = fs.partition(fn, mesh=MESH, in_specs=layouts)(x, w)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual.sin().sum(), (x, w)), grads)
