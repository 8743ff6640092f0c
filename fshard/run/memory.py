"""Memory that results do not share with arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fshard.run.abstract import is_abstract

__all__ = ["own"]


def own(y: torch.Tensor, xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`y` in memory that no `x` has: what is then done in place to one is not done to the other.

    >>> x = torch.zeros(2)
    >>> own(x[:1], [x]).add_(1), own(x, []) is x, x
    (tensor([1.]), True, tensor([0., 0.]))
    """
    if is_abstract(y) or not y.numel():
        return y
    with torch._C.DisableTorchFunction():  # a body learns nothing of it
        storage = y.untyped_storage().data_ptr()
        shared = any(not is_abstract(x) and x.untyped_storage().data_ptr() == storage for x in xs)
    return y.clone() if shared else y
