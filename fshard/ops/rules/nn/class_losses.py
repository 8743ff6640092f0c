"""Rules of losses over classes: nll_loss, cross_entropy_loss, multi_margin_loss, ...

A likelihood is looked up, so that classes may be cut: every rank has those of its classes, an
unreduced sum. A mean is weighted by the classes that occur, which no rank knows alone where
samples are cut: by decomposition it is two unreduced sums and a division. A cross entropy over cut
classes is, by decomposition, a softmax's maximum and sum of exponentials and a lookup, after
Megatron-LM's vocabulary-parallel cross entropy (arXiv 1909.08053).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import dim_factors, is_inexact, linear_modes
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.index.gather import whole
from fshard.ops.rules.index.local_indices import locate, part_of
from fshard.ops.rules.nn.losses import MEAN, NONE, SUM, LocalMeanLoss
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_argument

__all__: list[str] = []

aten = torch.ops.aten

AWAY = -100
"""The class of what is ignored ctx, and of what other ranks have."""


def _class_dim(ndim: int) -> int:
    return 1 if ndim > 1 else 0


def _dims(x: Meta) -> tuple[Dims, Dims]:
    """Factors of a tensor with classes, and of one without: `c` is that of the classes."""
    at = _class_dim(x.ndim)
    beside = dim_factors(x.ndim - 1)
    return (*beside[:at], ("c",), *beside[at:]), beside


# -- negative log likelihood ------------------------------------------------------------------


def _likelihood(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """The likelihoods of a rank's classes; a mean over the weights of all."""
    x, target = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "target")
    at = _class_dim(x.ndim)
    part = part_of(ctx, 0, at)
    if part.is_whole:
        return op(*args, **kwargs)
    weight, reduction, ignored = (argument(op, args, kwargs, name)
                                  for name in ("weight", "reduction", "ignore_index"))  # fmt: skip
    both = schema_of(op).name.endswith("_forward")
    if part.is_empty:
        nothing = x.new_zeros(ctx.shape())
        return (nothing, x.new_zeros(())) if both else nothing
    mine, there = locate(target, part)
    mine = mine.masked_fill((target == ignored) | ~(there | (target < 0)), AWAY)
    changed = {"target": mine, "ignore_index": AWAY}
    if reduction == MEAN:
        changed["reduction"] = SUM
    if weight is not None and weight.shape[0] == part.size:
        changed["weight"] = weight.narrow(0, part.begin, part.end - part.begin)
    for name, value in changed.items():
        _, args, kwargs = with_argument(op, args, kwargs, name, value)
    out = op(*args, **kwargs)
    if reduction != MEAN:
        return out
    count = _weights_of(target, weight, ignored, x.dtype).sum()
    return (out[0] / count, out[1]) if both else out / count


def _weights_of(target: Tensor, weight: Tensor | None, ignored: int, dtype: torch.dtype) -> Tensor:
    """What every sample weighs: its class's weight, nothing where it is ignored."""
    counts = target != ignored
    if weight is None:
        return counts.to(dtype)
    return weight[target.masked_fill(~counts, 0)].masked_fill(~counts, 0)


def _nll(call: OpCall) -> Rule:
    """Samples pass or are summed, but for a mean; classes are summed."""
    x, reduction = call.operands[0], call.get("reduction")
    if not x.ndim:
        return whole(call)
    given, beside = _dims(x)
    weight = call.operand_index("weight") is not None
    operands: tuple[Dims, ...] = (given, beside)
    if weight:
        operands += (((),) if reduction == MEAN else (("c",),),)
    made = beside if reduction == NONE else ()
    lacking = {"c"} | ({f for (f,) in beside} if reduction == SUM else set())
    results = (made, ()) if len(call.results) == 2 else (made,)
    samples = {f for (f,) in beside}
    if len(call.results) == 2 and reduction == NONE:
        lacking |= samples  # the second result is nothing then
    needed = samples if reduction == MEAN else set()
    # The second result counts weights: it is the same whatever the likelihoods are.
    modes = linear_modes(0, results=len(call.results), affine=len(call.results) == 2)
    if weight and reduction != MEAN:
        modes += linear_modes(2, results=len(call.results))
    return Rule(operands, results, tuple((f, "sum") for f in sorted(lacking)), frozenset(needed),
                modes=modes, local=_likelihood)  # fmt: skip


def _nll_backward(call: OpCall) -> Rule:
    """Samples and classes pass."""
    given, beside = _dims(call.operands[1])
    gradient = beside if call.get("reduction") == NONE else ()
    weight = () if call.operand_index("weight") is None else ((("c",),),)
    operands = (gradient, given, beside, *weight, ())
    return Rule(operands, (given,), modes=linear_modes(0), local=_likelihood_of)


def _likelihood_of(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
    """The gradient of likelihoods with respect to a rank's classes.

    Of a mean that of a sum: PyTorch's gradient of this operation takes the mean of what it is given
    itself, here a part.
    """
    if argument(op, args, kwargs, "reduction") == MEAN:
        count = argument(op, args, kwargs, "total_weight")
        grad = argument(op, args, kwargs, "grad_output") / count
        _, args, kwargs = with_argument(op, args, kwargs, "grad_output", grad)
        _, args, kwargs = with_argument(op, args, kwargs, "reduction", SUM)
    x, target = argument(op, args, kwargs, "self"), argument(op, args, kwargs, "target")
    part = part_of(ctx, 1, _class_dim(x.ndim))
    if part.is_whole:
        return op(*args, **kwargs)
    if part.is_empty:
        return x.new_zeros(ctx.shape())
    mine, there = locate(target, part)
    ignored = argument(op, args, kwargs, "ignore_index")
    mine = mine.masked_fill((target == ignored) | ~(there | (target < 0)), AWAY)
    _, args, kwargs = with_argument(op, args, kwargs, "target", mine)
    _, args, kwargs = with_argument(op, args, kwargs, "ignore_index", AWAY)
    return op(*args, **kwargs)


register_rule("nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "nll_loss2d_forward")(
    _nll
)
register_rule("nll_loss_backward", "nll_loss2d_backward")(_nll_backward)


# -- cross entropy ----------------------------------------------------------------------------


def _cross_entropy(call: OpCall) -> Rule:
    """Samples pass or are summed, but for a mean of labels; classes are needed whole."""
    x, target = call.operands[:2]
    if not x.ndim:
        return whole(call)
    given, beside = _dims(x)
    reduction, likely = call.get("reduction"), is_inexact(target)
    weight = () if call.operand_index("weight") is None else ((("c",),),)
    samples = [f for (f,) in beside]
    needed = frozenset({"c"} | (set(samples) if reduction == MEAN and not likely else set()))
    summed = reduction != NONE
    modes = linear_modes(1, affine=call.get("label_smoothing") != 0) if likely else ()
    if weight and (likely or reduction != MEAN):
        modes += linear_modes(2)
    local = LocalMeanLoss(math.prod(x.shape), (0,)) if likely and reduction == MEAN else None
    return Rule((given, given if likely else beside, *weight), (() if summed else beside,),
                tuple((f, "sum") for f in samples) if summed else (), needed, modes=modes,
                local=local)  # fmt: skip


register_rule("cross_entropy_loss")(_cross_entropy)


# -- decompositions ---------------------------------------------------------------------------


def _inner(reduction: int) -> int:
    """The reduction whose rule cuts samples and classes, from which a mean is made."""
    return NONE if reduction == NONE else SUM


def _decomposed_nll(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = AWAY,
) -> Tensor:  # fmt: skip
    """A mean is two sums and a division."""
    loss: Tensor = aten.nll_loss_nd(x, target, weight, _inner(reduction), ignore_index)
    if reduction != MEAN:
        return loss
    return loss / _weights_of(target, weight, ignore_index, x.dtype).sum()


def _decomposed_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """As `_decomposed_nll`, with the sum of the weights."""
    loss: Tensor = aten.nll_loss_nd(x, target, weight, _inner(reduction), ignore_index)
    if reduction == NONE:
        return loss, x.new_zeros(())
    total = _weights_of(target, weight, ignore_index, x.dtype).sum()
    return (loss if reduction == SUM else loss / total), total


def _decomposed_cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = AWAY, label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    """A mean is a sum and a division; the rest a maximum, a sum of exponentials and a lookup."""
    if reduction == MEAN:
        total: Tensor = aten.cross_entropy_loss(
            x, target, weight, SUM, ignore_index, label_smoothing
        )
        if target.dtype.is_floating_point:
            return total / (x.numel() // max(x.shape[_class_dim(x.ndim)], 1))
        return total / _weights_of(target, weight, ignore_index, x.dtype).sum()
    at = _class_dim(x.ndim)
    shifted = x - x.detach().amax(at, keepdim=True)
    if target.dtype.is_floating_point:
        return _of_probabilities(shifted, target, weight, reduction, label_smoothing, at)
    return _of_labels(shifted, target, weight, reduction, ignore_index, label_smoothing, at)


def _of_probabilities(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float, at: int
) -> Tensor:
    """The loss of logits whose maximum is zero, of which nothing overflows.

    What is a sum over the classes of a rank is reduced apart from what every rank has: it is a
    number then.
    """
    total = x.exp().sum(at, keepdim=True).log()
    if smoothing:
        target = target * (1 - smoothing) + smoothing / x.shape[at]
    if weight is not None:
        target = target * weight.reshape(_along(x.ndim, at))
    even, found = total.squeeze(at) * target.sum(at), (x * target).sum(at)
    return even - found if reduction == NONE else even.sum() - found.sum()


def _of_labels(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int,
    smoothing: float, at: int,
) -> Tensor:  # fmt: skip
    """As `_of_probabilities`, with a lookup."""
    total = x.exp().sum(at, keepdim=True).log()
    even = total.squeeze(at) * _weights_of(target, weight, ignored, x.dtype)
    found: Tensor = aten.nll_loss_nd(x, target, weight, reduction, ignored)
    loss = even + found if reduction == NONE else even.sum() + found
    if not smoothing:
        return loss
    apart = total - x if weight is None else (total - x) * weight.reshape(_along(x.ndim, at))
    share = apart.sum(at).masked_fill(target == ignored, 0)
    share = share if reduction == NONE else share.sum()
    return (1 - smoothing) * loss + smoothing / x.shape[at] * share


def _along(ndim: int, at: int) -> list[int]:
    """The shape of weights of classes that broadcasts to a tensor with classes."""
    return [-1 if dim == at else 1 for dim in range(ndim)]


register_decomposition("nll_loss", "nll_loss2d", "nll_loss_nd")(_decomposed_nll)
register_decomposition("nll_loss_forward", "nll_loss2d_forward")(_decomposed_forward)
register_decomposition("cross_entropy_loss")(_decomposed_cross_entropy)


# -- margins ----------------------------------------------------------------------------------


def _margins(call: OpCall) -> Rule:
    """Samples pass or are summed; classes are needed whole."""
    backward = schema_of(call.op).name.endswith("_backward")
    x = call.operands[1 if backward else 0]
    reduction = call.get("reduction")
    if x.ndim != 2:
        return whole(call)
    sample: Dims = (("n",),)
    one: Dims = sample if reduction == NONE else ()
    weight = call.operand_index("weight") if call.has("weight") else None

    def dims(place: int, meta: Meta) -> Dims:
        if backward and place == 0:
            return one
        if meta.ndim == 2:
            return (("n",), ())
        # A vector is one of the samples, or of weights of the classes.
        return ((),) if place == weight else sample

    operands = tuple(dims(at, each) for at, each in enumerate(call.operands))
    results: tuple[Dims, ...] = ((("n",), ()),) if backward else (one,)
    if len(call.results) == 2:
        results += ((("n",), ()),)
    local = LocalMeanLoss(x.shape[0], (1 if backward else 0,), 1) if reduction == MEAN else None
    return Rule(operands, results, () if backward or reduction == NONE else (("n", "sum"),),
                modes=linear_modes(0) if backward else (), local=local)  # fmt: skip


register_rule("multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss",
              "multilabel_margin_loss_forward", "multilabel_margin_loss_backward",
)(_margins)  # fmt: skip
