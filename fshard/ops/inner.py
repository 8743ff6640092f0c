"""Gradients and transforms within a traced function: `torch.autograd.grad`, `torch.func`, `vmap`.

Functions are traced above autograd, which then runs on what was traced. What a function asks of
autograd itself is not seen there. Such a function is traced once more, below autograd: then its
gradients are operations as all others, and whole training steps are partitioned. What autograd
would not differentiate after it, because no graph was asked for, is detached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function, forward_ad
from torch.overrides import TorchFunctionMode

from fshard.errors import fail
from fshard.ops.call import map_tensors

__all__ = ["Above", "Below", "TakesGradients", "custom_functions"]

ASKS = {
    torch.autograd.grad, torch.Tensor.backward, torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}  # fmt: skip
"""What a function says that takes gradients itself."""


class TakesGradients(BaseException):
    """A function takes gradients, or maps over a dim: it has to be traced below autograd.

    No `Exception`, for the function may catch those.
    """


def _levels() -> tuple[int, int]:
    """How many transforms of `torch.func` run, and how many of forward differentiation."""
    return torch._C._functorch.maybe_current_level() or 0, forward_ad._current_level


class Above(TorchFunctionMode):
    """Raises `TakesGradients` where a function does what can only be seen below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = _levels()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in ASKS or _levels() != self.levels:
            raise TakesGradients
        return func(*args, **(kwargs or {}))


class Below(TorchFunctionMode):
    """Detaches what would have no graph: gradients without one, and what is made under no_grad."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and (func is not torch.autograd.grad or _keeps(kwargs or {})):
            return out
        return map_tensors(out, torch.Tensor, lambda x: x.detach() if _inexact(x) else x)


def _keeps(kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `torch.autograd.grad` asks for gradients that have gradients."""
    return bool(kwargs.get("create_graph"))


def _inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


@contextmanager
def custom_functions(refused: bool, tracing: Callable[[], int], where: str) -> Iterator[None]:
    """Refuse custom functions in the block, whose own gradients a trace does not have.

    Those of PyTorch's compute the gradients of what they do. The class is patched, for PyTorch
    tells no mode of them; `tracing` says whether it is this thread that traces.
    """
    if not refused:
        yield
        return
    plain = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing() and not cls.__module__.startswith("torch."):
            fail(where, f"{cls.__name__}.apply, with gradients",
                 "a function is traced as what it computes, and the gradient is that of what was "
                 "traced: the backward of a custom function would be left out",
                 "write y + (f(x) - y).detach() for a straight-through gradient, take gradients "
                 "within the function, or make it an operation: torch.library.custom_op, "
                 "register_autograd and fs.register_rule")  # fmt: skip
        return plain.__get__(None, cls)(*args, **kwargs)

    Function.apply = classmethod(apply)  # type: ignore[assignment]
    try:
        yield
    finally:
        Function.apply = plain  # type: ignore[method-assign]
