"""Distance of plans to the lower bound, and to DTensor's plans.

All pairs of layouts on three axes (minutes): `python -m pytest -m slow tests/plan`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import pytest
import torch

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.plan.split_axes import least_cost
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program, program_time
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    Exchange,
    ReduceScatter,
    Remesh,
    Step,
)
from tests.helpers import dtensor_plans, reference, spec_grid

Pairs = Sequence[tuple[Spec, Spec]]

TWO_AXES = [Mesh(x=2, y=4), Mesh(x=4, y=4), Mesh(x=8, y=8)]
THREE_AXES = [Mesh(x=2, y=2, z=2), Mesh(x=4, y=2, z=4)]


def pairs_of(mesh: Mesh, count: int | None = None, states: Sequence[str] = ("invariant",)) -> Pairs:
    """Return ordered pairs of float32 specs, axes of a dim in every order: all or `count`."""
    shape = (64,) * len(mesh.axes)
    specs = spec_grid.all_specs(mesh, shape, states, dtype=torch.float32)
    if count is None:
        return list(itertools.product(specs, specs))
    return spec_grid.sample_pairs(specs, count, seed=4, fixed=True)


def ratios(pairs: Pairs, exclude: Sequence[type] = ()) -> list[float]:
    """Return ratios of received bytes to the bound; check that local pairs receive none."""
    values = []
    for src, dst in pairs:
        prog = redistribute(src, dst, objective="bytes", exclude=exclude)
        received, least = prog.cost().bytes_received, lower_bound(src, dst).bytes_received
        assert prog.is_local == (least == 0), prog
        if least:
            values.append(received / least)
    return values


def test_least_cost_is_at_most_the_time_of_the_plan() -> None:
    specs = spec_grid.all_specs(Mesh(x=4, y=2), (64, 64), dtype=torch.float32)
    for on in (Topology.node(), Topology.cluster(2)):  # an axis leaves a node with half its length
        for src, dst in spec_grid.sample_pairs(specs, 60, seed=5):
            least = least_cost(src, dst, on)
            assert least <= program_time(redistribute(src, dst, topology=on), on) * (1 + 1e-9)


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


# -- over the lower bound ------------------------------------------------------------------


def assert_meets_the_bound(pairs: Pairs) -> None:
    """Check that the busiest rank receives what it lacks in every pair."""
    assert all(ratio == 1 for ratio in ratios(pairs))


@pytest.mark.parametrize("mesh", TWO_AXES, ids=str)
def test_sharded_pairs_on_two_axes_meet_the_bound(mesh: Mesh) -> None:
    assert_meets_the_bound(pairs_of(mesh))


@pytest.mark.parametrize("mesh", THREE_AXES, ids=str)
def test_some_sharded_pairs_on_three_axes_meet_the_bound(mesh: Mesh) -> None:
    assert_meets_the_bound(pairs_of(mesh, 200))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", THREE_AXES, ids=str)
def test_sharded_pairs_on_three_axes_meet_the_bound(mesh: Mesh) -> None:
    assert_meets_the_bound(pairs_of(mesh))


@pytest.mark.parametrize("mesh", TWO_AXES, ids=str)
def test_plans_without_exchange_on_two_axes(mesh: Mesh) -> None:
    values = ratios(pairs_of(mesh), (Exchange,))
    assert mean(values) <= 1.06
    assert max(values) <= 1.86


@pytest.mark.parametrize("mesh", THREE_AXES, ids=str)
def test_some_plans_without_exchange_on_three_axes(mesh: Mesh) -> None:
    assert mean(ratios(pairs_of(mesh, 60), (Exchange,))) <= 1.12


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", THREE_AXES, ids=str)
def test_plans_without_exchange_on_three_axes(mesh: Mesh) -> None:
    assert mean(ratios(pairs_of(mesh), (Exchange,))) <= 1.12


def assert_fits(pairs: Pairs) -> None:
    """Check that no plan needs more memory than the larger end."""
    for src, dst in pairs:
        least = lower_bound(src, dst).peak_memory
        assert redistribute(src, dst, max_memory=least).cost().peak_memory <= least


@pytest.mark.parametrize("mesh", TWO_AXES, ids=str)
def test_plans_on_two_axes_hold_no_more_than_their_ends(mesh: Mesh) -> None:
    assert_fits(pairs_of(mesh))


@pytest.mark.parametrize("mesh", THREE_AXES, ids=str)
def test_some_plans_on_three_axes_hold_no_more_than_their_ends(mesh: Mesh) -> None:
    assert_fits(pairs_of(mesh, 150))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mesh", THREE_AXES, ids=str)
def test_plans_on_three_axes_hold_no_more_than_their_ends(mesh: Mesh) -> None:
    assert_fits(pairs_of(mesh))


def unreduced_pairs(mesh: Mesh, count: int | None = None) -> Pairs:
    """Return the pairs with an unreduced end."""
    pairs = pairs_of(mesh, count, ("invariant", "unreduced"))
    return [pair for pair in pairs if any(spec.partition.unreduced for spec in pair)]


@pytest.mark.parametrize(
    ("mesh", "most", "worst"), [*zip(TWO_AXES, (1.06, 1.04, 1.02), (2, 4 / 3, 8 / 7), strict=True)]
)
def test_unreduced_pairs_on_two_axes(mesh: Mesh, most: float, worst: float) -> None:
    values = ratios(unreduced_pairs(mesh))
    assert mean(values) <= most
    assert max(values) <= worst


@pytest.mark.parametrize(("mesh", "most"), [*zip(THREE_AXES, (1.12, 1.06), strict=True)])
def test_some_unreduced_pairs_on_three_axes(mesh: Mesh, most: float) -> None:
    values = ratios(unreduced_pairs(mesh, 400))
    assert mean(values) <= most
    assert max(values) <= 2


@pytest.mark.parametrize(
    ("mesh", "worst"), [*zip(TWO_AXES, (5 / 4, 7 / 6, 15 / 14), strict=True)], ids=str
)
def test_unreduced_pairs_on_two_axes_meet_the_bound_of_sent_bytes(mesh: Mesh, worst: float) -> None:
    """A rank must send what the transpose must receive, in every program."""
    values = []
    for src, dst in unreduced_pairs(mesh):
        ends = (src, dst), (dst.dual, src.dual)
        least = max(lower_bound(*pair).bytes_received for pair in ends)
        if least:
            prog = redistribute(src, dst, objective="bytes")
            values.append(prog.cost().bytes_received / least)
    assert sum(ratio > 1 + 1e-9 for ratio in values) <= 4
    assert max(values) <= worst + 1e-9


def test_pairs_that_stay_unreduced_meet_the_bound_on_two_axes() -> None:
    for mesh in TWO_AXES:
        stay = [
            (src, dst)
            for src, dst in unreduced_pairs(mesh)
            if src.partition.unreduced == dst.partition.unreduced
        ]
        assert all(ratio == 1 for ratio in ratios(stay))


# -- transitions by name -------------------------------------------------------------------

GRID = Mesh(x=4, y=4)
ALL = frozenset(GRID.axes)


@pytest.mark.parametrize("objective", ["time", "bytes"])
@pytest.mark.parametrize(
    ("src", "dst", "most"),
    [
        (P(("x", "y")), P("y"), 1024),
        (P(("x", "y")), P(("y", "x")), 256),
        (P("x", "y"), P("y", "x"), 256),
        (P("x"), P("y"), 1024),
        (P(unreduced=ALL), P(), 7680),
        (P("y", unreduced={"x"}), P("x", "y"), 1024),
        (P(("x", "y")), P(None, ("x", "y")), 240),
        (P(("y", "x")), P(("x", "y")), 256),
        (P("y", unreduced={"x"}), P(("x", "y")), 1024),
        (P("y", unreduced={"x"}), P("y"), 1792),
        (P("x", "y"), P(None, ("x", "y")), 448),
        (P(unreduced={"x"}), P("y"), 1536),
        (P(unreduced=ALL), P("y"), 4608),
    ],
    ids=str,
)
def test_bytes_of_common_transitions(src: P, dst: P, most: int, objective: str) -> None:
    ends = (Spec(GRID, p, shape=(1024, 1024), dtype=torch.float32) for p in (src, dst))
    assert redistribute(*ends, objective=objective).cost().bytes_received <= most * 1024


REMATERIALIZED = [
    # XLA replicates the tensor first ("involuntary full rematerialization").
    (Mesh(x=4, y=2), P("y", None, "x"), P(None, ("x", "y"), None), (64, 64, 64)),
    (Mesh(x=2, y=2), P(("x", "y")), P("x", None, None, "y"), (64, 8, 8, 64)),
]


@pytest.mark.parametrize("exclude", [(), (Exchange,)], ids=str)
@pytest.mark.parametrize(("mesh", "src", "dst", "shape"), REMATERIALIZED, ids=str)
def test_transitions_that_xla_rematerializes_are_not_gathered(
    mesh: Mesh, src: P, dst: P, shape: tuple[int, ...], exclude: Sequence[type]
) -> None:
    a, b = (Spec(mesh, p, shape=shape, dtype=torch.float32) for p in (src, dst))
    for ends in ((a, b), (b, a)):
        prog = redistribute(*ends, exclude=exclude)
        assert not any(isinstance(step, AllGather | AllReduce) for step in prog.steps)
        assert prog.cost().peak_memory == lower_bound(*ends).peak_memory


# -- compared with DTensor ------------------------------------------------------------------------

PRESETS = [Topology.node(), Topology.cluster()]


def assert_not_slower(pairs: Pairs) -> int:
    """Check that no plan of DTensor is faster on either topology; return how many it has."""
    count = 0
    for (src, dst), planner, flattened in itertools.product(
        pairs, dtensor_plans.PLANNERS, (False, True)
    ):
        other = dtensor_plans.plan(src, dst, planner, flattened=flattened).program
        if other is None:
            continue
        count += 1
        for topology in PRESETS:
            ours = redistribute(src, dst, topology=topology)
            time = other.cost(topology).time
            assert ours.cost(topology).time <= time * (1 + 1e-9), (str(ours), str(other))
    return count


def square_pairs(mesh: Mesh, length: int, count: int | None = None) -> Pairs:
    """Return pairs of sharded, replicated and partial specs of square matrices."""
    specs = spec_grid.all_specs(
        mesh, (length, length), ("invariant", "unreduced"), dtype=torch.float32
    )
    if count is None:
        return list(itertools.product(specs, specs))
    return spec_grid.sample_pairs(specs, count, seed=5, fixed=True)


@spec_grid.one_in(5)
@pytest.mark.parametrize("length", [16, 4096])
def test_never_slower_than_dtensor_on_two_axes(length: int, every: int) -> None:
    assert assert_not_slower(square_pairs(Mesh(x=2, y=4), length)[::every]) > 800 // every


def test_some_plans_are_not_slower_than_dtensor_on_three_axes() -> None:
    assert assert_not_slower(square_pairs(Mesh(x=2, y=2, z=2), 1024, 30)) > 50


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(8))
def test_never_slower_than_dtensor_on_three_axes(part: int) -> None:
    assert assert_not_slower(square_pairs(Mesh(x=2, y=2, z=2), 1024)[part::8]) > 2000


# -- partial reductions and sub-axes -------------------------------------------------------


def assert_right(prog: Program) -> None:
    """Check a program, interpreted and run, against slices of the global tensor."""
    x = spec_grid.random_locals(prog.src, 3)
    want = spec_grid.global_of(prog.src, x)
    for shards in (reference.simulate(prog, x), prog(x)):
        assert torch.equal(spec_grid.global_of(prog.dst, shards), want)
    y = spec_grid.random_locals(prog.dst.dual, 4)
    back = reference.simulate(prog.T, y)
    outputs = reference.simulate(prog, x)
    assert spec_grid.pairing(prog.dst, outputs, y) == spec_grid.pairing(prog.src, x, back)


def step_types(steps: Iterable[Step]) -> list[type]:
    return [type(step) for step in steps]


def test_replicas_share_a_reduction() -> None:
    mesh, shape = Mesh(x=4, y=2), (32, 48)
    src = Spec(mesh, P(unreduced={"x"}), shape=shape, dtype=torch.int64)
    dst = Spec(mesh, P(), shape=shape, dtype=torch.int64)
    nbytes = 32 * 48 * 8
    prog = redistribute(src, dst, objective="bytes")
    assert step_types(prog.steps) == [AllSlice, AllReduce, AllGather]
    assert prog.cost().bytes_received == lower_bound(src, dst).bytes_received == nbytes * 5 // 4
    alone = redistribute(src, dst, objective="bytes", exclude=(AllSlice, Exchange))
    assert alone.cost().bytes_received == nbytes * 3 // 2
    assert_right(prog)


@pytest.mark.parametrize(("ranks", "inside"), [(16, 8), (4, 2), (12, 4)])
def test_reduction_across_nodes_is_hierarchical(ranks: int, inside: int) -> None:
    mesh, shape = Mesh(dp=ranks), (16 * ranks, 4096)
    cluster = Topology(outer=Link(2.7e-6, 45e9 / inside), node_size=inside)  # one card per node
    src = Spec(mesh, P(unreduced={"dp"}), shape=shape, dtype=torch.int64)
    prog = redistribute(src, Spec(mesh, P(), shape=shape, dtype=torch.int64), topology=cluster)
    assert step_types(prog.steps) == [Remesh, ReduceScatter, AllReduce, AllGather, Remesh]
    fine = Mesh(dp_0=ranks // inside, dp_1=inside)
    assert prog.steps[0] == Remesh(fine, P(unreduced=fine.axes))
    assert [step.axes for step in prog.steps[1:4]] == [("dp_1",), ("dp_0",), ("dp_1",)]  # type: ignore[union-attr]
    flat = redistribute(prog.src, prog.dst, topology=cluster, exclude=(Remesh,))
    assert prog.cost(cluster).time < flat.cost(cluster).time * 0.95


def test_one_launch_reduces_across_nodes_where_each_device_has_a_card() -> None:
    src = Spec(Mesh(dp=16), P(unreduced={"dp"}), shape=(256, 4096))
    prog = redistribute(src, src.replace(partition=P()), topology=Topology.dgx_h100())
    assert step_types(prog.steps) == [AllReduce]


@pytest.mark.parametrize(("ranks", "inside"), [(16, 8), (4, 2), (12, 4)])
def test_hierarchical_reduction_is_right(ranks: int, inside: int) -> None:
    # Wires are so slow that a small tensor is reduced hierarchically too.
    slow = Topology(outer=Link(1e-6, 1e6), node_size=inside)
    mesh, shape = Mesh(dp=ranks), (2 * ranks, 3)
    src = Spec(mesh, P(unreduced={"dp"}), shape=shape, dtype=torch.int64)
    prog = redistribute(src, Spec(mesh, P(), shape=shape, dtype=torch.int64), topology=slow)
    assert step_types(prog.steps)[0] == step_types(prog.steps)[-1] == Remesh
    assert_right(prog)
