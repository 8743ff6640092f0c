"""What a call returns, without running it on meta tensors where these are slow.

PyTorch's meta form of many operations is written in Python and takes a millisecond; the kernels of
the same take two microseconds on tensors that have no elements. A *law* says how the shapes that
such a run gives are those of the call; where it says nothing, the meta form is asked.
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
from fshard.ops.meta.formulas import FORMULAS, Law, broadcast

__all__ = ["batched", "elementwise", "law_of", "results_of"]


def results_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results:
    """What a call returns, flat, and the tree of it with their numbers in the place of tensors.

    Raises `ShardingError` as `meta_results` does.

    >>> import torch
    >>> results_of(torch.ops.aten.hardswish.default, (Meta((8, 3), torch.float16),), {})
    ((Meta(shape=(8, 3), dtype=torch.float16),), 0)
    """
    law = law_of(op)
    found = None if law is None else law(op, args, kwargs)
    return meta_results(op, args, kwargs) if found is None else found


def law_of(op: Any) -> Law | None:
    """The law of an operation: all that treat every element alone have one."""
    row = row_of(op)
    if row is not None and row.module.endswith(".elementwise.pointwise"):
        return elementwise
    return _LISTED.get(op)


# -- laws ----------------------------------------------------------------------------------


def elementwise(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """Every result has the shape to which all operands broadcast, or is a number of all of it."""
    operands = instances_in((*args, *kwargs.values()), Meta)
    whole = broadcast([each.shape for each in operands])
    if whole is None:
        return None
    few = [Meta(tuple(int(size == 1) for size in each.shape), each.dtype) for each in operands]
    empty = broadcast([each.shape for each in few])
    made = _ran(op, fill_call(args, kwargs, Meta, few))
    if made is None or any(each is None or each.shape not in ((), empty) for each in made[0]):
        return None
    return tuple(each and Meta(whole if each.ndim else (), each.dtype) for each in made[0]), made[1]


def batched(*places: int, results: int = 1, alone: Container[int] = ()) -> Law:
    """These operands, of one length along dim 0, pass it to dim 0 of the first `results`.

    Results that are numbers have none, nor does it say anything of the others' shapes. Operands
    are given a batch where they have none: where the first of them has so many dims.
    """

    def law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
        operands = instances_in((*args, *kwargs.values()), Meta)
        if max(places) >= len(operands):
            return None
        single = operands[places[0]].ndim in alone
        lengths = {() if single else operands[at].shape[:1] for at in places}
        if len(lengths) > 1 or not (single or any(lengths)):
            return None
        length = lengths.pop()
        for at in places:
            operands[at] = Meta((0, *operands[at].shape[len(length) :]), operands[at].dtype)
        made = _ran(op, fill_call(args, kwargs, Meta, operands))
        if made is None:
            return None
        metas = list(made[0])
        for at, each in enumerate(metas[:results]):
            if each is not None and each.ndim:
                if each.shape[0]:
                    return None
                metas[at] = Meta(length + each.shape[1:], each.dtype)
        return tuple(metas), made[1]

    return law


def along(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """The dims `dim` of the only operand are reduced, and kept at length 1 with `keepdim`."""
    (x,) = instances_in((*args, *kwargs.values()), Meta)
    names = {each.name for each in schema_arguments(op)}
    dims = normalize_dims(argument(op, args, kwargs, "dim") if "dim" in names else None, x.ndim)
    kept = "keepdim" in names and argument(op, args, kwargs, "keepdim")
    few = Meta(tuple(min(n, 2) if at in dims else 0 for at, n in enumerate(x.shape)), x.dtype)
    made = _ran(op, fill_call(args, kwargs, Meta, [few]))
    left = [(1, 1) if at in dims else (n, 0) for at, n in enumerate(x.shape)
            if kept or at not in dims]  # fmt: skip
    alike = tuple(small for _, small in left)
    if made is None or any(each is None or each.shape != alike for each in made[0]):
        return None
    shape = tuple(size for size, _ in left)
    return tuple(each and Meta(shape, each.dtype) for each in made[0]), made[1]


def attention(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A row of values for every query, where batches and heads do not broadcast."""
    query, key, value = instances_in((*args, *kwargs.values()), Meta)[:3]
    lead = {each.shape[:-2] for each in (query, key, value)}
    if query.ndim < 3 or len(lead) > 1 or len({each.dtype for each in (query, key, value)}) > 1:
        return None
    if key.shape[-2] != value.shape[-2] or query.shape[-1] != key.shape[-1]:
        return None
    return (Meta(query.shape[:-1] + value.shape[-1:], query.dtype),), 0


def product(one: int, other: int) -> Law:
    """What is added to a product of two tensors of so many dims, to which it broadcasts."""

    def law(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
        added, left, right = instances_in((*args, *kwargs.values()), Meta)
        inner = left.shape[1:]
        if (left.ndim, right.ndim) != (one, other) or right.shape[: len(inner)] != inner:
            return None
        shape = left.shape[:1] + right.shape[len(inner) :]
        fits = broadcast([added.shape, shape]) == shape
        same = added.dtype == left.dtype == right.dtype
        return ((Meta(shape, left.dtype),), 0) if fits and same else None

    return law


def channels(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A norm of channels, which are dim 1 of the first operand: one that has few of the rest.

    It has one channel: PyTorch's kernels give each to a thread, whose start takes milliseconds.
    """
    x, *others = instances_in((*args, *kwargs.values()), Meta)
    if x.ndim < 2 or not x.shape[1] or any(each.shape != x.shape[1:2] for each in others):
        return None
    few = Meta((1, 1, *[2] * (x.ndim - 2)) if x.ndim > 2 else (2, 1), x.dtype)
    ones = [Meta((1,), each.dtype) for each in others]
    made = _ran(op, fill_call(args, kwargs, Meta, [few, *ones]))
    if made is None or made[0][0] is None or made[0][0].shape != few.shape:
        return None
    first = Meta(x.shape, made[0][0].dtype)
    if len(made[0]) == 1:
        return (first,), made[1]
    # What it keeps for the backward pass is of another shape and dtype on CPUs.
    kept = Meta(x.shape[1:2], torch.promote_types(x.dtype, torch.float32))
    rest = (
        Meta(x.shape[1:2], each.dtype) if each is not None and each.shape == (1,) else each
        for each in made[0][3:]
    )
    return (first, kept, kept, *rest), made[1]


def groups(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Results | None:
    """A norm of groups of channels, and mean and deviation of every group."""
    x, *others = instances_in((*args, *kwargs.values()), Meta)
    n, c, each, group = (argument(op, args, kwargs, name) for name in ("N", "C", "HxW", "group"))
    fits = math.prod(x.shape) == n * c * each and x.shape[:2] == (n, c)
    if not fits or group <= 0 or c % group or any(other != Meta((c,), x.dtype) for other in others):
        return None
    return (x, Meta((n, group), x.dtype), Meta((n, group), x.dtype)), (0, 1, 2)


def _ran(op: Any, call: tuple[Sequence[Any], Mapping[str, Any]]) -> Results | None:
    """What a call gives whose tensors have hardly any elements; None where it is refused."""
    try:
        return flatten_results(dry_run(op, *call, "cpu"))
    except OP_ERRORS:
        return None


_LAWS: tuple[tuple[Law, str], ...] = (
    (elementwise, """
        mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
        poisson_nll_loss hinge_embedding_loss margin_ranking_loss soft_margin_loss kl_div l1_loss
        tril triu cumsum cumprod _safe_softmax renorm fft_fftshift fft_ifftshift
        dist roll flip softmax.int log_softmax.int _softmax_backward_data
        _log_softmax_backward_data
    """),
    (batched(0), """
        group_norm im2col
        upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec
        upsample_bicubic2d.vec
    """),
    (batched(0, alone=range(64)), "layer_norm rms_norm"),
    (batched(0, results=3, alone=range(64)), "native_layer_norm"),
    (batched(0, 1), """
        grid_sampler grid_sampler_2d grid_sampler_3d max_unpool2d max_unpool3d
    """),
    (batched(0, 1, alone=(1,)), """
        cross_entropy_loss nll_loss_nd multi_margin_loss multilabel_margin_loss cosine_similarity
        pairwise_distance
    """),
    (batched(0, 1, 2, alone=(1,)), "cosine_embedding_loss triplet_margin_loss"),
    (along, """
        logsumexp quantile.scalar nanquantile.scalar linalg_vector_norm linalg_norm
        linalg_matrix_norm all.default all.dim all.dims any.default any.dim any.dims
        mean.default mean.dim nanmean sum.default sum.dim_IntList count_nonzero
        std.default std.dim std.correction var.default var.dim var.correction
        std_mean.default std_mean.dim std_mean.correction
        var_mean.default var_mean.dim var_mean.correction
    """),
    (product(2, 2), "addmm"),
    (product(2, 1), "addmv"),
    (product(1, 1), "addr"),
    (attention, "scaled_dot_product_attention"),
    (channels, """
        batch_norm native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_functional _batch_norm_with_update_functional
    """),
    (groups, "native_group_norm"),
)  # fmt: skip


_LISTED = {
    op: law
    for law, names in (*_LAWS, *FORMULAS)
    for name in names.split()
    for op in overloads(name)
}
