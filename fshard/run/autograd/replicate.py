"""Conversion between one invariant tensor and a tuple with one of it per rank, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fshard._torch.functorch import apply_function
from fshard._torch.legacy_vmap import map_batch_dims


class _Spread(torch.autograd.Function):
    """Copy a tensor to n ranks; the cotangent is invariant, so that of any rank."""

    generate_vmap_rule = True

    @staticmethod
    def forward(n: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.detach() for _ in range(n))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.n = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return replicate_shards(tangent, ctx.n)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, replicated_value(grads)


def replicate_shards(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """Return n aliases of `x`, one per rank, differentiably."""
    return map_batch_dims(lambda xs: apply_function(_Spread, n, *xs), (x,))


class _First(torch.autograd.Function):
    """Take one of n equal tensors; the cotangent goes to every rank."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*xs: torch.Tensor) -> torch.Tensor:
        return xs[0].detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.n = len(inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return tangents[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return replicate_shards(grad, ctx.n)


def replicated_value(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the value that all ranks hold, differentiably."""
    return map_batch_dims(lambda xs: (apply_function(_First, *xs),), xs)[0]
