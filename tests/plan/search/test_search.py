"""The search: edges, bounds and unreachable goals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.plan.search.astar import search
from fshard.plan.search.collective_edges import CollectiveEdges
from fshard.plan.search.exchange_edges import Edge
from fshard.plan.search.problem import SearchProblem
from fshard.plan.search.reachability import TRANSITIONS, is_unreachable
from fshard.plan.search.search_layout import SearchLayout
from fshard.plan.search.size_tables import shared_size_tables
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.infer import infer
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    CollectivePermute,
    Exchange,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from tests.helpers.plan_oracle import step_cost
from tests.helpers.plans import (
    SMALL,
    SMALL_SPECS,
    any_pair,
)
from tests.helpers.spec_grid import one_in

# -- the search itself ---------------------------------------------------------------------


TOPOLOGIES = [Topology.node(), Topology.cluster(3), None]


def assert_edges(src: Spec, dst: Spec, topology: Topology | None, *, direct: bool = False) -> None:
    """Check that every edge out of `src` is a step of the stated result and cost."""
    problem = SearchProblem(src, dst, topology, None, frozenset())
    state = SearchLayout.of(src)
    for cost, make_step, new in CollectiveEdges(problem, direct=direct).of(state):
        step: Step = make_step()
        after = infer(step, src)
        assert after == problem.spec(new)
        assert cost == pytest.approx(step_cost(topology, step, src, after), rel=1e-12, abs=1e-15)
        assert not is_unreachable(src, after, TRANSITIONS.keys() - {type(step)})


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["node", "cluster", "bytes"])
@one_in(5)
def test_edges_are_valid_steps_with_their_costs(topology: Topology | None, every: int) -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS[::every]):
        assert_edges(src, dst, topology)
        assert_edges(src, dst, topology, direct=True)


@given(any_pair(), st.sampled_from([Topology.node(), Topology.cluster(2), None]), st.booleans())
def test_edges_of_uneven_shards_are_valid_steps_with_their_costs(
    pair: tuple[Spec, Spec], topology: Topology | None, direct: bool
) -> None:
    assert_edges(*pair, topology, direct=direct)


def assert_bounds(src: Spec, dst: Spec, topology: Topology | None) -> None:
    """Check that the remaining cost is never overestimated, at every layout of the program."""
    problem = SearchProblem(src, dst, topology, None, frozenset())
    spec, steps = src, search(src, dst, topology)
    assert steps is not None
    left = steps[1]
    for step in steps[0]:
        assert problem.bound(SearchLayout.of(spec)) <= left * (1 + 1e-9) + 1e-15
        after = infer(step, spec)
        left -= step_cost(topology, step, spec, after)
        spec = after
    assert left == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["node", "cluster", "bytes"])
@one_in(4)
def test_bounds_never_exceed_the_remaining_cost(topology: Topology | None, every: int) -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS[::every]):
        assert_bounds(src, dst, topology)


@given(any_pair(), st.sampled_from([Topology.node(), Topology.cluster(2), None]))
def test_bounds_of_uneven_shards_never_exceed_the_remaining_cost(
    pair: tuple[Spec, Spec], topology: Topology | None
) -> None:
    assert_bounds(*pair, topology)


@pytest.mark.parametrize(
    ("src", "dst", "memory", "exclude"),
    [
        ("f32[12@x]", "f32[12]", None, (AllGather, ShardedToUnreduced, Exchange)),
        ("f32[12@y]", "f32[12@x]", None, (AllGather, ShardedToUnreduced, Exchange)),
        ("f32[12@x,12]", "f32[12,12@x]", None, (AllGather, AllToAll, Exchange)),
        ("f32[12]{unreduced: x}", "f32[12@x]", None, (AllReduce, ReduceScatter, Exchange)),
        ("f32[12]{reduced: x}", "f32[12]", None, (ReducedToInvariant, ReplicatedToUnreduced,
                                                  AllSlice, ShardedToUnreduced, Exchange)),
        ("f32[12]", "f32[12@x]", 47, ()),
        ("f32[12@x]", "f32[12]", 47, ()),
    ],
)  # fmt: skip
def test_unreachable_goals_are_rejected_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
    src: str,
    dst: str,
    memory: int | None,
    exclude: Sequence[type],
) -> None:
    """A search would visit all layouts before it ends without the goal."""
    monkeypatch.setattr(CollectiveEdges, "of", lambda *_: pytest.fail("a search"))
    ends = parse(src, SMALL), parse(dst, SMALL)
    assert search(*ends, Topology.node(), memory, frozenset(exclude)) is None


def test_searches_that_cannot_end_look_at_each_layout_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[tuple[bool, SearchLayout]]()

    def record(self: CollectiveEdges, layout: SearchLayout) -> Iterator[Edge]:
        searched.append((self.direct, layout))
        return edges(self, layout)

    edges = CollectiveEdges.of
    monkeypatch.setattr(CollectiveEdges, "of", record)
    mesh = Mesh(a=2, b=2, c=2, d=2)
    src, dst = (parse(f"f32[17@({axes}):chunk]", mesh) for axes in ("b,a,c", "d"))
    excluded = frozenset([Exchange, AllToAll, CollectivePermute])
    assert search(src, dst, Topology.node(), max_local_nbytes(dst), excluded) is None
    assert len(searched) == len(set(searched)) > 0


def test_orders_of_axes_are_permuted_once() -> None:
    mesh = Mesh(x=2, y=2, z=2)
    src, goal = (parse(f"f32[16@({axes})]", mesh) for axes in ("x,y,z", "z"))
    problem = SearchProblem(src, goal, Topology.node(), None, frozenset([Exchange, AllToAll]))
    edges = CollectiveEdges(problem, direct=False)
    _, step, after = next(edges.permutations(problem.start))
    assert len([*edges.reordered(problem.start)]) == math.factorial(3)
    edges.previous = {after: (problem.start, step)}
    assert not [*edges.reordered(after)]


def test_steps_that_cost_enough_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[bool]()

    def count(self: CollectiveEdges, layout: SearchLayout) -> Iterator[Edge]:
        searched.append(self.direct)
        return edges(self, layout)

    edges = CollectiveEdges.of
    monkeypatch.setattr(CollectiveEdges, "of", count)
    ends = [parse(f"f32[7@{axes}:chunk,9]", Mesh(x=2, y=2)) for axes in ("(x,y)", "(y,x)")]
    cheapest = search(*ends, Topology.node())
    assert cheapest is not None
    assert not all(searched)
    searched.clear()
    assert search(*ends, Topology.node(), enough=cheapest[1]) is not None
    first = search(*ends, Topology.node(), enough=math.inf)
    assert first is not None
    assert first[1] >= cheapest[1]
    assert searched
    assert all(searched)


def test_searches_in_a_block_share_size_tables() -> None:
    src = parse("f32[7@x:chunk]", Mesh(x=4))
    problem = partial(SearchProblem, src, src, None, None, frozenset())
    with shared_size_tables():
        assert problem().sizes is problem().sizes
    assert problem().sizes is not problem().sizes


def test_sharded_to_unreduced_is_one_local_step() -> None:
    prog = redistribute(parse("f32[12@x]", SMALL), parse("f32[12]{unreduced: x}", SMALL))
    assert prog.steps == (ShardedToUnreduced("x", 0),)
