"""Calibration without ranks, and the fit of links to measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.program.cost.links import Link
from fshard.program.cost.model import collective_time as time_of
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import Traffic, all_gather_traffic, all_to_all_traffic
from fshard.run.calibrate import Sample, _fit, _message
from tests.helpers import spec_grid

NO_RANKS = spec_grid.message(
    "fs.calibrate", "Mesh(x=4), in a process that is not a rank of torchrun",
    "links must be those between processes, which a simulation does not have",
    "torchrun --nproc-per-node 4 script.py, and fs.init(mesh) in it; "
    "fs.Topology.dgx_h100() and others need no processes")  # fmt: skip


def test_calibrate_requires_ranks() -> None:
    with pytest.raises(ShardingError) as caught:
        fs.calibrate(fs.Mesh(x=4))
    assert str(caught.value) == NO_RANKS


def test_calibrate_is_refused_in_a_simulation() -> None:
    mesh = fs.Mesh(x=4)
    with pytest.raises(ShardingError) as caught:
        fs.simulate(mesh, lambda: fs.calibrate(mesh))
    assert NO_RANKS in str(caught.value)


def test_calibrate_requires_a_mesh() -> None:
    with pytest.raises(ShardingError) as caught:
        fs.calibrate("x")  # type: ignore[arg-type]
    assert str(caught.value) == spec_grid.message(
        "fs.calibrate", "a mesh of type str", "a mesh must be a fs.Mesh", "fs.Mesh(dp=2, tp=4)"
    )


def moved(n: int) -> list[Traffic]:
    shards = [2**power for power in range(10, 27, 4)]
    return [
        item for s in shards for item in (all_gather_traffic(n, s), all_to_all_traffic(n, n * s))
    ]


TIMES = st.floats(1e-7, 1e-2)


@given(st.integers(2, 9), TIMES, TIMES, st.floats(1e6, 1e12), st.floats(0, 1e-4))
def test_fit_recovers_the_model(
    n: int, latency: float, message: float, rate: float, launch: float
) -> None:
    local = Topology(launch=launch, message=message, memory=1.0)
    samples = [Sample(item, time_of(local, Link(latency, rate), item, 0)) for item in moved(n)]
    link = _fit(samples, launch, message)
    for item, seconds in samples:
        assert time_of(local, link, item, 0) == pytest.approx(seconds, rel=1e-3)


@given(st.integers(3, 9), TIMES, TIMES, st.floats(0, 1e-4))
def test_fit_recovers_the_cost_of_a_message(
    n: int, latency: float, message: float, launch: float
) -> None:
    local, link = Topology(launch=launch, message=message), Link(latency, 1e15)
    sent = Traffic(1, 1, 1, 1), all_to_all_traffic(n, n)
    one, many = (Sample(item, time_of(local, link, item, 0)) for item in sent)
    assert _message(one, many) == pytest.approx(message, rel=1e-3, abs=1e-9)
    assert _message(one, one) == 0


@given(st.lists(st.floats(1e-6, 1.0), min_size=10, max_size=10), st.floats(0, 1e-2), TIMES)
def test_fit_is_positive_for_any_samples(
    seconds: list[float], launch: float, message: float
) -> None:
    samples = [Sample(*item) for item in zip(moved(3), seconds, strict=True)]
    link = _fit(samples, launch, message)
    assert _message(*samples[:2]) >= 0
    assert isinstance(link, Link)  # which refuses what is not physical
