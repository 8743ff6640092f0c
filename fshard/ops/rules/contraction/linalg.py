"""Rules of linear algebra on batches of matrices: batch dims pass, matrices are needed whole.

What the right-hand sides of equations have more passes as well: every column is solved alone, and
the solution is linear in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall, base_name, schema_arguments
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.einsum_letters import (
    drop_broadcast,
    letters,
    text_dims,
    trailing_dims,
    unsharded_dims,
)
from fshard.ops.rules.shard_call import ShardCall

__all__: list[str] = []

aten = torch.ops.aten

FACTORED = """
    cholesky linalg_cholesky linalg_cholesky_ex cholesky_inverse qr linalg_qr svd linalg_svd
    _linalg_svd linalg_svdvals linalg_eigh _linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals
    _linalg_eigvals inverse linalg_inv linalg_inv_ex pinverse linalg_pinv det linalg_det
    _linalg_det slogdet linalg_slogdet _linalg_slogdet logdet linalg_lu linalg_lu_factor
    linalg_lu_factor_ex _lu_with_info lu_unpack linalg_ldl_factor linalg_ldl_factor_ex
    linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power linalg_matrix_rank linalg_cond
    geqrf orgqr linalg_householder_product linalg_vander matrix_exp_backward
"""
"""Matrices in, matrices, vectors and numbers of them out."""
OF_VECTORS = frozenset(("LU_pivots", "pivots", "tau", "input2"))
OF_NUMBERS = frozenset(("atol", "rtol", "tol", "rcond"))


def batched(call: OpCall, cores: Mapping[str, int] = MappingProxyType({})) -> Rule:
    """Dims before the last ones pass, which are two, or as many as `cores` says by argument."""
    ranks = [cores.get(name, 2) for name in names_of(call)]
    lead = [max(meta.ndim - rank, 0) for meta, rank in zip(call.operands, ranks, strict=True)]
    batch = letters(max(*lead, 0))
    dims = [
        trailing_dims(batch, count) + ((),) * (meta.ndim - count)
        for count, meta in zip(lead, call.operands, strict=True)
    ]
    results = tuple(None if each is None else _made(each, batch) for each in call.results)
    # A result that was not asked for is empty: of which any sum is one.
    empty = any(each is not None and each.shape == (0,) for each in call.results)
    kinds = tuple((f, "sum") for f in sorted(batch)) if empty else ()
    return Rule(drop_broadcast(dims, call.operands), results, kinds, local=ShardCall())


def _made(meta: Meta, batch: str) -> Dims:
    """The batch before a result's own dims; none on what is empty since nobody asked for it."""
    if meta.shape == (0,) or meta.ndim < len(batch):
        return unsharded_dims(meta)
    return text_dims(batch) + ((),) * (meta.ndim - len(batch))


def names_of(call: OpCall) -> list[str]:
    """The names of the arguments that are tensors."""
    return [
        each.name for each in schema_arguments(call.op) if call.operand_index(each.name) is not None
    ]


@register_rule(*FACTORED.split(), torch.ops.prims.svd)
def factored(call: OpCall) -> Rule:
    """A factorization or a function of every matrix of a batch."""
    name = schema_of(call.op).name
    cores = dict.fromkeys(OF_VECTORS, 1) | dict.fromkeys(OF_NUMBERS, 0)
    if "vander" in name:
        cores["x"] = 1
    return batched(call, cores)


@register_rule(aten.vander, aten.linalg_tensorinv, aten.linalg_tensorsolve)
def unbatched(call: OpCall) -> Rule:
    """One matrix made of a whole tensor."""
    made = tuple(None if each is None else unsharded_dims(each) for each in call.results)
    solves = base_name(call.op) == "linalg_tensorsolve"
    return Rule(
        tuple(map(unsharded_dims, call.operands)), made, modes=linear_modes(1) if solves else ()
    )


@register_rule(aten._linalg_check_errors)
def checked(call: OpCall) -> Rule:
    """Every matrix's code of failure is looked at; nothing is returned."""
    return Rule((text_dims(letters(call.operands[0].ndim)),), (None,))


# -- equations ------------------------------------------------------------------------------

SIDES = {
    "linalg_solve": ("A", "B"), "linalg_solve_ex": ("A", "B"), "_linalg_solve_ex": ("A", "B"),
    "linalg_solve_triangular": ("self", "B"), "triangular_solve": ("A", "self"),
    "cholesky_solve": ("input2", "self"), "_cholesky_solve_helper": ("A", "self"),
    "linalg_lu_solve": ("LU", "B"), "lu_solve": ("LU_data", "self"),
    "linalg_ldl_solve": ("LD", "B"), "ormqr": ("self", "input3"),
}  # fmt: skip
"""Of the equations that are solved, the names of the matrix and of the right-hand sides."""


@register_rule(*SIDES)
def solving(call: OpCall) -> Rule:
    """`bij,bjk->bik`: columns of the right-hand side are solved alone, linear in it."""
    name = base_name(call.op)
    matrix, side = SIDES[name]
    at, a = call.operand_index(side), call.operand_index(matrix)
    made = call.result
    assert at is not None
    assert a is not None
    b_meta, a_meta = call.operands[at], call.operands[a]
    left = call.get("left") if call.has("left") else True
    vector = name.endswith(("linalg_solve", "solve_ex")) and _is_vector(a_meta, b_meta)
    own: Dims = ((),) if vector else ((), ("k",)) if left else (("k",), ())
    batch = letters(made.ndim - len(own), "k")
    dims = []
    for place, meta in enumerate(call.operands):
        rank = len(own) if place == at else 2 if place == a else 1
        last = own if place == at else ((),) * rank
        dims.append(trailing_dims(batch, meta.ndim - rank) + last)
    results = (text_dims(batch) + own, *(
        None if each is None else _made(each, batch) for each in call.results[1:]
    ))  # fmt: skip
    # Other results are of the matrix alone, the same on every rank; they need all columns' ranks.
    modes = tuple(Mode((at,), kind, (kind, *(None,) * (len(results) - 1)))
                  for kind in ("sum", "avg"))  # fmt: skip
    return Rule(drop_broadcast(dims, call.operands), results, modes=modes, local=ShardCall())


def _is_vector(a: Meta, b: Meta) -> bool:
    """Whether the right-hand side of a solve is a batch of vectors, as PyTorch decides it."""
    return b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
