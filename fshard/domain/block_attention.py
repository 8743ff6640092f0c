"""Attention of queries to one block of keys, with log-sum-exps that merge blocks, and its gradient.

The results of two disjoint blocks of keys, each a normalized output and the logarithm of its sum of
exponentials, merge to those of their union. From the log-sum-exps and outputs over all keys, the
gradient of each block follows alone, as in FlashAttention (arXiv 2205.14135). On CPUs
PyTorch's fused kernel computes both where it can; else scores are computed for some rows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fshard.ops.rules.reduce.moments import wide

aten = torch.ops.aten
MAX_SCORES = 1 << 22
"""Scores that are computed at once, without a fused kernel."""
CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

Interval = tuple[int, int]
"""First position in the global sequence, and one past the last."""
Drop = Callable[[Interval, Interval], Tensor]
"""Function from intervals of queries and of keys to the factors of a dropout of their weights."""


class ScorePiece(NamedTuple):
    """Rectangle of scores: rows and columns of locals, and the global positions of the first ones.

    If it is `causal`, row i attends to the columns up to i.
    """

    rows: Interval
    columns: Interval
    row: int
    column: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """Options of one attention: the factor of scores, and the dropout of weights."""

    scale: float
    drop: Drop | None = None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, piece: ScorePiece
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and log-sum-exps of the rows of a piece; rows without keys have -inf.

        Args:
            q: queries of the piece, shape (batch, heads, rows, width).
            k: its keys, shape (batch, heads, columns, width).
            v: its values, shape (batch, heads, columns, value width).
            mask: its mask, boolean or additive, which broadcasts to the scores, or None.
            piece: the piece.
        """
        if self._fused(q, v):
            bias = _bias(mask, q, k, piece)
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, piece.causal and bias is None, attn_mask=bias, scale=self.scale
            )
            if bias is not None:  # the kernel returns 0 for rows without keys
                lse = lse.masked_fill((bias == -math.inf).all(-1), -math.inf)
            return wide(out), lse
        parts = [self._rows(q, k, v, mask, piece, rows) for rows in self._chunks(q, k)]
        if len(parts) == 1:
            return parts[0]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, -2), torch.cat(lses, -1)

    def backward(
        self, grad: Tensor, out: Tensor, lse: Tensor,
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, piece: ScorePiece, of_mask: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Return the gradients of a piece's queries, keys, values and, if `of_mask`, of its mask.

        Args:
            grad: cotangents of the outputs over all keys, for the rows of the piece.
            out: these outputs.
            lse: the log-sum-exps over all keys.
            q: queries, and so on as for `forward`.
            k: keys.
            v: values.
            mask: mask.
            piece: the piece.
            of_mask: whether the gradient of the mask is requested.
        """
        lse = lse.masked_fill(lse == -math.inf, 0.0)  # rows without keys have no weights
        if self._fused(q, v) and not of_mask:
            dtype, bias = q.dtype, _bias(mask, q, k, piece)
            dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad.to(dtype), q, k, v, out.to(dtype), lse, 0.0, piece.causal and bias is None,
                attn_mask=bias, scale=self.scale,
            )  # fmt: skip
            return wide(dq), wide(dk), wide(dv), None
        q, k, v = wide(q), wide(k), wide(v)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        of_queries, score_grads = [], []
        for first, last in self._chunks(q, k):
            rows = slice(first, last)
            part, g = q[..., rows, :], grad[..., rows, :]
            scores = self._scores(part, k, mask, piece, (first, last))
            weights = (scores - lse[..., rows, None]).exp()
            kept = g @ v.mT
            if self.drop is not None:
                factor = self._factors(piece, (first, last))
                kept, dropped = kept * factor, weights * factor
            else:
                dropped = weights
            dv += dropped.mT @ g
            delta = (g * out[..., rows, :]).sum(-1, keepdim=True)
            of_scores = weights * (kept - delta)
            of_queries.append(of_scores @ k * self.scale)
            dk += of_scores.mT @ part * self.scale
            if of_mask:
                score_grads.append(of_scores)
        dmask = None
        if of_mask and mask is not None:
            dmask = torch.cat(score_grads, -2).sum_to_size(mask.shape)
        return torch.cat(of_queries, -2), dk, dv, dmask

    def _fused(self, q: Tensor, v: Tensor) -> bool:
        """Return True if the kernel computes this, once differentiable."""
        return (
            q.device.type == "cpu"
            and q.dtype in CPU_DTYPES
            and q.shape[-1] == v.shape[-1]
            and self.drop is None
            and not torch.is_grad_enabled()
        )

    def _chunks(self, q: Tensor, k: Tensor) -> Iterator[Interval]:
        """Yield intervals of rows; one of all where derivatives of the operations are taken."""
        n = q.shape[-2]
        scores = math.prod(q.shape[:-2]) * k.shape[-2]
        at_once = torch.is_grad_enabled() or q.is_meta
        size = n if at_once else max(1, MAX_SCORES // max(scores, 1))
        for first in range(0, n, max(size, 1)):
            yield first, min(first + size, n)

    def _rows(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, piece: ScorePiece,
        rows: Interval,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return outputs and log-sum-exps of some rows."""
        q, k, v = wide(q[..., slice(*rows), :]), wide(k), wide(v)
        scores = self._scores(q, k, mask, piece, rows)
        largest = scores.detach().amax(-1, keepdim=True)
        largest = largest.masked_fill(largest == -math.inf, 0.0)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        is_empty = total == 0
        total = total.masked_fill(is_empty, 1.0)
        lse = (largest + total.log()).masked_fill(is_empty, -math.inf)
        if self.drop is not None:
            weights = weights * self._factors(piece, rows)
        return (weights @ v) / total, lse.squeeze(-1)

    def _scores(
        self, q: Tensor, k: Tensor, mask: Tensor | None, piece: ScorePiece, rows: Interval
    ) -> Tensor:
        """Return the scores of some rows, -inf where they do not attend."""
        scores = (q @ k.mT) * self.scale
        if piece.causal:
            scores = scores.masked_fill(_future(q, k, rows[0]), -math.inf)
        if mask is None:
            return scores
        mask = mask[..., slice(*rows), :] if mask.shape[-2] > 1 else mask
        if mask.dtype == torch.bool:
            return scores.masked_fill(mask.logical_not(), -math.inf)
        return scores + mask

    def _factors(self, piece: ScorePiece, rows: Interval) -> Tensor:
        """Return the factors of dropout of some rows of a piece."""
        assert self.drop is not None
        width = piece.columns[1] - piece.columns[0]
        return self.drop(
            (piece.row + rows[0], piece.row + rows[1]), (piece.column, piece.column + width)
        )


def _bias(mask: Tensor | None, q: Tensor, k: Tensor, piece: ScorePiece) -> Tensor | None:
    """Return a mask, with that of a causal piece, as an additive one of the queries' dtype."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)
    else:
        bias = mask.to(q.dtype)
    return bias.masked_fill(_future(q, k), -math.inf) if piece.causal else bias


def _future(q: Tensor, k: Tensor, first: int = 0) -> Tensor:
    """Return the mask of keys after the queries, the first of which is at the key `first`."""
    rows = torch.arange(first, first + q.shape[-2], device=q.device).unsqueeze(-1)
    return torch.arange(k.shape[-2], device=q.device) > rows


Attended = tuple[Tensor, Tensor]


NEGLIGIBLE = 40.0
"""Difference of log-sum-exps from which on the smaller one counts as this: exp(-40) is 4e-18."""


def merge_attended(a: Attended, b: Attended) -> Attended:
    """Return outputs and log-sum-exps over two disjoint blocks of keys.

    Log-sum-exps of -inf are those of rows without keys. Where derivatives are taken, they have
    finite bounds, so that these exist.
    """
    if not torch.is_grad_enabled():
        share = (b[1] - a[1]).sigmoid_().nan_to_num_(0.0)  # of -inf and -inf
        return torch.lerp(a[0], b[0], share.unsqueeze(-1)), torch.logaddexp(a[1], b[1])
    least = torch.finfo(a[1].dtype).min
    floor = torch.maximum(a[1], b[1]).detach().clamp_min(least) - NEGLIGIBLE
    first, second = a[1].clamp_min(floor), b[1].clamp_min(floor)
    share, lse = torch.sigmoid(second - first), torch.logaddexp(first, second)
    return torch.lerp(a[0], b[0], share.unsqueeze(-1)), lse.masked_fill(lse < least / 2, -math.inf)
