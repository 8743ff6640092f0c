"""Calls with ties between axes and between factors, and a line of text for a strategy."""

from __future__ import annotations

from typing import Any

import torch

from fshard import Mesh, Spec
from fshard.ops.strategy.strategy import Strategy
from tests.helpers.spec_grid import all_partitions


def strategy_line(strategy: Strategy) -> str:
    """Return a strategy and its alternatives as a line of text."""
    strategies = [strategy, *strategy.alternatives]
    return "; ".join(f"{s.summary} {list(map(str, s.out_specs))}" for s in strategies)


def tied_calls() -> list[tuple[Any, tuple[Any, ...]]]:
    """Return operations with their arguments."""
    mesh = Mesh(a=2, b=2, c=2)
    specs = [Spec(mesh, p, shape=(8, 8)) for p in all_partitions(mesh.axes[:2], 2)[::5]]
    return [(torch.mm, (x, specs[-1])) for x in specs] + [(torch.add, (x, specs[0])) for x in specs]
