"""Refinements of meshes, and equivalence of layouts on different grids."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.refinement import Refinement, common_refinement, prime_refinement
from fshard.layout.spec import Spec
from tests.helpers.spec_grid import all_partitions
from tests.helpers.strategies import meshes, partitions, specs

GRIDS = [grid for n in range(4) for grid in itertools.product((1, 2, 3, 4), repeat=n)]
OF_12 = [(12,), (2, 6), (6, 2), (3, 4), (4, 3), (2, 3, 2), (3, 2, 2), (2, 2, 3), (1, 12), (2, 1, 6)]


def mesh_of(grid: tuple[int, ...], names: str = "xyz") -> Mesh:
    return Mesh(dict(zip(names, grid, strict=False)))


def assert_refines(fine: Refinement, which: int, coarse: Mesh) -> None:
    """Assert that every rank has the same index along a coarse axis and along its fine axes."""
    parts = dict(fine.parts[which])
    assert tuple(parts) == coarse.axes
    assert fine.mesh.devices == coarse.devices
    assert len({*itertools.chain(*parts.values())}) == sum(map(len, parts.values()))
    for axis, names in parts.items():
        assert fine.mesh.axis_size(names) == coarse.shape[axis]
        for rank in coarse.ranks:
            assert fine.mesh.index(rank, names) == coarse.index(rank, axis)


@pytest.mark.parametrize("names", ["xyz", "abc"])
def test_common_refinement_of_all_small_grids(names: str) -> None:
    """All pairs of small grids have a refinement unless they cross, and it is the coarsest one."""
    for one, other in itertools.product(GRIDS, GRIDS):
        if math.prod(one) != math.prod(other):
            continue
        a, b = mesh_of(one), mesh_of(other, names)
        fine, reverse = common_refinement(a, b), common_refinement(b, a)
        assert (fine is None) == (reverse is None) == crosses(one, other)
        if fine is None:
            continue
        assert_refines(fine, 0, a)
        assert_refines(fine, 1, b)
        assert len(fine.parts) == 2
        sizes = [n for n in fine.mesh.sizes if n > 1]
        assert len(sizes) == len(strides(one) | strides(other)) - 1
        for axis, names_ in fine.parts[0]:
            assert names_ == (axis,) or len(names_) > 1
            assert len(names_) == 1 or not set(names_) & {*a.axes, *b.axes}


def strides(grid: tuple[int, ...]) -> set[int]:
    """Return the strides of the axes in devices, and the number of devices."""
    return {math.prod(grid[dim:]) for dim in range(len(grid) + 1)}


def crosses(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if a stride of one grid neither divides nor is divided by one of the other."""
    return any(a % b and b % a for a in strides(one) for b in strides(other))


def test_no_common_refinement_on_other_devices() -> None:
    assert common_refinement(Mesh(x=4), Mesh({"x": 4}, devices=(0, 2, 1, 3))) is None
    assert common_refinement(Mesh(x=4), Mesh({"x": 4}, devices=range(1, 5))) is None
    assert common_refinement(Mesh(x=4), Mesh(x=2)) is None


def test_new_axes_have_unused_names() -> None:
    fine = common_refinement(Mesh(x=4, x_0=3), Mesh(x_1=2, x_3=2, z=3))
    assert fine is not None
    assert fine.mesh.axes == ("x_2", "x_4", "x_0")
    assert fine.parts[1] == (("x_1", ("x_2",)), ("x_3", ("x_4",)), ("z", ("x_0",)))
    assert prime_refinement(Mesh(x=4, x_1=2)).mesh.axes == ("x_0", "x_2", "x_1")


@given(meshes(max_size=12, max_devices=72, permuted=True))
def test_prime_refinement_has_prime_sizes_in_order(mesh: Mesh) -> None:
    fine = prime_refinement(mesh)
    assert_refines(fine, 0, mesh)
    for axis, names in fine.parts[0]:
        sizes = [fine.mesh.shape[name] for name in names]
        assert sizes == sorted(sizes)
        assert mesh.shape[axis] == 1 or all(is_prime(n) for n in sizes)
    assert prime_refinement(fine.mesh).mesh == fine.mesh


def is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, n))


def test_a_million_devices_are_refined() -> None:
    fine = common_refinement(Mesh(x=1 << 20), Mesh(a=1 << 10, b=1 << 10))
    assert fine is not None
    assert fine.mesh == Mesh(x_0=1 << 10, x_1=1 << 10)
    assert prime_refinement(Mesh(x=1 << 20)).mesh.sizes == (2,) * 20
    one = Spec(Mesh(x=1 << 20), P("x"), shape=(1 << 20,))
    assert one.is_equivalent(Spec(Mesh(a=1 << 10, b=1 << 10), P(("a", "b")), shape=(1 << 20,)))
    assert not one.is_equivalent(Spec(Mesh(a=1 << 10, b=1 << 10), P(("b", "a")), shape=(1 << 20,)))


@given(meshes(max_size=6), st.data())
def test_refined_partitions_are_equivalent(mesh: Mesh, data: st.DataObject) -> None:
    fine = prime_refinement(mesh)
    p = data.draw(partitions(mesh.axes, 2, kinds=("sum", "avg", "max")))
    shape = tuple(math.prod(mesh.shape[axis] for axis in axes) for axes in p.dims)
    spec = Spec(mesh, p, shape=shape)
    refined = Spec(fine.mesh, fine.refine(p), shape=shape)
    assert refined.is_equivalent(spec)
    assert same_on_every_rank(refined, spec)


# -- equal layouts ------------------------------------------------------------------------


def same_on_every_rank(one: Spec, other: Spec) -> bool:
    """Return True if every rank has the same index and the same groups of each state."""
    return one.mesh.ranks == other.mesh.ranks and all(
        one.index(rank) == other.index(rank)
        and state_groups(one, rank) == state_groups(other, rank)
        for rank in one.mesh.ranks
    )


def state_groups(spec: Spec, rank: int) -> set[tuple[str, str, frozenset[int]]]:
    """Return `(state, reduction, ranks)` of the groups in which a rank is unreduced or reduced."""
    p = spec.partition
    groups = set()
    for state, kinds in (("unreduced", p.unreduced), ("reduced", p.reduced)):
        for kind in set(kinds.values()):
            axes = [axis for axis in kinds if kinds[axis] == kind]
            if spec.mesh.axis_size(axes) > 1:
                groups.add((state, kind, frozenset(spec.mesh.group(rank, axes))))
    return groups


@given(st.data())
def test_equivalence_is_equality_on_every_rank(data: st.DataObject) -> None:
    one_mesh, other_mesh = (mesh_of(data.draw(st.sampled_from(OF_12)), n) for n in ("xyz", "abc"))
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 5, 12, 24]), max_size=2))
    kinds = data.draw(st.sampled_from([("sum",), ("sum", "avg"), ("max",)]))
    one, other = (
        data.draw(specs(mesh, shape, dtype=torch.float32, kinds=kinds))
        for mesh in (one_mesh, other_mesh)
    )
    assert one.is_equivalent(other) == same_on_every_rank(one, other)


@pytest.mark.parametrize("shape", [(4, 8), (4, 0)])
def test_equivalence_of_all_small_layouts(shape: tuple[int, ...]) -> None:
    """Sharded, invariant and unreduced axes on three grids of four devices."""
    grids = Mesh(x=4), Mesh(x=2, y=2), Mesh(x=1, y=2, z=2)
    all_specs = [
        Spec(mesh, p, shape=shape) for mesh in grids for p in all_partitions(mesh.axes, len(shape))
    ]
    for one, other in itertools.combinations_with_replacement(all_specs, 2):
        assert (
            one.is_equivalent(other) == other.is_equivalent(one) == same_on_every_rank(one, other)
        )


def test_equivalence_of_coincident_empty_shards() -> None:
    mesh = Mesh(x=2, y=2)
    one = Spec(mesh, P(("x", "y")), shape=(4,), sizes={0: (4, 0, 0, 0)})
    other = Spec(mesh, P(("y", "x")), shape=(4,), sizes={0: (4, 0, 0, 0)})
    assert one.is_equivalent(other)
    assert not one.is_equivalent(Spec(mesh, P(("y", "x")), shape=(4,), sizes={0: (0, 4, 0, 0)}))
