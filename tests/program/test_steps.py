"""Steps: typing rules, transposes, refusals, averages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.program import steps as steps_module
from fshard.program.infer import infer
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    HaloExchange,
    HaloReduce,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.program.transpose import transpose
from tests.helpers import spec_grid
from tests.helpers.reference import check, global_value, shards_of, simulate, simulate_step
from tests.helpers.step_table import IDS, TABLE, XY, spec_of

# -- typing rules and transposes -----------------------------------------------------------


@pytest.mark.parametrize(("step", "src", "dst", "adjoint"), TABLE, ids=IDS)
def test_types_of_steps_equal_the_table(step: Step, src: str, dst: str, adjoint: Step) -> None:
    prog = Program(spec_of(src), (step,))
    assert str(prog.dst) == dst
    assert prog.T.steps == (adjoint,)
    assert transpose(prog.steps[0], prog.src) == adjoint
    assert (prog.T.src, prog.T.dst) == (prog.dst.dual, prog.src.dual)
    assert prog == prog.T.T
    check(prog)
    check(prog.T)


@pytest.mark.parametrize(("step", "src"), [row[:2] for row in TABLE], ids=IDS)
def test_step_keeps_the_global_value(step: Step, src: str) -> None:
    prog = Program(spec_of(src), (step,))
    x = spec_grid.random_locals(prog.src, 1)
    y = simulate_step(step, prog.src, x)
    torch.testing.assert_close(prog(x), y)
    want = spec_grid.global_of(prog.src, x)
    torch.testing.assert_close(spec_grid.global_of(prog.dst, y), want.to(prog.dst.dtype))
    torch.testing.assert_close(global_value(y, prog.dst), want.to(prog.dst.dtype))


@pytest.mark.parametrize(("step", "src"), [row[:2] for row in TABLE], ids=IDS)
def test_step_and_transpose_are_adjoint(step: Step, src: str) -> None:
    prog = Program(spec_of(src), (step,))
    x, y = spec_grid.random_locals(prog.src, 1), spec_grid.random_locals(prog.dst.dual, 2)
    left = spec_grid.pairing(prog.dst, simulate(prog, x), y)
    right = spec_grid.pairing(prog.src, x, simulate(prog.T, y))
    torch.testing.assert_close(left.double(), right.double())


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("i64[4]{unreduced: y, z}", "i64[4]{unreduced: x, y}"),
        ("i64[4@x]{unreduced: y, z}", "i64[4@z]{unreduced: x, y}"),
    ],
)
def test_permute_beside_axes_that_stay_unreduced(src: str, dst: str) -> None:
    prog = Program(spec_of(src), (CollectivePermute(spec_of(dst).partition),))
    x = spec_grid.random_locals(prog.src, 1)
    want = spec_grid.global_of(prog.src, x)
    assert torch.equal(global_value(simulate(prog, x), prog.dst), want)
    assert torch.equal(global_value(prog(x), prog.dst), want)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("f64[4]{unreduced: b, c; reduced: a}", "f64[4]{unreduced: a, b; reduced: c}"),
        ("f64[4]{unreduced: b=avg, c}", "f64[4]{unreduced: a, b=avg}"),
        ("f64[4]{unreduced: b, c}", "f64[4]{unreduced: a, b}"),
        ("f64[4@c]{unreduced: a, b}", "f64[4@a]{unreduced: b, c}"),
        ("f64[12@(a,b)]{unreduced: c}", "f64[12@(c,b)]{unreduced: a}"),
        ("f64[12@(a,b,c)]", "f64[12@(c,b,a)]"),
        ("f64[12@(b,c)]{reduced: a=avg}", "f64[12@(a,b)]{reduced: c=avg}"),
    ],
)
def test_permute_of_unreduced_values(src: str, dst: str) -> None:
    for mesh in (Mesh(a=2, b=3, c=2), Mesh(a=2, b=3, c=2, devices=range(11, -1, -1))):
        prog = Program(parse(src, mesh), (CollectivePermute(parse(dst, mesh).partition),))
        x = spec_grid.random_locals(prog.src, 1)
        for actual, expected in zip(prog(x), simulate(prog, x), strict=True):
            assert torch.equal(actual, expected)


def test_table_has_every_step() -> None:
    """Steps that keep the global value: those of halos have tests of their own."""
    halo_steps = {HaloExchange, HaloReduce}
    assert {type(step) for step, *_ in TABLE} == set(get_args(Step)) - halo_steps
    assert {*steps_module.__all__} - {"Collective", "LocalStep", "Step"} == {
        step.__name__ for step in get_args(Step)
    }


NONLINEAR: list[tuple[Step, str, str]] = [
    (AllReduce("x"), "f64[4]{unreduced: x=max}", "f64[4]"),
    (AllReduce("x"), "bool[4]{unreduced: x=max}", "bool[4]"),
    (AllReduce("x"), "bool[4]{unreduced: x=min}", "bool[4]"),
    (AllReduce(XY), "i64[4]{unreduced: x=product, y=product}", "i64[4]"),
    (AllReduce("x", "reduced"), "f64[4]{unreduced: x=min}", "f64[4]{reduced: x}"),
    (ReduceScatter("x", 0), "f64[4]{unreduced: x=max}", "f64[4@x]"),
    (ReduceScatter("y", 0, (1, 4, 0)), "i64[5]{unreduced: y=min}", "i64[5@y:1+4+0]"),
    (ReplicatedToUnreduced(XY, "max"), "f64[4]", "f64[4]{unreduced: x=max, y=max}"),
    (ReplicatedToUnreduced("x", "min"), "u8[4]", "u8[4]{unreduced: x=min}"),
    (ReplicatedToUnreduced("x", "product"), "c64[4]{reduced: x}", "c64[4]{unreduced: x=product}"),
    (ReplicatedToUnreduced("y", "min"), "bool[6]", "bool[6]{unreduced: y=min}"),
    (ShardedToUnreduced("y", 0, "max"), "bool[6@y]", "bool[6]{unreduced: y=max}"),
    (ShardedToUnreduced("y", 0, "product"), "i64[6@y]", "i64[6]{unreduced: y=product}"),
    (ShardedToUnreduced("y", 0, "min"), "bf16[5@y:3+0+2]", "bf16[5]{unreduced: y=min}"),
]


@pytest.mark.parametrize(("step", "src", "dst"), NONLINEAR, ids=str)
def test_nonlinear_reductions_have_no_transpose(step: Step, src: str, dst: str) -> None:
    prog = Program(spec_of(src), (step,))
    assert str(prog.dst) == dst
    x = spec_grid.random_locals(prog.src, 3)
    assert all(map(torch.equal, prog(x), simulate(prog, x)))
    y = global_value(simulate(prog, x), prog.dst)
    assert y.dtype == prog.src.dtype
    assert torch.equal(y, spec_grid.global_of(prog.src, x).to(y.dtype))
    assert not prog.is_linear
    with pytest.raises(ShardingError, match="a reduction must be a sum or an average to be linear"):
        _ = prog.T


def test_transpose_refuses_nonlinear_specs() -> None:
    prog = Program(spec_of("f32[4@x]{unreduced: y=max}"), (AllGather("x", 0),))
    with pytest.raises(ShardingError, match="a reduction must be sum or avg"):
        _ = prog.T
    assert not prog.is_linear


# step, source, text of the error
REFUSED: list[tuple[Step, str, str]] = [
    (ShardedToUnreduced("x", 0, by="z"), "f64[4@x]", "insert fs.InvariantToReduced before"),
    (ShardedToUnreduced("x", 0, by="y"), "f64[4@x]{reduced: y}", "many ranks (.|\\n)*3 is not 2"),
    (ShardedToUnreduced("x", 0, by="z"), "f64[6@y]{reduced: z}", "must be consecutive in dim 0"),
    (AllGather("w", 0), "f64[4@x]", "axis 'w' (.|\\n)*an axis must be one of x, y, z"),
    (AllGather(("x", "x"), 0), "f64[4@x]", "an axis must be named at most once"),
    (AllGather("x", 0), "f64[12@(x,y)]", "most minor of dim 0, which has .'x', 'y'."),
    (AllGather("x", 1), "f64[4@x,4]", "name a dim that is sharded over them"),
    (AllGather((), 0), "f64[4@x]", "the most minor of dim 0"),
    (AllGather("x", 2), "f64[4@x,4]", r"dim 2 must be one of the spec's 2\n.*a dim in 0..1"),
    (AllGather("x", -1), "f64[4,4@x]", "dim -1 must be one of the spec's 2"),
    (AllGather("x", 0), "f64[]", "a 0-dim tensor has none to shard"),
    (AllGather("x", 0, "reduced", "max"), "f64[4@x]", "a reduction must be one of sum, avg"),
    (AllGather("x", 0, "reduced", "avg"), "i64[4@x]", "an average of integers"),
    (AllSlice("x", 0), "f64[4@x,4]", "all invariant, or all reduced"),
    (AllSlice("x", 0), "f64[4]{unreduced: x}", "all invariant, or all reduced"),
    (AllSlice(XY, 0), "f64[12]{reduced: x}", "all invariant, or all reduced"),
    (AllSlice(XY, 0), "f64[12]{reduced: x, y=avg}", "all invariant, or all reduced"),
    (AllSlice((), 0), "f64[12]", "all invariant, or all reduced"),
    (AllSlice("y", 0), "f64[5]", r"5 % 3 = 2(.|\n)*give sizes="),
    (AllSlice("y", 0), "f64[8@x:3+5]", r"5 % 3 = 2(.|\n)*give sizes="),
    (AllSlice("x", 0, (1, 2)), "f64[4]", r"sizes \(1, 2\) must split shards of \(4,\), not \[3\]"),
    (AllSlice("x", 0, (4,)), "f64[4]", "the 2 sizes"),
    (AllSlice("x", 0, (5, -1)), "f64[4]", "the 2 sizes"),
    (AllSlice("x", 0, (2, 1, 2, 1)), "f64[6@z:4+2]", r"groups of 2 sum to \(4, 2\)"),
    (AllSlice("x", 1), "f64[4]", "dim 1 must be one of the spec's 1"),
    (AllReduce("x"), "f64[4]", "unreduced by one reduction on all of"),
    (AllReduce(XY), "f64[4]{unreduced: x}", "unreduced by one reduction on all of"),
    (AllReduce(XY), "f64[4]{unreduced: x, y=avg}", "each reduction in its own step"),
    (AllReduce("x", "reduced", "avg"), "i64[4]{unreduced: x}", "an average of integers"),
    (ReduceScatter("x", 0), "f64[4@x]", "unreduced by one reduction on all of"),
    (ReduceScatter("x", 0), "f64[5]{unreduced: x}", "5 % 2 = 1"),
    (AllToAll("x", 0, 0), "f64[4@x,4]", r"the two dims must differ\n.*collective_permute"),
    (AllToAll("x", 1, 0), "f64[4@x,4]", "the most minor of dim 1"),
    (AllToAll("y", 0, 1), "f64[6@y,4]", "4 % 3 = 1"),
    (AllToAll("y", 0, 2), "f64[6@y,4]", "dim 2 must be one of the spec's 2"),
    (CollectivePermute(P("z", None, "x")), "f64[4@x,4]", "one entry per dim: 3 > 2"),
    (CollectivePermute(P("w")), "f64[4@x]", "axis 'w'"),
    (CollectivePermute(P("y")), "f64[6@x]", "as many shards on every dim"),
    (CollectivePermute(P(None, "x")), "f64[4@x,4]", "as many shards on every dim"),
    (CollectivePermute(P(None)), "f64[4]{unreduced: x}", "as many partial sums"),
    (CollectivePermute(P(None, reduced={"x"})), "f64[4]{unreduced: x}", "as many partial sums"),
    (CollectivePermute(P(None, unreduced={"z": "max"})), "f64[4]{unreduced: x}", "partial sums"),
    (InvariantToReduced("x"), "f64[4]{reduced: x}", "the axes must be invariant"),
    (InvariantToReduced("x"), "f64[4@x]", "all invariant, or all reduced"),
    (InvariantToReduced("x", "max"), "f64[4]", "a reduction must be one of sum, avg"),
    (InvariantToReduced("x", "avg"), "i64[4]", "an average of integers"),
    (ReducedToInvariant("x"), "f64[4]", r"the axes must be reduced\n.*need no step"),
    (ReducedToInvariant("x"), "f64[4]{unreduced: x}", "all invariant, or all reduced"),
    (ReplicatedToUnreduced("x"), "f64[4]{unreduced: x}", "all invariant, or all reduced"),
    (ReplicatedToUnreduced("x", "mean"), "f64[4]", "one of sum, avg, max, min, product"),
    (ReplicatedToUnreduced("x", "avg"), "i64[4]", "an average of integers"),
    (ReplicatedToUnreduced("x"), "bool[4]", "booleans have no sum"),
    (ReplicatedToUnreduced("x", "max"), "c64[4]", "complex numbers have no order"),
    (ShardedToUnreduced("x", 0), "f64[4]", "the most minor of dim 0"),
    (ShardedToUnreduced("x", 0), "bool[4@x]", "booleans have no sum"),
    (Cast(torch.int64), "f64[4]{unreduced: x=avg}", "an average of integers"),
    (Cast(torch.bool), "f64[4]{unreduced: x}", "booleans have no sum"),
    (Cast(torch.complex64), "f64[4]{unreduced: x=max}", "complex numbers have no order"),
]


@pytest.mark.parametrize(("step", "src", "message"), REFUSED, ids=str)
def test_invalid_steps_are_refused(step: Step, src: str, message: str) -> None:
    with pytest.raises(ShardingError, match=message) as caught:
        Program(spec_of(src), (step,))
    assert all(word in str(caught.value) for word in ("given:", "rule:", "fix:"))
    with pytest.raises(ShardingError):
        simulate_step(step, spec_of(src), shards_of(torch.zeros(spec_of(src).shape,
                      dtype=spec_of(src).dtype), spec_of(src)))  # fmt: skip


@pytest.mark.parametrize("step", [AllGather("x", 0, "reducd"), AllReduce("x", "unreduced")])
def test_an_unknown_state_is_refused(step: Step) -> None:
    src = spec_of("f64[4@x]" if isinstance(step, AllGather) else "f64[4]{unreduced: x}")
    with pytest.raises(ShardingError, match="invariant"):
        infer(step, src)


# -- averages ------------------------------------------------------------------------------

ROUND_TRIPS = [
    ("f64[6]", InvariantToReduced("y", "avg"), ReducedToInvariant("y")),
    ("f64[6]", ReplicatedToUnreduced("y", "avg"), AllReduce("y")),
    ("f64[6]{reduced: y=avg}", ReplicatedToUnreduced("y", "avg"), AllReduce("y", "reduced", "avg")),
    ("f64[6]{reduced: y}", ReplicatedToUnreduced("y", "avg"), AllReduce("y", "reduced")),
    ("f64[6@y]", ShardedToUnreduced("y", 0, "avg"), ReduceScatter("y", 0)),
    ("f64[6@y]", AllGather("y", 0, "reduced", "avg"), AllSlice("y", 0)),
    ("f64[5@y:1+0+4]", ShardedToUnreduced("y", 0, "avg"), ReduceScatter("y", 0, (1, 0, 4))),
    ("f64[5@y:1+0+4]", AllGather("y", 0, "reduced", "avg"), AllSlice("y", 0, (1, 0, 4))),
    ("f64[6]{reduced: y=avg}", ReducedToInvariant("y"), InvariantToReduced("y", "avg")),
    ("f64[6]{reduced: y=avg}", AllSlice("y", 0), AllGather("y", 0, "reduced", "avg")),
]


@pytest.mark.parametrize(("src", "there", "back"), ROUND_TRIPS, ids=str)
def test_average_round_trip(src: str, there: Step, back: Step) -> None:
    prog = Program(spec_of(src), (there, back))
    assert prog.dst == prog.src
    x = spec_grid.random_locals(prog.src, 5)
    for before, after in zip(x, simulate(prog, x), strict=True):
        torch.testing.assert_close(after, before)


def test_shards_of_averages() -> None:
    def after(step: Step, src: str, x: Sequence[list[float]]) -> list[list[float]]:
        spec = parse(src, mesh)
        shards = simulate_step(step, spec, [torch.tensor(part, dtype=torch.float64) for part in x])
        return [part.tolist() for part in shards]

    mesh = Mesh(x=2)
    avg, same = "f64[2]{unreduced: x=avg}", [[6.0, 8.0], [6.0, 8.0]]
    assert after(AllReduce("x"), avg, [[2, 4], [10, 12]]) == same
    assert after(ReduceScatter("x", 0), avg, [[2, 4], [10, 12]]) == [[6], [8]]
    assert after(AllReduce("x", "reduced", "avg"), avg, [[2, 4], [10, 12]]) == [[3, 4], [3, 4]]
    assert after(InvariantToReduced("x", "avg"), "f64[2]", same) == [[3, 4], [3, 4]]
    assert after(ReducedToInvariant("x"), "f64[2]{reduced: x=avg}", [[3, 4], [3, 4]]) == same
    assert after(AllSlice("x", 0), "f64[2]{reduced: x=avg}", [[3, 4], [3, 4]]) == [[6], [8]]
    assert after(AllGather("x", 0, "reduced", "avg"), "f64[2@x]", [[6], [8]]) == [[3, 4], [3, 4]]
    assert after(ReplicatedToUnreduced("x", "avg"), "f64[2]", same) == same
    assert after(ReplicatedToUnreduced("x"), "f64[2]", same) == [[6, 8], [0, 0]]
    assert after(ShardedToUnreduced("x", 0, "avg"), "f64[2@x]", [[6], [8]]) == [[12, 0], [0, 16]]
    assert after(ReplicatedToUnreduced("x", "max"), "f64[2]", same) == [[6, 8], [-math.inf] * 2]


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_shards_of_and_global_value_are_inverse(kind: str) -> None:
    x = torch.arange(24.0, dtype=torch.float64).reshape(4, 6) - 7
    for spec in spec_grid.all_specs(Mesh(x=2, y=3), (4, 6), dtype=torch.float64, kind=kind,
                                  uneven="chunk"):  # fmt: skip
        shards = shards_of(x, spec)
        assert torch.equal(global_value(shards, spec), x)
        assert torch.equal(spec_grid.global_of(spec, shards), x)


def test_global_value_asserts_equal_replicas() -> None:
    spec = spec_of("i64[4]{unreduced: y; reduced: z}")
    shards = [torch.zeros(4, dtype=torch.int64) for _ in range(12)]
    shards[7][3] = 1
    with pytest.raises(AssertionError, match="different replicas along 'x'"):
        global_value(shards, spec)
    with pytest.raises(AssertionError, match="rank 2 of"):
        global_value([*shards[:2], torch.zeros(5, dtype=torch.int64), *shards[3:]], spec)
