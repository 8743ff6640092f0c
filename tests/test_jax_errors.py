"""Errors of JAX's list that bodies raise, with their text; and what JAX fails to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError

MESH = Mesh(x=2, y=3)
X = torch.zeros(6, 6)  # local: (3, 2)


def text(where: str, given: str, rule: str, fix: str) -> str:
    return f"{where}\n  given: {given}\n  rule:  {rule}\n  fix:   {fix}"


CASTS = (
    "casts are invariant to reduced, invariant to varying, reduced to varying, varying to unreduced"
)

Refused = tuple[Callable[[torch.Tensor], Any], str]

IN_A_BODY: dict[str, Refused] = {
    "unknown axis": (
        lambda v: fs.psum(v, "q"),
        text("fs.psum", "axis 'q' on Mesh(x=2, y=3)", "the mesh's axes are x, y",
             "use one of x, y"),
    ),
    "misspelt axis": (
        lambda v: fs.all_gather(v, ("x", "yy")),
        text("fs.all_gather", "axis 'yy' on Mesh(x=2, y=3)", "the mesh's axes are x, y",
             "did you mean 'y'?"),
    ),
    "axis twice": (
        lambda v: fs.psum(v, ("x", "x")),
        text("fs.psum", "axis 'x' 2 times in ('x', 'x')", "an axis is named at most once",
             "name 'x' once"),
    ),
    "an axis that is no name": (
        lambda v: fs.psum(v, 3),  # type: ignore[arg-type]
        text("fs.psum", "3 as axes", "axes are a name, or a tuple or a list of names",
             "'x' or ('x', 'y'), with names of the mesh's axes"),
    ),
    "axes of which one is no name": (
        lambda v: fs.all_gather(v, ("x", 3)),  # type: ignore[arg-type]
        text("fs.all_gather", "('x', 3) as axes", "axes are a name, or a tuple or a list of names",
             "'x' or ('x', 'y'), with names of the mesh's axes"),
    ),
    "axes that are a set": (
        lambda v: fs.all_gather(v, {"y", "x"}),  # type: ignore[arg-type]
        text("fs.all_gather", "the set {'x', 'y'} as axes",
             "axes are a name, or a tuple or a list of names, the first one major",
             "('x', 'y'), say"),
    ),
    "an index along a set": (
        lambda v: v * fs.axis_index(frozenset({"x"})),  # type: ignore[arg-type]
        text("fs.axis_index", "the set {'x'} as axes",
             "axes are a name, or a tuple or a list of names, the first one major", "'x', say"),
    ),
    "places that are no pairs": (
        lambda v: fs.ppermute(v, "y", [0, 1, 2]),  # type: ignore[list-item]
        text("fs.ppermute", "perm=[0, 1, 2]", "perm has pairs of places, (source, destination)",
             "perm=[(0, 1)], say"),
    ),
    "three places": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (0, 1, 2)]),  # type: ignore[list-item]
        text("fs.ppermute", "perm=[(0, 1), (0, 1, 2)]",
             "perm has pairs of places, (source, destination)", "perm=[(0, 1)], say"),
    ),
    "one source for two": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (0, 2)]),
        text("fs.ppermute", "source 0 in (0, 1), (0, 2) of perm",
             "every source occurs at most once",
             "fs.pbroadcast(x, 'y', 0), or an fs.ppermute for each destination"),
    ),
    "two sources for one": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (-1, 1)]),
        text("fs.ppermute", "destination 1 in (0, 1), (2, 1) of perm",
             "every destination occurs at most once",
             "fs.ppermute(x, 'y', [(0, 1)]) + fs.ppermute(x, 'y', [(2, 1)])"),
    ),
    "a pair twice": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (0, 1)]),
        text("fs.ppermute", "(0, 1) 2 times in perm",
             "every source and every destination occurs at most once", "(0, 1) once"),
    ),
    "a shuffle that is no permutation": (
        lambda v: fs.pshuffle(v, "y", [0, 1, 1]),
        text("fs.pshuffle", "perm=[0, 1, 1]", "perm has every place 0..2 along y once",
             "fs.ppermute(x, axis, [(src, dst), ...]) leaves places out"),
    ),
    "a shuffle of too few": (
        lambda v: fs.pshuffle(v, "y", [0, 1]),
        text("fs.pshuffle", "perm=[0, 1]", "perm has every place 0..2 along y once",
             "fs.ppermute(x, axis, [(src, dst), ...]) leaves places out"),
    ),
    "a source that is no rank": (
        lambda v: fs.pbroadcast(v, "y", 3),
        text("fs.pbroadcast", "source=3", "places along y are -3..2", "source=0, say"),
    ),
    "a source that is no place": (
        lambda v: fs.pbroadcast(v, "y", "x"),  # type: ignore[arg-type]
        text("fs.pbroadcast", "source='x'", "places along y are -3..2", "source=0, say"),
    ),
    "a dim to gather along": (
        lambda v: fs.all_gather(v, "x", axis=2, tiled=True),
        text("fs.all_gather", "axis=2 of a tensor of 2 dims", "a dim is in -2..1",
             "name a dim it has"),
    ),
    "a dim to gather along that is none": (
        lambda v: fs.all_gather(v, "x", axis="y", tiled=True),  # type: ignore[arg-type]
        text("fs.all_gather", "axis='y' of a tensor of 2 dims", "a dim is in -2..1",
             "name a dim it has"),
    ),
    "a dim to stack along": (
        lambda v: fs.all_gather(v, "x", axis=3),
        text("fs.all_gather", "axis=3 of a result of 3 dims", "a dim is in -3..2",
             "name a dim it has"),
    ),
    "a scalar to gather along": (
        lambda v: fs.all_gather(v.sum(), "x", tiled=True),
        text("fs.all_gather", "axis=0 of a tensor of 0 dims", "a 0-dim tensor has no dims",
             "x[None] has one"),
    ),
    "JAX's word for invariant": (
        lambda v: fs.all_gather(v, "x", to="invarying"),
        text("fs.all_gather", "to='invarying'", "to is varying, invariant or reduced",
             "did you mean 'invariant'?"),
    ),
    "a gather to addends": (
        lambda v: fs.all_gather(v, "x", to="unreduced"),
        text("fs.all_gather", "to='unreduced'", "to is varying, invariant or reduced",
             "did you mean 'reduced'?"),
    ),
    "a state misspelt": (
        lambda v: fs.pcast(v, "x", to="varing"),
        text("fs.pcast", "to='varing'", CASTS, "did you mean 'varying'?"),
    ),
    "a source misspelt": (
        lambda v: fs.pcast(v, "x", to="reduced", src="invarying"),
        text("fs.pcast", "a cast from 'invarying' to 'reduced'", CASTS,
             "did you mean 'invariant'?"),
    ),
    "a cast to one value": (
        lambda v: fs.pcast(v, ("x", "y"), to="invariant"),
        text("fs.pcast", "to='invariant'", CASTS,
             "fs.psum(x, ('x', 'y')) goes from varying or unreduced to invariant"),
    ),
    "a cast to what it is": (
        lambda v: fs.pcast(v, "x", to="varying", src="varying"),
        text("fs.pcast", "a cast from 'varying' to 'varying'", CASTS, "leave the cast out"),
    ),
    "a cast of one value to addends": (
        lambda v: fs.pcast(v, "x", to="unreduced", src="invariant"),
        text("fs.pcast", "a cast from 'invariant' to 'unreduced'", CASTS,
             "torch.where(fs.axis_index('x') == 0, x, 0), which varies: the value once, and zeros; "
             "then the cast"),
    ),
    "a sum of booleans that is cut": (
        lambda v: fs.psum_scatter(v > 0, "x", scatter_dimension=1, tiled=True),
        text("fs.psum_scatter", "a tensor of torch.bool", "booleans have no sum",
             "x.to(torch.int64), to count them"),
    ),
    "a maximum of complex numbers": (
        lambda v: fs.pmax(torch.complex(v, v), "x"),
        text("fs.pmax", "a tensor of torch.complex64", "complex numbers have no order",
             "x.abs(), or x.real and x.imag one by one"),
    ),
    "the place of a complex minimum": (
        lambda v: fs.pargmin(torch.complex(v, v), "x"),
        text("fs.pargmin", "a tensor of torch.complex64", "complex numbers have no order",
             "x.abs(), or x.real and x.imag one by one"),
    ),
    "a dim to scatter that does not divide": (
        lambda v: fs.psum_scatter(v, "x", tiled=True),
        text("fs.psum_scatter", "scatter_dimension=0 of size 3",
             "the 2 ranks along the axes divide the dim; 3 % 2 = 1", "pad it to 4"),
    ),
    "a dim to scatter of another size": (
        lambda v: fs.psum_scatter(v, "x"),
        text("fs.psum_scatter", "scatter_dimension=0 of size 3",
             "without tiled=True the dim has one entry for each of the 2 ranks",
             "tiled=True cuts a longer dim"),
    ),
    "no dim to scatter": (
        lambda v: fs.psum_scatter(v, "x", scatter_dimension=-3),
        text("fs.psum_scatter", "scatter_dimension=-3 of a tensor of 2 dims", "a dim is in -2..1",
             "name a dim it has"),
    ),
    "a dim to split that does not divide": (
        lambda v: fs.all_to_all(v, ("y", "x"), 0, 1, tiled=True),
        text("fs.all_to_all", "split_axis=0 of size 3",
             "the 6 ranks along the axes divide the dim; 3 % 6 = 3", "pad it to 6"),
    ),
    "a dim to split of another size": (
        lambda v: fs.all_to_all(v, "y", 1, 0),
        text("fs.all_to_all", "split_axis=1 of size 2",
             "without tiled=True the dim has one entry for each of the 3 ranks",
             "tiled=True cuts a longer dim"),
    ),
    "no dim to concatenate": (
        lambda v: fs.all_to_all(v, "y", 0, 2),
        text("fs.all_to_all", "concat_axis=2 of a tensor of 2 dims", "a dim is in -2..1",
             "name a dim it has"),
    ),
    "groups of two sizes": (
        lambda v: fs.psum(v, "y", axis_index_groups=[[0, 1], [2]]),
        text("fs.psum", "axis_index_groups=[[0, 1], [2]] along y",
             "the groups are lists of one size and have every index 0..2 once",
             "axis_index_groups=[[0], [1], [2]], say"),
    ),
    "groups that are none": (
        lambda v: fs.psum(v, "y", axis_index_groups=[0, 1, 2]),  # type: ignore[list-item]
        text("fs.psum", "axis_index_groups=[0, 1, 2] along y",
             "the groups are lists of one size and have every index 0..2 once",
             "axis_index_groups=[[0], [1], [2]], say"),
    ),
    "an index in no group": (
        lambda v: fs.all_gather(v, "y", axis_index_groups=[[0], [2]]),
        text("fs.all_gather", "axis_index_groups=[[0], [2]] along y",
             "the groups are lists of one size and have every index 0..2 once",
             "axis_index_groups=[[0], [1], [2]], say"),
    ),
    "an index in two groups": (
        lambda v: fs.psum_scatter(v, ("x", "y"), axis_index_groups=[[0, 1, 2], [3, 4, 4]]),
        text("fs.psum_scatter", "axis_index_groups=[[0, 1, 2], [3, 4, 4]] along x, y",
             "the groups are lists of one size and have every index 0..5 once",
             "axis_index_groups=[[0, 1, 2], [3, 4, 5]], say"),
    ),
    "a leaf that cannot be sent": (
        lambda v: fs.all_gather([v, 3], "x"),
        text("fs.all_gather", "a leaf of type int", "the leaves of the tree are tensors, or None",
             "torch.as_tensor(x)"),
    ),
    "a leaf that cannot be summed": (
        lambda v: fs.psum([v, "abc"], "x"),
        text("fs.psum", "a leaf of type str",
             "the leaves of the tree are tensors, numbers, or None",
             "torch.as_tensor(x) of an array; leave other things out of the tree"),
    ),
    "a leaf that has no maximum": (
        lambda v: fs.pmax("abc", "x"),
        text("fs.pmax", "a leaf of type str",
             "the leaves of the tree are tensors, numbers, or None",
             "torch.as_tensor(x) of an array; leave other things out of the tree"),
    ),
}  # fmt: skip


def test_all_pairs_that_are_no_places() -> None:
    def body(v: torch.Tensor) -> torch.Tensor:
        return fs.ppermute(v, "y", [(0, 7), (9, 1), (0, 7), (1, 2), (2, 2)])

    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x", "y"), out_specs=P("x", "y"))(X)
    assert str(caught.value) == "fs.ppermute\n" + "\n\n".join(
        text("", *each).removeprefix("\n")
        for each in (
            ("(0, 7) in perm", "places along y are -3..2", "(0, 1), say"),
            ("(9, 1) in perm", "places along y are -3..2", "(0, 1), say"),
            ("destination 2 in (1, 2), (2, 2) of perm", "every destination occurs at most once",
             "fs.ppermute(x, 'y', [(1, 2)]) + fs.ppermute(x, 'y', [(2, 2)])"),
        )
    )  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", IN_A_BODY)
def test_what_a_body_may_not_call(name: str, grad: bool) -> None:
    call, want = IN_A_BODY[name]
    mapped = fs.shard_map(call, mesh=MESH, in_specs=P("x", "y"), out_specs=P("x", "y"), check=False)
    with pytest.raises(ShardingError) as caught:
        mapped(X.clone().requires_grad_(grad))
    assert str(caught.value) == want


UNBOUND: dict[str, tuple[Callable[[], Any], str]] = {
    "fs.psum": (lambda: fs.psum(X, "x"), "'x'"),
    "fs.pmean": (lambda: fs.pmean(X, ("y", "x")), "'y', 'x'"),
    "fs.all_gather": (lambda: fs.all_gather(X, "x"), "'x'"),
    "fs.psum_scatter": (lambda: fs.psum_scatter(X, "x"), "'x'"),
    "fs.all_to_all": (lambda: fs.all_to_all(X, "x", 0, 1), "'x'"),
    "fs.ppermute": (lambda: fs.ppermute(X, "x", [(0, 1)]), "'x'"),
    "fs.pcast": (lambda: fs.pcast(X, "x", to="varying"), "'x'"),
    "fs.axis_index": (lambda: fs.axis_index(("x", "y")), "'x', 'y'"),
    "fs.axis_size": (lambda: fs.axis_size("x"), "'x'"),
}


@pytest.mark.parametrize("name", UNBOUND)
def test_an_axis_is_bound_in_a_mapped_function_only(name: str) -> None:
    call, axes = UNBOUND[name]
    with pytest.raises(ShardingError) as caught:
        call()
    assert str(caught.value) == text(
        name, f"an unbound axis name: {axes}", "axis names are bound inside shard_map",
        f"call {name} in a function under fs.shard_map, or give mesh=",
    )  # fmt: skip


# -- types ------------------------------------------------------------------------------------


def unproven(path: str, kind: str, spec: str, along: str, part: str = "") -> str:
    """What is said of a result that varies along axes which its spec leaves out."""
    names = along.replace("'", "").strip("()")
    return text(
        "shard_map(body)", f"{path}: {kind} with the out spec {spec}",
        f"an out spec that leaves {names} out promises one value along it; this is varying",
        f"fs.psum(result, {along}), fs.all_gather(result, {along}, to='invariant') or the like; or "
        f"{part or f'P({along})'}, each rank's part",
    )  # fmt: skip


UNPROVEN: dict[str, tuple[Any, Any, Callable[[torch.Tensor], Any], str]] = {
    "a cut argument": (
        P("x", "y"), P("x"), lambda v: 2 * v,
        unproven("result", "f32[3,2]{varying: x, y}", "P('x')", "'y'"),
    ),
    "a sum over the other axis": (
        P("x", "y"), P("x"), lambda v: fs.psum(v, "x"),
        unproven("result", "f32[3,2]{varying: y}", "P('x')", "'y'"),
    ),
    "a gather that may differ": (
        P("x"), P(), lambda v: fs.all_gather(v, "x", tiled=True),
        unproven("result", "f32[6,6]{varying: x}", "P()", "'x'"),
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
def test_replication_that_cannot_be_shown(name: str, check: Any) -> None:
    in_specs, out_specs, call, want = UNPROVEN[name]

    def body(v: torch.Tensor) -> Any:
        return call(v)

    mapped = fs.shard_map(body, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check=check)
    with pytest.raises(ShardingError) as caught:
        mapped(X)
    assert str(caught.value) == want


MIXED: dict[str, Callable[[torch.Tensor], Any]] = {
    "fs.psum": lambda v: fs.psum(v, ("x", "y")),
    "fs.pmean": lambda v: fs.pmean(v, ("x", "y")),
    "fs.psum_scatter": lambda v: fs.psum_scatter(v, ("x", "y"), scatter_dimension=1, tiled=True),
}


@pytest.mark.parametrize("name", MIXED)
def test_axes_in_two_states(name: str) -> None:
    call = MIXED[name]

    def body(v: torch.Tensor) -> Any:
        return call(v)

    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x", "y"), check=True)(X)
    assert str(caught.value) == text(
        f"shard_map(body): {name} at {__file__}:{call.__code__.co_firstlineno}",
        "an operand f32[3,6]{varying: x}",
        "along its axes the operand is in one state; here it is varying along x, invariant along y",
        "leave out y, or fs.pcast(x, 'y', to='varying') first, if the equal values are to count "
        "once per rank",
    )  # fmt: skip


ADDENDS: dict[str, tuple[Callable[[torch.Tensor], Any], str, str, str]] = {
    "a function": (
        lambda u: torch.sin(2 * u),
        "sin", "f32[3,6]{unreduced: x}",
        "a sum over it is still to be taken, and the operation is not linear",
    ),
    "a product": (
        lambda u: u * u,
        "mul", "f32[3,6]{unreduced: x} and f32[3,6]{unreduced: x}",
        "a product of two sums is not the sum of the products",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDENDS)
def test_addends_pass_linear_operations_only(name: str) -> None:
    call, op, given, why = ADDENDS[name]

    def body(v: torch.Tensor) -> Any:
        return call(fs.pcast(v, "x", to="unreduced"))

    out = P(unreduced={"x"})
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=out, check=True)(X)
    assert str(caught.value) == text(
        f"shard_map(body): {op} at {__file__}:{call.__code__.co_firstlineno}", given,
        f"what is unreduced along x passes linear operations: {why}",
        "fs.psum(operand, 'x') before",
    )  # fmt: skip


def test_an_addend_goes_with_addends() -> None:
    def body(v: torch.Tensor) -> Any:
        return fs.pcast(v, "x", to="unreduced") + v

    out = P(unreduced={"x"})
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=out, check=True)(X)
    assert str(caught.value) == text(
        f"shard_map(body): add at {__file__}:{body.__code__.co_firstlineno + 1}",
        "f32[3,6]{unreduced: x} and f32[3,6]{varying: x}",
        "the operands of a linear operation are all unreduced along x by one reduction, or none: "
        "another is added once on every rank",
        "fs.psum(operand, 'x') before",
    )  # fmt: skip


# -- what JAX lets pass -----------------------------------------------------------------------

I4 = Mesh(i=4)


@pytest.mark.parametrize("check", [True, "strict", "values"])
def test_a_predicate_that_varies_is_reported_where_ranks_differ(check: Any) -> None:
    """Both branches are invariant, the choice is not: `jax.lax.cond` passes it as invariant."""

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
    assert str(caught.value) == text(
        "shard_map(body)", "result: element (0,) is 10.0 on rank 0 and 20.0 on rank 1",
        "what a spec leaves i out of is one value along it",
        "fs.psum or fs.pbroadcast over i, or name it in the spec; the ranks may have parted where "
        f"the host learnt of what varies: bool() at {__file__}:{line}",
    )  # fmt: skip
    cut = fs.shard_map(body, mesh=I4, in_specs=(P("i"), P(), P()), out_specs=P("i"), check=check)
    assert cut(x, a, b).tolist() == [10.0, 20.0, 10.0, 10.0]


@pytest.mark.parametrize("reduce", [fs.pmax, fs.pmin, fs.psum, fs.pmean])
def test_reductions_in_groups_vary_from_group_to_group(reduce: Any) -> None:
    """JAX types the extremes in groups as invariant; sums in groups it does not type at all."""

    def body(v: torch.Tensor) -> torch.Tensor:
        return reduce(v, "i", axis_index_groups=[[0, 1], [2, 3]])  # type: ignore[no-any-return]

    x = torch.tensor([1.0, 2.0, 4.0, 8.0])
    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=P(), check=True)(x)
    assert str(caught.value) == unproven("result", "f32[1]{varying: i}", "P()", "'i'")
    cut = fs.shard_map(body, mesh=I4, in_specs=P("i"), out_specs=P("i"), check=True)(x)
    first, second = x.view(2, 2).unbind()
    whole: dict[Any, Any] = {
        fs.pmax: torch.amax,
        fs.pmin: torch.amin,
        fs.psum: torch.sum,
        fs.pmean: torch.mean,
    }
    want = [whole[reduce](each) for each in (first, first, second, second)]
    assert torch.equal(cut, torch.stack(want))
