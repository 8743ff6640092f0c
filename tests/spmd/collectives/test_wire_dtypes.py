"""`forward_dtype` and `backward_dtype` of collectives: values, bytes and errors.

A collective with a `forward_dtype` must equal the plain one of the cast tensor, cast back; its
gradient must equal the one of the plain collective in `backward_dtype`, cast back. The dtype of a
direction that sends nothing must have no effect.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.spmd.collectives.collective_plan import COLLECTIVE_PLANS
from tests.helpers.spmd.collective_cases import this_rank
from tests.helpers.spmd.wire_dtype_cases import (
    BF16,
    F32,
    F64,
    LINE,
    MESHES,
    SENDERS,
    Sender,
    on_rank,
    randn,
)


def test_all_collectives_of_values_have_wire_dtypes() -> None:
    plans: list[Callable[..., Any]] = [*COLLECTIVE_PLANS.values(), fs.ragged_all_to_all]
    with_both = {
        plan.__name__ for plan in plans
        if {"forward_dtype", "backward_dtype"} <= inspect.signature(plan).parameters.keys()
    }  # fmt: skip
    assert with_both == {case.name.split()[0] for case in SENDERS}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_values_are_cast_once_in_each_direction(mesh: Mesh) -> None:
    assert fs.simulate(mesh, on_rank, mesh) == [[]] * mesh.size


@pytest.mark.parametrize("case", SENDERS, ids=lambda case: case.name)
def test_bytes_scale_with_the_wire_dtype(case: Sender) -> None:
    """Forward sends half the bytes, backward twice as many; row offsets are not cast."""

    def run(**o: Any) -> Any:
        def body() -> None:
            x = torch.randn(2, 4, requires_grad=True)
            case.run(x, "i", mesh=LINE, **o).sum().backward()

        with fs.comm_log() as log:
            fs.simulate(LINE, body)
        return log

    def sent(phase: Any) -> int:
        offsets = phase.bytes["all_gather", "i"] if case.name == "ragged_all_to_all" else 0
        return int(phase.total_bytes - offsets)

    plain, wired = run(), run(forward_dtype=BF16, backward_dtype=F64)
    assert wired.counts == plain.counts
    assert 2 * sent(wired.forward) == sent(plain.forward)
    expected = 2 * sent(plain.backward)
    if case.computes_in == "x" and case.cotangents:  # half of the gathers are of the result
        expected -= plain.backward.bytes["all_gather", "i"] * 3 // 4
    assert sent(wired.backward) == expected
    moves = case.forward and "groups" not in case.name
    assert bool(sent(plain.forward)) == moves


def test_second_derivatives_send_forward_dtype_again() -> None:
    linear = [case for case in SENDERS if case.computes_in == "backward"]

    def body(x: torch.Tensor) -> list[bool]:
        results = []
        for case in linear:
            leaf = x.clone().requires_grad_()
            y = case.run(leaf, "i", mesh=LINE, forward_dtype=BF16, backward_dtype=F64)
            ct = torch.ones_like(y).requires_grad_()
            (grad,) = torch.autograd.grad(y, leaf, ct, create_graph=True)
            (again,) = torch.autograd.grad(grad, ct, x)
            results.append(torch.equal(again, y))
        return results

    for results in fs.simulate(LINE, lambda: body(randn(torch.Size((2, 3)), F32, this_rank(LINE)))):
        assert results == [True] * len(linear)


def test_wire_dtypes_of_trees_and_started_collectives() -> None:
    shapes = {"a": torch.Size((2, 3)), "b": torch.Size((4,))}
    share = {0: 1.0, 1: 4 / 3}

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        return {name: randn(shape, F32, seed) for name, shape in shapes.items()}

    def gradients() -> Any:
        leaves = {name: x.requires_grad_() for name, x in drawn(this_rank(LINE)).items()}
        ys = fs.all_gather(leaves, "i", forward_dtype=BF16, backward_dtype=BF16, mesh=LINE)
        total = torch.cat([y.flatten() for y in ys.values()]).sum() * share[this_rank(LINE)]
        return ys, torch.autograd.grad(total, list(leaves.values()))

    with fs.comm_log() as log:
        results = fs.simulate(LINE, gradients)
    assert log.forward.bytes == {("all_gather", "i"): 20}
    assert log.backward.bytes == {("reduce_scatter", "i"): 20}
    assert log.counts == {("all_gather", "i"): 1, ("reduce_scatter", "i"): 1}
    addends = [torch.tensor(case).to(BF16) for case in share.values()]
    by_place = [drawn(rank) for rank in LINE.devices]
    for ys, grads in results:
        for name, grad in zip(shapes, grads, strict=True):
            expected = torch.stack([case[name].to(BF16) for case in by_place]).float()
            assert torch.equal(ys[name], expected)
            assert torch.equal(grad, torch.full_like(grad, float(addends[0] + addends[1])))

    def ahead() -> Any:
        tree = drawn(this_rank(LINE))
        pending = fs.start(fs.psum, tree, "i", forward_dtype=BF16, mesh=LINE)
        return pending.wait(), fs.psum(tree, "i", forward_dtype=BF16, mesh=LINE)

    for later, at_once in fs.simulate(LINE, ahead):
        for name in shapes:
            first, second = (case[name].to(BF16) for case in by_place)
            assert torch.equal(later[name], (first + second).float())
            assert torch.equal(later[name], at_once[name])


@pytest.mark.parametrize("op", [fs.pmax, fs.pmin])
def test_extremes_in_groups_add_cotangents_in_backward_dtype(op: Any) -> None:
    share = {0: 1.0, 1: 4 / 3}

    def body() -> Any:
        rank = this_rank(LINE)
        x = torch.tensor([1.0 + rank / 1024, 1.0 + rank], requires_grad=True)
        groups: Any = {"axis_index_groups": [[0, 1]], "mesh": LINE}
        y = op(x, "i", forward_dtype=BF16, backward_dtype=BF16, **groups)
        return torch.autograd.grad(y, x, torch.full((2,), share[rank]))[0].tolist()

    total = float(sum(torch.tensor(s).to(BF16) for s in share.values()))
    grads = fs.simulate(LINE, body)  # by device; the first elements tie in bfloat16
    assert [grad[0] for grad in grads] == [total / 2] * 2
    assert sorted(grad[1] for grad in grads) == [0.0, total]


def test_parts_of_a_differentiated_program_keep_wire_dtypes() -> None:
    src = Spec(LINE, P(unreduced={"i": "max"}), shape=(4, 2))
    prog = fs.redistribute(
        src, src.replace(partition=P("i")), forward_dtype=BF16, backward_dtype=F64
    )
    shards = [randn(torch.Size((4, 2)), F32, seed).requires_grad_() for seed in range(2)]
    with fs.comm_log() as log:
        ys = prog(tuple(shards))
        grads = torch.autograd.grad([y.sum() for y in ys], shards)
    rounded = torch.stack([x.detach().to(BF16).float() for x in shards])
    assert torch.equal(fs.unshard((ys, prog.dst)), rounded.amax(0))
    assert torch.equal(torch.stack(grads), (rounded == rounded.amax(0)).float())
    assert log.forward.total_bytes == 4 * BF16.itemsize  # a rank keeps its half


def test_wire_dtypes_of_integers_and_booleans() -> None:
    def body() -> list[Any]:
        big = torch.tensor([100], dtype=torch.int8)
        return [
            fs.pmean(big, "i", forward_dtype=BF16, mesh=LINE),
            fs.psum(big, "i", forward_dtype=torch.int64, mesh=LINE),
            fs.all_gather(big > 0, "i", forward_dtype=torch.int8, mesh=LINE),
            fs.psum(3, "i", forward_dtype=BF16, mesh=LINE),
        ]

    for mean, total, flags, number in fs.simulate(LINE, body):
        assert torch.equal(mean, torch.tensor([100.0]))
        assert torch.equal(total, torch.tensor([-56], dtype=torch.int8))
        assert torch.equal(flags, torch.ones(2, 1, dtype=torch.bool))
        assert number == 6


def test_wire_dtypes_of_meta_tensors() -> None:
    x = torch.empty(2, 4, device="meta", dtype=F32)
    for case in SENDERS:
        if case.name != "ragged_all_to_all":
            y = case.run(x, "i", mesh=LINE, forward_dtype=BF16)
            assert (y.dtype, y.device.type) == (F32, "meta"), case.name


def refusal(word: str, wire: object, dtype: torch.dtype) -> str:
    return (
        f"{word}={wire!r} of a tensor of {dtype}\n"
        "  rule:  the dtype sent must be of the same kind: floating for floating, integer for "
        "integer\n"
        f"  fix:   leave {word} out, or cast the tensor first"
    )


@pytest.mark.parametrize("case", SENDERS, ids=lambda case: case.name)
def test_refused_wire_dtypes(case: Sender) -> None:
    def run(x: torch.Tensor, **o: Any) -> None:
        fs.simulate(LINE, lambda: case.run(x, "i", mesh=LINE, **o))

    where = f"fs.{case.name.split()[0]}"
    number = torch.ones(2, 1)
    count, flag = number.long(), number.bool()
    cases: list[tuple[torch.Tensor, str, Any]] = [
        (count, "forward_dtype", BF16), (count, "backward_dtype", torch.complex64),
        (count, "forward_dtype", torch.bool), (number, "forward_dtype", torch.int32),
        (number, "backward_dtype", torch.complex64), (number, "backward_dtype", "bf16"),
        (number + 0j, "forward_dtype", F64),
    ]  # fmt: skip
    cases += [] if case.name in ("psum", "pmean") else [(flag, "backward_dtype", F32)]
    for x, word, wire in cases:
        if where == "fs.pmean" and not x.is_floating_point() and not x.is_complex():
            continue  # the mean of integers is floating
        with pytest.raises(ShardingError, match=re.escape(refusal(word, wire, x.dtype))) as caught:
            run(x, **{word: wire})
        assert str(caught.value).startswith(f"{where}\n  given: {word}=")
    with pytest.raises(ShardingError) as caught:
        run(number, forward_dtype=torch.int32, backward_dtype=torch.int64)
    assert len(caught.value.problems) == 2


def test_programs_refuse_the_same_wire_dtypes() -> None:
    src = Spec(LINE, P("i"), shape=(4,), dtype=torch.int64)
    with pytest.raises(
        ShardingError, match=r"sent in torch.bfloat16\n  rule:  the dtype sent must"
    ):
        fs.redistribute(src, src.replace(partition=P()), forward_dtype=BF16)


@pytest.mark.parametrize(
    ("kind", "dtype", "rule"),
    [
        ("maximum", F32, "kind must be one of sum, avg, max, min, product"),
        ("max", torch.complex64, "complex numbers have no order"),
        ("sum", torch.bool, "booleans have no sum"),
        ("avg", torch.int64, "an average must be of floating or complex values"),
    ],
)
def test_refused_kinds_of_psum_scatter(kind: str, dtype: torch.dtype, rule: str) -> None:
    x = torch.ones(2, dtype=dtype)
    with pytest.raises(ShardingError, match=f"fs.psum_scatter\n  given: .*\n  rule:  {rule}"):
        fs.simulate(LINE, lambda: fs.psum_scatter(x, "i", kind=kind, mesh=LINE))
