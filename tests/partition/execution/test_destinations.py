"""Tests of operations that write their results into arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import Operation, Write
from tests.helpers.gloo.harness import run_ranks


def swapped(a: Tensor, b: Tensor) -> None:
    new_a, new_b = b + 1, a * 2
    a.copy_(new_a)
    b.copy_(new_b)


def chained(a: Tensor, b: Tensor) -> None:
    a.mul_(0.5).add_(b, alpha=3)
    b.copy_(b.sin() + 2)


def transposed(a: Tensor, b: Tensor) -> None:
    a.copy_(a.t() + b)
    b.add_(1)


def returned(a: Tensor, b: Tensor) -> Tensor:
    new = a + b
    a.copy_(new)
    return new


def returned_before(a: Tensor, b: Tensor) -> Tensor:
    before = a.t().sum(0)
    a.add_(b)
    return before


def cast(a: Tensor, b: Tensor) -> None:
    a.copy_(b.to(torch.float32) * 2)


def broadcast(a: Tensor, b: Tensor) -> None:
    a.copy_(b[0] * 2)
    b.fill_(3.0)


def moving_average(a: Tensor, b: Tensor) -> None:
    a.lerp_(a.square(), 0.1)
    b.addcdiv_(b.sin(), b.abs() + 1, value=-0.1)


FUNCTIONS = [
    (swapped, 1), (chained, 2), (transposed, 1), (returned, 0), (returned_before, 1), (cast, 0),
    (broadcast, 0), (moving_average, 2),
]  # fmt: skip
"""Functions that write their arguments, with the writes in place of replicated arguments."""


@pytest.mark.parametrize("mesh", [Mesh(x=1), Mesh(x=2)], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(("fn", "in_place"), FUNCTIONS)
def test_writes_are_those_of_one_device(fn: Callable[..., Any], in_place: int, mesh: Mesh) -> None:
    for specs in ((P(), P()), (P("x"), P("x")), (P("x"), P(None, "x")), (P(), P("x"))):
        args = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
        expected = [x.clone() for x in args]
        pairs = [fs.shard(x, fs.Spec(mesh, spec, shape=x.shape, dtype=x.dtype))
                 for x, spec in zip(args, specs, strict=True)]  # fmt: skip
        part = fs.partition(fn, mesh=mesh, in_specs=specs)
        lines = part.trace(*pairs)._rank_lines
        out, one = part(*pairs), fn(*expected)
        torch.testing.assert_close([fs.unshard(pair) for pair in pairs], expected)
        if one is not None:
            torch.testing.assert_close(fs.unshard(out), one)
        count = sum(isinstance(line, Operation) and line.into is not None for line in lines)
        assert count + sum(isinstance(line, Write) for line in lines) in (1, 2)
        if specs == (P(), P()):
            assert count == in_place


def step(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Step of gradient descent, with products of matrices and of higher dims."""

    def loss(params: dict[str, Tensor]) -> Tensor:
        hidden = torch.nn.functional.linear(x, params["up"], params["bias"]).relu()
        return (hidden @ params["down"]).square().sum()

    grads, value = torch.func.grad_and_value(loss)(params)
    for name, param in params.items():
        param.sub_(grads[name], alpha=0.1)
    return value


def new_params(width: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    shapes = {"up": (width, 64), "bias": (width,), "down": (width, 64)}
    return {name: torch.rand(shape, dtype=dtype) / width for name, shape in shapes.items()}


def test_a_training_step_holds_its_gradients_once() -> None:
    part = fs.partition(step, mesh=Mesh(x=2), in_specs=(P(), P("x")))
    params = new_params(2**14)
    memory = part.trace(params, torch.ones(4, 2, 64)).memory()
    assert memory.peak < 2.2 * sum(x.nbytes for x in params.values())


def steps_on_a_rank(dims: int) -> list[Tensor]:
    """Return the parameters after steps on this rank, and those of one device."""
    torch.manual_seed(0)
    fs.init(Mesh(x=2))
    part = fs.partition(step, mesh=Mesh(x=2), in_specs=(P(), P("x")))
    params, x = new_params(32, torch.float64), torch.randn(*[4] * dims, 64, dtype=torch.float64)
    one = {name: param.clone() for name, param in params.items()}
    pairs = {k: fs.shard(p, fs.Spec(Mesh(x=2), P(), shape=p.shape, dtype=p.dtype))
             for k, p in params.items()}  # fmt: skip
    batch = fs.shard(x, fs.Spec(Mesh(x=2), P("x"), shape=x.shape, dtype=x.dtype))
    kept = []
    for _ in range(3):
        kept.append(fs.unshard(part(pairs, batch)))
        kept.append(step(one, x))
    lines = part.trace(pairs, batch)._rank_lines
    assert sum(isinstance(line, Operation) and line.into is not None for line in lines) == 5
    return [*kept, *(pair.local for pair in pairs.values()), *one.values()]


@pytest.mark.parametrize("dims", [1, 2])
def test_steps_on_processes_reduce_gradients_in_place(dims: int) -> None:
    for results in run_ranks(2, steps_on_a_rank, dims):
        for actual, expected in zip(results[0:6:2], results[1:6:2], strict=True):
            torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(results[6:9], results[9:])


def products(a: Tensor, b: Tensor, x: Tensor) -> None:
    a.add_(torch.mm(x.t(), x))
    b.add_(torch.mm(x.t(), x.sin()))


def products_with_grad_mode(a: Tensor, b: Tensor, x: Tensor) -> None:
    with torch.enable_grad():
        new_a, new_b = torch.mm(x.t(), torch.mm(x, a)), torch.mm(x.t(), torch.mm(x, b))
    with torch.no_grad():
        a.sub_(new_a)
        b.sub_(new_b)


def imperative(a: Tensor, b: Tensor, x: Tensor) -> None:
    grads = torch.autograd.grad((x @ a @ b.t()).square().sum(), [a, b])
    with torch.no_grad():
        for param, grad in zip((a, b), grads, strict=True):
            param.sub_(grad, alpha=0.1)


def checkpointed(a: Tensor, b: Tensor, x: Tensor) -> None:
    layer = lambda x, w: (x @ w.t()).sin()  # noqa: E731
    b.add_(checkpoint(layer, x, a.t().t(), use_reentrant=False).sum(0))


def large_views(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return torch.einsum("ij->ij", a).sin(), torch.einsum("ij->ij", b).cos(), x * 2


def functions_on_a_rank() -> list[tuple[Any, Any]]:
    """Return results and arguments after calls on this rank, each with those of one device."""
    torch.manual_seed(0)
    mesh, rows = Mesh(x=2), []
    fs.init(mesh)
    for fn, width, weights in [
        (products, 4, P()), (products_with_grad_mode, 4, P()), (checkpointed, 4, P()),
        (imperative, 4, P()), (large_views, 1024, P(unreduced="x")),
    ]:  # fmt: skip
        args = [torch.randn(n, width, dtype=torch.float64) for n in (width, width, 4)]
        specs = weights, weights, P("x")
        pairs = [fs.shard(x, fs.Spec(mesh, spec, shape=x.shape, dtype=x.dtype))
                 for x, spec in zip(args, specs, strict=True)]  # fmt: skip
        for tensor in (*args[:2], *(pair.local for pair in pairs[:2])):
            tensor.requires_grad_(fn in (products_with_grad_mode, imperative))
        part = fs.partition(fn, mesh=mesh, in_specs=specs)
        if fn is imperative:
            lines = part.trace(*pairs)._rank_lines
            assert sum(isinstance(x, Operation) and x.into is not None for x in lines) == 4
        rows += [([fs.unshard(y) for y in part(*pairs) or ()], [*(fn(*args) or ())])
                 for _ in range(2)]  # fmt: skip
        rows.append(([fs.unshard(pair).detach() for pair in pairs], [x.detach() for x in args]))
    return rows


def test_calls_on_processes_are_those_of_one_device() -> None:
    for rows in run_ranks(2, functions_on_a_rank):
        for actual, expected in rows:
            torch.testing.assert_close(actual, expected)
