"""Partitioned steps whose memory is measured on processes, and the measurement."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P

WIDTH, ROWS, LAYERS, NPROC = 192, 1024, 4, 2


class Block(torch.nn.Module):
    """Residual block of a layer norm and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the next layer."""
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


class Net(torch.nn.Module):
    """Blocks one after the other, each checkpointed on request, and a loss."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.square().mean()


TENSOR_PARALLEL = {"up.weight": P("x"), "up.bias": P("x"), "down.weight": P(None, "x")}
CASES: dict[str, dict[str, Any]] = {
    "data parallel": {"params": P(), "in_specs": P("x")},
    "fsdp": {"params": P("x"), "in_specs": P("x")},
    "fsdp, gathered again": {"params": P("x"), "in_specs": P("x"), "remat": "gathers"},
    "tensor parallel": {"params": None, "in_specs": P(), "hold": "x"},
    "checkpointed": {"params": P(), "in_specs": P("x")},
    "recomputed": {"params": P("x"), "in_specs": P("x"), "remat": "all"},
}


def partitioned(name: str, mesh: fs.Mesh) -> tuple[fs.Partition, dict[str, Any], fs.Spec]:
    """Return the step of a case, the layouts of its parameters and of its argument."""
    options = dict(CASES[name])
    net = Net(checkpointed=name == "checkpointed")
    shapes = {key: p.shape for key, p in net.named_parameters()}
    params = options["params"]
    layouts = {key: P() for key in shapes}
    if params is None:
        for key in layouts:
            layouts[key] = next((p for end, p in TENSOR_PARALLEL.items() if key.endswith(end)), P())
    else:
        layouts = dict.fromkeys(shapes, params)
    part = fs.partition(net, mesh=mesh, out_specs=P(), **{**options, "params": layouts})
    specs = {key: fs.Spec(mesh, p, shape=shapes[key]) for key, p in layouts.items()}
    return part, specs, fs.Spec(mesh, options["in_specs"], shape=(ROWS, WIDTH))


def measured_and_predicted(name: str) -> tuple[int, int, dict[str, int]]:
    """Return the peak of a rank's allocations in a step, and the predicted one by category."""
    mesh = fs.Mesh(x=NPROC)
    fs.init(mesh)
    part, specs, arg = partitioned(name, mesh)
    rank = torch.distributed.get_rank()
    params = {key: fs.Sharded(torch.randn(spec.local_shape(rank)).requires_grad_(), spec)
              for key, spec in specs.items()}  # fmt: skip
    x = fs.Sharded(torch.randn(arg.local_shape(rank)), arg)
    memory = part.trace(params, x).memory(rank=rank)
    held = sum(spec.local_nbytes(rank) for spec in (*specs.values(), arg))
    gc.collect()
    with profile(profile_memory=True) as prof:
        part(params, x).local.backward()
    total = peak = held
    assert prof.profiler is not None
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak, memory.peak, dict(memory.at_peak)
