"""Options and errors of `redistribute`."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.program import steps as steps_module
from fshard.program.cost.links import Link
from fshard.program.cost.topology import Topology
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReduceScatter,
)
from tests.helpers import reference
from tests.helpers.plans import (
    LARGE,
    SMALL,
    SMALL_SPECS,
    assert_right,
    locals_of,
    step_names,
    value_of,
)
from tests.helpers.reference import check
from tests.helpers.spec_grid import one_in

# -- options -------------------------------------------------------------------------------


@one_in(5)
def test_objective_bytes_moves_least(every: int) -> None:
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS[::every]):
        fast, least = redistribute(src, dst), redistribute(src, dst, objective="bytes")
        assert max(least.cost().bytes_sent, least.cost().bytes_received) <= max(
            fast.cost().bytes_sent, fast.cost().bytes_received
        )
        assert_right(least, src, dst)


@one_in(5)
def test_objective_time_is_fastest_on_its_topology(every: int) -> None:
    slow = Topology.of({"x": Link(1e-4, 1e8)})
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS[::every]):
        ours, other = redistribute(src, dst, topology=slow), redistribute(src, dst)
        assert ours.cost().time <= other.cost(slow).time * (1 + 1e-9)
        assert_right(ours, src, dst)


def test_cluster_reduces_inside_of_nodes_first() -> None:
    mesh = Mesh(dp=4, tp=8)
    src = Spec(mesh, P(unreduced={"dp", "tp"}), shape=(1024, 8192))
    dst = Spec(mesh, P(), shape=(1024, 8192))
    one_card = Topology(outer=Link(2.7e-6, 45e9 / 8), node_size=8)
    hierarchical = redistribute(src, dst, topology=one_card)
    assert step_names(hierarchical) == ["reduce_scatter", "all_reduce", "all_gather"]
    assert [step.axes for step in hierarchical.steps] == [("tp",), ("dp",), ("tp",)]  # type: ignore[union-attr]


@pytest.mark.parametrize("exclude", [(), (Exchange,)], ids=str)
def test_max_memory_is_respected(exclude: Sequence[type]) -> None:
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
    assert replanned > 3


def test_max_memory_replaces_a_gather() -> None:
    src, dst = parse("f32[1200@x,6]", SMALL), parse("f32[1200,6@x]", SMALL)
    gather = redistribute(src, dst, exclude=[AllToAll, Exchange])
    assert step_names(gather) == ["all_gather", "all_slice"]
    frugal = redistribute(src, dst, exclude=[AllToAll, Exchange], max_memory=20_000)
    assert frugal.cost().peak_memory <= 20_000 < gather.cost().peak_memory
    assert_right(
        redistribute(src._with(dtype=torch.int64), dst._with(dtype=torch.int64),
                     exclude=[AllToAll, Exchange], max_memory=40_000),
        src._with(dtype=torch.int64), dst._with(dtype=torch.int64))  # fmt: skip


def test_peak_memory_of_a_program_suffices_as_max_memory() -> None:
    for src, dst in itertools.product(SMALL_SPECS[::2], SMALL_SPECS[1::2]):
        prog = redistribute(src, dst)
        assert redistribute(src, dst, max_memory=prog.cost().peak_memory).cost() == prog.cost()


def test_max_memory_includes_casts() -> None:
    src, dst = parse("bf16[6@x]", SMALL), parse("f64[6@x]", SMALL)
    assert redistribute(src, dst).cost().peak_memory == 3 * 8
    with pytest.raises(ShardingError, match="max_memory=24"):
        redistribute(src, dst, max_memory=23)


def test_exclude_takes_a_single_step_type() -> None:
    ends = parse("f32[6]{unreduced: x}", SMALL), parse("f32[6]", SMALL)
    assert redistribute(*ends, exclude=AllReduce) == redistribute(*ends, exclude=(AllReduce,))


COLLECTIVES: list[type] = [
    AllGather, AllReduce, ReduceScatter, AllToAll, CollectivePermute, Exchange,
]  # fmt: skip


@one_in(7)
@pytest.mark.parametrize("without", COLLECTIVES, ids=lambda step: step.__name__)
def test_excluded_steps_are_not_used(without: type, every: int) -> None:
    done = 0
    for src, dst in itertools.product(SMALL_SPECS, SMALL_SPECS[::every]):
        try:
            prog = redistribute(src, dst, exclude=(without,))
        except ShardingError as error:
            assert f"allow {without.__name__}" in str(error)
            continue
        done += 1
        assert not any(isinstance(step, without) for step in prog.steps)
        assert_right(prog, src, dst)
    assert done > 50


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
        ("f32[12@x]", "f32[6@x]", r"the same global shape: \(12,\) is not \(6,\)"),
        ("f32[12@x]", "f32[12@x,1]", r"the same global shape"),
        ("f32[4]{unreduced: x=max}", "f32[4]{unreduced: x}",
         "unreduced max cannot become unreduced sum"),
        ("f32[4]{unreduced: x}", "f32[4]{unreduced: x=product}", "from unreduced sum to unreduced"),
        ("c64[4]{unreduced: x}", "f32[4]", "from complex to real drops the imaginary part"),
        ("f32[4]{unreduced: x=max}", "f32[6]{unreduced: x=min}", "(?s)global shape.*max cannot"),
    ],
)  # fmt: skip
def test_impossible_pairs_are_refused(src: str, dst: str, message: str) -> None:
    text = refusal(lambda: redistribute(parse(src, SMALL), parse(dst, SMALL)))
    assert re.search(message, text)


@pytest.mark.parametrize(
    "mesh",
    [LARGE, Mesh(x=2, y=3, devices=range(5, -1, -1)), Mesh(a=2), Mesh(x=3, devices=range(4, 7))],
    ids=str,
)
def test_pairs_on_two_meshes(mesh: Mesh) -> None:
    src, dst = parse("f32[12@x,6]", SMALL), parse(f"f32[12,6@{mesh.axes[0]}]", mesh)
    for prog in (redistribute(src, dst), redistribute(dst, src)):
        check(prog)
        x = locals_of(prog.src, 1)
        want = tuple(value_of(prog.src, 1)[prog.dst.index(rank)] for rank in prog.dst.mesh.ranks)
        assert all(map(torch.equal, reference.simulate(prog, x), want))
        assert all(map(torch.equal, prog(x), want))


def test_target_that_is_not_a_spec_is_refused() -> None:
    spec = parse("f32[4@x]", SMALL)
    text = refusal(lambda: redistribute(spec, P("x")))  # type: ignore[arg-type]
    assert "redistribute(Spec, PartitionSpec)" in text


def test_proposed_fixes_of_shape_mesh_and_reduction_work() -> None:
    src = parse("f32[12]{unreduced: x=max}", SMALL)
    assert redistribute(src, parse("f32[6]", SMALL).replace(shape=src.shape)).dst.shape == (12,)
    other = parse("f32[12@x]", Mesh(x=2, y=3, devices=range(6, 12)))
    assert redistribute(src, other.replace(mesh=src.mesh)).dst.mesh == SMALL
    between = redistribute(src, parse("f32[12]", SMALL))
    assert (between >> redistribute(between.dst, parse("f32[12]{unreduced: x}", SMALL))).dst


def test_unknown_objective_is_refused() -> None:
    spec = parse("f32[4@x]", SMALL)
    text = refusal(lambda: redistribute(spec, spec, objective="memory"))
    assert "objective must be 'time' or 'bytes'" in text


@pytest.mark.parametrize(
    "options",
    [{"topology": 3}, {"objective": 3}, {"exclude": 3}, {"exclude": (int,)},
     {"exclude": "AllGather"}, {"exclude": ("AllGather",)}, {"exclude": AllGather("x", 0)},
     {"exclude": [[1]]}, {"exclude": [AllGather, {}]}, {"max_memory": [1]}, {"max_memory": "1"},
     {"forward_dtype": "bf16"}, {"backward_dtype": [torch.half]}],
    ids=str,
)  # fmt: skip
def test_options_of_wrong_types_are_refused(options: dict[str, object]) -> None:
    refusal(
        lambda: redistribute(parse("f32[4@x]", SMALL), parse("f32[4]", SMALL), **options)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32], ids=str)
def test_forward_dtype_that_loses_values_is_refused(dtype: torch.dtype) -> None:
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
def test_proposed_restrictions_work(
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
        exclude=[step for step in exclude if step not in allowed],
    )
    assert prog.dst == ends[1]


def test_least_memory_is_that_of_the_dtype_that_is_sent() -> None:
    """A gathered tensor of half the width needs no more memory than both ends."""
    src, dst = parse("f64[12@x,6]", SMALL), parse("f64[12,6@x]", SMALL)
    without = (AllToAll, CollectivePermute, Exchange)
    for wire, least in ((None, 576), (torch.float32, 288)):
        plan = functools.partial(redistribute, src, dst, exclude=without, forward_dtype=wire)
        assert step_names(plan(max_memory=least)) == ["all_gather", "all_slice"]
        for memory in (0, least - 1):
            text = refusal(functools.partial(plan, max_memory=memory))
            assert text.endswith(f"give max_memory={least}, the least there is")
