"""Updates of lists of tensors by one call of PyTorch."""

from __future__ import annotations

import torch

Tensors = list[torch.Tensor]


def foreach_adamw(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, *, step: int, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Write a step of AdamW to parameters and means, rounded as by `torch.optim.AdamW`.

    Args:
        params: parameters.
        grads: their gradients.
        means: means of gradients.
        squares: means of their squares.
        step: number of the step, from 1.
        lr: learning rate.
        beta1: decay of means.
        beta2: decay of squares.
        eps: added to roots.
        weight_decay: decoupled decay, times `lr`.
    """
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    scales = torch._foreach_sqrt(squares)
    torch._foreach_div_(scales, (1 - beta2**step) ** 0.5)
    torch._foreach_add_(scales, eps)
    torch._foreach_addcdiv_(params, means, scales, -lr / (1 - beta1**step))


def fused_adamw(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, *, step: int, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Write a step of AdamW as `foreach_adamw` by one kernel; all tensors have one dtype."""
    steps = [torch.tensor(float(step), device=params[0].device)] * len(params)
    torch._fused_adamw_(
        params, grads, means, squares, [], steps, lr=lr, beta1=beta1, beta2=beta2,
        weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip
