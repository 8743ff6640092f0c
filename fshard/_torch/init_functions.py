"""`torch.nn.init.trunc_normal_`, which redraws values in a loop until all are within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch.nn import init

_REDRAW = init._no_grad_trunc_normal_
_LOCK = Lock()
_BLOCKS: list[object] = []


@contextmanager
def patched_trunc_normal(fill: Callable[..., torch.Tensor | None]) -> Iterator[None]:
    """Make `torch.nn.init.trunc_normal_` call `fill(tensor, mean, std, a, b)`.

    The patch is in place while any such block runs in any thread. A function mode does not see the
    function, and a trace cannot run its loop. Where `fill` returns None PyTorch's code runs.
    """

    def run(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        filled = None if generator is not None else fill(tensor, mean, std, a, b)
        return _REDRAW(tensor, mean, std, a, b, generator) if filled is None else filled

    with _LOCK:
        _BLOCKS.append(run)
        vars(init)[_REDRAW.__name__] = run
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS.remove(run)
            if not _BLOCKS:
                vars(init)[_REDRAW.__name__] = _REDRAW
