"""Plans against an oracle: the complete graph of all layouts and of every single step.

Laws of a distance: no way round is cheaper than the plan, and the way back costs the same.
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
from fshard.program.cost.topology import Topology
from fshard.program.steps import AllToAll, Exchange
from tests.helpers import plan_oracle, spec_grid

TOPOLOGIES = [None, Topology.node(), Topology.cluster(4)]
NAMES = ["bytes", "node", "cluster"]
MESHES = [Mesh(x=2, y=4), Mesh(x=4, y=4), Mesh(x=2, y=3)]
SHAPES = [(48, 48), (4800, 4800)]
EXACT = 1e-9
ALL, COLLECTIVES = frozenset[type](), frozenset({Exchange})

Weights = dict[tuple[Spec, Spec], float]


def weight(
    src: Spec, dst: Spec, topology: Topology | None, exclude: frozenset[type] = ALL
) -> float:
    found = search(src, dst, topology, exclude=exclude)
    assert found is not None
    steps, total = found
    assert total == pytest.approx(plan_oracle.weigh_all(topology, steps, src), rel=EXACT, abs=1e-12)
    return total


# -- the oracle ----------------------------------------------------------------------------


def gaps(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None, exclude: frozenset[type]
) -> list[float]:
    """Of all pairs of sharded, invariant and unreduced specs how much heavier a plan is."""
    specs, paths = plan_oracle.paths(mesh, shape, topology, exclude)
    found = []
    for src, dst in itertools.product(specs, specs):
        mine, least = weight(src, dst, topology, exclude), paths.weight(src, dst)
        assert mine >= least * (1 - EXACT), (src, dst)
        found.append(mine / least if least else 1.0)
        assert least or not mine
    return [gap for gap in found if gap > 1 + EXACT]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_nothing_is_cheaper(mesh: Mesh, shape: tuple[int, ...], topology: Topology | None) -> None:
    assert gaps(mesh, shape, topology, ALL) == []


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_collectives_alone(mesh: Mesh, shape: tuple[int, ...], topology: Topology | None) -> None:
    found = gaps(mesh, shape, topology, COLLECTIVES)
    if topology is None:
        assert found == []
    # Of orders of axes on the way only the goal's are tried, and few axes become addends.
    assert len(found) <= 2
    assert max(found, default=1) <= 1.21


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_permutations_do_what_is_left_out(mesh: Mesh, topology: Topology | None) -> None:
    found = gaps(mesh, (4800, 4800), topology, frozenset({Exchange, AllToAll}))
    # Layouts are permuted as they are: copies are not first made inside of the nodes.
    most = {"bytes": 1, "node": 1.21, "cluster": 2}
    assert max(found, default=1) <= most[topology.name if topology else "bytes"]


# -- laws ----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def distances(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None, exclude: frozenset[type]
) -> tuple[Sequence[Spec], Weights]:
    """The weights of all pairs of specs, in all states."""
    specs = spec_grid.all_specs(mesh, shape, dtype=torch.float32)
    pairs = list(itertools.product(specs, specs))
    return specs, {(a, b): weight(a, b, topology, exclude) for a, b in pairs}


def detours(specs: Sequence[Spec], weights: Weights, *, addends: bool) -> list[float]:
    """How much cheaper than the plan any way is that goes by a third spec (unreduced or not)."""
    found = []
    for b in specs:
        if bool(b.partition.unreduced) == addends:
            for a, c in itertools.product(specs, specs):
                around = weights[a, b] + weights[b, c]
                if weights[a, c] > around * (1 + EXACT) + 1e-15:
                    found.append(weights[a, c] / around)
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[2]], ids=str)
def test_no_way_round_is_cheaper(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs, weights = distances(mesh, shape, topology, ALL)
    assert detours(specs, weights, addends=False) == []
    # Addends nobody asked for are not tried: of tiny tensors they would save some copies.
    through = detours(specs, weights, addends=True)
    assert max(through, default=1) <= (1.01 if topology and shape == SHAPES[0] else 1)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
def test_no_way_round_of_collectives_is_much_cheaper(
    shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs, weights = distances(MESHES[0], shape, topology, COLLECTIVES)
    near = detours(specs, weights, addends=False)
    assert max(near, default=1) <= (1.1 if topology else 1)
    # To make addends and scatter them is one launch, where latency is all that counts.
    through = detours(specs, weights, addends=True)
    most = 1.9 if topology else 1.00001
    assert max(through, default=1) <= (most if shape == SHAPES[0] else 1)


STATES = [("invariant",), ("invariant", "reduced", "unreduced")]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("states", STATES, ids=["sharded", "any"])
def test_ways_round_on_three_axes(
    states: Sequence[str], shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs = spec_grid.all_specs(Mesh(x=2, y=2, z=2), shape, states, dtype=torch.float32)
    known, worst = dict[tuple[Spec, Spec], float](), 1.0
    for seed in range(8):
        some = random.Random(seed).sample(specs, 7)
        known |= {(a, b): weight(a, b, topology) for a, b in itertools.product(some, some)}
        for a, b, c in itertools.product(some, some, some):
            around = known[a, b] + known[b, c]
            if known[a, c] > around * (1 + EXACT) + 1e-15:
                worst = max(worst, known[a, c] / around)
    # On several nodes the best way may be two jumps, to layouts that are far from both ends.
    assert worst <= (1.13 if topology and topology.name == "cluster" else 1)


def is_busy(spec: Spec) -> bool:
    """Whether no axis is invariant."""
    return len(spec.partition.axes) == len(spec.mesh.axes)


def skews(pairs: Iterable[tuple[Spec, Spec]], topology: Topology | None) -> list[float]:
    """Of pairs without invariant axes how much more one way costs than its transpose, or back."""
    found = []
    for src, dst in pairs:
        there, back = weight(src, dst, topology), weight(dst.dual, src.dual, topology)
        if there != pytest.approx(back, rel=EXACT, abs=1e-15):
            found.append(max(there / back, back / there))
    return found


def busy_pairs(mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[Spec, Spec]]:
    """All 324 of two axes."""
    specs = list(filter(is_busy, spec_grid.all_specs(mesh, shape, dtype=torch.float32)))
    assert len(specs) == 18
    return list(itertools.product(specs, specs))


@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bytes_are_those_of_the_transpose(mesh: Mesh, shape: tuple[int, ...]) -> None:
    assert skews(busy_pairs(mesh, shape), None) == []


@pytest.mark.parametrize("shape", [(64, 64), (32, 32, 32)], ids=str)
@pytest.mark.parametrize("mesh", [Mesh(x=2, y=2, z=2), Mesh(x=4, y=2, z=2)], ids=str)
def test_bytes_on_three_axes_are_those_of_the_transpose(mesh: Mesh, shape: tuple[int, ...]) -> None:
    specs = list(filter(is_busy, spec_grid.all_specs(mesh, shape, dtype=torch.float32)))
    assert skews(spec_grid.sample_pairs(specs, 120, seed=6), None) == []


def adds(src: Spec, dst: Spec) -> bool:
    return bool(src.partition.unreduced or dst.partition.unreduced)


FREE_COPIES = [replace(topology, memory=1e30) for topology in TOPOLOGIES if topology is not None]


@pytest.mark.parametrize("topology", FREE_COPIES, ids=["node", "cluster"])
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_seconds_on_wires_are_those_of_the_transpose(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology
) -> None:
    # Copies are not alike: a slice reads a part, the addends that it came from are a whole.
    pairs = busy_pairs(mesh, shape)
    both = [(a, b) for a, b in pairs if adds(a, b) and adds(b.dual, a.dual)]
    # Replicas share what they send, sums are made in one place: of small tensors messages count.
    found = skews(both, topology)
    assert max(found, default=1) <= (1.04 if shape == SHAPES[0] else 1)
    # Where nothing is to be added no zeros are, though sums that are cut again go back so.
    one_way = skews([pair for pair in pairs if pair not in both], topology)
    assert len(one_way) <= 24
    assert max(one_way, default=1) <= 1.11


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=["small", "large"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_way_back_between_sharded_specs_costs_the_same(
    mesh: Mesh, shape: tuple[int, ...], topology: Topology | None
) -> None:
    specs = spec_grid.all_specs(mesh, shape, ("invariant",), dtype=torch.float32)
    for src, dst in itertools.combinations(filter(is_busy, specs), 2):
        there, back = weight(src, dst, topology), weight(dst, src, topology)
        assert there == pytest.approx(back, rel=EXACT)
