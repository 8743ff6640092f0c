"""`autograd.Function.apply` at its own speed."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["applied"]

unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def applied(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, for all arguments given by position.

    Where a function has `setup_context`, PyTorch's own binds them to the signature of `forward`,
    which it reads anew in every call: ten times what the rest takes.

    >>> class Twice(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(x):
    ...         return 2 * x
    ...
    ...     @staticmethod
    ...     def setup_context(ctx, inputs, output):
    ...         pass
    >>> applied(Twice, torch.ones(2))
    tensor([2., 2.])
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    alive = [unwrap_if_dead(x) if isinstance(x, torch.Tensor) else x for x in args]
    return super(torch.autograd.Function, function).apply(*alive)  # type: ignore[misc]
