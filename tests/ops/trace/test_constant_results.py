"""Results that have no graph in eager PyTorch, in functions that take gradients themselves.

They are computed under `no_grad`, in transforms too, or in backwards without `create_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(dp=2, tp=2)


class Once(torch.autograd.Function):
    """Square whose derivative is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g * ctx.saved_tensors[0]


class HalfConstant(torch.autograd.Function):
    """Square whose derivative is half a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            constant = g * x
        return constant + g * x


class Inner(torch.autograd.Function):
    """Cosine whose backward takes a gradient without a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return torch.autograd.grad(z * z * z, z, g)


def cube(x: Tensor) -> Tensor:
    return (x * x * x).sum()


def batches(x: Tensor) -> Tensor:
    with torch.no_grad():
        squares = torch.func.vmap(torch.square)(x)
    return squares * x


def gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        g = torch.func.grad(cube)(x)
    return g * x


def gradient_of_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        g = torch.func.grad(lambda y: torch.func.grad(cube)(y).sum())(x)
    return g * x


def constant_within(x: Tensor) -> Tensor:
    """Take a gradient in which a gradient is a constant."""

    def product(y: Tensor) -> Tensor:
        with torch.no_grad():
            g = torch.func.grad(cube)(y)
        return (g * y).sum()

    return torch.func.grad(product)(x) * x


def by_rows(x: Tensor) -> Tensor:
    with torch.no_grad():
        g = torch.func.vmap(torch.func.grad(cube))(x)
    return g * x


def vjp_called_later(x: Tensor) -> Tensor:
    with torch.no_grad():
        y, pull = torch.func.vjp(torch.sin, x)
    return y * x + pull(x)[0]


def jacobian(x: Tensor) -> Tensor:
    with torch.no_grad():
        rows = torch.func.jacrev(lambda y: y.sin().sum(0))(x)
    return (rows.sum(0) * x).exp()


def once(x: Tensor) -> Tensor:
    y = x * 1
    (g,) = torch.autograd.grad(Once.apply(y).sum(), y, create_graph=True)
    return g * x


def half(x: Tensor) -> Tensor:
    y = x * 1
    (g,) = torch.autograd.grad(HalfConstant.apply(y).sum(), y, create_graph=True)
    return g * x


def inner(x: Tensor) -> Tensor:
    return Inner.apply(x * 1).tanh() * x


def inner_of_gradient(x: Tensor) -> Tensor:
    y = x.sin()
    (g,) = torch.autograd.grad(Inner.apply(y).sum(), y, create_graph=True)
    return g * x


def given_cotangent(x: Tensor) -> Tensor:
    """Take a gradient without a graph, whose cotangent has one."""
    y = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(y.sin(), y, x * x)
    (viewed,) = torch.autograd.grad(y.t(), y, (x * x).t())
    return g * x + viewed * x


def recomputed(x: Tensor) -> Tensor:
    y = x * 1
    z = checkpoint(lambda y: y.sin().exp(), y, use_reentrant=False)
    (g,) = torch.autograd.grad(z.sum(), y)
    return g * x


FUNCTIONS = [
    batches, gradient, gradient_of_gradient, constant_within, by_rows, vjp_called_later, jacobian,
    once, half, inner, inner_of_gradient, given_cotangent, recomputed,
]  # fmt: skip


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("layout", [P("dp"), P(None, ("tp", "dp")), P()], ids=str)
def test_constant_results_pass_no_gradients(fn: Callable[[Tensor], Tensor], layout: P) -> None:
    """The first and the second gradients of the results are those of one device."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_()

    def derivatives(fn: Callable[..., Tensor]) -> list[Tensor]:
        y = fn(x)
        (g,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return [y, g, *torch.autograd.grad(g.cos().sum(), x)]

    part = fs.partition(fn, mesh=MESH, in_specs=layout)
    torch.testing.assert_close(derivatives(part), derivatives(fn))
