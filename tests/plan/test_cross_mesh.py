"""Plans between two meshes, on the same devices, on some or on none in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    CollectivePermute,
    Exchange,
    ReduceScatter,
    Remesh,
)
from tests.helpers import reference, spec_grid, strategies
from tests.helpers.reference import check
from tests.helpers.spec_grid import error_text

Pair = tuple[Spec, Spec]

SIZES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 3), (2, 2, 2)]


def assert_right(prog: Program, src: Spec, dst: Spec) -> None:
    """Check that the program keeps the global value, run and interpreted.

    The transpose must be the adjoint in integers.
    """
    assert (prog.src, prog.dst) == (src, dst)
    check(prog)
    x, y = spec_grid.random_locals(src, 1), spec_grid.random_locals(dst.dual, 2)
    want = spec_grid.global_of(src, x)
    outputs, back = reference.simulate(prog, x), reference.simulate(prog.T, y)
    for shards in (outputs, prog(x)):
        assert torch.equal(spec_grid.global_of(dst, shards), want)
    assert prog == prog.T.T
    assert torch.equal(
        spec_grid.global_of(src.dual, prog.T(y)), spec_grid.global_of(src.dual, back)
    )
    assert spec_grid.pairing(dst, outputs, y) == spec_grid.pairing(src, x, back)


def assert_sane(prog: Program) -> None:
    """Check that bytes, memory and launches agree with the lower bound and with each other."""
    bound, cost = lower_bound(prog.src, prog.dst), prog.cost()
    assert cost.bytes_received >= bound.bytes_received
    assert cost.peak_memory >= bound.peak_memory
    assert (cost.launches == 0) == (cost.bytes_received == 0) == prog.is_local
    assert math.isfinite(cost.time)
    assert cost.messages >= cost.launches


# -- any two meshes ------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn, names: str) -> Mesh:
    """Mesh of some of eight devices, often in order."""
    sizes = draw(st.sampled_from(SIZES))
    count = math.prod(sizes)
    first = draw(st.integers(0, 8 - count))
    ordered = range(first, first + count)
    devices = draw(st.one_of(st.just(ordered), st.permutations(range(8)).map(lambda p: p[:count])))
    return Mesh(dict(zip(names, sizes, strict=False)), devices=devices)


@st.composite
def pairs(
    draw: st.DrawFn, cuts: Sequence[str] = ("even", "chunk", "sizes"), **options: object
) -> Pair:
    """Two layouts of one tensor on two meshes."""
    shape = draw(strategies.shapes(max_dims=3, max_size=7))
    options.setdefault("dtype", torch.int64)
    src, dst = (
        draw(strategies.specs(draw(meshes(names)), shape, splits=cuts, **options))  # type: ignore[arg-type]
        for names in ("xyz", "abx")
    )
    return src, dst


@given(pairs())
@settings(max_examples=150)
def test_plans_between_any_two_meshes(pair: Pair) -> None:
    prog = redistribute(*pair)
    assert_right(prog, *pair)
    assert_sane(prog)


OPTIONS = [{"objective": "bytes"}, *({"topology": Topology.cluster(n)} for n in (2, 4))]


@given(pairs(), st.sampled_from(OPTIONS))
def test_plans_of_any_objective_and_topology(pair: Pair, options: dict[str, Any]) -> None:
    prog = redistribute(*pair, **options)
    assert_right(prog, *pair)
    assert_sane(prog)


@given(pairs(states=("sharded", "invariant")))
@settings(max_examples=150)
def test_sharded_pairs_meet_the_lower_bound(pair: Pair) -> None:
    prog = redistribute(*pair, objective="bytes")
    bound = lower_bound(*pair)
    assert prog.cost().bytes_received == bound.bytes_received
    fits = redistribute(*pair, max_memory=bound.peak_memory)
    assert fits.cost().peak_memory == bound.peak_memory
    assert_right(fits, *pair)


@given(pairs(states=("sharded", "invariant", "unreduced"), kinds=("max",)))
def test_unreduced_maxima_between_meshes(pair: Pair) -> None:
    # Zeros are not neutral for a maximum, so nothing is embedded.
    src, dst = pair
    dst = dst.replace(partition=P(*dst.partition.partitions))
    prog = redistribute(src, dst)
    x = spec_grid.random_locals(src, 1)
    for y in (reference.simulate(prog, x), prog(x)):
        assert torch.equal(spec_grid.global_of(dst, y), spec_grid.global_of(src, x))


# -- the same devices ----------------------------------------------------------------------


def kinds(prog: Program) -> list[type]:
    return [type(step) for step in prog.steps]


FLAT, SQUARE, CUBE = Mesh(d=8), Mesh(x=2, y=4), Mesh(a=2, b=2, c=2)


@pytest.mark.parametrize(
    ("src", "src_mesh", "dst", "dst_mesh", "steps"),
    [
        ("f32[64@d]", FLAT, "f32[64@(x,y)]", SQUARE, [Remesh]),
        ("f32[64@(x,y)]", SQUARE, "f32[64@(a,b,c)]", CUBE, [Remesh]),
        ("f32[64@x]", SQUARE, "f32[64@a]", CUBE, [Remesh]),
        ("f32[64@x,8]", SQUARE, "f32[64@u,8]", Mesh(u=2, v=4), [Remesh]),
        ("f32[64]", FLAT, "f32[64@x]", SQUARE, [Remesh, AllSlice]),
        ("f32[64@x,8]", SQUARE, "f32[64@d,8]", FLAT, [AllSlice, Remesh]),
        ("f32[64@d,64]", FLAT, "f32[64@x,64@y]", SQUARE, [Remesh, AllToAll]),
        ("f32[64]{unreduced: d}", FLAT, "f32[64@(x,y)]", SQUARE, [Remesh, ReduceScatter]),
        ("f32[6400@d]", FLAT, "f32[6400@x]", SQUARE, [Remesh, AllGather]),
        ("f32[64@(y,x)]", SQUARE, "f32[64@d]", FLAT, [CollectivePermute, Remesh]),
    ],
)
def test_same_devices_in_one_order_remesh(
    src: str, src_mesh: Mesh, dst: str, dst_mesh: Mesh, steps: list[type]
) -> None:
    ends = parse(src, src_mesh), parse(dst, dst_mesh)
    prog = redistribute(*ends, objective="bytes")
    assert [step for step in kinds(prog) if step is not Remesh] == [
        step for step in steps if step is not Remesh
    ]
    assert Remesh in kinds(prog)
    assert prog.cost().bytes_received == lower_bound(*ends).bytes_received
    assert_right(prog, *ends)


def test_same_devices_in_another_order_exchange() -> None:
    reverse = Mesh(d=8, devices=range(7, -1, -1))
    ends = parse("f32[64@d]", FLAT), parse("f32[64@d]", reverse)
    prog = redistribute(*ends)
    assert kinds(prog) == [Exchange]
    assert prog.cost().bytes_received == 32
    assert_right(prog, *ends)
    replicated = parse("f32[64]", FLAT), parse("f32[64]", reverse)
    assert redistribute(*replicated).is_local
    assert_right(redistribute(*replicated), *replicated)


# -- other devices -------------------------------------------------------------------------

CASES = [
    # A growing job, a shrinking one, a trainer to a server on other devices, and a stage.
    ("f32[24@x,8]", Mesh(x=2), "f32[24@x,8]", Mesh(x=3)),
    ("f32[24@x,8]", Mesh(x=4), "f32[24,8@y]", Mesh(y=2, devices=range(2, 4))),
    ("f32[24@x,8@y]", Mesh(x=3, y=2), "f32[24,8@t]", Mesh(t=4, devices=range(6, 10))),
    ("f32[24@x,8]", Mesh(x=4), "f32[24@x,8]", Mesh(x=4, devices=range(4, 8))),
]  # fmt: skip


@pytest.mark.parametrize(("src", "src_mesh", "dst", "dst_mesh"), CASES)
def test_other_devices_exchange(src: str, src_mesh: Mesh, dst: str, dst_mesh: Mesh) -> None:
    ends = parse(src, src_mesh), parse(dst, dst_mesh)
    for pair in (ends, ends[::-1]):
        prog = redistribute(*pair)
        assert kinds(prog) == [Exchange]
        assert prog.cost().bytes_received == lower_bound(*pair).bytes_received
        assert_right(prog, *pair)


def test_partial_sums_are_reduced_before_they_leave() -> None:
    src = parse("f32[4096,1024]{unreduced: x}", Mesh(x=4))
    dst = parse("f32[4096@t,1024]", Mesh(t=4, devices=range(4, 8)))
    prog = redistribute(src, dst)
    assert kinds(prog) == [ReduceScatter, Exchange]
    assert prog.cost().bytes_received == 3 * 4096 * 1024  # 3/4 to reduce, others 1/4 on arrival
    assert Exchange in kinds(redistribute(src, dst, exclude=(ReduceScatter,)))


def test_replicas_are_gathered_after_they_arrive() -> None:
    src = parse("f32[4096,1024@x]", Mesh(x=2))
    dst = parse("f32[4096,1024]", Mesh(t=8, devices=range(8, 16)))
    prog = redistribute(src, dst, topology=Topology.cluster(8))
    assert kinds(prog) == [Exchange, AllGather]
    assert prog.cost().bytes_received == lower_bound(src, dst).bytes_received
    small = [end.replace(dtype=torch.int64, shape=(8, 8)) for end in (src, dst)]
    assert_right(Program(small[0], prog.steps, small[1]), small[0], small[1])


def test_plans_between_hundreds_of_devices() -> None:
    src = Spec(Mesh(dp=32, tp=8), P("dp", "tp"), shape=(4096, 4096))
    dst = Spec(Mesh(tp=16, devices=range(256, 272)), P(None, "tp"), shape=(4096, 4096))
    prog = redistribute(src, dst)
    assert prog.cost().bytes_received >= lower_bound(src, dst).bytes_received
    assert prog == prog.T.T


# -- options and errors --------------------------------------------------------------------


RULE = "no program meets the restrictions"


def test_too_small_max_memory_is_refused() -> None:
    src, dst = parse("f32[24@x,8]", Mesh(x=2)), parse("f32[24,8]", Mesh(x=3, devices=range(2, 5)))
    assert error_text(lambda: redistribute(src, dst, max_memory=767)) == spec_grid.message(
        "fs.redistribute",
        f"{src} -> {dst}, max_memory=767",
        RULE,
        "give max_memory=768, the least there is",
    )
    assert redistribute(src, dst, max_memory=768).cost().peak_memory == 768


def test_excluding_exchange_is_refused_for_other_devices() -> None:
    src, dst = parse("f32[24@x,8]", Mesh(x=2)), parse("f32[24,8@x]", Mesh(x=2, devices=(1, 0)))
    value = f"{src} -> {dst}, exclude=Exchange"
    text = error_text(lambda: redistribute(src, dst, exclude=Exchange))
    assert text == spec_grid.message("fs.redistribute", value, RULE, "allow Exchange")


def test_excluding_remesh_makes_same_devices_exchange() -> None:
    ends = parse("f32[64@d]", FLAT), parse("f32[64@x]", SQUARE)
    prog = redistribute(*ends, exclude=Remesh)
    assert Remesh not in kinds(prog)
    assert Exchange in kinds(prog)
    assert_right(prog, *ends)
    text = error_text(lambda: redistribute(*ends, exclude=(Remesh, Exchange)))
    assert "allow Remesh" in text or "allow Exchange" in text


def test_reductions_of_one_axis_name_may_differ_between_meshes() -> None:
    src = parse("i64[12]{unreduced: x=max}", Mesh(x=2))
    dst = parse("i64[12]{unreduced: x}", Mesh(x=3, devices=range(2, 5)))
    prog = redistribute(src, dst)
    x = spec_grid.random_locals(src, 1)
    assert torch.equal(spec_grid.global_of(dst, prog(x)), spec_grid.global_of(src, x))
    assert AllReduce not in kinds(prog)


def test_different_global_shapes_are_refused() -> None:
    src, dst = parse("f32[12@x]", Mesh(x=2)), parse("f32[6@y]", Mesh(y=3))
    assert "the same global shape: (12,) is not (6,)" in error_text(lambda: redistribute(src, dst))
