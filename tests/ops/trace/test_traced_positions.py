"""Indexing at positions that a partitioned function computes: values, writes and gradients."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(x=2)
LAYOUTS = [P(), P("x"), P(None, "x"), P(None, None, "x")]
Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: list[Any] = []


def function(fn: Function) -> Function:
    FUNCTIONS.append(pytest.param(fn, id=fn.__name__))
    return fn


@function
def elements(x: Tensor, i: Tensor) -> Tensor:
    return x[i] * x[-i - 1] + x[i.int()] * x.select(0, i) + torch.narrow(x, 0, i, 2).sum(0)


@function
def with_other_indices(x: Tensor, i: Tensor) -> Tensor:
    parts = [
        x[i, :, i + 1], x[..., i], x[:, i], x[0, i], x[None, i, None, ..., i], x[True, i, 1:],
        x[i, :, torch.tensor([0, 2])], x[torch.tensor([0, 2]), :, i], x[[0, 1], i],
        x[i, [True, False] * 3], x[:, torch.tensor([True, False] * 3), i], x[torch.arange(4)[2]],
    ]  # fmt: skip
    return torch.cat([part.sin().flatten() * (k + 1) for k, part in enumerate(parts)])


@function
def coefficients(x: Tensor, i: Tensor) -> Tensor:
    alphas = torch.linspace(0.1, 0.9, 5, dtype=x.dtype).cumprod(0)
    return alphas[i].sqrt() * x + (1 - alphas[i + 1]).sqrt() * x.cos()


@function
def written(x: Tensor, i: Tensor) -> Tensor:
    y = x * 1
    y[i] = 0.5
    y[i + 1, :, 2] = x[0, :, 0]
    y[..., i] = x[:1, :, 1].float()
    y[i - 1, :, torch.tensor([0, 2])] = x[1, :2].T[:6].sin()
    return y * y


@function
def increased(x: Tensor, i: Tensor) -> Tensor:
    y = x * 1
    y[i] += x[0].sin()
    y[i, :, 2] *= x[0, :, 0]
    return y * y


@function
def written_through_views(x: Tensor, i: Tensor) -> Tensor:
    y = x * 1
    y[i].mul_(x[1])
    y[i][2].detach().add_(3)
    y[i][i].mul_(x[1, 1])
    y.narrow(1, i, 2).mul_(x[:, :2])
    y.permute(2, 0, 1)[i].mul_(x[:, :, 0])
    torch._foreach_mul_([y[i], y[i + 1]], 2.0)
    torch.nn.functional.relu(y[i], inplace=True)
    return y * y


@function
def written_without_gradients(x: Tensor, i: Tensor) -> Tensor:
    y = x * 1
    y[i].data.mul_(3)
    with torch.no_grad():
        y[i] = 3
        y[i + 1].mul_(3)
    return y * y


@function
def read_after_writes(x: Tensor, i: Tensor) -> Tensor:
    y = x * 1
    a = y[i]
    b, c = a[i], y[i + 1]
    b.mul_(2)
    total = c + a
    y[i] = x[0]
    b.add_(x[2, 2])
    y.mul_(2)
    return total.sin() + a + b * y[i, 0]


@function
def recurrent(x: Tensor, i: Tensor) -> Tensor:
    y, step = x * 1, i.clone()
    for _ in range(2):
        state = y[step]
        step.add_(1)
        y[step] = state * 2 + 1
        state.mul_(0.5)
    return y


@function
def returned_after_a_write(x: Tensor, i: Tensor) -> Tensor:
    y = x * 1
    part = y[i]
    y.mul_(2)
    return part


@function
def of_a_gradient(x: Tensor, i: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        y = x * 1
        part = y[i]
        y[i + 1] = x[0] * 2
        y.mul_(x)
        return (y * y * y).sum() + (part * part).sum()

    return torch.func.grad(loss)(x)


@function
def transformed(x: Tensor, i: Tensor) -> Tensor:
    def step(row: Tensor) -> Tensor:
        y = row * 1
        y[i] = row[0]
        y[i + 1].mul_(2)
        return y[i].sin() * y

    tangent = torch.func.jvp(lambda x: x[i].sin(), (x,), (x.cos(),))[1]
    jacobian = torch.func.jacrev(lambda row: row[i] ** 2)(x[0, 0])
    return torch.func.vmap(step)(x) + tangent + jacobian


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_values_and_gradients_are_those_of_one_device(fn: Function, layout: P) -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    part = fs.partition(fn, mesh=MESH, in_specs=(layout, P()))
    for i in (torch.tensor(1), torch.tensor(0)):
        actual, expected = part(x, i), fn(x, i)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (actual, expected)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_elements_of_shards_are_read_without_gathering() -> None:
    x = fs.shard(torch.randn(4, 6), MESH, P("x"))
    i = fs.shard(torch.tensor(1), MESH, P())
    with fs.comm_log() as log:
        fs.partition(lambda x, i: x[i], mesh=MESH)(x, i)
    assert not log.counts


def test_arguments_are_written() -> None:
    def fn(x: Tensor, i: Tensor) -> None:
        x[i] = 0.5
        x[i + 1].add_(2)

    x, i = torch.randn(4, 6), torch.tensor(1)
    y = x.clone()
    fs.partition(fn, mesh=MESH, in_specs=(P("x"), P()))(x, i)
    fn(y, i)
    torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    "call",
    [operator.getitem, lambda x, i: x[:, i], lambda x, i: torch.narrow(x, 1, i, 2)],
)
def test_apply_takes_positions(call: Function) -> None:
    x, i = torch.randn(4, 6), torch.tensor(1)
    pairs = fs.shard(x, MESH, P("x")), fs.shard(i, MESH, P())
    assert torch.equal(fs.unshard(fs.apply(call, *pairs)), call(x, i))


BUFFER = torch.zeros(4)


def writes_a_closure(x: Tensor, i: Tensor) -> Tensor:
    BUFFER[i].add_(1)
    return x


@pytest.mark.parametrize(
    ("fn", "refused"),
    [
        (lambda x, i: x[i : i + 2], r"x.narrow\(dim, i, length\)"),
        (lambda x, i: x.roll(i, 0), r"x.index_select\(dim, \(torch.arange\(n\) - i\) % n\)"),
        (lambda x, i: x[int(i)], r"x\[i\] in place of x\[int\(i\)\]"),
        (lambda x, i: x.unbind()[i], r"torch.stack\(xs\)\[i\] of a list"),
        (writes_a_closure, "index_put_ writes a tensor that the function closes over"),
    ],
)
def test_positions_as_numbers_are_refused(fn: Function, refused: str) -> None:
    with pytest.raises(fs.ShardingError, match=refused):
        fs.partition(fn, mesh=MESH)(torch.ones(4, 6), torch.tensor(1))


def test_fixes_of_refused_positions() -> None:
    def refused(x: Tensor, i: Tensor) -> list[Tensor]:
        return [x[i : i + 2], x.roll(i.item(), 0), x[int(i)], x.unbind()[i]]

    def fixed(x: Tensor, i: Tensor) -> list[Tensor]:
        rolled = x.index_select(0, (torch.arange(4) - i) % 4)
        return [x.narrow(0, i, 2), rolled, x[i], torch.stack(x.unbind())[i]]

    x, i = torch.randn(4, 6), torch.tensor(1)
    part = fs.partition(fixed, mesh=MESH, in_specs=(P("x"), P()))
    torch.testing.assert_close(part(x, i), refused(x, i))
