"""Rules of losses of elements and of feature rows.

mse_loss, l1_loss, smooth_l1_loss, huber_loss, binary_cross_entropy, kl_div, poisson_nll_loss,
soft_margin_loss, cosine_embedding_loss, triplet_margin_loss, gradients. Sums are unreduced over
sharded dims; a mean divides a shard's sum by the global number of elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import align_factors, dim_factors, linear_modes
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Mode, Rule
from fshard.ops.rules.index.gather import broadcast_shape, unsharded_rule
from fshard.ops.rules.shard_call import zero_results
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext

NONE, MEAN, SUM = range(3)
"""Values of the argument `reduction`."""


@dataclass(frozen=True, slots=True)
class LocalMeanLoss:
    """Local mean loss, or its gradient, scaled to a mean over `count` global values.

    The local count is the size of the shape to which the operands `rows` broadcast, without the
    last `after` dims.
    """

    count: int
    rows: tuple[int, ...]
    after: int = 0

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Compute the loss on one rank."""
        shape = broadcast_shape([ctx.operands[i].local_shape(ctx.rank) for i in self.rows])
        local_count = math.prod(shape[: len(shape) - self.after])
        if local_count == self.count:
            return op(*args, **kwargs)
        if not local_count:
            # The mean of an empty shard is NaN, and PyTorch does not write some of its sums.
            return zero_results(args, kwargs, ctx)
        out = op(*args, **kwargs)
        share = local_count / self.count
        return (out[0] * share, *out[1:]) if isinstance(out, tuple) else out * share


def reduced(loss: Tensor, reduction: int) -> Tensor:
    """Reduce the elements of a loss as `reduction` says."""
    if reduction == NONE:
        return loss
    return loss.sum() if reduction == SUM else loss.mean()


# -- losses of single elements ----------------------------------------------------------------


def _elementwise(call: OpCall) -> Rule:
    """Rule `ab,ab->` of elementwise losses; `ab,ab->ab` with `reduction="none"`."""
    shape = broadcast_shape([meta_.shape for meta_ in call.operands])
    factors = dim_factors(len(shape))
    operands = tuple(align_factors(meta_.shape, shape, factors) for meta_ in call.operands)
    backward = schema_of(call.op).name.endswith("_backward")
    meta = call.result
    result = align_factors(meta.shape, shape, factors)
    sums = call.get("reduction") != NONE and not backward
    used = {f for dims in operands for dim in dims for f in dim}
    reductions = tuple((f, "sum") for (f,) in factors if f in used) if sums else ()
    all_operands = tuple(range(len(operands)))
    local = LocalMeanLoss(math.prod(shape), all_operands) if call.get("reduction") == MEAN else None
    # PyTorch divides these gradients by the first operand's size, even if it broadcasts.
    broadcasts = call.get("reduction") == MEAN and any(
        meta_.shape != shape for meta_ in call.operands
    )
    wrong_gradient = broadcasts and schema_of(call.op).name.removeprefix("aten::") in BY_FIRST
    return Rule(operands, (result,), reductions, modes=_linear_in(call, backward),
                no_grad=frozenset(used) if wrong_gradient else frozenset(),
                local=local)  # fmt: skip


def _linear_in(call: OpCall, backward: bool) -> tuple[Mode, ...]:
    """Return the modes of operands that a loss is linear in, or affine."""
    if backward:
        return linear_modes(0)
    match schema_of(call.op).name.removeprefix("aten::"):
        case "kl_div":
            return linear_modes(0, affine=True)
        case "poisson_nll_loss":
            return () if call.get("full") else linear_modes(1, affine=True)
        case "binary_cross_entropy_with_logits":
            return linear_modes(1, affine=True) + _weights(call)
        case "binary_cross_entropy":
            return _weights(call)  # partial sums of a target may be outside the accepted range
    return ()


def _weights(call: OpCall) -> tuple[Mode, ...]:
    weight = call.operand_index("weight")
    return () if weight is None else linear_modes(weight)


ELEMENTWISE = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div soft_margin_loss
    binary_cross_entropy_with_logits hinge_embedding_loss margin_ranking_loss poisson_nll_loss
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
    soft_margin_loss_backward
""".split()  # noqa: SIM905
BY_FIRST = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss")
register_rule(*ELEMENTWISE)(_elementwise)


# -- losses of rows of features ---------------------------------------------------------------


def _rows(call: OpCall) -> Rule:
    """Rule `nc,nc->` of losses of feature rows: `n` is summed; features `c` stay unsharded."""
    features = _features(call)
    shape = broadcast_shape([x.shape for x in call.operands[:features]])
    rows = shape[:-1]
    others = [x.shape for x in call.operands[features:]]
    if not shape or any(x != rows for x in others):
        return unsharded_rule(call)
    factors = (*dim_factors(len(rows)), ("c",))
    operands = tuple(align_factors(x.shape, shape, factors) for x in call.operands[:features])
    operands += (factors[:-1],) * len(others)
    reduction = call.get("reduction")
    result = factors[:-1] if reduction == NONE else ()
    used = {f for dims in operands for dim in dims for f in dim}
    reductions = tuple((f, "sum") for (f,) in factors[:-1] if reduction != NONE and f in used)
    local = LocalMeanLoss(math.prod(rows), tuple(range(features)), 1) if reduction == MEAN else None
    return Rule(operands, (result,), reductions, frozenset({"c"} & used), local=local)


def _features(call: OpCall) -> int:
    return 3 if schema_of(call.op).name == "aten::triplet_margin_loss" else 2


register_rule("cosine_embedding_loss", "triplet_margin_loss")(_rows)

EPSILON = 1e-12
"""Constant that `cosine_embedding_loss` adds to the squares of both lengths."""


@register_decomposition(torch.ops.aten.cosine_embedding_loss.default)
def _cosine_embedding(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, reduction: int = MEAN
) -> Tensor:
    """Decompose into three sums over the features, which may be sharded."""
    product = (input1 * input2).sum(-1)
    lengths = ((input1 * input1).sum(-1) + EPSILON) * ((input2 * input2).sum(-1) + EPSILON)
    cosine = product / lengths.sqrt()
    zeros = torch.zeros_like(cosine)
    similar = torch.where(target == 1, 1 - cosine, zeros)
    return reduced(similar + torch.where(target == -1, (cosine - margin).clamp_min(0), zeros),
                   reduction)  # fmt: skip


@register_decomposition(torch.ops.aten.triplet_margin_loss.default)
def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, reduction: int = MEAN,
) -> Tensor:  # fmt: skip
    """Decompose into norms over the features, which may be sharded."""

    def distance(x: Tensor, y: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x - y + eps, p, -1)
        return length

    negative_distance = distance(anchor, negative)
    if swap:
        negative_distance = torch.minimum(negative_distance, distance(positive, negative))
    return reduced((margin + distance(anchor, positive) - negative_distance).clamp_min(0),
                   reduction)  # fmt: skip
