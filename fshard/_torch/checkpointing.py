"""Replacement of the functions with which `torch.utils.checkpoint` computes a part again."""

from __future__ import annotations

from typing import Any

from torch.utils import checkpoint

RECOMPUTE: Any = checkpoint._checkpoint_without_reentrant_generator
CHECKPOINT_FUNCTION: Any = checkpoint.CheckpointFunction


def replace_checkpoint(recompute: Any, reentrant: Any) -> None:
    """Make `torch.utils.checkpoint` use these two for `use_reentrant=False` and `True`."""
    checkpoint.__dict__.update(
        _checkpoint_without_reentrant_generator=recompute, CheckpointFunction=reentrant
    )
