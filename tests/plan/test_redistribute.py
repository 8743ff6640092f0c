"""Programs of `redistribute` for every pair of layouts, compared with slices of the global tensor.

All 25,281 pairs on a mesh of three axes (minutes): `python -m pytest -m slow tests/plan`.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import LINEAR
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.plan.search.astar import search
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import lower_bound
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    ReduceScatter,
)
from tests.helpers import reference, spec_grid, strategies
from tests.helpers.plans import (
    LARGE,
    LARGE_SPECS,
    SMALL,
    SMALL_SPECS,
    any_pair,
    assert_planned,
    assert_right,
    locals_of,
    step_names,
    value_of,
)


def test_number_of_specs() -> None:
    assert len(set(SMALL_SPECS)) == 27
    assert len(set(LARGE_SPECS)) == 159


@pytest.mark.parametrize("src", SMALL_SPECS, ids=str)
def test_every_pair_on_two_axes(src: Spec) -> None:
    for dst in SMALL_SPECS:
        assert_planned(src, dst)


def test_some_pairs_on_three_axes() -> None:
    for src, dst in spec_grid.sample_pairs(LARGE_SPECS, 120, seed=2):
        assert_planned(src, dst)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(53))
def test_every_pair_on_three_axes(part: int) -> None:
    for src, dst in itertools.product(LARGE_SPECS[part::53], LARGE_SPECS):
        assert_planned(src, dst)


@pytest.mark.parametrize("spec", LARGE_SPECS[::2], ids=str)
def test_reference_agrees_with_slices(spec: Spec) -> None:
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
def test_all_reduce_receives_whole_elements(numel: int) -> None:
    mesh = Mesh(x=3)
    src, dst = parse(f"f64[{numel}]{{unreduced: x}}", mesh), parse(f"f64[{numel}]", mesh)
    received = redistribute(src, dst).cost().bytes_received
    assert received % 8 == 0
    assert received >= lower_bound(src, dst).bytes_received


@pytest.mark.parametrize("rows", [5, 7, 1, 0])
def test_uneven_rows_on_two_axes(rows: int) -> None:
    specs = spec_grid.all_specs(SMALL, (rows, 5), uneven="chunk")
    for src, dst in spec_grid.sample_pairs(specs, 60, seed=rows):
        assert_right(redistribute(src, dst), src, dst)


OWNERS = [(3, 5, 0, 8), (16, 0, 0, 0), (0, 0, 0, 16), (4, 4, 4, 4), (1, 7, 7, 1), None]


@spec_grid.one_in(7)
@pytest.mark.parametrize("mesh", [Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=2, devices=[3, 0, 2, 1])])
def test_explicit_sizes(mesh: Mesh, every: int) -> None:
    partitions: list[P] = [P(mesh.axes), P(None, mesh.axes), P(mesh.axes[::-1])]
    partitions += [P(), P(unreduced=mesh.axes), P(reduced=mesh.axes)]
    specs = {
        Spec(mesh, p, shape=(16, 16), dtype=torch.int64,
             sizes={dim: sizes for dim in (0, 1) if p.dims[dim : dim + 1] not in ((), ((),))})
        for p in partitions for sizes in OWNERS
    }  # fmt: skip
    for src, dst in [*itertools.product(sorted(specs, key=str), repeat=2)][::every]:
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


@given(any_pair())
@settings(max_examples=80)
def test_any_pair(pair: tuple[Spec, Spec]) -> None:
    src, dst = pair
    prog = redistribute(src, dst)
    assert_right(prog, src, dst)
    assert prog.cost().bytes_received >= lower_bound(src, dst).bytes_received
    if prog.is_local:
        assert lower_bound(src, dst).bytes_received == 0


@given(strategies.spec_pairs(Mesh(x=2, one=1, y=3, z=2, devices=range(11, -1, -1)), (12, 7)))
@settings(max_examples=30)
def test_any_pair_on_three_axes(pair: tuple[Spec, Spec]) -> None:
    assert_right(redistribute(*pair), *pair)


@given(strategies.spec_pairs(Mesh(x=2, y=2), (4, 3), dtype=torch.float64, kinds=LINEAR))
@settings(max_examples=80)
def test_programs_of_averages_equal_slicing(pair: tuple[Spec, Spec]) -> None:
    # Sizes of 2: halves and quarters of integers are exact.
    assert_right(redistribute(*pair), *pair)


@pytest.mark.parametrize("kind", ["max", "min", "product"])
def test_every_pair_of_another_reduction(kind: str) -> None:
    specs = spec_grid.all_specs(SMALL, (6,), kind=kind)
    for src, dst in itertools.product(specs, specs):
        prog = redistribute(src, dst)
        outputs = reference.simulate(prog, locals_of(src, 1))
        assert torch.equal(reference.global_value(outputs, dst), value_of(src, 1))


@pytest.mark.parametrize("kinds", [("sum", "product"), ("sum", "min"), ("product", "max")])
def test_pairs_with_different_reductions(kinds: tuple[str, str]) -> None:
    a, b = kinds
    partitions = [P(unreduced={"x": a}), P(unreduced={"y": b}), P("x", unreduced={"y": a}),
                  P("y", unreduced={"x": b}), P("x", unreduced={"y": b})]  # fmt: skip
    specs = [Spec(Mesh(x=2, y=2), p, shape=(4,), dtype=torch.int64) for p in partitions]
    for src, dst in itertools.product(specs, specs):
        if not {(axis, kind) for axis, kind in src.partition.unreduced_kinds} & {
            (axis, other)
            for axis, kind in dst.partition.unreduced_kinds
            for other in kinds
            if other != kind
        }:
            outputs = reference.simulate(redistribute(src, dst), locals_of(src, 3))
            assert torch.equal(reference.global_value(outputs, dst), value_of(src, 3)), (src, dst)


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
def test_cast_is_where_fewer_bytes_are_sent(src: str, dst: str, first: bool) -> None:
    prog = redistribute(parse(src, SMALL), parse(dst, SMALL))
    positions = [i for i, step in enumerate(prog.steps) if isinstance(step, Cast)]
    assert positions == [0 if first else len(prog.steps) - 1]
    outputs = reference.simulate(prog, spec_grid.random_locals(prog.src))
    want = spec_grid.global_of(prog.src, spec_grid.random_locals(prog.src))
    assert torch.equal(reference.global_value(outputs, prog.dst), want.to(prog.dst.dtype))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("bool[6]", "f32[6]{unreduced: x}"),
        ("bool[6]{unreduced: x=max}", "i64[6]{unreduced: y}"),
        ("i64[6]", "f64[6]{unreduced: x=avg}"),
        ("f64[6]{reduced: x=avg}", "i32[6]"),
    ],
)
def test_cast_is_where_states_allow_both_dtypes(src: str, dst: str) -> None:
    prog = redistribute(parse(src, SMALL), parse(dst, SMALL))
    x = spec_grid.random_locals(prog.src)
    want = reference.global_value(x, prog.src).to(prog.dst.dtype)
    assert torch.equal(reference.global_value(reference.simulate(prog, x), prog.dst), want)


def test_cast_follows_the_reduction_if_they_do_not_commute() -> None:
    mesh = Mesh(x=2)
    prog = redistribute(parse("f64[1]{unreduced: x}", mesh), parse("i64[1]{unreduced: x}", mesh))
    x = (torch.tensor([0.5], dtype=torch.float64),) * 2
    assert reference.global_value(reference.simulate(prog, x), prog.dst).tolist() == [1]


def test_booleans_are_sent_as_booleans() -> None:
    prog = redistribute(parse("bool[6@x]", SMALL), parse("f32[6]", SMALL))
    assert prog.step_bytes[0] == 3


def test_forward_and_backward_dtype() -> None:
    src, dst = parse("f32[12]{unreduced: x}", SMALL), parse("f32[12]", SMALL)
    prog = redistribute(src, dst, forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert (prog.forward_dtype, prog.backward_dtype) == (torch.bfloat16, torch.float64)
    assert prog.steps == redistribute(src, dst).steps


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
def test_steps_of_common_transitions(src: str, dst: str, names: list[str]) -> None:
    assert step_names(redistribute(parse(src, SMALL), parse(dst, SMALL))) == names


def test_no_program_gathers_and_then_slices() -> None:
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
        gathers = [i for i, step in enumerate(steps) if isinstance(step, AllGather)]
        reductions = [i for i, step in enumerate(steps) if isinstance(step, ReduceScatter)]
        assert not gathers or not reductions or max(reductions) < min(gathers), (src, dst)


def test_one_launch_reduces_every_axis() -> None:
    # Specs with idle axes are left out: ranks along them could share the work.
    for spec in LARGE_SPECS:
        p = spec.partition
        if p.unreduced and len(p.axes) - len(p.reduced) == 3:
            large = spec.replace(shape=(12_000, 24_000))
            prog = redistribute(large, large.replace(partition=P(*p.partitions)))
            assert prog.steps == (AllReduce(tuple(p.unreduced)),)


@pytest.mark.parametrize("mesh", [Mesh(x=4, y=4), Mesh(x=4, y=8), LARGE], ids=str)
def test_one_launch_reduces_every_axis_of_a_node(mesh: Mesh) -> None:
    src = Spec(mesh, P(unreduced=mesh.axes), shape=(9600,))
    assert step_names(redistribute(src, Spec(mesh, P(), shape=src.shape))) == ["all_reduce"]


def test_no_program_needs_more_than_three_launches() -> None:
    most = max(
        redistribute(src, dst).cost().launches
        for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS)
    )
    assert most <= 3


def test_plans_are_deterministic() -> None:
    for src, dst in spec_grid.sample_pairs(LARGE_SPECS, 100, seed=7):
        assert search(src, dst, Topology.node()) == search(src, dst, Topology.node())
        assert redistribute(src, dst) is redistribute(src, dst)


def test_plans_are_cached_by_value() -> None:
    a, b = (Spec(Mesh(x=2), P("x"), shape=(4,)) for _ in range(2))
    dst = Spec(Mesh(x=2), P(), shape=(4,))
    assert redistribute(a, dst) is redistribute(b, dst)
    assert redistribute(a, dst, exclude=[AllToAll]) is redistribute(a, dst, exclude=(AllToAll,))


@pytest.mark.parametrize(
    "options", [{}, {"topology": Topology.cluster()}, {"objective": "bytes"}], ids=str
)
def test_planning_does_not_depend_on_the_number_of_devices(options: dict[str, Any]) -> None:
    mesh = Mesh(x=1024, y=1024)
    for src, dst in spec_grid.sample_pairs(spec_grid.all_specs(mesh, (2**20, 2**20)), 150, seed=3):
        prog = redistribute(src, dst, **options)
        assert prog.dst == dst
        assert prog == prog.T.T
        assert prog.cost().bytes_sent >= 0


def test_costs_over_split_axes_do_not_list_the_devices() -> None:
    src, dst = (
        Spec(Mesh(x=1024, y=1024), p, shape=(2**20, 2**20))
        for p in (P(None, ("x", "y")), P(("x", "y")))
    )
    prog = redistribute(src, dst, topology=Topology.cluster())
    assert prog.specs[1].mesh != src.mesh
    with spec_grid.peak_memory_below(4 << 20):  # a table of the devices takes 8 MiB and more
        assert prog.cost().bytes_sent > 0
