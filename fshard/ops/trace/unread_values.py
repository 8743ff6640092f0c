"""Functions of PyTorch without the reads of values that check them: a traced tensor has none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._torch.operators import FOREACH_ADD, IS_ALL_TRUE


def cov(
    input: Tensor,  # noqa: A002 - the name in torch
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Compute `torch.cov`; the values of the weights are not checked."""
    x = input if input.ndim == 2 else input.reshape(1, -1)
    weights = fweights if aweights is None else aweights
    if fweights is not None and aweights is not None:
        weights = fweights * aweights
    total: Any = x.shape[1] if weights is None else weights.sum()
    weighted = x if weights is None else x * weights
    centered = x - (weighted.sum(1) / total).unsqueeze(1)
    degrees = total - correction
    if weights is not None and aweights is not None and correction:
        degrees = total - correction * (weights * aweights).sum() / total
    degrees = max(degrees, 0) if weights is None else degrees.clamp_min(0)
    weighted_centered = centered if weights is None else centered * weights
    covariance: Tensor = (centered @ weighted_centered.mH) / degrees
    return covariance.squeeze()


def corrcoef(input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
    """Compute `torch.corrcoef`."""
    matrix = cov(input)
    if not matrix.ndim:
        return matrix / matrix
    scale = matrix.diagonal().real.sqrt() if matrix.is_complex() else matrix.diagonal().sqrt()
    matrix = matrix / scale.unsqueeze(1) / scale
    if matrix.is_complex():
        return torch.complex(matrix.real.clamp(-1, 1), matrix.imag.clamp(-1, 1))
    return matrix.clamp(-1, 1)


def gaussian_nll_loss(
    input: Tensor,  # noqa: A002 - the name in torch
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """Compute `F.gaussian_nll_loss`, whose gradient passes by the clamp; `var` is not checked."""
    var = torch.as_tensor(var, dtype=input.dtype, device=input.device)
    var = (var.unsqueeze(-1) if input.shape[:-1] == var.shape else var).expand_as(input)
    clamped = var.detach().clamp(min=eps) + (var - var.detach())
    loss = 0.5 * (clamped.log() + (input - target) ** 2 / clamped)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def where(condition: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute `torch.where`; fake tensors have shapes for boolean conditions only."""
    is_mask = condition.dtype == torch.uint8
    return torch.where(condition.bool() if is_mask else condition, *args, **kwargs)


def ctc_loss(*args: Any, reduction: str | int = "mean", **kwargs: Any) -> Tensor:
    """Compute `F.ctc_loss` or `torch.ctc_loss` as an operation that returns the losses alone."""
    from fshard.ops.rules.nn.sequence_losses import ctc_loss

    if isinstance(reduction, str):
        reduction = ("none", "mean", "sum").index(reduction)
    options = kwargs if len(args) > 5 else {**kwargs, "reduction": reduction}
    return ctc_loss(*args, **options)


def combinations(
    input: Tensor,  # noqa: A002 - the name in torch
    r: int = 2,
    with_replacement: bool = False,
) -> Tensor:
    """Compute `torch.combinations`, whose number of rows depends on the shape alone."""
    of = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    positions = torch.tensor([*of(range(len(input)), r)], dtype=torch.int64, device=input.device)
    return input[positions.reshape(-1, r)]


def with_lists(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of lists that takes a tensor as a number without reading it."""

    def run(tensors: Sequence[Tensor], other: Any, **kwargs: Any) -> Any:
        others = [other] * len(tensors) if isinstance(other, Tensor) else other
        return func(tensors, others, **kwargs)

    return run


def unchecked(input: Tensor) -> bool:  # noqa: A002 - the name in torch
    """Return True: the parameters and samples of `torch.distributions` are not checked."""
    return True


WITHOUT_READS: dict[Any, Callable[..., Any]] = {
    torch.cov: cov, torch.Tensor.cov: cov, torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef, IS_ALL_TRUE: unchecked,
    torch.nn.functional.gaussian_nll_loss: gaussian_nll_loss,
    torch.ctc_loss: ctc_loss, torch.nn.functional.ctc_loss: ctc_loss,
    torch.where: where, torch.combinations: combinations,
    **{func: with_lists(func) for func in FOREACH_ADD},
    torch.Tensor.where: lambda x, condition, other: where(condition, x, other),
}  # fmt: skip
"""Replacements of functions of PyTorch that cannot be traced."""
