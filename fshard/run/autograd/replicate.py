"""One tensor and the tuple of all ranks' that hold it; differentiable, and for torch.func too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fshard._torch.functorch import apply_function
from fshard._torch.legacy_vmap import map_batch_dims

__all__ = ["common", "spread"]


class _Spread(torch.autograd.Function):
    """A tensor that every one of n ranks holds; its cotangent is invariant, so any rank's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(n: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.detach() for _ in range(n))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.n = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return spread(tangent, ctx.n)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, common(grads)


def spread(x: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """`x` as n ranks hold it that is invariant, without memory of their own; differentiable."""
    return map_batch_dims(lambda xs: apply_function(_Spread, n, *xs), (x,))


class _First(torch.autograd.Function):
    """The value that every one of n ranks holds; its cotangent is every rank's."""

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
        return spread(grad, ctx.n)


def common(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The value that all ranks hold; differentiable."""
    return map_batch_dims(lambda xs: (apply_function(_First, *xs),), xs)[0]
