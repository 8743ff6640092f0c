"""Hypothesis strategies for values: meshes, partitions, shapes, specs, pairs of specs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import LINEAR, PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec

__all__ = ["meshes", "partitions", "shapes", "spec_pairs", "specs"]

NAMES = ("x", "y", "z", "w")


@st.composite
def meshes(
    draw: st.DrawFn,
    max_axes: int = 3,
    max_size: int = 4,
    max_devices: int = 24,
    permuted: bool = False,
    min_axes: int = 0,
) -> Mesh:
    """Draw a mesh of small axes, of size 1 too; with `permuted` its devices are in any order."""
    count = draw(st.integers(min_axes, max_axes))
    sizes: list[int] = []
    for _ in range(count):
        room = max(1, min(max_size, max_devices // math.prod(sizes)))
        sizes.append(draw(st.integers(1, room)))
    grid = dict(zip(NAMES, sizes, strict=False))
    devices = draw(st.permutations(range(math.prod(sizes)))) if permuted else None
    return Mesh(grid, devices=devices)


@st.composite
def partitions(
    draw: st.DrawFn,
    axes: Sequence[str],
    ndim: int,
    states: Sequence[str] = ("sharded", "invariant", "reduced", "unreduced"),
    kinds: Sequence[str] = ("sum",),
) -> PartitionSpec:
    """Draw a partition of `ndim` dims over `axes`, each axis in one of `states`, in any order."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    unreduced: dict[str, str] = {}
    reduced: dict[str, str] = {}
    allowed = [state for state in states if ndim or state != "sharded"]
    # Only sum and avg mix; a reduced sum mixes with any reduction.
    linear = [kind for kind in kinds if kind in LINEAR]
    other = [kind for kind in kinds if kind not in LINEAR]
    only = draw(st.sampled_from([None, *other] if linear else other))
    unreduced_kinds = linear if only is None else [only]
    reduced_kinds = linear if only is None and linear else ["sum"]
    for axis in draw(st.permutations(list(axes))):
        match draw(st.sampled_from(allowed)):
            case "sharded":
                dims[draw(st.integers(0, ndim - 1))].append(axis)
            case "reduced":
                reduced[axis] = draw(st.sampled_from(reduced_kinds))
            case "unreduced":
                unreduced[axis] = draw(st.sampled_from(unreduced_kinds))
            case _:
                pass
    return PartitionSpec(*map(tuple, dims), unreduced=unreduced, reduced=reduced)


def shapes(min_dims: int = 0, max_dims: int = 3, max_size: int = 8) -> st.SearchStrategy[list[int]]:
    """Draw a shape, of zero sizes too."""
    return st.lists(st.integers(0, max_size), min_size=min_dims, max_size=max_dims)


@st.composite
def shard_sizes(draw: st.DrawFn, size: int, shards: int) -> tuple[int, ...]:
    """Draw `shards` non-negative sizes that sum to `size`."""
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=shards - 1, max_size=shards - 1)))
    return tuple(b - a for a, b in zip([0, *edges], [*edges, size], strict=True))


@st.composite
def specs(
    draw: st.DrawFn,
    mesh: Mesh | None = None,
    shape: Sequence[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    states: Sequence[str] = ("sharded", "invariant", "reduced", "unreduced"),
    kinds: Sequence[str] = ("sum",),
    splits: Sequence[str] = ("even", "chunk", "sizes"),
) -> Spec:
    """Draw a spec on `mesh` (default: any) of `shape` (default: any).

    `splits` are the ways in which dims are split into shards: `even` (a drawn shape is divisible,
    a given one that is not is chunked), `chunk`, or any `sizes`.
    """
    mesh = draw(meshes()) if mesh is None else mesh
    ndim = draw(st.integers(0, 3)) if shape is None else len(shape)
    partition = draw(partitions(mesh.axes, ndim, states, kinds))
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    dtype = draw(st.sampled_from(dtypes)) if dtype is None else dtype
    sizes: dict[int, tuple[int, ...]] = {}
    full: list[int] = []
    for dim, axes in enumerate(partition.dims):
        parts = [mesh.shape[axis] for axis in axes]
        shards = math.prod(parts)
        how = draw(st.sampled_from(list(splits)))
        if shape is not None:
            size = shape[dim]
        elif how == "even":
            size = shards * draw(st.integers(0, 3))
        else:
            size = draw(st.integers(0, 9))
        full.append(size)
        if how == "sizes":
            sizes[dim] = draw(shard_sizes(size, shards))
        elif size % shards:
            sizes[dim] = chunk_sizes(size, parts)
    return Spec(mesh, partition, shape=full, dtype=dtype, sizes=sizes)


@st.composite
def spec_pairs(
    draw: st.DrawFn, mesh: Mesh | None = None, shape: Sequence[int] | None = None, **options: object
) -> tuple[Spec, Spec]:
    """Draw two specs of one mesh, shape and dtype, with the options of `specs`."""
    mesh = draw(meshes()) if mesh is None else mesh
    shape = draw(shapes()) if shape is None else shape
    options.setdefault("dtype", torch.int64)
    first = draw(specs(mesh, shape, **options))  # type: ignore[arg-type]
    return first, draw(specs(mesh, shape, **options))  # type: ignore[arg-type]
