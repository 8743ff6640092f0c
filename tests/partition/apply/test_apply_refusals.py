"""Operations that `fs.apply` refuses: they write operands or return properties of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import ShardingError, apply
from tests.helpers.ops.apply_cases import draw, pair_of
from tests.helpers.spec_grid import message

aten = torch.ops.aten


def refused(make: Callable[[], object], *lines: str) -> None:
    with pytest.raises(ShardingError) as caught:
        make()
    assert str(caught.value) == message(*lines)


WRITES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], str, str]] = {
    "zero_": (torch.Tensor.zero_, (), {}, "its operand in place", "torch.ops.aten.zero"),
    "add_.Tensor": (aten.add_.Tensor, (1.0,), {}, "its operand in place", "torch.ops.aten.add"),
    "bernoulli_": (
        torch.Tensor.bernoulli_, (), {}, "its operand in place", "torch.ops.aten.bernoulli",
    ),
    "requires_grad_": (
        torch.Tensor.requires_grad_, (), {}, "its operand in place",
        "a function that returns a new tensor",
    ),
    "add": (torch.add, (1.0,), {"out": torch.ones(4, 6)}, "out=", "add without out="),
    "add.out": (aten.add.out, (1.0,), {"out": torch.ones(4, 6)}, "out=", "add.out without out="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_operations_that_write_are_refused(name: str) -> None:
    op, args, kwargs, written, fix = WRITES[name]
    refused(
        lambda: apply(op, pair_of(draw(4, 6), "x"), *args, **kwargs), f"fs.apply({name})",
        f"an operation that writes {written}",
        "an operation on pairs must return new pairs, and change none",
        f"fs.apply of {fix}; or the operation on the tensors of pair.local",
    )  # fmt: skip


def test_functions_that_write_are_refused() -> None:
    relu = functools.partial(torch.nn.functional.relu, inplace=True)
    refused(
        lambda: apply(relu, pair_of(draw(4, 6), "x")), "fs.apply(relu)",
        "a function that writes an argument in place",
        "an operation on pairs must return new pairs, and change none",
        "inplace=False where it has that option; or fs.partition of it",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["data_ptr", "element_size", "is_shared", "get_device"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_queries_of_memory_are_refused(name: str) -> None:
    result = "bool" if name == "is_shared" else "int"
    refused(
        lambda: apply(getattr(torch.Tensor, name), pair_of(draw(4, 6), "x")), f"fs.apply({name})",
        f"a result of type {result}",
        "an operation on pairs must return tensors, or be a query of shape or dtype that has a "
        "rule",
        "pair.shape and pair.dtype; or the operation on the tensors of pair.local, or on "
        "fs.unshard(pair)",
    )  # fmt: skip


def test_operations_of_torchscript_run_as_functions() -> None:
    x = pair_of(draw(4, 6), "x")
    assert torch.equal(fs.unshard(apply(torch.Tensor.cpu, x)), draw(4, 6))
    with pytest.raises(ShardingError, match="a Tensor with 24 elements cannot be converted"):
        apply(torch.Tensor.item, x, mode="auto")
