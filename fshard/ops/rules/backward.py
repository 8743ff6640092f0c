"""Rules of gradients that no other family has: of views, selections, scans, and distances.

Every one is linear in the gradient that it is of, and passes the dims that its operation passes.
"""

from __future__ import annotations

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import linear_modes, normalize_dims, wrap_dim
from fshard.ops.core.call import Meta, OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.einsum_letters import (
    drop_broadcast,
    letters,
    text_dims,
    trailing_dims,
    unsharded_dims,
)
from fshard.ops.rules.shard_call import SetLocalShape, ShardCall

__all__: list[str] = []

aten = torch.ops.aten


@register_rule(
    aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.rrelu_with_noise_backward,
    aten.fake_quantize_per_tensor_affine_cachemask_backward, aten._masked_softmax_backward,
    aten.fake_quantize_per_channel_affine_cachemask_backward, aten._standard_gamma_grad,
)  # fmt: skip
def elementwise(call: OpCall) -> Rule | None:
    """Every element alone; what has another shape (a kernel's buffer) is not cut."""
    whole = _whole_dims(call)
    shape = call.operands[0].shape
    every = letters(len(shape))
    dims: Dims = tuple(() if at in whole else (every[at],) for at in range(len(shape)))

    def same(meta: Meta) -> Dims:
        return dims if meta.shape == shape else unsharded_dims(meta)

    results = tuple(None if each is None else same(each) for each in call.results)
    empty = any(each is not None and each.shape != shape for each in call.results)
    kinds = tuple((f, "sum") for dim in dims for f in dim) if empty else ()
    modes = (
        () if schema_of(call.op).name.endswith("forward") else linear_modes(0, results=len(results))
    )
    if schema_of(call.op).name.endswith("_gamma_grad"):
        modes = ()
    return Rule(tuple(map(same, call.operands)), results, kinds, modes=modes, local=ShardCall())


def _whole_dims(call: OpCall) -> tuple[int, ...]:
    if not call.has("dim"):
        return ()
    given, ndim = call.get("dim"), call.operands[0].ndim
    return normalize_dims(ndim - 1 if given is None else given, ndim)


# -- along one dim --------------------------------------------------------------------------


@register_rule(aten.cummaxmin_backward, aten.cumprod_backward)
def per_dim(call: OpCall) -> Rule:
    """Dims other than `dim` pass, on all tensors."""
    ndim = call.operands[0].ndim
    dim, every = wrap_dim(call.get("dim"), ndim), letters(ndim)
    dims = tuple(() if at == dim else (every[at],) for at in range(ndim))
    return Rule((dims,) * len(call.operands), (dims,), modes=linear_modes(0), local=ShardCall())


@register_rule(aten.value_selecting_reduction_backward)
def selected_backward(call: OpCall) -> Rule:
    """A value's gradient goes to where it was found along `dim`."""
    made = call.result
    dim, every = wrap_dim(call.get("dim"), made.ndim), letters(made.ndim)
    dims: Dims = tuple(() if at == dim else (every[at],) for at in range(made.ndim))
    kept = dims if call.get("keepdim") else dims[:dim] + dims[dim + 1 :]
    return Rule((kept, kept), (dims,), modes=linear_modes(0),
                local=ShardCall(changes=(SetLocalShape("sizes"),)))  # fmt: skip


@register_rule(aten.index_select_backward)
def index_select_backward(call: OpCall) -> Rule:
    """Indices are summed into the rows that they name; other dims pass."""
    grad = call.operands[0]
    dim, every = wrap_dim(call.get("dim"), grad.ndim), letters(grad.ndim, "i")
    passed: Dims = tuple(() if at == dim else (every[at],) for at in range(grad.ndim))
    given: Dims = tuple(("i",) if at == dim else each for at, each in enumerate(passed))
    return Rule((given, (("i",),)), (passed,), (("i", "sum"),), modes=linear_modes(0),
                local=ShardCall(changes=(SetLocalShape("self_sizes"),)))  # fmt: skip


@register_rule(aten.gather_backward)
def gather_backward(call: OpCall) -> Rule:
    """Dims other than the gathered one pass where the index is as long as the tensor."""
    x, index = call.operands[1], call.operands[-1]
    dim, every = wrap_dim(call.get("dim"), x.ndim), letters(x.ndim)
    dims: Dims = tuple(
        (every[at],) if at != dim and x.shape[at] == index.shape[at] else () for at in range(x.ndim)
    )
    return Rule((dims, dims, dims), (dims,), modes=linear_modes(0), local=ShardCall())


@register_rule(aten.masked_select_backward, aten.masked_scatter_backward)
def whole_backward(call: OpCall) -> Rule:
    """What a mask selects lies in one row: nothing of it can be cut."""
    made = tuple(unsharded_dims(each) for each in call.results if each is not None)
    return Rule(tuple(map(unsharded_dims, call.operands)), made, modes=linear_modes(0))


@register_rule(aten.trace_backward)
def trace_backward(call: OpCall) -> Rule:
    """A number spread along a diagonal."""
    return Rule(((),), (((), ()),), modes=linear_modes(0))


# -- distances ------------------------------------------------------------------------------


@register_rule(aten._cdist_backward)
def cdist_backward(call: OpCall) -> Rule:
    """`bpq,bpk,bqk,bpq->bpk`: the distances are known, so that the width passes too."""
    grad, a, b, found = call.operands
    batch = letters(grad.ndim - 2, "pqk")
    texts = (batch + "pq", batch + "pk", batch + "qk", batch + "pq")
    dims = [trailing_dims(text, meta.ndim) for text, meta in zip(texts, call.operands, strict=True)]
    return Rule(drop_broadcast(dims, (grad, a, b, found)), (text_dims(batch + "pk"),), (("q", "sum"),),
                modes=linear_modes(0), local=ShardCall())  # fmt: skip


@register_rule(aten._pdist_backward)
def pdist_backward(call: OpCall) -> Rule:
    """The width passes; all pairs of rows are in one vector."""
    rows: Dims = ((), ("k",))
    return Rule((((),), rows, ((),)), (rows,), modes=linear_modes(0), local=ShardCall())
