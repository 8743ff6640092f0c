"""Gradients and transforms that a partitioned function takes itself: whole training steps.

The oracle is the same function on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P
from tests.ops import blocks
from tests.ops.test_partition import BLOCKS, BYTES, MESH, sample, sent

Params = blocks.Params


def loss(p: Params, x: Tensor) -> Tensor:
    return ((x @ p["a"]).relu() @ p["b"]).square().mean()


def functional(p: Params, x: Tensor) -> Any:
    """A step that returns the new parameters."""
    grads, value = torch.func.grad_and_value(loss)(p, x)
    return {name: p[name] - 0.1 * grads[name] for name in p}, value


def in_place(p: Params, x: Tensor) -> Any:
    """A step that writes the parameters."""
    value = loss(p, x)
    grads = torch.autograd.grad(value, list(p.values()))
    with torch.no_grad():
        for each, g in zip(p.values(), grads, strict=True):
            each.sub_(0.1 * g)
    return value.detach()


def by_backward(p: Params, x: Tensor) -> Any:
    q = {name: each.detach().requires_grad_() for name, each in p.items()}
    loss(q, x).backward()
    return [each.grad for each in q.values()]


def per_sample(p: Params, x: Tensor) -> Any:
    grads = torch.vmap(torch.func.grad(loss), (None, 0))(p, x[:, None])
    return {name: each.square().sum((1, 2)) for name, each in grads.items()}


def curvature(p: Params, x: Tensor) -> Any:
    _, product = torch.func.jvp(torch.func.grad(lambda x: loss(p, x)), (x,), (torch.ones_like(x),))
    return product


def hessian(p: Params, x: Tensor) -> Any:
    return torch.func.hessian(lambda b: loss({**p, "b": b}, x[:1]))(p["b"])


def recomputed(p: Params, x: Tensor) -> Any:
    def inner(a: Tensor) -> Tensor:
        h: Tensor = checkpoint(lambda a: (x @ a).tanh(), a, use_reentrant=False)
        return h.sum()

    a = p["a"].detach().requires_grad_()
    return torch.autograd.grad(inner(a), a)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


def custom(p: Params, x: Tensor) -> Any:
    y = x.detach().requires_grad_()
    return torch.autograd.grad(Straight.apply(y @ p["a"]).square().sum(), y)[0]


STEPS = [
    functional, in_place, by_backward, per_sample, curvature, hessian, recomputed, custom,
]  # fmt: skip
LAYOUTS = [
    ({"a": P(None, "tp"), "b": P("tp")}, P("dp")),
    ({"a": P("dp"), "b": P("dp")}, P("dp")),
    ({"a": P(), "b": P("tp", "dp")}, P(None, "tp")),
]


def made() -> Params:
    torch.manual_seed(0)
    return {"a": sample(4, 8).detach(), "b": sample(8, 4).detach()}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")  # PyTorch's own, of jvp
@pytest.mark.parametrize("fn", STEPS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "fsdp", "mixed"])
def test_gradients_within_are_those_of_one_device(fn: Callable[..., Any], layout: Any) -> None:
    params, specs = layout
    p, q = made(), made()
    if fn is in_place:
        p, q = ({k: v.requires_grad_() for k, v in each.items()} for each in (p, q))
    x = sample(4, 4).detach()
    part = fs.partition(fn, mesh=MESH, params=params, in_specs=(specs,))
    torch.testing.assert_close(part(p, x), fn(q, x))
    torch.testing.assert_close(p, q)


# -- gradients of gradients, and of what is not tracked ---------------------------------------


def penalty(p: Params, x: Tensor) -> Tensor:
    """The gradient's norm: WGAN-GP's, or the residual of a differential equation."""
    if not x.requires_grad:
        x = x.detach().requires_grad_()
    value = (x @ p["a"]).sin() @ p["b"]
    (g,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return g.square().sum() + value.mean()


def untracked(p: Params, x: Tensor) -> Tensor:
    """A gradient without a graph, and values under no_grad: constants to what comes after."""
    value = ((x @ p["a"]).sin() @ p["b"]).sum()
    (g,) = torch.autograd.grad(value, p["a"], retain_graph=True)
    with torch.no_grad():
        scale = (x @ p["a"]).amax() + 1
    return value * g.sum() / scale


def meta_learning(p: Params, x: Tensor) -> Tensor:
    grads = torch.func.grad(loss)(p, x)
    return loss({name: p[name] - 0.1 * grads[name] for name in p}, x)


def mapped(p: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        shift = x.mean()
    return torch.vmap(lambda row: (row @ p["a"]).softmax(0) @ p["b"] - shift)(x)


@pytest.mark.parametrize(
    "fn", [penalty, untracked, meta_learning, mapped], ids=lambda fn: fn.__name__
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=["tensor", "fsdp", "mixed"])
def test_they_are_differentiated_again(fn: Callable[..., Tensor], layout: Any) -> None:
    params, specs = layout
    p = {name: each.requires_grad_() for name, each in made().items()}
    x = sample(4, 4)
    part = fs.partition(fn, mesh=MESH, params=params, in_specs=(specs,))
    one, other = part(p, x), fn(p, x)
    torch.testing.assert_close(one, other)
    leaves = [*p.values(), x]
    for g, right in zip(*(torch.autograd.grad(y.sum(), leaves) for y in (one, other)), strict=True):
        torch.testing.assert_close(g, right)


# -- training steps of whole blocks ---------------------------------------------------------


def step_of(fn: Callable[[Params, Tensor], Tensor]) -> Callable[..., Any]:
    def step(p: Params, x: Tensor) -> Any:
        grads, value = torch.func.grad_and_value(lambda p: fn(p, x).sin().sum())(p)
        return {name: p[name] - 0.1 * grads[name] for name in p}, value

    return step


@pytest.mark.parametrize(("name", "pairs"), [("gpt", 2), ("llama", 2), ("vit", 2), ("resnet", 1)])
def test_training_steps_use_megatrons_collectives(name: str, pairs: int) -> None:
    fn, params, asked, shape = BLOCKS[name]
    p = {key: each.detach() for key, each in params().items()}
    specs = {key: asked.get(key, P()) for key in p}
    step = step_of(fn)
    part = fs.partition(step, mesh=MESH, params=specs, in_specs=(P("dp"),),
                        out_specs=(specs, P()))  # fmt: skip
    x = sample(*shape).detach()
    torch.testing.assert_close(part(p, x), step(p, x), rtol=1e-10, atol=1e-11)
    forward, _ = sent(part.trace(p, x))
    # The first convolution's input needs no gradient; norms before a layer have parameters.
    inner = 2 * pairs - (name == "resnet")
    assert forward == {("AllReduce", ("tp",)): inner, ("AllReduce", ("dp",)): len(p) + 1}


@pytest.mark.parametrize(("name", "twice"), [("gpt", 6), ("llama", 7), ("vit", 4), ("resnet", 2)])
def test_training_steps_use_fsdps_collectives(name: str, twice: int) -> None:
    fn, params, _, shape = BLOCKS[name]
    p, mesh = {key: each.detach() for key, each in params().items()}, Mesh(dp=2)
    step = step_of(fn)
    specs = {key: P("dp") for key in p}
    part = fs.partition(step, mesh=mesh, params=specs, in_specs=(P("dp"),),
                        out_specs=(specs, P()), cost=BYTES)  # fmt: skip
    x = sample(64, *shape[1:]).detach()
    torch.testing.assert_close(part(p, x), step(p, x), rtol=1e-10, atol=1e-11)
    forward, _ = sent(part.trace(p, x))
    # A weight that the backward pass needs is gathered for it again, as FSDP2 does.
    assert forward == {
        ("AllGather", ("dp",)): len(p) + twice, ("ReduceScatter", ("dp",)): len(p),
        ("AllReduce", ("dp",)): 1,
    }  # fmt: skip


# -- what is refused ------------------------------------------------------------------------


def test_custom_functions_are_refused_where_their_gradient_is_asked_for() -> None:
    part = fs.partition(lambda x: Straight.apply(x).sum(), mesh=MESH, in_specs=P("dp"))
    x = sample(4, 4)
    with pytest.raises(fs.ShardingError) as caught:
        part(x)
    assert str(caught.value) == (
        "fs.partition(<lambda>)\n"
        "  given: Straight.apply, with gradients\n"
        "  rule:  a function is traced as what it computes, and the gradient is that of what was "
        "traced: the backward of a custom function would be left out\n"
        "  fix:   write y + (f(x) - y).detach() for a straight-through gradient, take gradients "
        "within the function, or make it an operation: torch.library.custom_op, "
        "register_autograd and fs.register_rule"
    )
    torch.testing.assert_close(part(x.detach()), x.detach().round().sum())
    assert Straight.apply(x).sum().requires_grad

    straight = fs.partition(lambda x: (3 * x + (x.round() - 3 * x).detach()).sum(), mesh=MESH,
                            in_specs=P("dp"))  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(straight(x), x)[0], torch.full_like(x, 3))
