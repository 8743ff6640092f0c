"""Tensors that a traced function keeps outside: in modules, lists and caches of functions."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(dp=2, tp=2)
pytestmark = pytest.mark.searches_heap


def error_of(part: Any, *args: Any) -> str:
    """Return the text of the error that a call raises."""
    with pytest.raises(fs.ShardingError) as caught:
        part(*args)
    return str(caught.value)


class Recurrent(torch.nn.Module):
    """Cell that keeps its state, as recurrent blocks of language models do."""

    state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = x.sin() if self.state is None else x.sin() + self.state * 0.5
        return self.state.cos()


def test_states_that_modules_keep_are_returned() -> None:
    """The fix of the error runs: a state is an argument and a result, and the module has none."""

    def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        cell.state = state
        y = cell(x)
        state, cell.state = cell.state, None
        return y, state

    cell, plain, x = Recurrent(), Recurrent(), torch.randn(3, 4)
    assert "is kept outside of the function" in error_of(
        fs.partition(cell.forward, mesh=MESH), x[0]
    )
    cell.state = None
    part, state = fs.partition(step, mesh=MESH, in_specs=P("dp")), x[0].sin()
    plain(x[0])
    for row in x[1:]:
        y, state = part(state, row)
        torch.testing.assert_close(y, plain(row))


class Causal(torch.nn.Module):
    """Layer that computes its mask when it is called first."""

    mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.arange(1.0, 4.0)
        return x * self.mask


def test_constants_that_modules_keep_are_computed_before() -> None:
    """The fix of the error runs."""
    layer, x = Causal(), torch.randn(4, 3)
    part = fs.partition(layer.forward, mesh=MESH, in_specs=P("dp"))
    assert "a result of arange, under 'mask' of a Causal, is kept outside" in error_of(part, x)
    layer.mask = None
    assert torch.equal(layer(x), part(x))


Weighted = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def weighted() -> Weighted:
    """Return a function that keeps weights for calls of the same length or mask."""

    @lru_cache(maxsize=2)
    def weights(length: int, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {"w": torch.arange(1.0, length + 1) if mask is None else mask.cumsum(0)}

    return lambda x, mask: x * weights(len(x), mask)["w"] * weights(len(x), None)["w"]


@pytest.mark.parametrize("takes_gradient", [False, True])
def test_caches_of_functions_keep_no_traced_tensors(
    weighted: Weighted, takes_gradient: bool
) -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = weighted(x.sin(), mask)
        # A function that takes gradients is traced twice.
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0] if takes_gradient else y

    x = torch.randn(4, requires_grad=True)
    for mask in torch.rand(2, 4):
        actual, expected = fs.partition(fn, mesh=MESH, in_specs=P("dp"))(x, mask), fn(x, mask)
        torch.testing.assert_close(actual, expected)
        grads, right = (torch.autograd.grad(y.sin().sum(), x) for y in (actual, expected))
        torch.testing.assert_close(grads, right)


def test_caches_of_functions_that_fail_keep_no_traced_tensors(weighted: Weighted) -> None:
    x, mask = torch.rand(4), torch.rand(4)
    part = fs.partition(lambda x: x if weighted(x, x).sum() > 0 else -x, mesh=MESH)
    assert "reads a tensor's values" in error_of(part, x)
    expected = x * mask.cumsum(0) * torch.arange(1.0, 5.0)
    torch.testing.assert_close(fs.partition(weighted, mesh=MESH)(x, mask), expected)
    assert "reads a tensor's values" in error_of(part, x)
    error = error_of(weighted, x, mask)
    assert "a tensor of shape (4,) without values, under 'w' of a dict" in error
    assert "mul at " in error
    assert "test_kept_tensors.py" in error.partition("\n")[0]
    assert "fix:   call it again: caches of functools" in error
    torch.testing.assert_close(weighted(x, mask), expected)


def test_frozen_caches_of_functions_keep_no_traced_tensors(weighted: Weighted) -> None:
    x, mask = torch.rand(4), torch.rand(4)
    weighted(x[:3], mask[:3])
    gc.freeze()
    try:
        actual = fs.partition(weighted, mesh=MESH)(x, mask)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    torch.testing.assert_close(actual, weighted(x, mask))


def test_traced_tensors_in_other_caches_are_refused() -> None:
    """The fix of the errors runs."""
    cached: dict[int, torch.Tensor] = {}

    def weighted(x: torch.Tensor, is_checked: bool) -> torch.Tensor:
        if len(x) not in cached:
            cached[len(x)] = torch.arange(1.0, len(x) + 1)
        y = x * cached[len(x)]
        return y if not is_checked or y.sum() > 0 else -y

    part, x = fs.partition(weighted, mesh=MESH, in_specs=P("dp")), torch.rand(4)
    assert "reads a tensor's values" in error_of(part, x, True)
    for _ in range(2):
        error = error_of(part, x, False)
        assert "given: a tensor of shape (4,) without values, under 4 of a dict" in error
        assert "test_kept_tensors.py" in error.partition("\n")[0]
    assert "fix:   remove it there" in error_of(weighted, x, True)
    cached.clear()
    assert "given: a result of arange, under 4 of a dict, is kept outside" in error_of(
        part, x, False
    )
    cached.clear()
    assert torch.equal(weighted(x, True), part(x, False))


class Last(torch.nn.Module):
    """Layer that keeps its input."""

    input: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input = x
        return x * 2


def test_arguments_that_are_kept_outside_are_refused() -> None:
    seen: list[torch.Tensor] = []

    def lists(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(y)
        return x * y

    def forgets(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        layer.input = None
        return y

    layer, x = Last(), torch.ones(2)
    given = "given: argument {} is kept outside of the function"
    named = given.format("0, under 'input' of a Last,")
    assert named in error_of(fs.partition(layer.forward, mesh=MESH), x)
    assert given.format(1) in error_of(fs.partition(lists, mesh=MESH), x, 2 * x)
    assert torch.equal(fs.partition(forgets, mesh=MESH)(x), 2 * x)
    assert torch.equal(fs.partition(lambda x: (x, [x, x * 2])[1][0], mesh=MESH)(x), x)
