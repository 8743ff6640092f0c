"""Partitioned functions on real processes: the values and gradients of one device."""

from __future__ import annotations

from random import Random

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks
from tests.ops.trace.test_inner_gradients import in_place, made
from tests.partition.test_random_functions import Case, Found

MESH = Mesh(x=2)


def on_rank(seed: int) -> Found:
    fs.init(MESH)
    return Case(Random(seed), [MESH]).of_rank()


@pytest.mark.parametrize("seed", range(6))
def test_random_functions(seed: int) -> None:
    case = Case(Random(seed), [MESH])
    for found in run_ranks(2, on_rank, seed):
        case.compare(found)


def train_on_rank(layout: str) -> tuple[torch.Tensor, ...]:
    """Three training steps that write parameters where they lie; whole afterwards."""
    fs.init(MESH)
    specs = {"a": P(layout), "b": P(None, layout)}
    part = fs.partition(in_place, mesh=MESH, params=specs, in_specs=(P("x"),))
    x = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 16
    params = {}
    for name, each in made().items():
        local, spec = fs.shard(each, fs.Spec(MESH, specs[name], shape=each.shape, dtype=each.dtype))
        params[name] = fs.Sharded(local.clone().requires_grad_(), spec)
    pair = fs.shard(x, fs.Spec(MESH, P("x"), shape=x.shape, dtype=x.dtype))
    values = [fs.unshard(part(params, pair)) for _ in range(3)]
    return (*(fs.unshard(each).detach() for each in params.values()), *values)


@pytest.mark.parametrize("layout", ["x", ()])
def test_training_steps_write_parameters_where_they_lie(layout: str) -> None:
    params = {name: each.requires_grad_() for name, each in made().items()}
    x = torch.arange(16, dtype=torch.float64).reshape(4, 4) / 16
    values = [in_place(params, x) for _ in range(3)]
    for found in run_ranks(2, train_on_rank, layout):
        for one, other in zip(found, (*params.values(), *values), strict=True):
            torch.testing.assert_close(one, other.detach())


def with_a_closure(layout: P) -> tuple[torch.Tensor, ...]:
    """The gradient of a tensor that the function closes over."""
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 4, dtype=torch.float64)
    part = fs.partition(lambda x: (x @ w).sin().sum(), mesh=MESH, in_specs=(layout,))
    value = part(x)
    value.backward()
    assert w.grad is not None
    return value.detach(), w.grad


def closure_on_rank(layout: P) -> tuple[torch.Tensor, ...]:
    fs.init(MESH)
    return with_a_closure(layout)


@pytest.mark.parametrize("layout", [P("x"), P(None, "x"), P()], ids=str)
def test_what_a_function_closes_over_has_its_gradient_on_every_rank(layout: P) -> None:
    whole = with_a_closure(P())
    torch.testing.assert_close(with_a_closure(layout), whole)
    for found in run_ranks(2, closure_on_rank, layout):
        torch.testing.assert_close(found, whole)
