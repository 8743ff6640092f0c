"""Attention over keys that move around a ring, on the locals of one rank.

Each rank keeps its queries; blocks of keys and values pass, and their contributions merge by
log-sum-exps. Backward, they pass once more with the log-sum-exps over all keys (ring attention,
arXiv 2310.01889). A rank's memory and work grow with its share of the sequence.

The peak of memory is backward. With queries, keys, values and results of one size s on each rank it
is 17 s: operands and result (4 s), a block of keys and values that is sent on while it is used and
the one that arrives (4 s), the same of their gradients (4 s), the gradients of one block (3 s), and
the sum of those of the queries before and after it (2 s); and 1 s more for a cotangent that is not
the result. On two ranks no block of gradients is sent on while another arrives: 13 s. A single rank
sends nothing: 7 s.

Causal masks follow from positions: every rank's rows are intervals of the global sequence, one in
contiguous order, two in zigzag order, in which all ranks have equal work. Rectangles of scores
without a visible one are skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.domain.block_attention import Attended, Attention, Interval, ScorePiece, merge_attended
from fshard.layout.mesh import Mesh
from fshard.spmd.collectives.ring import ring_of
from fshard.spmd.collectives.ring_fold import NAME, fold_on, run_typed

Intervals = tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention of the queries of one rank to the keys of all.

    Attributes:
        mesh: the mesh of the axes.
        axes: the axes along which keys are sharded.
        queries: the intervals of the global sequence that this rank's queries are.
        keys: intervals of the keys of every index along the axes.
        causal: whether a query attends only to keys at its position and before.
        attention: the options of each block.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    queries: Intervals
    keys: tuple[Intervals, ...]
    causal: bool
    attention: Attention

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the outputs, shape (batch, heads, queries, value width), in the dtype of `q`.

        Args:
            q: shape (batch, heads, queries, width).
            k: shape (batch, heads, keys, width); fewer heads are shared by groups of query heads.
            v: shape (batch, heads, keys, value width).
            mask: mask that broadcasts to (batch, heads, queries, keys of all ranks), or None.
        """
        dtype = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
        init = (
            q.new_zeros((), dtype=dtype).expand(*q.shape[:-1], v.shape[-1]),
            q.new_full((), -torch.inf, dtype=dtype).expand(q.shape[:-1]),
        )
        sizes = tuple(map(_total, self.keys))
        is_even = len({*sizes}) == 1
        ring = ring_of(NAME, self.mesh, self.axes, (k, v), -2, None if is_even else sizes)

        def run(xs: tuple[Tensor, ...]) -> Attended:
            k, v, *operands = xs
            return fold_on(ring, init, self.step, merge_attended, (k, v), tuple(operands),
                           self.pull, reads_result=True, starts_with_part=True)  # fmt: skip

        operands = (q,) if mask is None else (q, mask)
        out, _ = run_typed(NAME, self.axes, run, (k, v, *operands))
        return out.to(q.dtype)

    def step(
        self, block: tuple[Tensor, Tensor], index: int, q: Tensor, mask: Tensor | None = None
    ) -> Attended | None:
        """Return outputs and log-sum-exps over one block of keys, None if none is visible."""
        total: Attended | None = None
        key, value = (_for_heads(x, q) for x in block)
        for piece in self.pieces(index):
            rows, columns = piece.rows, piece.columns
            part = self.attention.forward(
                _rows_of(q, rows), _rows_of(key, columns), _rows_of(value, columns),
                self.part_of(mask, piece, index), piece,
            )  # fmt: skip
            padded = _padded(part, piece.rows, q.shape[-2])
            total = padded if total is None else merge_attended(total, padded)
        return total

    def pull(
        self, grads: Attended, result: Attended, block: tuple[Tensor, Tensor], index: int,
        q: Tensor, mask: Tensor | None = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Return the gradients of a block and of the operands, from the result over all keys."""
        of_mask = mask is not None and mask.requires_grad
        key, value = (_for_heads(x, q) for x in block)
        dmask = torch.zeros_like(mask) if of_mask and mask is not None else None
        total: list[Tensor] | None = None
        for piece in self.pieces(index):
            rows, columns = piece.rows, piece.columns
            *grads_of, of_bias = self.attention.backward(
                _rows_of(grads[0], rows), _rows_of(result[0], rows), _rows_of(result[1], rows, -1),
                _rows_of(q, rows), _rows_of(key, columns), _rows_of(value, columns),
                self.part_of(mask, piece, index), piece, of_mask,
            )  # fmt: skip
            if dmask is not None and of_bias is not None:
                self.part_of(dmask, piece, index).add_(of_bias)
            intervals = piece.rows, piece.columns, piece.columns
            if total is None:
                sizes = q.shape[-2], key.shape[-2], key.shape[-2]
                total = [
                    _extended(g, i, n) for g, i, n in zip(grads_of, intervals, sizes, strict=True)
                ]
                continue
            for g, part, interval in zip(total, grads_of, intervals, strict=True):
                g[..., slice(*interval), :] += part
        if total is None:
            return None, None
        dq, dk, dv = total
        of_block = (_of_block(dk, block[0]), _of_block(dv, block[1]))
        return of_block, (dq.to(q.dtype), dmask)[: 1 if mask is None else 2]

    def pieces(self, index: int) -> Iterator[ScorePiece]:
        """Yield the rectangles of scores between this rank's queries and a block of keys."""
        queries, keys = self.queries, self.keys[index]
        if not self.causal and self.attention.drop is None:
            # Positions have no effect.
            queries, keys = (((0, _total(side)),) for side in (queries, keys))
        for row, column in itertools.product(_with_starts(queries), _with_starts(keys)):
            yield from _rectangles(*row, *column) if self.causal else _all_of(*row, *column)

    def part_of(self, mask: Any, piece: ScorePiece, index: int) -> Any:
        """Return the part of a mask for a piece of the scores of an index."""
        if mask is None:
            return None
        offset = sum(map(_total, self.keys[:index]))
        first, last = piece.columns
        if mask.shape[-1] > 1:
            mask = mask[..., offset + first : offset + last]
        return mask[..., slice(*piece.rows), :] if mask.shape[-2] > 1 else mask


def _total(intervals: Intervals) -> int:
    return sum(last - first for first, last in intervals)


def _with_starts(intervals: Intervals) -> Iterator[tuple[int, Interval]]:
    """Yield the intervals of a local, each with the local index at which it begins."""
    start = 0
    for first, last in intervals:
        yield start, (first, last)
        start += last - first


def _all_of(row: int, queries: Interval, column: int, keys: Interval) -> Iterator[ScorePiece]:
    """Yield the scores of two intervals as one piece, if there are any."""
    height, width = queries[1] - queries[0], keys[1] - keys[0]
    if height and width:
        yield ScorePiece((row, row + height), (column, column + width), queries[0], keys[0], False)


def _rectangles(row: int, queries: Interval, column: int, keys: Interval) -> Iterator[ScorePiece]:
    """Yield the visible scores of two intervals: all keys before the queries, and a triangle."""
    (first, last), (begin, end) = queries, keys
    row, column = row - first, column - begin  # from global positions to local indices
    before = min(first, end)
    if begin < before and first < last:
        rows, columns = (row + first, row + last), (column + begin, column + before)
        yield ScorePiece(rows, columns, first, begin, False)
    start, stop = max(first, begin), min(last, end)
    if start < stop:
        rows, columns = (row + start, row + last), (column + start, column + stop)
        yield ScorePiece(rows, columns, start, start, True)


def _padded(part: Attended, rows: Interval, n: int) -> Attended:
    """Return results of some rows as those of n rows; the others attend to nothing."""
    out, lse = part
    if rows == (0, n):
        return part
    before, after = rows[0], n - rows[1]
    out = torch.nn.functional.pad(out, (0, 0, before, after))
    return out, torch.nn.functional.pad(lse, (before, after), value=-torch.inf)


def _rows_of(x: Tensor, rows: Interval, dim: int = -2) -> Tensor:
    """Return a view of some rows of a tensor, itself if they are all."""
    size = rows[1] - rows[0]
    return x if size == x.shape[dim] else x.narrow(dim, rows[0], size)


def _extended(x: Tensor, rows: Interval, n: int) -> Tensor:
    """Return a tensor of some rows as one of n rows, zero elsewhere."""
    before, after = rows[0], n - rows[1]
    return torch.nn.functional.pad(x, (0, 0, before, after)) if before or after else x


def _for_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for every batch and head of the queries."""
    if x.shape[1] not in (1, q.shape[1]):
        x = x.repeat_interleave(q.shape[1] // x.shape[1], 1)
    return x if x.shape[:2] == q.shape[:2] else x.expand(*q.shape[:2], *x.shape[2:])


def _of_block(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a block of fewer heads, summed over those that share one."""
    if x.shape[1] not in (1, grad.shape[1]):
        grad = grad.unflatten(1, (x.shape[1], -1)).sum(2)
    return grad.sum_to_size(x.shape).to(x.dtype)


# -- orders of the sequence -------------------------------------------------------------------


def contiguous(sizes: Sequence[int]) -> tuple[Intervals, ...]:
    """Return the intervals of each index, one after the other.

    >>> contiguous((3, 0, 2))
    (((0, 3),), ((3, 3),), ((3, 5),))
    """
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(((first, last),) for first, last in itertools.pairwise(ends))


def zigzag(size: int, n: int) -> tuple[Intervals, ...]:
    """Return the intervals of each of n indices in zigzag order: chunks i and 2n - 1 - i of 2n.

    >>> zigzag(8, 2)
    (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    """
    ends = [size * i // (2 * n) for i in range(2 * n + 1)]
    chunks = list(itertools.pairwise(ends))
    return tuple((chunks[i], chunks[2 * n - 1 - i]) for i in range(n))
