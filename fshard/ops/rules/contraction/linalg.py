"""Rules of linear algebra on batches of matrices: factorizations, inverses, solvers.

Batch dims may be sharded, matrices may not. The columns of a system's right-hand side may be
sharded too, and the solution is linear in them.
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
from fshard.ops.rules.letters import drop_broadcast, letters, no_factors, text_dims, trailing_dims
from fshard.ops.rules.shard_call import ShardCall

aten = torch.ops.aten

FACTORED = """
    linalg_cholesky linalg_cholesky_ex cholesky_inverse linalg_qr svd linalg_svd
    _linalg_svd linalg_svdvals linalg_eigh _linalg_eigh linalg_eigvalsh linalg_eig linalg_eigvals
    _linalg_eigvals inverse linalg_inv linalg_inv_ex pinverse linalg_pinv det linalg_det
    _linalg_det slogdet linalg_slogdet _linalg_slogdet logdet linalg_lu linalg_lu_factor
    linalg_lu_factor_ex _lu_with_info lu_unpack linalg_ldl_factor linalg_ldl_factor_ex
    linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power linalg_matrix_rank linalg_cond
    geqrf orgqr linalg_householder_product linalg_vander matrix_exp_backward
"""
"""Operations that return matrices, vectors or scalars of each matrix."""
ONLY_BEFORE_2_14 = [name for name in ("cholesky", "qr") if hasattr(aten, name)]
"""Operations that PyTorch 2.14 has removed, where they are."""
VECTOR_ARGS = frozenset(("LU_pivots", "pivots", "tau", "input2"))
SCALAR_ARGS = frozenset(("atol", "rtol", "tol", "rcond"))


def batched(call: OpCall, cores: Mapping[str, int] = MappingProxyType({})) -> Rule:
    """Rule `b11->b11` of an operation per matrix: dims before the last two may be sharded.

    `cores` gives the number of unsharded last dims of arguments that are not matrices, by name.
    """
    core_ndims = [cores.get(name, 2) for name in names_of(call)]
    batch_ndims = [
        max(meta.ndim - core_ndim, 0)
        for meta, core_ndim in zip(call.operands, core_ndims, strict=True)
    ]
    batch = letters(max(*batch_ndims, 0))
    dims = [
        trailing_dims(batch, count) + ((),) * (meta.ndim - count)
        for count, meta in zip(batch_ndims, call.operands, strict=True)
    ]
    results = tuple(None if meta is None else _batch_result(meta, batch) for meta in call.results)
    # A result that was not requested is empty; a sum of empty results is empty.
    empty = any(meta is not None and meta.shape == (0,) for meta in call.results)
    kinds = tuple((f, "sum") for f in sorted(batch)) if empty else ()
    return Rule(drop_broadcast(dims, call.operands), results, kinds, local=ShardCall())


def _batch_result(meta: Meta, batch: str) -> Dims:
    """Return batch factors before a result's last dims; none for an empty result, not requested."""
    if meta.shape == (0,) or meta.ndim < len(batch):
        return no_factors(meta)
    return text_dims(batch) + ((),) * (meta.ndim - len(batch))


def names_of(call: OpCall) -> list[str]:
    """Return the names of the tensor arguments."""
    return [
        argument.name
        for argument in schema_arguments(call.op)
        if call.operand_index(argument.name) is not None
    ]


@register_rule(*FACTORED.split(), *ONLY_BEFORE_2_14, torch.ops.prims.svd)
def factorization(call: OpCall) -> Rule:
    """Rule of a factorization or function of each matrix of a batch."""
    name = schema_of(call.op).name
    cores = dict.fromkeys(VECTOR_ARGS, 1) | dict.fromkeys(SCALAR_ARGS, 0)
    if "vander" in name:
        cores["x"] = 1
    return batched(call, cores)


@register_rule(aten.vander, aten.linalg_tensorinv, aten.linalg_tensorsolve)
def unbatched(call: OpCall) -> Rule:
    """Rule of operations that make one matrix from all of a tensor: unsharded."""
    results = tuple(None if meta is None else no_factors(meta) for meta in call.results)
    solves = base_name(call.op) == "linalg_tensorsolve"
    return Rule(tuple(map(no_factors, call.operands)), results,
                modes=linear_modes(1) if solves else ())  # fmt: skip


@register_rule(aten._linalg_check_errors)
def check_errors(call: OpCall) -> Rule:
    """Rule of the check of every matrix's error code, which returns nothing."""
    return Rule((text_dims(letters(call.operands[0].ndim)),), (None,))


# -- equations ------------------------------------------------------------------------------

SIDES = {
    "linalg_solve": ("A", "B"), "linalg_solve_ex": ("A", "B"), "_linalg_solve_ex": ("A", "B"),
    "linalg_solve_triangular": ("self", "B"), "triangular_solve": ("A", "self"),
    "cholesky_solve": ("input2", "self"), "_cholesky_solve_helper": ("A", "self"),
    "linalg_lu_solve": ("LU", "B"), "lu_solve": ("LU_data", "self"),
    "linalg_ldl_solve": ("LD", "B"), "ormqr": ("self", "input3"),
}  # fmt: skip
"""Solvers, with the argument names of the matrix and of the right-hand side."""


@register_rule(*SIDES)
def solve(call: OpCall) -> Rule:
    """Rule `b11,b1k->b1k` of solvers, linear in the right-hand side, whose columns are `k`."""
    name = base_name(call.op)
    matrix_name, side_name = SIDES[name]
    side_index, matrix_index = call.operand_index(side_name), call.operand_index(matrix_name)
    result = call.result
    assert side_index is not None
    assert matrix_index is not None
    b_meta, a_meta = call.operands[side_index], call.operands[matrix_index]
    is_left = call.get("left") if call.has("left") else True
    vector = name.endswith(("linalg_solve", "solve_ex")) and _is_vector(a_meta, b_meta)
    core: Dims = ((),) if vector else ((), ("k",)) if is_left else (("k",), ())
    batch = letters(result.ndim - len(core), "k")
    dims = []
    for i, meta in enumerate(call.operands):
        core_ndim = len(core) if i == side_index else 2 if i == matrix_index else 1
        core_dims = core if i == side_index else ((),) * core_ndim
        dims.append(trailing_dims(batch, meta.ndim - core_ndim) + core_dims)
    results = (text_dims(batch) + core, *(
        None if meta is None else _batch_result(meta, batch) for meta in call.results[1:]
    ))  # fmt: skip
    # Other results depend on the matrix alone and are invariant.
    modes = tuple(Mode((side_index,), kind, (kind, *(None,) * (len(results) - 1)))
                  for kind in ("sum", "avg"))  # fmt: skip
    return Rule(drop_broadcast(dims, call.operands), results, modes=modes, local=ShardCall())


def _is_vector(a: Meta, b: Meta) -> bool:
    """Return True if `b` is one vector for each matrix of `a`, as `torch.linalg.solve` decides."""
    return b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
