"""Shapes and dtypes of a call's results, without running it on meta tensors where that is slow.

Many meta kernels of PyTorch are written in Python and take up to milliseconds; the CPU kernels of
the same operations take microseconds on tensors with hardly any elements. A *law* runs an
operation on such tensors and extends the shapes of its results to those of the call, or returns
None if it cannot; then the operation runs on meta tensors.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from fshard.ops.core.builders import normalize_dims
from fshard.ops.core.call import (
    OP_ERRORS,
    Meta,
    Results,
    argument,
    dry_run,
    fill_call,
    flatten_results,
    instances_in,
    meta_results,
    schema_arguments,
)
from fshard.ops.core.registry import overloads, row_of
from fshard.ops.meta.formulas import FORMULA_LAWS, ShapeLaw, broadcast_shape


def result_metas(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results:
    """Return the metas of a call's results, and their tree with indices of the metas as leaves.

    Raises `ShardingError` as `meta_results` does.

    >>> import torch
    >>> result_metas(torch.ops.aten.hardswish.default, (Meta((8, 3), torch.float16),), {})
    ((Meta(shape=(8, 3), dtype=torch.float16),), 0)
    """
    law = law_of(op)
    results = None if law is None else law(op, args, kwargs)
    return meta_results(op, args, kwargs) if results is None else results


def law_of(op: Any) -> ShapeLaw | None:
    """Return the law of an operation, if it has one; pointwise operations share theirs."""
    row = row_of(op)
    if row is not None and row.module.endswith(".elementwise.pointwise"):
        return elementwise_law
    return _LAW_BY_OP.get(op)


# -- laws ----------------------------------------------------------------------------------


def elementwise_law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Results that have the broadcast shape of all operands, or no dims."""
    operands = instances_in((*args, *kwargs.values()), Meta)
    shape = broadcast_shape([meta.shape for meta in operands])
    if shape is None:
        return None
    empty = [Meta(tuple(int(size == 1) for size in meta.shape), meta.dtype) for meta in operands]
    empty_shape = broadcast_shape([meta.shape for meta in empty])
    run = _run_on_zeros(op, fill_call(args, kwargs, Meta, empty))
    if run is None or any(meta is None or meta.shape not in ((), empty_shape) for meta in run[0]):
        return None
    return tuple(meta and Meta(shape if meta.ndim else (), meta.dtype) for meta in run[0]), run[1]


def batch_law(*batched: int, results: int = 1, unbatched_ndims: Container[int] = ()) -> ShapeLaw:
    """Return the law of operations that map dim 0 of operands to dim 0 of the first `results`.

    The operands with indices `batched` must agree in that length; results without dims and later
    results have their shapes from the run. If the first of these operands has a number of dims in
    `unbatched_ndims`, a batch dim is added to run the operation and removed from the results.
    """

    def law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
        operands = instances_in((*args, *kwargs.values()), Meta)
        if max(batched) >= len(operands):
            return None
        unbatched = operands[batched[0]].ndim in unbatched_ndims
        lengths = {() if unbatched else operands[i].shape[:1] for i in batched}
        if len(lengths) > 1 or not (unbatched or any(lengths)):
            return None
        length = lengths.pop()
        for i in batched:
            operands[i] = Meta((0, *operands[i].shape[len(length) :]), operands[i].dtype)
        run = _run_on_zeros(op, fill_call(args, kwargs, Meta, operands))
        if run is None:
            return None
        metas = list(run[0])
        for i, meta in enumerate(metas[:results]):
            if meta is not None and meta.ndim:
                if meta.shape[0]:
                    return None
                metas[i] = Meta(length + meta.shape[1:], meta.dtype)
        return tuple(metas), run[1]

    return law


def reduction_law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Results without the dims `dim` of the only operand, or with length 1 there if `keepdim`."""
    (x,) = instances_in((*args, *kwargs.values()), Meta)
    names = {parameter.name for parameter in schema_arguments(op)}
    dims = normalize_dims(argument(op, args, kwargs, "dim") if "dim" in names else None, x.ndim)
    keepdim = "keepdim" in names and argument(op, args, kwargs, "keepdim")
    small = Meta(tuple(min(n, 2) if d in dims else 0 for d, n in enumerate(x.shape)), x.dtype)
    run = _run_on_zeros(op, fill_call(args, kwargs, Meta, [small]))
    sizes = [(1, 1) if d in dims else (n, 0) for d, n in enumerate(x.shape)
             if keepdim or d not in dims]  # fmt: skip
    small_shape = tuple(small_size for _, small_size in sizes)
    if run is None or any(meta is None or meta.shape != small_shape for meta in run[0]):
        return None
    shape = tuple(size for size, _ in sizes)
    return tuple(meta and Meta(shape, meta.dtype) for meta in run[0]), run[1]


def attention_law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """One row of values for each query, if batch and head dims are equal."""
    query, key, value = instances_in((*args, *kwargs.values()), Meta)[:3]
    batches = {meta.shape[:-2] for meta in (query, key, value)}
    dtypes = {meta.dtype for meta in (query, key, value)}
    if query.ndim < 3 or len(batches) > 1 or len(dtypes) > 1:
        return None
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        return None
    return (Meta(query.shape[:-1] + value.shape[-1:], query.dtype),), 0


def addmm_law(left_ndim: int, right_ndim: int) -> ShapeLaw:
    """Return the law of a product of two operands with these numbers of dims, plus a bias."""

    def law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
        bias, left, right = instances_in((*args, *kwargs.values()), Meta)
        inner = left.shape[1:]
        if (left.ndim, right.ndim) != (left_ndim, right_ndim):
            return None
        if right.shape[: len(inner)] != inner:
            return None
        shape = left.shape[:1] + right.shape[len(inner) :]
        fits = broadcast_shape([bias.shape, shape]) == shape
        same_dtype = bias.dtype == left.dtype == right.dtype
        return ((Meta(shape, left.dtype),), 0) if fits and same_dtype else None

    return law


def batch_norm_law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Results of a batch norm, from a run on one channel and few elements.

    PyTorch's kernels distribute channels over threads, which take milliseconds to start.
    """
    x, *others = instances_in((*args, *kwargs.values()), Meta)
    if x.ndim < 2 or not x.shape[1] or any(other.shape != x.shape[1:2] for other in others):
        return None
    small = Meta((1, 1, *[2] * (x.ndim - 2)) if x.ndim > 2 else (2, 1), x.dtype)
    ones = [Meta((1,), other.dtype) for other in others]
    run = _run_on_zeros(op, fill_call(args, kwargs, Meta, [small, *ones]))
    if run is None or run[0][0] is None or run[0][0].shape != small.shape:
        return None
    first = Meta(x.shape, run[0][0].dtype)
    if len(run[0]) == 1:
        return (first,), run[1]
    # CPU kernels save statistics of another shape and dtype than meta kernels report.
    saved = Meta(x.shape[1:2], torch.promote_types(x.dtype, torch.float32))
    rest = (
        Meta(x.shape[1:2], meta.dtype) if meta is not None and meta.shape == (1,) else meta
        for meta in run[0][3:]
    )
    return (first, saved, saved, *rest), run[1]


def group_norm_law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Normalized operand, and mean and deviation of every group."""
    x, *others = instances_in((*args, *kwargs.values()), Meta)
    n, c, size, group = (argument(op, args, kwargs, name) for name in ("N", "C", "HxW", "group"))
    fits = math.prod(x.shape) == n * c * size and x.shape[:2] == (n, c)
    if not fits or group <= 0 or c % group or any(other != Meta((c,), x.dtype) for other in others):
        return None
    return (x, Meta((n, group), x.dtype), Meta((n, group), x.dtype)), (0, 1, 2)


def _run_on_zeros(op: Any, call: tuple[Sequence[Any], Mapping[str, Any]]) -> Results | None:
    """Run a call on small CPU tensors of zeros; return None if PyTorch refuses it."""
    try:
        return flatten_results(dry_run(op, *call, "cpu"))
    except OP_ERRORS:
        return None


_LAWS: tuple[tuple[ShapeLaw, str], ...] = (
    (elementwise_law, """
        mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        poisson_nll_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss kl_div l1_loss
        tril triu cumsum cumprod _safe_softmax renorm fft_fftshift fft_ifftshift
        dist roll flip softmax.int log_softmax.int _softmax_backward_data
        _log_softmax_backward_data
    """),
    (batch_law(0), """
        group_norm im2col
        upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec
        upsample_bicubic2d.vec
    """),
    (batch_law(0, unbatched_ndims=range(64)), "layer_norm rms_norm"),
    (batch_law(0, results=3, unbatched_ndims=range(64)), "native_layer_norm"),
    (batch_law(0, 1), """
        grid_sampler grid_sampler_2d grid_sampler_3d max_unpool2d max_unpool3d
    """),
    (batch_law(0, 1, unbatched_ndims=(1,)), """
        cross_entropy_loss nll_loss_nd multi_margin_loss multilabel_margin_loss cosine_similarity
        pairwise_distance
    """),
    (batch_law(0, 1, 2, unbatched_ndims=(1,)), "cosine_embedding_loss triplet_margin_loss"),
    (reduction_law, """
        logsumexp quantile.scalar nanquantile.scalar linalg_vector_norm linalg_norm
        linalg_matrix_norm all.default all.dim all.dims any.default any.dim any.dims
        mean.default mean.dim nanmean sum.default sum.dim_IntList count_nonzero
        std.default std.dim std.correction var.default var.dim var.correction
        std_mean.default std_mean.dim std_mean.correction
        var_mean.default var_mean.dim var_mean.correction
    """),
    (addmm_law(2, 2), "addmm"),
    (addmm_law(2, 1), "addmv"),
    (addmm_law(1, 1), "addr"),
    (attention_law, "scaled_dot_product_attention"),
    (batch_norm_law, """
        batch_norm native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_functional _batch_norm_with_update_functional
    """),
    (group_norm_law, "native_group_norm"),
)  # fmt: skip


_LAW_BY_OP = {
    op: law
    for law, names in (*_LAWS, *FORMULA_LAWS)
    for name in names.split()
    for op in overloads(name)
}
