"""Calibration without ranks, and the fit of links to measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.program.cost.links import Link
from fshard.program.cost.model import collective_time as time_of
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import Traffic, all_gather_traffic, all_to_all_traffic
from fshard.run.calibrate import Sample, _fit, _runs
from fshard.run.transports.torch_distributed import ProcessWorld
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


def moved(n: int) -> list[tuple[bool, Traffic]]:
    """Return the traffic of gathers and exchanges, of all other ranks or of the next one."""
    shards = [2**power for power in range(10, 27, 4)]
    return [
        item
        for shard in shards
        for item in (
            (False, all_gather_traffic(n, shard)),
            (True, all_to_all_traffic(n, n * shard)),
            (True, Traffic(shard, shard, 1, 1)),
        )
    ]


def sampled(groups: dict[str, tuple[int, Link]], launch: float, message: float) -> list[Sample]:
    """Return the times of the model for groups of some ranks on some links."""
    local = Topology(launch=launch, message=message, memory=1.0)
    return [
        Sample(name, exchange, item,
               time_of(local, link.of_exchanges() if exchange else link, item, 0))
        for name, (n, link) in groups.items()
        for exchange, item in moved(n)
    ]  # fmt: skip


TIMES = st.floats(1e-7, 1e-2)
RATES = st.floats(1e6, 1e12)
LINKS = st.builds(Link, TIMES, RATES, RATES)


@given(LINKS, LINKS, st.integers(2, 9), st.integers(3, 9), TIMES, st.floats(0, 1e-4))
def test_fit_recovers_the_model(
    one: Link, other: Link, n: int, m: int, message: float, launch: float
) -> None:
    """The times of the fit are those that were measured, of gathers and of exchanges."""
    samples = sampled({"x": (n, one), "y": (m, other)}, launch, message)
    found, links = _fit(samples, launch)
    local = Topology(launch=launch, message=found, memory=1.0)
    for name, exchange, item, seconds in samples:
        link = links[name].of_exchanges() if exchange else links[name]
        assert time_of(local, link, item, 0) == pytest.approx(seconds, rel=1e-3)


@given(st.lists(st.floats(1e-6, 1.0), min_size=15, max_size=15), st.floats(0, 1e-2))
def test_fit_is_positive_for_any_samples(seconds: list[float], launch: float) -> None:
    """A `Link` refuses figures that are not physical."""
    samples = [Sample("x", *item, t) for item, t in zip(moved(3), seconds, strict=True)]
    message, links = _fit(samples, launch)
    assert message >= 0
    assert isinstance(links["x"], Link)
    assert _fit([], launch) == (0.0, {})


def test_measured_bytes_do_not_depend_on_the_default_dtype() -> None:
    sent: list[tuple[str, int]] = []

    class World:
        device = torch.device("cpu")
        rank = 1

        def __getattr__(self, op: str) -> Callable[..., object]:
            return lambda x, *_: sent.append((op, x.nbytes))

    first = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        runs = _runs(cast(ProcessWorld, World()), (0, 1, 2), "x", 1200)
    finally:
        torch.set_default_dtype(first)
    for run in runs:
        run.start()
    assert sent == [("all_gather", 400), ("reduce_scatter", 1200), ("all_reduce", 1200),
                    ("all_to_all", 1200), ("all_to_all", 400)]  # fmt: skip


def test_links_of_several_axes_and_of_exchanges() -> None:
    """A link named after two axes is that of collectives over both, in any order."""
    mesh, slow = fs.Mesh(x=2, y=2, z=2), Link(1e-3, 1e9, exchange=2e9)
    fast = Link(1e-6, 4e9)
    wires = Topology.of({"x": fast, "y": slow, "x,y": Link(2e-3, 3e9)})
    assert wires.link(mesh, ("y", "x")) == wires.link(mesh, ("x", "y")) == Link(2e-3, 3e9)
    assert wires.link(mesh, "y") == slow
    assert wires.link(mesh, "y", exchange=True) == Link(1e-3, 2e9)
    assert wires.link(mesh, ("x", "z"), exchange=True).bandwidth == 4e9
    both = Topology.of({"x": fast, "y": slow}).link(mesh, ("x", "y"))
    assert (both.latency, both.bandwidth, both.of_exchanges().bandwidth) == (1e-3, 1e9, 2e9)
    src = fs.Spec(mesh, fs.P(("x", "y", "z")), shape=(8,))
    assert fs.redistribute(src, src.replace(partition=fs.P()), topology=wires).cost().time > 1e-3
    with pytest.raises(ShardingError, match="exchange must be None or a number above 0"):
        Link(0.0, 1.0, exchange=0.0)
