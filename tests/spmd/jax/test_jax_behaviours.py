"""Cases of `jax_cases.py` on simulated ranks, compared with JAX's values; and laws of maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

import fshard as fs
from fshard import Mesh, P
from tests.helpers.jax.jax_bodies import assert_same, expected, numbers
from tests.helpers.jax.jax_cases import CASES
from tests.helpers.jax.jax_programs import Program, case_of, one_by_one, programs

EXPECTED = expected()
CHECKS = [
    (name, check)
    for name, case in CASES.items()
    for check in ((False, True, "strict", "values") if case.casts else (True, "values"))
]


@pytest.mark.parametrize(("name", "check"), CHECKS, ids=[f"{n}-{c}" for n, c in CHECKS])
def test_values_equal_the_recorded_ones_of_jax(name: str, check: Any) -> None:
    assert_same(numbers(CASES[name], check), EXPECTED[name], name)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(programs())
def test_checks_do_not_change_values_of_random_bodies(program: Program) -> None:
    """Every `check` gives the values of the body with its casts written out."""
    want = numbers(case_of(program, casts=True), False)
    for check, casts in ((True, False), (True, True), ("strict", True), ("values", False)):
        assert_same(numbers(case_of(program, casts), check), want, f"check={check!r}")


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(programs())
def test_nested_maps_equal_one_map_over_both_axes(program: Program) -> None:
    case = case_of(program, casts=False)
    specs = (*case.in_specs, *case.out_specs)
    major = program.mesh.axes[0]
    assume(len(program.mesh.axes) == 2)
    assume(all(dim[0] == major for p in specs for dim in p.dims if len(dim) == 2))
    assert_same(numbers(one_by_one(case), True), numbers(case, True), "nested")


@pytest.mark.parametrize("make", [lambda x: x.sum().expand(1), torch.conj, lambda x: x.conj().imag])
def test_check_values_compares_any_memory_layout(make: Any) -> None:
    x = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j])
    mapped = fs.shard_map(make, mesh=Mesh(i=2), in_specs=P(), out_specs=P(), check="values")
    assert torch.equal(mapped(x), make(x))


def test_gradients_of_slices_at_axis_index() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        index = fs.axis_index("i")
        return x[index : index + 1] * (1 + index)

    x = torch.ones(4, requires_grad=True)
    fs.shard_map(body, mesh=Mesh(i=4), in_specs=P(), out_specs=P("i"))(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 2.0, 3.0, 4.0]


OVER_NO_AXIS: dict[str, Any] = {
    "psum": fs.psum,
    "pmean": fs.pmean,
    "pmax": fs.pmax,
    "pmin": lambda v, axes: fs.pmin([v], axes)[0],
    "pprod": fs.pprod,
    "all_gather": lambda v, axes: fs.all_gather(v, axes, tiled=True),
    "all_gather, stacked": lambda v, axes: fs.all_gather(v, axes, axis=1)[:, 0],
    "all_gather to invariant": lambda v, axes: fs.all_gather(v, axes, tiled=True, to="invariant"),
    "psum_scatter": lambda v, axes: fs.psum_scatter(v, axes, tiled=True),
    "all_to_all": lambda v, axes: fs.all_to_all(v, axes, 0, 0, tiled=True),
    "ppermute": lambda v, axes: fs.ppermute(v, axes, [(0, 0)]),
    "pshuffle": lambda v, axes: fs.pshuffle(v, axes, [0]),
    "pbroadcast": lambda v, axes: fs.pbroadcast(v, axes, 0),
    "pcast": lambda v, axes: fs.pcast(v, axes, to="varying"),
    "axis_index": lambda v, axes: v * fs.axis_size(axes) + fs.axis_index(axes),
    "pargmax": lambda v, axes: v + fs.pargmax(v, axes),
}


@pytest.mark.parametrize("check", [False, True, "strict", "values"])
@pytest.mark.parametrize("name", OVER_NO_AXIS)
def test_collectives_over_no_axes_are_identities(name: str, check: Any) -> None:
    """Values, types and gradients stay, for varying and for invariant operands."""
    for p in (P("i"), P()):
        v = torch.arange(1.0, 5.0, requires_grad=True)
        body = lambda v: OVER_NO_AXIS[name](v, ()) * v  # noqa: E731
        out = fs.shard_map(body, mesh=Mesh(i=2, j=2), in_specs=p, out_specs=p, check=check)(v)
        assert torch.equal(out, v * v)
        assert torch.equal(torch.autograd.grad(out.sum(), v)[0], 2 * v)


def test_python_numbers_over_no_axes() -> None:
    def body(v: torch.Tensor) -> list[Any]:
        return [fs.psum(3, ()), fs.pprod(3, []), fs.pmean(3, ()), fs.psum(v > 0, ()).dtype]

    mapped = fs.shard_map(body, mesh=Mesh(i=2), in_specs=P("i"), out_specs=None)
    assert mapped(torch.ones(2)) == [3, 3, 3, torch.int64]


MORE_THAN_JAX: dict[str, tuple[Any, Any, Any, list[float]]] = {
    "reduced meets invariant": (
        P(), P(reduced={"i"}), lambda v: fs.pcast(v, "i", to="reduced") + v * v, [3, 10, 21, 36],
    ),
    "reduced meets numbers": (
        P(), P(reduced={"i"}), lambda v: fs.pcast(v, "i", to="reduced") * 3 + 1, [3, 6, 9, 12],
    ),
    "reduced leaves sharded": (P(reduced={"i"}), P("i"), lambda v: v * v, [56, 128, 216, 320]),
    "invariant leaves reduced": (P(), P(reduced={"i"}), lambda v: v * v, [2, 8, 18, 32]),
    "invariant is gathered": (
        P(), P(), lambda v: fs.all_gather(v, "i", to="invariant"), [28, 32, 36, 40],
    ),
    "invariant is gathered to reduced": (
        P(), P(reduced={"i"}), lambda v: fs.all_gather(v, "i", to="reduced"), [28, 32, 36, 40],
    ),
    "addends times a number": (
        P("i"), P(unreduced={"i"}), lambda v: -2 * fs.pcast(v, "i", to="unreduced"), [-2] * 4,
    ),
    "a maximum": (P("i"), P(), lambda v: fs.pmax(v * v, "i"), [0, 0, 0, 8]),
    "a maximum of an invariant": (P(), P(), lambda v: fs.pmax(v * v, "i"), [2, 8, 18, 32]),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE_THAN_JAX)
def test_bodies_that_only_jax_refuses(name: str) -> None:
    """Gradients are those of one device, for results weighted by 1, 2, ..."""
    in_specs, out_specs, body, want = MORE_THAN_JAX[name]
    v = torch.arange(1.0, 5.0, requires_grad=True)
    out = fs.shard_map(body, mesh=Mesh(i=4), in_specs=in_specs, out_specs=out_specs)(v)
    (out * torch.arange(1.0, 1 + out.numel()).reshape(out.shape)).sum().backward()
    assert v.grad is not None
    assert v.grad.tolist() == want
