"""Gradients of bodies whose ranks choose between values, by branches or by `torch.where`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard import P
from tests.helpers.spmd.host_read_bodies import BRANCHES, branch_error

Tensor = torch.Tensor


class Case(NamedTuple):
    """A body that branches, the same with `torch.where`, and the function of one device.

    Bodies have the arguments x, w, and whether the rank is the first of two.
    """

    by_branch: Callable[[Tensor, Tensor, Tensor], Tensor]
    by_where: Callable[[Tensor, Tensor, Tensor], Tensor]
    on_one_device: Callable[[Tensor, Tensor], Tensor]


def swapped(x: Tensor) -> Tensor:
    return fs.pshuffle(x, "x", [1, 0])


def used_result(x: Tensor, w: Tensor, is_first: Tensor) -> Tensor:
    other = swapped(x * x)
    return x if is_first else other


def used_sum(x: Tensor, w: Tensor, is_first: Tensor) -> Tensor:
    total = fs.psum(x * w, "x")
    return x if is_first else total


CASES = {
    "result": Case(
        used_result,
        lambda x, w, is_first: torch.where(is_first, x, swapped(x * x)),
        lambda x, w: torch.cat([x[:2], x[:2] * x[:2]]),
    ),
    "sum": Case(
        used_sum,
        lambda x, w, is_first: torch.where(is_first, x, fs.psum(x * w, "x")),
        lambda x, w: torch.cat([x[:2], x[:2] * w + x[2:] * w]),
    ),
    "operand": Case(
        lambda x, w, is_first: swapped(x * w if is_first else torch.ones_like(x)) * x,
        lambda x, w, is_first: swapped(torch.where(is_first, x * w, torch.ones_like(x))) * x,
        lambda x, w: torch.cat([x[:2], x[:2] * w * x[2:]]),
    ),
    "parameter": Case(
        lambda x, w, is_first: x * w if is_first else x,
        lambda x, w, is_first: torch.where(is_first, x * w, x),
        lambda x, w: torch.cat([x[:2] * w, x[2:]]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_fix_of_gradients_through_branches_of_some_ranks(name: str) -> None:
    case = CASES[name]
    tensors = [
        torch.tensor(values, dtype=torch.float64, requires_grad=True)
        for values in ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0])
    ]

    def gradients(fn: Callable[[Tensor, Tensor], Tensor]) -> Any:
        y = fn(*tensors)
        weights = torch.arange(1.0, 5.0, dtype=y.dtype)
        return torch.autograd.grad((y * weights).sum(), tensors, materialize_grads=True)

    def mapped(body: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
        return fs.shard_map(lambda x, w: body(x, w, fs.axis_index("x") == 0), mesh=fs.Mesh(x=2),
                            in_specs=(P("x"), P()), out_specs=P("x"))  # fmt: skip

    with pytest.raises(fs.ShardingError) as caught:
        gradients(mapped(case.by_branch))
    assert "torch.where(condition, a, b) in the place of a branch" in str(caught.value)
    library = str(Path(fs.__file__).parent)
    assert not any(str(entry.path).startswith(library) for entry in caught.traceback)
    torch.testing.assert_close(gradients(mapped(case.by_where)), gradients(case.on_one_device))


@pytest.mark.parametrize("case", BRANCHES, ids=lambda case: case.__name__)
def test_gradients_through_other_branches_are_refused(case: Any) -> None:
    assert "torch.where(condition, a, b) in the place of a branch" in branch_error(
        fs.Mesh(x=2), case
    )
