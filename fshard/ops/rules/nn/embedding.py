"""Rules of embedding, embedding_bag, one_hot, and the gradients of embeddings.

Rows (the vocabulary), width and indices may be sharded. With sharded rows every rank looks up
the rows that it holds and returns zeros for the others: an unreduced sum, as in Megatron-LM's
vocabulary-parallel embedding (arXiv 1909.08053). Lookups outside the shard are found from the
indices alone, so that one weight may be used several times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch

from fshard._torch.operators import schema_of
from fshard._util.errors import fail
from fshard.ops.core.builders import dim_factors, linear_modes
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.index.local_indices import (
    dim_shard,
    locate,
    select_modes,
    spare_row_index,
    with_spare_row,
)
from fshard.ops.rules.shard_call import call_with
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
    with_argument,
)

MAX = 2


@dataclass(frozen=True, slots=True)
class _LocalEmbedding(LocalRewrite):
    """Lookup of a sharded weight's rows; the padding row counts on the rank that holds it."""

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall | None:
        """Return the lookup itself if this rank holds all rows, and some of their width."""
        is_complete = dim_shard(ctx, 0, 0).is_unsharded and ctx.shape()[-1] > 0
        return (op, tuple(args), dict(kwargs)) if is_complete else None

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Look up this rank's rows; other ranks' rows are zeros."""
        shard, padding = dim_shard(ctx, 0, 0), argument(op, args, kwargs, "padding_idx")
        if shard.is_empty or not ctx.shape()[-1]:  # CUDA's gradient of a width of 0 is a fault
            return argument(op, args, kwargs, "weight").new_zeros(ctx.shape())
        if shard.is_unsharded:
            return op(*args, **kwargs)
        holds_padding = shard.begin <= padding < shard.end
        _, args, kwargs = with_argument(op, args, kwargs, "padding_idx",
                                        padding - shard.begin if holds_padding else -1)  # fmt: skip
        local_index, inside = locate(argument(op, args, kwargs, "indices"), shard)
        out = call_with(op, args, kwargs, indices=local_index)
        return out.masked_fill(~inside.unsqueeze(-1), 0)


def _embedding(call: OpCall) -> Rule:
    """Rule `vd,ab->abd` of `embedding`: the rows `v` of the weight are summed."""
    index = dim_factors(call.operands[1].ndim, "i")
    rule = Rule(((("v",), ("d",)), index), ((*index, ("d",)),), (("v", "sum"),),
                modes=select_modes(0), local=_LocalEmbedding())  # fmt: skip
    return _restrict_gradient(call, rule)


def _restrict_gradient(call: OpCall, rule: Rule) -> Rule:
    """Refuse to shard gradients that are sparse or scaled by frequencies of all indices."""
    if call.get("sparse"):
        return replace(rule, no_grad=frozenset(rule.factors))
    if call.get("scale_grad_by_freq"):
        return replace(rule, no_grad=frozenset(rule.factors) - {"d"})
    return rule


def _renorm(call: OpCall) -> Never:
    fail(f"fs.propagate({call.op})", f"max_norm={call.get('max_norm')}",
         "the weight must not be written in place",
         "scale its rows before the lookup: torch.renorm(weight, 2, 0, max_norm)")  # fmt: skip


# -- its gradient -----------------------------------------------------------------------------


def _local_embedding_backward(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Return the rows of the weight's gradient in this rank's shard."""
    rows, start = ctx.shape()[0], ctx.result_offset(0)
    grad = argument(op, args, kwargs, schema_of(op).arguments[0].name)
    if not grad.numel():
        return grad.new_zeros(ctx.shape())
    if rows == ctx.result.shape[0]:
        return op(*args, **kwargs)
    index, padding = (argument(op, args, kwargs, "indices"),
                      argument(op, args, kwargs, "padding_idx"))  # fmt: skip
    inside = (index >= start) & (index < start + rows)
    # The spare row before the first takes the padding and the indices outside the shard.
    is_counted = inside & (index != padding)
    changed = {"indices": torch.where(is_counted, index - (start - 1), 0), "num_weights": rows + 1,
               "padding_idx": 0}  # fmt: skip
    return call_with(op, args, kwargs, **changed)[1:]


def _dense_backward(call: OpCall) -> Rule | None:
    """Rule of the weight's gradient: indices are summed, unless scaled by their frequencies."""
    if call.has("sparse") and call.get("sparse"):
        return None
    index = dim_factors(call.operands[1].ndim, "i")
    from_start = bool(call.get("scale_grad_by_freq"))
    reductions = () if from_start else tuple((f, "sum") for (f,) in index)
    return Rule(((*index, ("d",)), index), ((("v",), ("d",)),), reductions, modes=linear_modes(0),
                local=_local_embedding_backward)  # fmt: skip


# -- bags -------------------------------------------------------------------------------------


def _local_bag(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Return sums or averages over bags of rows of a sharded weight."""
    shard = dim_shard(ctx, 0, 0)
    if shard.is_unsharded:
        return op(*args, **kwargs)
    index = argument(op, args, kwargs, "indices")
    rows = spare_row_index(index, shard)
    padding = _padding(op, args, kwargs, shard.size)
    # Two spare rows of zeros: one for the padding, which no bag counts, one for other shards.
    weight = with_spare_row(with_spare_row(argument(op, args, kwargs, "weight"), 0), 0)
    changed: dict[str, Any] = {"weight": weight, "indices": torch.where(rows < 0, rows, rows + 1)}
    if padding is not None:
        changed["indices"] = changed["indices"].masked_fill(index == padding, 0)
        changed["padding_idx"] = 0
    return call_with(op, args, kwargs, **changed)


def _padding(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], rows: int) -> int | None:
    if not any(argument.name == "padding_idx" for argument in schema_of(op).arguments):
        return None
    padding: int | None = argument(op, args, kwargs, "padding_idx")
    if padding is None or (padding < 0 and schema_of(op).name != "aten::embedding_bag"):
        return None
    return padding % max(rows, 1)


def _bag(call: OpCall) -> Rule:
    """Rule `vd,1,1->1d` of `embedding_bag`: rows are summed, except in maxima.

    Only the bags are results.

    Other results are for PyTorch's own backward, with device-dependent shapes.
    """
    largest = call.get("mode") == MAX
    others = tuple(((),) * meta.ndim for meta in call.operands[1:])
    bags, others_of_results = (((), ("d",)),), (None,) * (len(call.results) - 1)
    scale = call.operand_index("per_sample_weights")
    linear_in = () if largest else (0,) if scale is None else (0, scale)
    rule = Rule(((("v",), ("d",)), *others), (*bags, *others_of_results),
                () if largest else (("v", "sum"),),
                modes=linear_modes(*linear_in, results=len(call.results)),
                local=_local_bag)  # fmt: skip
    return _restrict_gradient(call, rule)


register_rule("embedding")(_embedding)
register_rule("embedding_renorm")(_renorm)
register_rule("embedding_dense_backward", "embedding_backward")(_dense_backward)
register_rule("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")(_bag)


# -- one-hot codes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalOneHot:
    """Local one-hot code with one more class in front for the classes of other ranks."""

    classes: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        last = len(ctx.shape()) - 1
        count, begin = ctx.shape()[last], ctx.result_offset(last)
        if count == self.classes:
            return op(*args, **kwargs)
        x = argument(op, args, kwargs, "self")
        inside = x >= begin
        if begin + count < self.classes:
            inside = inside & (x < begin + count)
        local_class = torch.where(inside, x - (begin - 1), x.clamp(max=0))
        local_code = call_with(op, args, kwargs, self=local_class, num_classes=count + 1)
        return local_code.narrow(-1, 1, count)


def _one_hot(call: OpCall) -> Rule:
    """Rule `ab->abc` of `one_hot`: the classes `c` may be sharded."""
    x = call.operands[0]
    dims = dim_factors(x.ndim)
    return Rule((dims,), ((*dims, ("c",)),), local=_LocalOneHot(call.get("num_classes")))


register_rule("one_hot")(_one_hot)
