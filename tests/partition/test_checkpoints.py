"""`torch.utils.checkpoint` in and around mapped functions, partitioned functions and programs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd.checkpoint_cases import (
    OPTIONS,
    differentiated,
    functions,
    layer,
    results,
)

MESH = Mesh(x=2, y=2)
ROWS = ("x", "y")
EXPECTED = differentiated(lambda x, w, v: layer(layer(x, w, v), w, v))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", ["single", "nested", "sequence"])
def test_checkpoints_equal_one_device(name: str, form: str) -> None:
    for key, values in results(MESH, name, form).items():
        torch.testing.assert_close(
            values, EXPECTED, rtol=0, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}"
        )


class CountProducts(TorchDispatchMode):
    """Counter of matrix products that run in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


PLACES = (
    "in a body, check=False", "in a body, check=True", "around a body, check=False",
    "around a body, check=True", "in a partition", "around a partition",
)  # fmt: skip


def products_of_backward(fn: Any) -> int:
    args = [torch.ones(s, dtype=torch.float64).requires_grad_() for s in [(4, 6), (6, 8), (8, 6)]]
    out = fn(*args).sum()
    with CountProducts() as products:
        out.backward()
    return products.count


@pytest.mark.parametrize("place", PLACES)
def test_selective_policies_decide_what_runs_again(place: str) -> None:
    """A gradient takes two products for each; the policy keeps those of the forward pass."""
    counts = {
        name: products_of_backward(functions(MESH, OPTIONS[name], "single")[place])
        for name in ("plain", "policy")
    }
    gradients = 2 * 4 * MESH.size  # four products on each rank
    assert counts["policy"] == gradients
    at_least = gradients + 2 * MESH.size  # stops early
    assert at_least <= counts["plain"] <= gradients + 4 * MESH.size


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_dropout_has_the_same_mask(reentrant: bool) -> None:
    """The zeros of the gradient are those of the result: the generator's state is restored."""

    def body(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=reentrant)
        return y

    f = fs.shard_map(body, mesh=MESH, in_specs=P(ROWS), out_specs=P(ROWS), check=False)
    x = torch.rand(8, 8, dtype=torch.float64).requires_grad_()
    y = f(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert 0 < (y == 0).sum() < y.numel()
    torch.testing.assert_close(grad * x, 2 * y)


def test_suppressed_errors_of_a_checkpoint_have_the_message_of_pytorch() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(
            lambda x: x.reshape(-7), x, use_reentrant=False,
            context_fn=lambda: (suppress(RuntimeError), nullcontext()),
        )  # fmt: skip
        return y

    f = fs.shard_map(body, mesh=MESH, in_specs=P(ROWS), out_specs=P(ROWS), check=False)
    with pytest.raises(RuntimeError, match="context_fn suppressed an exception"):
        f(torch.ones(8, requires_grad=True))


# -- checkpointed calls in partitioned functions ---------------------------------------------

KEY = fs.random.key(3)
W = random_global((4, 4), torch.float64, 5).div(4).requires_grad_()
MAPPED = fs.shard_map(
    lambda x, w: fs.psum(torch.tanh(x @ w), "y"),
    mesh=MESH, in_specs=(P("x", "y"), P("y")), out_specs=P("x"),
)  # fmt: skip


class Cube(torch.autograd.Function):
    """Cube with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        cube: torch.Tensor = 3 * g * x**2
        return cube


def again(fn: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(fn, *args, use_reentrant=False)


def keyed_dropout(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with fs.random.keyed(KEY):
        y = again(lambda x: F.dropout(torch.tanh(x @ w), 0.5), F.dropout(x, 0.3))
        return torch.rand(8, 4, dtype=x.dtype) * y


def inner_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    loss = again(lambda x: torch.tanh(x @ w), x).square().sum()
    return torch.autograd.grad(loss, w, create_graph=True)[0] * x.sum()


def grad_mode(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = (x @ w).mean()
        return torch.tanh(x @ w) * scale

    out: torch.Tensor = again(scaled, x)
    return out


def in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def written(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        y.mul_(2)
        y[0] = 1
        return y.tanh()

    out: torch.Tensor = again(written, x)
    return out


def kept_outside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    inside = []

    def run(x: torch.Tensor) -> torch.Tensor:
        inside.append(torch.sin(x))
        return torch.tanh(inside[0] @ w)

    out: torch.Tensor = again(run, x) + inside[0]
    return out


def no_result(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    again(lambda x: (x @ w).tanh(), x)
    out: torch.Tensor = again(lambda x: x, x) @ w
    return out


def two_results(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = again(lambda x: ((x @ w).tanh(), {"b": (x * 2).sum(0)}), x)
    out: torch.Tensor = a + b["b"]
    return out


def required_gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Require the gradient of a layer's input, as transformers does where it checkpoints layers."""
    y = (x @ w).requires_grad_(True)
    out: torch.Tensor = again(lambda y: torch.tanh(y @ w), y)
    return out


CALLS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    keyed_dropout, inner_gradient, grad_mode, in_place, kept_outside, no_result, two_results,
    required_gradient,
    lambda x, w: again(lambda x: torch.tanh(x @ W) @ w, x) @ W,
    lambda x, w: again(lambda x: Cube.apply(x @ w).sin(), x),
    lambda x, w: again(lambda x: MAPPED(x.sin(), w).cos(), x),
    lambda x, w: again(lambda x: F.layer_norm(F.softmax(x @ w, -1), (4,)), x),
    lambda x, w: again(lambda x: fs.constrain(torch.tanh(x @ w), P("y", "x")), x) @ w,
    lambda x, w: again(lambda x, scale: torch.tanh(x @ w) * scale, x, 3.5),
]  # fmt: skip


def both_orders(f: Any) -> list[torch.Tensor]:
    """Return a result, its gradients, and those of their squares."""
    x, w = (random_global(s, torch.float64, i).div(4).requires_grad_()
            for i, s in enumerate([(8, 4), (4, 4)]))  # fmt: skip
    y = f(x, w)
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad((y**2).sum(), (x, w, W), create_graph=True, **options)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), (x, w), **options)
    return [item.detach() for item in (y, *first, *second)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fn", CALLS)
@pytest.mark.parametrize(("specs", "remat"), [
    ((P("x"), P("y")), None), ((P(("x", "y")), P("x")), None), ((P(("x", "y")), P("x")), "gathers"),
    ((P("x"), P("y")), "all"),
], ids=str)  # fmt: skip
def test_checkpointed_calls_have_both_orders_of_gradients(fn: Any, specs: Any, remat: Any) -> None:
    part = fs.partition(fn, mesh=MESH, in_specs=specs, remat=remat)
    torch.testing.assert_close(both_orders(part), both_orders(fn), rtol=1e-10, atol=1e-10)


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ p["w"]) @ p["v"]


def test_collectives_of_a_checkpointed_call_run_again() -> None:
    """FSDP with checkpointed layers gathers the parameters of a layer twice, in one launch."""

    def model(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
        for p in params:
            x = again(block, p, x)
        return x.square().mean()

    part = fs.partition(model, mesh=MESH, params=P("x"), in_specs=P("x"))
    params = [
        {"w": fs.shard(torch.ones(16, 64).requires_grad_(), MESH, P("x")),
         "v": fs.shard(torch.ones(64, 16).requires_grad_(), MESH, P("x"))}
        for _ in range(3)
    ]  # fmt: skip
    x = fs.shard(torch.randn(8, 16), MESH, P("x"))
    with fs.comm_log() as log:
        loss = part(params, x)
        torch.autograd.grad(
            sum(loss.local), [x for p in params for y in p.values() for x in y.local]
        )
    plan = part.trace(params, x)
    assert log.forward.counts == {("all_gather", "x"): 3}
    assert log.backward.counts == {("all_gather", "x"): 3, ("reduce_scatter", "x"): 3}
    assert (plan.cost().launches, plan.cost(backward=True).launches) == (3, 6)
