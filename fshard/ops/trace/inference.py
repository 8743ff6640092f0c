"""`torch.inference_mode` in a traced function: as `no_grad`, which graphs have as operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from fshard._torch.autograd_state import SET_GRAD_ENABLED

_INFERENCE: ContextVar[bool] = ContextVar("fshard_traced_inference", default=False)
"""True in an inference block of a traced function, where gradients cannot be enabled."""


@contextmanager
def inference_without_grad(depth: Callable[[], int]) -> Iterator[None]:
    """Make inference blocks set the grad mode alone; `depth` is 0 in threads that do not trace."""
    cls: Any = torch.inference_mode
    enter, leave = cls.__enter__, cls.__exit__
    key = "_fshard_before"

    def enter_traced(self: Any) -> None:
        if not depth():
            enter(self)
            return
        vars(self).setdefault(key, []).append((_INFERENCE.get(), torch.is_grad_enabled()))
        _INFERENCE.set(self.mode)
        torch.set_grad_enabled(not self.mode)

    def leave_traced(self: Any, *error: Any) -> None:
        if not vars(self).get(key):
            leave(self, *error)
            return
        before, enabled = vars(self)[key].pop()
        _INFERENCE.set(before)
        torch.set_grad_enabled(enabled)

    cls.__enter__, cls.__exit__ = enter_traced, leave_traced
    try:
        yield
    finally:
        cls.__enter__, cls.__exit__ = enter, leave


def as_traced(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of a call in a trace: no gradients are enabled in an inference block."""
    return (False,) if func is SET_GRAD_ENABLED and _INFERENCE.get() else args
