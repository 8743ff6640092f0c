"""`fs.auto` beside published layouts, on blocks of models.

`python -m tests.benchmarks.bench_auto_models` prints for each block the modelled time of a step in
layouts written by hand, that of `fs.auto`, its proven gap, and the seconds of the search. The
layouts by hand are data parallel, FSDP (arXiv 2304.11277), Megatron-LM (arXiv 1909.08053) with and
without FSDP of the other axis, 2-D tensor parallelism as in GSPMD's table of the Transformer (arXiv
2105.04663, 2-D weights and activations), and T5X's rules (`embed` replicated, `mlp`, `heads` and
`vocab` over the model axis; arXiv 2203.17189).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard import Mesh, P, PartitionSpec, Topology
from fshard.partition.layout_search.choice_search import call_times
from tests.helpers.ops import blocks
from tests.helpers.ops.block_cases import mlp

DATA, MODEL = "dp", "tp"
MESH = Mesh(dp=4, tp=4)
Params = dict[str, Tensor]


def mixture(p: Params, x: Tensor) -> Tensor:
    """Return a mixture of experts, each of which computes all tokens, weighted by a softmax."""
    gates = torch.softmax(x @ p["gate"], -1)
    hidden = torch.einsum("td,edf->etf", x, p["up"]).relu()
    return x + torch.einsum("etf,efd,te->td", hidden, p["down"], gates)


def unet(p: Params, x: Tensor) -> Tensor:
    """Return two levels of a UNet: down, up, and a skip connection."""
    conv = torch.nn.functional.conv2d
    top = torch.relu(conv(x, p["in"], padding=1))
    low = torch.relu(conv(torch.nn.functional.max_pool2d(top, 2), p["down"], padding=1))
    up = torch.nn.functional.interpolate(low, scale_factor=2.0)
    return conv(torch.cat([top, up], 1), p["out"], padding=1)


@dataclass(frozen=True)
class ModelBlock:
    """Block, shapes of its parameters and input, and how Megatron-LM would shard each parameter."""

    function: Callable[[Params, Tensor], Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    input: tuple[int, ...]
    megatron: Mapping[str, PartitionSpec]

    def arguments(self) -> tuple[Params, Tensor]:
        """Return tensors on the meta device."""
        params = {name: torch.empty(shape, device="meta", requires_grad=True)
                  for name, shape in self.shapes.items()}  # fmt: skip
        return params, torch.empty(self.input, device="meta")


def _scaled(params: Params, n: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of parameters that are `n` times as wide."""
    return {name: tuple(n * size for size in x.shape) for name, x in params.items()}


T, R = P(MODEL), P(None, MODEL)
BLOCKS = {
    "MLP": ModelBlock(
        mlp, {"a": (1024, 4096), "b": (4096, 1024)}, (8192, 1024), {"a": P(None, MODEL), "b": T}
    ),
    "GPT block": ModelBlock(
        blocks.gpt, _scaled(blocks.gpt_params(16), 64), (32, 512, 1024),
        {**{f"{t}{c}": T for t in "wb" for c in "qkv1"}, "wo": R, "w2": R},
    ),
    "Llama block": ModelBlock(
        blocks.llama, _scaled(blocks.llama_params(16), 64), (32, 512, 1024),
        {**{f"w{c}": T for c in "qkvgu"}, "wo": R, "wd": R},
    ),
    "UNet block": ModelBlock(
        unet, {"in": (64, 16, 3, 3), "down": (128, 64, 3, 3), "out": (16, 192, 3, 3)},
        (32, 16, 128, 128), {"in": T, "down": P(None, MODEL), "out": T},
    ),
    "mixture of experts": ModelBlock(
        mixture, {"gate": (512, 8), "up": (8, 512, 2048), "down": (8, 2048, 512)}, (8192, 512),
        {"up": T, "down": T},
    ),
}  # fmt: skip


def _also(p: PartitionSpec, shape: tuple[int, ...], axis: str, n: int) -> PartitionSpec:
    """Return a partition with the first unsharded dim that divides sharded along one more axis."""
    dims = [*p.dims, *[()] * (len(shape) - len(p.dims))]
    for dim, size in enumerate(shape):
        if not dims[dim] and size % n == 0:
            return PartitionSpec(*(axis if d == dim else names or None
                                   for d, names in enumerate(dims)))  # fmt: skip
    return p


def by_hand(block: ModelBlock, mesh: Mesh) -> dict[str, tuple[Any, PartitionSpec]]:
    """Return layouts of the parameters and of the input by name."""
    every, n = (DATA, MODEL), mesh.size
    shapes, megatron = block.shapes, {k: block.megatron.get(k, P()) for k in block.shapes}
    two_d = {k: _also(p, shapes[k], DATA, mesh.shape[DATA]) for k, p in megatron.items()}
    fully = {k: P(every) if s[0] % n == 0 else P() for k, s in shapes.items()}
    features = P(DATA, *[None] * (len(block.input) - 2), MODEL)
    return {
        "data": (dict.fromkeys(shapes, P()), P(every)),
        "FSDP": (fully, P(every)),
        "Megatron": (megatron, P(DATA)),
        "hybrid": (two_d, P(DATA)),
        "2-D": (two_d, features),
        "T5X": ({k: p if len(shapes[k]) > 1 else P() for k, p in megatron.items()}, P(DATA)),
    }


def hand_times(block: ModelBlock, mesh: Mesh, topology: Topology) -> dict[str, float]:
    """Return the modelled seconds of a step in each layout by hand."""
    params, x = block.arguments()
    times = {}
    for name, (specs, batch) in by_hand(block, mesh).items():
        part = fs.partition(block.function, mesh=mesh, params=specs, in_specs=(batch,),
                            topology=topology, replicate=mesh.axes)  # fmt: skip
        times[name] = call_times(part.trace(params, x), topology).in_turn
    return times


def llama_7b(layers: int) -> tuple[Callable[[Params, Tensor], Tensor], list[Any]]:
    """Return the loss of a Llama of transformers with the widths of 7B, and meta arguments."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=layers, attn_implementation="sdpa", use_cache=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    def loss(params: Params, ids: Tensor) -> Tensor:
        options = {"use_cache": False, "return_dict": False}
        logits = torch.func.functional_call(model, params, (ids,), options)[0]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    ids = torch.zeros(64, 2048, dtype=torch.long, device="meta")
    return loss, [dict(model.named_parameters()), ids]


def main() -> None:
    """Print the table, or the answer for a Llama."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each search")
    parser.add_argument("--blocks", default=",".join(BLOCKS), help="which, with commas between")
    parser.add_argument("--llama", type=int, help="layers of a Llama on 2x4x8 devices, alone")
    options = parser.parse_args()
    if options.llama:
        start, (loss, arguments) = time.perf_counter(), llama_7b(options.llama)
        answer = fs.auto(loss, Mesh(dp=2, sp=4, tp=8), arguments,
                         topology=Topology.dgx_h100(), seconds=options.seconds)  # fmt: skip
        print(f"{answer.time * 1e3:.1f} ms a step, within {100 * answer.gap:.1f} % of the best; "
              f"{answer.explored}; {time.perf_counter() - start:.1f} s with the trace")  # fmt: skip
        return
    topology, names = Topology.dgx_h100(), list(by_hand(BLOCKS["MLP"], MESH))
    table = Table(title=f"ms of a step on {MESH}, {topology.title}")
    for head in ("block", *names, "auto", "gap", "planned", "seconds"):
        table.add_column(head, justify="left" if head == "block" else "right")
    for name in options.blocks.split(","):
        block = BLOCKS[name]
        times, start = hand_times(block, MESH, topology), time.perf_counter()
        answer = fs.auto(block.function, MESH, list(block.arguments()), topology=topology,
                         seconds=options.seconds)  # fmt: skip
        spent = time.perf_counter() - start
        table.add_row(name, *(f"{times[kind] * 1e3:.3f}" for kind in names),
                      f"{answer.time * 1e3:.3f}", f"{100 * answer.gap:.1f} %",
                      answer.explored.partition(" choices")[0], f"{spent:.1f}")  # fmt: skip
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
