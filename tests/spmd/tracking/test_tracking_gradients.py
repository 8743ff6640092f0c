"""Gradients and optimizers in a body: types of `.grad`, and steps equal to those on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fshard as fs
from fshard import Mesh, P
from fshard.spmd.axis_env import current_axes
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd.tracked_bodies import I, V, run_body

MESH = Mesh(x=2)
F64 = torch.float64
Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=False),
    "adam_foreach": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=True),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


def train(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, make: Make, to_none: bool, total: Any
) -> list[torch.Tensor]:
    """Take three steps with a small model; `total` sums a loss over all rows."""
    params: list[torch.Tensor] = [nn.Parameter(w.clone()), nn.Parameter(b.clone())]
    optimizer = make(params)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        total(F.linear(x, *params).tanh().square().sum()).backward()
        nn.utils.clip_grad_norm_(params, 0.5, foreach=True)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps_match_one_device(name: str, to_none: bool) -> None:
    args = [random_global(shape, F64, i) / 4 for i, shape in enumerate([(4, 3), (2, 3), (2,)])]
    make = OPTIMIZERS[name]

    def body(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
        output = train(x, w, b, make, to_none, lambda loss: fs.psum(loss, "x"))
        assert [str(fs.typeof(p).states) for p in output] == [I, I]
        return output

    f = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P(), P()), out_specs=P())
    x, w, b = args
    want = train(x, w, b, make, to_none, lambda loss: loss)
    for got, one in zip(f(*args), want, strict=True):
        torch.testing.assert_close(got, one)


def leaf(*grads: torch.Tensor) -> torch.Tensor:
    """Return a parameter with a gradient that was set, and one that backward added."""
    p = nn.Parameter(torch.ones(2))
    for item in grads[:1]:
        p.grad = item.clone()
    if len(grads) != 1:
        p.sum().backward()
    return p


@pytest.mark.parametrize(
    ("states", "grad"),
    [
        (I, lambda r: leaf().grad),
        (V, lambda r: leaf(r).grad),
        (V, lambda r: leaf(r, r).grad),
        (I, lambda r: leaf(torch.ones(2), r).grad),
        (V, lambda r: leaf().grad.mul_(1 * r)),  # type: ignore[union-attr]
        (V, lambda r: _stepped(leaf(r))),
        (I, lambda r: _stepped(leaf())),
    ],
)
def test_grad_of_leaves_has_the_states_of_its_terms(states: str, grad: Any) -> None:
    assert [result for result, *_ in run_body(lambda x, w: grad(x.detach()[0]))] == [states] * 2


def _stepped(p: torch.Tensor) -> torch.Tensor:
    torch.optim.SGD([p], lr=0.1).step()
    return p


class _Kernel(torch.autograd.Function):
    """Writes its result outside of PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        with torch._C.DisableTorchFunction():
            out.copy_(x)
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g


def test_results_that_a_kernel_writes_are_as_its_operands() -> None:
    body: Any = lambda x, w: _Kernel.apply(x)  # type: ignore[no-untyped-call]  # noqa: E731
    assert [result for result, *_ in run_body(body)] == [V, V]


def test_a_gradient_that_does_not_add_up_is_refused() -> None:
    def body(x: torch.Tensor) -> None:
        p = nn.Parameter(torch.ones(2))
        p.grad = fs.pcast(x[0].clone(), "x", to="unreduced")
        p.sum().backward()

    f = fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=None)
    with pytest.raises(fs.ShardingError, match=r"a gradient of a tensor whose \.grad is f32\[2\]"):
        f(torch.ones(2, 2))


# -- torch.func ----------------------------------------------------------------------------------

VMAP, INNER = torch.vmap, torch.func.grad


@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: VMAP(lambda a: x[0] * a)(w),
        lambda x, w: VMAP(lambda a: VMAP(lambda b: x[0] * a * b)(w))(w),
        lambda x, w: VMAP(lambda r: r * w)(x),
        lambda x, w: VMAP(lambda a, b: a * b)(x[0], w)[None],
        # A cast within a transform is not reused after it.
        lambda x, w: VMAP(lambda a: a * (w * x))(torch.ones(2))[0] + w * x,
        lambda x, w: INNER(lambda p: (p * (w * x)).sum())(fs_varying(torch.ones(2))) + w * x,
    ],
)
def test_casts_in_transforms_have_their_gradients(body: Any) -> None:
    """Compare with the gradient on one device of the concatenated results."""
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    w = torch.tensor([7.0, 8.0], requires_grad=True)
    f = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"))
    y, want = f(x, w), torch.cat([body(row[None], w) for row in x])
    assert torch.equal(y, want)
    (got,), (one,) = (torch.autograd.grad(item.square().sum(), w) for item in (y, want))
    torch.testing.assert_close(got, one)


def fs_varying(x: torch.Tensor) -> torch.Tensor:
    """Cast to varying in a mapped function; return `x` elsewhere."""
    return x if current_axes() is None else fs.pcast(x, "x", to="varying")


def test_strict_requires_casts_in_transforms() -> None:
    def call(body: Any) -> None:
        f = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"), check="strict")
        f(torch.ones(2, 2), torch.ones(2, requires_grad=True))

    call(lambda x, w: VMAP(lambda a: x[0] * a)(w.detach()))
    call(lambda x, w: VMAP(lambda a: x[0] * a)(fs.pcast(w, "x", to="varying")))
    with pytest.raises(fs.ShardingError, match=r"an operand .* that requires grad"):
        call(lambda x, w: VMAP(lambda a: x[0] * a)(w))


def test_seeds_are_checked_against_their_outputs() -> None:
    """A None, which stands for ones, keeps its place among the seeds."""

    def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a = x.detach().clone().requires_grad_()
        return a, fs.psum(a.sum(), "x"), (a * a).sum()

    def right(x: torch.Tensor) -> Any:
        a, full, local = sums(x)
        return torch.autograd.grad([full, local], a, [None, x.sum()])[0]

    def wrong(x: torch.Tensor) -> Any:
        a, full, local = sums(x)
        return torch.autograd.grad([local, full], a, [None, x.sum()])[0]

    def wrong_backward(x: torch.Tensor) -> None:
        _, full, local = sums(x)
        torch.autograd.backward([local, full], [None, x.sum()])

    x = torch.arange(4.0)
    got = fs.shard_map(right, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(x)
    assert torch.equal(got, 1 + 2 * x * torch.tensor([1.0, 1.0, 5.0, 5.0]))
    for body in (wrong, wrong_backward):
        with pytest.raises(fs.ShardingError, match="that is invariant along x must be"):
            fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=None)(x)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_tensor_may_be_gradients_of_two_types(order: tuple[int, int]) -> None:
    def body(r: torch.Tensor, v: torch.Tensor) -> None:
        value = [item.detach().requires_grad_() for item in (r, v)]
        inputs = [value[index] for index in order]
        for x, g in zip(inputs, torch.autograd.grad(sum(value).sum(), inputs), strict=True):  # type: ignore[union-attr]
            assert fs.typeof(g).states is fs.typeof(x).states.dual

    specs = (P(reduced={"x"}), P("x"))
    fs.shard_map(body, mesh=MESH, in_specs=specs, out_specs=None)(torch.ones(2), torch.ones(4))
