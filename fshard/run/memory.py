"""Memory that results do not share with arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fshard.run.abstract import is_abstract

__all__ = ["own", "own_all"]


def own(y: torch.Tensor, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`y` in memory that no `x` has: what is then done in place to one is not done to the other.

    >>> x = torch.zeros(2)
    >>> own(x[:1], [x]).add_(1), own(x, []) is x, x
    (tensor([1.]), True, tensor([0., 0.]))
    """
    return own_all((y,), xs)[0]


def own_all(ys: Iterable[torch.Tensor], xs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Every `y` in memory that no `x` has."""
    ys = tuple(ys)
    with torch._C.DisableTorchFunction():  # a body learns nothing of it
        taken = set(map(_memory, xs))
        shared = [place for place, y in enumerate(ys) if _memory(y) in taken and y.numel()]
    if not shared:
        return ys
    return tuple(y.clone() if place in shared else y for place, y in enumerate(ys))


def _memory(x: torch.Tensor) -> object:
    """What is equal for tensors that may share numbers."""
    return object() if is_abstract(x) else x.untyped_storage().data_ptr()
