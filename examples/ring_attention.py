"""Train an attention layer on a long sequence that is sharded over a ring of ranks.

    python examples/ring_attention.py                        # 4 simulated devices
    torchrun --nproc-per-node 4 examples/ring_attention.py 30 65536

A needle, one token, is hidden in a long noisy sequence, and later tokens must attend to it. The
sequence is in zigzag order, in which a causal mask gives every rank equal work. A rank holds its
own part and one block of keys at a time. The losses are compared with one device up to 4096 tokens.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

import fshard as fs
from fshard import P

HEADS, WIDTH, RATE = 2, 16, 0.3


def sequence(length: int) -> tuple[Tensor, Tensor]:
    """Return embeddings, `(1, length, HEADS * WIDTH)`, and the needle, one vector."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, length, HEADS * WIDTH, generator=generator, dtype=torch.float64)
    needle = torch.randn(HEADS * WIDTH, generator=generator, dtype=torch.float64)
    x = 0.1 * noise
    x[0, length // 4] += 3 * needle
    return x, needle


def initial_weights() -> dict[str, Tensor]:
    """Return the projections to queries, keys and values."""
    generator, width = torch.Generator().manual_seed(1), HEADS * WIDTH
    make = lambda: torch.randn(width, width, generator=generator, dtype=torch.float64) / 8  # noqa: E731
    return {name: make().requires_grad_() for name in "qkv"}


def attention(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the attention of a layer, written for one device."""
    q, k, v = ((x @ weights[name]).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for name in "qkv")
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2)


def descend(weights: dict[str, Tensor], loss: Tensor) -> None:
    """Take a step of normalized gradient descent."""
    grads = torch.autograd.grad(loss, list(weights.values()))
    with torch.no_grad():
        for w, g in zip(weights.values(), grads, strict=True):
            w.sub_(RATE * g / g.norm())


def main(steps: int = 30, length: int = 2048) -> int:
    """Train, print losses and traffic, and return 1 if the losses differ from one device's."""
    ranks = int(os.environ.get("WORLD_SIZE", "4"))
    mesh = fs.Mesh(cp=ranks)
    if "RANK" in os.environ:
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    is_first_rank = int(os.environ.get("RANK", "0")) == 0
    x, needle = sequence(length)
    order = fs.domain.zigzag_order(length, ranks)
    is_late = torch.arange(length) > length // 2
    ring = fs.domain.context_parallel(attention, "cp", order="zigzag")

    @fs.shard_map(mesh=mesh, in_specs=(P(), P(None, "cp"), P("cp")), out_specs=P())
    def loss_on_ring(weights: dict[str, Tensor], x: Tensor, is_late: Tensor) -> Tensor:
        errors = (ring(weights, x) - needle).square().mean((0, 2))
        total, count = fs.psum(torch.stack([(errors * is_late).sum(), is_late.sum()]), "cp")
        return total / count

    def loss_on_one_device(weights: dict[str, Tensor]) -> Tensor:
        return (attention(weights, x) - needle).square().mean((0, 2))[is_late].mean()

    weights, twin = initial_weights(), initial_weights()
    max_difference = 0.0
    for step in range(1, steps + 1):
        with fs.comm_log() as log:
            loss = loss_on_ring(weights, x[:, order], is_late[order])
            descend(weights, loss)
        single = ""
        if length <= 4096:
            expected = loss_on_one_device(twin)
            descend(twin, expected)
            max_difference = max(max_difference, abs(loss.item() - expected.item()))
            single = f"  one device {expected.item():.10f}"
        if is_first_rank and (step in (1, steps) or step % 10 == 0):
            print(f"step {step:4}  loss {loss.item():.10f}{single}")
    if is_first_rank:
        print(f"Communicated in one step, {length} tokens on {mesh}:", log, sep="\n")
        print(f"Losses differ by at most {max_difference:.1e}.")
    return int(max_difference > 1e-9)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
