"""Connectionist temporal classification: `ctc_loss` as one operation for every sequence.

PyTorch's own returns a table whose shape depends on the longest target, which a trace cannot have.
The gradient computes that table again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.index.gather import unsharded_rule
from fshard.ops.rules.nn.losses import MEAN, NONE, reduced

aten = torch.ops.aten


@torch.library.custom_op("fshard::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor,
    blank: int, zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """Return the loss of each sequence.

    Args:
        log_probs: shape (time, sequences, classes).
        targets: shape (sequences, length), or all targets in a row.
        input_lengths: the time of each sequence.
        target_lengths: the length of each target.
        blank: the class of no label.
        zero_infinity: whether gradients of infinite losses are zeros.
    """
    sequences = log_probs, targets, input_lengths, target_lengths
    if not log_probs.shape[1]:
        return log_probs.new_empty(0)
    return aten._ctc_loss(*sequences, blank, zero_infinity)[0]  # type: ignore[no-any-return]


@torch.library.custom_op("fshard::ctc_losses_backward", mutates_args=())
def ctc_losses_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor,
    target_lengths: Tensor, blank: int, zero_infinity: bool,
) -> Tensor:  # fmt: skip
    """Return the gradient of the log-probabilities."""
    sequences = log_probs, targets, input_lengths, target_lengths
    if not log_probs.shape[1]:
        return torch.empty_like(log_probs)
    results = aten._ctc_loss(*sequences, blank, zero_infinity)
    return aten._ctc_loss_backward(grad, *sequences, *results, blank, zero_infinity)  # type: ignore[no-any-return]


@ctc_losses.register_fake
def _(log_probs: Tensor, *rest: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_losses_backward.register_fake
def _(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ctc_losses_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 5


ctc_losses.register_autograd(_backward, setup_context=_save)


@register_rule("fshard::ctc_losses", "fshard::ctc_losses_backward")
def _ctc(call: OpCall) -> Rule:
    """Rule `1n1,n1,n,n->n`, and of the gradient: sequences may be sharded, not time and classes."""
    targets = call.operands[-3]
    if targets.ndim != 2:
        return unsharded_rule(call)
    n: Dims = (("n",),)
    x: Dims = ((), *n, ())
    operands = x, (*n, ()), n, n
    has_grad = len(call.operands) > len(operands)
    return Rule((n, *operands) if has_grad else operands, (x if has_grad else n,))


register_rule("ctc_loss")(unsharded_rule)


@register_decomposition(aten.ctc_loss.IntList, aten.ctc_loss.Tensor)
def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int], blank: int = 0, reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Compute `torch.ctc_loss`."""
    frames = log_probs if log_probs.ndim == 3 else log_probs.unsqueeze(1)
    times, lengths = (
        torch.as_tensor(x, device=log_probs.device).reshape(-1)
        for x in (input_lengths, target_lengths)
    )
    losses = ctc_losses(frames, targets, times, lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == MEAN:
        losses = losses / lengths.clamp_min(1)
    is_single = reduction == NONE and log_probs.ndim == 2
    return losses.squeeze(0) if is_single else reduced(losses, reduction)
