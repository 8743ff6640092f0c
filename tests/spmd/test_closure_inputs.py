"""Closures of a mapped function are differentiated as arguments with `P()`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spec_grid import random_global

MESH = Mesh(x=2, y=3)
F64 = torch.float64
GLOBAL: list[torch.Tensor] = []


def reals(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed) / 4


def layer(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the result of the bodies below for one rank's rows."""
    w = fs.pcast(w, ("x", "y"), to="varying") if isinstance(w, torch.Tensor) else w
    return torch.tanh(v @ w) * fs.axis_size("x")


def rows(fn: Callable[..., Any]) -> Any:
    p = P(("x", "y"))
    return fs.shard_map(fn, mesh=MESH, in_specs=p, out_specs=p, check=False)


def closed(w: torch.Tensor) -> Any:
    return rows(lambda v: layer(v, w))


def in_a_container(w: torch.Tensor) -> Any:
    stored = {"deep": [(w,)]}
    return rows(lambda v: layer(v, stored["deep"][0][0]))


def in_a_default(w: torch.Tensor) -> Any:
    def body(v: torch.Tensor, *, w: torch.Tensor = w) -> torch.Tensor:
        return layer(v, w)

    return rows(body)


def in_a_partial(w: torch.Tensor) -> Any:
    return rows(functools.partial(layer, w=w))


def in_a_global(w: torch.Tensor) -> Any:
    GLOBAL[:] = [w]
    return rows(lambda v: layer(v, GLOBAL[0]))


def in_an_inner_function(w: torch.Tensor) -> Any:
    def helper(v: torch.Tensor) -> torch.Tensor:
        return layer(v, w)

    def wrapped(v: torch.Tensor) -> torch.Tensor:
        return helper(v)

    return rows(wrapped)


class Holder:
    """Object with a method to map, which is also callable."""

    def __init__(self, w: torch.Tensor) -> None:
        self.w = w

    def method(self, v: torch.Tensor) -> torch.Tensor:
        return layer(v, self.w)

    def __call__(self, v: torch.Tensor) -> torch.Tensor:
        return layer(v, self.w)


def in_a_bound_self(w: torch.Tensor) -> Any:
    return rows(Holder(w).method)


def in_a_callable(w: torch.Tensor) -> Any:
    return rows(Holder(w))


def unseen(w: torch.Tensor) -> Any:
    """Close over an opaque object: its tensor is found by its leaves."""
    holder = Holder(w)
    return rows(lambda v: layer(v, holder.w))


def behind_an_argument(w: torch.Tensor) -> Any:
    """Close over the argument itself, which differs from the rank's own copy."""

    def call(v: torch.Tensor) -> Any:
        return fs.shard_map(
            lambda a, b: layer(a, w) + 0 * b, mesh=MESH, in_specs=(P(("x", "y")), P()),
            out_specs=P(("x", "y")),
        )(v, w.sum())  # fmt: skip

    return call


def checkpointed(w: torch.Tensor) -> Any:
    return rows(lambda v: checkpoint(lambda u: layer(u, w), v, use_reentrant=False))


WAYS = [
    closed, in_a_container, in_a_default, in_a_partial, in_a_global, in_an_inner_function,
    in_a_bound_self, in_a_callable, unseen, behind_an_argument, checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("history", [False, True], ids=["leaf", "computed"])
@pytest.mark.parametrize("way", WAYS, ids=lambda item: item.__name__)
def test_gradients_are_those_of_one_device(way: Any, history: bool) -> None:
    x, leaf = reals(6, 4).requires_grad_(), reals(4, 3, seed=1).requires_grad_()
    results = []
    for mapped in (False, True):
        w = leaf.exp() if history else leaf
        out = way(w)(x) if mapped else torch.tanh(x @ w) * 2
        loss = (out**2).sum() + (w.sum() if history else 0)
        first = torch.autograd.grad(loss, (x, leaf), create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in first), (x, leaf))
        results.append((out, first, second))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("way", [closed, unseen])
def test_gradients_of_closure_and_its_source_count_once(way: Any) -> None:
    """A closure and the tensor that it was computed from each have their gradient once."""
    x, leaf = reals(6, 4), reals(4, 3, seed=1).requires_grad_()

    def both(w: torch.Tensor) -> Any:
        first = way(w)

        def call(v: torch.Tensor) -> Any:
            return rows(lambda u: layer(u, w) * fs.pcast(leaf, ("x", "y"), to="varying").sum())(v)

        return call if way is closed else lambda v: first(v) * leaf.sum()

    results = []
    for mapped in (False, True):
        w = leaf.exp()
        out = both(w)(x) if mapped else torch.tanh(x @ w) * 2 * leaf.sum()
        first = torch.autograd.grad((out**2).sum(), leaf, create_graph=True)
        second = torch.autograd.grad((first[0] ** 2).sum(), leaf)
        results.append((out, first, second))
    torch.testing.assert_close(results[1], results[0])


def test_closure_gradients_equal_those_of_unsharded_arguments() -> None:
    x, w = reals(6, 4), reals(4, 3, seed=1).requires_grad_()
    by_argument = fs.shard_map(
        layer, mesh=MESH, in_specs=(P(("x", "y")), P()), out_specs=P(("x", "y")), check=False
    )
    expected = torch.autograd.grad(by_argument(x, w).sum(), w)
    torch.testing.assert_close(torch.autograd.grad(closed(w)(x).sum(), w), expected)


@pytest.mark.parametrize("user", [0, 3])
def test_unchecked_gradients_that_differ_between_ranks_are_refused(user: int) -> None:
    x, w = reals(6), torch.tensor(2.0, dtype=F64, requires_grad=True)

    def body(v: torch.Tensor) -> torch.Tensor:
        return v * w if fs.axis_index(("x", "y")) == user else v

    with pytest.raises(ShardingError, match="closure: gradients that differ on ranks 0 and"):
        torch.autograd.grad(rows(body)(x).sum(), w)


def test_closed_over_modules_get_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = reals(4, 4).requires_grad_()
    expected = torch.autograd.grad((net(x) ** 2).sum(), [x, *net.parameters()])

    @fs.shard_map(mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    def around(v: torch.Tensor) -> torch.Tensor:
        params = {name: fs.pcast(item, "x", to="varying") for name, item in net.named_parameters()}
        return torch.func.functional_call(net, params, (v,))  # type: ignore[no-any-return]

    actual = torch.autograd.grad((around(x) ** 2).sum(), [x, *net.parameters()])
    torch.testing.assert_close(actual, expected)
    # A module as the mapped function, without a cast of its parameters.
    mapped = fs.shard_map(net, mesh=MESH, in_specs=P(), out_specs=P())
    torch.testing.assert_close(mapped(x), net(x))
    actual = torch.autograd.grad((mapped(x) ** 2).sum(), [x, *net.parameters()])
    torch.testing.assert_close(actual, expected)


def test_backward_accumulates_and_retains_graph() -> None:
    net = nn.Linear(3, 2).double()
    mapped = fs.shard_map(net.forward, mesh=MESH, in_specs=P(), out_specs=P())
    x = reals(4, 3)
    net(x).sum().backward()
    expected = [item.grad.clone() for item in net.parameters()]  # type: ignore[union-attr]
    net.zero_grad()
    loss = mapped(x).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([item.grad for item in net.parameters()], [2 * g for g in expected])
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_shared_history_survives_backward() -> None:
    """Ranks run a backward pass through it; the caller can run another one."""
    leaf = reals(4, 3).requires_grad_()
    w = leaf.exp()
    out = unseen(w)(reals(6, 4))
    (out.sum() + (w**2).sum()).backward()
    expected = leaf.detach().requires_grad_()
    e = expected.exp()
    ((torch.tanh(reals(6, 4) @ e) * 2).sum() + (e**2).sum()).backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


def test_tensors_created_in_the_body_are_not_inputs() -> None:
    def body(v: torch.Tensor) -> torch.Tensor:
        leaf = v.detach().requires_grad_()
        (grad,) = torch.autograd.grad((leaf**2).sum(), leaf)
        return grad * v + leaf

    x = reals(6).requires_grad_()
    (grad,) = torch.autograd.grad(rows(body)(x).sum(), x)
    torch.testing.assert_close(grad, 2 * x.detach())


@pytest.mark.parametrize("check", [True, False])
def test_tensors_that_a_body_keeps_are_not_inputs(check: bool) -> None:
    """Attention keeps its weights, and a model its auxiliary losses, in any number of calls."""
    w, kept = reals(4).requires_grad_(), list[torch.Tensor]()

    def body(x: torch.Tensor) -> torch.Tensor:
        hidden = x * fs.pcast(w, "x", to="varying")
        kept.extend((x, hidden))
        return hidden.sin()

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P("x"), check=check)
    x = reals(2, 4, seed=1).requires_grad_()
    expected = torch.autograd.grad((x * w).sin().sum(), (x, w))
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(mapped(x).sum(), (x, w)), expected)
        torch.testing.assert_close(torch.func.grad(lambda x: mapped(x).sum())(x), expected[0])


def test_closures_without_gradients() -> None:
    w = torch.ones(3, requires_grad=True)
    mapped = fs.shard_map(lambda v: v * w, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    with torch.no_grad():
        assert not mapped(torch.ones(2, 3)).requires_grad
    detached = fs.shard_map(lambda v: v * w.detach(), mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    assert not detached(torch.ones(2, 3)).requires_grad


def test_mapped_results_as_closures() -> None:
    """The result of one mapped function is a closure of the next."""
    x, w = reals(6, 4), reals(4, 4, seed=1).requires_grad_()
    squares = fs.shard_map(lambda u: u**2, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    for way in (closed, unseen):
        output = squares(w)
        out = way(output)(x)
        expected = torch.tanh(x @ w**2) * 2
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.sum(), w), torch.autograd.grad(expected.sum(), w)
        )


def test_nested_closures() -> None:
    """An inner body closes over values of the outer one and of the caller."""
    x, w = reals(6, 4).requires_grad_(), reals(4, 3, seed=1).requires_grad_()

    def outer(v: torch.Tensor) -> torch.Tensor:
        u = v.sin()

        def inner(part: torch.Tensor) -> torch.Tensor:
            item = fs.pcast(u, "y", to="varying")
            return (item @ fs.pcast(w, ("x", "y"), to="varying"))[:, :1] + part

        p = P(None, "y")
        return fs.shard_map(inner, in_specs=p, out_specs=p)(v[:, :3])  # type: ignore[no-any-return]

    mapped = fs.shard_map(outer, mesh=MESH, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"))
    expected = (x.sin() @ w)[:, :1] + x[:, :3]
    torch.testing.assert_close(mapped(x), expected)
    actual = torch.autograd.grad((mapped(x) ** 2).sum(), (x, w))
    torch.testing.assert_close(actual, torch.autograd.grad((expected**2).sum(), (x, w)))


@pytest.mark.parametrize("check", [True, "values", False])
def test_hooks_of_closures_see_the_summed_gradient_once(check: Any) -> None:
    seen: list[Any] = []

    def hooked(name: str, item: torch.Tensor) -> torch.Tensor:
        item.register_hook(lambda g: seen.append((name, g.tolist())) or g * 0.5)
        return item

    leaf, root = (torch.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
    w = hooked("w", root * 3)
    hooked("leaf", leaf)
    w.retain_grad()

    def body(x: torch.Tensor) -> torch.Tensor:
        local, other = fs.pcast((w, leaf), "x", to="varying")
        return fs.psum((x * local * local * other).sum(), "x")

    mapped = fs.shard_map(body, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P(), check=check)
    loss = mapped(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    for create_graph in (False, True):
        seen.clear()
        w.grad = None
        results = torch.autograd.grad(
            loss, (root, leaf), retain_graph=True, create_graph=create_graph
        )
        # Gradient 2 a w of the leaf w, where a = [4, 6] are the sums of columns.
        assert sorted(seen) == [("leaf", [36.0, 216.0]), ("w", [24.0, 144.0])]
        retained = w.grad
        assert retained is not None
        assert retained.tolist() == [12.0, 72.0]
        assert [item.tolist() for item in results] == [[36.0, 216.0], [18.0, 108.0]]


@pytest.mark.parametrize("check", [True, False])
def test_parameters_that_ranks_create_have_the_gradients_of_their_rank(check: bool) -> None:
    grads: list[Any] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        weight = nn.Parameter(3 * x.detach())
        weight.register_post_accumulate_grad_hook(lambda w: grads.append(w.grad))
        return weight * x

    f = fs.shard_map(body, mesh=Mesh(x=2), in_specs=P("x"), out_specs=P("x"), check=check)
    x = torch.arange(1.0, 5).requires_grad_()
    f(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 6, 9, 12]
    assert sorted(grad.tolist() for grad in grads) == [[1, 2], [3, 4]]
