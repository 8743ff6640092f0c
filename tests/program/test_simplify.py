"""`prog.simplify`: rewrites that apply and that must not, values, costs, termination."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import cache

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
from fshard.program.cast_rules import commutes, represents
from fshard.program.cost.topology import Topology
from fshard.program.infer import infer
from fshard.program.program import Program
from fshard.program.single_step import single_steps
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
from tests.helpers import spec_grid, strategies
from tests.helpers.reference import simulate

MESH, FLAT = Mesh(x=2, y=2, z=4), Mesh(a=16)
BF16, F32 = torch.bfloat16, torch.float32
CLUSTER = Topology.cluster(2)


def program(src: str, *steps: Step) -> Program:
    return Program(parse(src, MESH), steps)


# -- rewrites ------------------------------------------------------------------------------

# source, steps, simplified steps
LAWS: list[tuple[str, tuple[Step, ...], tuple[Step, ...]]] = [
    # inverse steps cancel
    ("f32[4096@x,4096]", (AllGather("x", 0), AllSlice("x", 0)), ()),
    ("f32[4096,4096]", (AllSlice("x", 0), AllGather("x", 0)), ()),
    ("f32[5@x:4+1,8]", (AllGather("x", 0), AllSlice("x", 0, (4, 1))), ()),
    ("f32[4096@x,4096]", (AllToAll("x", 0, 1), AllToAll("x", 1, 0)), ()),
    ("f32[4096@x,4096]", (ShardedToUnreduced("x", 0), ReduceScatter("x", 0)), ()),
    ("f32[4096,4096]", (InvariantToReduced("x"), ReducedToInvariant("x")), ()),
    ("f32[4096,4096]", (InvariantToReduced("x", "avg"), ReducedToInvariant("x")), ()),
    ("f32[4096,4096]{unreduced: x}", (AllReduce("x"), ReplicatedToUnreduced("x")), ()),
    ("f32[4096,4096]{unreduced: x=max}",
     (AllReduce("x"), ReplicatedToUnreduced("x", "max")), ()),
    ("f32[4096@(x,y),4096]",
     (CollectivePermute(P(("y", "x"))), CollectivePermute(P(("x", "y")))), ()),
    ("f32[4096@(x,y,z)]", (Remesh(FLAT, P("a")), Remesh(MESH, P(("x", "y", "z")))), ()),
    # an all-reduce of a value that was made unreduced just before
    ("f32[4096,4096]", (ReplicatedToUnreduced("x"), AllReduce("x")), ()),
    ("f32[4096,4096]", (ReplicatedToUnreduced("x"), ReduceScatter("x", 0)), (AllSlice("x", 0),)),
    ("f32[4096@x,4096]", (ShardedToUnreduced("x", 0), AllReduce("x")), (AllGather("x", 0),)),
    ("f32[4096@x,4096]", (ShardedToUnreduced("x", 0), ReduceScatter("x", 1)),
     (AllToAll("x", 0, 1),)),
    # a reduction and the next step
    ("f32[4096,4096]{unreduced: x}", (AllReduce("x"), AllSlice("x", 1)), (ReduceScatter("x", 1),)),
    ("f32[4096,4096]{unreduced: x}", (ReduceScatter("x", 1), AllGather("x", 1)), (AllReduce("x"),)),
    ("f32[4096,4096]{unreduced: x}", (AllReduce("x"), InvariantToReduced("x")),
     (AllReduce("x", "reduced"),)),
    ("f32[4096@x,4096]", (AllGather("x", 0), InvariantToReduced("x")),
     (AllGather("x", 0, "reduced"),)),
    ("f32[4096@x,4096]", (AllGather("x", 0, "reduced"), ReducedToInvariant("x")),
     (AllGather("x", 0),)),
    # each rank needs only its part of a maximum
    ("f32[4096]{unreduced: x=max}", (AllReduce("x"), ReplicatedToUnreduced("x")),
     (ReduceScatter("x", 0), ShardedToUnreduced("x", 0))),
    # neighbours of one type fuse
    ("f32[4096@(x,y),4096]", (AllGather("y", 0), AllGather("x", 0)), (AllGather(("x", "y"), 0),)),
    ("f32[4096,4096]", (AllSlice("x", 0), AllSlice("y", 0)), (AllSlice(("x", "y"), 0),)),
    ("f32[4096,4096]{unreduced: x, y}", (AllReduce("y"), AllReduce("x")), (AllReduce(("x", "y")),)),
    ("f32[4096@x,4096,4096]", (AllToAll("x", 0, 1), AllToAll("x", 1, 2)), (AllToAll("x", 0, 2),)),
    ("f32[4096@x,4096,4096@y]", (AllToAll("x", 0, 1), AllToAll("y", 2, 1)),
     (AllToAll("x", 0, 1, also=(AllToAll("y", 2, 1),)),)),
    ("f32[4096@(x,y),4096@z]",
     (CollectivePermute(P(("y", "x"), "z")), CollectivePermute(P("z", ("x", "y")))),
     (CollectivePermute(P("z", ("x", "y"))),)),
    ("f32[4096@x,4096@y,4096@z]", (Exchange(P("y", "x", "z")), Exchange(P("x", "z", "y"))),
     (Exchange(P("x", "z", "y")),)),
    ("f32[4096@(x,y,z)]", (Remesh(FLAT, P("a")), Remesh(Mesh(b=4, c=4), P(("b", "c")))),
     (Remesh(Mesh(b=4, c=4), P(("b", "c"))),)),
    ("f32[4096@(x,y,z)]", (Remesh(FLAT, P("a")), AllGather("a", 0), Remesh(MESH, P())),
     (AllGather(("x", "y", "z"), 0),)),
    # slices first, gathers last
    ("f32[4096@x,4096]", (AllGather("x", 0), AllSlice("x", 1)), (AllToAll("x", 0, 1),)),
    ("f32[4096@x,4096]", (AllGather("x", 0), AllSlice("y", 1)),
     (AllSlice("y", 1), AllGather("x", 0))),
    ("f32[4096@x,4096]", (AllGather("x", 0), AllSlice("y", 0)), (CollectivePermute(P("y")),)),
    ("f32[4096@z,4096,4096@y]", (AllGather("z", 0), AllToAll("y", 2, 1), AllSlice("x", 2)),
     (AllSlice("x", 1), CollectivePermute(P("z", "y", "x")), AllGather("z", 0))),
    ("f32[4096@z,4096,4096@y]", (AllGather("z", 0), AllToAll("y", 2, 1), AllSlice("x", 1)),
     (Exchange(P("z", ("y", "x"))), AllGather("z", 0))),
    ("f32[2@x,9999999]{unreduced: z}", (AllGather("x", 0), AllReduce("z")),
     (AllReduce("z"), AllGather("x", 0))),
    ("f32[4096@x,4096]{unreduced: y}", (AllGather("x", 0), ReduceScatter("y", 1)),
     (ReduceScatter("y", 1), AllGather("x", 0))),
    ("f32[4096@x,4096]{unreduced: y}", (ShardedToUnreduced("x", 0), AllReduce("y")),
     (AllReduce("y"), ShardedToUnreduced("x", 0))),
    # casts go to the side with fewer bytes
    ("f32[4096@x,4096]", (AllGather("x", 0), Cast(BF16)), (Cast(BF16), AllGather("x", 0))),
    ("bf16[4096@x,4096]", (Cast(F32), AllGather("x", 0)), (AllGather("x", 0), Cast(F32))),
    ("f32[4096,4096@x]{unreduced: y}", (AllToAll("x", 1, 0), Cast(BF16)),
     (Cast(BF16), AllToAll("x", 1, 0))),
    ("f32[4096,4096]", (ReplicatedToUnreduced("x"), Cast(BF16)),
     (Cast(BF16), ReplicatedToUnreduced("x"))),
    ("bf16[4096,4096]", (Cast(F32), Cast(BF16)), ()),
    ("bf16[4096,4096]", (Cast(F32), Cast(torch.float16)), (Cast(torch.float16),)),
    ("bf16[4096@x,4096]", (Cast(F32), AllGather("x", 0), Cast(BF16)), (AllGather("x", 0),)),
    # steps fuse across an independent step between them
    ("f32[4096@x,4096,4096@y]", (AllGather("x", 0), AllToAll("y", 2, 1), AllSlice("x", 0)),
     (AllToAll("y", 2, 1),)),
    ("f32[4096@x,4096,4096]{unreduced: y}",
     (ShardedToUnreduced("x", 0), AllReduce("y"), AllReduce("x")),
     (AllReduce("y"), AllGather("x", 0))),
    ("f32[4096,4096@y]", (AllSlice("x", 0), Cast(BF16), AllGather("x", 0)), (Cast(BF16),)),
]  # fmt: skip

# source, steps that must not be rewritten
KEPT: list[tuple[str, tuple[Step, ...]]] = [
    ("f32[4096,4096]", ()),
    ("f32[4096@x,4096]", (AllGather("x", 0),)),
    # reductions of two kinds
    ("f32[4096,4096]{unreduced: x, y=avg}", (AllReduce("y"), AllReduce("x"))),
    # fewer launches, but an all-reduce instead of a reduce-scatter in the transpose
    ("f32[4096@(x,y),4096]", (AllGather("y", 0, "reduced"), AllGather("x", 0))),
    # rounded values
    ("f32[4096,4096]", (Cast(BF16), Cast(F32))),
    ("f32[4096,4096]", (Cast(torch.float16), Cast(BF16))),
    ("i64[4096,4096]", (Cast(F32), Cast(torch.int64))),
    ("bf16[4096,4096]", (Cast(F32), Cast(torch.float64))),
    # sums of rounded values, in the program and in its transpose
    ("f32[4096,4096]{unreduced: x}", (AllReduce("x"), Cast(BF16))),
    ("bf16[4096,4096]{unreduced: x}", (Cast(F32), AllReduce("x"))),
    ("f32[4096,4096]{unreduced: x}", (ReduceScatter("x", 0), Cast(BF16))),
    ("f32[4096@x,4096]", (AllGather("x", 0, "reduced"), Cast(BF16))),
    ("bf16[4096,4096]{unreduced: x}", (Cast(F32), AllReduce("x"), Cast(BF16))),
    ("bf16[4096,4096]{unreduced: x}",
     (Cast(F32), AllReduce("x"), Cast(BF16), ReplicatedToUnreduced("x"))),
    ("f32[4096,4096]{reduced: x}", (Cast(BF16), ReducedToInvariant("x"), InvariantToReduced("x"))),
    # shares of an average, and neutral elements of another dtype
    ("f32[4096@x,4096]{reduced: y=avg}", (AllSlice("y", 1), Cast(BF16))),
    ("i64[4096@x,4096]", (ShardedToUnreduced("x", 0, "min"), Cast(torch.int32))),
]  # fmt: skip


@pytest.mark.parametrize(("src", "steps", "want"), LAWS, ids=str)
def test_rewrites_by_rule(src: str, steps: tuple[Step, ...], want: tuple[Step, ...]) -> None:
    prog = program(src, *steps)
    exchanges = any(isinstance(step, Exchange) for step in (*steps, *want))
    simple = prog.simplify(exclude=() if exchanges else Exchange)
    assert simple.steps == Program(prog.src, want).steps, simple
    assert (simple.src, simple.dst) == (prog.src, prog.dst)


@pytest.mark.parametrize(("src", "steps"), KEPT, ids=str)
def test_steps_are_not_rewritten(src: str, steps: tuple[Step, ...]) -> None:
    prog = program(src, *steps)
    assert prog.simplify(exclude=Exchange) == prog


def test_rewrite_keeps_the_ends() -> None:
    prog = program("f32[4096@x,4096]{unreduced: y}", AllGather("x", 0), AllReduce("y"))
    assert (prog >> redistribute(prog.dst, prog.src)).simplify().dst == prog.src


def test_exact_round_trip_cancels() -> None:
    for src, dst in spec_grid.sample_pairs(spec_grid.all_specs(MESH, (16, 32), ("invariant",)), 60):
        there_and_back = redistribute(src, dst) >> redistribute(dst, src)
        assert there_and_back.simplify().steps == ()


def test_simplify_keeps_wire_dtypes() -> None:
    options = {"forward_dtype": BF16, "backward_dtype": torch.float64}
    src = parse("f32[4096@x,4096]", MESH)
    prog = Program(src, (AllGather("x", 0), AllSlice("y", 1)), **options)
    simple = prog.simplify()
    assert simple == Program(src, (AllSlice("y", 1), AllGather("x", 0)), **options)
    nothing = (
        prog >> Program(prog.dst, (AllGather("y", 1), AllSlice("x", 0)), **options)
    ).simplify()
    assert nothing == Program(src, (), **options)


def test_excluded_steps_are_not_introduced() -> None:
    steps = (AllGather("x", 0), AllSlice("x", 1))
    prog = program("f32[4096@x,4096]", *steps)
    assert prog.simplify(exclude=AllToAll).steps == (Exchange(P(None, "x")),)
    assert prog.simplify(exclude=(AllToAll, Exchange)) == prog


def test_rewrites_depend_on_the_topology() -> None:
    prog = program("f32[64,64]{unreduced: x}", ReduceScatter("x", 0), AllGather("x", 0))
    slow_to_start = Topology.of({}, launch=1.0)
    assert prog.simplify(slow_to_start, exclude=Exchange).steps == (AllReduce("x"),)
    src = parse("f32[4096@x,4096]{unreduced: y}", MESH)
    late = Program(src, (AllGather("x", 0), AllReduce("y")))
    for topology in (Topology.node(), CLUSTER, slow_to_start):
        assert late.simplify(topology).cost(topology).time <= late.cost(topology).time


def test_peak_memory_does_not_increase() -> None:
    """One launch would suffice, but hold a larger layout than the program does."""
    topology = Topology.of({}, launch=1.0)
    steps = (AllGather("x", 0), ReplicatedToUnreduced("x"), ReduceScatter("x", 1))
    prog = program("f32[64@(y,x),64]", *steps, AllGather("y", 0))
    faster = Program(prog.src, (AllGather(("y", "x"), 0), AllSlice("x", 1)), prog.dst)
    simple = prog.simplify(topology, exclude=Exchange)
    assert simple.steps == (AllToAll("x", 0, 1), AllGather("y", 0))
    assert faster.cost(topology).time < simple.cost(topology).time < prog.cost(topology).time
    assert faster.cost().peak_memory > prog.cost().peak_memory >= simple.cost().peak_memory


@pytest.mark.parametrize(
    ("call", "where", "given", "rule", "fix"),
    [
        (lambda prog: prog.simplify("node"), "Program.simplify", "topology 'node'",
         "topology must be a Topology",
         "fs.Topology.node(), fs.Topology.cluster(8) or fs.Topology.of({...})"),
        (lambda prog: prog.simplify(exclude=int), "Program.simplify",
         "exclude=<class 'int'>", "exclude must consist of step types",
         "exclude=(fs.AllGather, fs.AllToAll), say"),
        (lambda prog: prog.simplify(exclude="all_gather"), "Program.simplify",  # type: ignore[arg-type]
         "exclude='all_gather'", "exclude must consist of step types", "exclude=fs.AllGather"),
        (lambda prog: prog.simplify(exclude=[AllToAll("x", 0, 1), AllReduce("y"), AllReduce]),  # type: ignore[list-item]
         "Program.simplify", "exclude=all_to_all(x, dim 0 -> 1), all_reduce(y)",
         "exclude must consist of step types", "exclude=(fs.AllToAll, fs.AllReduce)"),
    ],
)  # fmt: skip
def test_invalid_options_of_simplify_are_refused(
    call: Callable[[Program], Program], where: str, given: str, rule: str, fix: str
) -> None:
    with pytest.raises(ShardingError) as caught:
        call(program("f32[8@x]", AllGather("x", 0)))
    assert str(caught.value) == spec_grid.message(where, given, rule, fix)


@pytest.mark.parametrize(
    ("wide", "narrow", "yes"),
    [
        (F32, BF16, True), (F32, torch.float16, True), (BF16, torch.float16, False),
        (torch.float16, BF16, False), (F32, torch.int16, True), (F32, torch.int32, False),
        (torch.float64, torch.int32, True), (torch.float64, torch.int64, False),
        (BF16, torch.int8, True), (BF16, torch.int16, False), (BF16, torch.uint8, True),
        (torch.float16, torch.int16, False), (torch.int64, torch.int32, True),
        (torch.int32, torch.uint8, True), (torch.int8, torch.uint8, False),
        (torch.int8, torch.bool, True), (torch.bool, torch.int8, False),
        (torch.complex64, F32, True), (F32, torch.complex64, False), (F32, F32, True),
        (torch.complex64, torch.int32, False), (torch.uint32, torch.uint16, True),
        (torch.uint64, torch.int8, False), (torch.int64, torch.uint32, True),
        (torch.int64, torch.uint64, False), (F32, torch.uint16, True), (F32, torch.uint32, False),
        (torch.uint16, F32, False), (torch.uint16, torch.bool, True),
    ],
)  # fmt: skip
def test_dtypes_that_represent_another(wide: torch.dtype, narrow: torch.dtype, yes: bool) -> None:
    assert represents(wide, narrow) is yes


def test_represents_means_lossless_casts() -> None:
    """A dtype that represents another returns its extremes and their neighbours unchanged."""
    dtypes = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16,
              torch.uint32, torch.uint64, BF16, torch.float16, F32, torch.float64)  # fmt: skip
    for wide, narrow in itertools.product(dtypes, repeat=2):
        if narrow.is_floating_point:
            info = torch.finfo(narrow)
            numbers = [info.max, info.min, info.tiny, 1 + info.eps, info.smallest_normal]
        else:
            most = torch.iinfo(narrow).max
            numbers = [most, most - 1, torch.iinfo(narrow).min, 0, 1]
        x = torch.tensor(numbers, dtype=narrow)
        if represents(wide, narrow):
            assert torch.equal(x.to(wide).to(narrow), x), (wide, narrow)


# -- single steps --------------------------------------------------------------------------


def test_single_steps_include_every_legal_step() -> None:
    """Every legal step is among the single steps between its two layouts."""
    for prog in itertools.chain(legal_steps(MESH, (16, 32)), legal_steps(Mesh(x=2, y=3), (6, 12))):
        (step,) = prog.steps
        assert step in single_steps(prog.src, prog.dst), prog


def legal_steps(mesh: Mesh, shape: tuple[int, ...]) -> Iterator[Program]:
    """Yield one-step programs of every type, from a sample of all layouts."""
    layouts = spec_grid.all_specs(mesh, shape, dtype=torch.float64)
    for spec in random.Random(0).sample(layouts, min(60, len(layouts))):
        for step in legal_steps_of(spec, "sum"):
            yield Program(spec, (step,))


def every_step(spec: Spec, kind: str = "sum") -> Iterator[Step]:
    """Yield steps along one axis or two, legal or not."""
    dims = range(spec.ndim)
    for axes in (chosen for n in (1, 2) for chosen in itertools.permutations(spec.mesh.axes, n)):
        ordered = tuple(sorted(axes)) == axes
        if ordered:
            yield from (AllReduce(axes), AllReduce(axes, "reduced"), InvariantToReduced(axes))
            yield from (ReducedToInvariant(axes), ReplicatedToUnreduced(axes, kind))
        for dim in dims:
            yield from (AllGather(axes, dim), AllGather(axes, dim, "reduced"))
            yield from (AllSlice(axes, dim), ReduceScatter(axes, dim))
            yield ShardedToUnreduced(axes, dim, kind)
            yield from (AllToAll(axes, dim, other) for other in dims if other != dim)
        if len(axes) == 2:
            yield ShardedToUnreduced(axes[0], 0, kind, by=axes[1])


def test_single_steps_of_several_pairs() -> None:
    src = parse("f32[16@x,16@(z,y),16]", MESH)
    steps = single_steps(src, parse("f32[16@y,16@z,16@x]", MESH))
    assert steps[0] == AllToAll("x", 0, 2, also=(AllToAll("y", 1, 0),))
    crossed = single_steps(parse("f32[16@(x,y),16]", MESH), parse("f32[16,16@(y,x)]", MESH))
    assert [type(step) for step in crossed] == [Exchange]
    uneven = parse("f32[5@x:4+1,6@y]", MESH)
    dst = Spec(MESH, P(None, ("y", "x")), shape=(5, 6), sizes={1: (2, 1, 0, 3)})
    assert single_steps(uneven, dst)[0] == AllToAll("x", 0, 1, (2, 1, 0, 3))


def test_no_single_step() -> None:
    spec = parse("f32[16@x,16]", MESH)
    assert single_steps(spec, spec.replace(shape=(16, 8))) == ()
    assert single_steps(spec, parse("bf16[16,16]", MESH)) == ()
    assert single_steps(spec, parse("f32[16,16]{unreduced: y}", MESH)) == ()
    assert single_steps(spec, spec.replace(dtype=BF16)) == (Cast(BF16),)


def test_cast_commutes_exactly_if_values_stay() -> None:
    """A cast commutes with a step exactly if values and gradients stay the same."""
    for prog in legal_steps(Mesh(x=2, y=2), (4, 8)):
        (step,) = prog.steps
        p, q = prog.src.partition, prog.dst.partition
        sums = bool({*p.unreduced_kinds} - {*q.unreduced_kinds})
        spreads = bool({*q.reduced_kinds} - {*p.reduced_kinds})
        assert commutes(step, prog.src, prog.dst) is not (sums or spreads), prog


# -- values and costs ----------------------------------------------------------------------


@st.composite
def programs(
    draw: st.DrawFn, kinds: tuple[str, ...] = ("sum",), dtype: torch.dtype = torch.int64
) -> Program:
    """Draw a program of random legal steps, followed by planned redistributions."""
    mesh = draw(strategies.meshes(max_devices=8, max_size=3, min_axes=1))
    shape = draw(st.lists(st.integers(0, 4).map(lambda n: 2 * n), min_size=1, max_size=3))
    options = {"dtype": dtype, "kinds": kinds, "splits": ("even", "sizes")}
    prog = Program(draw(strategies.specs(mesh, shape, **options)), ())
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(kinds))
        target = draw(strategies.partitions(mesh.axes, len(shape), kinds=kinds))
        moves = (CollectivePermute(target), Exchange(target))
        if legal := [
            *legal_steps_of(prog.dst, kind),
            *(step for step in moves if is_legal(step, prog.dst)),
        ]:
            prog = Program(prog.src, (*prog.steps, draw(st.sampled_from(legal))))
    if draw(st.booleans()):
        dst = draw(strategies.specs(mesh, shape, **options))
        if not differ_in_kind(prog.dst, dst):
            prog = prog >> redistribute(prog.dst, dst)
    return prog


@cache
def legal_steps_of(spec: Spec, kind: str) -> tuple[Step, ...]:
    return tuple(step for step in every_step(spec, kind) if is_legal(step, spec))


def is_legal(step: Step, spec: Spec) -> bool:
    try:
        infer(step, spec)
    except ShardingError:
        return False
    return True


def differ_in_kind(a: Spec, b: Spec) -> bool:
    """Return True if an axis is unreduced by different reductions in two specs."""
    before, after = a.partition.unreduced, b.partition.unreduced
    return any(before[axis] != after.get(axis, before[axis]) for axis in before)


def assert_laws(prog: Program, topology: Topology) -> Program:
    """Assert all guarantees of `simplify`, and return the simplified program."""
    simple = prog.simplify(topology)
    before, after = prog.cost(topology), simple.cost(topology)
    assert (simple.src, simple.dst) == (prog.src, prog.dst)
    assert after.time <= before.time * (1 + 1e-9)
    assert after.peak_memory <= before.peak_memory
    assert simple.simplify(topology) == simple
    if prog.is_linear and prog.src.dtype != torch.bool:  # reduced booleans have no dual
        total = after.time + simple.T.cost(topology).time
        assert total <= (before.time + prog.T.cost(topology).time) * (1 + 1e-9)
    x = spec_grid.random_locals(prog.src, 1)
    outputs, results = simulate(prog, x), simulate(simple, x)
    expected = spec_grid.global_of(prog.dst, outputs)
    torch.testing.assert_close(spec_grid.global_of(prog.dst, results), expected, equal_nan=True)
    if not prog.dst.partition.unreduced:
        torch.testing.assert_close(results, outputs, equal_nan=True)
    return simple


@settings(max_examples=150, deadline=None)
@given(prog=programs(), topology=st.sampled_from([Topology.node(), CLUSTER]))
def test_laws_of_simplify(prog: Program, topology: Topology) -> None:
    simple = assert_laws(prog, topology)
    x, y = spec_grid.random_locals(prog.src, 2), spec_grid.random_locals(prog.dst.dual, 3)
    left = spec_grid.pairing(prog.dst, simulate(simple, x), y)
    assert torch.equal(left, spec_grid.pairing(prog.src, x, simulate(simple.T, y)))


@settings(max_examples=60, deadline=None)
@given(prog=programs(("sum", "avg", "max", "min"), torch.float64))
def test_laws_of_all_reductions(prog: Program) -> None:
    assert_laws(prog, Topology.node())


@settings(max_examples=40, deadline=None)
@given(prog=programs(("max", "min", "product"), torch.bool))
def test_laws_of_booleans(prog: Program) -> None:
    assert_laws(prog, Topology.node())


@st.composite
def mixed_programs(draw: st.DrawFn) -> Program:
    """Draw random programs with casts, with sums in float32 alone, where integers are exact."""
    mesh = Mesh(x=2, y=2)
    states = draw(st.sampled_from([("sharded", "invariant"), ("sharded", "reduced", "unreduced")]))
    spec = draw(strategies.specs(mesh, (4, 8), dtype=F32, states=states, splits=("even",)))
    prog = Program(spec, ())
    for _ in range(draw(st.integers(1, 6))):
        now = prog.dst
        legal = [
            step
            for step in legal_steps_of(now, "sum")
            if now.dtype == F32 or commutes(step, now, infer(step, now))
        ]
        cast = Cast(BF16 if now.dtype == F32 else F32)
        prog = Program(prog.src, (*prog.steps, draw(st.sampled_from([cast, *legal]))))
    return prog


@settings(max_examples=300, deadline=None)
@given(prog=mixed_programs())
def test_simplify_keeps_rounding(prog: Program) -> None:
    """Values that bfloat16 rounds, with sums that are exact in float32, stay equal bit by bit."""
    simple = prog.simplify()
    x = [local * 37 for local in spec_grid.random_locals(prog.src, 5)]
    y = [local * 37 for local in spec_grid.random_locals(prog.dst.dual, 6)]
    for old, new, given_ in ((prog, simple, x), (prog.T, simple.T, y)):
        values = [spec_grid.global_of(item.dst, simulate(item, given_)) for item in (old, new)]
        assert torch.equal(*values), (old, new)


FINE = Mesh(x=2, y=2, z=2)
MESHES = (FINE, Mesh(a=4, z=2), Mesh(x=2, b=4), Mesh(c=8), Mesh(x=4), Mesh(x=2, y=3))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_laws_between_meshes(data: st.DataObject) -> None:
    """Programs between meshes, of any single steps, are simplified."""
    prog = Program(data.draw(strategies.specs(FINE, (8, 12), dtype=torch.int64)), ())
    for _ in range(data.draw(st.integers(1, 5))):
        mesh = data.draw(st.sampled_from((prog.dst.mesh, *MESHES)))
        states = ("sharded", "invariant", *(("unreduced",) if mesh == prog.dst.mesh else ()))
        spec = data.draw(strategies.specs(mesh, (8, 12), dtype=torch.int64, states=states))
        if steps := single_steps(prog.dst, spec):
            prog = Program(prog.src, (*prog.steps, data.draw(st.sampled_from(steps))))
    assert_laws(prog, Topology.node())


@pytest.mark.parametrize("topology", [Topology.node(), CLUSTER], ids=["node", "cluster"])
@spec_grid.one_in(7)
def test_laws_of_all_pairs_through_a_third_layout(topology: Topology, every: int) -> None:
    """Plans of pairs of layouts of a small mesh through a third are simplified."""
    layouts, chooser = spec_grid.all_specs(Mesh(x=2, y=2), (4, 8)), random.Random(1)
    for src, dst in [*itertools.product(layouts, repeat=2)][::every]:
        middle = chooser.choice(layouts)
        assert_laws(redistribute(src, middle) >> redistribute(middle, dst), topology)
