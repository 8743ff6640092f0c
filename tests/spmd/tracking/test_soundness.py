"""Soundness of types: random bodies have the values and gradients that their types state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P
from fshard.spmd.types import States, states_of
from tests.helpers.spmd.typed_programs import (
    OPERATIONS,
    Program,
    inputs_of,
    partition_of,
    partitions_of,
)

MESHES = [Mesh(x=2), Mesh(x=3), Mesh(x=2, y=2), Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3))]
NUMBERS = st.integers(0, 11)
ROWS = st.tuples(st.sampled_from(OPERATIONS), NUMBERS, NUMBERS, NUMBERS)
Test = TypeVar("Test", bound=Callable[..., None])
Case = tuple[Program, list[Any], list[torch.Tensor]]


@st.composite
def cases(draw: st.DrawFn, min_size: int = 1) -> Case:
    """Draw a program, and the specs and values of three inputs."""
    mesh = draw(st.sampled_from(MESHES))
    choices = partitions_of(mesh)
    specs = [draw(st.sampled_from(choices)) for _ in range(3)]
    recipe = tuple(draw(st.lists(ROWS, min_size=min_size, max_size=9)))
    return Program(mesh, recipe), specs, inputs_of(mesh, specs, draw(st.integers(0, 9)))


def exhaustive(examples: int) -> Callable[[Test], Test]:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


def mapped(case: Case, check: bool | str, outs: list[Any]) -> Any:
    """Return the program as a function of global values that returns all tensors."""
    program, specs, _ = case
    return fs.shard_map(
        program.body, mesh=program.mesh, in_specs=tuple(specs), out_specs=outs, check=check
    )


def out_specs_of(case: Case, check: bool | str) -> list[Any]:
    """Return the out specs of the types; None for tensors that no spec describes."""
    program, specs, xs = case
    return [partition_of(states) for states, _ in program.find_types(xs, specs, check)[0]]


# -- values ------------------------------------------------------------------------------------


@exhaustive(60)
@given(cases())
def test_values_that_are_equal_by_type_are_equal(case: Case) -> None:
    program, specs, xs = case
    seen = program.find_types(xs, specs, True)
    for row in zip(*seen, strict=True):
        states = row[0][0]
        assert all(other is states for other, _ in row)
        for axis in program.mesh.axes:
            if (states.at(axis) or ("reduced", ""))[0] == "reduced":
                for group in program.mesh.groups(axis):
                    first, *rest = (row[program.mesh.ranks.index(rank)][1] for rank in group)
                    assert all(torch.equal(first, other) for other in rest), (axis, states)


@exhaustive(25)
@given(cases())
def test_results_that_pass_types_pass_the_value_check(case: Case) -> None:
    outs = out_specs_of(case, True)
    for y, z in zip(*(mapped(case, c, outs)(*case[2]) for c in (True, "values")), strict=True):
        assert torch.equal(y, z)


@exhaustive(40)
@given(cases())
def test_strict_programs_give_the_same_results_unchecked(case: Case) -> None:
    """Compare values bit for bit, and gradients up to the order of summation."""
    outs, xs = out_specs_of(case, "strict"), case[2]
    values, gradients = [], []
    for check in ("strict", False):
        ys = mapped(case, check, outs)(*xs)
        end = sum((y.square().sum() for y in ys), torch.zeros(()))
        values.append(ys)
        gradients.append(torch.autograd.grad(end, xs, materialize_grads=True))
    for y, z in zip(*values, strict=True):
        assert torch.equal(y, z)
    for g, h in zip(*gradients, strict=True):
        torch.testing.assert_close(g, h, rtol=1e-12, atol=1e-12)


# -- gradients ---------------------------------------------------------------------------------


def directions(like: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in like]


def slope(f: Any, xs: list[torch.Tensor], along: list[torch.Tensor], step: float) -> torch.Tensor:
    """Return the directional derivative of a scalar by a central difference."""
    ends = [
        f([(x.detach() + sign * step * v).requires_grad_() for x, v in zip(xs, along, strict=True)])
        for sign in (1, -1)
    ]
    rise: torch.Tensor = ends[0].detach() - ends[1].detach()
    return rise / (2 * step)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    scale = max(1.0, float(a.abs()), float(b.abs()))
    return bool((a - b).abs() <= 2e-5 * scale)


def dot(a: list[torch.Tensor], b: list[torch.Tensor]) -> torch.Tensor:
    return sum(((x * y).sum() for x, y in zip(a, b, strict=True)), torch.zeros(()))


def smooth(case: Case, *without: str) -> bool:
    """Return True if finite differences of the program's values are derivatives."""
    if any(name in ("detach", "outs", *without) for name, *_ in case[0].recipe):
        return False
    outs = out_specs_of(case, True)
    ys = mapped(case, True, outs)(*case[2])
    return all(float(y.detach().abs().max()) < 1e3 for y in ys)


@pytest.mark.parametrize("check", [True, "strict"])
@exhaustive(20)
@given(cases())
def test_outer_gradients_are_finite_differences(check: bool | str, case: Case) -> None:
    assume(smooth(case))
    outs = out_specs_of(case, check)
    f, xs = mapped(case, check, outs), case[2]
    weights = directions(f(*xs), 1)

    def number(at: list[torch.Tensor]) -> torch.Tensor:
        return dot(f(*at), weights)

    grads = torch.autograd.grad(number(xs), xs, materialize_grads=True)
    along = directions(xs, 2)
    assert close(slope(number, xs, along, 1e-6), dot(list(grads), along))


@exhaustive(25)
@given(cases(2))
def test_gradients_of_outer_gradients_are_finite_differences(case: Case) -> None:
    # Both branches would need a second derivative.
    assume(smooth(case, "branch", "counted"))
    outs = out_specs_of(case, True)
    f, xs = mapped(case, True, outs), case[2]
    weights, inner, along = directions(f(*xs), 1), directions(xs, 2), directions(xs, 3)

    def number(at: list[torch.Tensor]) -> torch.Tensor:
        y = dot(f(*at), weights)
        grads = torch.autograd.grad(y, at, create_graph=True, materialize_grads=True)
        return dot(list(grads), inner)

    y = number(xs)
    assume(y.requires_grad and float(y.detach().abs()) < 1e4)
    second = torch.autograd.grad(y, xs, materialize_grads=True)
    assert close(slope(number, xs, along, 1e-5), dot(list(second), along))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Return a scalar that is equal on all ranks, of a tensor in any states."""
    axes = fs.typeof(y).unreduced
    y = fs.psum(y, axes) if axes else y
    number = torch.tanh(y).square().sum()
    axes = (*fs.typeof(y).varying, *fs.typeof(y).reduced)
    return fs.psum(number, axes) if axes else number


@exhaustive(20)
@given(cases(), NUMBERS)
def test_gradients_in_the_body_have_dual_types_and_equal_outer_ones(case: Case, index: int) -> None:
    program, specs, xs = case
    output = index % len(program.find_types(xs, specs, True)[0])
    # After the host reads varying values, ranks may compute tensors of different types.
    assume(not any(name in ("branch", "counted") for name, *_ in program.recipe))

    def loss(*locals_: torch.Tensor) -> torch.Tensor:
        return loss_of(program.body(*locals_)[output])

    def inner(*locals_: torch.Tensor) -> Any:
        grads = torch.autograd.grad(loss(*locals_), locals_, materialize_grads=True)
        for x, g in zip(locals_, grads, strict=True):
            assert fs.typeof(g).states is fs.typeof(x).states.dual
        return grads

    def across(body: Any, outs: Any) -> Any:
        return fs.shard_map(body, mesh=program.mesh, in_specs=tuple(specs), out_specs=outs)(*xs)

    number = across(loss, P())
    assume(number.requires_grad)
    outer = torch.autograd.grad(number, xs, materialize_grads=True)
    for inner_grad, outer_grad in zip(across(inner, tuple(map(_dual, specs))), outer, strict=True):
        torch.testing.assert_close(inner_grad.detach(), outer_grad)


def _dual(p: Any) -> Any:
    return P(*p.partitions, reduced=set(p.unreduced), unreduced=set(p.reduced))


def test_duals_of_specs_have_dual_types() -> None:
    for mesh in MESHES:
        for p in partitions_of(mesh):
            states: States = states_of(_dual(p))
            assert states is states_of(p).dual
