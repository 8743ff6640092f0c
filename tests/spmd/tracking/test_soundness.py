"""Types tell the truth: random bodies, whose values and gradients are what their types say."""

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
from tests.helpers.typed_programs import (
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
def cases(draw: st.DrawFn, least: int = 1) -> Case:
    """A program, and the specs and values of three inputs."""
    mesh = draw(st.sampled_from(MESHES))
    choices = partitions_of(mesh)
    specs = [draw(st.sampled_from(choices)) for _ in range(3)]
    recipe = tuple(draw(st.lists(ROWS, min_size=least, max_size=9)))
    return Program(mesh, recipe), specs, inputs_of(mesh, specs, draw(st.integers(0, 9)))


def exhaustive(examples: int) -> Callable[[Test], Test]:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


def mapped(case: Case, check: bool | str, outs: list[Any]) -> Any:
    """The program as a function of global values, that returns all tensors."""
    program, specs, _ = case
    return fs.shard_map(
        program.body, mesh=program.mesh, in_specs=tuple(specs), out_specs=outs, check=check
    )


def found(case: Case, check: bool | str) -> list[Any]:
    """The out specs that types promise, with what is refused left out."""
    program, specs, xs = case
    return [partition_of(states) for states, _ in program.find(xs, specs, check)[0]]


# -- values ------------------------------------------------------------------------------------


@exhaustive(150)
@given(cases())
def test_what_is_equal_by_type_is_equal(case: Case) -> None:
    program, specs, xs = case
    seen = program.find(xs, specs, True)
    for row in zip(*seen, strict=True):
        states = row[0][0]
        assert all(each is states for each, _ in row)
        for axis in program.mesh.axes:
            if (states.at(axis) or ("reduced", ""))[0] == "reduced":
                for group in program.mesh.groups(axis):
                    first, *others = (row[program.mesh.ranks.index(rank)][1] for rank in group)
                    assert all(torch.equal(first, each) for each in others), (axis, states)


@exhaustive(50)
@given(cases())
def test_a_program_of_promises_that_types_show_keeps_them_by_value(case: Case) -> None:
    outs = found(case, True)
    for y, z in zip(*(mapped(case, c, outs)(*case[2]) for c in (True, "values")), strict=True):
        assert torch.equal(y, z)


@exhaustive(80)
@given(cases())
def test_what_is_strict_is_the_same_unchecked(case: Case) -> None:
    """Values bit by bit, and gradients but for the order in which the engine adds them up."""
    outs, xs = found(case, "strict"), case[2]
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
    """The derivative of a number in a direction, by a central difference."""
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
    """Whether differences of the program's values are derivatives."""
    if any(name in ("detach", "outs", *without) for name, *_ in case[0].recipe):
        return False
    outs = found(case, True)
    ys = mapped(case, True, outs)(*case[2])
    return all(float(y.detach().abs().max()) < 1e3 for y in ys)


@pytest.mark.parametrize("check", [True, "strict"])
@exhaustive(40)
@given(cases())
def test_outer_gradients_are_finite_differences(check: bool | str, case: Case) -> None:
    assume(smooth(case))
    outs = found(case, check)
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
    # Of the ways that a branch has, both would need a second derivative.
    assume(smooth(case, "branch", "counted"))
    outs = found(case, True)
    f, xs = mapped(case, True, outs), case[2]
    weights, inner, along = directions(f(*xs), 1), directions(xs, 2), directions(xs, 3)

    def number(at: list[torch.Tensor]) -> torch.Tensor:
        y = dot(f(*at), weights)
        made = torch.autograd.grad(y, at, create_graph=True, materialize_grads=True)
        return dot(list(made), inner)

    y = number(xs)
    assume(y.requires_grad and float(y.detach().abs()) < 1e4)
    again = torch.autograd.grad(y, xs, materialize_grads=True)
    assert close(slope(number, xs, along, 1e-5), dot(list(again), along))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """A number that is one on all ranks, of a tensor in any states."""
    axes = fs.typeof(y).unreduced
    y = fs.psum(y, axes) if axes else y
    number = torch.tanh(y).square().sum()
    axes = (*fs.typeof(y).varying, *fs.typeof(y).reduced)
    return fs.psum(number, axes) if axes else number


@exhaustive(80)
@given(cases(), NUMBERS)
def test_gradients_in_the_body_are_of_the_dual_type_and_those_outside(
    case: Case, place: int
) -> None:
    program, specs, xs = case
    at = place % len(program.find(xs, specs, True)[0])
    # Where the host learns of what varies, ranks may make tensors of other types.
    assume(not any(name in ("branch", "counted") for name, *_ in program.recipe))

    def loss(*locals_: torch.Tensor) -> torch.Tensor:
        return loss_of(program.body(*locals_)[at])

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
    for got, want in zip(across(inner, tuple(map(_dual, specs))), outer, strict=True):
        torch.testing.assert_close(got.detach(), want)


def _dual(p: Any) -> Any:
    return P(*p.partitions, reduced=set(p.unreduced), unreduced=set(p.reduced))


def test_duals_of_specs_are_duals_of_types() -> None:
    for mesh in MESHES:
        for p in partitions_of(mesh):
            states: States = states_of(_dual(p))
            assert states is states_of(p).dual
