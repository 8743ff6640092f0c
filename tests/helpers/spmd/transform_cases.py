"""Mapped functions and their dense forms, and transforms of `torch.func` to compare them under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spec_grid import random_global

MESH = Mesh(x=2)
Fn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def reals(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, torch.float64, seed) / 4


X, W = reals(4, 2), reals(2, 2, seed=1)
BATCH, WEIGHTS = torch.stack([X, 2 * X + 1, -X]), torch.stack([W, W + 1])


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def varying(w: torch.Tensor) -> torch.Tensor:
    return fs.pcast(w, "x", to="varying")


class Case(NamedTuple):
    """A body of x, sharded by rows, and w, unsharded; its out spec; the same on one device."""

    body: Fn
    out: P
    dense: Fn


CASES = {
    "psum": Case(
        lambda x, w: fs.psum(torch.tanh(x @ varying(w)).sum(0), "x") ** 2,
        P(),
        lambda x, w: torch.tanh(x @ w).sum(0) ** 2,
    ),
    "pmean": Case(
        lambda x, w: x * varying(fs.pmean((x @ varying(w)).sin().mean(), "x")),
        P("x"),
        lambda x, w: x * (x @ w).sin().mean(),
    ),
    "gather": Case(
        lambda x, w: fs.all_gather((x @ varying(w)).exp(), "x", tiled=True, to="invariant") @ w,
        P(),
        lambda x, w: (x @ w).exp() @ w,
    ),
    "permutation": Case(
        lambda x, w: fs.ppermute(x**3, "x", [(0, 1), (1, 0)]) @ varying(w),
        P("x"),
        lambda x, w: x.roll(2, 0) ** 3 @ w,
    ),
    "exchange": Case(
        lambda x, w: fs.all_to_all((x @ varying(w)).sin(), "x", 1, 0, tiled=True) ** 2,
        P(None, "x"),
        lambda x, w: (x @ w).sin() ** 2,
    ),
    "maximum": Case(
        lambda x, w: fs.pmax((x @ varying(w)).sin(), "x") ** 2,
        P(),
        lambda x, w: (x @ w).sin().reshape(2, 2, 2).amax(0) ** 2,
    ),
}


GRID = Mesh(x=2, y=2)
GRID_SPECS = P("x", "y"), P("y")


def contracted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return fs.psum(x @ fs.pcast(w, "x", to="varying"), "y")


GRID_CASES = {
    "contraction": Case(
        lambda x, w: fs.psum(torch.tanh(contracted(x, w)).sum(0), "x") ** 2,
        P(),
        lambda x, w: torch.tanh(x @ w).sum(0) ** 2,
    ),
    "scatter": Case(
        lambda x, w: fs.psum_scatter(
            x.sin() @ fs.pcast(w, "x", to="varying"), "y", scatter_dimension=1, tiled=True
        ).exp(),
        P("x", "y"),
        lambda x, w: (x.sin() @ w).exp(),
    ),
    "gather": Case(
        lambda x, w: fs.pmean(
            fs.ppermute(fs.all_gather(x, "y", axis=1, tiled=True) ** 2, "x", [(0, 1), (1, 0)])
            @ fs.pcast(fs.all_gather(w, "y", tiled=True), "x", to="varying"),
            "y",
        ),
        P("x"),
        lambda x, w: x.roll(2, 0) ** 2 @ w,
    ),
}
"""Bodies on a 2x2 mesh, with arguments of `GRID_SPECS`."""


def loss(f: Fn, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (f(x, w) ** 3).sum()


def in_dual_level(f: Fn) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(X, 2 * X), W)).tangent


def of_gradients_in_dual_level(f: Fn) -> Any:
    """Return a Hessian-vector product, forward over reverse by PyTorch's own levels."""
    w = W.clone().requires_grad_()
    with forward_ad.dual_level():
        (gradient,) = torch.autograd.grad(loss(f, X, forward_ad.make_dual(w, 2 * W)), w)
        return forward_ad.unpack_dual(gradient).tangent


def linearized(f: Callable[..., Any], *args: torch.Tensor) -> Any:
    """Return the value of `f`, and its derivative at several tangents, the first one twice."""
    y, derivative = linearize(f, *args)
    return y, [derivative(*(scale * x + 1 for x in args)) for scale in (2, 3, 2)]


def by_autograd(f: Fn) -> Any:
    """Return gradients of `torch.func.grad` for a leaf of ordinary autograd."""
    w = W.clone().requires_grad_()
    return torch.autograd.grad((grad(lambda x: loss(f, x, w))(X) ** 2).sum(), w)


TRANSFORMS: dict[str, Callable[[Fn], Any]] = {
    "grad": lambda f: grad(lambda x, w: loss(f, x, w), (0, 1))(X, W),
    "grad_and_value": lambda f: grad_and_value(lambda w: loss(f, X, w))(W),
    "vjp": lambda f: (lambda y, back: back(y.cos()))(*vjp(f, X, W)),
    "jvp": lambda f: jvp(f, (X, W), (X.sin(), W + 1)),
    "linearize": lambda f: linearized(lambda w: f(X, w), W),
    "linearize of both": lambda f: linearized(f, X, W),
    "vmap": lambda f: vmap(f, (0, None))(BATCH, W),
    "vmap of the last dim": lambda f: vmap(f, (-1, None), -1)(BATCH.movedim(0, -1), W),
    "vmap of vmap": lambda f: vmap(vmap(f, (0, None)), (None, 0))(BATCH, WEIGHTS),
    "jacrev": lambda f: jacrev(f, (0, 1))(X, W),
    "jacfwd": lambda f: jacfwd(f, (0, 1))(X, W),
    "hessian": lambda f: hessian(lambda w: loss(f, X, w))(W),
    "jacfwd of jacrev of another": lambda f: jacfwd(jacrev(lambda x, w: loss(f, x, w), 0), 1)(X, W),
    "jacrev of jacrev": lambda f: jacrev(jacrev(lambda w: f(X, w)))(W),
    "jacfwd of vjp": lambda f: jacfwd(lambda w: vjp(lambda w: f(X, w), w)[1](f(X, W))[0])(W),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(lambda w: f(X, w)))(W),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda w: f(X, w)))(W),
    "vmap of grad": lambda f: vmap(grad(lambda w, x: loss(f, x, w)), (None, 0))(W, BATCH),
    "vmap of jacrev": lambda f: vmap(jacrev(lambda w, x: f(x, w)), (None, 0))(W, BATCH),
    "vmap of hessian": lambda f: vmap(hessian(lambda w, x: loss(f, x, w)), (None, 0))(W, BATCH),
    "vmap of vmap of grad": lambda f: vmap(
        vmap(grad(lambda w, x: loss(f, x, w)), (None, 0)), (0, None)
    )(WEIGHTS, BATCH),
    "vmap of jvp of grad": lambda f: vmap(
        lambda t: jvp(grad(lambda w: loss(f, X, w)), (W,), (t,))[1]
    )(WEIGHTS),
    "grad of vmap": lambda f: grad(lambda w: (vmap(f, (0, None))(BATCH, w) ** 3).sum())(W),
    "jacrev of vmap": lambda f: jacrev(lambda w: vmap(f, (0, None))(BATCH, w))(W),
    "grad of grad": lambda f: grad(lambda w: (grad(lambda w: loss(f, X, w))(w) ** 2).sum())(W),
    "grad of jvp": lambda f: grad(lambda w: jvp(lambda w: f(X, w), (w,), (2 * w,))[1].sum())(W),
    "jvp of jvp": lambda f: jvp(
        lambda w: jvp(lambda w: f(X, w), (w,), (2 * w,))[1], (W,), (W + 1,)
    ),
    "jvp of grad": lambda f: jvp(grad(lambda w: loss(f, X, w)), (W,), (W + 1,)),
    "batched cotangents of a second order": lambda f: vmap(
        lambda t: hessian(lambda w: (loss(f, X, w) * t.sum()).sin())(W)
    )(WEIGHTS),
    "dual_level": in_dual_level,
    "dual_level of gradients": of_gradients_in_dual_level,
    "autograd of grad": by_autograd,
}


def dense_call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).cumsum(0)


def calls_on(mesh: Mesh) -> dict[str, Fn]:
    """Return calls on a mesh with an axis x that compute `dense_call`."""

    def by_apply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Compute on pairs; the sum over ranks stays open until the pair is unsharded."""
        product = fs.apply(torch.matmul, fs.shard(x, mesh, P("x")), fs.shard(w, mesh, P()))
        y = fs.apply(torch.tanh, product)
        return fs.unshard(fs.apply(torch.cumsum, fs.reshard(y, P(None)), 0))

    layouts = {"rows": (P("x"), P()), "columns": (P(), P(None, "x"))}
    parts = {
        f"partition {name}": fs.partition(dense_call, mesh=mesh, in_specs=specs)
        for name, specs in layouts.items()
    }
    return {"apply": by_apply, **parts}


CALLS = calls_on(MESH)


def calls_of_rank(mesh: Mesh) -> dict[str, Fn]:
    """Return calls of one rank that compute `dense_call`: of a program, and of collectives."""

    def by_program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        pair = fs.shard(x, mesh, P("x"))
        gather = fs.redistribute(pair.spec, pair.spec.replace(partition=P()))
        return dense_call(gather(pair.local), w)

    def by_collectives(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        local = fs.shard(x, mesh, P("x")).local @ fs.pcast(w, "x", to="varying", mesh=mesh)
        y = fs.all_gather(local.tanh(), "x", tiled=True, to="invariant", mesh=mesh)
        return y.cumsum(0)

    return {"program": by_program, "collectives": by_collectives}
