"""Nearest neighbours and radius search among points that move around a ring of ranks.

Each rank keeps its queries and the best candidates so far; memory and work grow with its share of
the points. Results are exact and the same on every layout: of equal distances the lower index wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fshard._util.errors import Problem, fail, raise_if
from fshard.domain.ring_layouts import pairs_on_one_mesh, sliced, varying
from fshard.layout.mesh import Axes, Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.run.from_local import from_local
from fshard.run.global_tensors import reshard
from fshard.spmd.axis_env import resolve_axes
from fshard.spmd.collectives.psum import pmax
from fshard.spmd.collectives.ring import sizes_along
from fshard.spmd.collectives.ring_fold import ring_fold
from fshard.spmd.shard_map import local_map

MAX_DISTANCES = 1 << 22
"""Distances that are computed at once."""
NAMES = ("points", "queries")


def knn(
    points: Any,
    queries: Any,
    k: int,
    *,
    axis_name: Axes | None = None,
    point_sizes: Sequence[int] | None = None,
) -> tuple[Any, Any]:
    """Find the k nearest points of each query; both may be sharded, unevenly too.

    On pairs, or on the tensors of a `shard_map`'s body with `axis_name`.

    Args:
        points: shape (points, width); the rows may be sharded.
        queries: shape (queries, width); along axes that shard points and not queries they are
            sliced.
        k: number of neighbours, at most the number of points.
        axis_name: in a body, the axes along which points are sharded.
        point_sizes: in a body, the number of points on each index along the axes, on every rank
            the same. If they are left out, and an argument of the mapped function is uneven along
            the axes, the ranks exchange them.

    Returns:
        `(indices, distances)`, each of shape (queries, k) and sharded as the sliced queries: global
        indices of points, int64, and Euclidean distances in ascending order. Of equal distances
        the point of the lower index comes first.

    Raises:
        ShardingError: a `k` above the number of points, a sharded width, unreduced operands, shapes
            that do not match.

    A rank sends (p - 1) / p of the points, and holds one block of them. Distances are
    differentiable with respect to points and queries; where a distance is 0 its gradient is 0, as
    in `torch.cdist`. Exact search, as by `torch.cdist(queries, points).topk(k, largest=False)`.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(i=2)
    >>> points = fs.shard(torch.tensor([[0.0], [1.0], [5.0], [6.5]]), mesh, fs.P("i"))
    >>> indices, distances = fs.domain.knn(points, points, 2)
    >>> fs.unshard(indices).tolist(), fs.unshard(distances)[:, 1]
    ([[0, 1], [1, 0], [2, 3], [3, 2]], tensor([1.0000, 1.0000, 1.5000, 1.5000]))
    """
    where = "fs.domain.knn"
    if type(k) is not int or k < 1:
        fail(where, f"k={k!r}", "k must be an int of at least 1", "k=8, say")

    def search(ring: _PointRing, points: Tensor, queries: Tensor) -> tuple[Tensor, ...]:
        n = ring.starts[-1]
        if k > n:
            fail(where, f"k={k} of {n} points", f"k must be at most {n}", f"k={n}")
        squares, indices = _nearest(ring, points, queries, k)
        return indices, _root(squares)

    indices, distances = _run(where, search, points, queries, axis_name, point_sizes, ((k,), (k,)))
    return indices, distances


def radius_search(
    points: Any,
    queries: Any,
    radius: float,
    *,
    size: int | None = None,
    axis_name: Axes | None = None,
    point_sizes: Sequence[int] | None = None,
) -> tuple[Any, Any, Any]:
    """Find the points within a radius of each query; both may be sharded, unevenly too.

    On pairs, or on the tensors of a `shard_map`'s body with `axis_name`.

    Args:
        points: shape (points, width); the rows may be sharded.
        queries: shape (queries, width); along axes that shard points and not queries they are
            sliced.
        radius: largest distance of a neighbour, at least 0.
        size: largest number of neighbours of a query: the nearest are returned. None returns all,
            in a result whose size depends on values.
        axis_name: in a body, the axes along which points are sharded.
        point_sizes: in a body, the number of points on each index along the axes, on every rank
            the same. If they are left out, and an argument of the mapped function is uneven along
            the axes, the ranks exchange them.

    Returns:
        `(indices, distances, counts)`. With `size`, indices and distances have shape (queries,
        size), in ascending order of distance, with index -1 and distance inf where a query has no
        more neighbours; `counts`, of shape (queries,), has the number of all. Without `size`,
        indices and distances have shape (neighbours,): first for query 0 in ascending order of
        index, then for query 1, and so on; a pair's shards are uneven.

    Raises:
        ShardingError: a negative radius or size, a sharded width, unreduced operands, shapes that
            do not match.

    A rank sends (p - 1) / p of the points, and holds one block of them. Distances are
    differentiable with respect to points and queries; where a distance is 0 its gradient is 0.
    After `radius_search` of NVIDIA PhysicsNeMo and `torch_cluster.radius`.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(i=2)
    >>> points = fs.shard(torch.tensor([[0.0], [1.0], [5.0], [6.5]]), mesh, fs.P("i"))
    >>> indices, distances, counts = fs.domain.radius_search(points, points, 1.2)
    >>> fs.unshard(counts), fs.unshard(indices), indices.spec
    (tensor([2, 2, 1, 1]), tensor([0, 1, 0, 1, 2, 3]), i64[6@i:4+2])
    >>> fs.unshard(fs.domain.radius_search(points, points, 1.2, size=2)[0]).tolist()
    [[0, 1], [1, 0], [2, -1], [3, -1]]
    """
    where = "fs.domain.radius_search"
    if not isinstance(radius, int | float) or not radius >= 0:
        fail(where, f"radius={radius!r}", "the radius must be a number of at least 0", "radius=0.1")
    if size is not None and (type(size) is not int or size < 0):
        fail(where, f"size={size!r}", "size must be an int of at least 0, or None", "size=32, say")

    def search(ring: _PointRing, points: Tensor, queries: Tensor) -> tuple[Tensor, ...]:
        if size is None:
            return _all_within(ring, points, queries, radius)
        squares, indices = _nearest(ring, points, queries, size)
        counts = _counts(ring, points, queries, radius)
        outside = squares.detach() > radius * radius
        return (indices.masked_fill(outside, -1),
                _root(squares.masked_fill(outside, math.inf)), counts)  # fmt: skip

    widths = None if size is None else ((size,), (size,), ())
    indices, distances, counts = _run(
        where, search, points, queries, axis_name, point_sizes, widths
    )
    return indices, distances, counts


# -- folds ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PointRing:
    """Ring of points; `starts` has the first point of each index, and the number of all."""

    mesh: Mesh
    axes: tuple[str, ...]
    starts: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of points of each index."""
        return tuple(b - a for a, b in zip(self.starts, self.starts[1:], strict=False))

    def fold(self, init: Any, step: Any, merge: Any, points: Tensor, queries: Tensor,
             pull: Any = None) -> Any:  # fmt: skip
        """Return the fold over the blocks of points."""
        return ring_fold(init, step, merge, points, self.axes, operands=(queries,), pull=pull,
                         sizes=self.sizes, mesh=self.mesh)  # fmt: skip


def _nearest(ring: _PointRing, points: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return squared distances and indices of the nearest points, inf and -1 beyond all."""

    def step(block: Tensor, index: int, queries: Tensor) -> tuple[Tensor, Tensor] | None:
        if not len(block) or not k:
            return None
        order = _nearest_of(block, queries, min(k, len(block)))
        squares = (queries.unsqueeze(1) - block[order]).square().sum(-1)
        return squares, order + ring.starts[index]

    def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        squares, indices = torch.cat([a[0], b[0]], 1), torch.cat([a[1], b[1]], 1)
        # A stable sort by distance, of candidates in the order of their indices.
        by_index = indices.argsort(1)
        order = by_index.gather(1, squares.detach().gather(1, by_index).argsort(dim=1, stable=True))
        order = order[:, :k]
        return squares.gather(1, order), indices.gather(1, order)

    def pull(grads: Any, result: Any, block: Tensor, index: int, queries: Tensor) -> Any:
        indices = result[1]
        rows = torch.arange(len(queries), device=queries.device).repeat_interleave(k)
        return _pulled(grads[0].flatten(), rows, indices.flatten() - ring.starts[index], block,
                       queries)  # fmt: skip

    init = (queries.new_full((len(queries), k), math.inf),
            queries.new_full((len(queries), k), -1, dtype=torch.int64))  # fmt: skip
    squares, indices = ring.fold(init, step, merge, points, queries, pull)
    return squares, indices


def _all_within(
    ring: _PointRing, points: Tensor, queries: Tensor, radius: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return indices, distances and counts of all points within the radius, by query and index."""
    limit = radius * radius

    def step(block: Tensor, index: int, queries: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        found = [
            (part.square_distances(block) <= limit).nonzero() + part.offset
            for part in _chunks(queries.detach(), len(block))
        ]
        if not found:
            return None
        rows, columns = torch.cat(found).unbind(1)
        squares = (queries[rows] - block[columns]).square().sum(-1)
        return squares, rows, columns + ring.starts[index]

    def merge(a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(torch.cat(parts) for parts in zip(a, b, strict=True))

    def pull(grads: Any, result: Any, block: Tensor, index: int, queries: Tensor) -> Any:
        return _pulled(grads[0], result[1], result[2] - ring.starts[index], block, queries)

    nothing = queries.new_empty(0, dtype=torch.int64)
    init = queries.new_empty(0), nothing, nothing
    squares, rows, indices = ring.fold(init, step, merge, points, queries, pull)
    order = (rows * ring.starts[-1] + indices).argsort()
    counts = torch.zeros(len(queries), dtype=torch.int64, device=queries.device)
    counts = counts.index_add(0, rows, torch.ones_like(rows))
    return indices[order], _root(squares[order]), counts


def _counts(ring: _PointRing, points: Tensor, queries: Tensor, radius: float) -> Tensor:
    """Return the number of points within the radius of each query."""
    limit = radius * radius

    def step(block: Tensor, index: int, queries: Tensor) -> Tensor | None:
        found = [(part.square_distances(block) <= limit).sum(1)
                 for part in _chunks(queries, len(block))]  # fmt: skip
        return torch.cat(found) if found else None

    init = queries.new_zeros(len(queries), dtype=torch.int64)
    counts: Tensor = ring.fold(init, step, torch.add, points.detach(), queries.detach())
    return counts


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some queries, the first of which is number `first`."""

    queries: Tensor
    first: int

    @property
    def offset(self) -> Tensor:
        """Offset from a row of these queries and a column to a query and a column."""
        return self.queries.new_tensor([self.first, 0], dtype=torch.int64)

    def square_distances(self, block: Tensor) -> Tensor:
        """Return the squared distances of the queries to the points of a block."""
        return (self.queries.unsqueeze(1) - block).square().sum(-1)


def _chunks(queries: Tensor, n: int) -> Iterator[_Rows]:
    """Yield queries, so few at once that not many distances to n points are held."""
    size = max(1, MAX_DISTANCES // max(n * queries.shape[1], 1)) if n else 0
    for first in range(0, len(queries) if size else 0, max(size, 1)):
        yield _Rows(queries[first : first + size], first)


def _nearest_of(block: Tensor, queries: Tensor, k: int) -> Tensor:
    """Return the indices of the k nearest points of a block; of equal distances the lowest win."""
    chosen = []
    with torch.no_grad():
        for part in _chunks(queries, len(block)):
            squares = part.square_distances(block)
            nearest = squares.topk(k, 1, largest=False)
            order = nearest.indices
            if bool(((squares <= nearest.values[:, -1:]).sum(1) > k).any()):
                order = squares.argsort(dim=1, stable=True)[
                    :, :k
                ]  # ties, which `topk` breaks at will
            chosen.append(order)
        return torch.cat(chosen) if chosen else queries.new_empty((0, k), dtype=torch.int64)


def _pulled(
    grad: Tensor, rows: Tensor, columns: Tensor, block: Tensor, queries: Tensor
) -> tuple[Tensor, tuple[Tensor]]:
    """Return the gradients of a block and of the queries from those of squared distances.

    Columns that are not in the block belong to others.
    """
    inside = (columns >= 0) & (columns < len(block))
    rows, columns, grad = rows[inside], columns[inside], grad[inside]
    offsets = 2 * grad.unsqueeze(1) * (queries[rows] - block[columns])
    of_block = torch.zeros_like(block).index_add_(0, columns, offsets.neg())
    return of_block, (torch.zeros_like(queries).index_add_(0, rows, offsets),)


def _root(squares: Tensor) -> Tensor:
    """Return square roots, whose gradient at 0 and at inf is 0."""
    regular = (squares > 0) & (squares < math.inf)
    return torch.where(regular, torch.where(regular, squares, 1.0).sqrt(), squares.detach())


# -- pairs and bodies -------------------------------------------------------------------------

Search = Callable[[_PointRing, Tensor, Tensor], tuple[Tensor, ...]]
Widths = tuple[tuple[int, ...], ...] | None


def _run(
    where: str, search: Search, points: Any, queries: Any, axis_name: Axes | None,
    point_sizes: Sequence[int] | None, widths: Widths,
) -> Any:  # fmt: skip
    """Return the results of a search on pairs or on the tensors of a body.

    `widths` are the shapes of results without queries; None if their sizes depend on values.
    """
    if is_pair(points) or is_pair(queries):
        return _on_pairs(where, search, points, queries, widths)
    if axis_name is None:
        fail(where, "tensors without axis_name=", "points and queries must be pairs, or the "
             "tensors of a body, in which the axis has a name", 'axis_name="i" in fs.shard_map'
             )  # fmt: skip
    _check_shapes(where, points, queries)
    mesh, axes = resolve_axes(axis_name, None, where)
    sizes = sizes_along(where, "point_sizes", point_sizes, mesh, axes, points, len(points))
    return search(_PointRing(mesh, axes, tuple(accumulate(sizes, initial=0))), points, queries)


def _check_shapes(where: str, points: Any, queries: Any) -> None:
    shapes = [tuple(x.shape) for x in (points, queries)]
    if any(len(s) != 2 for s in shapes) or shapes[0][1] != shapes[1][1]:
        fail(where, f"points of shape {shapes[0]}, queries of shape {shapes[1]}",
             "both must have shape (number, width), with the same width",
             "x.reshape(-1, width)")  # fmt: skip
    if points.dtype != queries.dtype or not points.dtype.is_floating_point:
        fail(where, f"points of {points.dtype}, queries of {queries.dtype}",
             "both must have the same floating dtype", "x.to(torch.float32) of both")  # fmt: skip


def _on_pairs(where: str, search: Search, points: Any, queries: Any, widths: Widths) -> Any:
    pairs = pairs_on_one_mesh(where, (points, queries))
    specs = [pair.spec for pair in pairs]
    _check_shapes(where, *specs)
    raise_if(where, [
        problem for name, spec in zip(NAMES, specs, strict=True)
        for problem in _layout_problems(name, spec)
    ])  # fmt: skip
    mesh, axes = specs[0].mesh, specs[0].partition.dims[0]
    target = sliced(specs[1], 0, axes)
    pairs[1] = pairs[1] if target == specs[1] else reshard(pairs[1], target)
    specs[1] = target
    ring = _PointRing(mesh, axes, tuple(accumulate(specs[0].shard_sizes(0), initial=0)))
    used = [axis for spec in specs for dim in spec.partition.dims for axis in dim]

    def body(*xs: Tensor) -> tuple[Tensor, ...]:
        return search(ring, *(varying(x, s, used) for x, s in zip(xs, specs, strict=True)))

    if widths is None:
        return _ragged(body, pairs, target)
    dtypes = (torch.int64, target.dtype, torch.int64)
    specs_out = tuple(_with_width(target, w, d) for w, d in zip(widths, dtypes, strict=False))
    return local_map(body, out_specs=specs_out)(*pairs)


def _with_width(spec: Spec, width: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """Return a layout of the same rows, of other dims and dtype."""
    rows = spec.partition.dims[0] or None
    partition = PartitionSpec(rows, *[None] * len(width))
    sizes = {0: spec.sizes[0]}
    return Spec(spec.mesh, partition, shape=(spec.shape[0], *width), dtype=dtype, sizes=sizes)


def _ragged(
    body: Callable[..., tuple[Tensor, ...]], pairs: Sequence[Sharded], target: Spec
) -> tuple[Sharded, ...]:
    """Return the results of a search whose sizes depend on values.

    In the mapped function shards are padded to the largest one: its results have static layouts.
    """
    rows = target.partition.dims[0]
    # Not the size of a shard of an argument, from which a result would take uneven sizes.
    least = 1 + max(size for pair in pairs for size in pair.spec.shard_sizes(0))

    def padded(*xs: Tensor) -> tuple[Tensor, ...]:
        indices, distances, counts = body(*xs)
        size = torch.tensor(len(indices), device=counts.device)
        more = max(int(pmax(size, rows) if rows else size), least) - len(indices)
        pad = torch.nn.functional.pad
        return pad(indices, (0, more)), pad(distances, (0, more)), counts

    split = PartitionSpec(rows or None)
    out_specs = split, split, _with_width(target, (), torch.int64)
    *results, counts = local_map(padded, out_specs=out_specs)(*pairs)
    simulated = not isinstance(counts.local, Tensor)
    sizes = [int(shard.sum()) for shard in (counts.local if simulated else (counts.local,))]
    trimmed = []
    for pair in results:
        shards = pair.local if simulated else (pair.local,)
        shards = tuple(x[:size] for x, size in zip(shards, sizes, strict=True))
        trimmed.append(from_local(shards if simulated else shards[0], target.mesh, split))
    return (*trimmed, counts)


def _layout_problems(name: str, spec: Spec) -> list[Problem]:
    problems = []
    if spec.partition.dims[1]:
        problems.append(Problem(f"{name} of {spec}", "the width must be unsharded",
                                f"fs.reshard({name}, fs.P(...)) that shards the rows"))  # fmt: skip
    if spec.partition.unreduced_kinds:
        problems.append(Problem(f"{name} of {spec}", "it must not be unreduced",
                                f"fs.reshard({name}, fs.P(...)) adds the partial sums")
                        )  # fmt: skip
    return problems
