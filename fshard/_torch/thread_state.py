"""PyTorch's per-thread settings: read in one thread, entered in another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch import modes
from fshard._torch.legacy_vmap import nesting_level

DEVICES = ("cpu", "cuda")


def cuda_stream() -> torch.cuda.Stream | None:
    """Return the calling thread's CUDA stream, None if CUDA is not in use."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """Per-thread settings of PyTorch.

    Attributes:
        grad: grad mode.
        inference: inference mode.
        autocast: dtype of each device type under autocast.
        function_modes: function modes, outermost first; the default device is one.
        dispatch_modes: dispatch modes, outermost first; fake tensors and flop counters are such.
        legacy_vmap_level: nested batches of `torch.autograd.grad(is_grads_batched=True)`.
        stream: CUDA stream, None if CUDA is not in use.
        num_threads: threads of an operation.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    legacy_vmap_level: int
    stream: torch.cuda.Stream | None
    num_threads: int

    @staticmethod
    def current() -> ThreadSettings:
        """Return the settings of the calling thread."""
        autocast = tuple(
            (device, torch.get_autocast_dtype(device))
            for device in DEVICES
            if torch.is_autocast_enabled(device)
        )
        return ThreadSettings(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            tuple(modes.function_modes()),
            tuple(modes.dispatch_modes()),
            nesting_level(),
            cuda_stream(),
            torch.get_num_threads(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the settings in a block, which must run in a rank's own thread."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            torch.set_grad_enabled(self.grad)
            # The last bits of a sum depend on the number of threads.
            if torch.get_num_threads() != self.num_threads:
                torch.set_num_threads(self.num_threads)
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
                if not torch.cuda.is_current_stream_capturing():
                    self.stream.query()  # gives a new thread a CUDA context: cuBLAS warns without
            # Backward must run in the rank's own thread, where its collectives meet other ranks'.
            torch._C._set_multithreading_enabled(False)
            stack.enter_context(self.autocasting())
            # Pushed, not entered: a mode that the caller has entered supports one exit only.
            stack.enter_context(modes.pushed_function_modes(self.function_modes))
            for mode in self.dispatch_modes:
                modes.push_dispatch_mode(mode)
                stack.callback(modes.pop_dispatch_mode)
            for _ in range(self.legacy_vmap_level):
                torch._C._vmapmode_increment_nesting()
                stack.callback(torch._C._vmapmode_decrement_nesting)
            yield

    @contextmanager
    def autocasting(self) -> Iterator[None]:
        """Apply the autocast settings in a block."""
        with ExitStack() as stack:
            for device in DEVICES:
                dtype = dict(self.autocast).get(device)
                if dtype is not None or torch.is_autocast_enabled(device):
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, enabled=dtype is not None)
                    )
            yield
