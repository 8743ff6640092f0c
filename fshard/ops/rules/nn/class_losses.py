"""Rules of losses over classes.

nll_loss, nll_loss2d, cross_entropy_loss, multi_margin_loss, multilabel_margin_loss, gradients.

A likelihood is a lookup, so that classes may be sharded: each rank looks up its own classes, an
unreduced sum. A mean is weighted by the classes that occur, which no rank with some samples can
compute: it is decomposed into two unreduced sums and a division. A cross entropy over sharded
classes is decomposed into a maximum, a sum of exponentials and a lookup, after Megatron-LM's
vocabulary-parallel cross entropy (arXiv 1909.08053).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fshard._torch.operators import schema_of
from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import dim_factors, linear_modes
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, LocalFunction, Rule
from fshard.ops.rules.index.gather import unsharded_rule
from fshard.ops.rules.index.local_indices import dim_shard, locate
from fshard.ops.rules.nn.losses import MEAN, NONE, SUM, LocalMeanLoss
from fshard.ops.rules.shard_call import ShardCall, call_with
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_argument

aten = torch.ops.aten

IGNORED = -100
"""Class index of ignored samples and of samples whose class is on another rank."""


def _class_dim(ndim: int) -> int:
    return 1 if ndim > 1 else 0


def _dims(x: Meta) -> tuple[Dims, Dims]:
    """Return the factors of a tensor with classes, factor `c`, and of one without."""
    class_dim = _class_dim(x.ndim)
    samples = dim_factors(x.ndim - 1)
    return (*samples[:class_dim], ("c",), *samples[class_dim:]), samples


# -- negative log likelihood ------------------------------------------------------------------


def _local_nll(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Return the likelihoods of a rank's classes; a mean divides by the weights of all classes."""
    x, target = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "target")
    class_dim = _class_dim(x.ndim)
    shard = dim_shard(ctx, 0, class_dim)
    if shard.is_unsharded:
        return op(*args, **kwargs)
    weight, reduction, ignored = (argument(op, args, kwargs, name)
                                  for name in ("weight", "reduction", "ignore_index"))  # fmt: skip
    has_total = schema_of(op).name.endswith("_forward")
    if shard.is_empty:
        nothing = x.new_zeros(ctx.shape())
        return (nothing, x.new_zeros(())) if has_total else nothing
    labels, inside = locate(target, shard)
    labels = labels.masked_fill((target == ignored) | ~(inside | (target < 0)), IGNORED)
    changed = {"target": labels, "ignore_index": IGNORED}
    if reduction == MEAN:
        changed["reduction"] = SUM
    if weight is not None and weight.shape[0] == shard.size:
        changed["weight"] = weight.narrow(0, shard.begin, shard.end - shard.begin)
    out = call_with(op, args, kwargs, **changed)
    if reduction != MEAN:
        return out
    count = _weights_of(target, weight, ignored, x.dtype).sum()
    return (out[0] / count, out[1]) if has_total else out / count


def _weights_of(target: Tensor, weight: Tensor | None, ignored: int, dtype: torch.dtype) -> Tensor:
    """Return each sample's weight: its class's weight, zero if it is ignored."""
    is_counted = target != ignored
    if weight is None:
        return is_counted.to(dtype)
    return weight[target.masked_fill(~is_counted, 0)].masked_fill(~is_counted, 0)


def _nll(call: OpCall) -> Rule:
    """Rule `nc,n->` of `nll_loss`: classes are summed, and samples except in a mean."""
    x, reduction = call.operands[0], call.get("reduction")
    if not x.ndim:
        return unsharded_rule(call)
    dims, sample_dims = _dims(x)
    weight = call.operand_index("weight") is not None
    operands: tuple[Dims, ...] = (dims, sample_dims)
    if weight:
        operands += (((),) if reduction == MEAN else (("c",),),)
    result_dims = sample_dims if reduction == NONE else ()
    summed = {"c"} | ({f for (f,) in sample_dims} if reduction == SUM else set())
    results = (result_dims, ()) if len(call.results) == 2 else (result_dims,)
    samples = {f for (f,) in sample_dims}
    if len(call.results) == 2 and reduction == NONE:
        summed |= samples  # the second result is zero then
    unsharded = samples if reduction == MEAN else set()
    # The second result sums weights and does not depend on the likelihoods.
    modes = linear_modes(0, results=len(call.results), affine=len(call.results) == 2)
    if weight and reduction != MEAN:
        modes += linear_modes(2, results=len(call.results))
    return Rule(operands, results, tuple((f, "sum") for f in sorted(summed)), frozenset(unsharded),
                modes=modes, local=_local_nll)  # fmt: skip


def _nll_backward(call: OpCall) -> Rule:
    """Rule of the gradient of `nll_loss`: samples and classes may be sharded."""
    dims, sample_dims = _dims(call.operands[1])
    gradient = sample_dims if call.get("reduction") == NONE else ()
    weight = () if call.operand_index("weight") is None else ((("c",),),)
    operands = (gradient, dims, sample_dims, *weight, ())
    return Rule(operands, (dims,), modes=linear_modes(0), local=_local_nll_backward)


def _local_nll_backward(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """Return the gradient with respect to a rank's classes.

    A mean is computed as a sum of scaled gradients: PyTorch's gradient of this operation averages
    over the samples it is given, here those of one shard.
    """
    if argument(op, args, kwargs, "reduction") == MEAN:
        count = argument(op, args, kwargs, "total_weight")
        grad = argument(op, args, kwargs, "grad_output") / count
        _, args, kwargs = with_argument(op, args, kwargs, "grad_output", grad)
        _, args, kwargs = with_argument(op, args, kwargs, "reduction", SUM)
    x, target = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "target")
    shard = dim_shard(ctx, 1, _class_dim(x.ndim))
    if shard.is_unsharded:
        return op(*args, **kwargs)
    if shard.is_empty:
        return x.new_zeros(ctx.shape())
    labels, inside = locate(target, shard)
    ignored = argument(op, args, kwargs, "ignore_index")
    labels = labels.masked_fill((target == ignored) | ~(inside | (target < 0)), IGNORED)
    return call_with(op, args, kwargs, target=labels, ignore_index=IGNORED)


register_rule("nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward",
              "nll_loss2d_forward")(_nll)  # fmt: skip
register_rule("nll_loss_backward", "nll_loss2d_backward")(_nll_backward)


# -- cross entropy ----------------------------------------------------------------------------


def _cross_entropy(call: OpCall) -> Rule:
    """Rule `nc,n->` of `cross_entropy_loss`: samples are summed, except in a mean over labels."""
    x, target = call.operands[:2]
    if not x.ndim:
        return unsharded_rule(call)
    dims, sample_dims = _dims(x)
    reduction, has_probabilities = call.get("reduction"), is_inexact(target)
    weight = () if call.operand_index("weight") is None else ((("c",),),)
    samples = [f for (f,) in sample_dims]
    unsharded = frozenset(
        {"c"} | (set(samples) if reduction == MEAN and not has_probabilities else set())
    )
    is_reduced = reduction != NONE
    modes = linear_modes(1, affine=call.get("label_smoothing") != 0) if has_probabilities else ()
    if weight and (has_probabilities or reduction != MEAN):
        modes += linear_modes(2)
    local = (
        LocalMeanLoss(math.prod(x.shape), (0,)) if has_probabilities and reduction == MEAN else None
    )
    return Rule((dims, dims if has_probabilities else sample_dims, *weight),
                (() if is_reduced else sample_dims,),
                tuple((f, "sum") for f in samples) if is_reduced else (), unsharded, modes=modes,
                local=local)  # fmt: skip


register_rule("cross_entropy_loss")(_cross_entropy)


# -- decompositions ---------------------------------------------------------------------------


def _inner_reduction(reduction: int) -> int:
    """Return the reduction with sharded samples and classes from which the loss is computed."""
    return NONE if reduction == NONE else SUM


def _decomposed_nll(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = IGNORED,
) -> Tensor:  # fmt: skip
    """Decompose a mean into two sums and a division."""
    loss: Tensor = aten.nll_loss_nd(x, target, weight, _inner_reduction(reduction), ignore_index)
    if reduction != MEAN:
        return loss
    return loss / _weights_of(target, weight, ignore_index, x.dtype).sum()


def _decomposed_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Decompose as `_decomposed_nll`, and return the sum of the weights."""
    loss: Tensor = aten.nll_loss_nd(x, target, weight, _inner_reduction(reduction), ignore_index)
    if reduction == NONE:
        return loss, x.new_zeros(())
    total = _weights_of(target, weight, ignore_index, x.dtype).sum()
    return (loss if reduction == SUM else loss / total), total


def _decomposed_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = IGNORED, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """Decompose into a maximum, a sum of exponentials and a lookup; a mean also into a division."""
    if reduction == MEAN:
        total: Tensor = aten.cross_entropy_loss(x, target, weight, SUM, ignore_index,
                                                label_smoothing)  # fmt: skip
        if target.dtype.is_floating_point:
            return total / (x.numel() // max(x.shape[_class_dim(x.ndim)], 1))
        return total / _weights_of(target, weight, ignore_index, x.dtype).sum()
    class_dim = _class_dim(x.ndim)
    shifted = x - x.detach().amax(class_dim, keepdim=True)
    if target.dtype.is_floating_point:
        return _of_probabilities(shifted, target, weight, reduction, label_smoothing, class_dim)
    return _of_labels(shifted, target, weight, reduction, ignore_index, label_smoothing, class_dim)


class _LogSum(torch.autograd.Function):
    """Logarithm of a sum of exponentials of values up to zero, which saves only these values."""

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return x.exp().sum(dim, keepdim=True).log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, total = ctx.saved_tensors
        return grad * (x - total).exp(), None


def _of_probabilities(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float,
    class_dim: int,
) -> Tensor:  # fmt: skip
    """Return the loss for target probabilities of logits whose maximum is zero.

    Sums over a rank's classes and invariant values are reduced separately, as scalars.
    """
    total: Tensor = _LogSum.apply(x, class_dim)  # type: ignore[no-untyped-call]
    if smoothing:
        target = target * (1 - smoothing) + smoothing / x.shape[class_dim]
    if weight is not None:
        target = target * weight.reshape(_weight_shape(x.ndim, class_dim))
    entropy, products = (total.squeeze(class_dim) * target.sum(class_dim),
                         (x * target).sum(class_dim))  # fmt: skip
    return entropy - products if reduction == NONE else entropy.sum() - products.sum()


def _of_labels(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int,
    smoothing: float, class_dim: int,
) -> Tensor:  # fmt: skip
    """Return the loss for labels, as `_of_probabilities` with a lookup."""
    total: Tensor = _LogSum.apply(x, class_dim)  # type: ignore[no-untyped-call]
    entropy = total.squeeze(class_dim) * _weights_of(target, weight, ignored, x.dtype)
    lookup: Tensor = aten.nll_loss_nd(x, target, weight, reduction, ignored)
    loss = entropy + lookup if reduction == NONE else entropy.sum() + lookup
    if not smoothing:
        return loss
    weighted = (
        total - x
        if weight is None
        else (total - x) * weight.reshape(_weight_shape(x.ndim, class_dim))
    )
    share = weighted.sum(class_dim).masked_fill(target == ignored, 0)
    share = share if reduction == NONE else share.sum()
    return (1 - smoothing) * loss + smoothing / x.shape[class_dim] * share


def _weight_shape(ndim: int, class_dim: int) -> list[int]:
    """Return the shape in which class weights broadcast to a tensor with classes."""
    return [-1 if dim == class_dim else 1 for dim in range(ndim)]


register_decomposition("nll_loss", "nll_loss2d", "nll_loss_nd")(_decomposed_nll)
register_decomposition("nll_loss_forward", "nll_loss2d_forward")(_decomposed_forward)
register_decomposition("cross_entropy_loss")(_decomposed_cross_entropy)


# -- margins ----------------------------------------------------------------------------------


def _margins(call: OpCall) -> Rule:
    """Rule `n1,n->` of margin losses: samples are summed; classes stay unsharded."""
    backward = schema_of(call.op).name.endswith("_backward")
    x = call.operands[1 if backward else 0]
    reduction = call.get("reduction")
    if x.ndim != 2:
        return unsharded_rule(call)
    sample: Dims = (("n",),)
    loss_dims: Dims = sample if reduction == NONE else ()
    weight = call.operand_index("weight") if call.has("weight") else None

    def dims(place: int, meta: Meta) -> Dims:
        if backward and place == 0:
            return loss_dims
        if meta.ndim == 2:
            return (("n",), ())
        # A vector has one value per sample, or one weight per class.
        return ((),) if place == weight else sample

    operands = tuple(dims(i, meta) for i, meta in enumerate(call.operands))
    results: tuple[Dims, ...] = ((("n",), ()),) if backward else (loss_dims,)
    if len(call.results) == 2:
        results += ((("n",), ()),)
    local: LocalFunction = ShardCall()  # PyTorch does not write the sum of no samples
    if reduction == MEAN:
        local = LocalMeanLoss(x.shape[0], (1 if backward else 0,), 1)
    return Rule(operands, results, () if backward or reduction == NONE else (("n", "sum"),),
                modes=linear_modes(0) if backward else (), local=local)  # fmt: skip


register_rule("multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss",
              "multilabel_margin_loss_forward", "multilabel_margin_loss_backward",
              )(_margins)  # fmt: skip
