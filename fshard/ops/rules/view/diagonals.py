"""Rules of operations on diagonals, which on a part of a matrix are other diagonals.

A rank that holds the rows from `b` on sees the diagonal `k` as `k + b`, one that holds the columns
from `b` on as `k - b`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from fshard.ops.core.builders import all_modes, wrap_dim
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.view.view_factors import factor_names, letter_dims
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    RankContext,
    with_argument,
    with_local_shape,
)

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class _LocalDiagonal:
    """A local call with the number of a diagonal as the rank sees it."""

    name: str
    rows: int
    columns: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        shift = ctx.offset(0, self.rows) - ctx.offset(0, self.columns)
        given = argument(op, args, kwargs, self.name)
        _, placed, named = with_argument(op, args, kwargs, self.name, given + shift)
        return op(*placed, **named)


@register_rule("tril", "triu")
def triangle(call: OpCall) -> Rule:
    """Every dim can be cut. What is not taken is zero, which every reduction leaves so."""
    ndim = call.operands[0].ndim
    dims = letter_dims(ndim)
    return Rule(
        (dims,), (dims,), modes=all_modes(0), local=_LocalDiagonal("diagonal", ndim - 2, ndim - 1)
    )


def diagonal_dims(call: OpCall) -> tuple[int, int, int]:
    """The number of the diagonal, and the dims that it runs through."""
    ndim = call.operands[0].ndim
    name = "offset" if call.has("offset") else "diagonal"
    given = [call.get(each) if call.has(each) else at for at, each in enumerate(("dim1", "dim2"))]
    return call.get(name), wrap_dim(given[0], ndim), wrap_dim(given[1], ndim)


@register_rule("diagonal", "diagonal_copy", "linalg_diagonal")
def diagonal(call: OpCall) -> Rule:
    """The dim that the diagonal runs through from end to end can be cut, if there is one."""
    x, result = call.operands[0], call.result
    offset, rows, columns = diagonal_dims(call)
    names = factor_names(x.ndim)
    own: Dims = tuple((name,) for name in names)
    along = None
    if offset >= 0 and x.shape[rows] <= x.shape[columns] - offset:
        along = rows
    elif offset <= 0 and x.shape[columns] <= x.shape[rows] + offset:
        along = columns
    kept = tuple(own[at] for at in range(x.ndim) if at not in (rows, columns))
    lost = frozenset(names[at] for at in (rows, columns) if at != along)
    name = "offset" if call.has("offset") else "diagonal"
    return Rule((own,), ((*kept, () if along is None else own[along]),), unsharded=lost,
                modes=all_modes(0), local=_LocalDiagonal(name, rows, columns))  # fmt: skip


def _embed_locally(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    x: torch.Tensor = args[0]
    begin, end = ctx.offset(0, x.ndim - 1), ctx.end(0, x.ndim - 1)
    if begin == 0 and ctx.is_unsharded(0, x.ndim - 1):
        made: torch.Tensor = op(*args, **kwargs)
        return made
    whole = ctx.operands[0].shape[-1]
    square = pad(torch.diag_embed(x), (begin, whole - end))
    at = (-2, -1) if "diag_embed" not in str(op) else (
        argument(op, args, kwargs, "dim1"), argument(op, args, kwargs, "dim2"))  # fmt: skip
    return square.movedim((-2, -1), at)


@register_rule("diag_embed")
def embedded(call: OpCall) -> Rule:
    """Matrices whose main diagonal is cut have their rows cut so."""
    x, result = call.operands[0], call.result
    offset = call.get("offset")
    rows, columns = wrap_dim(call.get("dim1"), result.ndim), wrap_dim(call.get("dim2"), result.ndim)
    own = letter_dims(x.ndim)
    left = iter(own[:-1])
    last = own[-1] if not offset else ()
    made = tuple(
        last if at == rows else () if at == columns else next(left) for at in range(result.ndim)
    )
    return Rule((own,), (made,), unsharded=frozenset() if not offset else frozenset(own[-1]),
                modes=all_modes(0), local=_embed_locally)  # fmt: skip


@register_rule("diag")
def diag(call: OpCall) -> Rule:
    """A vector's matrix, or a matrix's diagonal."""
    if call.operands[0].ndim == 2:
        found: Rule = diagonal(call)
        return found
    if call.get("diagonal"):
        return Rule(((("a",),),), (((), ()),), unsharded=frozenset("a"), modes=all_modes(0))
    return Rule(((("a",),),), ((("a",), ()),), modes=all_modes(0), local=_embed_locally)


@register_rule("diagflat")
def diagflat(call: OpCall) -> Rule:
    """The matrix of all elements: they are needed whole."""
    names = factor_names(call.operands[0].ndim)
    return Rule((tuple((name,) for name in names),), (((), ()),), unsharded=frozenset(names),
                modes=all_modes(0))  # fmt: skip


@register_rule("diagonal_scatter", "diagonal_backward")
def into_diagonal(call: OpCall) -> Rule:
    """The two dims of the matrices are whole; others pass."""
    result = call.result
    rows, columns = (wrap_dim(call.get(each), result.ndim) for each in ("dim1", "dim2"))
    names = factor_names(result.ndim)
    whole: Dims = tuple(() if at in (rows, columns) else (name,) for at, name in enumerate(names))
    line = (*(each for at, each in enumerate(whole) if at not in (rows, columns)), ())
    if len(call.operands) == 1:
        return Rule((line,), (whole,), modes=all_modes(0), local=with_local_shape("input_sizes"))
    return Rule((whole, line), (whole,), modes=all_modes(0, 1))
