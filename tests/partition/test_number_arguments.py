"""Ints and floats among the arguments of a partitioned function that change from call to call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard.partition import number_variants
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.ops.block_cases import sample, traces_of

MESH = Mesh(dp=2)


def adam(
    p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], lr: float, beta: float
) -> tuple[torch.Tensor, dict[str, Any]]:
    step = state["step"] + 1
    m = state["m"].lerp(g, 1 - beta)
    v = state["v"] * 0.999 + (1 - 0.999) * g * g
    denominator = (v.sqrt() / (1 - 0.999**step) ** 0.5).add_(1e-8)
    new = p.clone().addcdiv_(m, denominator, value=-lr / (1 - beta**step))
    return new, {"step": step, "m": m, "v": v}


def adam_steps(fn: Callable[..., Any], count: int) -> torch.Tensor:
    """Return the parameters after steps with a learning rate that changes."""
    p = sample(4, 3).detach()
    state: dict[str, Any] = {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
    for index in range(count):
        p, state = fn(p, p.cos(), state, 0.1 / (index + 1), 0.9)
    assert state["step"] == count
    return p


def test_adam_with_a_schedule_is_traced_twice() -> None:
    part = fs.partition(adam, mesh=MESH, in_specs=(P("dp"), P("dp"), P("dp"), None, None))
    torch.testing.assert_close(adam_steps(part, 6), adam_steps(adam, 6))
    assert traces_of(part) == 2
    rows = [line.split() for line in str(part.explain()).splitlines()]
    assert ["args[3]", "any", "value"] in rows


def adam_on_rank() -> torch.Tensor:
    fs.init(MESH)
    part = fs.partition(adam, mesh=MESH, in_specs=(P("dp"), P("dp"), P("dp"), None, None))
    result = adam_steps(part, 4)
    assert traces_of(part) == 2
    return result


def test_adam_on_real_ranks() -> None:
    for result in run_ranks(2, adam_on_rank):
        torch.testing.assert_close(result, adam_steps(adam, 4))


DTYPES: dict[str, Callable[..., torch.Tensor]] = {
    "mul": lambda x, s: x * s,
    "rsub": lambda x, s: s - x,
    "div": lambda x, s: x / s,
    "scalar tensor": lambda x, s: x.sum() * s,
    "alpha": lambda x, s: torch.add(x, x, alpha=s),
    "compare": lambda x, s: torch.where(x > s, x, s),
    "power": lambda x, s: (x * x + 1) ** s,
    "expression": lambda x, s: x * (2 * s - 1) / (s * s + 1),
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("values", [(0.5, 2.25, -3.5), (2, 5, -7)])
def test_dtypes_are_those_of_python_numbers(
    name: str, dtype: torch.dtype, values: tuple[Any, ...]
) -> None:
    fn, x = DTYPES[name], torch.arange(4).to(dtype)
    part = fs.partition(fn, mesh=MESH, in_specs=(P("dp"), None))
    for value in values:
        try:
            expected = fn(x, value)
        except RuntimeError:
            with pytest.raises((fs.ShardingError, RuntimeError)):
                part(x, value)
        else:
            torch.testing.assert_close(part(x, value), expected, equal_nan=True)


def test_gradients_with_numbers_that_change() -> None:
    def inner(x: torch.Tensor, s: float) -> torch.Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad((torch.add(y.sin() * s, y, alpha=s)).sum(), y)[0]

    def outer(x: torch.Tensor, s: float) -> torch.Tensor:
        return (x.sin() * s + x / s) ** 2

    part, part_inner = (fs.partition(f, mesh=MESH, in_specs=(P("dp"),) * 2) for f in (outer, inner))
    x = sample(4)
    for value in (0.5, 2.0, 1.0, 3.0, -1.0):
        y, expected = part(x, value), outer(x, value)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(*(torch.autograd.grad(z.sum(), x) for z in (y, expected)))
        torch.testing.assert_close(part_inner(x, value), inner(x, value))
    assert traces_of(part) == 2


def test_guards_of_branches_decide_which_trace_runs() -> None:
    def fn(x: torch.Tensor, s: float) -> torch.Tensor:
        return x * s if s > 1 else x + s

    part, x = fs.partition(fn, mesh=MESH), torch.arange(3.0)
    for value in (0.0, 3.0, 0.5, 4.0, 0.75, 5.0):
        torch.testing.assert_close(part(x, value), fn(x, value))
    assert traces_of(part) == 3


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, s: x * math.sqrt(s),
        lambda x, s: x.reshape(-1, int(s)).sum(0),
        lambda x, s: x * torch.tensor(s),
        lambda x, s: torch.full((2,), s) + x[:2],
        lambda x, s: torch.nn.functional.dropout(x, s / 10, training=False),
        lambda x, s: torch.nn.functional.layer_norm(x, (4,), eps=s),
        lambda x, s: torch.nn.functional.softmax(x / s, 0),
    ],
)
def test_values_that_the_plan_needs_are_traced_for_each(fn: Any) -> None:
    part, x = fs.partition(fn, mesh=MESH, in_specs=(P("dp"), None)), torch.arange(4.0)
    for value in (2.0, 4.0, 1.0, 2.0):
        torch.testing.assert_close(part(x, value), fn(x, value))


def test_sizes_and_dims_are_traced_for_each() -> None:
    def fn(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
        return (x.narrow(0, 0, n) * n).sum(dim)

    part, x = fs.partition(fn, mesh=MESH), torch.arange(12.0).reshape(4, 3)
    for n, dim in ((2, 0), (3, 0), (1, 0), (3, 1), (2, 1), (2, 0)):
        torch.testing.assert_close(part(x, n, dim), fn(x, n, dim))


def test_unreduced_maxima_are_not_scaled_by_a_symbol() -> None:
    def fn(x: torch.Tensor, s: float) -> torch.Tensor:
        return x.amax(0) * s

    part = fs.partition(fn, mesh=MESH, in_specs=(P("dp"), None), out_specs=P())
    x = torch.arange(8.0).reshape(4, 2)
    for value in (1.0, 2.0, -3.0, 0.0, math.inf):
        torch.testing.assert_close(part(x, value), fn(x, value), equal_nan=True)


def test_a_number_that_is_needed_does_not_make_others_needed() -> None:
    part, x = fs.partition(lambda x, s, n: x.roll(n) * s, mesh=MESH), torch.arange(4.0)
    for s, n in ((0.5, 1), (0.25, 2), (0.125, 2), (2.0, 2), (3.0, 2)):
        torch.testing.assert_close(part(x, s, n), x.roll(n) * s)
    # Of the first values, of both numbers as symbols, and of one of them as a symbol.
    assert traces_of(part) == 4


def test_plans_that_hold_for_one_value_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_variants, "MAX_PLANS", 2)
    fn = lambda x, s: x * math.cos(s / 3)  # noqa: E731
    part, x = fs.partition(fn, mesh=MESH), torch.arange(4.0)
    for value in (1.0, 2.0, 3.0, 4.0, 2.0):
        torch.testing.assert_close(part(x, value), fn(x, value))
    (variants,) = part._calls.values()
    assert len(variants) == 3
