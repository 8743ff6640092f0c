"""Operands that functions return as they are, under `no_grad`: they keep their gradients."""

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


@pytest.mark.parametrize("fn", [divided_by_norm, divided_by_mean, moved, doubled])
def test_operands_that_functions_return_keep_their_gradients(
    fn: Callable[[Tensor, Tensor], Tensor],
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 4, 4, dtype=torch.float64, generator=generator).requires_grad_()
    expected = fn(x, w)
    grads = torch.autograd.grad(expected.sin().sum(), (x, w))
    for layouts in (P(), P()), (P("dp"), P("tp", "dp")), (P("dp"), P("dp")):
        actual = fs.partition(fn, mesh=MESH, in_specs=layouts)(x, w)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual.sin().sum(), (x, w)), grads)
