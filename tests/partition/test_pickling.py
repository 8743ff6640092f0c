"""Pickles of public values: copies are equal or behave alike; what cannot be copied says why."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Spec

MESH = Mesh(x=2)
SHARDED, REPLICATED = (Spec(MESH, p, shape=(8, 16)) for p in (P("x"), P()))
PROGRAM = fs.redistribute(SHARDED, REPLICATED)
VALUES = {
    "Mesh": MESH, "P": P("x"), "Spec": SHARDED, "Program": PROGRAM,
    "Batch": fs.redistribute([SHARDED], [REPLICATED]), "Step": PROGRAM.steps[0],
    "Cost": PROGRAM.cost(), "Bound": fs.lower_bound(SHARDED, REPLICATED),
    "Rule": fs.propagate(torch.sum, SHARDED, 0).rule, "Topology": fs.Topology.cluster(),
    "Link": fs.Topology.cluster().outer,
}  # fmt: skip
INDICES = Spec(MESH, P("x"), shape=(8,), dtype=torch.int64)
CALLS: dict[str, tuple[Any, ...]] = {
    "sum": (torch.sum, SHARDED, 0), "mm": (torch.mm, SHARDED.replace(partition=P(None, "x")),
                                         Spec(MESH, P("x"), shape=(16, 4))),
    "reshape": (torch.reshape, SHARDED, (4, 32)), "embedding": (F.embedding, INDICES, SHARDED),
    "cross_entropy": (F.cross_entropy, SHARDED, INDICES), "gelu": (F.gelu, SHARDED),
    "cat": (torch.cat, [SHARDED, SHARDED], 1), "foreach": (torch._foreach_norm, [SHARDED] * 2),
    "layer_norm": (F.layer_norm, SHARDED, (16,)), "topk": (torch.topk, SHARDED, 2),
}  # fmt: skip


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x.sin() * factor


def copy_of(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("name", VALUES)
def test_values_are_equal(name: str) -> None:
    assert copy_of(VALUES[name]) == VALUES[name]


def test_pair_has_its_values_and_its_spec() -> None:
    pair = fs.shard(torch.arange(128.0).reshape(8, 16), SHARDED)
    local, spec = copy_of(pair)
    assert spec == SHARDED
    torch.testing.assert_close(local, pair.local)


@pytest.mark.parametrize("name", CALLS)
def test_strategy_and_its_alternatives(name: str) -> None:
    strategy = fs.propagate(*CALLS[name])
    copy = copy_of(strategy)
    assert (copy.op, copy.call, copy.rule) == (strategy.op, strategy.call, strategy.rule)
    assert (copy.programs, copy.out_specs) == (strategy.programs, strategy.out_specs)
    assert list(map(str, copy.alternatives)) == list(map(str, strategy.alternatives))


def test_partition_of_a_function_or_module_has_its_options_without_plans() -> None:
    x, mesh = torch.arange(4.0), Mesh(x=2)
    part = fs.partition(scaled, mesh=mesh, in_specs=(P("x"), None), out_specs=P("x"))
    part(x, 2.0)
    copy = copy_of(part)
    assert (copy.fn, copy.mesh, copy.in_specs) == (scaled, mesh, part.in_specs)
    assert not copy._calls
    torch.testing.assert_close(copy(x, 2.0), part(x, 2.0))
    linear = torch.nn.Linear(4, 4)
    copy = copy_of(fs.partition(linear, mesh=mesh, params=P("x")))
    torch.testing.assert_close(copy(dict(linear.named_parameters()), x), linear(x))


def test_auto_plans_its_example_again() -> None:
    choice = fs.auto(scaled, MESH, [SHARDED, 2.0])
    copy = copy_of(choice)
    assert (copy.in_specs, copy.explain()) == (choice.in_specs, choice.explain())
    x = torch.ones(8, 16)
    torch.testing.assert_close(copy(x, 2.0), scaled(x, 2.0))


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (
            lambda: fs.partition(lambda x: x, mesh=MESH),
            "a pickle of <lambda>.<locals>.<lambda>",
        ),
        (lambda: fs.partition(torch.relu, mesh=MESH).trace(SHARDED), "a PartitionedCall"),
        (lambda: PROGRAM((torch.ones(4, 16),) * 2, async_op=True), "a pending program"),
    ],
)
def test_values_that_stay_in_their_process_are_refused(make: Callable[[], Any], given: str) -> None:
    with pytest.raises(fs.ShardingError) as caught:
        pickle.dumps(make())
    assert f"  given: {given}\n" in str(caught.value)
