"""Computation on the locals of pairs, under `torchrun` and for all ranks of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fshard.layout.sharded import Sharded


def map_locals(
    function: Callable[[list[torch.Tensor]], Sequence[Any]], pairs: Sequence[Sharded]
) -> list[Any]:
    """Return the locals that a function of one rank's tensors computes.

    Args:
        function: function of one tensor a pair to a sequence of tensors.
        pairs: the pairs, all of this process or all of a simulation.

    Returns:
        For every result a tensor, or in a simulation the tuple of all ranks' results.
    """
    locals_ = [pair.local for pair in pairs]
    if isinstance(locals_[0], torch.Tensor):
        return list(function(locals_))
    ranks = [function(list(tensors)) for tensors in zip(*locals_, strict=True)]
    return [*zip(*ranks, strict=True)]
