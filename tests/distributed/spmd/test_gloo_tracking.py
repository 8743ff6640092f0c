"""Random typed bodies on gloo, compared with a simulation."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spmd.host_read_bodies import BODIES, BRANCHES, branch_error, gradients
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


def branch_errors(mesh: Mesh) -> list[str]:
    fs.init(mesh, timeout=20)
    return [branch_error(mesh, case) for case in BRANCHES]


def test_gradients_through_other_branches_are_refused_by_all_ranks() -> None:
    mesh = Mesh(x=2)
    for errors in run_ranks(2, branch_errors, mesh):
        for case, error in zip(BRANCHES, errors, strict=True):
            assert "ranks [0], [1] would add gradients of different tensors" in error, case
            assert "the ranks may have diverged where the host read varying values" in error, case
