"""Plans against an oracle: the complete graph of all layouts and all single steps.

Laws of distances: no detour is cheaper than the plan, and the transpose costs the same.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.plan.search.astar import search
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from fshard.program.steps import AllToAll, Exchange
from tests.helpers import plan_oracle, spec_grid

TOPOLOGIES = [None, Topology.node(), Topology.cluster(4)]
NAMES = ["bytes", "node", "cluster"]
MESHES = [Mesh(x=2, y=4), Mesh(x=4, y=4), Mesh(x=2, y=3)]
SLOW_MESHES = [MESHES[0], *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES[1:])]
SHAPES = [(48, 48), (4800, 4800)]
EXACT = 1e-9
ALL, COLLECTIVES = frozenset[type](), frozenset({Exchange})

Costs = dict[tuple[Spec, Spec], float]


def plan_cost(
    src: Spec, dst: Spec, topology: Topology | None, exclude: frozenset[type] = ALL
) -> float:
    result = search(src, dst, topology, exclude=exclude)
    assert result is not None
    steps, total = result
    assert total == pytest.approx(
        plan_oracle.steps_cost(topology, steps, src), rel=EXACT, abs=1e-12
    )
    return total


# -- the oracle ----------------------------------------------------------------------------


def gaps(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None, exclude: frozenset[type]
) -> list[float]:
    """Return cost ratios above 1 of plans to cheapest paths, for all pairs of the oracle."""
    specs, paths = plan_oracle.paths(mesh, shape, topology, exclude)
    ratios = []
    for src, dst in itertools.product(specs, specs):
        planned, least = plan_cost(src, dst, topology, exclude), paths.cost(src, dst)
        assert planned >= least * (1 - EXACT), (src, dst)
        ratios.append(planned / least if least else 1.0)
        assert least or not planned
    return [ratio for ratio in ratios if ratio > 1 + EXACT]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_path_is_cheaper(mesh: Mesh, shape: tuple[int, ...], topology: Topology | None) -> None:
    assert gaps(mesh, shape, topology, ALL) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize(
    "topology", [Topology.tpu_v5e((4, 4)), Topology.tpu_v4((4, 4, 4))], ids=["grid", "torus"]
)
def test_no_path_on_a_torus_is_cheaper(topology: Topology, shape: tuple[int, ...]) -> None:
    ratios = gaps(Mesh(x=4, y=4), shape, topology, ALL)
    if shape == SHAPES[1]:
        assert ratios == []
    # Without launch costs two hops along one axis each may be cheaper than one along both.
    assert len(ratios) <= 16
    assert max(ratios, default=1.0) < 1.04


@pytest.mark.parametrize("exchange", [0.5e9, 4e9])
def test_plans_on_measured_links_are_near_the_cheapest(exchange: float) -> None:
    """Exchanges are slower or faster than gathers, and both axes together have another link."""
    links = {"x": Link(3e-4, 1e9, exchange), "y": Link(2e-4, 8e8), "x,y": Link(1e-3, 9e8, exchange)}
    topology = Topology.of(links, launch=2e-4, memory=6e9, message=1e-5)
    ratios = gaps(Mesh(x=2, y=4), SHAPES[1], topology, ALL)
    assert len(ratios) <= 2
    assert max(ratios, default=1.0) < 1.11


def test_plans_over_axes_that_add_their_links_are_near_the_cheapest() -> None:
    """Both axes together are faster than each: moves over both replace those over one."""
    link = Link(1e-6, 1e9)
    links = {"x": link, "y": link, "x,y": Link(1e-6, 2e9)}
    ratios = gaps(Mesh(x=2, y=4), SHAPES[1], Topology.of(links, launch=0.0, memory=1e13), ALL)
    assert max(ratios, default=1.0) < 1.001


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", SLOW_MESHES, ids=str)
def test_plans_without_exchange_are_near_the_cheapest(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None
) -> None:
    ratios = gaps(mesh, shape, topology, COLLECTIVES)
    if topology is None:
        assert ratios == []
    # Only the goal's orders of axes are tried, and few axes become unreduced.
    assert len(ratios) <= 2
    assert max(ratios, default=1) <= 1.21


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_plans_of_permutations_are_near_the_cheapest(mesh: Mesh, topology: Topology | None) -> None:
    ratios = gaps(mesh, (4800, 4800), topology, frozenset({Exchange, AllToAll}))
    # Layouts are permuted as they are: no copies are made inside of the nodes first.
    most = {"bytes": 1, "node": 1.21, "cluster": 2}
    assert max(ratios, default=1) <= most[topology.name if topology else "bytes"]


# -- laws ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def distances(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None, exclude: frozenset[type]
) -> tuple[Sequence[Spec], Costs]:
    """Return the costs of all pairs of specs, in all states."""
    specs = spec_grid.all_specs(mesh, shape, dtype=torch.float32)
    pairs = list(itertools.product(specs, specs))
    return specs, {(a, b): plan_cost(a, b, topology, exclude) for a, b in pairs}


def detours(specs: Sequence[Spec], costs: Costs, *, unreduced: bool) -> list[float]:
    """Return cost ratios of plans to cheaper detours by a third spec (unreduced or not)."""
    ratios = []
    for b in specs:
        if bool(b.partition.unreduced) == unreduced:
            for a, c in itertools.product(specs, specs):
                detour = costs[a, b] + costs[b, c]
                if costs[a, c] > detour * (1 + EXACT) + 1e-15:
                    ratios.append(costs[a, c] / detour)
    return ratios


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", [SLOW_MESHES[0], SLOW_MESHES[2]], ids=str)
def test_no_detour_is_cheaper(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs, costs = distances(mesh, shape, topology, ALL)
    assert detours(specs, costs, unreduced=False) == []
    # Needless unreduced layouts are not tried: for tiny tensors they would save some copies.
    through = detours(specs, costs, unreduced=True)
    assert max(through, default=1) <= (1.01 if topology and shape == SHAPES[0] else 1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
def test_no_detour_without_exchange_is_much_cheaper(
    shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs, costs = distances(MESHES[0], shape, topology, COLLECTIVES)
    near = detours(specs, costs, unreduced=False)
    assert max(near, default=1) <= (1.1 if topology else 1)
    # Embedding and reduce-scatter are one launch, which is cheapest if only latency counts.
    through = detours(specs, costs, unreduced=True)
    most = 1.9 if topology else 1.00001
    assert max(through, default=1) <= (most if shape == SHAPES[0] else 1)


STATES = [("invariant",), ("invariant", "reduced", "unreduced")]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("states", STATES, ids=["sharded", "any"])
def test_detours_on_three_axes(
    states: Sequence[str], shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs = spec_grid.all_specs(Mesh(x=2, y=2, z=2), shape, states, dtype=torch.float32)
    costs, worst = dict[tuple[Spec, Spec], float](), 1.0
    for seed in range(3):
        some = random.Random(seed).sample(specs, 7)
        costs |= {(a, b): plan_cost(a, b, topology) for a, b in itertools.product(some, some)}
        for a, b, c in itertools.product(some, some, some):
            detour = costs[a, b] + costs[b, c]
            if costs[a, c] > detour * (1 + EXACT) + 1e-15:
                worst = max(worst, costs[a, c] / detour)
    # On several nodes two exchanges may be best, by a layout that is far from both ends.
    assert worst <= (1.13 if topology and topology.name == "cluster" else 1)


def uses_every_axis(spec: Spec) -> bool:
    """Return True if no axis is invariant."""
    return len(spec.partition.axes) == len(spec.mesh.axes)


def asymmetries(pairs: Iterable[tuple[Spec, Spec]], topology: Topology | None) -> list[float]:
    """Return cost ratios above 1 of pairs to their transposes, either way."""
    ratios = []
    for src, dst in pairs:
        forward, backward = plan_cost(src, dst, topology), plan_cost(dst.dual, src.dual, topology)
        if forward != pytest.approx(backward, rel=EXACT, abs=1e-15):
            ratios.append(max(forward / backward, backward / forward))
    return ratios


def pairs_that_use_every_axis(mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[Spec, Spec]]:
    """Return all 324 pairs without invariant axes on a mesh of two axes."""
    specs = list(filter(uses_every_axis, spec_grid.all_specs(mesh, shape, dtype=torch.float32)))
    assert len(specs) == 18
    return list(itertools.product(specs, specs))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bytes_equal_the_transpose(mesh: Mesh, shape: tuple[int, ...]) -> None:
    assert asymmetries(pairs_that_use_every_axis(mesh, shape), None) == []


@pytest.mark.parametrize("shape", [(64, 64), (32, 32, 32)], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(x=2, y=2, z=2), Mesh(x=4, y=2, z=2)], ids=str)
def test_bytes_on_three_axes_equal_the_transpose(mesh: Mesh, shape: tuple[int, ...]) -> None:
    specs = list(filter(uses_every_axis, spec_grid.all_specs(mesh, shape, dtype=torch.float32)))
    assert asymmetries(spec_grid.sample_pairs(specs, 120, seed=6), None) == []


def unreduced_end(src: Spec, dst: Spec) -> bool:
    return bool(src.partition.unreduced or dst.partition.unreduced)


FREE_COPIES = [
    replace(topology, memory=1e30, kernel=0.0) for topology in TOPOLOGIES if topology is not None
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", FREE_COPIES, ids=["node", "cluster"])
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", SLOW_MESHES, ids=str)
def test_seconds_on_wires_equal_the_transpose(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology
) -> None:
    # Copies differ: a slice reads a part, its transpose writes all elements.
    pairs = pairs_that_use_every_axis(mesh, shape)
    both = [(a, b) for a, b in pairs if unreduced_end(a, b) and unreduced_end(b.dual, a.dual)]
    # Replicas share sends, sums are made in one place: for small tensors messages count.
    ratios = asymmetries(both, topology)
    assert max(ratios, default=1) <= (1.04 if shape == SHAPES[0] else 1)
    # If nothing is to be reduced no zeros are added, unlike in some transposes.
    one_way = asymmetries([pair for pair in pairs if pair not in both], topology)
    assert len(one_way) <= 24
    assert max(one_way, default=1) <= 1.11


@pytest.mark.sampled(5)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", SLOW_MESHES, ids=str)
def test_both_directions_between_sharded_specs_cost_the_same(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs = spec_grid.all_specs(mesh, shape, ("invariant",), dtype=torch.float32)
    for src, dst in itertools.combinations(filter(uses_every_axis, specs), 2):
        forward, backward = plan_cost(src, dst, topology), plan_cost(dst, src, topology)
        assert forward == pytest.approx(backward, rel=EXACT)
