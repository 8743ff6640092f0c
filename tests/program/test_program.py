"""Programs: composition, text, topologies, dtypes, refusals."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
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
from tests.helpers import spec_grid
from tests.helpers.reference import simulate
from tests.helpers.step_table import MESH, XY, spec_of

# -- programs ------------------------------------------------------------------------------


def test_equal_sizes_are_dropped() -> None:
    src = spec_of("f32[12,6@y]")
    value = Program(src, (AllSlice("x", 0, (6, 6)), AllToAll("y", 1, 0, (2,) * 6)))
    plain = Program(src, [AllSlice(("x",), 0), AllToAll(["y"], 1, 0)])  # type: ignore[arg-type]
    assert value == plain
    assert hash(value) == hash(plain)
    assert [step.sizes for step in value.steps] == [None, None]  # type: ignore[union-attr]


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


def test_then_concatenates_programs() -> None:
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


def test_printed_program() -> None:
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
    for saved in (prog.T, prog.T.T, prog.simplify(), pickle.loads(pickle.dumps(prog))):
        assert saved.topology == cluster
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
