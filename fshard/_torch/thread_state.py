"""PyTorch's per-thread settings, taken from one thread and entered in another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

from fshard._torch.legacy_vmap import around

__all__ = ["ThreadSettings"]

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """Grad and inference mode, autocast, modes, batches of gradients, threads of operations.

    The default device is a function mode, fake tensors and flop counters are dispatch modes.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    functions: tuple[Any, ...]
    dispatches: tuple[Any, ...]
    batches: int
    threads: int

    @staticmethod
    def current() -> ThreadSettings:
        """Those of the thread that asks."""
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in DEVICES
            if torch.is_autocast_enabled(device)
        )
        return ThreadSettings(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            tuple(_get_current_function_mode_stack()),
            tuple(dispatch._get_current_dispatch_mode_stack()),
            around(),
            torch.get_num_threads(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run a block in a rank's own thread as under these settings."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            torch.set_grad_enabled(self.grad)
            # Sums of other numbers of threads differ in their last bits.
            if torch.get_num_threads() != self.threads:
                torch.set_num_threads(self.threads)
            # Backward must run in the rank's own thread: it meets other ranks there.
            torch._C._set_multithreading_enabled(False)
            stack.enter_context(self.casting())
            # Pushed, not entered: the caller entered them, and they know only one exit.
            for mode in self.functions:
                _push_mode(mode)
                stack.callback(_pop_mode)
            for mode in self.dispatches:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode)
            for _ in range(self.batches):
                torch._C._vmapmode_increment_nesting()
                stack.callback(torch._C._vmapmode_decrement_nesting)
            yield

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Run a block under this autocast."""
        with ExitStack() as stack:
            for device in DEVICES:
                dtype = dict(self.autocast).get(device)
                if dtype is not None or torch.is_autocast_enabled(device):
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, enabled=dtype is not None)
                    )
            yield
