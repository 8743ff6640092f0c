"""Rules of operations on diagonals.

tril, triu, diagonal, diag, diagflat, diag_embed, diagonal_scatter.

The diagonal `k` of a matrix is `k + b` in a shard that begins at row `b`, and `k - b` in one that
begins at column `b`.
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
from fshard.ops.rules.shard_call import call_with
from fshard.ops.rules.view.view_factors import factor_names, letter_dims
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, WithLocalShape


@dataclass(frozen=True, slots=True)
class _LocalDiagonal:
    """Local call with the diagonal's number in the rank's shard."""

    name: str
    rows: int
    columns: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        shift = ctx.offset(0, self.rows) - ctx.offset(0, self.columns)
        number = argument(op, args, kwargs, self.name)
        return call_with(op, args, kwargs, **{self.name: number + shift})


@register_rule("tril", "triu")
def triangle(call: OpCall) -> Rule:
    """Rule `ab->ab` of `tril` and `triu`; reductions keep zeros, so operands may be unreduced."""
    ndim = call.operands[0].ndim
    dims = letter_dims(ndim)
    return Rule((dims,), (dims,), modes=all_modes(0),
                local=_LocalDiagonal("diagonal", ndim - 2, ndim - 1))  # fmt: skip


def diagonal_dims(call: OpCall) -> tuple[int, int, int]:
    """Return the diagonal's number and its two dims."""
    ndim = call.operands[0].ndim
    name = "offset" if call.has("offset") else "diagonal"
    dims = [
        call.get(key) if call.has(key) else default for default, key in enumerate(("dim1", "dim2"))
    ]
    return call.get(name), wrap_dim(dims[0], ndim), wrap_dim(dims[1], ndim)


@register_rule("diagonal", "diagonal_copy", "linalg_diagonal")
def diagonal(call: OpCall) -> Rule:
    """Rule `abc->ab` of `diagonal`: `b`, which it covers from end to end, may be sharded."""
    x = call.operands[0]
    offset, rows, columns = diagonal_dims(call)
    names = factor_names(x.ndim)
    dims: Dims = tuple((name,) for name in names)
    along = None
    if offset >= 0 and x.shape[rows] <= x.shape[columns] - offset:
        along = rows
    elif offset <= 0 and x.shape[columns] <= x.shape[rows] + offset:
        along = columns
    others = tuple(dims[dim] for dim in range(x.ndim) if dim not in (rows, columns))
    unsharded = frozenset(names[dim] for dim in (rows, columns) if dim != along)
    name = "offset" if call.has("offset") else "diagonal"
    return Rule((dims,), ((*others, () if along is None else dims[along]),), unsharded=unsharded,
                modes=all_modes(0), local=_LocalDiagonal(name, rows, columns))  # fmt: skip


def _local_diag_embed(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    x: torch.Tensor = args[0]
    begin, end = ctx.offset(0, x.ndim - 1), ctx.end(0, x.ndim - 1)
    if begin == 0 and ctx.is_unsharded(0, x.ndim - 1):
        matrix: torch.Tensor = op(*args, **kwargs)
        return matrix
    size = ctx.operands[0].shape[-1]
    square = pad(torch.diag_embed(x), (begin, size - end))
    matrix_dims = (-2, -1) if "diag_embed" not in str(op) else (
        argument(op, args, kwargs, "dim1"), argument(op, args, kwargs, "dim2"))  # fmt: skip
    return square.movedim((-2, -1), matrix_dims)


@register_rule("diag_embed")
def diag_embed(call: OpCall) -> Rule:
    """Rule `ab->ab1` of `diag_embed`: rows of matrices may be sharded as their main diagonals."""
    x, result = call.operands[0], call.result
    offset = call.get("offset")
    rows, columns = wrap_dim(call.get("dim1"), result.ndim), wrap_dim(call.get("dim2"), result.ndim)
    dims = letter_dims(x.ndim)
    others = iter(dims[:-1])
    diagonal_factor = dims[-1] if not offset else ()
    result_dims = tuple(
        diagonal_factor if dim == rows else () if dim == columns else next(others)
        for dim in range(result.ndim)
    )
    return Rule((dims,), (result_dims,),
                unsharded=frozenset() if not offset else frozenset(dims[-1]), modes=all_modes(0),
                local=_local_diag_embed)  # fmt: skip


@register_rule("diag")
def diag(call: OpCall) -> Rule:
    """Rule of `diag`: a matrix of a vector, or the diagonal of a matrix."""
    if call.operands[0].ndim == 2:
        rule: Rule = diagonal(call)
        return rule
    if call.get("diagonal"):
        return Rule(((("a",),),), (((), ()),), unsharded=frozenset("a"), modes=all_modes(0))
    return Rule(((("a",),),), ((("a",), ()),), modes=all_modes(0), local=_local_diag_embed)


@register_rule("diagflat")
def diagflat(call: OpCall) -> Rule:
    """Rule of `diagflat`: all elements stay unsharded."""
    names = factor_names(call.operands[0].ndim)
    return Rule((tuple((name,) for name in names),), (((), ()),), unsharded=frozenset(names),
                modes=all_modes(0))  # fmt: skip


@register_rule("diagonal_scatter", "diagonal_backward")
def diagonal_scatter(call: OpCall) -> Rule:
    """Rule of writes into a diagonal: the matrices' two dims stay unsharded."""
    result = call.result
    rows, columns = (wrap_dim(call.get(factors), result.ndim) for factors in ("dim1", "dim2"))
    names = factor_names(result.ndim)
    matrix_dims: Dims = tuple(
        () if dim in (rows, columns) else (name,) for dim, name in enumerate(names)
    )
    line = (*(factors for dim, factors in enumerate(matrix_dims) if dim not in (rows, columns)), ())
    if len(call.operands) == 1:
        return Rule((line,), (matrix_dims,), modes=all_modes(0),
                    local=WithLocalShape("input_sizes"))  # fmt: skip
    return Rule((matrix_dims, line), (matrix_dims,), modes=all_modes(0, 1))
