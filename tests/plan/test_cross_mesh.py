"""Plans between two meshes, on the same devices, on some or on none in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program, check
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

Pair = tuple[Spec, Spec]

SIZES = [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 3), (2, 2, 2)]


def assert_right(prog: Program, src: Spec, dst: Spec) -> None:
    """It leads from `src` to `dst` by slices of the global tensor, as run and as interpreted.

    Every value of a tensor goes there, and the transpose is the adjoint in integers.
    """
    assert (prog.src, prog.dst) == (src, dst)
    check(prog)
    x, y = spec_grid.random_locals(src, 1), spec_grid.random_locals(dst.dual, 2)
    want = spec_grid.global_of(src, x)
    made, back = reference.simulate(prog, x), reference.simulate(prog.T, y)
    for each in (made, prog(x)):
        assert torch.equal(spec_grid.global_of(dst, each), want)
    assert prog == prog.T.T
    assert torch.equal(
        spec_grid.global_of(src.dual, prog.T(y)), spec_grid.global_of(src.dual, back)
    )
    assert spec_grid.pairing(dst, made, y) == spec_grid.pairing(src, x, back)


def assert_sane(prog: Program) -> None:
    """Nothing is sent that need not be where shards move, and something where it must."""
    bound, cost = lower_bound(prog.src, prog.dst), prog.cost()
    assert cost.bytes_received >= bound.bytes_received
    assert cost.peak_memory >= bound.peak_memory
    assert (cost.launches == 0) == (cost.bytes_received == 0) == prog.is_local
    assert math.isfinite(cost.time)
    assert cost.messages >= cost.launches


# -- any two meshes ------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn, names: str) -> Mesh:
    """A mesh of some of eight devices, often in order."""
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
    """Any two layouts of one tensor on two meshes."""
    shape = draw(strategies.shapes(max_dims=3, max_size=7))
    options.setdefault("dtype", torch.int64)
    one, other = (
        draw(strategies.specs(draw(meshes(names)), shape, cuts=cuts, **options))  # type: ignore[arg-type]
        for names in ("xyz", "abx")
    )
    return one, other


@given(pairs())
@settings(max_examples=150)
def test_any_pair(pair: Pair) -> None:
    prog = redistribute(*pair)
    assert_right(prog, *pair)
    assert_sane(prog)


OPTIONS = [{"objective": "bytes"}, *({"topology": Topology.cluster(n)} for n in (2, 4))]


@given(pairs(), st.sampled_from(OPTIONS))
def test_any_objective_and_topology(pair: Pair, options: dict[str, Any]) -> None:
    prog = redistribute(*pair, **options)
    assert_right(prog, *pair)
    assert_sane(prog)


@given(pairs(states=("sharded", "invariant")))
@settings(max_examples=150)
def test_shards_that_move_meet_the_bound(pair: Pair) -> None:
    prog = redistribute(*pair, objective="bytes")
    bound = lower_bound(*pair)
    assert prog.cost().bytes_received == bound.bytes_received
    fits = redistribute(*pair, max_memory=bound.peak_memory)
    assert fits.cost().peak_memory == bound.peak_memory
    assert_right(fits, *pair)


@given(pairs(states=("sharded", "invariant", "unreduced"), kinds=("max",)))
def test_another_reduction(pair: Pair) -> None:
    # Candidates of a maximum are not addends: nothing is embedded among them.
    src, dst = pair
    dst = dst.replace(partition=P(*dst.partition.partitions))
    prog = redistribute(src, dst)
    x = spec_grid.random_locals(src, 1)
    for made in (reference.simulate(prog, x), prog(x)):
        assert torch.equal(spec_grid.global_of(dst, made), spec_grid.global_of(src, x))


# -- the same devices ----------------------------------------------------------------------


def kinds(prog: Program) -> list[type]:
    return [type(step) for step in prog.steps]


FLAT, SQUARE, CUBE = Mesh(d=8), Mesh(x=2, y=4), Mesh(a=2, b=2, c=2)


@pytest.mark.parametrize(
    ("src", "there", "dst", "on", "steps"),
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
def test_the_same_devices_in_one_order(
    src: str, there: Mesh, dst: str, on: Mesh, steps: list[type]
) -> None:
    ends = parse(src, there), parse(dst, on)
    prog = redistribute(*ends, objective="bytes")
    assert [step for step in kinds(prog) if step is not Remesh] == [
        step for step in steps if step is not Remesh
    ]
    assert Remesh in kinds(prog)
    assert prog.cost().bytes_received == lower_bound(*ends).bytes_received
    assert_right(prog, *ends)


def test_the_same_devices_in_another_order() -> None:
    turned = Mesh(d=8, devices=range(7, -1, -1))
    ends = parse("f32[64@d]", FLAT), parse("f32[64@d]", turned)
    prog = redistribute(*ends)
    assert kinds(prog) == [Exchange]
    assert prog.cost().bytes_received == 32
    assert_right(prog, *ends)
    alike = parse("f32[64]", FLAT), parse("f32[64]", turned)
    assert redistribute(*alike).is_local
    assert_right(redistribute(*alike), *alike)


# -- other devices -------------------------------------------------------------------------

CASES = [
    # A job that grows, one that shrinks, from a trainer to an engine beside it, and a stage.
    ("f32[24@x,8]", Mesh(x=2), "f32[24@x,8]", Mesh(x=3)),
    ("f32[24@x,8]", Mesh(x=4), "f32[24,8@y]", Mesh(y=2, devices=range(2, 4))),
    ("f32[24@x,8@y]", Mesh(x=3, y=2), "f32[24,8@t]", Mesh(t=4, devices=range(6, 10))),
    ("f32[24@x,8]", Mesh(x=4), "f32[24@x,8]", Mesh(x=4, devices=range(4, 8))),
]  # fmt: skip


@pytest.mark.parametrize(("src", "there", "dst", "on"), CASES)
def test_other_devices(src: str, there: Mesh, dst: str, on: Mesh) -> None:
    ends = parse(src, there), parse(dst, on)
    for pair in (ends, ends[::-1]):
        prog = redistribute(*pair)
        assert kinds(prog) == [Exchange]
        assert prog.cost().bytes_received == lower_bound(*pair).bytes_received
        assert_right(prog, *pair)


def test_addends_are_reduced_before_they_leave() -> None:
    src = parse("f32[4096,1024]{unreduced: x}", Mesh(x=4))
    dst = parse("f32[4096@t,1024]", Mesh(t=4, devices=range(4, 8)))
    prog = redistribute(src, dst)
    assert kinds(prog) == [ReduceScatter, Exchange]
    assert prog.cost().bytes_received == 4 * 4096 * 1024  # three quarters, and what arrives
    assert Exchange in kinds(redistribute(src, dst, exclude=(ReduceScatter,)))


def test_what_many_hold_is_spread_where_it_arrives() -> None:
    src = parse("f32[4096,1024@x]", Mesh(x=2))
    dst = parse("f32[4096,1024]", Mesh(t=8, devices=range(8, 16)))
    prog = redistribute(src, dst, topology=Topology.cluster(8))
    assert kinds(prog) == [Exchange, AllGather]
    assert prog.cost().bytes_received == lower_bound(src, dst).bytes_received
    small = [end.replace(dtype=torch.int64, shape=(8, 8)) for end in (src, dst)]
    assert_right(Program(small[0], prog.steps, small[1]), small[0], small[1])


def test_many_devices_are_planned_for() -> None:
    src = Spec(Mesh(dp=32, tp=8), P("dp", "tp"), shape=(4096, 4096))
    dst = Spec(Mesh(tp=16, devices=range(256, 272)), P(None, "tp"), shape=(4096, 4096))
    prog = redistribute(src, dst)
    assert prog.cost().bytes_received >= lower_bound(src, dst).bytes_received
    assert prog == prog.T.T


# -- options and errors --------------------------------------------------------------------


def refusal(plan: Callable[[], object]) -> str:
    with pytest.raises(ShardingError) as caught:
        plan()
    return str(caught.value)


RULE = "no program meets the restrictions"


def test_memory_that_does_not_suffice() -> None:
    src, dst = parse("f32[24@x,8]", Mesh(x=2)), parse("f32[24,8]", Mesh(x=3, devices=range(2, 5)))
    assert refusal(lambda: redistribute(src, dst, max_memory=767)) == spec_grid.message(
        "fs.redistribute",
        f"{src} -> {dst}, max_memory=767",
        RULE,
        "give max_memory=768, the least there is",
    )
    assert redistribute(src, dst, max_memory=768).cost().peak_memory == 768


def test_without_exchanges_other_devices_are_out_of_reach() -> None:
    src, dst = parse("f32[24@x,8]", Mesh(x=2)), parse("f32[24,8@x]", Mesh(x=2, devices=(1, 0)))
    given = f"{src} -> {dst}, exclude=Exchange"
    text = refusal(lambda: redistribute(src, dst, exclude=Exchange))
    assert text == spec_grid.message("fs.redistribute", given, RULE, "allow Exchange")


def test_without_remeshes_the_same_devices_exchange() -> None:
    ends = parse("f32[64@d]", FLAT), parse("f32[64@x]", SQUARE)
    prog = redistribute(*ends, exclude=Remesh)
    assert Remesh not in kinds(prog)
    assert Exchange in kinds(prog)
    assert_right(prog, *ends)
    text = refusal(lambda: redistribute(*ends, exclude=(Remesh, Exchange)))
    assert "allow Remesh" in text or "allow Exchange" in text


def test_reductions_of_one_name_on_two_meshes_may_differ() -> None:
    src = parse("i64[12]{unreduced: x=max}", Mesh(x=2))
    dst = parse("i64[12]{unreduced: x}", Mesh(x=3, devices=range(2, 5)))
    prog = redistribute(src, dst)
    x = spec_grid.random_locals(src, 1)
    assert torch.equal(spec_grid.global_of(dst, prog(x)), spec_grid.global_of(src, x))
    assert AllReduce not in kinds(prog)


def test_global_shapes_are_kept() -> None:
    src, dst = parse("f32[12@x]", Mesh(x=2)), parse("f32[6@y]", Mesh(y=3))
    assert "keeps the global shape: (12,) is not (6,)" in refusal(lambda: redistribute(src, dst))
