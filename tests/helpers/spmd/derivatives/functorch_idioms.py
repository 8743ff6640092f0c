"""Idioms of PyTorch's own tests and pages of `torch.func`, as functions of one function of x and w.

Each takes the function `f(x, w) = tanh(x @ w)`, row by row, in one of its forms, and returns what
the form must share with the function on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import functional as autograd_functional
from torch.func import (
    debug_unwrap,
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import fshard as fs
from fshard import P
from tests.helpers.spmd.transform_cases import BATCH, MESH, WEIGHTS, W, X, close

Fn = Callable[[Tensor, Tensor], Tensor]
T = torch.ones(4, 2, dtype=torch.float64)


def dense(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def total(f: Fn) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: f(x, w).square().sum()


# -- trees, auxiliary results, argnums --------------------------------------------------------


def trees(f: Fn) -> Any:
    loss = lambda p: f(p["x"], p["ws"][0] + p["ws"][1]).sum()  # noqa: E731
    return grad(loss)({"x": X, "ws": [W, 2 * W]})


def results_as_trees(f: Fn) -> Any:
    out, back = vjp(lambda x, w: {"a": f(x, w), "b": (x.sum(), [f(x, w) * w.sum()])}, X, W)
    return out, back({"a": T, "b": (torch.tensor(2.0, dtype=X.dtype), [T])})


def auxiliary(f: Fn) -> Any:
    loss = lambda x, w: (f(x, w).sum(), {"y": f(x, w), "kept": x.detach()})  # noqa: E731
    return (
        grad(loss, has_aux=True)(X, W),
        grad_and_value(loss, argnums=1, has_aux=True)(X, W),
        vjp(lambda x: (f(x, W), x + 1), X, has_aux=True)[2],
        jacrev(lambda x: (f(x, W), x + 1), has_aux=True)(X),
        jacfwd(lambda x: (f(x, W), x + 1), has_aux=True)(X),
        jvp(lambda x: (f(x, W), x + 1), (X,), (T,), has_aux=True),
    )


def argument_numbers(f: Fn) -> Any:
    return grad(total(f), -1)(X, W), grad(total(f), (1, 0))(X, W), jacrev(f, argnums=(1,))(X, W)


# -- what does not depend -----------------------------------------------------------------------


def unrelated(f: Fn) -> Any:
    other = lambda y: f(X, W)  # noqa: E731
    return (
        grad(lambda y: other(y).sum())(W),
        vjp(other, W)[1](T),
        jacrev(other)(W),
        jacfwd(other)(W),
        jvp(other, (W,), (W,)),
        hessian(lambda y: f(y, W).sum() * 0 + y.sum())(X),
    )


def grad_modes(f: Fn) -> Any:
    def inside(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            scale = f(x, w)
        return (scale * f(x, w)).sum()

    with torch.no_grad():
        outside = grad(total(f))(X, W)
    nested = grad(lambda w: grad(inside)(X, w).square().sum())(W)
    return grad(inside)(X, W), outside, nested


def detached(f: Fn) -> Any:
    loss = lambda x, w: (f(x, w).detach() * f(x, w)).sum()  # noqa: E731
    return grad(loss, (0, 1))(X, W), jvp(loss, (X, W), (X, W))[1]


# -- writes in place ----------------------------------------------------------------------------


def written(f: Fn) -> Any:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        x = x.clone()
        x[:2] *= 3
        y = 1 * f(x, w)
        y[0].mul_(2)
        return y.add_(1).square().sum()

    return grad(loss, (0, 1))(X, W), vmap(grad(loss, 1), (0, None))(BATCH, W)


# -- vmap ---------------------------------------------------------------------------------------


def batch_dims(f: Fn) -> Any:
    return (
        vmap(f, (0, 0))(BATCH[:2], WEIGHTS),
        vmap(f, in_dims=(-1, None), out_dims=-1)(BATCH.movedim(0, -1), W),
        vmap(lambda d: {"y": f(d["x"], d["w"])}, ({"x": 0, "w": None},))({"x": BATCH, "w": W}),
        vmap(lambda x, w: (f(x, w), f(x, w).sum()), (0, None), (1, 0))(BATCH, W),
        vmap(lambda x: (x, f(X, W)), out_dims=(0, None))(BATCH),
        vmap(f, (None, 0))(X, WEIGHTS),
        vmap(lambda x, *, w: f(x, w), chunk_size=2)(BATCH, w=W),
    )


def chunks(f: Fn) -> Any:
    return jacrev(f, chunk_size=1)(X, W), jacrev(f, argnums=1, chunk_size=3)(X, W)


def levels(f: Fn) -> Any:
    inner = vmap(jacfwd(f, 1), (0, None))
    return (
        vmap(inner, (None, 0))(BATCH, WEIGHTS),
        jacrev(lambda w: vmap(grad(total(f), 1), (0, None))(BATCH, w))(W),
        vmap(lambda x: vjp(lambda w: f(x, w), W)[1](T)[0])(BATCH),
        vmap(lambda t: linearize(lambda w: f(2 * X, w), W)[1](t + 1))(WEIGHTS),
    )


def random_draws(f: Fn) -> Any:
    torch.manual_seed(0)
    same = vmap(lambda x: f(x, W) * torch.rand(2, dtype=X.dtype), randomness="same")(BATCH)
    torch.manual_seed(0)
    return same, vmap(
        lambda x: f(x, W) * torch.rand(2, dtype=X.dtype), randomness="different"
    )(BATCH)  # fmt: skip


# -- modules ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Calls a function on its parameter, which has two names, and a buffer."""

    def __init__(self, f: Fn, scale: float) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(scale * W.clone())
        self.tied = self.w
        self.register_buffer("shift", torch.full((2,), scale, dtype=X.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.f(x, self.w), self.tied) + self.shift


def functional_modules(f: Fn) -> Any:
    module = Layer(f, 1.0)
    params = {name: p.detach() for name, p in module.named_parameters()}
    loss = lambda p, x: functional_call(module, p, (x,)).square().sum()  # noqa: E731
    untied = functional_call(module, {"w": W + 1, "tied": W}, (X,), tie_weights=False)
    return (
        grad(loss)(params, X),
        vmap(grad(loss), (None, 0))(params, BATCH),
        untied,
        functional_call(module, ({"w": 2 * W}, {"shift": X[0]}), (X,)),
    )


def ensembles(f: Fn) -> Any:
    models = [Layer(f, scale) for scale in (0.5, 1.0, 2.0)]
    params, buffers = stack_module_state(models)
    base = models[0]
    call = lambda p, b, x: functional_call(base, (p, b), (x,))  # noqa: E731
    plain = {name: p.detach() for name, p in params.items()}
    return (
        vmap(call)(plain, buffers, BATCH),
        vmap(call, in_dims=(0, 0, None))(plain, buffers, X),
        vmap(grad(lambda p, b: call(p, b, X).square().sum()))(plain, buffers),
    )


# -- other uses of transforms ---------------------------------------------------------------------


def meta_learning(f: Fn) -> Any:
    def adapted(w: Tensor, x: Tensor) -> Tensor:
        return w - 0.1 * grad(total(f), 1)(x, w)

    outer = lambda w: vmap(lambda x: total(f)(2 * x, adapted(w, x)))(BATCH).sum()  # noqa: E731
    return grad_and_value(outer)(W)


def products_with_hessians(f: Fn) -> Any:
    loss = lambda w: total(f)(X, w)  # noqa: E731
    return (
        jvp(grad(loss), (W,), (W + 1,))[1],
        vjp(grad(loss), W)[1](W + 1)[0],
        jvp(lambda w: jvp(loss, (w,), (W,))[1], (W,), (W + 1,))[1],
        grad(lambda w: (grad(loss)(w) * (W + 1)).sum())(W),
        vmap(lambda t: jvp(grad(loss), (W,), (t,))[1])(WEIGHTS),
    )


def third_derivatives(f: Fn) -> Any:
    loss = lambda w: total(f)(X, w * W)  # noqa: E731
    scalar = torch.tensor(1.5, dtype=X.dtype)
    return grad(grad(grad(loss)))(scalar), jacfwd(hessian(loss))(scalar)


def linearizations(f: Fn) -> Any:
    y, derivative = linearize(f, X, W)
    values = [derivative(T, W), derivative(X, 2 * W)]
    batched = vmap(lambda t: derivative(t, W))(BATCH)
    tree = linearize(lambda d: {"y": f(d["x"], d["w"])}, {"x": X, "w": W})[1]({"x": T, "w": W})
    return y, values, batched, tree


def unwrapped(f: Fn) -> Any:
    seen = []

    def fn(x: Tensor) -> Tensor:
        y = f(x, W)
        seen.append(debug_unwrap(y).detach())
        return y.sum()

    grad(fn)(X)
    return seen


def complex_values(f: Fn) -> Any:
    rotated = lambda x, w: (f(x, w) * torch.exp(1j * x)).abs().square().sum()  # noqa: E731
    return grad(rotated, (0, 1))(X, W)


def used_twice(f: Fn) -> Any:
    y, pull = vjp(f, X, W)
    with torch.no_grad():
        without = pull(y)
    return without, pull(y.cos()), vmap(pull)(torch.stack([y, y.sin()]))


def in_inference_mode(f: Fn) -> Any:
    with torch.inference_mode():
        return grad(lambda x: total(f)(x, W))(X), jvp(lambda x: f(x, W), (X,), (T,))


def of_autograd_functional(f: Fn) -> Any:
    loss = lambda w: total(f)(X, w)  # noqa: E731
    products = autograd_functional.hvp(loss, W, W), autograd_functional.vhp(loss, W, W)
    return products, autograd_functional.jacobian(lambda x: f(x, W), X, vectorize=True)


def batched_cotangents(f: Fn) -> Any:
    x = X.clone().requires_grad_()
    y = f(x, W)
    return torch.autograd.grad(y, x, torch.stack([T, y.detach()]), is_grads_batched=True)


def gradients_within(f: Fn) -> Any:
    def penalty(x: Tensor) -> Tensor:
        z = x * 1
        (gradient,) = torch.autograd.grad(total(f)(z, W), z, create_graph=True)
        return gradient.square().sum()

    return grad(penalty)(X)


def neural_tangent_kernels(f: Fn) -> Any:
    """Contract Jacobians, and compute the same kernel by products with them."""
    jacobians = vmap(jacrev(f, 1), (0, None))(BATCH, W)

    def products(x: Tensor, y: Tensor) -> Tensor:
        pull = vjp(lambda w: f(x, w).sum(1), W)[1]
        push = lambda ct: jvp(lambda w: f(y, w).sum(1), (W,), pull(ct))[1]  # noqa: E731
        return vmap(push)(torch.eye(len(x), dtype=x.dtype))

    kernels = vmap(vmap(products, (None, 0)), (0, None))(BATCH, BATCH.sin())
    return torch.einsum("nifab,mjgab->nmijfg", jacobians, jacobians), kernels


def norms_of_sample_gradients(f: Fn) -> Any:
    sample = vmap(grad(total(f), 1), (0, None))
    return grad(lambda w: sample(BATCH, w).flatten(1).norm(dim=1).sum())(W)


def products_with_jacobians(f: Fn) -> Any:
    """Multiply matrices by Jacobians, one product for each row or all at once."""
    _, pull = vjp(lambda w: f(X, w), W)
    rows = torch.stack([T, T.cumsum(0), -T])
    push = lambda t: jvp(lambda w: f(X, w), (W,), (t,))[1]  # noqa: E731
    directions = torch.stack([W, W.cos()])
    return vmap(pull)(rows), [pull(row) for row in rows], vmap(push)(directions)


IDIOMS: dict[str, Callable[[Fn], Any]] = {
    fn.__name__: fn
    for fn in (
        trees, results_as_trees, auxiliary, argument_numbers, unrelated, grad_modes, detached,
        written, batch_dims, chunks, levels, random_draws, functional_modules,
        ensembles, meta_learning, products_with_hessians, third_derivatives, linearizations,
        unwrapped, complex_values, used_twice, in_inference_mode, of_autograd_functional,
        batched_cotangents, gradients_within, neural_tangent_kernels, norms_of_sample_gradients,
        products_with_jacobians,
    )
}  # fmt: skip


@functools.cache
def of_one_device(run: Callable[[Fn], Any]) -> Any:
    """Return an idiom's result on one device, which all forms are compared with."""
    return run(dense)


def differing(f: Fn, idioms: Mapping[str, Callable[[Fn], Any]]) -> dict[str, str]:
    """Return the idioms whose result is not that of one device."""
    errors = {}
    for name, run in idioms.items():
        try:
            close(run(f), of_one_device(run))
        except AssertionError as error:
            errors[name] = str(error)[:300]
    return errors


LINEARIZED: dict[str, tuple[fs.PartitionSpec, Callable[[Tensor, Any, Tensor], Tensor]]] = {
    "value": (P(), lambda y, dy, x: y),
    "tangent": (P(), lambda y, dy, x: dy(x.cos())),
    "tangents": (P(), lambda y, dy, x: vmap(dy)(torch.stack([x, x.cos()])).prod(0)),
    "gradient": (P("x"), lambda y, dy, x: grad(lambda t: dy(t).exp().sum())(x)),
    "tangent of it": (P(), lambda y, dy, x: jvp(dy, (x,), (x.cos(),))[1]),
}
"""Results of a value, its derivative and a rank's rows, and their layouts."""


def differing_linearizations(check: bool) -> list[str]:
    """Return the names of results of `linearize` in bodies that are not those of one device."""

    def by_jvp(x: Tensor) -> Any:
        value = lambda x: x.sin().unflatten(0, (2, -1)).sum(0)  # noqa: E731
        return value(x), lambda t: jvp(value, (x,), (t,))[1]

    names = []
    for name, (out, result) in LINEARIZED.items():
        body = lambda x, fn=result: fn(*linearize(lambda x: fs.psum(x.sin(), "x"), x), x)  # noqa: E731
        mapped = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=out, check=check)
        if not torch.allclose(mapped(X), result(*by_jvp(X), X), rtol=0, atol=1e-10):
            names.append(name)
    return names
