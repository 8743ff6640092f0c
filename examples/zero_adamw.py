"""Train the language model of `train_lm.py` with ZeRO-1, 2 and 3, which are choices of layouts.

    python examples/zero_adamw.py                        # 4 simulated devices in one process
    torchrun --nproc-per-node 4 examples/zero_adamw.py   # 4 real processes, the same losses

`single_loss` is written for one device, without communication. `fs.state.zero_table` has for every
stage the layouts of parameters, gradients and optimizer state, and prints their bytes per rank. The
script trains in each of them and compares the losses with one device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

import optree
import torch
from rich import box
from rich import print as rich_print
from rich.table import Table
from torch import Tensor
from train_lm import (
    Config,
    Tree,
    batches,
    initial_weights,
    model_specs,
    read_text,
    single_loss,
    train_single,
)

import fshard as fs
from fshard import P

KINDS = ("parameters", "gradients", "state")
ITEM = 8  # bytes of an element: the examples train in float64


def train(
    mesh: fs.Mesh, stage: fs.state.ZeroStage, weights: Tree, text: Tensor, c: Config
) -> tuple[list[float], Sequence[Tree]]:
    """Return the losses of training in the layouts of a stage, and what is held at its end."""
    params = fs.state.tree_shard(weights, stage.params)
    state = stage.optimizer.init(params)
    grads_and_loss = fs.partition(
        torch.func.grad_and_value(single_loss), mesh=mesh, params=stage.params,
        in_specs=P("dp"), out_specs=(stage.grads, P()),
    )  # fmt: skip
    losses = []
    for tokens, targets in batches(text, c):
        grads, loss = grads_and_loss(params, tokens, targets)
        state, params = stage.optimizer.update(grads, state, params, donate=True)
        losses.append(fs.unshard(loss).item())
    return losses, (params, grads, [state["mean"], state["square"]])


def main(steps: int) -> int:
    """Train on one device and with each stage; return 0 if all losses agree, else 1."""
    mesh = fs.Mesh(dp=int(os.environ.get("WORLD_SIZE", "4")))
    if "RANK" in os.environ:  # set by torchrun
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    is_first_rank = os.environ.get("RANK", "0") == "0"

    c = Config(steps=steps, length=16, width=32)
    text, weights = read_text(), initial_weights(model_specs(fs.Mesh(tp=1), c), c)
    single = train_single(weights, text, c).losses
    replicated = fs.state.tree_shard(weights, P(), mesh=mesh)
    table = fs.state.zero_table(replicated, "dp", fs.state.adamw(c.lr))
    if is_first_rank:
        rich_print(table)

    count = sum(x.numel() for x in optree.tree_leaves(weights))
    rows, difference = [], 0.0
    for number, stage in enumerate(table):
        losses, trees = train(mesh, stage, weights, text, c)
        difference = max(difference, *(abs(a - b) for a, b in zip(losses, single, strict=True)))
        for kind, tree, elements, first in zip(KINDS, trees, (1, 1, 2), (3, 2, 1), strict=True):
            ranks = mesh.size if number >= first else 1
            rows.append((f"{stage.name}: {kind}", tree, elements * count, ranks))
        if is_first_rank:
            print(f"{stage.name:13}  loss {losses[0]:.10f} -> {losses[-1]:.10f}")
    if is_first_rank:
        print(f"{'one device':13}  loss {single[0]:.10f} -> {single[-1]:.10f}")
        rich_print(memory_table("held", rows))
        print(f"Losses differ by at most {difference:.1e}.")
    return int(difference > 1e-9)


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


if __name__ == "__main__":
    sys.exit(main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 50))
