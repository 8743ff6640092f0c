"""Table of the bytes that a rank holds, beside their formula, for the examples."""

from __future__ import annotations

from collections.abc import Iterable

import optree
from rich import box
from rich.table import Table
from torch import Tensor
from train_lm import Tree

ITEM = 8  # bytes of an element: the examples train in float64


def memory_table(title: str, rows: Iterable[tuple[str, Tree, int, int]]) -> Table:
    """Return a table with a row for each tree: the bytes that a rank holds, and their formula.

    Args:
        title: heading of the first column.
        rows: name, tree of pairs, its number of elements, and the number of ranks that share them.
    """
    table = Table(title, "bytes per rank", "formula", "", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, tree, elements, ranks in rows:
        expected = ITEM * elements / ranks
        table.add_row(name, f"{rank_nbytes(tree):,}", f"{ITEM} x {elements:,} / {ranks}",
                      f"{expected:,.0f}")  # fmt: skip
    return table


def rank_nbytes(tree: Tree) -> int:
    """Return the bytes that a rank holds of a tree of pairs; of simulated ranks, the first."""
    locals_ = [pair.local for pair in optree.tree_leaves(tree)]
    return sum((x if isinstance(x, Tensor) else x[0]).nbytes for x in locals_)
