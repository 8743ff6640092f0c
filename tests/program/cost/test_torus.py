"""Tori: effective links beside loads of single links, placements of axes, the book's figures."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.program.cost.link_groups import Extent, exchange_link, gather_link, shift_link
from fshard.program.cost.links import Link, Partners, Torus
from fshard.program.cost.model import step_link, step_parts
from fshard.program.cost.topology import Topology
from fshard.program.infer import infer

HOP = Link(1e-6, 1.0)


def paths(a: int, b: int, size: int, ring: bool) -> list[list[tuple[int, int]]]:
    """Return the shortest ways from `a` to `b` in a row or ring, as lists of directed links."""
    steps = [(b - a) % size, (a - b) % size] if ring else [abs(b - a)]
    ways = []
    for distance, sign in zip(steps, (1, -1) if ring else (1 if b > a else -1,), strict=True):
        if distance == min(steps):
            ways.append([((a + sign * i) % size, sign) for i in range(distance)])
    return ways


def busiest_link(sizes: tuple[int, ...], rings: tuple[bool, ...]) -> float:
    """Return the messages over the busiest link of an all-to-all, routed dim by dim."""
    load: dict[object, float] = {}
    nodes = [*itertools.product(*map(range, sizes))]
    for a, b in itertools.permutations(nodes, 2):
        here = [*a]
        for dim, (size, ring) in enumerate(zip(sizes, rings, strict=True)):
            ways = paths(a[dim], b[dim], size, ring)
            for way in ways:
                for at, sign in way:
                    key = dim, sign, tuple(at if i == dim else x for i, x in enumerate(here))
                    load[key] = load.get(key, 0.0) + 1 / len(ways)
            here[dim] = b[dim]
    return max(load.values())


@pytest.mark.parametrize(
    "sizes",
    [(2,), (3,), (4,), (5,), (6,), (8,), (4, 4), (2, 4), (3, 5), (4, 2, 2), (6, 4)],
    ids=str,
)
@pytest.mark.parametrize("ring", [True, False])
def test_exchanges_are_as_slow_as_the_busiest_link(sizes: tuple[int, ...], ring: bool) -> None:
    rings = tuple(ring and size > 2 for size in sizes)
    extents = [Extent(size, 1, wraps) for size, wraps in zip(sizes, rings, strict=True)]
    n = math.prod(sizes)
    link = exchange_link(HOP, extents)
    # Each rank sends n - 1 messages of 1 byte, and the busiest link carries this many.
    assert (n - 1) / link.bandwidth == pytest.approx(busiest_link(sizes, rings))


@pytest.mark.parametrize("n", [3, 4, 8, 9])
@pytest.mark.parametrize("sides", [(1,), (-1,), (1, -1), (2,), (2, -2)], ids=str)
def test_shifts_are_as_slow_as_the_busiest_link(n: int, sides: tuple[int, ...]) -> None:
    load: dict[tuple[int, int], float] = {}
    for a, side in itertools.product(range(n), sides):
        ways = paths(a, (a + side) % n, n, True)
        for key in ways[0] if side > 0 else ways[-1]:
            load[key] = load.get(key, 0.0) + 1
    sends, receives = (tuple(((sign * x,), 1) for x in sides) for sign in (1, -1))
    link = shift_link(HOP, [Extent(n, 1, True)], Partners(sends, receives))
    if n > 2 * max(sides):  # else both ways are as long
        assert len(sides) / link.bandwidth == pytest.approx(max(load.values()))
        assert link.latency == pytest.approx(max(map(abs, sides)) * HOP.latency)


def test_rings_of_messages_on_a_row_wait_for_the_one_through_it() -> None:
    next_rank = Partners((((1,), 1),), (((3,), 1),))
    assert shift_link(HOP, [Extent(4, 1, False)], next_rank) == Link(3e-6, 1.0)
    assert shift_link(HOP, [Extent(4, 2, True)], next_rank) == Link(2e-6, 0.5)


def test_halos_go_to_neighbours_alone() -> None:
    pod, mesh = Topology.tpu_v5p((4, 4, 16)), Mesh(a=4, b=4, c=16)
    src = fs.Spec(mesh, fs.P("c"), shape=(16 * 1024, 1024))
    windows = tuple((max(0, 1024 * i - 64), min(16384, 1024 * i + 1088)) for i in range(16))
    program = fs.Program(src, (fs.HaloExchange((windows,), "zeros"),), topology=pod)
    copies = 4096 * (1024 + 128) * 2 / pod.memory
    assert program.cost().time == pytest.approx(1e-6 + 64 * 4096 / 9e10 + copies)


def halo(axis_size: int, shard: int, width: int) -> tuple[tuple[int, int], ...]:
    """Return the windows of even shards that are extended to both sides."""
    size = axis_size * shard
    return tuple(
        (max(0, shard * i - width), min(size, shard * (i + 1) + width)) for i in range(axis_size)
    )


def test_halos_over_several_axes_go_to_neighbours_alone() -> None:
    pod, mesh = Topology.tpu_v5p((4, 4, 16)), Mesh(a=4, b=4, c=16)
    src = fs.Spec(mesh, fs.P("b", "c"), shape=(4 * 128, 16 * 512))
    program = fs.Program(src, (fs.HaloExchange((halo(4, 128, 2), halo(16, 512, 1)), "zeros"),),
                         topology=pod)  # fmt: skip
    # Two rows of 514 elements, corners included, cross the links along b, and 132 those along c.
    rows = 4 * 2 * (512 + 2) / 9e10
    parts = step_parts(pod, program.steps[0], program.src, program.dst)
    assert parts.startup == pytest.approx(2e-6)  # a corner is two links away
    assert parts.wire == pytest.approx(rows)
    # Along merged axes the neighbour of a last rank is one further along the major axis.
    line = fs.Spec(mesh, fs.P(("b", "c")), shape=(64 * 1024,))
    step = fs.HaloExchange((halo(64, 1024, 8),), "zeros")
    link = step_link(pod, step, line, infer(step, line))
    assert (link.latency, link.bandwidth) == pytest.approx((2e-6, 2 * 9e10))


def test_rings_over_two_axes_send_one_message() -> None:
    pod, mesh = Topology.tpu_v5p((4, 4, 16)), Mesh(a=4, b=4, c=16)
    ring = [(i, (i + 1) % 64) for i in range(64)]
    spec = fs.P(("b", "c"))
    shift = fs.shard_map(lambda x: fs.ppermute(x, ("b", "c"), ring), mesh=mesh, in_specs=spec,
                         out_specs=spec)  # fmt: skip
    part = fs.partition(shift, mesh=mesh, in_specs=spec)
    (event,) = part.trace(torch.empty(64 * 1024, device="meta")).roofline(pod).events
    assert event.time == pytest.approx(2e-6 + 1024 * 4 / 9e10)


@pytest.mark.parametrize("n", range(2, 17))
def test_gathers_use_all_links_of_the_worst_rank(n: int) -> None:
    row, ring = gather_link(HOP, [Extent(n, 1, False)]), gather_link(HOP, [Extent(n, 1, True)])
    assert (row.bandwidth, ring.bandwidth) == (1, 2)
    assert (row.latency, ring.latency) == pytest.approx(((n - 1) * 1e-6, n // 2 * 1e-6))
    plane = gather_link(HOP, [Extent(n, 1, True), Extent(3, 1, False)])
    assert plane.bandwidth == 3


@given(st.permutations(["x", "y", "z"]))
def test_axes_take_dims_from_the_last_to_the_first(names: list[str]) -> None:
    torus = Topology.tpu_v4((4, 8, 12))
    mesh = Mesh(dict(zip(names, (4, 8, 12), strict=True)))
    for axis, size in mesh.shape.items():
        assert torus.link(mesh, axis) == gather_link(torus.inner_link, [Extent(size, 1, True)])
    everything = torus.link(mesh, mesh.axes)
    assert everything.bandwidth == 3 * torus.link(mesh, "x").bandwidth
    split = Mesh(a=4, b=2, c=4, d=3, e=4)
    assert torus.link(split, "e") == gather_link(torus.inner_link, [Extent(4, 1, False)])
    assert torus.link(split, ("d", "e")).bandwidth == torus.link(mesh, names[2]).bandwidth
    # Four interleaved groups share the links of a ring.
    assert torus.link(split, "d").bandwidth == pytest.approx(2 * 4.5e10 / 4)
    joined = Mesh(a=32, b=12)
    assert torus.link(joined, "a") == torus.link(mesh, tuple(names[:2]))


def test_devices_place_axes() -> None:
    torus = Topology("grid", inner=Torus((2, 4), HOP, (False, True)))
    turned = Mesh(x=4, y=2, devices=[0, 4, 1, 5, 2, 6, 3, 7])
    assert torus.link(turned, "x").bandwidth == 2
    assert torus.link(turned, "y").bandwidth == 1
    assert Topology("grid", inner=Torus((2, 4), HOP)).title == "grid, torus 2x4"


@pytest.mark.parametrize(
    ("mesh", "axis"),
    [
        (Mesh(x=3, y=5), "y"),
        (Mesh(x=3), "x"),
        (Mesh(x=4, devices=[0, 1, 3, 2]), "x"),
        (Mesh(x=24), "x"),
    ],
    ids=str,
)
def test_axes_that_do_not_fit_are_refused(mesh: Mesh, axis: str) -> None:
    torus = Topology.tpu_v5e((4, 4))
    with pytest.raises(
        ShardingError, match="an axis must fill complete dims of the torus"
    ) as caught:
        torus.link(mesh, axis)
    assert "axes of the sizes 4 x 4" in str(caught.value)
    src = fs.Spec(mesh, fs.P(axis), shape=(mesh.size,))
    with pytest.raises(ShardingError, match="complete dims of the torus"):
        fs.redistribute(src, src.replace(partition=fs.P()), topology=torus)


def test_several_slices() -> None:
    slices, mesh = Topology.tpu_v5p((4, 4, 4)), Mesh(pod=2, x=4, y=16)
    inside = slices.link(mesh, ("x", "y"))
    assert slices.link(mesh, "pod") == slices.outer
    both = slices.link(mesh, mesh.axes)
    assert both.bandwidth == min(inside.bandwidth, 64 * slices.outer.bandwidth)
    assert slices.link(mesh, mesh.axes, exchange=True).bandwidth == slices.outer.bandwidth
    other = Mesh(z=64, devices=range(64, 128))
    assert slices.between(Mesh(z=64), other).bandwidth == slices.outer.bandwidth


# -- figures of "How to Scale Your Model", part 3 ------------------------------------------

BF16 = torch.bfloat16
CUBE, V4P = Mesh(X=4, Y=4, Z=4), Topology.tpu_v4((4, 4, 4))
V5E = Topology.tpu_v5e((8, 4))


def seconds(topology: Topology, mesh: Mesh, src: fs.P, step: fs.Step, *shape: int) -> float:
    spec = fs.Spec(mesh, src, shape=shape, dtype=BF16)
    return fs.Program(spec, (step,), topology=topology).cost().time


@pytest.mark.parametrize(
    ("topology", "mesh", "src", "step", "shape", "expected"),
    [
        # The book counts V bytes where a rank lacks (N - 1) / N of them, so the factors.
        (V4P, CUBE, fs.P("X", "Y"), fs.AllGather(("X",), 0), (1024, 4096), 23.3e-6 * 3 / 4),
        (V4P, CUBE, fs.P(("X", "Y")), fs.AllGather(("X", "Y"), 0), (1024, 4096), 46.6e-6 * 15 / 16),
        (V4P, CUBE, fs.P(unreduced={"Z"}), fs.AllReduce(("Z",)), (1024, 4096), 186e-6 * 3 / 4),
        (V4P, CUBE, fs.P("X"), fs.AllGather(("X",), 0), (128,), 2e-6),
        (V5E, Mesh(X=8, Y=4), fs.P("Y"), fs.AllGather(("Y",), 0), (2048, 8192), 560e-6),
        (V5E, Mesh(X=8, Y=4), fs.P("Y"), fs.AllGather(("Y",), 0), (64, 64), 3e-6),
    ],
    ids=["Q2a", "Q2b", "Q2c", "Q3", "pop quiz 2a", "pop quiz 2b"],
)
def test_times_of_the_book(
    topology: Topology, mesh: Mesh, src: fs.P, step: fs.Step, shape: tuple[int, ...],
    expected: float,
) -> None:  # fmt: skip
    assert seconds(topology, mesh, src, step, *shape) == pytest.approx(expected, rel=0.15)


def test_an_all_to_all_takes_a_quarter_of_an_all_gather() -> None:
    ring, mesh, shape = Topology.tpu_v5e((16, 16)), Mesh(X=16, Y=16), (16384, 16384)
    whole = 16384**2 * 2
    gather = seconds(ring, mesh, fs.P("Y"), fs.AllGather(("Y",), 0), *shape)
    swap = seconds(ring, mesh, fs.P("Y"), fs.AllToAll(("Y",), 0, 1), *shape)
    assert gather == pytest.approx(whole * 15 / 16 / 9e10, rel=0.05)
    copies = 2 * whole / 16 / ring.memory
    assert swap - copies == pytest.approx(whole / 9e10 / 4, rel=0.05)


def test_plans_use_the_links_of_idle_axes() -> None:
    ring, mesh = Topology.tpu_v5e((16, 16)), Mesh(X=16, Y=16)
    src = fs.Spec(mesh, fs.P("Y"), shape=(16384, 16384), dtype=BF16)
    prog = fs.redistribute(src, src.replace(partition=fs.P()), topology=ring)
    assert [type(step) for step in prog.steps] == [fs.AllSlice, fs.AllGather]
    plain = fs.Program(src, (fs.AllGather(("Y",), 0),), topology=ring)
    assert prog.cost().time < 0.6 * plain.cost().time


@pytest.mark.parametrize("sizes", ["4x4", 16, (4.0, 4)])
def test_sizes_of_slices_are_checked(sizes: Any) -> None:
    with pytest.raises(fs.ShardingError, match="sizes must be a tuple of the devices along"):
        Topology.tpu_v5e(sizes)


@pytest.mark.parametrize("topology", [Topology.tpu_v5e((4, 4)), Topology.dgx_h100()])
def test_axes_of_a_link_must_be_of_the_mesh(topology: Topology) -> None:
    with pytest.raises(fs.ShardingError, match="axis 'z' on Mesh"):
        topology.link(fs.Mesh(x=4, y=4), "z")


@pytest.mark.parametrize("sizes", [(4, 4, 4), (32, 8), (16, 17)], ids=str)
def test_slices_larger_than_a_pod_are_refused(sizes: Any) -> None:
    with pytest.raises(ShardingError, match="fit into a pod of 16 x 16 devices"):
        Topology.tpu_v5e(sizes)
    assert Topology.tpu_v5p((28, 16, 20)).node_size == 28 * 16 * 20
