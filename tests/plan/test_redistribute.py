"""The planner, exhaustively: every pair of layouts, against slices of the global tensor.

All 25,281 pairs on a mesh of three axes (minutes): `python -m pytest -m slow tests/test_plan.py`.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import LINEAR
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.plan.search.astar import search
from fshard.plan.search.collective_edges import Moves
from fshard.plan.search.problem import Problem, State
from fshard.plan.search.reachability import WAYS, is_out_of_reach
from fshard.program import steps as steps_module
from fshard.program.cost.topology import Link, Topology
from fshard.program.infer import infer
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program, check
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from tests.helpers import reference, spec_grid, strategies
from tests.helpers.plan_oracle import weigh

SMALL = Mesh(x=2, y=3)
LARGE = Mesh(x=2, y=2, z=3)
SMALL_SHAPE, LARGE_SHAPE = (6, 12), (12, 24)

Shards = tuple[torch.Tensor, ...]


@functools.lru_cache(maxsize=1024)
def locals_of(spec: Spec, seed: int) -> Shards:
    """Random integer shards: free addends along unreduced axes, equal replicas elsewhere."""
    return spec_grid.random_locals(spec, seed)


@functools.lru_cache(maxsize=1024)
def value_of(spec: Spec, seed: int) -> torch.Tensor:
    return spec_grid.global_of(spec, locals_of(spec, seed))


def assert_simulated(prog: Program, x: Shards, want: Shards) -> None:
    """Ranks in threads come to what slices and concatenations come to."""
    made = prog(x)
    if any(isinstance(step, CollectivePermute) for step in prog.steps):
        # Which of several copies goes where is not promised; the value is.
        made, want = ((reference.global_value(each, prog.dst),) for each in (made, want))
    assert all(map(torch.equal, made, want))


def assert_right(prog: Program, src: Spec, dst: Spec) -> None:
    """The program leads from `src` to `dst`, keeps the global value, and has its adjoint."""
    assert (prog.src, prog.dst) == (src, dst)
    check(prog)
    x, want = locals_of(src, 1), value_of(src, 1)
    made = reference.simulate(prog, x)
    assert torch.equal(reference.global_value(made, dst), want)
    assert_simulated(prog, x, made)
    if not dst.partition.unreduced and "avg" not in dst.partition.reduced.values():
        for rank, shard in zip(dst.mesh.ranks, made, strict=True):
            assert torch.equal(shard, want[dst.index(rank)])
    adjoint = prog.T
    check(adjoint)
    assert (adjoint.src, adjoint.dst) == (dst.dual, src.dual)
    assert prog == adjoint.T
    y = locals_of(dst.dual, 2)
    back = reference.simulate(adjoint, y)
    assert_simulated(adjoint, y, back)
    assert spec_grid.pairing(dst, made, y) == spec_grid.pairing(src, x, back)


def assert_planned(src: Spec, dst: Spec) -> None:
    """A right program that communicates exactly where the bound says, and at least that much."""
    prog = redistribute(src, dst)
    assert_right(prog, src, dst)
    bound, cost = lower_bound(src, dst), prog.cost()
    assert prog.is_local == (bound.bytes_received == 0) == (cost.launches == 0)
    assert (cost.bytes_sent == 0) == (cost.bytes_received == 0) == prog.is_local
    assert cost.bytes_received >= bound.bytes_received
    assert cost.peak_memory >= bound.peak_memory


# -- every pair ----------------------------------------------------------------------------

SMALL_SPECS = spec_grid.all_specs(SMALL, SMALL_SHAPE)
LARGE_SPECS = spec_grid.all_specs(LARGE, LARGE_SHAPE)


def test_there_are_as_many_specs_as_counted_by_hand() -> None:
    assert len(set(SMALL_SPECS)) == 27
    assert len(set(LARGE_SPECS)) == 159


@pytest.mark.parametrize("src", SMALL_SPECS, ids=str)
def test_every_pair_on_two_axes(src: Spec) -> None:
    for dst in SMALL_SPECS:
        assert_planned(src, dst)


@pytest.mark.parametrize("part", range(3))
def test_some_pairs_on_three_axes(part: int) -> None:
    for src, dst in spec_grid.sample_pairs(LARGE_SPECS, 300, seed=2)[part::3]:
        assert_planned(src, dst)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(53))
def test_every_pair_on_three_axes(part: int) -> None:
    for src, dst in itertools.product(LARGE_SPECS[part::53], LARGE_SPECS):
        assert_planned(src, dst)


@pytest.mark.parametrize("spec", LARGE_SPECS[::2], ids=str)
def test_the_oracles_agree(spec: Spec) -> None:
    x, y = locals_of(spec, 1), locals_of(spec.dual, 2)
    want = value_of(spec, 1)
    assert torch.equal(reference.global_value(x, spec), want)
    assert reference.pairing(x, y, spec) == spec_grid.pairing(spec, x, y)
    assert reference.pairing(x, y, spec) == (want * value_of(spec.dual, 2)).sum()
    assert torch.equal(spec_grid.global_of(spec, reference.shards_of(want, spec)), want)


# -- uneven sizes, permuted devices, odd shapes --------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("rows", [5, 7, 1, 0])
def test_uneven_rows(rows: int, devices: int) -> None:
    specs = spec_grid.all_specs(Mesh(x=devices), (rows, 4), uneven="chunk")
    for src, dst in itertools.product(specs, specs):
        assert_planned(src, dst)


@pytest.mark.parametrize("numel", [20, 28, 1])
def test_an_all_reduce_moves_whole_elements(numel: int) -> None:
    mesh = Mesh(x=3)
    src, dst = parse(f"f64[{numel}]{{unreduced: x}}", mesh), parse(f"f64[{numel}]", mesh)
    received = redistribute(src, dst).cost().bytes_received
    assert received % 8 == 0
    assert received >= lower_bound(src, dst).bytes_received


@pytest.mark.parametrize("rows", [5, 7, 1, 0])
def test_uneven_rows_on_two_axes(rows: int) -> None:
    specs = spec_grid.all_specs(SMALL, (rows, 5), uneven="chunk")
    for src, dst in spec_grid.sample_pairs(specs, 150, seed=rows):
        assert_right(redistribute(src, dst), src, dst)


OWNERS = [(3, 5, 0, 8), (16, 0, 0, 0), (0, 0, 0, 16), (4, 4, 4, 4), (1, 7, 7, 1), None]


@pytest.mark.parametrize("mesh", [Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=2, devices=[3, 0, 2, 1])])
def test_explicit_sizes(mesh: Mesh) -> None:
    partitions: list[P] = [P(mesh.axes), P(None, mesh.axes), P(mesh.axes[::-1])]
    partitions += [P(), P(unreduced=mesh.axes), P(reduced=mesh.axes)]
    specs = {
        Spec(mesh, p, shape=(16, 16), dtype=torch.int64,
             sizes={dim: sizes for dim in (0, 1) if p.dims[dim : dim + 1] not in ((), ((),))})
        for p in partitions for sizes in OWNERS
    }  # fmt: skip
    for src, dst in itertools.product(sorted(specs, key=str), repeat=2):
        prog = redistribute(src, dst)
        assert_right(prog, src, dst)
        assert prog.cost().bytes_received >= lower_bound(src, dst).bytes_received


@pytest.mark.parametrize("grid", [{}, {"x": 1}, {"x": 1, "y": 1}], ids=str)
def test_one_device(grid: dict[str, int]) -> None:
    specs = spec_grid.all_specs(Mesh(grid), (3, 4))
    for src, dst in itertools.product(specs, specs):
        prog = redistribute(src, dst)
        assert_right(prog, src, dst)
        assert prog.is_local


MESHES = strategies.meshes(max_axes=2, max_devices=8, permuted=True)


@st.composite
def any_pair(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """Two specs of 0-4 dims of any size, cut in any way, on up to two axes."""
    shape = draw(strategies.shapes(max_dims=4, max_size=7))
    return draw(strategies.spec_pairs(draw(MESHES), shape))


@given(any_pair())
@settings(max_examples=200)
def test_any_pair(pair: tuple[Spec, Spec]) -> None:
    src, dst = pair
    prog = redistribute(src, dst)
    assert_right(prog, src, dst)
    assert prog.cost().bytes_received >= lower_bound(src, dst).bytes_received
    if prog.is_local:
        assert lower_bound(src, dst).bytes_received == 0


@given(strategies.spec_pairs(Mesh(x=2, one=1, y=3, z=2, devices=range(11, -1, -1)), (12, 7)))
@settings(max_examples=60)
def test_any_pair_on_three_axes(pair: tuple[Spec, Spec]) -> None:
    assert_right(redistribute(*pair), *pair)


@given(strategies.spec_pairs(Mesh(x=2, y=2), (4, 3), dtype=torch.float64, kinds=LINEAR))
@settings(max_examples=200)
def test_averages(pair: tuple[Spec, Spec]) -> None:
    # Sizes of 2: halves and quarters of integers are exact.
    assert_right(redistribute(*pair), *pair)


@pytest.mark.parametrize("kind", ["max", "min", "product"])
def test_every_pair_of_another_reduction(kind: str) -> None:
    specs = spec_grid.all_specs(SMALL, (6,), kind=kind)
    for src, dst in itertools.product(specs, specs):
        prog = redistribute(src, dst)
        made = reference.simulate(prog, locals_of(src, 1))
        assert torch.equal(reference.global_value(made, dst), value_of(src, 1))


@pytest.mark.parametrize("kinds", [("sum", "product"), ("sum", "min"), ("product", "max")])
def test_from_one_reduction_to_another(kinds: tuple[str, str]) -> None:
    one, two = kinds
    partitions = [P(unreduced={"x": one}), P(unreduced={"y": two}), P("x", unreduced={"y": one}),
                  P("y", unreduced={"x": two}), P("x", unreduced={"y": two})]  # fmt: skip
    specs = [Spec(Mesh(x=2, y=2), p, shape=(4,), dtype=torch.int64) for p in partitions]
    for src, dst in itertools.product(specs, specs):
        if not {(axis, kind) for axis, kind in src.partition.unreduced_kinds} & {
            (axis, other)
            for axis, kind in dst.partition.unreduced_kinds
            for other in kinds
            if other != kind
        }:
            made = reference.simulate(redistribute(src, dst), locals_of(src, 3))
            assert torch.equal(reference.global_value(made, dst), value_of(src, 3)), (src, dst)


# -- dtypes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "first"),
    [
        ("f32[6@x]", "bf16[6]", True),
        ("bf16[6@x]", "f32[6]", False),
        ("i64[6@x]", "i32[6]", True),
        ("i64[6]{unreduced: x}", "i32[6]", False),
        ("f64[6]{unreduced: x=avg}", "i32[6]", False),
        ("f64[6]", "f32[6]", True),
    ],
)
def test_casts_where_fewer_bytes_are_sent(src: str, dst: str, first: bool) -> None:
    prog = redistribute(parse(src, SMALL), parse(dst, SMALL))
    places = [place for place, step in enumerate(prog.steps) if isinstance(step, Cast)]
    assert places == [0 if first else len(prog.steps) - 1]
    made = reference.simulate(prog, spec_grid.random_locals(prog.src))
    want = spec_grid.global_of(prog.src, spec_grid.random_locals(prog.src))
    assert torch.equal(reference.global_value(made, prog.dst), want.to(prog.dst.dtype))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("bool[6]", "f32[6]{unreduced: x}"),
        ("bool[6]{unreduced: x=max}", "i64[6]{unreduced: y}"),
        ("i64[6]", "f64[6]{unreduced: x=avg}"),
        ("f64[6]{reduced: x=avg}", "i32[6]"),
    ],
)
def test_casts_where_the_states_allow_it(src: str, dst: str) -> None:
    prog = redistribute(parse(src, SMALL), parse(dst, SMALL))
    x = spec_grid.random_locals(prog.src)
    want = reference.global_value(x, prog.src).to(prog.dst.dtype)
    assert torch.equal(reference.global_value(reference.simulate(prog, x), prog.dst), want)


def test_casts_only_what_is_reduced() -> None:
    mesh = Mesh(x=2)
    prog = redistribute(parse("f64[1]{unreduced: x}", mesh), parse("i64[1]{unreduced: x}", mesh))
    x = (torch.tensor([0.5], dtype=torch.float64),) * 2
    assert reference.global_value(reference.simulate(prog, x), prog.dst).tolist() == [1]


def test_booleans_are_sent_as_booleans() -> None:
    prog = redistribute(parse("bool[6@x]", SMALL), parse("f32[6]", SMALL))
    assert prog.step_bytes[0] == 3


def test_dtypes_to_send() -> None:
    src, dst = parse("f32[12]{unreduced: x}", SMALL), parse("f32[12]", SMALL)
    prog = redistribute(src, dst, forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert (prog.forward_dtype, prog.backward_dtype) == (torch.bfloat16, torch.float64)
    assert prog.steps == redistribute(src, dst).steps


# -- sensible choices ----------------------------------------------------------------------


def kinds(prog: Program) -> list[str]:
    return [step.name for step in prog.steps]


@pytest.mark.parametrize(
    ("src", "dst", "names"),
    [
        ("f32[1200@x,600]", "f32[1200,600@x]", ["all_to_all"]),
        ("f32[1200@(x,y),600]", "f32[1200,600@(x,y)]", ["all_to_all"]),
        ("f32[1200@(x,y),600]", "f32[1200@x,600@y]", ["all_to_all"]),
        ("f32[1200@(x,y),600]", "f32[1200@(y,x),600]", ["collective_permute"]),
        ("f32[1200@(x,y),600]", "f32[1200,600]", ["all_gather"]),
        ("f32[1200,600]", "f32[1200@(y,x),600]", ["all_slice"]),
        ("f32[1200,600]", "f32[1200@x,600@y]", ["all_slice", "all_slice"]),
        ("f32[1200,600]{unreduced: x, y}", "f32[1200,600]", ["all_reduce"]),
        ("f32[1200,600]{unreduced: x=avg, y=avg}", "f32[1200,600]", ["all_reduce"]),
        ("f32[1200,600]{unreduced: x=max, y=max}", "f32[1200,600]", ["all_reduce"]),
        ("f32[1200,600]{unreduced: x, y}", "f32[1200,600]{reduced: x, y}", ["all_reduce"]),
        ("f32[1200,600]{unreduced: x, y}", "f32[1200@(x,y),600]", ["reduce_scatter"]),
        ("f32[1200,600]{unreduced: x, y}", "f32[1200@(y,x),600]", ["reduce_scatter"]),
        ("f32[1200,600@y]{unreduced: x}", "f32[1200@x,600]", ["exchange"]),
        (
            "f32[12000,6000@y]{unreduced: x}",
            "f32[12000@x,6000]",
            ["reduce_scatter", "all_to_all", "all_gather"],
        ),
        ("f32[1200@x,600]{unreduced: y}", "f32[1200@x,600]", ["all_reduce"]),
        ("f32[1200]", "f32[1200]{reduced: x, y}", ["invariant_to_reduced"]),
        ("f32[1200]{reduced: x, y}", "f32[1200]", ["reduced_to_invariant"]),
        ("f32[1200]", "f32[1200]{unreduced: x, y}", ["replicated_to_unreduced"]),
        ("f32[1200@(x,y)]", "f32[1200]{unreduced: x, y}", ["sharded_to_unreduced"]),
        ("f32[1200@(x,y)]", "f32[1200]{reduced: x, y}", ["all_gather"]),
        ("f32[]{unreduced: x, y}", "f32[]", ["all_reduce"]),
        ("f32[1200@x]", "f32[1200@x]", []),
    ],
)
def test_choice(src: str, dst: str, names: list[str]) -> None:
    assert kinds(redistribute(parse(src, SMALL), parse(dst, SMALL))) == names


def test_never_gathers_what_it_then_slices() -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS):
        gathered: set[str] = set()
        for step in redistribute(src, dst).steps:
            if isinstance(step, AllSlice):
                assert gathered.isdisjoint(step.axes), (src, dst)
            if isinstance(step, AllGather):
                gathered |= set(step.axes)


def test_reduces_before_it_gathers() -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS):
        steps = redistribute(src, dst).steps
        gathers = [at for at, step in enumerate(steps) if isinstance(step, AllGather)]
        reductions = [at for at, step in enumerate(steps) if isinstance(step, ReduceScatter)]
        assert not gathers or not reductions or max(reductions) < min(gathers), (src, dst)


def test_one_launch_reduces_every_axis() -> None:
    # Without idle axes: those could share the work.
    for spec in LARGE_SPECS:
        p = spec.partition
        if p.unreduced and len(p.axes) - len(p.reduced) == 3:
            large = spec.replace(shape=(12_000, 24_000))
            prog = redistribute(large, large.replace(partition=P(*p.partitions)))
            assert prog.steps == (AllReduce(tuple(p.unreduced)),)


@pytest.mark.parametrize("mesh", [Mesh(x=4, y=4), Mesh(x=4, y=8), LARGE], ids=str)
def test_one_launch_reduces_every_axis_of_a_node(mesh: Mesh) -> None:
    src = Spec(mesh, P(unreduced=mesh.axes), shape=(9600,))
    assert kinds(redistribute(src, Spec(mesh, P(), shape=src.shape))) == ["all_reduce"]


def test_needs_few_launches() -> None:
    most = max(
        redistribute(src, dst).cost().launches
        for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS)
    )
    assert most <= 3


def test_is_deterministic() -> None:
    for src, dst in spec_grid.sample_pairs(LARGE_SPECS, 100, seed=7):
        assert search(src, dst, Topology.node()) == search(src, dst, Topology.node())
        assert redistribute(src, dst) is redistribute(src, dst)


def test_is_remembered_by_value() -> None:
    one, two = (Spec(Mesh(x=2), P("x"), shape=(4,)) for _ in range(2))
    dst = Spec(Mesh(x=2), P(), shape=(4,))
    assert redistribute(one, dst) is redistribute(two, dst)
    assert redistribute(one, dst, exclude=[AllToAll]) is redistribute(one, dst, exclude=(AllToAll,))


@pytest.mark.parametrize(
    "topology", [Topology.node(), Topology.cluster(), "bytes"], ids=["node", "cluster", "bytes"]
)
def test_large_meshes_cost_no_more(topology: Topology | str) -> None:
    mesh = Mesh(x=1024, y=1024)
    for src, dst in spec_grid.sample_pairs(spec_grid.all_specs(mesh, (2**20, 2**20)), 150, seed=3):
        prog = redistribute(src, dst, topology=topology)
        assert prog.dst == dst
        assert prog == prog.T.T
        assert prog.cost().bytes_sent >= 0


# -- options -------------------------------------------------------------------------------


def test_cost_in_bytes_sends_least() -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS):
        fast, least = redistribute(src, dst), redistribute(src, dst, objective="bytes")
        assert max(least.cost().bytes_sent, least.cost().bytes_received) <= max(
            fast.cost().bytes_sent, fast.cost().bytes_received
        )
        assert_right(least, src, dst)


def test_cost_in_seconds_is_fastest() -> None:
    slow = Topology.of({"x": Link(1e-4, 1e8)})
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS):
        here, elsewhere = redistribute(src, dst, topology=slow), redistribute(src, dst)
        assert here.cost(slow).time <= elsewhere.cost(slow).time * (1 + 1e-9)
        assert_right(here, src, dst)


def test_topology_decides() -> None:
    mesh = Mesh(dp=4, tp=8)
    src = Spec(mesh, P(unreduced={"dp", "tp"}), shape=(1024, 8192))
    dst = Spec(mesh, P(), shape=(1024, 8192))
    hierarchical = redistribute(src, dst, topology=Topology.cluster())
    assert kinds(hierarchical) == ["reduce_scatter", "all_reduce", "all_gather"]
    assert [step.axes for step in hierarchical.steps] == [("tp",), ("dp",), ("tp",)]  # type: ignore[union-attr]


@pytest.mark.parametrize("exclude", [(), (Exchange,)], ids=str)
def test_memory_is_respected(exclude: Sequence[type]) -> None:
    replanned = 0
    for src, dst in itertools.product(SMALL_SPECS[::2], SMALL_SPECS[1::2]):
        peak = redistribute(src, dst, exclude=exclude).cost().peak_memory
        try:
            prog = redistribute(src, dst, exclude=exclude, max_memory=peak - 1)
        except ShardingError as error:
            assert f"max_memory={peak}, the least there is" in str(error).partition("fix:")[2]
            continue
        replanned += 1
        assert prog.cost().peak_memory < peak
        assert_right(prog, src, dst)
    assert replanned > 5


def test_memory_makes_it_move_instead_of_gather() -> None:
    src, dst = parse("f32[1200@x,6]", SMALL), parse("f32[1200,6@x]", SMALL)
    gather = redistribute(src, dst, exclude=[AllToAll, Exchange])
    assert kinds(gather) == ["all_gather", "all_slice"]
    frugal = redistribute(src, dst, exclude=[AllToAll, Exchange], max_memory=20_000)
    assert frugal.cost().peak_memory <= 20_000 < gather.cost().peak_memory
    assert_right(
        redistribute(src._with(dtype=torch.int64), dst._with(dtype=torch.int64),
                     exclude=[AllToAll, Exchange], max_memory=40_000),
        src._with(dtype=torch.int64), dst._with(dtype=torch.int64))  # fmt: skip


def test_what_a_program_holds_suffices() -> None:
    for src, dst in itertools.product(SMALL_SPECS[::2], SMALL_SPECS[1::2]):
        prog = redistribute(src, dst)
        assert redistribute(src, dst, max_memory=prog.cost().peak_memory) == prog


def test_memory_of_a_cast_is_respected() -> None:
    src, dst = parse("bf16[6@x]", SMALL), parse("f64[6@x]", SMALL)
    assert redistribute(src, dst).cost().peak_memory == 3 * 8
    with pytest.raises(ShardingError, match="max_memory=24"):
        redistribute(src, dst, max_memory=23)


def test_one_excluded_step_needs_no_tuple() -> None:
    ends = parse("f32[6]{unreduced: x}", SMALL), parse("f32[6]", SMALL)
    assert redistribute(*ends, exclude=AllReduce) == redistribute(*ends, exclude=(AllReduce,))


COLLECTIVES: list[type] = [
    AllGather, AllReduce, ReduceScatter, AllToAll, CollectivePermute, Exchange,
]  # fmt: skip


@pytest.mark.parametrize("without", COLLECTIVES, ids=lambda step: step.__name__)
def test_excluded_steps_are_not_used(without: type) -> None:
    done = 0
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS[::3]):
        try:
            prog = redistribute(src, dst, exclude=(without,))
        except ShardingError as error:
            assert f"allow {without.__name__}" in str(error)
            continue
        done += 1
        assert not any(isinstance(step, without) for step in prog.steps)
        assert_right(prog, src, dst)
    assert done > 50


# -- errors --------------------------------------------------------------------------------


def refusal(plan: Callable[[], object]) -> str:
    with pytest.raises(ShardingError) as caught:
        plan()
    text = str(caught.value)
    assert text.startswith("fs.redistribute")
    assert all(word in text for word in ("given:", "rule:", "fix:"))
    return text


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ("f32[12@x]", "f32[6@x]", r"keeps the global shape: \(12,\) is not \(6,\)"),
        ("f32[12@x]", "f32[12@x,1]", r"keeps the global shape"),
        ("f32[4]{unreduced: x=max}", "f32[4]{unreduced: x}",
         "unreduced max cannot become unreduced sum"),
        ("f32[4]{unreduced: x}", "f32[4]{unreduced: x=product}", "from unreduced sum to unreduced"),
        ("c64[4]{unreduced: x}", "f32[4]", "from complex to real drops the imaginary part"),
        ("f32[4]{unreduced: x=max}", "f32[6]{unreduced: x=min}", "(?s)global shape.*candidates"),
    ],
)  # fmt: skip
def test_impossible(src: str, dst: str, message: str) -> None:
    text = refusal(lambda: redistribute(parse(src, SMALL), parse(dst, SMALL)))
    assert re.search(message, text)


@pytest.mark.parametrize(
    "mesh",
    [LARGE, Mesh(x=2, y=3, devices=range(5, -1, -1)), Mesh(a=2), Mesh(x=3, devices=range(4, 7))],
    ids=str,
)
def test_another_mesh(mesh: Mesh) -> None:
    src, dst = parse("f32[12@x,6]", SMALL), parse(f"f32[12,6@{mesh.axes[0]}]", mesh)
    for prog in (redistribute(src, dst), redistribute(dst, src)):
        check(prog)
        x = locals_of(prog.src, 1)
        want = tuple(value_of(prog.src, 1)[prog.dst.index(rank)] for rank in prog.dst.mesh.ranks)
        assert all(map(torch.equal, reference.simulate(prog, x), want))
        assert all(map(torch.equal, prog(x), want))


def test_not_a_spec() -> None:
    spec = parse("f32[4@x]", SMALL)
    text = refusal(lambda: redistribute(spec, P("x")))  # type: ignore[arg-type]
    assert "redistribute(Spec, PartitionSpec)" in text


def test_fixes_of_shape_mesh_and_reduction_work() -> None:
    src = parse("f32[12]{unreduced: x=max}", SMALL)
    assert redistribute(src, parse("f32[6]", SMALL).replace(shape=src.shape)).dst.shape == (12,)
    other = parse("f32[12@x]", Mesh(x=2, y=3, devices=range(6, 12)))
    assert redistribute(src, other.replace(mesh=src.mesh)).dst.mesh == SMALL
    between = redistribute(src, parse("f32[12]", SMALL))
    assert (between >> redistribute(between.dst, parse("f32[12]{unreduced: x}", SMALL))).dst


def test_unknown_objective() -> None:
    spec = parse("f32[4@x]", SMALL)
    text = refusal(lambda: redistribute(spec, spec, objective="memory"))
    assert "objective must be 'time' or 'bytes'" in text


@pytest.mark.parametrize(
    "options",
    [{"topology": 3}, {"objective": 3}, {"exclude": 3}, {"exclude": (int,)},
     {"exclude": "AllGather"}, {"exclude": ("AllGather",)}, {"exclude": AllGather("x", 0)}],
    ids=str,
)  # fmt: skip
def test_options_of_another_type(options: dict[str, object]) -> None:
    refusal(
        lambda: redistribute(parse("f32[4@x]", SMALL), parse("f32[4]", SMALL), **options)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32], ids=str)
def test_a_dtype_that_loses_the_values_is_refused(dtype: torch.dtype) -> None:
    src, dst = parse("f32[4]{unreduced: x=avg}", SMALL), parse("f32[4]", SMALL)
    with pytest.raises(ShardingError):
        redistribute(src, dst, forward_dtype=dtype)


@pytest.mark.parametrize(
    ("src", "dst", "memory", "exclude"),
    [
        ("f32[12@x,6]", "f32[12,6@x]", 10, ()),
        ("f32[12@x,6]", "f32[12,6]", None, (AllGather, Exchange)),
        ("f32[12@x,6]", "f32[12,6]", 10, (AllGather, Exchange)),
        ("f32[12@x,6]", "f32[12,6]", 10, (AllReduce,)),
        ("f32[12]{unreduced: x}", "f32[12]", None, (AllReduce, ReduceScatter, Exchange)),
        ("f32[12]{unreduced: x}", "f32[12@x]{reduced: y}", 0, (AllReduce, InvariantToReduced)),
        ("f32[5@x:5+0]", "f32[5@x:0+5]", 1, ()),
        ("f32[12@x]{unreduced: y}", "f32[12@y]{reduced: x}", 20, ()),
    ],
)
def test_proposed_way_out_works(
    src: str, dst: str, memory: int | None, exclude: Sequence[type]
) -> None:
    ends = parse(src, SMALL), parse(dst, SMALL)
    text = refusal(lambda: redistribute(*ends, max_memory=memory, exclude=exclude))
    assert "no program meets the restrictions" in text
    fix = text.partition("fix:")[2]
    suffices = re.search(r"max_memory=(\d+)", fix)
    allow = re.search(r"allow (\w+(?:, \w+)*)", fix)
    allowed = [getattr(steps_module, name) for name in allow[1].split(", ")] if allow else []
    assert suffices or allowed
    prog = redistribute(
        *ends,
        max_memory=int(suffices[1]) if suffices else memory,
        exclude=[each for each in exclude if each not in allowed],
    )
    assert prog.dst == ends[1]


def test_the_least_memory_is_that_of_what_is_sent() -> None:
    """A gathered tensor of half the width takes no more than both ends do."""
    src, dst = parse("f64[12@x,6]", SMALL), parse("f64[12,6@x]", SMALL)
    without = (AllToAll, CollectivePermute, Exchange)
    for wire, least in ((None, 576), (torch.float32, 288)):
        plan = functools.partial(redistribute, src, dst, exclude=without, forward_dtype=wire)
        assert kinds(plan(max_memory=least)) == ["all_gather", "all_slice"]
        for memory in (0, least - 1):
            text = refusal(functools.partial(plan, max_memory=memory))
            assert text.endswith(f"give max_memory={least}, the least there is")


# -- the search itself ---------------------------------------------------------------------


TOPOLOGIES = [Topology.node(), Topology.cluster(3), None]


def state_of(spec: Spec) -> State:
    p = spec.partition
    return State(p.dims, p.unreduced_kinds, p.reduced_kinds, spec.sizes)


def assert_edges(src: Spec, dst: Spec, topology: Topology | None, *, direct: bool = False) -> None:
    """Every edge out of `src` is a step that types as the state says and weighs its cost."""
    problem = Problem(src, dst, topology, None, frozenset())
    state = state_of(src)
    for weight, make, new in Moves(problem, direct=direct).of(state):
        step: Step = make()
        after = infer(step, src)
        assert after == problem.spec(new)
        assert weight == pytest.approx(weigh(topology, step, src, after), rel=1e-12, abs=1e-15)
        assert not is_out_of_reach(src, after, WAYS.keys() - {type(step)})


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["node", "cluster", "bytes"])
def test_edges_of_the_search(topology: Topology | None) -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS):
        assert_edges(src, dst, topology)
        assert_edges(src, dst, topology, direct=True)


@given(any_pair(), st.sampled_from([Topology.node(), Topology.cluster(2), None]), st.booleans())
def test_edges_of_the_search_on_uneven_shards(
    pair: tuple[Spec, Spec], topology: Topology | None, direct: bool
) -> None:
    assert_edges(*pair, topology, direct=direct)


def assert_bounds(src: Spec, dst: Spec, topology: Topology | None) -> None:
    """What is left to do is never overestimated, from any layout on the way."""
    problem = Problem(src, dst, topology, None, frozenset())
    spec, steps = src, search(src, dst, topology)
    assert steps is not None
    left = steps[1]
    for step in steps[0]:
        assert problem.bound(state_of(spec)) <= left * (1 + 1e-9) + 1e-15
        after = infer(step, spec)
        left -= weigh(topology, step, spec, after)
        spec = after
    assert left == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["node", "cluster", "bytes"])
def test_bounds_of_the_search(topology: Topology | None) -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS):
        assert_bounds(src, dst, topology)


@given(any_pair(), st.sampled_from([Topology.node(), Topology.cluster(2), None]))
def test_bounds_of_the_search_on_uneven_shards(
    pair: tuple[Spec, Spec], topology: Topology | None
) -> None:
    assert_bounds(*pair, topology)


@pytest.mark.parametrize(
    ("src", "dst", "memory", "exclude"),
    [
        ("f32[12@x]", "f32[12]", None, (AllGather, ShardedToUnreduced, Exchange)),
        ("f32[12@y]", "f32[12@x]", None, (AllGather, ShardedToUnreduced, Exchange)),
        ("f32[12]{unreduced: x}", "f32[12@x]", None, (AllReduce, ReduceScatter, Exchange)),
        ("f32[12]{reduced: x}", "f32[12]", None, (ReducedToInvariant, ReplicatedToUnreduced,
                                                  AllSlice, ShardedToUnreduced, Exchange)),
        ("f32[12]", "f32[12@x]", 47, ()),
        ("f32[12@x]", "f32[12]", 47, ()),
    ],
)  # fmt: skip
def test_what_cannot_be_is_not_looked_for(
    monkeypatch: pytest.MonkeyPatch,
    src: str,
    dst: str,
    memory: int | None,
    exclude: Sequence[type],
) -> None:
    """Only by looking at all layouts would a search come to the end without the goal."""
    monkeypatch.setattr(Moves, "of", lambda *_: pytest.fail("a search"))
    ends = parse(src, SMALL), parse(dst, SMALL)
    assert search(*ends, Topology.node(), memory, frozenset(exclude)) is None


def test_embedding_is_used_where_it_is_free() -> None:
    prog = redistribute(parse("f32[12@x]", SMALL), parse("f32[12]{unreduced: x}", SMALL))
    assert prog.steps == (ShardedToUnreduced("x", 0),)
