"""Texts of errors that bodies raise, after JAX's list; and errors that JAX lacks."""

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

Refused = tuple[Callable[[torch.Tensor], Any], str]

IN_A_BODY: dict[str, Refused] = {
    "unknown axis": (
        lambda v: fs.psum(v, "q"),
        message("fs.psum", "axis 'q' on Mesh(x=2, y=3)", "an axis must be one of x, y",
             "use one of x, y"),
    ),
    "misspelt axis": (
        lambda v: fs.all_gather(v, ("x", "yy")),
        message("fs.all_gather", "axis 'yy' on Mesh(x=2, y=3)", "an axis must be one of x, y",
             "did you mean 'y'?"),
    ),
    "axis twice": (
        lambda v: fs.psum(v, ("x", "x")),
        message("fs.psum", "axis 'x' 2 times in ('x', 'x')", "an axis must be named at most once",
             "name 'x' once"),
    ),
    "an axis that is not a name": (
        lambda v: fs.psum(v, 3),  # type: ignore[arg-type]
        message("fs.psum", "3 as axes", "axes must be a name or a tuple or list of names",
             "'x' or ('x', 'y'), with names of the mesh's axes"),
    ),
    "axes with one that is not a name": (
        lambda v: fs.all_gather(v, ("x", 3)),  # type: ignore[arg-type]
        message("fs.all_gather", "('x', 3) as axes",
             "axes must be a name or a tuple or list of names",
             "'x' or ('x', 'y'), with names of the mesh's axes"),
    ),
    "axes that are a set": (
        lambda v: fs.all_gather(v, {"y", "x"}),  # type: ignore[arg-type]
        message("fs.all_gather", "the set {'x', 'y'} as axes",
             "axes must be a name or a tuple or list of names, major to minor",
             "('x', 'y'), say"),
    ),
    "an index along a set": (
        lambda v: v * fs.axis_index(frozenset({"x"})),  # type: ignore[arg-type]
        message("fs.axis_index", "the set {'x'} as axes",
             "axes must be a name or a tuple or list of names, major to minor", "'x', say"),
    ),
    "indices that are not pairs": (
        lambda v: fs.ppermute(v, "y", [0, 1, 2]),  # type: ignore[list-item]
        message("fs.ppermute", "perm=[0, 1, 2]",
             "perm must have pairs of indices, (source, destination)",
             "perm=[(0, 1)], say"),
    ),
    "three places": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (0, 1, 2)]),  # type: ignore[list-item]
        message("fs.ppermute", "perm=[(0, 1), (0, 1, 2)]",
             "perm must have pairs of indices, (source, destination)", "perm=[(0, 1)], say"),
    ),
    "one source for two": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (0, 2)]),
        message("fs.ppermute", "source 0 in (0, 1), (0, 2) of perm",
             "every source must occur at most once",
             "fs.pbroadcast(x, 'y', 0), or an fs.ppermute for each destination"),
    ),
    "two sources for one": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (-1, 1)]),
        message("fs.ppermute", "destination 1 in (0, 1), (2, 1) of perm",
             "every destination must occur at most once",
             "fs.ppermute(x, 'y', [(0, 1)]) + fs.ppermute(x, 'y', [(2, 1)])"),
    ),
    "a pair twice": (
        lambda v: fs.ppermute(v, "y", [(0, 1), (0, 1)]),
        message("fs.ppermute", "(0, 1) 2 times in perm",
             "every source and every destination must occur at most once", "(0, 1) once"),
    ),
    "a shuffle that is not a permutation": (
        lambda v: fs.pshuffle(v, "y", [0, 1, 1]),
        message("fs.pshuffle", "perm=[0, 1, 1]", "perm must have every index 0..2 along y once",
             "fs.ppermute(x, axis, [(src, dst), ...]) leaves indices out"),
    ),
    "a shuffle of too few": (
        lambda v: fs.pshuffle(v, "y", [0, 1]),
        message("fs.pshuffle", "perm=[0, 1]", "perm must have every index 0..2 along y once",
             "fs.ppermute(x, axis, [(src, dst), ...]) leaves indices out"),
    ),
    "a source that is not a rank": (
        lambda v: fs.pbroadcast(v, "y", 3),
        message("fs.pbroadcast", "source=3", "indices along y must be in -3..2", "source=0, say"),
    ),
    "a source that is not an index": (
        lambda v: fs.pbroadcast(v, "y", "x"),  # type: ignore[arg-type]
        message("fs.pbroadcast", "source='x'", "indices along y must be in -3..2", "source=0, say"),
    ),
    "a dim to gather along": (
        lambda v: fs.all_gather(v, "x", axis=2, tiled=True),
        message("fs.all_gather", "axis=2 of a tensor of 2 dims", "a dim must be in -2..1",
             "name a dim it has"),
    ),
    "a dim to gather along that is none": (
        lambda v: fs.all_gather(v, "x", axis="y", tiled=True),  # type: ignore[arg-type]
        message("fs.all_gather", "axis='y' of a tensor of 2 dims", "a dim must be in -2..1",
             "name a dim it has"),
    ),
    "a dim to stack along": (
        lambda v: fs.all_gather(v, "x", axis=3),
        message("fs.all_gather", "axis=3 of a result of 3 dims", "a dim must be in -3..2",
             "name a dim it has"),
    ),
    "a scalar to gather along": (
        lambda v: fs.all_gather(v.sum(), "x", tiled=True),
        message("fs.all_gather", "axis=0 of a tensor of 0 dims", "a 0-dim tensor has no dims",
             "x[None] has one"),
    ),
    "JAX's word for invariant": (
        lambda v: fs.all_gather(v, "x", to="invarying"),
        message("fs.all_gather", "to='invarying'", "to must be varying, invariant or reduced",
             "did you mean 'invariant'?"),
    ),
    "a gather to addends": (
        lambda v: fs.all_gather(v, "x", to="unreduced"),
        message("fs.all_gather", "to='unreduced'", "to must be varying, invariant or reduced",
             "did you mean 'reduced'?"),
    ),
    "a state misspelt": (
        lambda v: fs.pcast(v, "x", to="varing"),
        message("fs.pcast", "to='varing'", CASTS, "did you mean 'varying'?"),
    ),
    "a source misspelt": (
        lambda v: fs.pcast(v, "x", to="reduced", src="invarying"),
        message("fs.pcast", "a cast from 'invarying' to 'reduced'", CASTS,
             "did you mean 'invariant'?"),
    ),
    "a cast to one value": (
        lambda v: fs.pcast(v, ("x", "y"), to="invariant"),
        message("fs.pcast", "to='invariant'", CASTS,
             "fs.psum(x, ('x', 'y')) goes from varying or unreduced to invariant"),
    ),
    "a cast to what it is": (
        lambda v: fs.pcast(v, "x", to="varying", src="varying"),
        message("fs.pcast", "a cast from 'varying' to 'varying'", CASTS, "leave the cast out"),
    ),
    "a cast of one value to addends": (
        lambda v: fs.pcast(v, "x", to="unreduced", src="invariant"),
        message("fs.pcast", "a cast from 'invariant' to 'unreduced'", CASTS,
             "torch.where(fs.axis_index('x') == 0, x, 0), which varies: the value once, and zeros; "
             "then the cast"),
    ),
    "a scattered sum of booleans": (
        lambda v: fs.psum_scatter(v > 0, "x", scatter_dimension=1, tiled=True),
        message("fs.psum_scatter", "a tensor of torch.bool", "booleans have no sum",
             "x.to(torch.int64), to count them"),
    ),
    "a maximum of complex numbers": (
        lambda v: fs.pmax(torch.complex(v, v), "x"),
        message("fs.pmax", "a tensor of torch.complex64", "complex numbers have no order",
             "x.abs(), or x.real and x.imag one by one"),
    ),
    "the place of a complex minimum": (
        lambda v: fs.pargmin(torch.complex(v, v), "x"),
        message("fs.pargmin", "a tensor of torch.complex64", "complex numbers have no order",
             "x.abs(), or x.real and x.imag one by one"),
    ),
    "a dim to scatter that does not divide": (
        lambda v: fs.psum_scatter(v, "x", tiled=True),
        message("fs.psum_scatter", "scatter_dimension=0 of size 3",
             "the 2 ranks along the axes must divide the dim; 3 % 2 = 1", "pad it to 4"),
    ),
    "a dim to scatter of another size": (
        lambda v: fs.psum_scatter(v, "x"),
        message("fs.psum_scatter", "scatter_dimension=0 of size 3",
             "without tiled=True the dim must have one entry for each of the 2 ranks",
             "tiled=True splits a longer dim"),
    ),
    "no dim to scatter": (
        lambda v: fs.psum_scatter(v, "x", scatter_dimension=-3),
        message("fs.psum_scatter", "scatter_dimension=-3 of a tensor of 2 dims",
             "a dim must be in -2..1",
             "name a dim it has"),
    ),
    "a dim to split that does not divide": (
        lambda v: fs.all_to_all(v, ("y", "x"), 0, 1, tiled=True),
        message("fs.all_to_all", "split_axis=0 of size 3",
             "the 6 ranks along the axes must divide the dim; 3 % 6 = 3", "pad it to 6"),
    ),
    "a dim to split of another size": (
        lambda v: fs.all_to_all(v, "y", 1, 0),
        message("fs.all_to_all", "split_axis=1 of size 2",
             "without tiled=True the dim must have one entry for each of the 3 ranks",
             "tiled=True splits a longer dim"),
    ),
    "no dim to concatenate": (
        lambda v: fs.all_to_all(v, "y", 0, 2),
        message("fs.all_to_all", "concat_axis=2 of a tensor of 2 dims", "a dim must be in -2..1",
             "name a dim it has"),
    ),
    "groups of two sizes": (
        lambda v: fs.psum(v, "y", axis_index_groups=[[0, 1], [2]]),
        message("fs.psum", "axis_index_groups=[[0, 1], [2]] along y",
             "the groups must be lists of one size and have every index 0..2 once",
             "axis_index_groups=[[0], [1], [2]], say"),
    ),
    "groups that are none": (
        lambda v: fs.psum(v, "y", axis_index_groups=[0, 1, 2]),  # type: ignore[list-item]
        message("fs.psum", "axis_index_groups=[0, 1, 2] along y",
             "the groups must be lists of one size and have every index 0..2 once",
             "axis_index_groups=[[0], [1], [2]], say"),
    ),
    "an index in no group": (
        lambda v: fs.all_gather(v, "y", axis_index_groups=[[0], [2]]),
        message("fs.all_gather", "axis_index_groups=[[0], [2]] along y",
             "the groups must be lists of one size and have every index 0..2 once",
             "axis_index_groups=[[0], [1], [2]], say"),
    ),
    "an index in two groups": (
        lambda v: fs.psum_scatter(v, ("x", "y"), axis_index_groups=[[0, 1, 2], [3, 4, 4]]),
        message("fs.psum_scatter", "axis_index_groups=[[0, 1, 2], [3, 4, 4]] along x, y",
             "the groups must be lists of one size and have every index 0..5 once",
             "axis_index_groups=[[0, 1, 2], [3, 4, 5]], say"),
    ),
    "a leaf that cannot be sent": (
        lambda v: fs.all_gather([v, 3], "x"),
        message("fs.all_gather", "a leaf of type int",
             "the leaves of the tree must be tensors, or None",
             "torch.as_tensor(x)"),
    ),
    "a leaf that cannot be summed": (
        lambda v: fs.psum([v, "abc"], "x"),
        message("fs.psum", "a leaf of type str",
             "the leaves of the tree must be tensors, numbers, or None",
             "torch.as_tensor(x) of an array; leave other objects out of the tree"),
    ),
    "a leaf that has no maximum": (
        lambda v: fs.pmax("abc", "x"),
        message("fs.pmax", "a leaf of type str",
             "the leaves of the tree must be tensors, numbers, or None",
             "torch.as_tensor(x) of an array; leave other objects out of the tree"),
    ),
}  # fmt: skip


def test_ppermute_lists_all_bad_pairs() -> None:
    def body(v: torch.Tensor) -> torch.Tensor:
        return fs.ppermute(v, "y", [(0, 7), (9, 1), (0, 7), (1, 2), (2, 2)])

    with pytest.raises(ShardingError) as caught:
        fs.shard_map(body, mesh=MESH, in_specs=P("x", "y"), out_specs=P("x", "y"))(X)
    assert str(caught.value) == "fs.ppermute\n" + "\n\n".join(
        message("", *item).removeprefix("\n")
        for item in (
            ("(0, 7) in perm", "indices along y must be in -3..2", "(0, 1), say"),
            ("(9, 1) in perm", "indices along y must be in -3..2", "(0, 1), say"),
            ("destination 2 in (1, 2), (2, 2) of perm", "every destination must occur at most once",
             "fs.ppermute(x, 'y', [(1, 2)]) + fs.ppermute(x, 'y', [(2, 2)])"),
        )
    )  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", IN_A_BODY)
def test_errors_of_bodies(name: str, grad: bool) -> None:
    call, expected = IN_A_BODY[name]
    mapped = fs.shard_map(call, mesh=MESH, in_specs=P("x", "y"), out_specs=P("x", "y"), check=False)
    with pytest.raises(ShardingError) as caught:
        mapped(X.clone().requires_grad_(grad))
    assert str(caught.value) == expected


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
def test_axes_are_bound_in_mapped_functions_only(name: str) -> None:
    call, axes = UNBOUND[name]
    with pytest.raises(ShardingError) as caught:
        call()
    assert str(caught.value) == message(
        name, f"an unbound axis name: {axes}", "axis names are bound inside shard_map",
        f"call {name} in a function under fs.shard_map, or give mesh=",
    )  # fmt: skip
