"""Train the language model of `train_lm.py` with every parameter sharded over all devices (FSDP).

    python examples/fsdp.py                        # 8 simulated devices in one process
    torchrun --nproc-per-node 4 examples/fsdp.py   # 4 real processes, the same losses

`fsdp_loss` is the program of one device. It gathers the shards of a block in one launch right
before the block, and the transpose of that gather reduce-scatters the block's gradients. A
checkpoint around both drops the gathered weights after the block and gathers them again for its
backward pass. At the end the script compares the losses with one device.
"""

from __future__ import annotations

import os
import sys

import optree
import torch.nn.functional as F
from rich import print as rich_print
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from train_lm import (
    Config,
    Tree,
    batches,
    initial_weights,
    layer_norm,
    model_specs,
    read_text,
    single_block,
    train_single,
)
from zero_adamw import memory_table

import fshard as fs
from fshard import P


def gather(shards: Tree) -> Tree:
    """Return the whole tensors of shards; the backward pass reduce-scatters their gradients."""
    return fs.all_gather(shards, "dp", axis=-1, tiled=True)


def gathered_block(shards: Tree, x: Tensor) -> Tensor:
    """Apply a block to this device's part of the batch."""
    return single_block(gather(shards), x)


def fsdp_loss(shards: Tree, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the global batch from this device's part of it."""
    root = gather({name: shards[name] for name in ("embed", "position", "norm")})
    x = F.embedding(tokens, root["embed"]) + root["position"]
    for block in shards["blocks"]:
        x = checkpoint(gathered_block, block, x, use_reentrant=False)
    logits = F.linear(layer_norm(root["norm"], x), root["embed"])
    return fs.pmean(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "dp")


def main(steps: int) -> int:
    """Train on the mesh and on one device; return 0 if the losses agree, else 1."""
    mesh = fs.Mesh(dp=int(os.environ.get("WORLD_SIZE", "8")))
    if "RANK" in os.environ:  # set by torchrun
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    is_first_rank = os.environ.get("RANK", "0") == "0"

    c = Config(steps=steps, length=32, width=32)
    text, weights = read_text(), initial_weights(model_specs(fs.Mesh(tp=1), c), c)
    single = train_single(weights, text, c).losses

    # The last dim of every tensor is sharded, so that one gather fits all.
    specs = optree.tree_map(lambda x: P(*[None] * (x.ndim - 1), "dp"), weights)
    loss_and_grads = fs.state.value_and_grad(
        fs.shard_map(fsdp_loss, mesh=mesh, in_specs=(specs, P("dp"), P("dp")), out_specs=P())
    )
    optimizer = fs.state.adamw(c.lr)
    params = fs.state.tree_shard(weights, specs, mesh=mesh)
    state = optimizer.init(params)
    losses: list[float] = []
    for tokens, targets in batches(text, c):
        with fs.comm_log() as log:
            loss, grads = loss_and_grads(params, tokens, targets)
        state, params = optimizer.update(grads, state, params, donate=True)
        losses.append(loss.item())
    difference = max(abs(a - b) for a, b in zip(losses, single, strict=True))
    if is_first_rank:
        for step in range(0, steps, 10):
            print(f"step {step + 1:4}  loss {losses[step]:.10f}  one device {single[step]:.10f}")
        count = sum(x.numel() for x in optree.tree_leaves(weights))
        rows = [
            ("parameters", params, count, mesh.size),
            ("gradients", grads, count, mesh.size),
            ("state of AdamW", [state["mean"], state["square"]], 2 * count, mesh.size),
        ]
        rich_print(memory_table("FSDP", rows), log, sep="\n")
        print(f"Losses differ by at most {difference:.1e}.")
    return int(difference > 1e-9)


if __name__ == "__main__":
    sys.exit(main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 50))
