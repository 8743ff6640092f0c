"""Blocks with Megatron layouts of their parameters, and the collectives of partitioned calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

import fshard as fs
from fshard import Mesh, P, PartitionSpec
from fshard.partition.ir import Redistribution
from fshard.partition.partitioned_call import PartitionedCall
from tests.helpers.ops import blocks

MESH = Mesh(dp=2, tp=2)
BYTES = fs.Topology("bytes", inner=fs.Link(1e-9, 1e9), launch=1e-9, message=0.0)
"""Topology without launch times, which would outweigh the bytes of small tensors."""
COLUMNS, ROWS = P("tp"), P(None, "tp")
Block = Callable[[blocks.Params, torch.Tensor], torch.Tensor]


def sample(*shape: int) -> torch.Tensor:
    """Return a random tensor that requires grad, always the same for a shape."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


Case = tuple[Block, Callable[[], blocks.Params], dict[str, PartitionSpec], torch.Size]
BLOCKS: dict[str, Case] = {
    "gpt": (
        blocks.gpt, blocks.gpt_params,
        {**{f"{t}{c}": COLUMNS for t in "wb" for c in "qkv1"}, "wo": ROWS, "w2": ROWS},
        torch.Size((4, 6, 16)),
    ),
    "llama": (
        blocks.llama, blocks.llama_params,
        {**{f"w{c}": COLUMNS for c in "qkvgu"}, "wo": ROWS, "wd": ROWS}, torch.Size((4, 6, 32)),
    ),
    "resnet": (
        blocks.resnet, blocks.resnet_params,
        {"c1": COLUMNS, "g1": COLUMNS, "h1": COLUMNS, "c2": ROWS}, torch.Size((4, 8, 6, 6)),
    ),
    "vit": (
        blocks.vit, blocks.vit_params,
        {"qkv": COLUMNS, "w1": COLUMNS, "wo": ROWS, "w2": ROWS}, torch.Size((4, 3, 8, 8)),
    ),
}  # fmt: skip


def collectives_of(call: PartitionedCall) -> tuple[Counter[tuple[str, tuple[str, ...]]], ...]:
    """Return counts of the collectives of a call, forward and backward, by kind and axes."""
    forward: Counter[tuple[str, tuple[str, ...]]] = Counter()
    backward: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for line in call.lines:
        if isinstance(line, Redistribution):
            passes = [(forward, line.program), *([(backward, line.program.T)] if line.grad else [])]
            for counts, prog in passes:
                for step, nbytes in zip(prog.steps, prog.step_bytes, strict=True):
                    if nbytes:
                        counts[type(step).__name__, step.axes] += 1
    return forward, backward


def mlp(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
    """Two layers with a residual connection."""
    return x + torch.relu(x @ p["a"]) @ p["b"]


MLP_PARAMS = blocks.make_params({"a": (8, 16), "b": (16, 8)}, 5)


def traces_of(part: fs.Partition) -> int:
    """Return the number of traces that a partitioned function has made."""
    return len(part._traces.traces)
