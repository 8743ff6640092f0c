"""`fs.propagate`: chosen strategies, alternatives, caches, threads, and error texts."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.ops.core.cache_keys import freeze, unfreeze
from fshard.ops.core.registry import register_rule
from fshard.ops.propagate.propagate import propagate
from fshard.plan.redistribute import redistribute
from fshard.program.cost.topology import Topology
from tests.helpers.ops.tied_calls import strategy_line, tied_calls
from tests.helpers.spec_grid import all_partitions, all_specs, error_text, sample_pairs

ROOT = Path(__file__).parent.parent.parent.parent
MESH = Mesh(dp=2, tp=4)
aten = torch.ops.aten


def spec(partition: P, *shape: int, mesh: Mesh = MESH, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec(mesh, partition, shape=shape, dtype=dtype)


# -- chosen strategies --------------------------------------------------------------------


CHOICES: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "columns": (torch.mm, (spec(P("dp"), 8, 16), spec(P(None, "tp"), 16, 8)), "f32[8@dp,8@tp]"),
    "rows": (torch.mm, (spec(P("dp", "tp"), 8, 16), spec(P("tp"), 16, 8)),
             "f32[8@dp,8]{unreduced: tp}"),
    "elements": (torch.add, (spec(P("dp", "tp"), 8, 16), spec(P("dp", "tp"), 8, 16)),
                 "f32[8@dp,16@tp]"),
    "broadcast": (torch.add, (spec(P("dp", "tp"), 8, 16), spec(P("tp"), 16)), "f32[8@dp,16@tp]"),
    "unreduced": (torch.add, (spec(P(unreduced={"tp"}), 8), spec(P(unreduced={"tp"}), 8)),
                "f32[8]{unreduced: tp}"),
    "linear function of unreduced": (aten.neg.default, (spec(P("dp", unreduced={"tp"}), 8),),
                                     "f32[8@dp]{unreduced: tp}"),
    "batches": (torch.bmm, (spec(P(("dp", "tp")), 8, 2, 4), spec(P(("dp", "tp")), 8, 4, 2)),
                "f32[8@(dp,tp),2,2]"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_local_strategies_are_chosen(name: str) -> None:
    op, args, result = CHOICES[name]
    strategy = propagate(op, *args)
    assert [str(item) for item in strategy.out_specs] == [result]
    assert strategy.is_local
    assert strategy.cost.launches == 0
    assert strategy.sources == args
    assert [item.partition.dims for item in strategy.in_specs] == [
        item.partition.dims for item in args
    ]


def test_nonlinear_operation_reduces_its_operand() -> None:
    strategy = propagate(aten.exp.default, spec(P(unreduced={"tp"}), 8, 8))
    assert not strategy.is_local
    assert not strategy.out_specs[0].partition.unreduced_kinds
    assert strategy.programs[0].src == strategy.sources[0]
    assert strategy.programs[0].dst == strategy.in_specs[0]


def test_programs_lead_from_sources_to_in_specs() -> None:
    shapes, mesh = ((8, 4), (4, 8)), Mesh(x=2, y=2)
    strategies = [all_partitions(mesh.axes, 2, ("invariant", "unreduced")) for _ in shapes]
    for first, second in itertools.islice(itertools.product(*strategies), 0, None, 7):
        operands = (spec(first, 8, 4, mesh=mesh), spec(second, 4, 8, mesh=mesh))
        strategy = propagate(torch.mm, *operands)
        assert strategy.sources == operands
        for prog, src, dst in zip(
            strategy.programs, strategy.sources, strategy.in_specs, strict=True
        ):
            assert (prog.src, prog.dst) == (src, dst)
            assert prog.steps == redistribute(src, dst).steps
        assert strategy.cost.launches == sum(prog.cost().launches for prog in strategy.programs)
        assert strategy.is_local == all(prog.is_local for prog in strategy.programs)


def test_alternatives_are_ordered_by_time() -> None:
    strategy = propagate(torch.mm, spec(P("dp", "tp"), 64, 64), spec(P(), 64, 64))
    assert strategy.alternatives
    strategies = [strategy, *strategy.alternatives]
    assert [item.time for item in strategies] == sorted(item.time for item in strategies)
    assert len({item.roles for item in strategies}) == len(strategies)


def test_no_alternative_is_faster_where_several_axes_move() -> None:
    """Some strategies are not planned, as a lower bound of their time is above another's."""
    mesh, on = Mesh(x=4, y=2), Topology.cluster(2)
    states = "invariant", "unreduced"
    specs = all_specs(mesh, (1 << 12, 1 << 10), states, dtype=torch.float32)
    for src, dst in sample_pairs(specs, 60, seed=3):
        best = propagate(torch.add, src, dst, topology=on)
        assert all(best.time <= other.time for other in best.alternatives), (src, dst)


def test_str_of_a_strategy() -> None:
    strategy = propagate(torch.mm, spec(P("dp", "tp"), 8, 16), spec(P("tp"), 16, 8))
    assert str(strategy) == (
        "mm.default: f32[8@dp,16@tp], f32[16@tp,8]{reduced: dp}\n"
        "    -> f32[8@dp,8]{unreduced: tp}\n"
        "dp: i, tp: k  (nothing is sent)"
    )
    second = propagate(torch.softmax, spec(P("dp", "tp"), 8, 16), 1)
    assert str(second) == (
        "softmax.int: f32[8@dp,16] -> f32[8@dp,16]\n"
        "dp: d0, tp: invariant  (192 B received, 7.95 µs)\n"
        "operand 0: f32[8@dp,16@tp] -> f32[8@dp,16] on Mesh(dp=2, tp=4)\n"
        "  all_gather(tp, dim 1)  f32[8@dp,16]  192 B"
    )


def test_several_results() -> None:
    two = propagate(aten.max.dim, spec(P("dp"), 8, 4), 1)
    assert [str(item) for item in two.out_specs] == ["f32[8@dp]", "i64[8@dp]"]
    parts = propagate(aten.split.Tensor, spec(P(None, "tp"), 8, 4), 4)
    assert [str(item) for item in parts.out_specs] == ["f32[4,4@tp]", "f32[4,4@tp]"]


def test_grad_excludes_strategies_with_wrong_gradients() -> None:
    operand = spec(P(None, "tp"), 8, 8)
    free, saved = (propagate(aten.amax.default, operand, [1], grad=grad) for grad in (False, True))
    assert dict(free.out_specs[0].partition.unreduced_kinds) == {"tp": "max"}
    assert not saved.out_specs[0].partition.unreduced_kinds


def test_registered_rule() -> None:
    def gated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x @ w) * (x @ w)

    register_rule(gated)("bd,de->be")
    register_rule(gated)(_whole)
    strategy = propagate(gated, spec(P("dp"), 8, 16), spec(P(None, "tp"), 16, 8))
    assert str(strategy.out_specs[0]) == "f32[8@dp,8@tp]"
    sharded = propagate(gated, spec(P(None, "tp"), 8, 16), spec(P("tp"), 16, 8))
    assert not sharded.is_local


def _whole(call: Any) -> Any:
    from fshard.ops.core.rule import rule

    return rule("bd,de->be", reduce={})


# -- caches and determinism ---------------------------------------------------------------


def test_equal_calls_are_cached() -> None:
    operands = spec(P("dp"), 8, 16), spec(P(None, "tp"), 16, 8)
    assert propagate(torch.mm, *operands) is propagate(torch.mm, *operands)


def test_plans_follow_the_default_dtype() -> None:
    integers, before = fs.shard(torch.arange(8), Mesh(x=2), P("x")), torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            for y in fs.simulate(Mesh(x=2), lambda x: fs.apply(torch.sin, x), integers):
                assert (y.spec.dtype, y.local.dtype) == (dtype, dtype)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("first", "second"),
    list(itertools.permutations([1, 1.0, True, 1 + 0j, "1", (1,), [1], None], 2)),
)
def test_arguments_of_different_types_freeze_differently(first: Any, second: Any) -> None:
    assert len({freeze(first), freeze(second)}) == 2


@pytest.mark.parametrize(
    "value",
    [0, 0.0, -0.0, 1.5, float("inf"), -2, True, 1 + 2j, -0j, "x", None, [1, (2.0, [True])], ()],
)
def test_unfreeze_inverts_freeze(value: Any) -> None:
    assert hash(freeze(value)) == hash(freeze(value))
    assert repr(unfreeze(freeze(value))) == repr(value)


def test_nan_freezes_to_an_equal_key() -> None:
    assert freeze(float("nan")) == freeze(float("nan"))
    assert freeze(0.0) != freeze(-0.0)


PROGRAM = """
import torch
from tests.helpers.ops.tied_calls import strategy_line, tied_calls
from fshard.ops.propagate.propagate import propagate
for op, args in tied_calls():
    print(strategy_line(propagate(op, *args)))
"""


def test_choice_does_not_depend_on_the_hash_seed() -> None:
    """The hash seed of this process is another one, of all but one in 4 billion."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, text=True, capture_output=True, check=True,
        timeout=100, env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    lines = (strategy_line(propagate(op, *args)) for op, args in tied_calls())
    assert done.stdout == "".join(f"{line}\n" for line in lines)


def test_threads_choose_the_same() -> None:
    jobs = [(op, args) for op, args in tied_calls() for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        lines = list(pool.map(lambda item: strategy_line(propagate(item[0], *item[1])), jobs))
    assert lines == [strategy_line(propagate(op, *args)) for op, args in jobs]


# -- errors -------------------------------------------------------------------------------


def _no_rule(x: torch.Tensor) -> torch.Tensor:
    return x


def test_an_operation_without_specs() -> None:
    assert error_text(lambda: propagate(torch.add, 1, 2)) == (
        "fs.propagate(add)\n"
        "  given: no specs\n"
        "  rule:  a spec stands in the place of every tensor\n"
        "  fix:   fs.Spec(mesh, P(...), shape=..., dtype=...)"
    )


def test_specs_on_two_meshes() -> None:
    second = Mesh(dp=4)
    text = error_text(lambda: propagate(torch.add, spec(P(), 4), spec(P(), 4, mesh=second)))
    assert text == (
        "fs.propagate(add)\n"
        f"  given: operands on {MESH} and {second}\n"
        "  rule:  an operation runs on one mesh\n"
        "  fix:   move one of them there first: fs.reshard(pair, spec)"
    )


def test_arguments_refused_by_the_operation() -> None:
    text = error_text(lambda: propagate(aten.mm.default, spec(P(), 4, 3), spec(P(), 4, 3)))
    assert text.startswith(
        "fs.propagate(aten.mm.default)\n  given: float32[4, 3], float32[4, 3]\n"
        "  rule:  it must run on tensors of these shapes: "
    )
    assert text.endswith("  fix:   check the arguments with the same call on unsharded tensors")


def test_operation_without_a_rule() -> None:
    lib = torch.library.Library("fshard_tests", "FRAGMENT")
    lib.define("ruleless(Tensor x) -> Tensor")
    lib.impl("ruleless", lambda x: x.clone(), "CompositeExplicitAutograd")
    op = torch.ops.fshard_tests.ruleless.default
    text = error_text(lambda: propagate(op, spec(P("dp"), 4, 3)))
    assert text == (
        "fs.propagate(fshard_tests.ruleless.default)\n"
        "  given: [4, 3]\n"
        "  rule:  an operation on layouts must have a sharding rule: it has none\n"
        "  fix:   fs.register_rule(torch.ops.fshard_tests.ruleless.default)('bd,d->bd') gives it "
        "one; on replicated tensors, fs.unshard(pair), it runs as it is"
    )
    register_rule(op)("ij->ij")
    assert str(propagate(op, spec(P("dp"), 4, 3)).out_specs[0]) == "f32[4@dp,3]"


# -- functions of one operation ----------------------------------------------------------------


X = spec(P("dp"), 4, 4, 8)
IMAGES, WEIGHT = spec(P("dp"), 4, 4, 8, 8), spec(P(), 4, 4, 3, 3)


@pytest.mark.parametrize(
    ("op", "args", "result"),
    [
        (F.relu, (X,), "f32[4@dp,4,8]"),
        (F.conv2d, (IMAGES, WEIGHT, None, 1, 1), "f32[4@dp,4,8,8]"),
        (F.avg_pool2d, (IMAGES, 2), "f32[4@dp,4,4,4]"),
        (F.max_pool2d, (IMAGES, 2), "f32[4@dp,4,4,4]"),
        (torch.var, (X, 1), "f32[4@dp,8]"),
        (torch.roll, (X, 1, 1), "f32[4@dp,4,8]"),
        (torch.Tensor.permute, (X, 0, 2, 1), "f32[4@dp,8,4]"),
        (torch.einsum, ("abc,abc->a", X, X), "f32[4@dp]"),
        (lambda x: x.sum(0), (X,), "f32[4,8]{unreduced: dp}"),
    ],
)
def test_functions_of_one_operation_have_its_strategy(op: Any, args: Any, result: str) -> None:
    assert str(propagate(op, *args).out_specs[0]) == result


def test_functions_of_several_operations_are_refused() -> None:
    text = error_text(lambda: propagate(lambda x: x.relu() + 1, X))
    assert "2 operations (relu, add) on 1 spec" in text
    text = error_text(lambda: propagate(torch.nn.Linear(8, 8), X))
    assert "1 operation (linear) on 1 spec and 2 tensors of a closure" in text


def test_options_of_the_operation_itself_are_its_own() -> None:
    def scaled(x: torch.Tensor, *, topology: str, grad: bool = False) -> torch.Tensor:
        return x * (2 if topology == "ring" else 3)

    register_rule(scaled)("abc->abc")
    strategy = propagate(scaled, X, topology="ring", grad=False)
    assert dict(strategy.call.kwargs) == {"topology": "ring", "grad": False}


def test_options_are_ambiguous_for_a_function_of_any_keyword() -> None:
    text = error_text(lambda: propagate(lambda x, **options: x, X, topology=None))
    assert "takes any keyword" in text
    assert "fs.on_pairs" in text


# -- results larger than operands ---------------------------------------------------------------


def upsample(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="bilinear")


@pytest.mark.parametrize("axes", [{"x": 4}, {"x": 8}, {"x": 2, "y": 4}, {"x": 4, "y": 4}])
@pytest.mark.parametrize(
    ("op", "shape", "dim"),
    [
        (torch.sort, (16384, 8192), 1),
        (upsample, (16, 64, 256, 256), 2),
        (lambda x: x.repeat(1, 2), (4096, 4096), 1),
    ],
)
def test_larger_results_do_not_replicate(
    op: Any, shape: tuple[int, ...], dim: int, axes: dict[str, int]
) -> None:
    """The programs of the chosen strategy take the least time of all the alternatives'."""
    mesh = Mesh(axes)
    strategy = propagate(op, spec(P(*[None] * dim, tuple(axes)), *shape, mesh=mesh))
    times = [choice.cost.time for choice in (strategy, *strategy.alternatives)]
    assert times[0] == min(times)
    assert strategy.out_specs[0] is not None
    assert strategy.out_specs[0].num_shards == mesh.size
