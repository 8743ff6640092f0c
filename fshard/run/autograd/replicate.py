"""Conversion between one invariant tensor and a tuple with one of it per rank, differentiable.

The cotangents of such a tuple must be equal, which `with_equal_gradients` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard._torch.functorch import apply_function
from fshard._torch.legacy_vmap import map_batch_dims
from fshard.run.transports.shape_only import is_abstract


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
    """Return n aliases of `x`, one per rank, differentiably; for one rank `x` itself."""
    if n == 1:
        return (x,)
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
    """Return the value that all ranks hold, differentiably; of one rank its tensor itself."""
    if len(xs) == 1:
        return xs[0]
    return map_batch_dims(lambda xs: (apply_function(_First, *xs),), xs)[0]


class _EqualGradients(torch.autograd.Function):
    """Keep tensors; in the backward pass compare the cotangents of every group."""

    generate_vmap_rule = True

    @staticmethod
    def forward(groups: Groups, refuse: Refuse, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.groups, ctx.refuse, *_ = inputs

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        def compare(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            for first, *rest in () if is_abstract(xs[0]) else ctx.groups:
                for i in rest:
                    if not are_close(xs[first], xs[i]):
                        ctx.refuse(first, i)
            return xs

        return None, None, *map_batch_dims(compare, grads)


Groups = Sequence[Sequence[int]]
Refuse = Callable[[int, int], object]
"""Function of the positions of two tensors whose cotangents differ; it raises."""


def with_equal_gradients(
    xs: tuple[torch.Tensor, ...], groups: Groups, refuse: Refuse
) -> tuple[torch.Tensor, ...]:
    """Return `xs`; their cotangents must be equal within groups of positions, up to rounding."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        ys: tuple[torch.Tensor, ...] = apply_function(_EqualGradients, groups, refuse, *xs)
        return ys
    return xs


def are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if tensors of one shape and dtype differ by rounding at most.

    Ranks may add in another order. Sparse tensors are not compared.
    """
    if a is b or a.layout is not torch.strided or a.numel() == 0:
        return True
    a, b = a.detach(), b.detach()
    if a.dtype == torch.float4_e2m1fn_x2:
        a, b = a.view(torch.uint8), b.view(torch.uint8)
    elif a.dtype == torch.complex32 or (a.is_floating_point() and a.dtype.itemsize == 1):
        wide = torch.complex64 if a.is_complex() else torch.float32
        a, b = a.to(wide), b.to(wide)
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    scale = float(a.abs().amax())
    limit = tolerance * scale if scale < torch.inf else tolerance
    return torch.allclose(a, b, rtol=tolerance, atol=limit, equal_nan=True)
