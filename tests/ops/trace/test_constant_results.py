"""Results that have no graph in eager PyTorch, in functions that take gradients themselves.

They are computed under `no_grad`, in transforms too, or in backwards without `create_graph`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionMeta, once_differentiable
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(dp=2, tp=2)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x


class Once(Square):
    """Square whose derivative is a constant."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g * ctx.saved_tensors[0]


class HalfConstant(Square):
    """Square whose derivative is half a constant."""

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


class HalfInTransforms(torch.autograd.Function):
    """Sine whose derivative is a constant, in the form that transforms can use."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        with torch.no_grad():
            slope = ctx.saved_tensors[0].cos()
        return slope * g


class Detaches(torch.autograd.Function):
    """Cube whose backward takes a gradient, with a graph, of a leaf of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            z = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(z**3, z, g, create_graph=True)


@torch.library.custom_op("fshard_tests::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x**3


@cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def cubed_backward(ctx: Any, g: Tensor) -> Tensor:
    with torch.no_grad():
        squares = ctx.x * ctx.x
    return 3 * squares * g


cubed.register_autograd(
    cubed_backward, setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0])
)


fs.register_rule(torch.ops.fshard_tests.cubed.default)("ij->ij")


class LooksUpByParent(FunctionMeta):
    def __getattribute__(cls, name: str) -> Any:  # noqa: N805 - of a metaclass
        return super().__getattribute__(name)


OwnMetaclass = LooksUpByParent("OwnMetaclass", (HalfConstant,), {})


def of_gradient(apply: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the product of `x` and the gradient of a function, with a graph."""

    def run(x: Tensor) -> Tensor:
        y = x * 1
        return torch.autograd.grad(apply(y).sum(), y, create_graph=True)[0] * x

    return run


def below(x: Tensor) -> Tensor:
    """Take a gradient, so that the whole function is traced below autograd."""
    z = x.detach().requires_grad_()
    return torch.autograd.grad(z.sin().sum(), z)[0]


def half_below(x: Tensor) -> Tensor:
    return HalfConstant.apply(x) * x + below(x)


def half_in_transform(x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: HalfInTransforms.apply(y).sum())(x) * x


def recomputed_constant(x: Tensor) -> Tensor:
    def body(y: Tensor) -> Tensor:
        with torch.no_grad():
            constant = y.sin()
        return constant * y

    return of_gradient(lambda y: checkpoint(body, y, use_reentrant=False))(x)


def written_view(x: Tensor) -> Tensor:
    y, z = x * 2, x.sin().detach().requires_grad_()
    with torch.no_grad():
        y[0].mul_(2.0)
        y.view(-1)[3:7].zero_()
        z[1] -= 0.1 * y[0]
    return y.sin() * x * z + below(x)


def initialised(x: Tensor) -> Tensor:
    y = x * 1
    torch.nn.init.constant_(y, 2.0)
    return y * x + below(x)


def same_cotangent(x: Tensor) -> Tensor:
    """Take a gradient that is the cotangent itself, with its graph."""
    y = x.detach().requires_grad_()
    return torch.autograd.grad(y + 1, y, x * x)[0] * x


def accumulated(x: Tensor) -> Tensor:
    """Add two gradients of a leaf, which depend on `x`."""
    z = x.sin().detach().requires_grad_()
    for power in (2, 3):
        torch.autograd.backward([(z**power * x).sum()], inputs=[z])
    assert z.grad is not None
    return z.grad * x


def hessian(x: Tensor) -> Tensor:
    with torch.no_grad():
        diagonal = torch.func.hessian(lambda y: y.sin().sum())(x[0]).sum(0)
    return diagonal * x


def jacobian_by_autograd(x: Tensor) -> Tensor:
    """Call a function that reads `requires_grad` of what it computes of a leaf."""
    return torch.autograd.functional.jacobian(lambda y: y.sin().sum(0), x).sum(0) * x


def in_names(fn: Callable[[Tensor], Tensor], name: str) -> Callable[[Tensor], Tensor]:
    fn.__name__ = name
    return fn


FUNCTIONS = [
    half_below, half_in_transform, recomputed_constant, written_view, initialised, same_cotangent,
    accumulated, hessian, jacobian_by_autograd,
    in_names(of_gradient(Detaches.apply), "detached_leaf"),
    in_names(of_gradient(cubed), "custom_op"),
    in_names(of_gradient(OwnMetaclass.apply), "own_metaclass"),
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
