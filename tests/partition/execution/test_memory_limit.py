"""`fs.partition(memory=)`: the fastest of the plans that fit."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.partition.execution import run_lines
from fshard.partition.ir import Operation
from fshard.partition.step_cost.memory_limit import _policies, _recomputing
from tests.helpers.gloo.memory_cases import Block

LAYERS, WIDTH, ROWS = 3, 32, 512
MESH = fs.Mesh(dp=4)
TOPOLOGY = fs.Topology("test", inner=fs.Link(1e-9, 1e9), launch=1e-8, kernel=0.0)
"""Machine on which every layer's parameters are gathered in a launch of their own."""


def sample() -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor]:
    """Return a network, its parameters and a batch in float64."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS))).double()
    return net, dict(net.named_parameters()), torch.randn(ROWS, WIDTH).double()


@lru_cache
def limited(memory: int | None, **options: Any) -> tuple[fs.Partition, Any]:
    """Return the network partitioned as FSDP within a limit, and its planned call."""
    net, params, x = sample()
    part = fs.partition(net, mesh=MESH, params=P("dp"), in_specs=P("dp"), memory=memory,
                        topology=TOPOLOGY, **options)  # fmt: skip
    return part, part.trace(params, x)


@lru_cache(maxsize=1)
def choices() -> dict[str, int]:
    """Return the peaks of all plans by their texts."""
    with pytest.raises(fs.ShardingError) as caught:
        limited(1)
    assert "given: memory=1\n" in str(caught.value)
    least = int(str(caught.value).split("fix:   memory=")[1].split(",")[0])
    call = limited(least)[1]
    return {x.text: x.peak for x in (call.memory_choice, *call.memory_choice.others)}


def test_the_fastest_plan_that_fits_is_taken_and_its_peak_is_within_the_limit() -> None:
    peaks = choices()
    texts = ["nothing is recomputed", "parameters are gathered again",
             "all but products is recomputed", "recomputed between 3 checkpoints"]  # fmt: skip
    limits = [peaks[text] for text in texts]
    assert limits == sorted(limits, reverse=True)
    for text, limit in zip(texts, limits, strict=True):
        call = limited(limit)[1]
        assert call.memory_choice.text.endswith(text)
        assert call.memory().peak <= call.memory_choice.limit == limit
        fitting = [x.time for x in call.memory_choice.others if x.peak <= limit]
        assert call.memory_choice.time == min([call.memory_choice.time, *fitting])
        assert f"memory={limit}, {call.memory_choice}" in str(call.explain(only="layouts"))


def test_times_are_bounded_before_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts what runs again, launches by their share; operations are compiled once."""
    compiled = Counter[tuple[int, ...]]()
    original = run_lines.rank_graph

    def counted(lines: Any, *args: Any) -> Any:
        compiled[tuple(map(id, lines))] += 1
        return original(lines, *args)

    monkeypatch.setattr(run_lines, "rank_graph", counted)
    base = limited(None)[1]
    plans = _recomputing(replace(base, _compiled={}), _policies(base)[1:])
    rooflines = [plan.call.roofline() for plan in plans]
    for plan, roofline in zip(plans, rooflines, strict=True):
        assert base.roofline().time <= plan.least_time <= roofline.time * (1 + 1e-9)
    operations = [(id(line),) for line in base.schedule if isinstance(line, Operation)]
    assert len(plans) > 2
    assert {compiled[line] for line in operations} == {1}


def test_values_and_gradients_are_those_of_one_device_under_every_plan() -> None:
    net, params, x = sample()
    expected = net(x)
    grads = torch.autograd.grad(expected.square().sum(), list(params.values()))
    for limit in sorted(choices().values())[::2]:
        part = limited(limit)[0]
        out = part(params, x)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
        actual = torch.autograd.grad(out.square().sum(), list(params.values()))
        torch.testing.assert_close(actual, grads, rtol=0, atol=1e-10)


def test_a_given_policy_is_kept_and_a_limit_that_nothing_fits_is_refused() -> None:
    peak = limited(None, remat="gathers")[1].memory().peak
    call = limited(peak, remat="gathers")[1]
    assert call.remat == "gathers"
    assert call.memory_choice.text == "remat as requested"
    with pytest.raises(fs.ShardingError, match=rf"memory={peak}, a larger mesh"):
        limited(peak - 1, remat="gathers")


def test_without_gradients_nothing_is_recomputed() -> None:
    net, params, x = sample()
    part = fs.partition(net, mesh=MESH, params=P(), in_specs=P("dp"), memory=10**9)
    with torch.no_grad():
        assert part.trace(params, x).memory_choice.others == ()


def test_assert_fits_has_the_same_model() -> None:
    part, call = limited(None)
    _, params, x = sample()
    peak = call.memory().peak
    assert fs.testing.assert_fits(part, (params, x), memory=peak).peak == peak
    with pytest.raises(
        AssertionError, match=f"{peak} bytes exceed memory={peak - 1}\n(.*\n)*.*peak"
    ):
        fs.testing.assert_fits(part, (params, x), memory=peak - 1)
    with pytest.raises(fs.ShardingError, match="must be partitioned"):
        fs.testing.assert_fits(torch.relu, (x,), memory=1)  # type: ignore[arg-type]
    for memory in (math.nan, None):
        with pytest.raises(fs.ShardingError, match="memory must be an int of at least 1 byte\n"):
            fs.testing.assert_fits(part, (params, x), memory=memory)  # type: ignore[arg-type]
    for optimizer in (-1, math.nan, "adam", torch.optim.Adam(params.values())):
        with pytest.raises(fs.ShardingError, match="optimizer must be a multiple of at least 0"):
            call.memory(optimizer=optimizer)


def test_a_limit_must_be_bytes_and_is_pickled() -> None:
    with pytest.raises(fs.ShardingError, match="memory must be an int of at least 1 byte"):
        fs.partition(torch.relu, mesh=MESH, memory=0)
    part = fs.partition(torch.relu, mesh=MESH, in_specs=P("dp"), memory=10**6)
    assert pickle.loads(pickle.dumps(part)).memory == 10**6


def test_memory_is_that_of_the_rank_with_the_largest_shard() -> None:
    mesh = fs.Mesh(a=2, b=3, devices=[5, 3, 1, 0, 2, 4])
    spec = fs.Spec(mesh, P("b", "a"), shape=(6, 4), sizes={0: (1, 3, 2), 1: (1, 3)})
    part = fs.partition(torch.relu, mesh=mesh, in_specs=spec)
    memory = fs.testing.assert_fits(part, [torch.empty(6, 4)], memory=100)
    assert (memory.title, memory.peak) == (f"rank 2 of {mesh}", 2 * spec.local_nbytes(2))
