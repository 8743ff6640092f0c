"""Custom `autograd.Function`s in the idioms of PyTorch's documentation, called through aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Round(torch.autograd.Function):
    """Straight-through estimator, with a factor that shows that its backward ran."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class SavesInputs(torch.autograd.Function):
    """Base of functions that save their inputs, with a generated rule for `vmap`."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


class Reverse(torch.autograd.Function):
    """Gradient reversal, with an attribute that is not a tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.scale * grads[0], None


class Exp(torch.autograd.Function):
    """Exponential that saves its output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0] * ctx.saved_tensors[0]


class Linear(torch.autograd.Function):
    """Linear layer whose backward computes the gradients that are needed."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x.mm(weight.t())
        if bias is not None:
            out += bias.unsqueeze(0).expand_as(out)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, bias = ctx.saved_tensors
        needs, (g,) = ctx.needs_input_grad, grads
        return (
            g.mm(weight) if needs[0] else None,
            g.t().mm(x) if needs[1] else None,
            g.sum(0) if bias is not None and needs[2] else None,
        )


class Relu(torch.autograd.Function):
    """Rectifier whose backward writes in place and is differentiable once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        g = grads[0].clone()
        g[x < 0] = 0
        return g


class Sort(torch.autograd.Function):
    """Sorted rows, their indices without gradient, and results that are not tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        values, indices = x.sort(1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices, None, 3, values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return torch.zeros_like(grads[0]).scatter(1, indices, grads[0] + grads[4])


class FixedPoint(torch.autograd.Function):
    """Fixed point whose backward takes gradients itself, by implicit differentiation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(3):
            z = torch.tanh(z @ w * 0.1 + x)
        ctx.save_for_backward(x, w, z)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w, z = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            step = torch.tanh(z @ w * 0.1 + x)
        u = grads[0]
        for _ in range(3):
            u = grads[0] + torch.autograd.grad(step, z, u, retain_graph=True)[0]
        return torch.autograd.grad(step, (x, w), u)


round_, reverse, exp, linear, relu, sort, fixed_point = (
    Round.apply,
    Reverse.apply,
    Exp.apply,
    Linear.apply,
    Relu.apply,
    Sort.apply,
    FixedPoint.apply,
)


def rounded(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = round_(x @ w)
    return y.sum(0)


def reversed_(x: Tensor, w: Tensor) -> Tensor:
    return (reverse(x @ w, 0.5) * x).sin()


def exponential(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = exp(x @ w)
    return y


def layers(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = linear(linear(x, w, w[0]).sin(), w, None)
    return y


def rectified(x: Tensor, w: Tensor) -> Tensor:
    return relu(x @ w) * 2


def sorted_(x: Tensor, w: Tensor) -> Tensor:
    values, indices, *_, total = sort(x @ w)
    return values * indices + total


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = exp(x)
    return scale * (x @ w)


def of_weights(x: Tensor, w: Tensor) -> Tensor:
    return x.detach() @ exp(w)


def penalty(x: Tensor, w: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(exp(x @ w).sum(), x, create_graph=True)
    return g.square().sum() + linear(x, w, None).sum()


def mapped(x: Tensor, w: Tensor) -> Tensor:
    return torch.vmap(lambda row: exp(row @ w))(x)


def implicit(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = fixed_point(x, w)
    return y.sin()


CUSTOM_FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    rounded,
    reversed_,
    exponential,
    layers,
    rectified,
    sorted_,
    without_gradient,
    of_weights,
    penalty,
    mapped,
    implicit,
]
DIFFERENTIABLE_TWICE = {exponential, layers, mapped, without_gradient}
