"""`fs.testing`'s processes, with their number first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fshard as fs
from fshard.testing.rank_server import IMPORTS
from fshard.testing.ranks import Outcome, RankDied, RankHung, Ranks, warm_ranks
from fshard.testing.ranks import close_ranks as close_all

__all__ = ["Outcome", "RankDied", "RankHung", "Ranks", "close_all", "outcomes", "run_ranks"]

PATIENCE = 300.0
"""Seconds until ranks are taken to hang; on a loaded machine a call may take minutes."""
ROOT = Path(__file__).parent.parent.parent.parent
IMPORTS += ["pytest", "torch._dynamo", "torch.distributed.tensor.experimental", "fshard.domain"]


def pool(size: int) -> Ranks:
    """Return the warm processes of a world size."""
    return warm_ranks(size, True)


def run_ranks(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Return the results of `function(*args)` on `size` ranks."""
    return fs.testing.run_ranks(function, *args, nproc=size, **{"timeout": PATIENCE, **options})


def outcomes(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
    """Return the outcomes of `function(*args)` on `size` ranks."""
    return fs.testing.outcomes(function, *args, nproc=size, **{"timeout": PATIENCE, **options})
