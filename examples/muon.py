"""Train the matrices of the language model of `train_lm.py` with Muon, data parallel.

    python examples/muon.py                        # 8 simulated devices in one process
    torchrun --nproc-per-node 4 examples/muon.py   # 4 real processes, the same losses

Gradients and momentum are sharded over the devices. To orthogonalise the momentum, one exchange
moves each matrix to an owner device, and another moves the results back. AdamW trains the other
parameters. The script repeats the training on one device in plain PyTorch and compares the losses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

import optree
import torch
from rich import print as rich_print
from torch import Tensor
from train_lm import Config, Tree, batches, initial_weights, model_specs, read_text, single_loss
from zero_adamw import memory_table

import fshard as fs
from fshard import P

RATE, MOMENTUM, DECAY = 0.02, 0.95, 0.1  # of Muon
A, B, C = 3.4445, -4.775, 2.0315  # the polynomial of its iterations


def matrices_and_others(weights: Tree) -> dict[str, dict[str, Tensor]]:
    """Return the matrices of the blocks for Muon, and the other parameters for AdamW, by name.

    The tensors of attention, `[3, d, heads, d / heads]` and `[heads, d / heads, d]`, become the
    matrices `[3 d, d]` and `[d, d]`.
    """
    names = [".".join(map(str, path)) for path in optree.tree_paths(weights)]
    params: dict[str, dict[str, Tensor]] = {"muon": {}, "adamw": {}}
    for name, x in zip(names, optree.tree_leaves(weights), strict=True):
        if name.startswith("blocks") and x.ndim > 1:
            params["muon"][name] = x.flatten(-(x.ndim // 2)).flatten(0, -2)
        else:
            params["adamw"][name] = x
    return params


def loss_like(weights: Tree) -> Callable[[Tree, Tensor, Tensor], Tensor]:
    """Return the loss of one device as a function of `matrices_and_others(weights)` and a batch."""
    names = [".".join(map(str, path)) for path in optree.tree_paths(weights)]
    leaves, treedef = optree.tree_flatten(weights)

    def loss(params: Tree, tokens: Tensor, targets: Tensor) -> Tensor:
        by_name = params["muon"] | params["adamw"]
        shaped = [by_name[name].reshape(x.shape) for name, x in zip(names, leaves, strict=True)]
        return single_loss(optree.tree_unflatten(treedef, shaped), tokens, targets)

    return loss


def train_sharded(
    mesh: fs.Mesh, weights: Tree, text: Tensor, c: Config
) -> tuple[list[float], Mapping[str, Tree], fs.CommLog]:
    """Train on the mesh; return losses, what is held at the end, and the log of the last step."""
    params = fs.state.tree_shard(matrices_and_others(weights), P(), mesh=mesh)
    shards = fs.state.zero_specs(params, "dp")
    optimizers = {
        "muon": fs.state.muon(
            RATE, momentum=MOMENTUM, weight_decay=DECAY, dtype=None, specs=shards["muon"]
        ),
        "adamw": fs.state.adamw(c.lr, specs=shards["adamw"]),
    }
    states = {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}
    grads_and_loss = fs.partition(
        torch.func.grad_and_value(loss_like(weights)), mesh=mesh, in_specs=(P(), P("dp"), P("dp")),
        out_specs=(shards, P()),
    )  # fmt: skip
    losses: list[float] = []
    for tokens, targets in batches(text, c):
        with fs.comm_log() as log:
            grads, loss = grads_and_loss(params, tokens, targets)
            for name, optimizer in optimizers.items():
                states[name], params[name] = optimizer.update(
                    grads[name], states[name], params[name]
                )
        losses.append(fs.unshard(loss).item())
    momentum, moments = states["muon"]["momentum"], states["adamw"]
    return losses, {
        "parameters": params, "gradients": grads, "momentum of Muon": momentum,
        "state of AdamW": [moments["mean"], moments["square"]],
    }, log  # fmt: skip


def train_single(weights: Tree, text: Tensor, c: Config) -> list[float]:
    """Return the losses of the same training on one device in plain PyTorch."""
    params = matrices_and_others(weights)
    params = {name: {k: x.clone().requires_grad_() for k, x in group.items()}
              for name, group in params.items()}  # fmt: skip
    loss_of, matrices = loss_like(weights), [*params["muon"].values()]
    adamw = torch.optim.AdamW(params["adamw"].values(), lr=c.lr, weight_decay=0.01)
    momenta = [torch.zeros_like(x) for x in matrices]
    losses = []
    for tokens, targets in batches(text, c):
        loss = loss_of(params, tokens, targets)
        adamw.zero_grad()
        grads = torch.autograd.grad(loss, matrices, retain_graph=True)
        loss.backward(inputs=[*params["adamw"].values()])
        adamw.step()
        with torch.no_grad():
            for x, grad, momentum in zip(matrices, grads, momenta, strict=True):
                momentum.mul_(MOMENTUM).add_(grad, alpha=1 - MOMENTUM)
                y = orthogonal((1 - MOMENTUM) * grad + MOMENTUM * momentum)
                x.mul_(1 - RATE * DECAY).sub_(RATE * max(1, x.shape[0] / x.shape[1]) ** 0.5 * y)
        losses.append(loss.item())
    return losses


def orthogonal(x: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of `x` and singular values near 1 (K. Jordan)."""
    y = (x if x.shape[0] <= x.shape[1] else x.T) / x.norm()
    for _ in range(5):
        gram = y @ y.T
        y = A * y + (B * gram + C * gram @ gram) @ y
    return y if x.shape[0] <= x.shape[1] else y.T


def main(steps: int) -> int:
    """Train on the mesh and on one device; return 0 if the losses agree, else 1."""
    mesh = fs.Mesh(dp=int(os.environ.get("WORLD_SIZE", "8")))
    if "RANK" in os.environ:  # set by torchrun
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    is_first_rank = os.environ.get("RANK", "0") == "0"

    c = Config(steps=steps, length=16, width=32)
    text, weights = read_text(), initial_weights(model_specs(fs.Mesh(tp=1), c), c)
    losses, trees, log = train_sharded(mesh, weights, text, c)
    single = train_single(weights, text, c)
    difference = max(abs(a - b) for a, b in zip(losses, single, strict=True))
    if is_first_rank:
        for step in range(0, steps, 10):
            print(f"step {step + 1:4}  loss {losses[step]:.10f}  one device {single[step]:.10f}")
        muon, adamw = (sum(x.numel() for x in group.values())
                       for group in matrices_and_others(weights).values())  # fmt: skip
        elements = (muon + adamw, muon + adamw, muon, 2 * adamw)
        ranks = (1, mesh.size, mesh.size, mesh.size)
        rows = zip(trees, trees.values(), elements, ranks, strict=True)
        rich_print(memory_table("Muon", rows), log, sep="\n")
        print(f"Losses differ by at most {difference:.1e}.")
    return int(difference > 1e-9)


if __name__ == "__main__":
    sys.exit(main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 50))
