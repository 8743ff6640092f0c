"""Tests of operations that write their results into arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import Operation, Write


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
        lines = part.trace(*pairs).schedule
        out, one = part(*pairs), fn(*expected)
        torch.testing.assert_close([fs.unshard(pair) for pair in pairs], expected)
        if one is not None:
            torch.testing.assert_close(fs.unshard(out), one)
        count = sum(isinstance(line, Operation) and line.into is not None for line in lines)
        assert count + sum(isinstance(line, Write) for line in lines) in (1, 2)
        if specs == (P(), P()):
            assert count == in_place


def test_a_training_step_holds_one_copy_of_its_parameters() -> None:
    def step(params: dict[str, Tensor], x: Tensor) -> Tensor:
        def loss(params: dict[str, Tensor]) -> Tensor:
            return ((x @ params["up"]).relu() @ params["down"]).square().sum()

        grads, value = torch.func.grad_and_value(loss)(params)
        for name, param in params.items():
            param.sub_(grads[name], alpha=0.1)
        return value

    params = {"up": torch.ones(64, 4096), "down": torch.ones(4096, 64)}
    part = fs.partition(step, mesh=Mesh(x=1), in_specs=(P(), P("x")))
    memory = part.trace(params, torch.ones(4, 64)).memory()
    assert memory.peak < 2.1 * sum(x.nbytes for x in params.values())  # with the gradients
