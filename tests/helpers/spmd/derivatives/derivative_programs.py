"""Programs that take derivatives of derivatives, as in PyTorch's and JAX's tutorials.

Each is a function of `wrap`, which maps or partitions functions, or returns them as they are. The
places are one device, mapped functions and partitioned ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jvp, vjp, vmap

import fshard as fs
from fshard import Mesh, P

Params = dict[str, Tensor]
Place = Literal["dense", "mapped", "partition"]


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2


class Wrap(NamedTuple):
    """A place and its mesh, whose only axis is `x`."""

    place: Place
    mesh: Mesh

    def __call__(
        self, fn: Callable[..., Any], in_specs: Any, out_specs: Any, body: Any = None
    ) -> Any:
        """Return `fn`, mapped or partitioned; `body` is its form with collectives."""
        if self.place == "mapped":
            return fs.shard_map(body or fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        if self.place == "partition":
            return fs.partition(fn, mesh=self.mesh, in_specs=in_specs)
        return fn


def varying(tree: Any) -> Any:
    return fs.pcast(tree, "x", to="varying")


def mlp(p: Params, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]


def parallel_mlp(p: Params, x: Tensor) -> Tensor:
    return fs.psum(torch.tanh(varying(x) @ p["up"] + p["bias"]) @ p["down"], "x")


def params(width: int = 4, inputs: int = 3, outputs: int = 2) -> Params:
    shapes = {"up": (inputs, width), "bias": (width,), "down": (width, outputs)}
    return {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}


BY_WIDTH = {"up": P(None, "x"), "bias": P("x"), "down": P("x")}
REPLICATED = {"up": P(), "bias": P(), "down": P()}
BY_SAMPLE = {name: P("x") for name in REPLICATED}


def square_loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
    return (mlp(p, x) - y).square().sum()


def per_sample_gradients(wrap: Wrap) -> Any:
    """Return the gradients of every sample of a sharded batch, and a step of DP-SGD with them."""
    per_sample = vmap(grad(square_loss), (None, 0, 0))

    def body(p: Params, x: Tensor, y: Tensor) -> Params:
        result: Params = per_sample(varying(p), x, y)
        return result

    def clipped(p: Params, x: Tensor, y: Tensor) -> Params:
        grads = per_sample(p, x, y)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
        factor = (1 / norms).clamp(max=1)
        return {k: torch.einsum("b,b...->...", factor, g) / len(BATCH) for k, g in grads.items()}

    def clipped_body(p: Params, x: Tensor, y: Tensor) -> Params:
        result: Params = fs.psum(clipped(varying(p), x, y), "x")
        return result

    specs = (REPLICATED, P("x"), P("x"))
    grads = wrap(per_sample, specs, BY_SAMPLE, body)(params(), BATCH, LABELS)
    step = wrap(clipped, specs, REPLICATED, clipped_body)(params(), BATCH, LABELS)
    return grads, step


BATCH, LABELS = normal(8, 3, seed=10), normal(8, 2, seed=11)


def per_sample_gradients_of_a_parallel_network(wrap: Wrap) -> Any:
    """Return the gradients of every sample of a tensor parallel network, taken outside."""
    network = wrap(mlp, (BY_WIDTH, P()), P(), parallel_mlp)

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return (network(p, x[None])[0] - y).square().sum()

    return vmap(grad_and_value(loss), (None, 0, 0))(params(), BATCH, LABELS)


def maml(wrap: Wrap) -> Any:
    """Return the outer gradient through inner steps, summed over tasks of a sharded batch."""

    def mean_loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return (mlp(p, x) - y).square().mean()

    def body(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return fs.pmean(mean_loss(varying(p), x, y), "x")

    loss = wrap(mean_loss, (REPLICATED, P("x"), P("x")), P(), body)

    def adapted(p: Params, x: Tensor, y: Tensor, steps: int) -> Params:
        for _ in range(steps):
            grads = grad(loss)(p, x, y)
            p = {name: p[name] - 0.1 * g for name, g in grads.items()}
        return p

    def outer_loss(p: Params, steps: int) -> Tensor:
        def of_task(shift: Tensor) -> Tensor:
            inner = adapted(p, BATCH + shift, LABELS, steps)
            result: Tensor = loss(inner, BATCH.flip(0) + shift, LABELS.flip(0))
            return result

        return vmap(of_task)(normal(2, seed=12)).sum()

    return [grad_and_value(outer_loss)(params(), steps) for steps in (1, 2)]


def maml_within(wrap: Wrap) -> Any:
    """Return the outer gradient of a step that is itself mapped or partitioned."""

    def inner_and_outer(p: Params, x: Tensor, y: Tensor) -> Params:
        def outer(p: Params) -> Tensor:
            grads = grad(square_loss)(p, x, y)
            return square_loss({k: p[k] - 0.02 * grads[k] for k in p}, x.flip(1), y)

        result: Params = grad(outer)(p)
        return result

    def body(p: Params, x: Tensor, y: Tensor) -> Params:
        def total(p: Params, x: Tensor) -> Tensor:
            return fs.psum(square_loss(varying(p), x, y), "x")

        def outer(p: Params) -> Tensor:
            grads = grad(total)(p, x)
            return total({k: p[k] - 0.02 * grads[k] for k in p}, x.flip(1))

        result: Params = grad(outer)(p)
        return result

    return wrap(inner_and_outer, (REPLICATED, P("x"), P("x")), REPLICATED, body)(
        params(), BATCH, LABELS
    )


def hessian_vector_products(wrap: Wrap) -> Any:
    """Return one product three ways: forward over reverse, reverse over reverse, two backwards."""
    network = wrap(mlp, (BY_WIDTH, P()), P(), parallel_mlp)

    def loss(p: Params) -> Tensor:
        y: Tensor = network(p, BATCH)
        return (y - LABELS).square().sum()

    p, v = params(), {k: x.sin() for k, x in params().items()}
    by_jvp = jvp(grad(loss), (p,), (v,))[1]
    by_vjp = vjp(grad(loss), p)[1](v)[0]
    leaves = {k: x.clone().requires_grad_() for k, x in p.items()}
    first = torch.autograd.grad(loss(leaves), [*leaves.values()], create_graph=True)
    inner = sum((g * v[k]).sum() for k, g in zip(leaves, first, strict=True))
    by_backward = dict(zip(leaves, torch.autograd.grad(inner, [*leaves.values()]), strict=True))
    return by_jvp, by_vjp, by_backward


POINTS = normal(8, 2, seed=13)


def burgers(u: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Return the residual of Burgers' equation `u_t + u u_x - nu u_xx` at a point `(t, x)`."""
    value, first, second = u(point), grad(u)(point), hessian(u)(point)
    return first[0] + value * first[1] - 0.1 * second[1, 1]


def pinn_inside(wrap: Wrap) -> Any:
    """Return loss and gradient of a PINN whose derivatives are taken inside the map."""

    def residuals(p: Params, points: Tensor) -> Tensor:
        one = lambda point: burgers(lambda q: mlp(p, q)[0], point)  # noqa: E731
        return vmap(one)(points).square().sum()

    def body(p: Params, points: Tensor) -> Tensor:
        return fs.psum(residuals(varying(p), points), "x")

    loss = wrap(residuals, (REPLICATED, P("x")), P(), body)
    return grad_and_value(lambda p: loss(p, POINTS))(params(inputs=2, outputs=1))


def pinn_outside(wrap: Wrap) -> Any:
    """Return loss and gradient of a PINN whose derivatives are taken around the map."""
    network = wrap(mlp, (BY_WIDTH, P()), P(), parallel_mlp)

    def loss(p: Params) -> Tensor:
        u = lambda points: network(p, points)[:, 0]  # noqa: E731
        t, x = torch.eye(2, dtype=POINTS.dtype).unsqueeze(1).expand(2, *POINTS.shape)
        value, u_t = jvp(u, (POINTS,), (t,))
        along_x = lambda q: jvp(u, (q,), (x,))[1]  # noqa: E731
        u_x, u_xx = jvp(along_x, (POINTS,), (x,))
        return (u_t + value * u_x - 0.1 * u_xx).square().mean()

    return grad_and_value(loss)(params(inputs=2, outputs=1))


def newton_steps(wrap: Wrap) -> Any:
    """Return parameters after two steps of Newton's method on a sharded batch (JAX's cookbook)."""

    def total(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-y * (x @ w)).sum() + w.square().sum()

    def body(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        data = torch.nn.functional.softplus(-y * (x @ varying(w))).sum()
        return fs.psum(data, "x") + w.square().sum()

    loss = wrap(total, (P(), P("x"), P("x")), P(), body)
    w, x, y = normal(3, seed=14), BATCH, LABELS[:, 0].sign()
    for _ in range(2):
        g, h = grad(loss)(w, x, y), jacfwd(grad(loss))(w, x, y)
        w = w - torch.linalg.solve(h, g)
    return w


def module_by_functional_call(wrap: Wrap) -> Any:
    """Return gradients of an ensemble of modules, stacked as in PyTorch's tutorial."""
    nets = []
    for seed in range(3):
        torch.manual_seed(seed)
        nets.append(
            torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
        )
    stacked, _ = torch.func.stack_module_state([net.double() for net in nets])
    p = {k: v.detach() for k, v in stacked.items()}

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return (functional_call(nets[0], p, (x,)) - y).square().sum()

    def body(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return fs.psum(loss(varying(p), x, y), "x")

    specs = ({k: P() for k in p}, P("x"), P("x"))
    wrapped = wrap(loss, specs, P(), body)
    return vmap(grad_and_value(wrapped), (0, None, None))(p, BATCH, LABELS)


PROGRAMS: dict[str, Callable[[Wrap], Any]] = {
    fn.__name__: fn
    for fn in (
        per_sample_gradients,
        per_sample_gradients_of_a_parallel_network,
        maml,
        maml_within,
        hessian_vector_products,
        pinn_inside,
        pinn_outside,
        newton_steps,
        module_by_functional_call,
    )
}
