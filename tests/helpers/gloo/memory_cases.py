"""Partitioned steps whose memory is measured on processes, and the measurement."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard._torch import memory as torch_memory

WIDTH, ROWS, LAYERS, NPROC = 192, 2048, 4, 4
LIMIT = 18_000_000
REPEATS = 6


class Block(torch.nn.Module):
    """Residual block of a layer norm and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values of the next layer."""
        y: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return y


class Net(torch.nn.Module):
    """Blocks one after the other, each checkpointed on request, and a loss."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(WIDTH) for _ in range(LAYERS))
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
    "limited": {"params": P("x"), "in_specs": P("x"), "memory": LIMIT},
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
    """Return the peak of a rank's allocations in a step, and the predicted one by category.

    Workspaces that gloo allocates in its own threads do not count. These threads release operands
    of collectives late by chance, the later the busier the machine: the least of several peaks
    counts.
    """
    mesh = fs.Mesh(x=NPROC)
    fs.init(mesh)
    part, specs, arg = partitioned(name, mesh)
    rank = torch.distributed.get_rank()
    params = {key: fs.Sharded(torch.randn(spec.local_shape(rank)).requires_grad_(), spec)
              for key, spec in specs.items()}  # fmt: skip
    x = fs.Sharded(torch.randn(arg.local_shape(rank)), arg)
    memory = part.trace(params, x).memory(rank=rank)
    held = sum(spec.local_nbytes(rank) for spec in (*specs.values(), arg))
    peaks = []
    for _ in range(REPEATS):
        for pair in params.values():
            pair.local.grad = None
        for buffers in torch_memory._KEPT.values():  # a launch reuses the buffers of the last one
            buffers.clear()
        gc.collect()
        with profile(profile_memory=True) as prof:
            part(params, x).local.backward()
        peaks.append(held + peak_of(prof))
    return min(peaks), memory.peak, dict(memory.at_peak)


def measured_cases() -> dict[str, tuple[int, int, dict[str, int]]]:
    """Return the measured and the predicted peak of every case."""
    return {name: measured_and_predicted(name) for name in CASES}


def peak_of(prof: Any) -> int:
    """Return the most bytes that this thread has allocated at once; any thread may free them."""
    todo, events = [*prof.profiler.kineto_results.experimental_event_tree()], []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.tag == _EventType.Allocation:
            events.append(event)
    events.sort(key=lambda event: event.start_time_ns)
    own: dict[int, int] = {}
    total = peak = 0
    thread = min(event.start_tid for event in events)
    for event in events:
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0 and event.start_tid == thread:
            own[address] = size
            total += size
        elif size < 0:
            total -= own.pop(address, 0)
        peak = max(peak, total)
    return peak
