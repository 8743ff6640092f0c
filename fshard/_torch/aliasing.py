"""Memory that results do not share with arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["own", "own_all"]


def own(y: torch.Tensor, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`y` in memory that no `x` has: what is then done in place to one is not done to the other.

    >>> x = torch.zeros(2)
    >>> own(x[:1], [x]).add_(1), own(x, []) is x, x
    (tensor([1.]), True, tensor([0., 0.]))
    """
    return own_all((y,), xs)[0]


def own_all(ys: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Every `y` in memory that no `x` has."""
    with torch._C.DisableTorchFunction():  # a body learns nothing of it
        taken = {_memory(x) for x in xs}
        taken.discard(0)
        shared = [_memory(y) in taken and y.numel() > 0 for y in ys]
    if True not in shared:
        return tuple(ys)
    return tuple(y.clone() if each else y for y, each in zip(ys, shared, strict=True))


def _memory(x: torch.Tensor) -> int:
    """Where its storage begins, that of what `torch.func` wraps; 0 for one without numbers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return 0 if type(x) is FakeTensor else x.untyped_storage().data_ptr()
