"""Placements of specs, compared with DTensor's local shapes and offsets on every rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import fshard.interop  # noqa: F401  (sets the hooks)
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.partition_spec import chunk_sizes
from fshard.layout.spec import Spec
from tests.helpers.spec_grid import all_partitions, all_specs, ordered_placements
from tests.helpers.strategies import specs


def assert_same_locals(spec: Spec, placements: Sequence[Any]) -> None:
    """Assert that the local shapes, and the offsets of shards with elements, are DTensor's."""
    for rank in spec.mesh.ranks:
        shape, offsets = _compute_local_shape_and_global_offset(
            spec.shape, spec.mesh.sizes, list(spec.mesh.coordinate(rank)), placements
        )
        assert spec.local_shape(rank) == shape, (spec, rank, placements)
        if math.prod(shape):
            assert spec.offsets(rank) == offsets, (spec, rank, placements)


def as_device_mesh(mesh: Mesh) -> Any:
    """Return an object with the attributes of a DeviceMesh that DTensor's conversions read."""
    return SimpleNamespace(size=lambda dim: mesh.sizes[dim], shape=mesh.sizes)


# -- DTensor's own conversion -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 3), (3, 2, 2), (2, 1, 3)])
def test_placements_of_every_axis_order_are_dtensors(sizes: tuple[int, ...]) -> None:
    """All orders of the axes on two dims convert as DTensor converts its ShardOrder."""
    mesh = Mesh(dict(zip("xyz", sizes, strict=False)))
    shape = (mesh.size, mesh.size)
    for dims, _ in ordered_placements(mesh.axes, 2):
        spec = Spec(mesh, P(*dims), shape=shape)
        plain = [Replicate() for _ in mesh.axes]
        order = []
        for dim, axes in enumerate(dims):
            mesh_dims = tuple(mesh.axes.index(axis) for axis in axes)
            order += [ShardOrderEntry(dim, mesh_dims)] if mesh_dims else []
            for mesh_dim in mesh_dims:
                plain[mesh_dim] = Shard(dim)
        expected = DTensorSpec._convert_shard_order_to_StridedShard(
            tuple(order), tuple(plain), as_device_mesh(mesh)
        )
        assert spec.placements == expected
        assert_same_locals(spec, expected)
        decoded = DTensorSpec._maybe_convert_StridedShard_to_shard_order(
            expected, as_device_mesh(mesh)
        )
        restored = Spec.from_placements(mesh, expected, shape)
        assert decoded == tuple(
            ShardOrderEntry(dim, tuple(mesh.axes.index(axis) for axis in axes))
            for dim, axes in enumerate(restored.partition.dims)
            if axes
        )
        assert restored.is_equivalent(spec)
        if 1 not in sizes:
            assert restored == spec


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 3), (2, 2, 2), (3, 2, 2)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 11, 13, 19])
def test_uneven_axis_orders_are_dtensors_or_refused(sizes: tuple[int, ...], rows: int) -> None:
    """In mesh order nested chunks are DTensor's; other orders agree with DTensor or raise."""
    mesh = Mesh(dict(zip("xyz", sizes, strict=False)))
    for axes in itertools.permutations(mesh.axes):
        even = Spec(mesh, P(axes), shape=(mesh.size,))
        try:
            spec = Spec.from_placements(mesh, even.placements, (rows,))
        except ShardingError as error:
            assert axes != mesh.axes
            assert "the rows of every rank must be contiguous" in str(error)
            with pytest.raises(ShardingError, match="no shards of contiguous rows"):
                _ = Spec(mesh, P(axes), shape=(rows,), uneven="chunk").placements
        else:
            assert_same_locals(spec, even.placements)
            assert spec.placements == even.placements
            if axes == mesh.axes:
                assert spec == Spec(mesh, P(axes), shape=(rows,), uneven="chunk")


def test_noncontiguous_rows_of_dtensor_are_refused() -> None:
    """DTensor shards 7 rows over (y, x) of a 3 x 2 mesh such that rank (2, 0) has row 6."""
    placements = Spec(Mesh(x=3, y=2), P(("y", "x")), shape=(6,)).placements
    local_rows = [
        _compute_local_shape_and_global_offset((7,), (3, 2), [x, y], placements)
        for y, x in itertools.product(range(2), range(3))
    ]
    assert [(shape, offset) for (shape,), (offset,) in local_rows] == [
        (2, 0), (2, 2), (1, 6), (1, 4), (1, 5), (0, 7)]  # fmt: skip
    with pytest.raises(ShardingError, match=r"pad the dim to a multiple of 6"):
        Spec.from_placements(Mesh(x=3, y=2), placements, (7,))


@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("shape", [(5, 4), (7, 1), (1, 0), (0, 3), (6, 6), (9, 5)])
def test_uneven_chunks_are_dtensors(sizes: tuple[int, ...], shape: tuple[int, int]) -> None:
    """All `Shard`s and `Replicate`s over all axes agree on every rank, empty shards included."""
    mesh = Mesh(dict(zip("xyz", sizes, strict=False)))
    for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(sizes)):
        spec = Spec.from_placements(mesh, placements, shape)
        assert_same_locals(spec, placements)
        assert spec.placements == placements


def test_five_rows_on_two_by_two_are_two_one_one_one() -> None:
    spec = Spec.from_placements(Mesh(x=2, y=2), (Shard(0), Shard(0)), (5,))
    assert spec.shard_sizes(0) == (2, 1, 1, 1)
    assert_same_locals(spec, (Shard(0), Shard(0)))


def test_chunk_sizes_are_those_of_torch_chunk() -> None:
    """`torch.chunk` omits empty chunks, for which `chunk_sizes` has zeros."""
    for rows, shards in itertools.product(range(12), range(1, 6)):
        lengths = [chunk.shape[0] for chunk in torch.arange(rows).chunk(shards)] if rows else []
        padded = [*lengths, *([0] * shards)][:shards]
        assert list(chunk_sizes(rows, (shards,))) == padded


# -- states -------------------------------------------------------------------------------------


def test_placement_of_each_state() -> None:
    mesh = Mesh(x=2, y=3)
    for spec in all_specs(mesh, (6, 6), dtype=torch.float32):
        for axis, placement in zip(mesh.axes, spec.placements, strict=True):
            if axis in spec.partition.unreduced:
                assert placement == Partial("sum")
            elif any(axis in dim for dim in spec.partition.dims):
                assert placement.dim == [axis in dim for dim in spec.partition.dims].index(True)
            else:
                assert placement == Replicate()


def test_round_trip_turns_reduced_into_invariant() -> None:
    mesh = Mesh(x=2, y=3, z=2)
    for partition in all_partitions(mesh.axes, 2):
        spec = Spec(mesh, partition, shape=(12, 12))
        expected = P(*partition.dims, unreduced=partition.unreduced)
        assert Spec.from_placements(mesh, spec.placements, (12, 12)) == spec.replace(
            partition=expected
        )


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_reductions_of_unreduced_axes(kind: str) -> None:
    spec = Spec(Mesh(x=2), P(unreduced={"x": kind}), shape=(3,))
    assert spec.placements == (Partial(kind),)
    assert Spec.from_placements(spec.mesh, (Partial(kind),), (3,)) == spec


@given(specs(splits=("even", "chunk"), states=("sharded", "invariant", "unreduced")))
def test_round_trip_is_equivalent(spec: Spec) -> None:
    try:
        placements = spec.placements
    except ShardingError:
        assert not spec.is_even
        return
    restored = Spec.from_placements(spec.mesh, placements, spec.shape, spec.dtype)
    assert restored.is_equivalent(spec)
    assert restored.placements == placements
    assert_same_locals(spec, placements)


def test_placements_of_a_million_devices() -> None:
    mesh = Mesh(a=1024, b=1024)
    spec = Spec(mesh, P(("b", "a"), None), shape=(1 << 20, 3))
    assert spec.placements == (_StridedShard(0, split_factor=1024), Shard(0))
    assert Spec.from_placements(mesh, spec.placements, spec.shape) == spec


# -- errors -------------------------------------------------------------------------------------


def test_sizes_without_a_placement_raise() -> None:
    mesh = Mesh(x=4)
    with pytest.raises(ShardingError) as caught:
        _ = Spec(mesh, P("x"), shape=(16,), sizes={0: (3, 5, 0, 8)}).placements
    assert "dim 0 of f32[16@x:3+5+0+8], of shard sizes (3, 5, 0, 8)" in str(caught.value)
    assert "DTensor's shard sizes must be (4, 4, 4, 4)" in str(caught.value)
    with pytest.raises(ShardingError, match=r"shard sizes must be \(2, 2, 1, 0\)"):
        _ = Spec(mesh, P("x"), shape=(5,), sizes={0: (2, 1, 1, 1)}).placements


def test_reduced_average_raises() -> None:
    with pytest.raises(ShardingError, match="share of an average"):
        _ = Spec(Mesh(x=4), P(reduced={"x": "avg"}), shape=(4,)).placements


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(0),), r"given: 1 placements\n  rule:  one per mesh axis: 2"),
        ((Shard(2), Shard(-3)), r"Shard\(dim=2\) on axis 'x'[^$]*Shard\(dim=-3\) on axis 'y'"),
        (
            (_MaskPartial(), Replicate()),
            r"MaskPartial.* on axis 'x'\n  rule:  a placement must be Shard",
        ),
        ((Partial("band"), Replicate()), r"Partial\(band\) on axis 'x'"),
        ((_StridedShard(0, split_factor=5), Shard(0)), r"split factors \{'x': 5, 'y': 1\}"),
        ((Replicate(), _StridedShard(0, split_factor=2)), r"no order of these axes has these"),
        ((None, "x"), r"None on axis 'x'[^$]*'x' on axis 'y'"),
    ],
)
def test_invalid_placements_raise(placements: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        Spec.from_placements(Mesh(x=2, y=2), placements, (4, 4))


def test_shard_of_a_0_dim_tensor_raises() -> None:
    with pytest.raises(ShardingError, match="a 0-dim tensor has no dims"):
        Spec.from_placements(Mesh(x=2), (Shard(0),), ())


def test_negative_dims_are_normalised() -> None:
    mesh = Mesh(x=2, y=2)
    assert Spec.from_placements(mesh, (Shard(-1), Shard(-2)), (4, 4)) == Spec(
        mesh, P("y", "x"), shape=(4, 4)
    )
