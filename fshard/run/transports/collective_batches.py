"""Rules by which `torch.func.vmap` maps functional collectives in recorded graphs.

`torch.func.linearize` and `make_fx` record them. PyTorch has no such rules, and its fallback, a
call for each element of the batch, waits for none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from fshard._torch.operators import has_batch_rule

OPS: Any = torch.ops._c10d_functional
ELEMENTWISE = OPS.all_reduce, OPS.wait_tensor
ON_FIRST_DIM = OPS.all_gather_into_tensor, OPS.reduce_scatter_tensor, OPS.all_to_all_single

BatchRule = Callable[..., tuple[torch.Tensor, int]]


def _elementwise(op: Any) -> BatchRule:
    """Return the rule of an operation that is the same on every element."""

    def rule(info: Any, in_dims: Sequence[int], x: torch.Tensor, *args: Any) -> Any:
        return op(x, *args), in_dims[0]

    return rule


def _on_first_dim(op: Any) -> BatchRule:
    """Return the rule of an operation that moves rows: each has the batch in it."""

    def rule(info: Any, in_dims: Sequence[int], x: torch.Tensor, *args: Any) -> Any:
        y = op(x.movedim(in_dims[0], -1).contiguous(), *args)
        return y, y.ndim - 1

    return rule


@lru_cache(maxsize=1)
def register_batch_rules() -> None:
    """Register the rules of collectives that have none."""
    for packets, rule in ((ELEMENTWISE, _elementwise), (ON_FIRST_DIM, _on_first_dim)):
        for op in (packet.default for packet in packets):
            if not has_batch_rule(op):
                torch.library.register_vmap(op, rule(op))
