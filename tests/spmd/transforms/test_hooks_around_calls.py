"""Checkpoints and other hooks of saved tensors around simulated mapped functions."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, graph
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spmd.checkpoint_cases import (
    AROUND,
    checkpointed,
    kept_by_call,
    kept_gradients,
    without_early_stop,
)
from tests.helpers.tensor_memory import LiveBytes

MESH = Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))
F64 = torch.float64
SCALE = torch.linspace(0.5, 2, 4, dtype=F64).requires_grad_()
Function = Callable[[Tensor, Tensor], Tensor]
RUNS: list[None] = []


def body(x: Tensor, w: Tensor) -> Tensor:
    RUNS.append(None)
    return fs.psum((torch.tanh(x @ w) * SCALE).sin() @ w.T, "y")


MAPPED = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P(None, "y")), out_specs=P("x"))


def dense(x: Tensor, w: Tensor) -> Tensor:
    RUNS.append(None)
    first, second = ((torch.tanh(x @ p) * SCALE).sin() @ p.T for p in w.chunk(2, 1))
    return first + second


def between(f: Function) -> Function:
    """Return a function with two calls, of intermediate values."""
    return lambda x, w: f(f(x.sin(), w.cos()).exp() / 20, w).sin()


def on_cpu(f: Function) -> Function:
    def call(x: Tensor, w: Tensor) -> Tensor:
        with graph.save_on_cpu():
            return f(x, w)

    return call


def as_bytes(f: Function) -> Function:
    """Return a function with hooks that keep nothing of a tensor but its bytes."""

    def pack(x: Tensor) -> io.BytesIO:
        torch.save(x, file := io.BytesIO())
        return file

    def unpack(file: io.BytesIO) -> Tensor:
        file.seek(0)
        x: Tensor = torch.load(file)
        return x

    def call(x: Tensor, w: Tensor) -> Tensor:
        with graph.saved_tensors_hooks(pack, unpack):
            return f(x, w)

    return call


def batched(f: Function) -> Function:
    return lambda x, w: torch.func.vmap(f, (0, None))(torch.stack([x, x * 2]), w).sum(0)


def tangents(f: Function) -> Function:
    return lambda x, w: torch.func.jvp(lambda x: f(x, w), (x,), (x.cos(),))[1]


def dual_level(f: Function) -> Function:
    def call(x: Tensor, w: Tensor) -> Tensor:
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()), w)).tangent
            assert tangent is not None
            return tangent

    return call


def inner_gradient(f: Function, **options: Any) -> Function:
    """Return a function of a result and of its gradient, as physics-informed losses are."""

    def call(x: Tensor, w: Tensor) -> Tensor:
        y = f(x, w)
        (grad,) = torch.autograd.grad(y.sin().sum(), x, **options)
        return y * grad.cos() if options else grad.cos() * w.sum()

    return call


FORMS: dict[str, Callable[[Function], Function]] = {
    "one call": checkpointed,
    "two calls": lambda f: checkpointed(between(f)),
    "no early stop": lambda f: without_early_stop(between(f)),
    "nested": lambda f: checkpointed(lambda x, w: f(checkpointed(f)(x, w), w)),
    "save_on_cpu": lambda f: on_cpu(between(f)),
    "bytes": lambda f: as_bytes(between(f)),
    "save_on_cpu in a checkpoint": lambda f: checkpointed(on_cpu(between(f))),
    "checkpoint in bytes": lambda f: as_bytes(checkpointed(between(f))),
    "vmap": lambda f: checkpointed(batched(f)),
    "vmap, bytes": lambda f: as_bytes(batched(f)),
    "jvp": lambda f: checkpointed(tangents(f)),
    "jvp, vmap": lambda f: checkpointed(tangents(batched(f))),
    "dual level": lambda f: checkpointed(dual_level(f)),
    "inner gradient": lambda f: checkpointed(inner_gradient(f, create_graph=True)),
    "inner gradient, bytes": lambda f: as_bytes(inner_gradient(f, create_graph=True)),
    "inner gradient, constant": lambda f: checkpointed(inner_gradient(f, retain_graph=True)),
    "inner gradient, freed": lambda f: checkpointed(inner_gradient(f)),
}
"""Functions with hooks around calls."""


def derivatives(f: Function, order: int) -> Sequence[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(*s, generator=generator, dtype=F64).div(2).requires_grad_()
        for s in ((4, 6), (6, 8))
    )
    inputs = x, w, SCALE
    results: list[Tensor] = [f(x, w)]
    for _ in range(order):
        total = torch.stack([y.sin().sum() for y in results if y.requires_grad]).sum()
        results += torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
    return results


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_derivatives_and_runs_are_those_of_one_device(form: str, order: int) -> None:
    around = FORMS[form]
    RUNS.clear()
    expected = derivatives(around(dense), order)
    runs = len(RUNS)
    torch.testing.assert_close(derivatives(around(MAPPED), order), expected, rtol=1e-10, atol=1e-10)
    assert len(RUNS) == runs + runs * MESH.size


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", AROUND)
def test_checkpoints_keep_nothing_of_a_call(name: str, check: bool) -> None:
    kept, runs, gradients = kept_by_call(MESH, AROUND[name], check)
    is_checkpointed = name != "nothing"
    assert (kept == 0) == is_checkpointed
    assert runs == (MESH.size, (1 + is_checkpointed) * MESH.size)
    torch.testing.assert_close(gradients, kept_gradients(), rtol=0, atol=1e-10)


def live_bytes(f: Function, x: Tensor, w: Tensor) -> int:
    """Return the bytes that live after a call, without those of its arguments and result."""
    with LiveBytes() as memory:
        y = f(x, w)
        torch.zeros(())  # updates the record
    others = {z.untyped_storage()._cdata for z in (x, w, y)}
    return sum(nbytes for key, (_, nbytes) in memory.live.items() if key not in others)


@pytest.mark.parametrize("transform", [lambda f: f, batched, tangents])
def test_memory_of_a_checkpointed_call_is_freed(transform: Callable[[Function], Function]) -> None:
    """The arguments and results of ranks are copies, of which graphs have the ends."""
    x, w = (torch.randn(*s, dtype=F64).requires_grad_() for s in ((64, 96), (96, 128)))
    body = lambda x, w: fs.psum(torch.tanh(x @ w) @ w.T, "y").sin()  # noqa: E731
    mapped = fs.shard_map(body, mesh=MESH, in_specs=(P("x"), P(None, "y")), out_specs=P("x"))
    between = lambda x, w: transform(mapped)(x.sin(), w).sin()  # noqa: E731
    kept, freed = live_bytes(between, x, w), live_bytes(checkpointed(between), x, w)
    assert kept > x.nbytes
    assert freed < x.nbytes / 8


def test_hooks_see_arguments_and_what_ranks_save() -> None:
    shapes: list[torch.Size] = []

    def pack(x: Tensor) -> Tensor:
        shapes.append(x.shape)
        return x

    f = fs.shard_map(lambda x: x.sin().sum()[None], mesh=MESH, in_specs=P("x"), out_specs=P("x"),
                     check=False)  # fmt: skip
    with graph.saved_tensors_hooks(pack, lambda x: x):
        f(torch.ones(4, 3, requires_grad=True))
    assert shapes == [(4, 3), *[(2, 3)] * MESH.size]


class Keeping(torch.nn.Module):
    """Module that returns a buffer and its parameter, and keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.weight = torch.nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, x: Tensor, index: Tensor) -> tuple[Any, ...]:
        y = x[index] * self.weight
        self.seen += [x, index, y]
        return y, self.steps, self.weight, index, y.detach()


def test_tensors_that_the_user_has_keep_their_values() -> None:
    """The ends of graphs are freed, and no tensor that the function sees is one."""
    module, pairs = Keeping(), Mesh(x=2)
    f = fs.shard_map(module, mesh=pairs, in_specs=(P("x"), P()), out_specs=(
        P("x"), P(), P(), P(), P("x")))  # fmt: skip
    x, index = torch.arange(6.0).view(2, 3).requires_grad_(), torch.tensor([0])
    y, steps, weight, same, constant = checkpoint(f, x, index, use_reentrant=False)
    for outputs in (y, constant):
        torch.testing.assert_close(outputs.detach(), 2 * x.detach())
    torch.testing.assert_close(steps, torch.arange(3))
    torch.testing.assert_close(weight.detach(), torch.full((3,), 2.0))
    torch.testing.assert_close(same, index)
    assert [x.tolist() for x in module.seen] == [
        [[0, 1, 2]], [0], [[0, 2, 4]], [[3, 4, 5]], [0], [[6, 8, 10]],
    ]  # fmt: skip
    (y.sum() + 3 * weight.sum()).backward()
    torch.testing.assert_close(module.weight.grad, torch.tensor([6.0, 8.0, 10.0]))
    torch.testing.assert_close(x.grad, torch.full((2, 3), 2.0))


@pytest.mark.parametrize("check", [True, False])
def test_results_without_gradients_are_the_ranks(check: bool) -> None:
    double = fs.shard_map(
        lambda x: 2 * x, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=check
    )
    pair = fs.shard(torch.arange(4.0), MESH, P("x"))
    with graph.save_on_cpu():
        results = double(torch.arange(4.0)), fs.unshard(double(pair))
    for y in results:
        torch.testing.assert_close(y, 2 * torch.arange(4.0))


def test_gradients_of_what_leaves_a_body_otherwise_are_refused() -> None:
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x.sin())
        return x.cos()

    f = fs.shard_map(keep, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    checkpoint(f, torch.ones(4, requires_grad=True), use_reentrant=False)
    with pytest.raises(ShardingError, match="through its results") as caught:
        seen[0].sum().backward()
    assert "return the tensor" in str(caught.value)


def test_torch_func_in_a_body_is_refused_as_on_one_device() -> None:
    def gradient(x: Tensor) -> Tensor:
        grad: Tensor = torch.func.grad(lambda x: x.sin().sum())(x)
        return grad

    x = torch.ones(4, requires_grad=True)
    f = fs.shard_map(gradient, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    for function in (f, gradient):
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
            checkpoint(function, x, use_reentrant=False)
