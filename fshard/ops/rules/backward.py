"""Rules of gradient operations that autograd calls by names of their own.

log_sigmoid, rrelu, fake_quantize, masked softmax, cummax, cumprod, median and other selected
values, index_select, gather, masked_select, trace, cdist, pdist. Each is linear in the incoming
gradient; the dims that its forward operation passes through may be sharded. Gradients of
convolutions, pooling, normalization, softmax and slices are with their forward operations.
"""

from __future__ import annotations

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import linear_modes, normalize_dims, wrap_dim
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.letters import drop_broadcast, letters, no_factors, text_dims, trailing_dims
from fshard.ops.rules.shard_call import SetLocalShape, ShardCall

aten = torch.ops.aten


@register_rule(
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.rrelu_with_noise_backward,
    aten.fake_quantize_per_tensor_affine_cachemask_backward, aten._masked_softmax_backward,
    aten.fake_quantize_per_channel_affine_cachemask_backward, aten._standard_gamma_grad,
)  # fmt: skip
def elementwise(call: OpCall) -> Rule | None:
    """Rule of elementwise gradients: results of another shape (kernel buffers) are unsharded."""
    unsharded = _unsharded_dims(call)
    shape = call.operands[0].shape
    names = letters(len(shape))
    dims: Dims = tuple(() if i in unsharded else (names[i],) for i in range(len(shape)))

    def same(meta: Meta) -> Dims:
        return dims if meta.shape == shape else no_factors(meta)

    results = tuple(None if meta is None else same(meta) for meta in call.results)
    empty = any(meta is not None and meta.shape != shape for meta in call.results)
    kinds = tuple((f, "sum") for dim in dims for f in dim) if empty else ()
    modes = (
        () if schema_of(call.op).name.endswith("forward") else linear_modes(0, results=len(results))
    )
    if schema_of(call.op).name.endswith("_gamma_grad"):
        modes = ()
    return Rule(tuple(map(same, call.operands)), results, kinds, modes=modes, local=ShardCall())


def _unsharded_dims(call: OpCall) -> tuple[int, ...]:
    if not call.has("dim"):
        return ()
    dims, ndim = call.get("dim"), call.operands[0].ndim
    return normalize_dims(ndim - 1 if dims is None else dims, ndim)


# -- along one dim --------------------------------------------------------------------------


@register_rule(aten.cummaxmin_backward, aten.cumprod_backward)
def per_dim(call: OpCall) -> Rule:
    """Rule of gradients along `dim`: all other dims may be sharded."""
    ndim = call.operands[0].ndim
    dim, names = wrap_dim(call.get("dim"), ndim), letters(ndim)
    dims = tuple(() if i == dim else (names[i],) for i in range(ndim))
    return Rule((dims,) * len(call.operands), (dims,), modes=linear_modes(0), local=ShardCall())


@register_rule(aten.value_selecting_reduction_backward)
def selected_backward(call: OpCall) -> Rule:
    """Rule of the gradient of a value selected along `dim`, which stays unsharded."""
    result = call.result
    dim, names = wrap_dim(call.get("dim"), result.ndim), letters(result.ndim)
    dims: Dims = tuple(() if i == dim else (names[i],) for i in range(result.ndim))
    grad_dims = dims if call.get("keepdim") else dims[:dim] + dims[dim + 1 :]
    return Rule((grad_dims, grad_dims), (dims,), modes=linear_modes(0),
                local=ShardCall(rewrites=(SetLocalShape("sizes"),)))  # fmt: skip


@register_rule(aten.index_select_backward)
def index_select_backward(call: OpCall) -> Rule:
    """Rule of a sum of rows into the rows that indices name; other dims may be sharded."""
    grad = call.operands[0]
    dim, names = wrap_dim(call.get("dim"), grad.ndim), letters(grad.ndim, "i")
    passed: Dims = tuple(() if i == dim else (names[i],) for i in range(grad.ndim))
    grad_dims: Dims = tuple(("i",) if i == dim else factors for i, factors in enumerate(passed))
    return Rule((grad_dims, (("i",),)), (passed,), (("i", "sum"),), modes=linear_modes(0),
                local=ShardCall(rewrites=(SetLocalShape("self_sizes"),)))  # fmt: skip


@register_rule(aten.gather_backward)
def gather_backward(call: OpCall) -> Rule:
    """Rule of gather's gradient: dims where index and tensor have the same size may be sharded."""
    x, index = call.operands[1], call.operands[-1]
    dim, names = wrap_dim(call.get("dim"), x.ndim), letters(x.ndim)
    dims: Dims = tuple(
        (names[i],) if i != dim and x.shape[i] == index.shape[i] else () for i in range(x.ndim)
    )
    return Rule((dims, dims, dims), (dims,), modes=linear_modes(0), local=ShardCall())


@register_rule(aten.masked_select_backward, aten.masked_scatter_backward)
def masked_backward(call: OpCall) -> Rule:
    """Rule of gradients of masked selections, whose elements are in one row: all unsharded."""
    results = tuple(no_factors(meta) for meta in call.results if meta is not None)
    return Rule(tuple(map(no_factors, call.operands)), results, modes=linear_modes(0))


@register_rule(aten.trace_backward)
def trace_backward(call: OpCall) -> Rule:
    """Rule of a scalar spread along a diagonal: unsharded."""
    return Rule(((),), (((), ()),), modes=linear_modes(0))


# -- distances ------------------------------------------------------------------------------


@register_rule(aten._cdist_backward)
def cdist_backward(call: OpCall) -> Rule:
    """Rule `bpq,bpk,bqk,bpq->bpk`: given the distances, the width may be sharded too."""
    grad, a, b, distances = call.operands
    batch = letters(grad.ndim - 2, "pqk")
    texts = (batch + "pq", batch + "pk", batch + "qk", batch + "pq")
    dims = [trailing_dims(text, meta.ndim) for text, meta in zip(texts, call.operands, strict=True)]
    operands = drop_broadcast(dims, (grad, a, b, distances))
    return Rule(operands, (text_dims(batch + "pk"),), (("q", "sum"),),
                modes=linear_modes(0), local=ShardCall())  # fmt: skip


@register_rule(aten._pdist_backward)
def pdist_backward(call: OpCall) -> Rule:
    """Rule of pairwise distances' gradient: the width may be sharded, rows may not."""
    rows: Dims = ((), ("k",))
    return Rule((((),), rows, ((),)), (rows,), modes=linear_modes(0), local=ShardCall())
