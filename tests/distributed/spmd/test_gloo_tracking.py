"""Random typed bodies on gloo, compared with a simulation."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.host_read_bodies import (
    BODIES,
    BRANCHES,
    branch_error,
    gradients,
    sharded_gradients,
)
from tests.helpers.spmd.typed_programs import (
    OPERATIONS,
    Program,
    Recipe,
    inputs_of,
    partition_of,
    partitions_of,
)

MESHES = [Mesh(x=2), Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))]
Work = tuple[Recipe, list[Any], int]


def work_of(mesh: Mesh, count: int) -> list[Work]:
    """Return recipes with the specs of their inputs and a seed; equal in every call.

    Branches on values are left out: their two sides would be different programs.
    """
    draw = random.Random(mesh.size)
    names = [name for name in OPERATIONS if name not in ("branch", "counted")]
    work: list[Work] = []
    for seed in range(count):
        specs = [draw.choice(partitions_of(mesh)) for _ in range(3)]
        rows = range(draw.randrange(3, 9))
        numbers = draw.randrange
        recipe = tuple((draw.choice(names), numbers(12), numbers(12), numbers(12)) for _ in rows)
        work.append((recipe, specs, seed))
    return work


def results(mesh: Mesh, work: list[Work], check: bool | str) -> list[list[torch.Tensor]]:
    """Return all tensors of each recipe, and the gradients of its inputs."""
    output = []
    for recipe, specs, seed in work:
        program, xs = Program(mesh, recipe), inputs_of(mesh, specs, seed)
        types = program.find_types(xs, specs, check)[0]
        outs = [partition_of(states) for states, _ in types]
        f = fs.shard_map(
            program.body, mesh=mesh, in_specs=tuple(specs), out_specs=outs, check=check
        )
        ys = f(*xs)
        end = sum((torch.tanh(y).sum() for y in ys), torch.zeros(()))
        grads = torch.autograd.grad(end, xs, materialize_grads=True)
        output.append([*(y.detach() for y in ys), *grads])
    return output


def on_ranks(mesh: Mesh, work: list[Work], check: bool | str) -> list[list[torch.Tensor]]:
    fs.init(mesh)
    return results(mesh, work, check)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", [True, "strict"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_random_bodies_equal_the_simulation(mesh: Mesh, check: bool | str) -> None:
    work = work_of(mesh, 15)
    expected = results(mesh, work, check)
    for actual in run_ranks(mesh.size, on_ranks, mesh, work, check):
        for one, other, row in zip(actual, expected, work, strict=True):
            for y, z in zip(one, other, strict=True):
                torch.testing.assert_close(y, z, rtol=1e-10, atol=1e-10, msg=str(row))


def gradients_after_reads(mesh: Mesh) -> list[list[torch.Tensor]]:
    fs.init(mesh)
    return [gradients(mesh, body, lambda x: float(x.detach().sum())) for body in BODIES]


def test_a_read_whose_value_is_not_used_changes_no_gradient() -> None:
    mesh = Mesh(x=2)
    expected = [gradients(mesh, body, lambda x: None) for body in BODIES]
    for actual in run_ranks(2, gradients_after_reads, mesh):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def gradients_after_some_reads(mesh: Mesh) -> list[list[torch.Tensor]]:
    fs.init(mesh, timeout=100)

    def read(x: torch.Tensor) -> None:
        if os.environ["RANK"] == "0":
            float(x.detach().sum())

    if mesh.size > 2:
        return [sharded_gradients(mesh, read)]
    return [gradients(mesh, body, read) for body in BODIES] + [sharded_gradients(mesh, read)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_do_not_wait_for_a_rank_that_reads_alone(mesh: Mesh) -> None:
    expected = [sharded_gradients(mesh, lambda x: None)]
    if mesh.size == 2:
        expected = [gradients(mesh, body, lambda x: None) for body in BODIES] + expected
    for actual in run_ranks(mesh.size, gradients_after_some_reads, mesh):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def error_of_a_late_rank(mesh: Mesh) -> str:
    fs.init(mesh, timeout=100)

    def body(x: torch.Tensor) -> torch.Tensor:
        value = float(x.sum())  # other on each rank
        total = fs.psum(x, "x")
        if os.environ["RANK"] == "1":
            time.sleep(0.5)
        return total * value

    try:
        fs.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0))
    except fs.ShardingError as error:
        return str(error)
    return ""


def test_ranks_that_come_late_are_compared() -> None:
    for error in run_ranks(2, error_of_a_late_rank, Mesh(x=2)):
        assert "along x, which the spec omits, values must be equal" in error


def errors_of_ranks_that_do_not_come(mesh: Mesh) -> list[str]:
    """Return a rank's error where it takes a gradient alone, and where another one raises."""
    fs.init(mesh, timeout=2)
    is_first, errors = os.environ["RANK"] == "0", []

    def alone(x: torch.Tensor) -> None:
        if is_first and float(x.detach().sum()) > 0:
            torch.autograd.grad((x * x).sum(), x)
        elif not is_first:
            time.sleep(2.5)

    def raising(x: torch.Tensor) -> None:
        if not is_first:
            raise KeyError(3)
        float(x.detach().sum())

    for body in alone, raising:
        x = torch.arange(1.0, 5.0, requires_grad=True)
        try:
            fs.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(x)
            errors.append("")
        except (KeyError, fs.ShardingError) as error:
            errors.append(str(error))
    return errors


def test_a_rank_waits_until_the_timeout_and_not_for_one_that_raises() -> None:
    first, other = run_ranks(2, errors_of_ranks_that_do_not_come, Mesh(x=2))
    assert "1 of 2 ranks have come in 2 s" in first[0]
    assert (other[0], first[1], other[1]) == ("", "", "3")


def results_of_own_gradients(mesh: Mesh) -> list[list[float]]:
    """Return results of bodies in which ranks take other numbers of gradients after a read."""
    fs.init(mesh, timeout=20)

    def descended(x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.detach()[0])):
            x = x - torch.autograd.grad((x * x).sum(), x)[0] / 4
        return x

    def summed(x: torch.Tensor) -> torch.Tensor:
        return fs.psum(descended(x), "x")

    def twice(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad((x * x).sum(), x)  # of all that have read
        return fs.psum(descended(x) * (float(g.sum()) > 0), "x")

    rows = []
    for body, out in (descended, P("x")), (summed, P()), (twice, P()):
        x = torch.arange(1.0, 5.0, requires_grad=True)
        y = fs.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out)(x)
        rows.append(y.tolist())
    return rows


def test_ranks_that_have_read_may_take_gradients_alone() -> None:
    sums = [0.5 + 0.375, 1.0 + 0.5]
    for rows in run_ranks(2, results_of_own_gradients, Mesh(x=2)):
        assert rows == [[0.5, 1.0, 0.375, 0.5], sums, sums]


def branch_errors(mesh: Mesh) -> list[str]:
    fs.init(mesh, timeout=100)
    if os.environ["RANK"] == "0":  # a call by one rank alone, which fs.init forgets
        fs.shard_map(lambda x: None, mesh=mesh, in_specs=P("x"), out_specs=P())(torch.ones(2))
    fs.init(mesh)
    return [branch_error(mesh, case) for case in BRANCHES]


def test_gradients_through_other_branches_are_refused_by_all_ranks() -> None:
    mesh = Mesh(x=2)
    for errors in run_ranks(2, branch_errors, mesh):
        for case, error in zip(BRANCHES, errors, strict=True):
            assert "ranks [0], [1] would add gradients of different tensors" in error, case
            assert "the ranks may have diverged where the host read varying values" in error, case
