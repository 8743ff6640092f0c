"""Train a GPT that is written for one device on a mesh, from the layouts of its parameters.

    python examples/partition_gpt.py                        # 8 simulated devices in one process
    torchrun --nproc-per-node 4 examples/partition_gpt.py   # 4 real processes, the same losses

The model contains no communication. `fs.partition` chooses a sharding strategy for each of its
operations and inserts the collectives: here those of Megatron-LM, with data parallelism. A second
model is trained without fshard, and the script checks that both have the same losses.
"""

from __future__ import annotations

import copy
import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fshard as fs
from fshard import P

BATCH, LENGTH, WIDTH, HEADS, WORDS, LAYERS = 16, 12, 32, 4, 24, 2


class Block(nn.Module):
    """Pre-norm transformer block: attention and a multilayer perceptron, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Map a `(batch, length, width)` tensor to one of the same shape."""
        batch, length, _ = x.shape
        h = self.before_attention(x)
        q, k, v = (
            layer(h).view(batch, length, HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        changed: Tensor = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return changed


class GPT(nn.Module):
    """Language model that returns the mean loss of predicting `following` from `words`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        """Return the mean cross entropy; both arguments are `(batch, length)` word indices."""
        x = self.blocks(self.words(words) + self.places.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def layout(name: str) -> fs.PartitionSpec:
    """Return a parameter's layout: heads and hidden units sharded over tp, others replicated."""
    layer, _, kind = name.rpartition(".")
    match layer.rpartition(".")[2], kind:
        case "query" | "key" | "value" | "up", _:
            return P("tp")
        case "out" | "down", "weight":
            return P(None, "tp")
        case _:
            return P()


def sentences(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return arithmetic sequences of words, `(batch, length)`, and the word after each."""
    first = torch.randint(WORDS, (BATCH, 1), generator=generator)
    step = torch.randint(1, 4, (BATCH, 1), generator=generator)
    text = (first + step * torch.arange(LENGTH + 1)) % WORDS
    return text[:, :-1], text[:, 1:]


def main(steps: int) -> int:
    """Train both models and print their losses; return 0 if they agree, else 1."""
    mesh = fs.Mesh(dp=2, tp=int(os.environ.get("WORLD_SIZE", "8")) // 2)
    if "RANK" in os.environ:  # set by torchrun
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU

    torch.manual_seed(0)  # the same parameters in every process
    model = GPT().double()
    twin = copy.deepcopy(model)

    specs = {
        name: fs.Spec(mesh, layout(name), shape=param.shape, dtype=param.dtype)
        for name, param in model.named_parameters()
    }
    params = {name: fs.shard(p.detach(), specs[name]) for name, p in model.named_parameters()}
    shards = [shard for pair in params.values() for shard in trainable_shards(pair)]
    partitioned = fs.partition(model, mesh=mesh, params=specs, in_specs=P("dp"), out_specs=P())

    optimizers = [torch.optim.AdamW(p, lr=0.003) for p in (shards, twin.parameters())]
    generator = torch.Generator().manual_seed(0)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    max_difference = 0.0
    for step in range(1, steps + 1):
        text = sentences(generator)
        with fs.comm_log() as log:
            losses = [fs.unshard(partitioned(params, *text)), twin(*text)]
            for loss, optimizer in zip(losses, optimizers, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        sharded, single = (loss.item() for loss in losses)
        max_difference = max(max_difference, abs(sharded - single))
        if is_first_rank and (step == 1 or step % 10 == 0):
            print(f"step {step:4}  loss {sharded:.10f}  one device {single:.10f}")
    if is_first_rank:
        print(f"Communicated in one step, on {mesh}:", log, sep="\n")
        print(f"Losses differ by at most {max_difference:.1e}.")
    return int(max_difference > 1e-9)


def trainable_shards(pair: fs.Sharded) -> list[Tensor]:
    """Return the shards of a pair in this process, with `requires_grad` set."""
    shards = [pair.local] if isinstance(pair.local, Tensor) else pair.local
    return [shard.requires_grad_() for shard in shards]


if __name__ == "__main__":
    sys.exit(main(steps=int(sys.argv[1]) if len(sys.argv) > 1 else 50))
