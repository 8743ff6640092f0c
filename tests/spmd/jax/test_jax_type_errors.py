"""Texts of errors of types, after JAX's list; and errors that JAX lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spec_grid import message

MESH = Mesh(x=2, y=3)
X = torch.zeros(6, 6)  # local: (3, 2)
CASTS = (
    "casts are invariant to reduced, invariant to varying, reduced to varying, varying to unreduced"
)


def unproven(path: str, kind: str, spec: str, along: str, part: str = "") -> str:
    """Return the error of a result that varies along axes which its spec leaves out."""
    names = along.replace("'", "").strip("()")
    return message(
        "shard_map(body)", f"{path}: {kind} with the out spec {spec}",
        f"along {names}, which the out spec omits, values must be equal; this is varying",
        f"fs.psum(result, {along}), fs.all_gather(result, {along}, to='invariant') or similar; or "
        f"{part or f'P({along})'}, the shard of each rank",
    )  # fmt: skip


def gathered(fix: str) -> str:
    """Return the error of a result that varies by type and is equal on every rank."""
    return message(
        "shard_map(body)", "result: f32[6,6]{varying: x} with the out spec P()",
        "along x, which the out spec omits, values must be equal; this is varying",
        f"{fix}, if nothing else in it varies; of partial sums fs.psum(result, 'x'); of shards "
        "P('x')",
    )  # fmt: skip


UNPROVEN: dict[str, tuple[Any, Any, Callable[[torch.Tensor], Any], str]] = {
    "a sharded argument": (
        P("x", "y"), P("x"), lambda v: 2 * v,
        unproven("result", "f32[3,2]{varying: x, y}", "P('x')", "'y'"),
    ),
    "a sum over the other axis": (
        P("x", "y"), P("x"), lambda v: fs.psum(v, "x"),
        unproven("result", "f32[3,2]{varying: y}", "P('x')", "'y'"),
    ),
    "a gather that may differ": (
        P("x"), P(), lambda v: fs.all_gather(v, "x", tiled=True),
        gathered("to='invariant' in fs.all_gather"),
    ),
    "a broadcast that may differ": (
        P("x"), P(), lambda v: fs.pbroadcast(v, "x", 1).tile(2, 1),
        gathered("fs.psum(torch.where(fs.axis_index('x') == source, x, 0), 'x') in place of "
                 "fs.pbroadcast"),
    ),
    "a cast": (
        P(), P(), lambda v: fs.pcast(v, "y", to="varying"),
        unproven("result", "f32[6,6]{varying: y}", "P()", "'y'"),
    ),
    "an index": (
        P(), P("y"), lambda v: v[fs.axis_index("x")],
        unproven("result", "f32[6]{varying: x}", "P('y')", "'x'"),
    ),
    "one of several": (
        P("y"), {"a": P("y"), "b": (P("y"), P())},
        lambda v: {"a": v, "b": (v, fs.ppermute(v, "y", [(0, 1)]))},
        unproven("result['b'][1]", "f32[2,6]{varying: y}", "P()", "'y'"),
    ),
    "two axes": (
        P("x", "y"), P(), lambda v: fs.ppermute(v, "y", [(0, 1)]),
        unproven("result", "f32[3,2]{varying: x, y}", "P()", "('x', 'y')"),
    ),
    "a scalar": (
        P("x"), P(), lambda v: v.sum(),
        unproven("result", "f32[]{varying: x}", "P()", "'x'", "result[None] with P('x')"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("check", [True, "strict", "values"])
@pytest.mark.parametrize("name", UNPROVEN)
def test_replication_that_types_do_not_show(name: str, check: Any) -> None:
    in_specs, out_specs, call, expected = UNPROVEN[name]

    def body(v: torch.Tensor) -> Any:
        return call(v)

    mapped = fs.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check=check)
    with pytest.raises(ShardingError) as caught:
        mapped(X)
    assert str(caught.value) == expected


MIXED: dict[str, Callable[[torch.Tensor], Any]] = {
    "fs.psum": lambda v: fs.psum(v, ("x", "y")),
    "fs.pmean": lambda v: fs.pmean(v, ("x", "y")),
    "fs.psum_scatter": lambda v: fs.psum_scatter(v, ("x", "y"), scatter_dimension=1, tiled=True),
}


@pytest.mark.parametrize("name", MIXED)
def test_reduction_along_axes_in_two_states(name: str) -> None:
    call = MIXED[name]

    def body(v: torch.Tensor) -> Any:
        return call(v)

    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x", "y"), check=True)(X)
    assert str(caught.value) == message(
        f"shard_map(body): {name} at {__file__}:{call.__code__.co_firstlineno}",
        "an operand f32[3,6]{varying: x}",
        "along its axes the operand must be in one state; here it is varying along x, invariant "
        "along y",
        "leave out y, or fs.pcast(x, 'y', to='varying') first, if the equal values are to count "
        "once per rank",
    )  # fmt: skip


ADDENDS: dict[str, tuple[Callable[[torch.Tensor], Any], str, str, str]] = {
    "a function": (
        lambda u: torch.sin(2 * u),
        "sin", "f32[3,6]{unreduced: x}",
        "the sum over the axis is still to be taken, and the operation is not linear",
    ),
    "a product": (
        lambda u: u * u,
        "mul", "f32[3,6]{unreduced: x} and f32[3,6]{unreduced: x}",
        "a product of two sums is not the sum of the products",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDENDS)
def test_unreduced_operands_of_nonlinear_operations(name: str) -> None:
    call, op, value, why = ADDENDS[name]

    def body(v: torch.Tensor) -> Any:
        return call(fs.pcast(v, "x", to="unreduced"))

    out = P(unreduced={"x"})
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=out, check=True)(X)
    assert str(caught.value) == message(
        f"shard_map(body): {op} at {__file__}:{call.__code__.co_firstlineno}", value,
        f"operands unreduced along x must enter linear operations: {why}",
        "fs.psum(operand, 'x') before",
    )  # fmt: skip


def test_unreduced_and_other_operands() -> None:
    def body(v: torch.Tensor) -> Any:
        return fs.pcast(v, "x", to="unreduced") + v

    out = P(unreduced={"x"})
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=out, check=True)(X)
    assert str(caught.value) == message(
        f"shard_map(body): add at {__file__}:{body.__code__.co_firstlineno + 1}",
        "f32[3,6]{unreduced: x} and f32[3,6]{varying: x}",
        "the operands of a linear operation must all be unreduced along x by one reduction, or "
        "none: another is added once on every rank",
        "fs.psum(operand, 'x') before",
    )  # fmt: skip


UNREDUCED = P(unreduced={"x"})
REDUCED = P(reduced={"x"})


def addends(v: torch.Tensor) -> torch.Tensor:
    return fs.pcast(v, "x", to="unreduced")


STATES: dict[str, tuple[P, P, Callable[[torch.Tensor], Any], tuple[str, str, str, str]]] = {
    "one value to addends": (
        P(), UNREDUCED, lambda v: fs.pcast(v, "x", to="unreduced"),
        ("fs.pcast", "an operand f32[6,6]", f"{CASTS}; here it is invariant along x",
         ("torch.where(fs.axis_index('x') == 0, x, 0), which varies: the value once, and zeros; "
         "then the cast")),
    ),
    "a reduced value to addends": (
        REDUCED, UNREDUCED, lambda v: fs.pcast(v, ("x",), to="unreduced"),
        ("fs.pcast", "an operand f32[6,6]{reduced: x}", f"{CASTS}; here it is reduced along x",
         ("torch.where(fs.axis_index('x') == 0, x, 0), which varies: the value once, and zeros; "
         "then the cast")),
    ),
    "what varies to reduced": (
        P("x"), REDUCED, lambda v: fs.pcast(v, "x", to="reduced"),
        ("fs.pcast", "an operand f32[3,6]{varying: x}", f"{CASTS}; here it is varying along x",
         "fs.psum(x, 'x') goes from varying to invariant; then the cast"),
    ),
    "a cast along axes in two states": (
        P("x"), P("x", "y"), lambda v: fs.pcast(v, ("x", "y"), to="varying"),
        ("fs.pcast", "an operand f32[3,6]{varying: x}", ("along its axes the operand must be in "
         "one state; here it is varying along x, invariant along y"),
         "fs.pcast(x, 'y', to='varying')"),
    ),
    "another source": (
        P(), P("x"), lambda v: fs.pcast(v, "x", to="varying", src="reduced"),
        ("fs.pcast", "an operand f32[6,6]",
         "src must be the operand's state; here it is invariant along x", "leave src out"),
    ),
    "addends are gathered": (
        P("x"), P("x"), lambda v: fs.all_gather(addends(v), "x"),
        ("fs.all_gather", "an operand f32[3,6]{unreduced: x}",
         "along its axes the operand must vary; here it is unreduced along x",
         "fs.psum(x, 'x') first"),
    ),
    "a sum along addends and others": (
        P("x", "y"), P(), lambda v: fs.psum(addends(v), ("x", "y")),
        ("fs.psum", "an operand f32[3,2]{varying: y; unreduced: x}",
         ("along its axes the operand must vary, or be unreduced by sum along all of them; here it "
         "is unreduced along x, varying along y"), "fs.psum(x, 'x') first, then over y"),
    ),
    "a maximum of addends": (
        P("x", "y"), P(), lambda v: fs.pmax(addends(v), "y"),
        ("fs.pmax", "an operand f32[3,2]{varying: y; unreduced: x}",
         "operands unreduced along x must enter linear collectives", "fs.psum(x, 'x') before"),
    ),
    "a maximum along axes in two states": (
        P("x"), P(), lambda v: fs.pmax(v, ("x", "y")),
        ("fs.pmax", "an operand f32[3,6]{varying: x}", ("along its axes the operand must be in one "
         "state; here it is varying along x, invariant along y"), "leave out y"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_collectives_of_operands_in_wrong_states(name: str) -> None:
    in_specs, out_specs, call, (op, *lines) = STATES[name]

    def body(v: torch.Tensor) -> Any:
        return call(v)

    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs)(X)
    line = call.__code__.co_firstlineno
    assert str(caught.value) == message(f"shard_map(body): {op} at {__file__}:{line}", *lines)


RETURNED: dict[str, tuple[P, P, Callable[[torch.Tensor], Any], str, str, str]] = {
    "addends of what varies": (
        P("x"), UNREDUCED, lambda v: v, "f32[3,6]{varying: x}", ("unreduced along x; this is "
        "varying"), "fs.pcast(result, 'x', to='unreduced')",
    ),
    "addends of one value": (
        P(), UNREDUCED, lambda v: v, "f32[6,6]", "unreduced along x; this is invariant",
        "leave unreduced={'x'} out of the out spec",
    ),
    "addends of a reduced value": (
        REDUCED, UNREDUCED, lambda v: v, "f32[6,6]{reduced: x}", ("unreduced along x; this is "
        "reduced"), "reduced={'x'} in the out spec",
    ),
    "reduced of what varies": (
        P("x"), REDUCED, lambda v: v, "f32[3,6]{varying: x}", "reduced along x; this is varying",
        "fs.psum(result, 'x'), or fs.all_gather(result, 'x', to='reduced')",
    ),
    "reduced of addends": (
        P("x"), REDUCED, addends, "f32[3,6]{unreduced: x}", "reduced along x; this is unreduced",
        "fs.psum(result, 'x')",
    ),
    "parts of addends": (
        P("x"), P("x"), addends, "f32[3,6]{unreduced: x}", "varying along x; this is unreduced",
        "fs.psum_scatter(result, 'x', tiled=True), or fs.psum(result, 'x')",
    ),
    "addends by another reduction": (
        P("x"), P(unreduced={"x": "avg"}), addends, "f32[3,6]{unreduced: x}",
        "unreduced along x; this is unreduced by another reduction",
        "the out spec with its own reduction",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RETURNED)
def test_results_in_another_state_than_their_spec(name: str) -> None:
    in_specs, out_specs, call, kind, rule, fix = RETURNED[name]

    def body(v: torch.Tensor) -> Any:
        return call(v)

    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs)(X)
    value = f"result: {kind} with the out spec {out_specs!r}"
    assert str(caught.value) == message(
        "shard_map(body)", value, f"the out spec requires {rule}", fix
    )


# -- what JAX lets pass -----------------------------------------------------------------------

I4 = Mesh(i=4)


@pytest.mark.parametrize("check", [True, "strict", "values"])
def test_varying_predicate_is_reported_if_ranks_differ(check: Any) -> None:
    """Both branches are invariant; `jax.lax.cond` types the result as invariant too."""

    def body(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a if x.sum() > 0 else b

    mapped = fs.shard_map(
        body, mesh=I4, in_specs=(P("i"), P(), P()), out_specs=P(), check=check
    )  # fmt: skip
    x, a, b = torch.tensor([1.0, -1.0, 2.0, 3.0]), torch.tensor([10.0]), torch.tensor([20.0])
    assert mapped(x.abs(), a, b).tolist() == [10.0], "all ranks choose alike"
    with pytest.raises(ShardingError) as caught:
        mapped(x, a, b)
    line = body.__code__.co_firstlineno + 1
    assert str(caught.value) == message(
        "shard_map(body)", "result: element (0,) is 10.0 on rank 0 and 20.0 on rank 1",
        "along i, which the spec omits, values must be equal",
        "fs.psum or fs.pbroadcast over i, or name it in the spec; the ranks may have diverged "
        f"where the host read varying values: bool() at {__file__}:{line}",
    )  # fmt: skip
    f = fs.shard_map(body, mesh=I4, in_specs=(P("i"), P(), P()), out_specs=P("i"), check=check)
    assert f(x, a, b).tolist() == [10.0, 20.0, 10.0, 10.0]


@pytest.mark.parametrize("reduce", [fs.pmax, fs.pmin, fs.psum, fs.pmean])
def test_reductions_in_groups_vary(reduce: Any) -> None:
    """JAX types extremes in groups as invariant, and does not type sums in groups."""

    def body(v: torch.Tensor) -> torch.Tensor:
        return reduce(v, "i", axis_index_groups=[[0, 1], [2, 3]])  # type: ignore[no-any-return]

    x = torch.tensor([1.0, 2.0, 4.0, 8.0])
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=P(), check=True)(x)
    assert str(caught.value) == unproven("result", "f32[1]{varying: i}", "P()", "'i'")
    sharded = fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=P("i"), check=True)(x)
    first, second = x.view(2, 2).unbind()
    full: dict[Any, Any] = {
        fs.pmax: torch.amax,
        fs.pmin: torch.amin,
        fs.psum: torch.sum,
        fs.pmean: torch.mean,
    }
    expected = [full[reduce](item) for item in (first, first, second, second)]
    assert torch.equal(sharded, torch.stack(expected))


@pytest.mark.parametrize("check", [True, "strict", "values"])
def test_varying_shapes_are_reported(check: Any) -> None:
    """The host reads the number of elements of a mask; JAX has no such shapes."""

    def body(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return a * x[x > 0].numel()

    mapped = fs.shard_map(body, mesh=I4, in_specs=(P("i"), P()), out_specs=P(), check=check)
    x, a = torch.tensor([[1.0, -1.0], [0.0, 3.0], [3.0, 5.0], [7.0, 8.0]]), torch.ones(1)
    host_read = f"indexing by a mask at {__file__}:{body.__code__.co_firstlineno + 1}"
    with pytest.raises(ShardingError) as caught:
        mapped(x, a)
    if check == "strict":
        expected = unproven("result", "f32[1]{varying: i}", "P()", "'i'")
        rule = f"this is varying, and may depend on values that the host read: {host_read}"
        assert str(caught.value) == expected.replace("this is varying", rule)
        return
    assert mapped(1 + x.abs(), a).tolist() == [2.0], "all ranks find as many"
    assert str(caught.value) == message(
        "shard_map(body)", "result: element (0,) is 1.0 on rank 0 and 2.0 on rank 2",
        "along i, which the spec omits, values must be equal",
        "fs.psum or fs.pbroadcast over i, or name it in the spec; the ranks may have diverged "
        f"where the host read varying values: {host_read}",
    )  # fmt: skip
