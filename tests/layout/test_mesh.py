"""`Mesh`: coordinates, groups, derived meshes, equality, pickles, errors."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from tests.helpers.spec_grid import peak_memory_below
from tests.helpers.strategies import meshes

ROOT = Path(__file__).parent.parent.parent


def axis_lists(mesh: Mesh) -> list[tuple[str, ...]]:
    """Return all ordered subsets of the axes."""
    return [
        axes
        for count in range(len(mesh.axes) + 1)
        for axes in itertools.permutations(mesh.axes, count)
    ]


# -- ranks and coordinates ----------------------------------------------------------------------


@given(meshes(permuted=True))
def test_rank_inverts_coords(mesh: Mesh) -> None:
    assert [mesh.rank(**mesh.coords(rank)) for rank in mesh.ranks] == list(mesh.ranks)
    grid = itertools.product(*map(range, mesh.sizes))
    assert [mesh.rank(**dict(zip(mesh.axes, c, strict=True))) for c in grid] == list(mesh.devices)
    for rank in mesh.ranks:
        assert mesh.coordinate(rank) == tuple(mesh.coords(rank).values())
        assert rank in mesh


@given(meshes(permuted=True))
def test_groups_partition_the_ranks(mesh: Mesh) -> None:
    for axes in axis_lists(mesh):
        groups = mesh.groups(axes)
        assert len(groups) == mesh.size // math.prod(mesh.shape[axis] for axis in axes)
        assert sorted(itertools.chain(*groups)) == list(mesh.ranks)
        for group in groups:
            rest = {tuple(c for a, c in mesh.coords(r).items() if a not in axes) for r in group}
            assert len(rest) == 1, "a group differs along its axes alone"
            assert [mesh.index(rank, axes) for rank in group] == list(range(len(group)))
            assert all(mesh.group(rank, axes) == group for rank in group)


def test_groups_of_small_meshes() -> None:
    mesh = Mesh(dp=2, tp=3)
    assert mesh.groups("tp") == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups("dp") == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups(("dp", "tp")) == ((0, 1, 2, 3, 4, 5),)
    assert mesh.groups(("tp", "dp")) == ((0, 3, 1, 4, 2, 5),)
    assert mesh.groups(()) == ((0,), (1,), (2,), (3,), (4,), (5,))
    permuted = Mesh({"dp": 2, "tp": 2}, devices=(7, 1, 4, 2))
    assert permuted.groups("tp") == ((7, 1), (4, 2))
    assert permuted.groups("dp") == ((7, 4), (1, 2))
    assert permuted.ranks == (1, 2, 4, 7)
    assert Mesh({"x": 3}, devices=(5, 3, 4)).ranks == range(3, 6)
    assert permuted.coords(4) == {"dp": 1, "tp": 0}


def test_index_is_row_major_in_the_order_given() -> None:
    mesh = Mesh(dp=2, tp=3)
    rank = mesh.rank(dp=1, tp=2)
    assert mesh.index(rank, ("dp", "tp")) == 5
    assert mesh.index(rank, ("tp", "dp")) == 5
    assert mesh.index(mesh.rank(dp=1, tp=0), ("dp", "tp")) == 3
    assert mesh.index(mesh.rank(dp=1, tp=0), ("tp", "dp")) == 1
    assert mesh.index(rank, ()) == 0


# -- derived meshes -----------------------------------------------------------------------------


@given(meshes(permuted=True), st.data())
def test_submesh_coordinates_are_those_of_the_mesh(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from(axis_lists(mesh)))
    fixed = {a: data.draw(st.integers(0, n - 1)) for a, n in mesh.shape.items() if a not in axes}
    sub = mesh.submesh(*axes, **fixed)
    assert sub.axes == axes
    for rank in sub.ranks:
        assert mesh.coords(rank) == {**fixed, **sub.coords(rank)}
    assert mesh.submesh(*mesh.axes) == mesh


@given(meshes(permuted=True), st.data())
def test_flatten_orders_devices_by_the_given_axes(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from(axis_lists(mesh)[1:] or [()]))
    if not axes:
        return
    flat = mesh.flatten(axes, "flat")
    assert flat.shape["flat"] == mesh.axis_size(axes)
    assert set(flat.axes) == set(mesh.axes) - set(axes) | {"flat"}
    for rank in mesh.ranks:
        assert flat.coords(rank)["flat"] == mesh.index(rank, axes)
        rest = [axis for axis in mesh.axes if axis not in axes]
        assert all(flat.coords(rank)[axis] == mesh.coords(rank)[axis] for axis in rest)
    assert sorted(flat.groups("flat")) == sorted(mesh.groups(axes))


@given(meshes(max_size=3, permuted=True, min_axes=1), st.data())
def test_split_undoes_flatten(mesh: Mesh, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(mesh.axes) - 1))
    stop = data.draw(st.integers(start + 1, len(mesh.axes)))
    axes = mesh.axes[start:stop]
    flat = mesh.flatten(axes, "flat")
    assert flat.split("flat", **{axis: mesh.shape[axis] for axis in axes}) == mesh


def test_split_is_row_major() -> None:
    mesh = Mesh(dp=2, tp=4).split("tp", a=2, b=2)
    assert mesh.axes == ("dp", "a", "b")
    assert mesh.coords(6) == {"dp": 1, "a": 1, "b": 0}


# -- equality and pickles -----------------------------------------------------------------------


@given(meshes(permuted=True))
def test_repr_and_pickle_restore_equal_meshes(mesh: Mesh) -> None:
    copy = Mesh(dict(mesh.shape), devices=list(mesh.devices))
    assert copy == mesh
    assert hash(copy) == hash(mesh)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh


def test_axis_order_and_devices_distinguish_meshes() -> None:
    assert Mesh(a=2, b=3) != Mesh(b=3, a=2)
    assert Mesh(a=2) != Mesh({"a": 2}, devices=(1, 0))
    assert Mesh(a=2) == Mesh({"a": 2}, devices=(0, 1)) == Mesh({"a": 2}, devices=range(2))
    assert Mesh(a=2) != "Mesh(a=2)"
    assert len({Mesh(a=2), Mesh({"a": 2}), Mesh(a=3)}) == 2


def test_ranges_and_tuples_of_devices_are_equal() -> None:
    assert Mesh({"a": 2}, devices=range(0, 4, 2)) == Mesh({"a": 2}, devices=(0, 2))
    assert Mesh({"a": 3}, devices=range(2, -1, -1)).ranks == range(3)
    assert Mesh({"a": 2}, devices=[4, 5]).devices == range(4, 6)
    assert Mesh({"a": 1}, devices=range(7, 9, 2)) == Mesh({"a": 1}, devices=[7])


def test_flatten_and_split_may_reuse_a_replaced_name() -> None:
    assert Mesh(a=2, b=3).flatten(("a", "b"), "b") == Mesh(b=6)
    assert Mesh(a=2, b=6).split("b", b=2, c=3) == Mesh(a=2, b=2, c=3)


def test_mesh_is_frozen() -> None:
    mesh: Any = Mesh(a=2)
    with pytest.raises(AttributeError):
        mesh.axes = ("b",)
    with pytest.raises(TypeError):
        mesh.shape["a"] = 3
    with pytest.raises(KeyError, match="fix:   use one of a"):
        mesh.shape["b"]


def test_mesh_without_axes() -> None:
    mesh = Mesh()
    assert (mesh.size, mesh.axes, mesh.groups(())) == (1, (), ((0,),))
    assert mesh.coords(0) == {}
    assert mesh.rank() == 0
    assert mesh.submesh() == mesh
    assert repr(mesh) == "Mesh()"


def test_pickles_of_other_hash_seeds_are_equal() -> None:
    """A pickle from a process with other string hashes has this process's hash.

    That process loads a pickle before it has imported a module of the package.
    """
    from fshard.layout.partition_spec import PartitionSpec as P
    from fshard.layout.spec import Spec

    mesh = Mesh({"dp": 2, "tp": 2}, devices=(3, 1, 0, 2))
    spec = Spec(mesh, P("dp", unreduced={"tp": "max"}), shape=(5, 4), uneven="chunk")
    sent = mesh, spec.partition, spec
    code = (
        f"import pickle, sys; values = pickle.loads({pickle.dumps(sent)!r})\n"
        "sys.stdout.buffer.write(pickle.dumps((str(values), *values, hash('dp'))))"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    process = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        check=True,
    )
    text, *values, string_hash = pickle.loads(process.stdout)
    assert text == str(sent)
    assert string_hash != hash("dp"), "the two processes must hash strings differently"
    for loaded, value in zip(values, sent, strict=True):
        assert loaded == value
        assert hash(loaded) == hash(value)
        assert {value: 1}[loaded] == 1


def test_a_million_devices_need_little_memory() -> None:
    with peak_memory_below(1 << 20):  # a table of the devices takes 8 MiB and more
        mesh = Mesh(a=1024, b=1024)
        assert mesh.devices == range(1 << 20)
        assert mesh.coords((1 << 20) - 1) == {"a": 1023, "b": 1023}
        assert mesh.rank(a=5, b=7) == 5 * 1024 + 7
        assert mesh.group(1025, "a")[:2] == (1, 1025)
        assert mesh.split("b", c=2, d=512).devices == range(1 << 20)
        assert 5 in mesh
        assert hash(mesh) == hash(Mesh(a=1024, b=1024))
        assert len(pickle.dumps(mesh)) < 200


# -- errors -------------------------------------------------------------------------------------

MESH = Mesh(data=2, model=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(x=1.5), "the size of an axis must be an int"),  # type: ignore[arg-type]
        (lambda: Mesh(x=0), r"axis 'x' of size 0\n  rule:  the size of an axis must be an int"),
        (lambda: Mesh(x=True), "axis 'x' of size True"),
        (lambda: Mesh({"x": 2.0}), "axis 'x' of size 2.0"),
        (lambda: Mesh({"a b": 2}), r"axis name 'a b'\n  rule:  an axis name must be a Python"),
        (lambda: Mesh({3: 2}), "axis name 3"),
        (lambda: Mesh({"x": 0, "1y": 2}), r"(?s)axis 'x' of size 0.*axis name '1y'"),
        (lambda: Mesh({"x": 2}, devices=(0, 1, 2)), r"(?s)3 devices for .*must be 2, the product"),
        (lambda: Mesh({"x": 2}, devices=(1, 1)), "rank ids must be distinct and at least 0"),
        (lambda: Mesh({"x": 2}, devices=(-1, 0)), "rank ids must be distinct and at least 0"),
        (lambda: Mesh({"x": 3}, devices=(1, 1)), r"(?s)2 devices for.*name each rank once"),
        (lambda: MESH.groups("modle"), r"Mesh.groups\n.*axis 'modle' on Mesh\(data=2, model=4\)"),
        (lambda: MESH.groups("modle"), "fix:   did you mean 'model'"),
        (lambda: MESH.groups("zz"), "fix:   use one of data, model"),
        (lambda: MESH.groups(("data", "data")), "axis 'data' 2 times in"),
        (lambda: MESH.groups(("data", "zz", "data")), r"(?s)axis 'zz'.*axis 'data' 2 times"),
        (lambda: MESH.axis_size("zz"), "Mesh.axis_size"),
        (lambda: Mesh("x"), "a shape of 'x'\n  rule:  a shape must map axis names"),  # type: ignore[arg-type]
        (lambda: Mesh(x=2, devices=[0, "a"]), "devices must be rank ids, ints"),  # type: ignore[list-item]
        (lambda: Mesh(x=2, devices=[0, 1.5]), "devices must be rank ids, ints"),  # type: ignore[list-item]
        (lambda: Mesh(x=2, devices=2), "devices must be rank ids, ints"),  # type: ignore[arg-type]
        (lambda: MESH.coordinate(8), r"Mesh.coordinate\n  given: rank 8 on"),
        (lambda: MESH.index(8, "data"), r"Mesh.index\n  given: rank 8 on"),
        (lambda: MESH.coords(8), r"Mesh.coords\n.*rank 8 on .*\n.* must be one of \[0, 1, 2,"),
        (lambda: Mesh(a=32).coords(32), r"a rank must be one of 0..31 \(32\)"),
        (lambda: MESH.group(9, "data"), r"Mesh.group\n  given: rank 9"),
        (lambda: MESH.rank(data=0), r"coordinate model=None\n  rule:  .* must be in 0..3"),
        (lambda: MESH.rank(data=2, model=4), r"(?s)data=2.*model=4"),
        (lambda: MESH.rank(data=0, model=0, zz=1), "axis 'zz'"),
        (lambda: MESH.submesh("zz"), "Mesh.submesh"),
        (lambda: MESH.submesh("data", zz=1), "axis 'zz'"),
        (lambda: MESH.submesh("data", model=7), "coordinate model=7"),
        (lambda: MESH.submesh("data", data=1), "axis 'data' 2 times"),
        (lambda: MESH.index(0, "zz"), "Mesh.index\n.*axis 'zz'"),
        (lambda: MESH.group(0, "modle"), "Mesh.group\n.*axis 'modle'"),
        (lambda: MESH.flatten(("data", "zz"), "all"), "Mesh.flatten"),
        (lambda: MESH.flatten("data", "model"), "the axes of a mesh must have distinct names"),
        (lambda: MESH.flatten((), "all"), "Mesh.flatten"),
        (lambda: MESH.flatten("data", "no good"), "Python identifier"),
        (lambda: MESH.split("model", a=3, b=2), r"the sizes must multiply to 4, not 6"),
        (lambda: MESH.split("zz", a=1), "axis 'zz'"),
        (lambda: MESH.split("model", a=4, data=1), "the axes of a mesh must have distinct names"),
        (lambda: MESH.split("model", a=-2, b=-2), "must be an int of at least 1"),
    ],
)  # fmt: skip
def test_mesh_errors(make: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        make()
