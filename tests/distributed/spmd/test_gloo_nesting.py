"""Nesting, closures and boundaries of mapped functions on gloo, compared with a simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from tests.helpers.gloo.harness import outcomes, run_ranks
from tests.helpers.spec_grid import random_global

MESHES = [
    Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1)),
    Mesh({"x": 1, "y": 3}, devices=(1, 3, 0)),
]
TWO = MESHES[0]
F64 = torch.float64


def reals(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_global(shape, F64, seed) / 4


def both_orders(f: Any, *args: torch.Tensor) -> list[torch.Tensor]:
    """Return the result, its gradients and the gradients of their squares."""
    out = f(*args)
    first = torch.autograd.grad((out**2).sum(), args, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), args)
    return [item.detach() for item in (out, *first, *second)]


# -- what is mapped ----------------------------------------------------------------------


def nested(mesh: Mesh) -> Callable[..., Any]:
    def outer(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        w, v = (fs.pcast(item, "x", to="varying") for item in (w, v))

        @fs.shard_map(in_specs=(P(), P(None, "y"), P("y")), out_specs=P())
        def inner(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            a = fs.pcast(a, "y", to="varying")
            return fs.psum(torch.tanh(a @ w) @ v, "y")

        return torch.tanh(inner(a, w, v))

    return fs.shard_map(  # type: ignore[no-any-return]
        outer, mesh=mesh, axis_names={"x"}, in_specs=(P("x"), P(), P()), out_specs=P("x"),
        check=False,
    )  # fmt: skip


def smapped(mesh: Mesh) -> Callable[..., Any]:
    def row(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = fs.pcast(w, "x", to="varying")

        def column(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            total = fs.psum(a.sum(), "x")
            return (fs.pcast(a, "y", to="varying") @ w).tanh() * fs.pcast(
                total, ("x", "y"), to="varying"
            )

        inner = fs.smap(column, axis_name="y", in_axes=(None, -1), out_axes=-1, check=False)
        return inner(a, w)  # type: ignore[no-any-return]

    return fs.smap(  # type: ignore[no-any-return]
        row, mesh=mesh, axis_name="x", in_axes=(0, None), out_axes=0, check=False
    )


def checkpointed(mesh: Mesh) -> Callable[..., Any]:
    def block(v: torch.Tensor) -> torch.Tensor:
        return v * fs.pcast(fs.psum(v.sin(), ("x", "y")), ("x", "y"), to="varying")

    def inner(v: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, v, use_reentrant=False)  # type: ignore[no-any-return]

    def outer(v: torch.Tensor) -> torch.Tensor:
        again = checkpoint(lambda u: u * fs.axis_size("x"), v.cos(), use_reentrant=False)
        mapped = fs.shard_map(inner, in_specs=P("y"), out_specs=P("y"), check=False)
        return mapped(again)  # type: ignore[no-any-return]

    return fs.shard_map(  # type: ignore[no-any-return]
        outer, mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"), check=False
    )


def states(mesh: Mesh, p: Any) -> Callable[..., Any]:
    return fs.shard_map(lambda v: 3 * v, mesh=mesh, in_specs=p, out_specs=p, check=False)  # type: ignore[no-any-return]


def inner_gradient(mesh: Mesh) -> Callable[..., Any]:
    def cube(w: torch.Tensor) -> torch.Tensor:
        return fs.psum((w**3).sum(), "y")

    def outer(v: torch.Tensor) -> torch.Tensor:
        leaf = v.detach().requires_grad_()
        loss = fs.shard_map(cube, in_specs=P("y"), out_specs=P(), check=False)(leaf)
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)[0] * v

    return fs.shard_map(  # type: ignore[no-any-return]
        outer, mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"), check=False
    )


def pairs_in_bodies(mesh: Mesh) -> Callable[..., Any]:
    def outer(v: torch.Tensor) -> torch.Tensor:
        part = mesh.submesh("y", x=int(fs.axis_index("x")))
        total = fs.local_map(lambda u: fs.psum(u, ("x", "y")), in_specs=P("y"), out_specs=P())
        one = fs.unshard(total(fs.shard(v, Spec(part, P("y"), shape=v.shape, dtype=F64))))
        mapped = fs.shard_map(lambda u: u.cos(), in_specs=P("y"), out_specs=P("y"), check=False)
        pair = mapped(fs.shard(v, Spec(part, P("y"), shape=v.shape, dtype=F64)))
        assert pair.spec.mesh == part
        return fs.pcast(one.sum(), "x", to="varying") * fs.unshard(pair)

    return fs.shard_map(  # type: ignore[no-any-return]
        outer, mesh=mesh, axis_names={"x"}, in_specs=P("x"), out_specs=P("x"), check=False
    )


def closures(mesh: Mesh) -> Callable[..., Any]:
    """Close over an argument, a tensor computed from it, and a module."""
    net = nn.Linear(6, 6).double()
    with torch.no_grad():
        for index, item in enumerate(net.parameters()):
            item.copy_(reals(*item.shape, seed=index))

    def call(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        history = w.exp()

        @fs.shard_map(mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check=False)
        def body(v: torch.Tensor) -> torch.Tensor:
            item = (fs.pcast(t, ("x", "y"), to="varying") for t in (w, history))
            first, second = item
            with torch.no_grad():
                scale = net(v).sum() * 0 + 1
            return torch.tanh(v @ first) @ second * scale

        return body(v)  # type: ignore[no-any-return]

    return call


def on_one_device(x: torch.Tensor, w: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Return the results of the functions above without a mesh."""
    states = {f"state {index}": both_orders(lambda x: 3 * x, x) for index in range(len(STATES))}
    return states | {
        "nested": both_orders(lambda a, w, v: torch.tanh(torch.tanh(a @ w) @ v), x, w, w.T),
        "smapped": both_orders(lambda a, w: (a @ w).tanh() * a.sum(), x, w),
        "closures": both_orders(lambda a, w: torch.tanh(a @ w) @ w.exp(), x, w),
    }


STATES = [
    P(unreduced={"x"}), P("y", unreduced={"x"}), P(unreduced={"x", "y"}), P(reduced={"x"}),
    P("y", reduced={"x"}), P(unreduced={"x": "avg"}),
]  # fmt: skip


def everything(mesh: Mesh) -> dict[str, list[torch.Tensor]]:
    x, w = reals(12, 6).requires_grad_(), reals(6, 6, seed=1).requires_grad_()
    results = {f"state {index}": both_orders(states(mesh, p), x) for index, p in enumerate(STATES)}
    v = x.detach()[:, 0].clone().requires_grad_()
    out = checkpointed(mesh)(v)
    return results | {
        "nested": both_orders(nested(mesh), x, w, w.T),
        "smapped": both_orders(smapped(mesh), x, w),
        "closures": both_orders(closures(mesh), x, w),
        "inner gradient": both_orders(inner_gradient(mesh), x),
        "pairs in bodies": both_orders(pairs_in_bodies(mesh), x),
        "checkpointed": [out.detach(), *torch.autograd.grad((out**2).sum(), v)],
    }


def everything_on_rank(mesh: Mesh) -> dict[str, list[torch.Tensor]]:
    fs.init(mesh)
    if dist.get_rank() not in mesh:
        return {}
    results = everything(mesh)
    with pytest.raises(ShardingError, match="an unbound axis name: 'x'"):
        fs.axis_size("x")
    return results


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gloo_equals_simulation_and_one_device(mesh: Mesh) -> None:
    by_rank = run_ranks(4, everything_on_rank, mesh)
    expected = everything(mesh)
    x, w = reals(12, 6).requires_grad_(), reals(6, 6, seed=1).requires_grad_()
    for name, item in on_one_device(x, w).items():
        torch.testing.assert_close(expected[name], item, msg=lambda text, n=name: f"{n}: {text}")
    for rank in mesh.ranks:
        for name, item in expected.items():
            torch.testing.assert_close(
                by_rank[rank][name], item, msg=lambda text, n=name: f"{n}: {text}"
            )


# -- modules and pairs --------------------------------------------------------------------


def train_module(mesh: Mesh) -> list[torch.Tensor]:
    """Return the gradients of a closed-over module's parameters, of this process."""
    fs.init(mesh)
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        for index, item in enumerate(net.parameters()):
            item.copy_(reals(*item.shape, seed=index))

    @fs.shard_map(mesh=mesh, in_specs=P(("x", "y")), out_specs=P(), check=False)
    def loss(v: torch.Tensor) -> torch.Tensor:
        params = {
            name: fs.pcast(item, ("x", "y"), to="varying") for name, item in net.named_parameters()
        }
        return fs.psum((torch.func.functional_call(net, params, (v,)) ** 2).sum(), ("x", "y"))

    loss(reals(4, 3)).backward()
    return [item.grad for item in net.parameters() if item.grad is not None]


def test_gradients_of_closed_over_modules() -> None:
    net = nn.Linear(3, 2).double()
    with torch.no_grad():
        for index, item in enumerate(net.parameters()):
            item.copy_(reals(*item.shape, seed=index))
    (net(reals(4, 3)) ** 2).sum().backward()
    for row in run_ranks(4, train_module, TWO):
        torch.testing.assert_close(row, [item.grad for item in net.parameters()])


def redistribute_pairs(mesh: Mesh) -> tuple[Any, ...]:
    fs.init(mesh)
    x = reals(6, 4).requires_grad_()
    pair = fs.shard(x, Spec(mesh, P(None, "x"), shape=(6, 4), dtype=F64))
    mapped = fs.shard_map(
        lambda v, n: (v.sin(), n + 1), mesh=mesh, in_specs=(P(("y", "x")), None),
        out_specs=(P(("y", "x")), None), redistribute_inputs=True, check=False,
    )  # fmt: skip
    out, number = mapped(pair, 1)
    full = fs.unshard(out)
    (grad,) = torch.autograd.grad(full.sum(), x)
    return str(out.spec), full.detach(), grad, number


def test_redistribute_inputs_converts_pairs() -> None:
    x = reals(6, 4)
    for text, full, grad, number in run_ranks(4, redistribute_pairs, TWO):
        assert (text, number) == ("f64[6@(y,x):chunk,4]", 2)
        torch.testing.assert_close(full, x.sin())
        torch.testing.assert_close(grad, x.cos())


# -- errors --------------------------------------------------------------------------------


def fail_on_one_rank(mesh: Mesh) -> None:
    fs.init(mesh)

    def inner(v: torch.Tensor) -> torch.Tensor:
        if int(fs.axis_index(("x", "y"))) == 3:
            raise ZeroDivisionError("mine")
        return v

    def outer(v: torch.Tensor) -> torch.Tensor:
        return fs.shard_map(inner, in_specs=P(), out_specs=P(), check=False)(v)  # type: ignore[no-any-return]

    fs.shard_map(outer, mesh=mesh, axis_names={"x"}, in_specs=P(), out_specs=P(), check=False)(
        torch.ones(4)
    )


def test_error_in_the_body_names_its_rank_once() -> None:
    done = outcomes(4, fail_on_one_rank, TWO)
    for item in done:
        if item.rank != TWO.rank(x=1, y=1):
            assert item.error is None
            continue
        assert isinstance(item.error, ZeroDivisionError)
        notes = [line for line in item.traceback.splitlines() if line.startswith("on rank")]
        assert notes == [f"on rank 1 (x=1, y=1) of {TWO}"]


def refuse(what: str) -> None:
    fs.init(TWO)
    x = torch.ones(4, 4)

    def outer(**options: Any) -> Callable[[], Any]:
        inner = {"in_specs": P("y"), "out_specs": P("y")} | options
        return lambda: fs.shard_map(
            fs.shard_map(torch.sin, **inner), mesh=TWO, axis_names={"x"}, in_specs=P("x"),
            out_specs=P("x"),
        )(x)  # fmt: skip

    bodies: dict[str, Callable[[], Any]] = {
        "mesh": outer(mesh=Mesh(y=2)),
        "again": outer(axis_names={"x"}),
        "spec": outer(in_specs=P("x")),
        "none": lambda: fs.shard_map(torch.sin, in_specs=P(), out_specs=P())(x),
        "tensor": lambda: fs.shard_map(torch.sin, mesh=TWO, in_specs=P(), out_specs=None)(x),
        "out": lambda: fs.shard_map(torch.sin, mesh=TWO, in_specs=P(), out_specs=P("q"))(x),
    }
    bodies[what]()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("mesh", "mesh=Mesh(y=2) in a running shard_map over Mesh(x=2, y=2, devices=[2, 0, 3, 1])"),
        ("again", "is mapped already, by the enclosing shard_map"),
        ("spec", "leave 'x' out: each of its ranks maps its own values"),
        ("none", "mesh=None outside of a running shard_map"),
        ("tensor", "with the out spec None"),
        ("out", "out_specs: axis 'q' on Mesh(x=2, y=2, devices=[2, 0, 3, 1])"),
    ],
)
def test_errors_are_raised_on_all_ranks(what: str, text: str) -> None:
    for item in outcomes(4, refuse, what):
        assert isinstance(item.error, ShardingError), item.traceback
        assert text in str(item.error)
