"""DTensor's placements, against DTensor's own arithmetic, rank by rank."""

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

import fshard.interop  # noqa: F401  (registers the hooks)
from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.partition_spec import chunk_sizes
from fshard.layout.spec import Spec
from tests.helpers.spec_grid import all_partitions, all_specs, ordered_placements
from tests.helpers.strategies import specs


def assert_same_locals(spec: Spec, placements: Sequence[Any]) -> None:
    """Every rank's shape and, where it holds anything, offset are DTensor's."""
    for rank in spec.mesh.ranks:
        shape, offsets = _compute_local_shape_and_global_offset(
            spec.shape, spec.mesh.sizes, list(spec.mesh.coordinate(rank)), placements
        )
        assert spec.local_shape(rank) == shape, (spec, rank, placements)
        if math.prod(shape):
            assert spec.offsets(rank) == offsets, (spec, rank, placements)


def as_device_mesh(mesh: Mesh) -> Any:
    """What DTensor's conversions ask of a DeviceMesh, without processes."""
    return SimpleNamespace(size=lambda dim: mesh.sizes[dim], shape=mesh.sizes)


# -- DTensor's own conversion -------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 2, 3), (3, 2, 2), (2, 1, 3)])
def test_orders_convert_as_dtensor_does(sizes: tuple[int, ...]) -> None:
    """Every order of the axes on two dims: the placements are those of DTensor's ShardOrder."""
    mesh = Mesh(dict(zip("xyz", sizes, strict=False)))
    shape = (mesh.size, mesh.size)
    for dims, _ in ordered_placements(mesh.axes, 2):
        spec = Spec(mesh, P(*dims), shape=shape)
        plain = [Replicate() for _ in mesh.axes]
        order = []
        for dim, axes in enumerate(dims):
            places = tuple(mesh.axes.index(axis) for axis in axes)
            order += [ShardOrderEntry(dim, places)] if places else []
            for place in places:
                plain[place] = Shard(dim)
        theirs = DTensorSpec._convert_shard_order_to_StridedShard(
            tuple(order), tuple(plain), as_device_mesh(mesh)
        )
        assert spec.placements == theirs
        assert_same_locals(spec, theirs)
        decoded = DTensorSpec._maybe_convert_StridedShard_to_shard_order(
            theirs, as_device_mesh(mesh)
        )
        again = Spec.from_placements(mesh, theirs, shape)
        assert decoded == tuple(
            ShardOrderEntry(dim, tuple(mesh.axes.index(axis) for axis in axes))
            for dim, axes in enumerate(again.partition.dims)
            if axes
        )
        assert again.is_equivalent(spec)
        if 1 not in sizes:
            assert again == spec


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 3), (2, 2, 2), (3, 2, 2)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 11, 13, 19])
def test_uneven_orders_are_dtensors_or_refused(sizes: tuple[int, ...], rows: int) -> None:
    """Chunks of chunks are DTensor's in mesh order; in another, what it does or an error."""
    mesh = Mesh(dict(zip("xyz", sizes, strict=False)))
    for axes in itertools.permutations(mesh.axes):
        even = Spec(mesh, P(axes), shape=(mesh.size,))
        try:
            spec = Spec.from_placements(mesh, even.placements, (rows,))
        except ShardingError as error:
            assert axes != mesh.axes
            assert "rows that do not adjoin" in str(error)
            with pytest.raises(ShardingError, match="cannot cut this dim in this order"):
                _ = Spec(mesh, P(axes), shape=(rows,), uneven="chunk").placements
        else:
            assert_same_locals(spec, even.placements)
            assert spec.placements == even.placements
            if axes == mesh.axes:
                assert spec == Spec(mesh, P(axes), shape=(rows,), uneven="chunk")


def test_uneven_refusal_is_right() -> None:
    """7 rows over (y, x) of a 3 x 2 mesh: DTensor's rank (2, 0) holds row 6, after all others."""
    placements = Spec(Mesh(x=3, y=2), P(("y", "x")), shape=(6,)).placements
    held = [
        _compute_local_shape_and_global_offset((7,), (3, 2), [x, y], placements)
        for y, x in itertools.product(range(2), range(3))
    ]
    assert [(shape, offset) for (shape,), (offset,) in held] == [
        (2, 0), (2, 2), (1, 6), (1, 4), (1, 5), (0, 7)]  # fmt: skip
    with pytest.raises(ShardingError, match=r"pad the dim to a multiple of 6"):
        Spec.from_placements(Mesh(x=3, y=2), placements, (7,))


@pytest.mark.parametrize("sizes", [(2,), (3,), (4,), (2, 2), (2, 3), (4, 2)])
@pytest.mark.parametrize("shape", [(5, 4), (7, 1), (1, 0), (0, 3), (6, 6), (9, 5)])
def test_chunks_are_dtensors(sizes: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Every `Shard` and `Replicate` over every axis, rank by rank, empty shards included."""
    mesh = Mesh(dict(zip("xyz", sizes, strict=False)))
    for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(sizes)):
        spec = Spec.from_placements(mesh, placements, shape)
        assert_same_locals(spec, placements)
        assert spec.placements == placements


def test_five_rows_on_two_by_two() -> None:
    spec = Spec.from_placements(Mesh(x=2, y=2), (Shard(0), Shard(0)), (5,))
    assert spec.shard_sizes(0) == (2, 1, 1, 1)
    assert_same_locals(spec, (Shard(0), Shard(0)))


def test_chunk_is_torch_chunk() -> None:
    """`torch.chunk` leaves empty chunks out; a mesh cannot."""
    for rows, shards in itertools.product(range(12), range(1, 6)):
        theirs = [chunk.shape[0] for chunk in torch.arange(rows).chunk(shards)] if rows else []
        padded = [*theirs, *([0] * shards)][:shards]
        assert list(chunk_sizes(rows, (shards,))) == padded


# -- states -------------------------------------------------------------------------------------


def test_states() -> None:
    mesh = Mesh(x=2, y=3)
    for spec in all_specs(mesh, (6, 6), dtype=torch.float32):
        for axis, placement in zip(mesh.axes, spec.placements, strict=True):
            if axis in spec.partition.unreduced:
                assert placement == Partial("sum")
            elif any(axis in dim for dim in spec.partition.dims):
                assert placement.dim == [axis in dim for dim in spec.partition.dims].index(True)
            else:
                assert placement == Replicate()


def test_round_trip_forgets_reduced_only() -> None:
    mesh = Mesh(x=2, y=3, z=2)
    for partition in all_partitions(mesh.axes, 2):
        spec = Spec(mesh, partition, shape=(12, 12))
        forgotten = P(*partition.dims, unreduced=partition.unreduced)
        assert Spec.from_placements(mesh, spec.placements, (12, 12)) == spec.replace(
            partition=forgotten
        )


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_reductions(kind: str) -> None:
    spec = Spec(Mesh(x=2), P(unreduced={"x": kind}), shape=(3,))
    assert spec.placements == (Partial(kind),)
    assert Spec.from_placements(spec.mesh, (Partial(kind),), (3,)) == spec


@given(specs(cuts=("even", "chunk"), states=("sharded", "invariant", "unreduced")))
def test_round_trip(spec: Spec) -> None:
    try:
        placements = spec.placements
    except ShardingError:
        assert not spec.is_even
        return
    again = Spec.from_placements(spec.mesh, placements, spec.shape, spec.dtype)
    assert again.is_equivalent(spec)
    assert again.placements == placements
    assert_same_locals(spec, placements)


def test_million_devices() -> None:
    mesh = Mesh(a=1024, b=1024)
    spec = Spec(mesh, P(("b", "a"), None), shape=(1 << 20, 3))
    assert spec.placements == (_StridedShard(0, split_factor=1024), Shard(0))
    assert Spec.from_placements(mesh, spec.placements, spec.shape) == spec


# -- errors -------------------------------------------------------------------------------------


def test_sizes_that_dtensor_does_not_cut() -> None:
    mesh = Mesh(x=4)
    with pytest.raises(ShardingError) as caught:
        _ = Spec(mesh, P("x"), shape=(16,), sizes={0: (3, 5, 0, 8)}).placements
    assert "dim 0 of f32[16@x:3+5+0+8], cut into (3, 5, 0, 8)" in str(caught.value)
    assert "DTensor cuts this dim into (4, 4, 4, 4)" in str(caught.value)
    with pytest.raises(ShardingError, match=r"DTensor cuts this dim into \(2, 2, 1, 0\)"):
        _ = Spec(mesh, P("x"), shape=(5,), sizes={0: (2, 1, 1, 1)}).placements


def test_share_of_an_average() -> None:
    with pytest.raises(ShardingError, match="share of an average"):
        _ = Spec(Mesh(x=4), P(reduced={"x": "avg"}), shape=(4,)).placements


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(0),), r"given: 1 placements\n  rule:  one per mesh axis: 2"),
        ((Shard(2), Shard(-3)), r"Shard\(dim=2\) on axis 'x'[^$]*Shard\(dim=-3\) on axis 'y'"),
        ((_MaskPartial(), Replicate()), r"MaskPartial.* on axis 'x'\n  rule:  fshard knows Shard"),
        ((Partial("band"), Replicate()), r"Partial\(band\) on axis 'x'"),
        ((_StridedShard(0, split_factor=5), Shard(0)), r"split factors \{'x': 5, 'y': 1\}"),
        ((Replicate(), _StridedShard(0, split_factor=2)), r"no order of these axes has these"),
        ((None, "x"), r"None on axis 'x'[^$]*'x' on axis 'y'"),
    ],
)
def test_placements_that_are_refused(placements: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        Spec.from_placements(Mesh(x=2, y=2), placements, (4, 4))


def test_no_dims_to_shard() -> None:
    with pytest.raises(ShardingError, match="a 0-dim tensor has no dims"):
        Spec.from_placements(Mesh(x=2), (Shard(0),), ())


def test_negative_dims_are_normalised() -> None:
    mesh = Mesh(x=2, y=2)
    assert Spec.from_placements(mesh, (Shard(-1), Shard(-2)), (4, 4)) == Spec(
        mesh, P("y", "x"), shape=(4, 4)
    )
