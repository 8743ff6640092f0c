"""Neighborhood attention of a block of queries to the keys that it reads, and its gradient.

Queries are tiled. A tile reads the keys from the first of its first query to the last of its last
one, and attends to them densely, under a mask: a product of matrices for each tile. With a dilation
the positions of each residue are a dim of their own, in which neighborhoods are contiguous.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.ops.rules.reduce.moments import wide

TILES = {1: 64, 2: 8, 3: 4}
"""Queries of a tile along each dim, by the number of spatial dims."""
MAX_SCORES = 1 << 22
"""Scores that are computed at once."""


@dataclass(frozen=True, slots=True)
class Side:
    """One spatial dim of a block.

    Attributes:
        start: position of the first query.
        first: position of the first key.
        size: number of elements of the global dim.
        kernel: number of keys that a query attends to.
        dilation: distance of these keys.
        causal: whether they end with the query, and are fewer at the begin of the dim.
    """

    start: int
    first: int
    size: int
    kernel: int
    dilation: int = 1
    causal: bool = False

    def residue(self, residue: int) -> tuple[int, int, Side]:
        """Return the first query and key of a residue, and the dim of its elements alone."""
        step = self.dilation
        query, key = (residue - self.start) % step, (residue - self.first) % step
        side = Side((self.start + query) // step, (self.first + key) // step,
                    -(-(self.size - residue) // step), self.kernel, 1, self.causal)  # fmt: skip
        return query, key, side

    def begins(self, positions: Tensor) -> Tensor:
        """Return the first key of queries, which is below 0 where a causal query has fewer."""
        if self.causal:
            return positions - (self.kernel - 1)
        return (positions - self.kernel // 2).clamp(0, self.size - self.kernel)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Tiles of one dim: indices of their queries and keys, and the mask of keys.

    Attributes:
        rows: queries, shape (tiles, rows); the last one repeats.
        columns: keys, shape (tiles, columns).
        mask: True where a query attends to a key, shape (tiles, rows, columns).
        real: False for repeated queries, shape (tiles, rows).
    """

    rows: Tensor
    columns: Tensor
    mask: Tensor
    real: Tensor

    @staticmethod
    def of(side: Side, queries: int, keys: int, tile: int, device: torch.device) -> _Tiling:
        """Return the tiles of a dim of undilated neighborhoods."""
        tile = min(tile, queries)
        count, width = -(-queries // tile), min(tile + side.kernel - 1, keys)
        numbers = torch.arange(count * tile, device=device).view(count, tile)
        rows = numbers.clamp_max(queries - 1)
        begins = side.begins(rows + side.start) - side.first
        starts = begins[:, :1].clamp(0, keys - width)
        columns = starts + torch.arange(width, device=device)
        offsets = columns.unsqueeze(1) - begins.unsqueeze(2)
        mask = (offsets >= 0) & (offsets < side.kernel)
        return _Tiling(rows, columns, mask, numbers < queries)

    def part(self, first: int, last: int) -> _Tiling:
        """Return some tiles."""
        part = slice(first, last)
        return _Tiling(self.rows[part], self.columns[part], self.mask[part], self.real[part])


def attend(q: Tensor, k: Tensor, v: Tensor, sides: Sequence[Side], scale: float) -> Tensor:
    """Return the attention of a block of queries.

    Args:
        q: shape (batch, *queries, heads, width).
        k: the keys that the block reads, shape (batch, *keys, heads, width).
        v: their values, shape (batch, *keys, heads, value width).
        sides: the spatial dims.
        scale: the factor of the scores.
    """
    out = v.new_zeros((*q.shape[:-1], v.shape[-1]))
    q, k, v = map(wide, (q, k, v))
    for queries, keys, undilated in _residues(sides):
        if 0 not in out[queries].shape:
            out[queries] = _attend(q[queries], k[keys], v[keys], undilated, scale)
    return out


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sides: Sequence[Side], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries, keys and values of `attend` for a cotangent."""
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    grad, q, k, v = map(wide, (grad, q, k, v))
    for queries, keys, undilated in _residues(sides):
        if 0 in grad[queries].shape:
            continue
        parts = _gradients(grad[queries], q[queries], k[keys], v[keys], undilated, scale)
        for total, part, indices in zip(grads, parts, (queries, keys, keys), strict=True):
            total[indices] = part
    return grads  # type: ignore[return-value]


Indices = tuple[slice, ...]


def _residues(sides: Sequence[Side]) -> Iterator[tuple[Indices, Indices, list[Side]]]:
    """Yield the queries and keys of each combination of residues, and its spatial dims."""
    for residues in itertools.product(*(range(side.dilation) for side in sides)):
        parts = [side.residue(r) for side, r in zip(sides, residues, strict=True)]
        starts = zip(*((query, key) for query, key, _ in parts), strict=True)
        queries, keys = (
            (slice(None), *(slice(first, None, side.dilation)
                            for first, side in zip(firsts, sides, strict=True)))
            for firsts in starts
        )  # fmt: skip
        yield queries, keys, [side for _, _, side in parts]


def _attend(q: Tensor, k: Tensor, v: Tensor, sides: Sequence[Side], scale: float) -> Tensor:
    """Return the attention of undilated neighborhoods, in the dtype of sums."""
    outs = []
    for tilings in _parts(q, k, sides):
        rows, columns = [t.rows for t in tilings], [t.columns for t in tilings]
        weights = _weights(_tiles(q, rows), _tiles(k, columns), tilings, scale)
        outs.append(_untiled(weights @ _tiles(v, columns), rows))
    return _first(torch.cat(outs, 1), q)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sides: Sequence[Side], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of undilated neighborhoods, in the dtype of sums."""
    of_queries, of_keys, of_values = [], torch.zeros_like(k), torch.zeros_like(v)
    for tilings in _parts(q, k, sides):
        rows, columns = [t.rows for t in tilings], [t.columns for t in tilings]
        q_tile, k_tile, v_tile = _tiles(q, rows), _tiles(k, columns), _tiles(v, columns)
        g = _tiles(grad, rows) * _outer([t.real for t in tilings]).unsqueeze(-1)
        weights = _weights(q_tile, k_tile, tilings, scale)
        kept = g @ v_tile.mT
        of_scores = weights * (kept - (weights * kept).sum(-1, keepdim=True)) * scale
        of_queries.append(_untiled(of_scores @ k_tile, rows))
        for total, part in ((of_keys, of_scores.mT @ q_tile), (of_values, weights.mT @ g)):
            _add_tiles(total, _untiled(part, columns), columns)
    return _first(torch.cat(of_queries, 1), q), of_keys, of_values


def _parts(q: Tensor, k: Tensor, sides: Sequence[Side]) -> Iterator[list[_Tiling]]:
    """Yield tiles, so few along the first dim that not many scores are computed at once."""
    tilings = [
        _Tiling.of(side, q.shape[1 + i], k.shape[1 + i], TILES[len(sides)], q.device)
        for i, side in enumerate(sides)
    ]
    scores = math.prod(t.mask.numel() for t in tilings) // len(tilings[0].mask)
    step = max(1, MAX_SCORES // max(1, q.shape[0] * q.shape[-2] * scores))
    for first in range(0, len(tilings[0].rows), step):
        yield [tilings[0].part(first, first + step), *tilings[1:]]


def _tiles(x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Return the tiles of a tensor, shape (batch, *tiles, heads, elements, width)."""
    n = len(indices)
    for i, of_dim in enumerate(indices):
        x = x.index_select(1 + 2 * i, of_dim.flatten()).unflatten(1 + 2 * i, of_dim.shape)
    tiles, elements = range(1, 1 + 2 * n, 2), range(2, 2 + 2 * n, 2)
    x = x.permute(0, *tiles, 1 + 2 * n, *elements, 2 + 2 * n)
    return x.flatten(2 + n, 1 + 2 * n)


def _untiled(x: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Return tiles one after the other along each dim, shape (batch, *spatial, heads, width)."""
    n = len(indices)
    x = x.unflatten(2 + n, [of_dim.shape[1] for of_dim in indices])
    order = [dim for i in range(n) for dim in (1 + i, 2 + n + i)]
    x = x.permute(0, *order, 1 + n, 2 + 2 * n)
    for i in range(n):
        x = x.flatten(1 + i, 2 + i)
    return x


def _add_tiles(total: Tensor, x: Tensor, indices: Sequence[Tensor]) -> None:
    """Add the elements of tiles of keys to the keys."""
    for i, of_dim in reversed(list(enumerate(indices))):
        shape = list(x.shape)
        shape[1 + i] = total.shape[1 + i]
        x = x.new_zeros(shape).index_add_(1 + i, of_dim.flatten(), x)
    total.add_(x)


def _first(x: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of tiles without the queries that repeat at the ends."""
    return x[tuple(slice(size) for size in like.shape[:-2])]


def _weights(q: Tensor, k: Tensor, tilings: Sequence[_Tiling], scale: float) -> Tensor:
    """Return the weights of tiles, shape (batch, *tiles, heads, queries, keys)."""
    scores = (q @ k.mT) * scale
    mask = _outer([t.mask for t in tilings])
    return scores.masked_fill(mask.logical_not(), -math.inf).softmax(-1)


def _outer(masks: Sequence[Tensor]) -> Tensor:
    """Return the outer conjunction of masks (tiles, ...), shape (*tiles, 1, *products)."""
    n, order = len(masks), masks[0].dim() - 1
    result = masks[0].new_ones([1] * (n * (1 + order)))
    for i, mask in enumerate(masks):
        shape = [1] * (n * (1 + order))
        for j, size in enumerate(mask.shape):
            shape[j * n + i] = size
        result = result & mask.view(shape)
    flat = [math.prod(mask.shape[1 + j] for mask in masks) for j in range(order)]
    return result.reshape(*result.shape[:n], 1, *flat)


# -- by operations of PyTorch ------------------------------------------------------------------


def attend_by_windows(
    q: Tensor, k: Tensor, v: Tensor, sides: Sequence[Side], scale: float
) -> Tensor:
    """Return `attend` of all queries and keys, by operations that are differentiable repeatedly.

    It holds the keys and values of every neighborhood.
    """
    mask = None
    for i, side in enumerate(sides):
        k, v = (_windows(x, 1 + i, side) for x in (k, v))
        if side.causal:
            steps = torch.arange(side.kernel, device=q.device) - (side.kernel - 1)
            positions = torch.arange(side.size, device=q.device).unsqueeze(1)
            inside = positions + side.dilation * steps >= 0
            shape = [1] * (len(sides) + 3 + i + 1)
            shape[1 + i], shape[-1] = inside.shape
            inside = inside.view(shape)
            mask = inside if mask is None else mask.unsqueeze(-1) & inside
        elif mask is not None:
            mask = mask.unsqueeze(-1)
    n = len(sides)
    k, v = (x.flatten(-n) for x in (k, v))
    scores = (q.unsqueeze(-1) * k).sum(-2) * scale
    if mask is not None:
        taps = [side.kernel for side in sides]
        mask = mask.expand(*mask.shape[:-n], *taps).flatten(-n).squeeze(-2)
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    return (scores.softmax(-1).unsqueeze(-2) * v).sum(-1)


def _windows(x: Tensor, dim: int, side: Side) -> Tensor:
    """Return the neighborhoods of all positions along a dim, as a new last dim."""
    step, reach = side.dilation, side.dilation * (side.kernel - 1)
    if side.causal:
        pads = [0, 0] * (x.dim() - 1 - dim) + [reach, 0]
        return torch.nn.functional.pad(x, pads).unfold(dim, reach + 1, 1)[..., ::step]
    x = x.unfold(dim, reach + 1, 1)[..., ::step]
    before, after = side.kernel // 2, side.kernel - 1 - side.kernel // 2
    ends = x.narrow(dim, 0, step), x.narrow(dim, x.shape[dim] - step, step)
    return torch.cat([*[ends[0]] * before, x, *[ends[1]] * after], dim)
