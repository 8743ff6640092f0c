"""Steps and programs: typing rules, transposes, averages, traffic, text, options."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import re
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.program import steps as steps_module
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import step_axes, traffic
from fshard.program.exchange_boxes import Piece, converted_axes, reduction_axes, sends
from fshard.program.infer import infer
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program
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
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.program.transpose import transpose
from tests.helpers import spec_grid
from tests.helpers.reference import check, global_value, shards_of, simulate, simulate_step

MESH = Mesh(x=2, y=3, z=2)
XY, YX = ("x", "y"), ("y", "x")


def spec_of(text: str) -> Spec:
    return parse(text, MESH)


# -- typing rules and transposes -----------------------------------------------------------

# step, source, target, transpose
TABLE: list[tuple[Step, str, str, Step]] = [
    (AllGather("x", 0), "f64[12@x,6]", "f64[12,6]", AllSlice("x", 0)),
    (AllGather("y", 0), "f64[12@(x,y),6]", "f64[12@x,6]", AllSlice("y", 0)),
    (AllGather(XY, 0), "f64[12@(x,y),6]", "f64[12,6]", AllSlice(XY, 0)),
    (AllGather(YX, 1), "f64[12,6@(y,x)]", "f64[12,6]", AllSlice(YX, 1)),
    (AllGather("x", 0), "f64[5@x:4+1]", "f64[5]", AllSlice("x", 0, (4, 1))),
    (AllGather("y", 0), "f64[9@(x,y):1+0+2+3+0+3]", "f64[9@x:3+6]",
     AllSlice("y", 0, (1, 0, 2, 3, 0, 3))),
    (AllGather("x", 0, "reduced"), "f64[4@x]", "f64[4]{reduced: x}", ReduceScatter("x", 0)),
    (AllGather("x", 0, "reduced"), "f64[5@x:4+1]{unreduced: y}",
     "f64[5]{unreduced: y; reduced: x}", ReduceScatter("x", 0, (4, 1))),
    (AllGather("x", 0, "reduced", "avg"), "f64[4@x]", "f64[4]{reduced: x=avg}",
     ReduceScatter("x", 0)),
    (AllSlice("x", 1), "f64[12,6]", "f64[12,6@x]", AllGather("x", 1)),
    (AllSlice("y", 0), "f64[12@x]{reduced: z}", "f64[12@(x,y)]{reduced: z}", AllGather("y", 0)),
    (AllSlice("y", 0), "f64[9@x:6+3]", "f64[9@(x,y):2+2+2+1+1+1]", AllGather("y", 0)),
    (AllSlice("y", 0, (5, 0, 0)), "f64[5]", "f64[5@y:5+0+0]", AllGather("y", 0)),
    (AllSlice(YX, 0), "f64[12]{reduced: x, y}", "f64[12@(y,x)]", ShardedToUnreduced(YX, 0)),
    (AllSlice("x", 0), "f64[12]{reduced: x=avg}", "f64[12@x]", ShardedToUnreduced("x", 0, "avg")),
    (AllReduce("x"), "f64[4]{unreduced: x}", "f64[4]", InvariantToReduced("x")),
    (AllReduce(XY), "f64[4@z]{unreduced: x, y}", "f64[4@z]", InvariantToReduced(XY)),
    (AllReduce("y"), "f64[4]{unreduced: y=avg}", "f64[4]", InvariantToReduced("y", "avg")),
    (AllReduce("x", "reduced"), "f64[4]{unreduced: x}", "f64[4]{reduced: x}",
     AllReduce("x", "reduced")),
    (AllReduce("y", "reduced"), "f64[4]{unreduced: y=avg}", "f64[4]{reduced: y}",
     AllReduce("y", "reduced", "avg")),
    (AllReduce("y", "reduced", "avg"), "f64[4]{unreduced: y}", "f64[4]{reduced: y=avg}",
     AllReduce("y", "reduced")),
    (AllReduce("y", "reduced", "avg"), "f64[4]{unreduced: y=avg}", "f64[4]{reduced: y=avg}",
     AllReduce("y", "reduced", "avg")),
    (ReduceScatter("x", 0), "f64[12,6]{unreduced: x}", "f64[12@x,6]", AllGather("x", 0, "reduced")),
    (ReduceScatter(YX, 1), "f64[12,6]{unreduced: x, y}", "f64[12,6@(y,x)]",
     AllGather(YX, 1, "reduced")),
    (ReduceScatter("y", 0, (1, 4, 0)), "f64[5]{unreduced: y}", "f64[5@y:1+4+0]",
     AllGather("y", 0, "reduced")),
    (ReduceScatter("y", 0), "f64[12@x]{unreduced: y=avg}", "f64[12@(x,y)]",
     AllGather("y", 0, "reduced", "avg")),
    (AllToAll("x", 0, 1), "f64[12@x,6]", "f64[12,6@x]", AllToAll("x", 1, 0)),
    (AllToAll("y", 0, 1), "f64[12@(x,y),6]", "f64[12@x,6@y]", AllToAll("y", 1, 0)),
    (AllToAll(XY, 1, 0), "f64[12@z,6@(x,y)]", "f64[12@(z,x,y),6]", AllToAll(XY, 0, 1)),
    (AllToAll("x", 0, 1, (6, 0)), "f64[5@x:4+1,6]", "f64[5,6@x:6+0]", AllToAll("x", 1, 0, (4, 1))),
    (CollectivePermute(P(YX)), "f64[12@(x,y)]", "f64[12@(y,x)]", CollectivePermute(P(XY))),
    (CollectivePermute(P("z")), "f64[4@x]", "f64[4@z]", CollectivePermute(P("x"))),
    (CollectivePermute(P("z", "x")), "f64[3@x:2+1,2@z]", "f64[3@z:chunk,2@x]",
     CollectivePermute(P("x", "z"))),
    (CollectivePermute(P("z", unreduced={"x"})), "f64[4@x]{unreduced: z}",
     "f64[4@z]{unreduced: x}", CollectivePermute(P("x", reduced={"z"}))),
    (CollectivePermute(P("y", unreduced={"x": "avg"})), "f64[6@y]{unreduced: z=avg}",
     "f64[6@y]{unreduced: x=avg}", CollectivePermute(P("y", reduced={"z": "avg"}))),
    (CollectivePermute(P(None, reduced={"x"})), "f64[4]{reduced: z}", "f64[4]{reduced: x}",
     CollectivePermute(P(None, unreduced={"z"}))),
    (AllToAll("y", 0, 1, also=(AllToAll("z", 0, 1),)), "f64[12@(x,y,z),6]", "f64[12@x,6@(y,z)]",
     AllToAll("y", 1, 0, also=(AllToAll("z", 1, 0),))),
    (AllToAll("x", 0, 1, also=(AllToAll("z", 1, 0),)), "f64[12@(y,x),6@z]", "f64[12@(y,z),6@x]",
     AllToAll("x", 1, 0, also=(AllToAll("z", 0, 1),))),
    (AllToAll("x", 0, 1, (5, 1), (AllToAll("z", 1, 0, (1, 4)),)), "f64[5@x:chunk,6@z:2+4]",
     "f64[5@z:1+4,6@x:5+1]", AllToAll("x", 1, 0, (3, 2), (AllToAll("z", 0, 1, (2, 4)),))),
    (Exchange(P("y")), "f64[12@x]", "f64[12@y]", Exchange(P("x"))),
    (Exchange(P("x", "y")), "f64[12@(y,x),6]", "f64[12@x,6@y]", Exchange(P(YX))),
    (Exchange(P("y"), ((5, 0, 0),)), "f64[5@z:3+2]", "f64[5@y:5+0+0]",
     Exchange(P("z"), ((3, 2),))),
    (Exchange(P("z", unreduced={"y"})), "f64[4]{unreduced: x, y}", "f64[4@z]{unreduced: y}",
     Exchange(P(reduced=XY))),
    (Exchange(P("x", reduced=("y", "z"))), "f64[4]{reduced: y}", "f64[4@x]{reduced: y, z}",
     Exchange(P(unreduced={"y"}))),
    (Exchange(P(None, "x", unreduced={"y"})), "f64[12@(x,y),6]", "f64[12,6@x]{unreduced: y}",
     Exchange(P(XY))),
    (Exchange(P(YX)), "f64[12,6@x]{reduced: y}", "f64[12@(y,x),6]",
     Exchange(P(None, "x", unreduced={"y"}))),
    (Exchange(P("x", unreduced={"y"})), "f64[12@y]", "f64[12@x]{unreduced: y}",
     Exchange(P("y"))),
    (Exchange(P("x", reduced={"z"}, unreduced={"y": "avg"}), ((1, 4),)),
     "f64[5@(y,z):1+1+0+0+2+1]{unreduced: x}", "f64[5@x:1+4]{unreduced: y=avg; reduced: z}",
     Exchange(P(("y", "z"), reduced={"x"}), ((1, 1, 0, 0, 2, 1),))),
    (Exchange(P("z", "y")), "f64[4@x,6]{reduced: y=avg}", "f64[4@z,6@y]",
     Exchange(P("x", unreduced={"y": "avg"}))),
    (Remesh(MESH, P("x", unreduced={"z"})), "f64[4@x]{unreduced: z}", "f64[4@x]{unreduced: z}",
     Remesh(MESH, P("x", reduced={"z"}))),
    (InvariantToReduced(XY), "f64[4@z]", "f64[4@z]{reduced: x, y}", AllReduce(XY)),
    (InvariantToReduced("y", "avg"), "f64[4]", "f64[4]{reduced: y=avg}", AllReduce("y")),
    (ReducedToInvariant("y"), "f64[4]{reduced: x, y}", "f64[4]{reduced: x}",
     ReplicatedToUnreduced("y")),
    (ReducedToInvariant("y"), "f64[4]{reduced: y=avg}", "f64[4]",
     ReplicatedToUnreduced("y", "avg")),
    (ReplicatedToUnreduced(XY), "f64[4]", "f64[4]{unreduced: x, y}", ReducedToInvariant(XY)),
    (ReplicatedToUnreduced("y", "avg"), "f64[4]", "f64[4]{unreduced: y=avg}",
     ReducedToInvariant("y")),
    (ReplicatedToUnreduced("y"), "f64[4]{reduced: y}", "f64[4]{unreduced: y}",
     ReplicatedToUnreduced("y")),
    (ReplicatedToUnreduced("y", "avg"), "f64[4]{reduced: y}", "f64[4]{unreduced: y=avg}",
     ReplicatedToUnreduced("y")),
    (ReplicatedToUnreduced("y"), "f64[4]{reduced: y=avg}", "f64[4]{unreduced: y}",
     ReplicatedToUnreduced("y", "avg")),
    (ShardedToUnreduced("y", 0), "f64[12@(x,y)]", "f64[12@x]{unreduced: y}", AllSlice("y", 0)),
    (ShardedToUnreduced("y", 0), "f64[5@y:1+4+0]", "f64[5]{unreduced: y}",
     AllSlice("y", 0, (1, 4, 0))),
    (ShardedToUnreduced("y", 0, "avg"), "f64[12@y]", "f64[12]{unreduced: y=avg}", AllSlice("y", 0)),
    (ShardedToUnreduced("x", 0, by="z"), "f64[12@(x,y)]{reduced: z}",
     "f64[12@(z,y)]{unreduced: x}", ShardedToUnreduced("z", 0, by="x")),
    (ShardedToUnreduced("x", 0, "avg", "z"), "f64[12@(y,x)]{reduced: z}",
     "f64[12@(y,z)]{unreduced: x=avg}", ShardedToUnreduced("z", 0, by="x")),
    (ShardedToUnreduced("x", 0, by="z"), "f64[5@x:4+1]{reduced: z=avg}",
     "f64[5@z:4+1]{unreduced: x}", ShardedToUnreduced("z", 0, "avg", "x")),
    (Cast(torch.float32), "f64[4@x]{unreduced: y}", "f32[4@x]{unreduced: y}", Cast(torch.float64)),
]  # fmt: skip
IDS = [f"{step} of {src}" for step, src, _, _ in TABLE]


@pytest.mark.parametrize(("step", "src", "dst", "adjoint"), TABLE, ids=IDS)
def test_table(step: Step, src: str, dst: str, adjoint: Step) -> None:
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
    assert {type(step) for step, *_ in TABLE} == set(get_args(Step))
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
def test_refused(step: Step, src: str, message: str) -> None:
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


# -- programs ------------------------------------------------------------------------------


def test_equal_sizes_are_dropped() -> None:
    src = spec_of("f32[12,6@y]")
    given = Program(src, (AllSlice("x", 0, (6, 6)), AllToAll("y", 1, 0, (2,) * 6)))
    plain = Program(src, [AllSlice(("x",), 0), AllToAll(["y"], 1, 0)])  # type: ignore[arg-type]
    assert given == plain
    assert hash(given) == hash(plain)
    assert [step.sizes for step in given.steps] == [None, None]  # type: ignore[union-attr]


def test_missing_sizes_are_filled_in() -> None:
    prog = Program(spec_of("f32[9@x:6+3]"), (AllSlice("y", 0),))
    assert prog.steps == (AllSlice("y", 0, (2, 2, 2, 1, 1, 1)),)


@pytest.mark.parametrize(
    ("src", "step", "plain"),
    [
        ("f32[4@x]", AllGather("x", 0, "invariant", "avg"), AllGather("x", 0)),
        ("f32[4]{unreduced: x}", AllReduce("x", "invariant", "avg"), AllReduce("x")),
    ],
    ids=str,
)
def test_a_kind_that_means_nothing_is_dropped(src: str, step: Step, plain: Step) -> None:
    assert Program(spec_of(src), (step,)) == Program(spec_of(src), (plain,))
    prog = Program(spec_of(src), (step,))
    assert prog == prog.T.T


def test_a_program_that_does_not_check_cannot_exist() -> None:
    src = spec_of("f32[12@x,6]")
    with pytest.raises(ShardingError, match="the most minor of dim 0"):
        Program(src, (AllGather("x", 0), AllGather("x", 0)))
    with pytest.raises(ShardingError, match="they must lead to the target, f32"):
        Program(src, (AllGather("x", 0),), src)
    assert Program(src, (AllGather("x", 0),), spec_of("f32[12,6]")).dst == spec_of("f32[12,6]")


def test_specs_between_the_steps() -> None:
    prog = Program(spec_of("f32[12@x]{unreduced: y}"), (ReduceScatter("y", 0), AllGather(XY, 0)))
    assert [str(spec) for spec in prog.specs] == [
        "f32[12@x]{unreduced: y}", "f32[12@(x,y)]", "f32[12]"]  # fmt: skip
    assert (prog.src, prog.dst) == (prog.specs[0], prog.specs[-1])


def test_then() -> None:
    first = Program(spec_of("f32[12@x,6]"), (AllToAll("x", 0, 1),))
    second = Program(first.dst, (AllGather("x", 1),))
    both = first.then(second)
    assert both == first >> second == Program(first.src, (*first.steps, *second.steps))
    assert both.T == second.T >> first.T
    empty = Program(first.src, ())
    assert empty >> first == first
    assert first >> Program(first.dst, ()) == first
    with pytest.raises(ShardingError, match=r"second must begin with(.|\n)*fs.redistribute"):
        first.then(first)
    with pytest.raises(ShardingError, match="given: its own dtype; then sends in bf16"):
        first >> Program(first.dst, second.steps, forward_dtype=torch.bfloat16)


def test_then_keeps_the_options_of_the_one_that_has_steps() -> None:
    src = spec_of("f32[12@x]")
    some = Program(src, (AllGather("x", 0),), forward_dtype=torch.bfloat16)
    assert (Program(src, ()) >> some).forward_dtype == torch.bfloat16
    assert (some >> Program(some.dst, ())).forward_dtype == torch.bfloat16


def test_the_empty_program() -> None:
    prog = Program(spec_of("f32[12@x]{unreduced: y}"), ())
    assert str(prog).endswith("Mesh(x=2, y=3, z=2)\n  (nothing to do)")
    assert Program(prog.src.dual, ()) == prog.T
    assert prog.is_local
    assert prog.is_linear
    cost = prog.cost()
    assert (cost.time, cost.bytes_sent, cost.bytes_received, cost.launches) == (0, 0, 0, 0)
    assert cost.peak_memory == 24
    x = spec_grid.random_locals(prog.src)
    assert all(map(torch.equal, simulate(prog, x), x))


def test_printing() -> None:
    prog = Program(
        spec_of("f32[1200@x,6@y]{unreduced: z}"),
        (ReduceScatter("z", 0), AllToAll("y", 1, 0), AllGather(("x", "z", "y"), 0, "reduced")),
        backward_dtype=torch.float64,
    )
    assert str(prog) == repr(prog)
    text = str(prog)
    assert text.startswith(f"{prog.src} -> {prog.dst}\n    on {MESH}, backward in f64\n  reduce_")
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()[2:]]
    assert rows == [
        ["reduce_scatter(z, dim 0)", "f32[1200@(x,z),6@y]", "2,400 B"],
        ["all_to_all(y, dim 1 -> 0)", "f32[1200@(x,z,y),6]", "1,600 B"],
        ["all_gather((x,z,y), dim 0) to reduced", "f32[1200,6]{reduced: x, y, z}", "26,400 B"],
    ]
    assert len({len(line) for line in text.splitlines()[2:]}) == 1
    assert prog.step_bytes == (2400, 1600, 26400)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (AllGather("x", 0), "all_gather(x, dim 0)"),
        (AllGather(XY, 1, "reduced", "avg"), "all_gather((x,y), dim 1) to reduced=avg"),
        (AllSlice("x", 0), "all_slice(x, dim 0)"),
        (AllReduce("x", "reduced"), "all_reduce(x) to reduced"),
        (ReduceScatter(XY, 0), "reduce_scatter((x,y), dim 0)"),
        (AllToAll("x", 0, 1), "all_to_all(x, dim 0 -> 1)"),
        (
            AllToAll(XY, 0, 1, also=(AllToAll("z", 2, 1),)),
            "all_to_all((x,y), dim 0 -> 1; z, dim 2 -> 1)",
        ),
        (CollectivePermute(P("x", None)), "collective_permute(P('x'))"),
        (Exchange(P(None, "x")), "exchange(P(None, 'x'))"),
        (Exchange(P("x"), ((1, 2), None)), "exchange(P('x'))"),
        (Exchange(P("x"), mesh=Mesh(x=3)), "exchange(P('x'), Mesh(x=3))"),
        (Remesh(Mesh(a=2, b=2), P(None, "a")), "remesh(Mesh(a=2, b=2))"),
        (InvariantToReduced("x", "avg"), "invariant_to_reduced(x, avg)"),
        (ReducedToInvariant(XY), "reduced_to_invariant((x,y))"),
        (ReplicatedToUnreduced("x", "max"), "replicated_to_unreduced(x, max)"),
        (ShardedToUnreduced("x", 0), "sharded_to_unreduced(x, dim 0)"),
        (ShardedToUnreduced("x", 0, "min"), "sharded_to_unreduced(x, dim 0, min)"),
        (Cast(torch.bfloat16), "cast(bf16)"),
    ],
)
def test_text_of_a_step(step: Step, text: str) -> None:
    assert str(step) == text
    assert text.startswith(step.name)


def test_programs_are_values() -> None:
    prog = Program(spec_of("f32[5@x:4+1]"), (AllGather("x", 0),), forward_dtype=torch.bfloat16)
    copy = pickle.loads(pickle.dumps(prog))
    assert copy == prog
    assert hash(copy) == hash(prog)
    assert copy.specs == prog.specs
    assert copy.forward_dtype == torch.bfloat16
    assert Program(prog.src, prog.steps) != prog
    with pytest.raises(dataclasses.FrozenInstanceError):
        prog.src = prog.dst  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        prog.steps[0].dim = 1  # type: ignore[misc, union-attr]


# -- topologies ----------------------------------------------------------------------------


def test_program_remembers_the_topology_it_was_planned_on() -> None:
    cluster, node = Topology.cluster(), Topology.node()
    src = Spec(Mesh(dp=2, tp=8), P("dp", "tp"), shape=(4096, 4096))
    dst = src.replace(partition=P())
    prog, other = redistribute(src, dst, topology=cluster), redistribute(src, dst)
    assert prog.cost() == prog.cost(cluster) != prog.cost(node)
    assert str(prog.explain()) == str(prog.explain(cluster)) != str(prog.explain(node))
    assert prog.simplify() == prog.simplify(cluster)
    assert other.cost() == other.cost(node)
    for kept in (prog.T, prog.T.T, prog.simplify(), pickle.loads(pickle.dumps(prog))):
        assert kept.topology == cluster
    assert prog.simplify(node).topology == node
    unplanned = Program(src, prog.steps)
    assert unplanned == prog
    assert hash(unplanned) == hash(prog)
    assert unplanned.topology is unplanned.T.topology is unplanned.simplify().topology is None


def test_then_keeps_the_topology_of_the_first_that_has_one() -> None:
    src = spec_of("f32[12@x]")
    cluster, node, machine = Topology.cluster(), Topology.node(), Topology.dgx_h100()
    gather = Program(src, (AllGather("x", 0),), topology=cluster)
    slice_, nothing = Program(gather.dst, (AllSlice("x", 0),)), Program(src, (), topology=machine)
    assert (gather >> slice_).topology == (slice_ >> gather).topology == cluster
    assert (slice_ >> slice_.T).topology is None
    assert (gather >> Program(gather.dst, slice_.steps, topology=node)).topology == cluster
    assert (nothing >> gather).topology == cluster
    assert (nothing >> slice_.T.T.T).topology == machine


# -- dtypes --------------------------------------------------------------------------------


def test_dtype_options() -> None:
    src, step = spec_of("f32[12@x]{unreduced: y}"), AllReduce("y")
    prog = Program(src, (step,), forward_dtype=torch.bfloat16, backward_dtype=torch.float64)
    assert prog != Program(src, (step,))
    assert (prog.T.forward_dtype, prog.T.backward_dtype) == (torch.float64, torch.bfloat16)
    assert prog == prog.T.T
    assert prog.dst.dtype == torch.float32
    assert str(prog).startswith(
        f"{src} -> {prog.dst}\n    on {MESH}, sends in bf16, backward in f64\n")  # fmt: skip
    plain = Program(src, (step,))
    assert 2 * prog.step_bytes[0] == plain.step_bytes[0]
    assert 2 * prog.cost().bytes_sent == plain.cost().bytes_sent


def test_redundant_dtype_options_are_dropped() -> None:
    src = spec_of("f32[12@x]")
    assert Program(src, (AllGather("x", 0),), forward_dtype=torch.float32) == Program(
        src, (AllGather("x", 0),), backward_dtype=torch.float32
    )


def test_forward_dtype_rounds_values() -> None:
    src = spec_of("f32[6@x]{unreduced: y}")
    steps = (Cast(torch.float64), AllReduce("y"), AllGather("x", 0))
    prog = Program(src, steps, forward_dtype=torch.bfloat16)
    # Sixteenths below 4 lose one bit in bfloat16; their sums lose none.
    drawn = [torch.tensor([1.0, 2.0, 3.0]) * (1 + 2**-9) for _ in range(6)]
    xs = tuple(x for x in drawn for _ in range(2))  # replicas along z
    rounded = tuple(x.bfloat16() for x in xs)
    sent = Program(src.replace(dtype=torch.bfloat16), (AllReduce("y"), AllGather("x", 0)))
    assert all(map(torch.equal, prog(xs), simulate(prog, xs)))
    for actual, expected in zip(simulate(prog, xs), simulate(sent, rounded), strict=True):
        assert actual.dtype == torch.float64
        assert torch.equal(actual, expected.double())


# -- traffic --------------------------------------------------------------------------------


def numel(index: tuple[slice, ...]) -> int:
    return math.prod(part.stop - part.start for part in index)


def common(one: tuple[slice, ...], two: tuple[slice, ...]) -> int:
    """Count the elements in both of two boxes."""
    both = zip(one, two, strict=True)
    return math.prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in both)


def volume(piece: Piece) -> int:
    return math.prod(stop - start for start, stop in piece.box)


def count_bytes(step: Step, src: Spec, dst: Spec) -> tuple[int, int]:
    """Count the bytes that the busiest rank sends and receives, box by box over all ranks."""
    mesh, item = src.mesh, src.dtype.itemsize
    if isinstance(step, CollectivePermute):
        shards = [torch.full(src.local_shape(rank), rank) for rank in mesh.ranks]
        outputs = simulate_step(step, src._with(dtype=torch.int64), shards)
        moved = [shard.numel() for shard, rank in zip(outputs, mesh.ranks, strict=True)
                 if shard.numel() and int(shard.flatten()[0]) != rank]  # fmt: skip
        return (max(moved, default=0) * item,) * 2
    if isinstance(step, Cast | Remesh):
        return 0, 0
    if isinstance(step, Exchange):
        parts, least = mesh.axis_size(reduction_axes(src, dst)), [0]
        embedded = [axis for axis in converted_axes(src, dst) if axis in dst.partition.unreduced]
        coordinates = torch.empty(src.shape, dtype=torch.int64)
        for rank in mesh.ranks:
            coordinates[src.index(rank)] = mesh.index(rank, embedded)
        for rank in mesh.ranks:
            needed = int((coordinates[dst.index(rank)] == mesh.index(rank, embedded)).sum())
            least.append(parts * needed - common(src.index(rank), dst.index(rank)))
        most = max(sum(map(volume, sends(src, dst, rank))) for rank in mesh.ranks)
        return most * item, max(least) * item
    sent, received = [0], [0]
    pairs = step.pairs if isinstance(step, AllToAll) else (step,)
    for group in mesh.groups(tuple(axis for pair in pairs for axis in pair.axes)):
        n = len(group)
        for rank in group:
            before, after = src.index(rank), dst.index(rank)
            match step:
                case AllGather():
                    others = [src.index(other) for other in group if other != rank]
                    sent.append(sum(numel(before) for _ in others))
                    received.append(sum(numel(other) for other in others))
                case ReduceScatter():
                    others = [dst.index(other) for other in group if other != rank]
                    sent.append(sum(common(before, other) for other in others))
                    received.append(sum(numel(after) for _ in others))
                case AllToAll():
                    sent.append(sum(common(before, dst.index(o)) for o in group if o != rank))
                    received.append(sum(common(src.index(o), after) for o in group if o != rank))
                case AllReduce():
                    # n - 1 of n parts to reduce, n - 1 to gather, rounded up to elements.
                    sent.append(math.ceil(2 * (n - 1) * numel(before) / n))
                    received.append(sent[-1])
    return max(sent) * item, max(received) * item


def assert_bytes(step: Step, src: Spec) -> None:
    dst = infer(step, src)
    moved, promised = count_bytes(step, src, dst), traffic(step, src, dst)
    if isinstance(step, CollectivePermute):
        # Its traffic is a full shard, though the largest shard may stay on its rank.
        assert max(moved) <= promised.sent == promised.received
    elif isinstance(step, Exchange) and not (src.is_even and dst.is_even):
        # Its traffic is an equal part for each holder, though holders send undivided pieces.
        assert promised.sent <= moved[0]
        assert promised.received == moved[1]
    else:
        assert (promised.sent, promised.received) == moved
    assert promised.launches or moved == (0, 0)


@pytest.mark.parametrize(("step", "src"), [row[:2] for row in TABLE], ids=IDS)
def test_traffic_matches_counted_bytes(step: Step, src: str) -> None:
    assert_bytes(step, spec_of(src))


@st.composite
def uneven_steps(draw: st.DrawFn) -> tuple[Step, Spec]:
    """Draw a collective on a 2-dim tensor with shards of any sizes."""

    def cut(size: int, shards: int) -> tuple[int, ...]:
        inner = st.lists(st.integers(0, size), min_size=shards - 1, max_size=shards - 1)
        edges = [0, *sorted(draw(inner)), size]
        return tuple(b - a for a, b in itertools.pairwise(edges))

    def refine(sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
        return tuple(part for size in sizes for part in cut(size, n))

    mesh = draw(st.sampled_from([Mesh(x=2, y=3), Mesh(x=3, y=2), Mesh(y=2, x=4)]))
    n, m = mesh.shape["x"], mesh.shape["y"]
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    outer, fine = cut(rows, m), refine(cut(rows, m), n)
    if draw(st.booleans()):
        src = Spec(mesh, P(("y", "x")), shape=(rows, columns), sizes={0: fine})
        to = draw(st.sampled_from(["invariant", "reduced"]))
        return draw(st.sampled_from([
            AllGather("x", 0, to), AllToAll("x", 0, 1, cut(columns, n)),  # type: ignore[arg-type]
            ShardedToUnreduced("x", 0),
        ])), src  # fmt: skip
    src = Spec(mesh, P("y", unreduced={"x"}), shape=(rows, columns), sizes={0: outer})
    return draw(st.sampled_from([
        AllReduce("x"), ReduceScatter("x", 0, refine(outer, n)),
        ReduceScatter("x", 1, cut(columns, n)),
    ])), src  # fmt: skip


@given(uneven_steps())
def test_traffic_of_uneven_shards_matches_counted_bytes(drawn: tuple[Step, Spec]) -> None:
    step, src = drawn
    assert_bytes(step, src)
    prog = Program(src._with(dtype=torch.int64), (step,))
    x, y = spec_grid.random_locals(prog.src, 1), spec_grid.random_locals(prog.dst.dual, 2)
    outputs, gradients = simulate(prog, x), simulate(prog.T, y)
    assert all(map(torch.equal, prog(x), outputs))
    assert all(map(torch.equal, prog.T(y), gradients))
    assert torch.equal(spec_grid.global_of(prog.dst, outputs), spec_grid.global_of(prog.src, x))
    assert spec_grid.pairing(prog.dst, outputs, y) == spec_grid.pairing(prog.src, x, gradients)
    assert prog == prog.T.T


@pytest.mark.parametrize("src", ["f32[0@x,6]{unreduced: y}", "f32[4@x,0]{unreduced: y}"])
def test_empty_tensors_have_no_traffic(src: str) -> None:
    prog = Program(spec_of(src), (AllReduce("y"), AllToAll("x", 0, 1), AllGather("x", 1)))
    cost = prog.cost()
    assert (cost.bytes_sent, cost.bytes_received, cost.launches) == (0, 0, 0)
    assert prog.is_local


def test_axes_of_size_one_launch_nothing() -> None:
    mesh = Mesh(a=1, x=2)
    prog = Program(parse("f32[4@(x,a)]", mesh), (AllGather("a", 0), AllSlice("a", 0)))
    assert prog.cost().launches == 0
    assert prog.is_local
    both = Program(prog.src, (AllGather(("x", "a"), 0),))
    assert step_axes(both.steps[0], both.src, both.dst) == ("x",)
    assert both.cost().launches == 1
    assert both.step_bytes == (8,)


# -- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lower_bound(spec_of("f32[4]"), spec_of("f32[6]")), "have the same global shape"),
        (lambda: lower_bound(spec_of("f32[4]"), 3), r"lower_bound\(Spec, int\)"),  # type: ignore[arg-type]
        (lambda: lower_bound(*[spec_of("f32[4]")] * 2, forward_dtype=torch.int8),
         "floating for floating"),
        (lambda: Program(spec_of("f32[4]"), ("all_gather",)),  # type: ignore[arg-type]
         r"step 0, 'all_gather'\n  rule:  every step must be an instance of"),
        (lambda: Program(spec_of("f32[4]"), AllSlice("x", 0)),  # type: ignore[arg-type]
         "steps must be a tuple of steps"),
        (lambda: Program(P("x"), ()), "src must be a Spec"),  # type: ignore[arg-type]
        (lambda: Program(spec_of("f32[4]"), (), forward_dtype="bf16"),  # type: ignore[arg-type]
         "sent in 'bf16'"),
        (lambda: Program(spec_of("f32[4]"), ()).cost("node"),  # type: ignore[arg-type]
         r"Program.cost\n  given: topology 'node'"),
        (lambda: Program(spec_of("f32[4]"), ()).explain("node"),  # type: ignore[arg-type]
         r"Program.explain\n  given: topology 'node'"),
    ],
)  # fmt: skip
def test_refusals_of_other_types(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()


DIM = "dim must be an integer"
KIND = ("a reduction must be one of sum, avg, max, min and product", "kind='sum', say")
SIZED = ("sizes must be ints, one per shard of the result", "sizes=(3, 5), say")


@pytest.mark.parametrize(
    ("make", "where", "problems"),
    [
        (lambda: AllToAll("y", 0.0, "1"), "fs.AllToAll",  # type: ignore[arg-type]
         [("src_dim=0.0", DIM, "src_dim=0"), ("dst_dim='1'", DIM, "dst_dim=0")]),
        (lambda: AllGather("y", None, kind=3), "fs.AllGather",  # type: ignore[arg-type]
         [("dim=None", DIM, "dim=0"), ("kind=3", *KIND)]),
        (lambda: AllSlice("y", 1, sizes=3), "fs.AllSlice",  # type: ignore[arg-type]
         [("sizes=3", *SIZED)]),
        (lambda: ReduceScatter("y", 1.0, sizes=(1.0, 3)), "fs.ReduceScatter",  # type: ignore[arg-type]
         [("dim=1.0", DIM, "dim=0"), ("sizes=(1.0, 3)", *SIZED)]),
        (lambda: ShardedToUnreduced("y", [1]), "fs.ShardedToUnreduced",  # type: ignore[arg-type]
         [("dim=[1]", DIM, "dim=0")]),
        (lambda: AllReduce("y", kind=[]), "fs.AllReduce",  # type: ignore[arg-type]
         [("kind=[]", *KIND)]),
        (lambda: ReplicatedToUnreduced("y", None), "fs.ReplicatedToUnreduced",  # type: ignore[arg-type]
         [("kind=None", *KIND)]),
        (lambda: InvariantToReduced("y", {}), "fs.InvariantToReduced",  # type: ignore[arg-type]
         [("kind={}", *KIND)]),
        (lambda: Cast("f32"), "fs.Cast",  # type: ignore[arg-type]
         [("dtype='f32'", "a dtype must be a torch.dtype", "fs.Cast(torch.float32), say")]),
    ],
)  # fmt: skip
def test_arguments_of_steps(
    make: Callable[[], object], where: str, problems: list[tuple[str, str, str]]
) -> None:
    lines = [f"  given: {given}\n  rule:  {rule}\n  fix:   {fix}" for given, rule, fix in problems]
    with pytest.raises(ShardingError) as caught:
        make()
    assert str(caught.value) == where + "\n" + "\n\n".join(lines)


def test_integers_of_any_type_become_int() -> None:
    one = torch.tensor([1, 3])
    step = AllSlice("y", one[0], sizes=[*one])  # type: ignore[arg-type]
    assert step == AllSlice("y", 1, (1, 3))
    assert type(step.dim) is int
    assert hash(step) == hash(AllSlice("y", 1, (1, 3)))


@pytest.mark.parametrize(
    ("src", "step", "linear"),
    [
        ("f32[4]", Cast(torch.int64), False),
        ("f32[4]", Cast(torch.bool), False),
        ("i64[4]", Cast(torch.bool), False),
        ("i64[4]", Cast(torch.int32), True),
        ("f32[4]", Cast(torch.bfloat16), True),
        ("f32[4]", CollectivePermute(P(None, unreduced={"one": "max"})), False),
        ("f32[4]{unreduced: one=max}", AllReduce("one"), False),
        ("f32[4]{unreduced: one=max}", AllSlice("x", 0), False),
    ],
)
def test_is_linear(src: str, step: Step, linear: bool) -> None:
    prog = Program(parse(src, Mesh(x=2, one=1)), (step,))
    assert prog.is_linear is linear
    if linear:
        assert prog == prog.T.T


def test_errors_have_given_rule_and_fix() -> None:
    with pytest.raises(ShardingError) as caught:
        infer(AllGather("x", 0), spec_of("f32[4,4]"))
    assert re.fullmatch(
        r"all_gather\(x, dim 0\)\n  given: f32\[4,4\] on Mesh.*\n  rule:  .*\n  fix:   .*",
        str(caught.value),
    )
