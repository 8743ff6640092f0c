"""Functions of `torch.nn.init` that write element by element, or redraw until all are in limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

import torch
from torch.nn import init

_REDRAW, _DIRAC = init._no_grad_trunc_normal_, init.dirac_
_LOCK = Lock()
_BLOCKS: list[str] = []


@contextmanager
def _patched(original: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of `torch.nn.init` while any such block runs in any thread."""
    name = original.__name__
    with _LOCK:
        _BLOCKS.append(name)
        vars(init)[name] = replacement
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS.remove(name)
            if name not in _BLOCKS:
                vars(init)[name] = original


def patched_trunc_normal(fill: Callable[..., torch.Tensor | None]) -> AbstractContextManager[None]:
    """Make `torch.nn.init.trunc_normal_` call `fill(tensor, mean, std, a, b)` in a block.

    A function mode does not see the function, and a trace cannot run its loop. Where `fill` returns
    None PyTorch's code runs.
    """

    def run(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        filled = None if generator is not None else fill(tensor, mean, std, a, b)
        return _REDRAW(tensor, mean, std, a, b, generator) if filled is None else filled

    return _patched(_REDRAW, run)


def patched_dirac() -> AbstractContextManager[None]:
    """Make `torch.nn.init.dirac_` compare indices in a block, so that a trace can shard the result.

    PyTorch's code writes one element after another, each of a global tensor.
    """
    return _patched(_DIRAC, _dirac)


def _dirac(tensor: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Write the values of `torch.nn.init.dirac_`, by one comparison for each dim."""
    shape = tensor.shape
    if tensor.ndim not in (3, 4, 5) or shape[0] % groups:
        return _DIRAC(tensor, groups)  # raises

    def indices(dim: int) -> torch.Tensor:
        index = torch.arange(shape[dim], device=tensor.device)
        return index.view([-1 if d == dim else 1 for d in range(tensor.ndim)])

    is_one = indices(0) % (shape[0] // groups) == indices(1)
    for dim in range(2, tensor.ndim):
        is_one = is_one & (indices(dim) == shape[dim] // 2)
    with torch.no_grad():
        return tensor.copy_(is_one)
