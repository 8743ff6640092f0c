"""Time `torch.compile` on two gloo ranks and `torch.func.grad`; count graphs of changing sizes.

`python -m tests.benchmarks.bench_transforms` prints milliseconds of rank 0 of a forward and a
backward pass, the first one and the minimum of later ones, and numbers of graphs. Names of
measurements, such as `mapped_calls`, print these alone.
"""

from __future__ import annotations

import ctypes
import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.nn import functional

import fshard as fs
from fshard import Mesh, P
from tests.benchmarks.bench_redistribute import M_MMAP_THRESHOLD, status
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(i=2)
Times = dict[str, tuple[float, float]]
Counts = dict[str, list[int]]


def first_and_best(fn: Callable[[], Any], repeats: int = 20) -> tuple[float, float]:
    """Return the milliseconds of the first call, and the fewest of later ones."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - start))
    return times[0], min(times[1:], default=times[0])


def train(fn: Callable[..., torch.Tensor], *args: Any) -> Callable[[], None]:
    """Return a forward and a backward pass of `fn`."""
    return lambda: fn(*args).square().sum().backward()


def mapped_calls() -> Times:
    """Return the times of an MLP layer: mapped, checked or not, and by functional collectives."""
    fs.init(MESH)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = fs.psum(torch.tanh(x @ w), "i")
        return y

    def by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        local = x.chunk(2)[torch.distributed.get_rank()]
        return funcol.all_reduce(torch.tanh(local @ w), "sum", torch.distributed.group.WORLD)

    functions: dict[str, Callable[..., Any]] = {
        f"check={check}": fs.shard_map(
            body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P(), check=check
        )
        for check in (True, False)
    }
    functions["funcol"] = by_hand
    times: Times = {}
    for name, fn in functions.items():
        torch._dynamo.reset()
        times[f"{name}, eager"] = first_and_best(train(fn, x, w))
        times[f"{name}, compiled"] = first_and_best(train(torch.compile(fn, fullgraph=True), x, w))
    return times


def block(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, up: Any, down: Any) -> Any:
    """Compute a transformer block of eight heads, without biases."""
    b, t, d = x.shape
    h = functional.layer_norm(x, (d,))
    q, k, v = (h @ qkv[i] for i in range(3))
    q, k, v = (y.view(b, t, 8, d // 8).transpose(1, 2) for y in (q, k, v))
    scores = torch.softmax(q @ k.transpose(-1, -2) / (d // 8) ** 0.5, -1)
    x = x + (scores @ v).transpose(1, 2).reshape(b, t, d) @ out
    h = functional.layer_norm(x, (d,))
    return x + functional.gelu(h @ up) @ down


def partitioned_block() -> Times:
    """Return the times of a data-parallel block and of the same block on one device."""
    fs.init(MESH)
    b, t, d = 4, 128, 256
    shapes = (b, t, d), (3, d, d), (d, d), (d, 4 * d), (4 * d, d)
    args = [(torch.randn(shape) / 16).requires_grad_() for shape in shapes]
    specs = (P("i"), P(), P(), P(), P())
    part = fs.partition(block, mesh=MESH, in_specs=specs)
    pairs = [fs.shard(x.detach(), MESH, p) for x, p in zip(args, specs, strict=True)]
    for pair in pairs:
        pair.local.requires_grad_()
    local: Callable[..., Any] = lambda *pairs: part(*pairs).local  # noqa: E731
    times: Times = {}
    for name, fn, operands in (("partitioned", local, pairs), ("one device", block, args)):
        torch._dynamo.reset()
        times[f"{name}, eager"] = first_and_best(train(fn, *operands), 10)
        compiled = torch.compile(fn, fullgraph=True)
        times[f"{name}, inductor"] = first_and_best(train(compiled, *operands), 10)
    return times


def sized_calls() -> dict[str, Callable[[torch.Tensor], Any]]:
    """Return calls on tensors of any even number of rows, by kind."""

    def mapped(check: bool) -> Any:
        body = lambda x: fs.psum(x.sin(), "i")  # noqa: E731
        return fs.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P(), check=check)

    def program(x: torch.Tensor) -> torch.Tensor:
        pair = fs.shard(x, MESH, P("i"))
        target = pair.spec.replace(partition=P(None, "i"))
        y: torch.Tensor = fs.redistribute(pair.spec, target)(pair.local)
        return y

    def of_new_specs(x: torch.Tensor) -> torch.Tensor:
        src = fs.Spec(MESH, P("i"), shape=x.shape)
        target = src.replace(partition=P(None, "i"))
        y: torch.Tensor = fs.redistribute(src, target)(fs.shard(x, src).local)
        return y

    apart = torch.compiler.disable(of_new_specs)
    checked, unchecked = mapped(True), mapped(False)
    part = fs.partition(torch.sin, mesh=MESH, in_specs=(P("i"),))
    on_pairs = fs.local_map(torch.sin, in_specs=None, out_specs=P("i"))
    return {
        "collectives": lambda x: fs.all_gather(fs.psum(x, "i", mesh=MESH), "i", mesh=MESH),
        "mapped tensors": checked,
        "mapped tensors, unchecked": unchecked,
        "mapped pairs": lambda x: on_pairs(fs.shard(x, MESH, P("i"))).local,
        "shard and unshard": lambda x: fs.unshard(fs.shard(x, MESH, P("i"))),
        "reshard": lambda x: fs.reshard(fs.shard(x, MESH, P("i")), P(None, "i")).local,
        "program": program,
        "program of new specs": lambda x: of_new_specs(x.sin()).cos(),
        "the same, in a disabled function": lambda x: apart(x.sin()).cos(),
        "apply": lambda x: fs.apply(torch.sin, fs.shard(x, MESH, P("i"))).local,
        "partitioned tensors": part,
        "partitioned pairs": lambda x: part(fs.shard(x, MESH, P("i"))).local,
    }


def graphs_of_ten_sizes() -> Counts:
    """Return the numbers of graphs of ten sizes, by `dynamic=None` and `dynamic=True`."""
    fs.init(MESH)
    torch._dynamo.config.recompile_limit = 16  # that of PyTorch, 8, would end the count
    counts: Counts = {}
    for name, fn in sized_calls().items():
        for dynamic in (None, True):
            torch._dynamo.reset()
            counters = torch._dynamo.utils.counters
            counters.clear()
            compiled = torch.compile(fn, backend="eager", dynamic=dynamic)
            for size in range(4, 24, 2):
                compiled(torch.ones(size, 4))
            counts.setdefault(name, []).append(counters["stats"]["unique_graphs"])
    return counts


def gradient_calls(ranks: int, rows: int, width: int) -> dict[str, Callable[[], Any]]:
    """Return gradients of three layers on simulated ranks, by `backward()` and by `torch.func`."""
    x = torch.randn(rows, width)
    weights = [torch.randn(width, width) / 16 for _ in range(3)]

    def body(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for w in weights:
            x = torch.tanh(x @ w)
        y: torch.Tensor = fs.psum(x.square().sum(), "i")
        return y

    f = fs.shard_map(body, mesh=Mesh(i=ranks), in_specs=(P("i"), P()), out_specs=P())

    def loss(weights: list[torch.Tensor]) -> torch.Tensor:
        y: torch.Tensor = f(x, weights)
        return y

    def by_backward() -> None:
        loss([w.clone().requires_grad_() for w in weights]).backward()

    return {
        "backward()": by_backward,
        "torch.func.grad": lambda: torch.func.grad(loss)(weights),
        "jvp of grad": lambda: torch.func.jvp(torch.func.grad(loss), (weights,), (weights,)),
    }


def gradients() -> Times:
    """Return the first and the median times of gradients of three layers, two of them in turns."""
    sizes = {"8 ranks, 16 rows": (8, 16, 16), "2 ranks": (2, 2048, 256)}
    times: Times = {}
    for name, size in sizes.items():
        *pair, last = gradient_calls(*size).items()
        for calls in pair, [last]:
            rounds = [[first_and_best(call, 0)[0] for _, call in calls] for _ in range(61)]
            for (kind, _), (first, *later) in zip(calls, zip(*rounds, strict=True), strict=True):
                times[f"{name}, {kind}"] = first, statistics.median(later)
    return times


def held_bytes() -> dict[str, float]:
    """Return the growth of the resident set in a gradient, in activations of 32 MiB."""
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 16)  # free memory is returned at once
    growth = {}
    for name, call in gradient_calls(2, 16384, 512).items():
        call()
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        call()
        growth[name] = (status("VmHWM") - before) / 2**25
    return growth


def run(measure: Callable[[], Any]) -> Any:
    """Return what this rank measures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")
        return measure()


def show(title: str, times: Times) -> None:
    """Print the times of a measurement."""
    print(f"{title:34} {'first ms':>10} {'then ms':>10}")
    for name, (first, best) in times.items():
        print(f"  {name:32} {first:10.1f} {best:10.2f}")


def show_graphs(title: str, counts: Counts) -> None:
    """Print the numbers of graphs."""
    print(f"{title + ', dynamic=':34} {'None':>10} {'True':>10}")
    for name, (none, always) in counts.items():
        print(f"  {name:32} {none:10} {always:10}")


ON_RANKS = mapped_calls, partitioned_block, graphs_of_ten_sizes


def main() -> None:
    names = sys.argv[1:] or [fn.__name__ for fn in (*ON_RANKS, gradients)]
    for measure in ON_RANKS:
        if measure.__name__ in names:
            print_ = show_graphs if measure is graphs_of_ten_sizes else show
            print_(measure.__name__, run_ranks(2, run, measure, timeout=500)[0])
    if gradients.__name__ in names:
        show("gradients, simulated", gradients())
    print(f"{'peak memory of the recorded graph':34} {'activations':>10}")
    for name, activations in held_bytes().items():
        print(f"  {name:32} {activations:10.1f}")


if __name__ == "__main__":
    # Ranks import the functions by the module's name.
    importlib.import_module("tests.benchmarks.bench_transforms").main()
