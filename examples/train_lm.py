"""Train a small language model, data x sequence x tensor parallel, written with fshard.

    python examples/train_lm.py                        # 8 simulated devices in one process
    python examples/train_lm.py --mesh sp=2,tp=4       # another mesh, the same losses
    torchrun --nproc-per-node 4 examples/train_lm.py   # 4 real processes, the same losses

A transformer learns to predict the next character of Python's own standard library. The batch is
sharded over the axis dp and the sequence over sp; attention heads, hidden units and the vocabulary
are sharded over tp. `model_specs` returns the layout of every parameter. `lm_loss` is the program
of one device on its shards: it writes every collective of the forward pass, and the backward pass
runs their transposes. At the end the script trains the same model on one device in plain PyTorch
and checks that losses and parameters agree.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard import P

VOCABULARY = 128  # a token is an ASCII code
DATA = P("dp", "sp")  # the layout of a batch of sequences
MESHES = {1: "tp=1", 2: "tp=2", 4: "sp=2,tp=2", 8: "dp=2,sp=2,tp=2"}  # by number of devices
LIMITS = {"float64": 1e-9, "float32": 1e-2}  # of the difference from one device
Tree = Any  # nested dicts and lists of tensors, of specs, or of pairs


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training: the options of the command."""

    steps: int = 100
    batch: int = 16
    length: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    lr: float = 3e-3
    seed: int = 0
    dtype: str = "float64"


@dataclass(frozen=True)
class Result:
    """Global parameters, the loss of every step, and the communication log of the last one."""

    params: Tree
    losses: list[float]
    log: object = None


# -- the text -------------------------------------------------------------------------------


def read_text() -> Tensor:
    """Return the first million ASCII characters of the standard library's sources, as codes."""
    text = bytearray()
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes().decode("ascii", "ignore").encode()
    return torch.frombuffer(text[:1_000_000], dtype=torch.uint8).long()


def batches(text: Tensor, c: Config) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random pieces of the text and their next characters, `[batch, length]` each."""
    generator = torch.Generator().manual_seed(c.seed)
    for _ in range(c.steps):
        starts = torch.randint(len(text) - c.length, (c.batch, 1), generator=generator)
        pieces = text[starts + torch.arange(c.length + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


# -- the parameters -------------------------------------------------------------------------


def model_specs(mesh: fs.Mesh, c: Config) -> Tree:
    """Return the layout of every parameter: a pytree of specs, without any tensor."""

    def spec(partition: fs.PartitionSpec, *shape: int) -> fs.Spec:
        return fs.Spec(mesh, partition, shape=shape, dtype=getattr(torch, c.dtype))

    d = c.width
    norm = {"weight": spec(P(), d), "bias": spec(P(), d)}
    block = {
        "norm1": norm,
        "qkv": spec(P(None, None, "tp"), 3, d, c.heads, d // c.heads),
        "out": spec(P("tp"), c.heads, d // c.heads, d),
        "norm2": norm,
        "up": spec(P(None, "tp"), d, 4 * d),
        "down": spec(P("tp"), 4 * d, d),
    }
    return {
        "embed": spec(P("tp"), VOCABULARY, d),
        "position": spec(P(), c.length, d),
        "blocks": [block] * c.layers,
        "norm": norm,
    }


def initial_weights(specs: Tree, c: Config) -> Tree:
    """Return global tensors, equal in every process: random matrices, identity norms."""
    generator = torch.Generator().manual_seed(c.seed)

    def weight(path: tuple[Any, ...], spec: fs.Spec) -> Tensor:
        if len(spec.shape) == 1:
            return torch.full(spec.shape, float(path[-1] == "weight"), dtype=spec.dtype)
        return 0.05 * torch.randn(spec.shape, generator=generator, dtype=spec.dtype)

    return optree.tree_map_with_path(weight, specs)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree; of a pair, every shard in this process."""
    leaves = optree.tree_leaves(tree)  # a pair is one leaf
    locals_ = [leaf.local if isinstance(leaf, fs.Sharded) else leaf for leaf in leaves]
    return [leaf for leaf in optree.tree_leaves(locals_) if isinstance(leaf, Tensor)]


# -- the model, as one device runs it on its shards ------------------------------------------
#
# Shapes are local ones: b = batch / dp, t = length / sp, h = heads / tp, v = vocabulary / tp.
# Types are tracked: where a value that is invariant along tp meets one that varies, its gradient is
# a sum over tp (the operator f of Megatron-LM), and `shard_map` inserts the cast for it.


def lm_loss(params: Tree, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the global batch from this device's `[b, t]` shard."""
    # Devices along dp and sp use a parameter for different tokens: its gradient is a sum. Without
    # this line one cast per parameter is inserted; one cast of all needs one all-reduce.
    params = fs.pcast(params, ("dp", "sp"), to="varying")
    t = tokens.shape[1]
    positions = fs.axis_index("sp") * t + torch.arange(t)

    x = embed(params["embed"], tokens) + params["position"][positions]  # [b, t, d]
    for block in params["blocks"]:
        x = x + attention(block, layer_norm(block["norm1"], x), positions)
        x = x + feed_forward(block, layer_norm(block["norm2"], x))
    logits = layer_norm(params["norm"], x) @ params["embed"].T  # [b, t, v]
    return fs.pmean(cross_entropy(logits, targets).mean(), ("dp", "sp"))


def layer_norm(norm: Tree, x: Tensor) -> Tensor:
    """Normalise the features of every position; every device along tp computes the same."""
    return F.layer_norm(x, x.shape[-1:], norm["weight"], norm["bias"])


def attention(block: Tree, x: Tensor, positions: Tensor) -> Tensor:
    """Attend with local heads and queries to the gathered keys and values of the sequence."""
    qkv = torch.einsum("btd,cdhe->cbhte", x, block["qkv"])  # [3, b, h, t, d / heads]
    k, v = fs.all_gather(qkv[1:], "sp", axis=3, tiled=True)
    past = positions[:, None] >= torch.arange(k.shape[2])
    y = F.scaled_dot_product_attention(qkv[0], k, v, attn_mask=past)
    return fs.psum(torch.einsum("bhte,hed->btd", y, block["out"]), "tp")


def feed_forward(block: Tree, x: Tensor) -> Tensor:
    """Apply a column-sharded and a row-sharded matrix, with one sum (Megatron-LM)."""
    hidden = F.gelu(x @ block["up"])  # [b, t, 4 d / tp]
    return fs.psum(hidden @ block["down"], "tp")


def local_rows(tokens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return each token's row in this device's vocabulary shard, and whether it is in it."""
    row = tokens - fs.axis_index("tp") * rows
    is_local = (row >= 0) & (row < rows)
    return row.where(is_local, 0), is_local


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Look up rows of a table that is sharded over tp: other devices contribute zeros."""
    row, is_local = local_rows(tokens, len(table))
    return fs.psum(table[row] * is_local[..., None], "tp")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return `-log softmax(logits)[targets]`, `[b, t]`, of logits sharded over tp."""
    top = fs.pmax(logits.detach().amax(-1), "tp")
    total = fs.psum((logits - top[..., None]).exp().sum(-1), "tp")
    row, is_local = local_rows(targets, logits.shape[-1])
    hit = fs.psum(logits.gather(-1, row[..., None])[..., 0] * is_local, "tp")
    return top + total.log() - hit


# -- training on shards ---------------------------------------------------------------------


@torch.no_grad()
def adamw(
    shards: Sequence[Tensor], grads: Sequence[Tensor], state: Sequence[Tensor], step: int, lr: float
) -> None:
    """Take one step of AdamW, which is elementwise: each shard is updated in place."""
    for x, g, (mean, square) in zip(shards, grads, state, strict=True):
        mean.lerp_(g, 1 - 0.9)
        square.lerp_(g * g, 1 - 0.999)
        scale = (square / (1 - 0.999**step)).sqrt() + 1e-8
        x.mul_(1 - 0.01 * lr).addcdiv_(mean, scale, value=-lr / (1 - 0.9**step))


def train_sharded(mesh: fs.Mesh, weights: Tree, text: Tensor, c: Config, out: Console) -> Result:
    """Train on the mesh."""
    specs = model_specs(mesh, c)
    loss_fn = fs.shard_map(lm_loss, mesh=mesh, in_specs=(specs, DATA, DATA), out_specs=P())
    params = optree.tree_map(fs.shard, weights, specs)  # a pytree of pairs (local, spec)
    shards = [x.requires_grad_() for x in tensors(params)]
    state = [torch.zeros(2, *x.shape, dtype=x.dtype) for x in shards]
    losses: list[float] = []
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bar:
        for tokens, targets in bar.track(batches(text, c), c.steps, description="training"):
            with fs.comm_log() as log:
                loss = fs.unshard(loss_fn(params, tokens, targets))
                grads = torch.autograd.grad(loss, shards)
            losses.append(loss.item())
            adamw(shards, grads, state, len(losses), c.lr)
            if len(losses) % max(1, c.steps // 10) == 0 or len(losses) == 1:
                bar.console.print(f"step {len(losses):4}  loss {losses[-1]:.10f}")
    with torch.no_grad():
        trained = optree.tree_map(fs.unshard, params)
    return Result(trained, losses, log)


# -- the same model on one device, without fshard --------------------------------------------


def single_loss(params: Tree, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of a batch."""
    x = F.embedding(tokens, params["embed"]) + params["position"]
    for block in params["blocks"]:
        x = single_block(block, x)
    logits = F.linear(layer_norm(params["norm"], x), params["embed"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def single_block(block: Tree, x: Tensor) -> Tensor:
    """Apply attention and the feed-forward layer to `x`, `[batch, length, width]`."""
    y = layer_norm(block["norm1"], x)
    heads = block["qkv"].shape[2:]
    q, k, v = ((y @ w.flatten(1)).unflatten(-1, heads).transpose(1, 2) for w in block["qkv"])
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).flatten(2) @ block["out"].flatten(0, 1)
    return x + F.gelu(layer_norm(block["norm2"], x) @ block["up"]) @ block["down"]


def train_single(weights: Tree, text: Tensor, c: Config) -> Result:
    """Train the same model from the same weights on the same batches in plain PyTorch."""
    params = optree.tree_map(lambda x: x.clone().requires_grad_(), weights)
    optimizer = torch.optim.AdamW(tensors(params), lr=c.lr, weight_decay=0.01)
    losses = []
    for tokens, targets in batches(text, c):
        loss = single_loss(params, tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Result(params, losses)


# -- the command ----------------------------------------------------------------------------


def max_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the largest absolute difference between two lists of tensors."""
    pairs = zip(left, right, strict=True)
    return torch.stack([(a - b).abs().max() for a, b in pairs]).max().item()


def report(mesh: fs.Mesh, sharded: Result, single: Result, limit: float, out: Console) -> bool:
    """Print both results; return True if they differ by less than `limit`."""
    both = (sharded, single)
    of_losses = max_difference(*([torch.tensor(r.losses, dtype=torch.float64)] for r in both))
    of_params = max_difference(*(tensors(r.params) for r in both))
    same = of_losses < limit and of_params < limit
    bits = [[loss / math.log(2) for loss in r.losses] for r in both]

    table = Table("", str(mesh), "one device", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_row("loss of the first step", *(f"{r.losses[0]:.10f}" for r in both))
    table.add_row("loss of the last step", *(f"{r.losses[-1]:.10f}" for r in both))
    table.add_row("bits per character", *(f"{b[0]:.2f} -> {b[-1]:.2f}" for b in bits))
    table.add_row("largest difference of losses", f"{of_losses:.1e}")
    table.add_row("largest difference of parameters", f"{of_params:.1e}")
    out.print(table, "Communicated in one step:", sharded.log, sep="\n")
    out.print(f"{'The same' if same else 'NOT the same'} as on one device, to within {limit:.0e}.")
    return same


def parse_arguments(world: int | None) -> tuple[fs.Mesh, Config]:
    """Return the mesh and the sizes of the command line; `world` is torchrun's world size."""

    def mesh(text: str) -> fs.Mesh:
        axes = dict(item.split("=") for item in text.split(","))
        return fs.Mesh({"dp": 1, "sp": 1, "tp": 1} | {axis: int(n) for axis, n in axes.items()})

    parser = argparse.ArgumentParser(description="Train a language model on a mesh of devices.")
    parser.add_argument("--mesh", type=mesh, default=MESHES.get(world or 8, f"dp={world}"))
    for field in fields(Config):
        choices = list(LIMITS) if field.name == "dtype" else None
        default: Any = field.default
        parser.add_argument(f"--{field.name}", type=type(default), default=default, choices=choices)
    options = vars(parser.parse_args())
    chosen, c = options.pop("mesh"), Config(**options)
    if world not in (None, chosen.size):
        parser.error(f"{chosen} has {chosen.size} devices, torchrun started {world} processes")
    if min(c.steps, c.batch, c.length, c.heads, c.layers) < 1:
        parser.error("steps, batch, length, heads and layers must be at least 1")
    try:  # refuse sizes that do not divide before anything runs
        model_specs(chosen, c)
        fs.Spec(chosen, DATA, shape=(c.batch, c.length))
    except fs.ShardingError as error:
        parser.error(str(error))
    return chosen, c


def main() -> int:
    """Train twice and print a comparison; return 0 if both agree, else 1."""
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None  # set by torchrun
    mesh, config = parse_arguments(world)
    if world:
        fs.init(mesh, backend="gloo")  # the tensors are on the CPU
    is_first_rank = os.environ.get("RANK", "0") == "0"
    out = Console(width=min(80, Console().width), highlight=False, quiet=not is_first_rank)
    text = read_text()
    weights = initial_weights(model_specs(mesh, config), config)
    sharded = train_sharded(mesh, weights, text, config, out)
    if not is_first_rank:
        return 0
    single = train_single(weights, text, config)
    return 0 if report(mesh, sharded, single, LIMITS[config.dtype], out) else 1


if __name__ == "__main__":
    sys.exit(main())
