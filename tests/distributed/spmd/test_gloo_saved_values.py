"""Tensors that calls save for the backward pass, written by the body: one error everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)


def writes_operand(x: Tensor) -> Tensor:
    y = fs.pmax(x, "x")
    x.mul_(2)
    return y


def writes_result(x: Tensor) -> Tensor:
    y = fs.pmax(x, "x")
    y.mul_(2)
    return y


def writes_factor(x: Tensor) -> Tensor:
    y = fs.all_gather_matmul(x, x.mT.clone(), "x")
    x.mul_(2)
    return y


def writes_scattered_factor(x: Tensor) -> Tensor:
    y = fs.matmul_reduce_scatter(x, x.mT.clone(), "x")
    x.mul_(2)
    return y


def writes_block(x: Tensor) -> Tensor:
    step = lambda block, index, x: x * block  # noqa: E731
    y = fs.domain.ring_fold(torch.zeros(2, 2), step, torch.add, x, "x", operands=(x.clone(),))
    x.mul_(2)
    return y


BODIES: dict[Callable[[Tensor], Tensor], str] = {
    writes_operand: "fs.pmax",
    writes_result: "fs.pmax",
    writes_factor: "fs.all_gather_matmul",
    writes_scattered_factor: "fs.matmul_reduce_scatter",
    writes_block: "fs.domain.ring_fold",
}


def error_of(body: Callable[[Tensor], Tensor], start: bool) -> str:
    """Return the error of the gradient of a body that writes what its call has saved."""
    if start:
        fs.init(MESH)
    total = fs.shard_map(lambda x: fs.psum(body(x.clone()).sum(), "x"), mesh=MESH,
                         in_specs=P("x"), out_specs=P())  # fmt: skip
    y = total(torch.arange(8.0).view(4, 2).requires_grad_())
    with pytest.raises(ShardingError) as error:
        y.backward()
    return str(error.value)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_written_values_of_a_call_are_refused_by_its_name_and_line(body: Any) -> None:
    lines, first = inspect.getsourcelines(body)
    index = next(i for i, line in enumerate(lines) if "fs." in line)
    for text in (error_of(body, False), *run_ranks(2, error_of, body, True)):
        head, given, rule, fix = text.split("\n")
        assert head.startswith(f"backward of {BODIES[body]}")
        assert head.endswith(f", of the call at {__file__}:{first + index}")
        assert given.startswith("  given: an operand or result that was written in place after ")
        assert "is at version 1; expected version 0" in given
        assert rule == ("  rule:  what a call saves for its gradient must keep its values until "
                        "the backward pass")  # fmt: skip
        assert fix == "  fix:   write a copy: y = x.clone(), and y in the place of x from there on"
