"""What ranks hold of what they need, against the traffic of specs, on shards of any sizes."""

import itertools
import random

import pytest

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.plan.search.astar import search
from fshard.plan.search.problem import SearchProblem
from fshard.program.cost.rank_overlap import MAX_RANKS, RankOverlap
from fshard.program.cost.traffic import traffic
from fshard.program.exchange_boxes import reduction_axes
from fshard.program.steps import Exchange

MESHES = [Mesh(x=4, y=2), Mesh(x=2, y=3, z=2), Mesh(x=1, y=2, z=4)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_exchanges_move_what_specs_say(mesh: Mesh) -> None:
    draw = random.Random(0)
    for _ in range(150):
        src, dst = _spec(draw, mesh, addends=True), _spec(draw, mesh)
        step = Exchange(dst.partition, dst.sizes)
        problem = SearchProblem(src, dst, None, None, frozenset())
        addends = mesh.axis_size(tuple(src.partition.unreduced))
        if not problem.even:
            found = problem.traffic(step, problem.start, problem.goal, addends)
            assert found == traffic(step, src, dst), f"{src} -> {dst}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("lengths", [(12, 10), (48, 48)], ids=["uneven", "even"])
def test_exchanges_that_make_addends_move_what_specs_say(
    mesh: Mesh, lengths: tuple[int, int]
) -> None:
    draw = random.Random(2)
    for _ in range(100):
        src, dst = (_spec(draw, mesh, addends=True) for _ in range(2))
        p, q = src.partition, dst.partition
        may = {*p.unreduced, *itertools.chain(*p.dims)}
        dst = dst.replace(partition=PartitionSpec(*q.partitions, unreduced=may & {*q.unreduced}))
        if lengths == (48, 48):
            src, dst = (Spec(mesh, each.partition, shape=lengths) for each in (src, dst))
        for a, b in ((src, dst), (dst.dual, src.dual)):
            problem, step = (
                SearchProblem(a, b, None, None, frozenset()),
                Exchange(b.partition, b.sizes),
            )
            addends = mesh.axis_size(reduction_axes(a, b))
            turned = problem.converted_axes(problem.start, problem.goal)
            found = problem.exchange_traffic_by_rank(problem.start, problem.goal, addends, turned)
            moved = traffic(step, a, b)
            assert (found.sent, found.received) == (moved.sent, moved.received), f"{a} -> {b}"
            closed = problem.exchange_traffic(problem.start, problem.goal, addends, turned)
            assert not problem.even or closed in (None, moved), f"{a} -> {b}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_program_weighs_less_than_the_bound_of_its_source(mesh: Mesh) -> None:
    draw = random.Random(1)
    for _ in range(25):
        src, dst = _spec(draw, mesh, addends=True), _spec(draw, mesh)
        problem = SearchProblem(src, dst, None, None, frozenset())
        found = search(src, dst, None)
        assert found is not None
        assert problem.bound(problem.start) <= found[1], f"{src} -> {dst}"


def test_of_many_ranks_some_stand_for_all() -> None:
    few = RankOverlap(Mesh(x=8, y=8), (64,))
    many = RankOverlap(Mesh(x=1024, y=1024), (2**20,))
    assert few.complete
    assert few.count == MAX_RANKS
    assert not many.complete
    assert many.count <= MAX_RANKS
    uneven = (2**20 - 1023, *(1,) * 1023)
    lacks = many.max_lack(((("x",), uneven),), ((("y",), None),))
    assert 0 < lacks <= 1024


def _spec(draw: random.Random, mesh: Mesh, *, addends: bool = False) -> Spec:
    """A layout of 12 by 10 elements, mostly of uneven shards."""
    shape = (12, 10)
    places: dict[object, list[str]] = {0: [], 1: [], "invariant": [], "unreduced": []}
    for axis in draw.sample(mesh.axes, len(mesh.axes)):
        places[draw.choice([*places][: 4 if addends else 3])].append(axis)
    sizes = {}
    for dim, size in enumerate(shape):
        n = mesh.axis_size(tuple(places[dim]))
        if n > 1:
            stops = [0, *sorted(draw.choices(range(size + 1), k=n - 1)), size]
            sizes[dim] = tuple(b - a for a, b in itertools.pairwise(stops))
    partition = PartitionSpec(
        tuple(places[0]), tuple(places[1]), unreduced=frozenset(places["unreduced"])
    )
    return Spec(mesh, partition, shape=shape, sizes=sizes)
