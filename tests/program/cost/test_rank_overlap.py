"""`RankOverlap` in searches, compared with the traffic of specs, on shards of any sizes."""

import itertools
import random
from functools import partial

import pytest

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.plan.search.astar import search
from fshard.plan.search.problem import SearchProblem
from fshard.plan.search.search_layout import exchange_to
from fshard.program.cost.rank_overlap import MAX_RANKS, RankOverlap, index_of_largest
from fshard.program.cost.traffic import traffic
from fshard.program.exchange_boxes import reduction_axes
from fshard.program.steps import Exchange

MESHES = [Mesh(x=4, y=2), Mesh(x=2, y=3, z=2), Mesh(x=1, y=2, z=4)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_search_traffic_equals_spec_traffic(mesh: Mesh) -> None:
    draw = random.Random(0)
    for _ in range(150):
        src, dst = _spec(draw, mesh, addends=True), _spec(draw, mesh)
        step = Exchange(dst.partition, dst.sizes)
        problem = SearchProblem(src, dst, None, None, frozenset())
        num_partials = mesh.axis_size(tuple(src.partition.unreduced))
        if not problem.even:
            ends = problem.start, problem.goal
            moved = problem.traffic(partial(exchange_to, problem.goal), (), *ends, num_partials)
            assert moved == traffic(step, src, dst), f"{src} -> {dst}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("lengths", [(12, 10), (48, 48)], ids=["uneven", "even"])
def test_search_traffic_of_converted_axes_equals_spec_traffic(
    mesh: Mesh, lengths: tuple[int, int]
) -> None:
    draw = random.Random(2)
    for _ in range(100):
        src, dst = (_spec(draw, mesh, addends=True) for _ in range(2))
        p, q = src.partition, dst.partition
        may = {*p.unreduced, *itertools.chain(*p.dims)}
        dst = dst.replace(partition=PartitionSpec(*q.partitions, unreduced=may & {*q.unreduced}))
        if lengths == (48, 48):
            src, dst = (Spec(mesh, spec.partition, shape=lengths) for spec in (src, dst))
        for a, b in ((src, dst), (dst.dual, src.dual)):
            problem, step = (
                SearchProblem(a, b, None, None, frozenset()),
                Exchange(b.partition, b.sizes),
            )
            num_partials = mesh.axis_size(reduction_axes(a, b))
            converted = problem.converted_axes(problem.start, problem.goal)
            ends = problem.start, problem.goal
            by_rank = problem.exchange_traffic_by_rank(*ends, num_partials, converted)
            moved = traffic(step, a, b)
            assert (by_rank.sent, by_rank.received) == (moved.sent, moved.received), f"{a} -> {b}"
            closed = problem.exchange_traffic(problem.start, problem.goal, num_partials, converted)
            assert not problem.even or closed in (None, moved), f"{a} -> {b}"


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_bound_is_at_most_the_cost_of_the_plan(mesh: Mesh) -> None:
    draw = random.Random(1)
    for _ in range(25):
        src, dst = _spec(draw, mesh, addends=True), _spec(draw, mesh)
        problem = SearchProblem(src, dst, None, None, frozenset())
        plan = search(src, dst, None)
        assert plan is not None
        assert problem.bound(problem.start) <= plan[1], f"{src} -> {dst}"


def test_ranks_of_large_meshes_are_sampled() -> None:
    few = RankOverlap(Mesh(x=8, y=8), (64,))
    many = RankOverlap(Mesh(x=1024, y=1024), (2**20,))
    assert few.complete
    assert few.count == MAX_RANKS
    assert not many.complete
    assert many.count <= MAX_RANKS
    uneven = (2**20 - 1023, *(1,) * 1023)
    lacks = many.max_lack(((("x",), uneven),), ((("y",), None),))
    assert 0 < lacks <= 1024


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_sample_has_the_rank_with_the_largest_shard(mesh: Mesh) -> None:
    draw = random.Random(2)
    for _ in range(50):
        spec = _spec(draw, mesh)
        index = index_of_largest(spec)
        ranks = (spec.local_nbytes(rank) for rank in mesh.devices)
        assert spec.local_nbytes(mesh.devices[index]) == max(ranks), spec
    large = Mesh(x=64, y=64)
    assert RankOverlap(large, (8,), (5, 7)).count == RankOverlap(large, (8,)).count + 2


def test_sampled_traffic_of_the_largest_shard_is_exact() -> None:
    """On 2,048 ranks the rank with the largest shards is the busiest; 64 others are sampled."""
    mesh = Mesh(a=8, b=8, c=8, d=4)
    src = Spec(mesh, PartitionSpec("a", "b"), shape=(100, 90), uneven="chunk")
    dst = Spec(mesh, PartitionSpec(None, ("c", "a")), shape=(100, 90), uneven="chunk")
    problem = SearchProblem(src, dst, None, None, frozenset())
    step = Exchange(dst.partition, dst.sizes)
    ends = problem.start, problem.goal
    sampled = problem.traffic(partial(exchange_to, problem.goal), (), *ends, 1)
    assert sampled.received == traffic(step, src, dst).received


def _spec(draw: random.Random, mesh: Mesh, *, addends: bool = False) -> Spec:
    """Return a random layout of 12 by 10 elements, mostly of uneven shards."""
    shape = (12, 10)
    axes: dict[object, list[str]] = {0: [], 1: [], "invariant": [], "unreduced": []}
    for axis in draw.sample(mesh.axes, len(mesh.axes)):
        axes[draw.choice([*axes][: 4 if addends else 3])].append(axis)
    sizes = {}
    for dim, size in enumerate(shape):
        n = mesh.axis_size(tuple(axes[dim]))
        if n > 1:
            stops = [0, *sorted(draw.choices(range(size + 1), k=n - 1)), size]
            sizes[dim] = tuple(b - a for a, b in itertools.pairwise(stops))
    partition = PartitionSpec(
        tuple(axes[0]), tuple(axes[1]), unreduced=frozenset(axes["unreduced"])
    )
    return Spec(mesh, partition, shape=shape, sizes=sizes)
