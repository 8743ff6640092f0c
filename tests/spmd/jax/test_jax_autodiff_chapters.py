"""JAX's autodiff cookbook, advanced autodiff and custom derivative rules, on sharded data.

`torch.func` is in the place of `jax.grad` and its relatives, `autograd.Function` in that of
`custom_jvp` and `custom_vjp`. The functions of the chapters are mapped where that makes sense.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fshard as fs
from fshard import Mesh, P
from tests.helpers.custom_functions import SavesInputs
from tests.helpers.spmd.transform_cases import close

MESH = Mesh(i=2)

# The data of the cookbook: four rows of three features, and their labels.
INPUTS = torch.tensor(
    [[0.52, 1.12, 0.77], [0.88, -1.08, 0.15], [0.52, 0.06, -1.30], [0.74, -2.49, 1.39]],
    dtype=torch.float64,
)
LABELS = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
W, B = torch.tensor([0.3, -0.8, 0.5], dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)


def logistic_loss(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(x @ w + b)
    return -torch.log(p * y + (1 - p) * (1 - y)).sum()


def mapped_loss(w: Tensor, b: Tensor) -> Tensor:
    def body(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return fs.psum(logistic_loss(*fs.pcast((w, b), "i", to="varying"), x, y), "i")

    mapped = fs.shard_map(body, mesh=MESH, in_specs=(P(), P(), P("i"), P("i")), out_specs=P())
    loss: Tensor = mapped(w, b, INPUTS, LABELS)
    return loss


def dense_loss(w: Tensor, b: Tensor) -> Tensor:
    return logistic_loss(w, b, INPUTS, LABELS)


def predictions(w: Tensor) -> Tensor:
    """Return predictions of the rows, sharded as they are."""
    mapped = fs.shard_map(
        lambda w, x: torch.sigmoid(x @ fs.pcast(w, "i", to="varying")),
        mesh=MESH, in_specs=(P(), P("i")), out_specs=P("i"),
    )  # fmt: skip
    result: Tensor = mapped(w, INPUTS)
    return result


def dense_predictions(w: Tensor) -> Tensor:
    return torch.sigmoid(INPUTS @ w)


def tree_loss(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Tensor]:
    return lambda p: f(p["W"], p["b"])


def hessian_products(f: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Return one product in the four ways of the cookbook."""
    g, v = lambda w: f(w, B), W.cos()
    return [
        jvp(grad(g), (W,), (v,))[1],
        grad(lambda w: jvp(g, (w,), (v,))[1])(W),
        grad(lambda w: torch.vdot(grad(g)(w), v))(W),
        torch.tensordot(hessian(g)(W), v, 1),
    ]


COOKBOOK: dict[str, Callable[[Any, Any], Any]] = {
    "grad of each argument": lambda loss, _: [grad(loss, i)(W, B) for i in (0, 1, (0, 1))],
    "grad of a tree": lambda loss, _: grad(tree_loss(loss))({"W": W, "b": B}),
    "grad_and_value": lambda loss, _: grad_and_value(loss, (0, 1))(W, B),
    "nested grads": lambda loss, _: grad(lambda b: grad(loss, 1)(W, b))(B),
    "hessian-vector products": lambda loss, _: hessian_products(loss),
    "jacobians": lambda _, f: (jacfwd(f)(W), jacrev(f)(W)),
    "jacobian of a tree": lambda loss, _: jacrev(jacfwd(tree_loss(loss)))({"W": W, "b": B}),
    "hessian": lambda _, f: (jacfwd(jacrev(f))(W), jacrev(jacfwd(f))(W)),
    "jvp": lambda _, f: jvp(f, (W,), (W.sin(),)),
    "vjp": lambda _, f: (lambda y, back: (y, back(y.cos())))(*vjp(f, W)),
    "rows of a Jacobian at once": lambda _, f: vmap(vjp(f, W)[1])(INPUTS @ INPUTS.T),
    "columns of a Jacobian at once": lambda _, f: vmap(lambda t: jvp(f, (W,), (t,))[1])(INPUTS),
    "stopped gradients": lambda _, f: grad(lambda w: (f(w).detach() * f(w)).sum())(W),
}


@pytest.mark.parametrize("section", COOKBOOK)
def test_cookbook(section: str) -> None:
    run = COOKBOOK[section]
    close(run(mapped_loss, predictions), run(dense_loss, dense_predictions))


def test_gradients_agree_with_finite_differences() -> None:
    step, unit = 1e-6, W.sin() / W.sin().norm()
    difference = (mapped_loss(W + step * unit, B) - mapped_loss(W - step * unit, B)) / (2 * step)
    torch.testing.assert_close(torch.vdot(grad(mapped_loss)(W, B), unit), difference)


def test_complex_values() -> None:
    """Real losses of complex parameters: PyTorch's gradient is the conjugate of JAX's."""

    def loss(z: Tensor, x: Tensor) -> Tensor:
        return (x * z).sin().abs().square().sum()

    mapped = fs.shard_map(
        lambda z, x: fs.psum(loss(fs.pcast(z, "i", to="varying"), x), "i"),
        mesh=MESH, in_specs=(P(), P("i")), out_specs=P(),
    )  # fmt: skip
    z, x = torch.tensor([0.3 + 0.4j, -0.2j, 0.7], dtype=torch.complex128), INPUTS * (1 - 0.5j)
    close(grad(mapped)(z, x), grad(loss)(z, x))
    close(jvp(lambda z: mapped(z, x), (z,), (z * 1j,)), jvp(lambda z: loss(z, x), (z,), (z * 1j,)))


# -- advanced autodiff ----------------------------------------------------------------------------


def test_temporal_difference_update() -> None:
    """TD(0): the target is not differentiated. One gradient for each transition of a batch."""

    def delta(theta: Tensor, state: Tensor, reward: Tensor, following: Tensor) -> Tensor:
        target = (reward + 0.9 * theta @ following).detach()
        return (target - theta @ state).square() / 2

    updates = vmap(grad(delta), (None, 0, 0, 0))
    mapped = fs.shard_map(
        lambda theta, *batch: updates(fs.pcast(theta, "i", to="varying"), *batch),
        mesh=MESH, in_specs=(P(), P("i"), P("i"), P("i")), out_specs=P("i"),
    )  # fmt: skip
    batch = INPUTS, LABELS, INPUTS.flip(0)
    close(mapped(W, *batch), updates(W, *batch))


def test_straight_through_estimator() -> None:
    straight = lambda x: x - x.detach() + x.round().detach()  # noqa: E731
    mapped = fs.shard_map(
        lambda x: fs.psum(straight(x * 2).square().sum(), "i"),
        mesh=MESH, in_specs=P("i"), out_specs=P(),
    )  # fmt: skip
    close(grad(mapped)(INPUTS), grad(lambda x: straight(x * 2).square().sum())(INPUTS))


class Log1pExp(SavesInputs):
    """`log(1 + exp(x))` with a stable derivative: the `custom_jvp` of JAX's chapter."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.log1p(torch.exp(x))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (1 - 1 / (1 + torch.exp(x))) * grads[0]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        (x,) = ctx.saved_tensors
        return (1 - 1 / (1 + torch.exp(x))) * tangents[0]


class ClipGradient(torch.autograd.Function):
    """Identity whose gradient is clipped: the `custom_vjp` of JAX's chapter."""

    generate_vmap_rule = True

    @staticmethod
    def forward(lo: float, hi: float, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.bounds = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, grads[0].clamp(*ctx.bounds)


class FixedPoint(torch.autograd.Function):
    """Fixed point of `tanh(w * x + a)` in x, differentiated implicitly."""

    @staticmethod
    def forward(w: Tensor, a: Tensor) -> Tensor:
        x = torch.zeros_like(a)
        for _ in range(60):
            x = torch.tanh(w * x + a)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        w, _, x = ctx.saved_tensors
        slope = 1 - x.square()
        u = grads[0] / (1 - slope * w)
        return (u * slope * x).sum_to_size(w.shape), u * slope


def test_stable_derivative_of_a_custom_function() -> None:
    x = torch.tensor([-1.0, 0.5, 100.0, 1000.0], dtype=torch.float64)
    mapped = fs.shard_map(
        lambda x: Log1pExp.apply(x).clamp(max=1e6), mesh=MESH, in_specs=P("i"), out_specs=P("i")
    )
    total = lambda x: mapped(x).sum()  # noqa: E731
    expected = torch.sigmoid(x) * (x < 700)  # the value overflows there, as in JAX
    close(grad(total)(x), expected)
    close(jvp(mapped, (x[:2],), (x[:2],))[1], torch.sigmoid(x[:2]) * x[:2])
    close(vmap(grad(total))(x[:2, None].expand(2, 2)), torch.sigmoid(x[:2, None]).expand(2, 2))


def test_clipped_gradient_of_a_sharded_value() -> None:
    def loss(x: Tensor) -> Tensor:
        return ClipGradient.apply(-0.75, 0.75, x).sin().sum()

    mapped = fs.shard_map(
        lambda x: fs.psum(loss(x), "i"), mesh=MESH, in_specs=P("i"), out_specs=P()
    )
    close(vmap(grad(mapped))(INPUTS.T), INPUTS.T.cos().clamp(-0.75, 0.75))


def test_implicit_differentiation_of_a_fixed_point() -> None:
    """The weight is shared by all ranks, and its gradient is summed over them."""

    def loss(w: Tensor, a: Tensor) -> Tensor:
        return FixedPoint.apply(w, a).square().sum()

    def unrolled(w: Tensor, a: Tensor) -> Tensor:
        x = torch.zeros_like(a)
        for _ in range(200):
            x = torch.tanh(w * x + a)
        return x.square().sum()

    mapped = fs.shard_map(
        lambda w, a: fs.psum(loss(fs.pcast(w, "i", to="varying"), a), "i"),
        mesh=MESH, in_specs=(P(), P("i")), out_specs=P(),
    )  # fmt: skip
    w, a = torch.tensor([0.3], dtype=torch.float64), LABELS / 2 - 0.1
    close(grad(mapped, (0, 1))(w, a), grad(unrolled, (0, 1))(w, a))
