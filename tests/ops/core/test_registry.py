"""Rules that users register for operations: texts, generators, lists of acceptable shardings."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import rows
from tests.helpers.gloo.harness import Ranks
from tests.helpers.ops.op_checks import check_call

MESH = Mesh(x=2)


@torch.library.custom_op("fshard_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w.sum(0)


@scaled.register_fake
def _(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fshard_tests::softmax", mutates_args=())
def softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return x.softmax(dim)


@softmax.register_fake
def _(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return torch.empty_like(x)


OP = torch.ops.fshard_tests.scaled.default


def test_custom_op_takes_a_rule_text() -> None:
    fs.register_rule(OP)(fs.rule("bd,kd->bd", unsharded="k", linear=(0, 1)))
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    assert check_call(OP, x, w, grad=False, two_axes=True) == []
    part = fs.partition(lambda x, w: OP(x, w).relu(), mesh=MESH, in_specs=(P("x"), P(None, "x")))
    torch.testing.assert_close(part(x, w), OP(x, w).relu())


@pytest.mark.parametrize(
    "states", [(0, 1, None, "sum"), (Shard(0), Shard(1), Replicate(), Partial())]
)
def test_generator_may_return_acceptable_shardings(states: tuple[Any, ...]) -> None:
    rows, columns, replicated, unreduced = states

    def lines(call: OpCall) -> list[Any]:
        return [
            ([rows], [rows, replicated]),
            ([columns], [columns, columns]),
            ([unreduced], [unreduced, replicated]),
        ]

    fs.register_rule(OP)(lines)
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    assert check_call(OP, x, w, grad=False, two_axes=True) == []
    specs = [Spec(MESH, p, shape=s, dtype=torch.float64)
             for p, s in ((P(None, "x"), (4, 6)), (P(None, "x"), (3, 6)))]  # fmt: skip
    assert str(fs.propagate(OP, *specs).out_specs[0]) == "f64[4,6@x]"


def test_all_invalid_lines_are_listed() -> None:
    fs.register_rule(OP)(lambda call: [([0], [0]), ([7], [0, None]), (["sum"], ["sum", 0]),
                                       ([0], [0, None]), ([0], [0, 0])])  # fmt: skip
    x = Spec(MESH, P("x"), shape=(4, 6), dtype=torch.float64)
    with pytest.raises(fs.ShardingError) as error:
        fs.propagate(OP, x, x)
    text = str(error.value)
    assert "a line must have one state for each of 1 results and 2 operands" in text
    assert "correct 7" in text
    assert "not both" in text
    assert "must be sharded by one line only" in text


def test_last_registration_wins_for_a_python_function() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    fs.register_rule(twice)("ij->ij")
    assert fs.propagate(twice, Spec(MESH, P("x"), shape=(4, 2))).out_specs[0] == Spec(
        MESH, P("x"), shape=(4, 2)
    )
    fs.register_rule(twice)(fs.rule("ij->ij", unsharded="i"))
    assert fs.propagate(twice, Spec(MESH, P("x"), shape=(4, 2))).sends
    pair = fs.shard(torch.ones(4, 2), Spec(MESH, P(None, "x"), shape=(4, 2)))
    torch.testing.assert_close(fs.unshard(fs.apply(twice, pair)), torch.full((4, 2), 2.0))


def test_registrations_change_later_calls_of_partitioned_functions() -> None:
    pair, part = fs.shard(torch.ones(4, 2), MESH, P("x")), fs.partition(OP, mesh=MESH)
    w = fs.shard(torch.ones(3, 2), MESH, P())
    for unsharded, sends in (("kb", True), ("k", False)):
        fs.register_rule(OP)(fs.rule("bd,kd->bd", unsharded=unsharded, linear=(0, 1)))
        assert any(not prog.is_local for prog in part.trace(pair, w).programs) == sends
    decomposed = []
    fs.register_rule(OP)(fs.rule("bd,kd->bd", unsharded="kb", linear=(0, 1)))
    for i in range(2):
        fs.register_decomposition(OP)(lambda x, w, i=i: (decomposed.append(i), x * w.sum(0))[1])
        part(pair, w)
    assert set(decomposed) == {0, 1}


def test_rule_of_a_builtin_function_is_that_of_its_operation() -> None:
    rule, x = rows()[torch.ops.aten.i0.default].generator, torch.ones(4, 2)
    part = fs.partition(torch.i0, mesh=MESH, in_specs=P("x"))
    try:
        fs.register_rule(torch.i0)(fs.rule("bd->bd", unsharded="b"))
        assert any(not prog.is_local for prog in part.trace(x).programs)
        assert fs.propagate(torch.i0, Spec(MESH, P("x"), shape=(4, 2))).sends
    finally:
        fs.register_rule(torch.ops.aten.i0)(rule)


def test_error_without_a_rule_names_register_rule() -> None:
    with pytest.raises(fs.ShardingError, match=r"fs\.register_rule"):
        fs.propagate(print, Spec(MESH, P(), shape=(2,)))


def test_rule_of_a_builtin_operation_is_replaced_only_by_users() -> None:
    """A user's rule also wins if it was registered before the built-in rules were loaded.

    So does a decomposition.
    """
    program = """
import torch, fshard as fs
fs.register_decomposition("logcumsumexp")(torch.cumsum)
fs.register_rule(torch.ops.aten.relu.default)(fs.rule("bd->bd", unsharded="bd"))
spec = fs.parse("f32[8@x,4]", fs.Mesh(x=2))
rule = str(fs.propagate(torch.relu, spec).rule)
assert rule == "bd->bd  {b unsharded; d unsharded}", rule
from fshard.ops.core.registry import rows
users = [row.op for row in rows().values() if not row.is_builtin]
assert users == [torch.ops.aten.relu.default], users
from fshard.ops.core.registry import decomposition_of
assert decomposition_of(torch.ops.aten.logcumsumexp.default) is torch.cumsum
"""
    with closing(Ranks(1, init=False)) as ranks:  # a process without rules
        ranks.run(exec, program, {})


def test_documented_example_of_register_sharding() -> None:
    """DTensor's custom softmax, with None for the arguments that are no tensors."""
    op = torch.ops.fshard_tests.softmax.default

    def custom_softmax_sharding(call: OpCall) -> list[Any]:
        x, dim, _ = call.args
        softmax_dim = dim if dim >= 0 else dim + x.ndim
        acceptable_shardings = [([Replicate()], [Replicate(), None, None])]
        for sharding_dim in range(x.ndim):
            if sharding_dim != softmax_dim:
                all_sharded = ([Shard(sharding_dim)], [Shard(sharding_dim), None, None])
                acceptable_shardings.append(all_sharded)
        return acceptable_shardings

    fs.register_rule(op)(custom_softmax_sharding)
    assert check_call(op, torch.randn(4, 6, dtype=torch.float64), -1, False, grad=False) == []
    rows = fs.propagate(op, Spec(MESH, P("x"), shape=(4, 6)), -1, False)
    assert str(rows.out_specs[0]) == "f32[4@x,6]"
    columns = fs.propagate(op, Spec(MESH, P(None, "x"), shape=(4, 6)), -1, False)
    assert str(columns.in_specs[0]) in ("f32[4,6]", "f32[4@x,6]")


@pytest.mark.parametrize(
    ("generator", "text"),
    [
        (lambda call: call.args[1], "given: IndexError: tuple index out of range"),
        (lambda x, dim: "ab->ab", "given: TypeError: "),
        (lambda call: 3, "given: int 3"),
        (lambda call: "ab", "given: ab\n"),
    ],
)
def test_errors_of_generators_name_the_operation(generator: Any, text: str) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    fs.register_rule(doubled)(generator)
    with pytest.raises(fs.ShardingError) as caught:
        fs.propagate(doubled, Spec(MESH, P("x"), shape=(4, 6)))
    assert str(caught.value).startswith("fs.register_rule(doubled): its generator")
    assert text in str(caught.value)


def test_generator_may_return_a_text() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    fs.register_rule(doubled)(lambda call: "abc"[: call.result.ndim] + "->ab")
    result = fs.propagate(doubled, Spec(MESH, P("x"), shape=(4, 6))).out_specs[0]
    assert str(result) == "f32[4@x,6]"
