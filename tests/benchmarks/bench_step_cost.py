"""Seconds to answer what a step of a transformer block costs on 65,536 devices.

`python -m tests.benchmarks.bench_step_cost` prints the time to plan the layouts, of the roofline
and of the memory. The mesh is 4,096 x 16, the width 16,384 in bfloat16.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from fshard import P

WIDTH, BATCH, LENGTH = 16384, 8192, 2048


def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the values after a block of attention and a perceptron."""
    h = F.layer_norm(x, (WIDTH,), p["norm1"])
    q, k, v = (F.linear(h, p[c]).unflatten(-1, (-1, 128)).transpose(1, 2) for c in "qkv")
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).flatten(2), p["out"])
    h = F.layer_norm(x, (WIDTH,), p["norm2"])
    return x + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])


def timed(name: str, run: Callable[[], Any]) -> Any:
    """Return the result of a function, and print its seconds."""
    start = time.perf_counter()
    result = run()
    sys.stdout.write(f"{name:<10}{time.perf_counter() - start:6.2f} s\n")
    return result


def main() -> None:
    """Print the seconds of each question."""
    shapes = {"up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
    shapes |= dict.fromkeys(("q", "k", "v", "out"), (WIDTH, WIDTH))
    specs = {name: P("tp") for name in ("q", "k", "v", "up")}
    specs |= {name: P(None, "tp") for name in ("out", "down")}
    params = {
        name: torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for name, shape in {**shapes, "norm1": (WIDTH,), "norm2": (WIDTH,)}.items()
    }
    x = torch.empty(BATCH, LENGTH, WIDTH, device="meta", dtype=torch.bfloat16)
    part = fs.partition(block, mesh=fs.Mesh(dp=4096, tp=16), in_specs=P("dp"),
                        params={name: specs.get(name, P()) for name in params},
                        topology=fs.Topology.dgx_h100())  # fmt: skip
    call = timed("layouts", lambda: part.trace(params, x))
    timed("roofline", call.roofline)
    timed("memory", lambda: call.memory(optimizer=4))
    timed("explain", lambda: str(call.explain()))


if __name__ == "__main__":
    main()
