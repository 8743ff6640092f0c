"""Overhead of type tracking on PyTorch calls; `python -m tests.benchmarks.bench_types`."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import torch
from torch.nn import functional as F

import fshard as fs

TIMES, REPEATS = 5000, 5


def calls(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return calls on a varying and an invariant tensor, of which the latter may require grad."""
    y = torch.zeros(8, 8)
    eight = [x] * 8

    def setitem() -> None:
        y[0] = 1.0

    return {
        "x + x": lambda: x + x,
        "x + w": lambda: x + w,
        "x @ w": lambda: x @ w,
        "F.linear(x, w)": lambda: F.linear(x, w),
        "x.sum()": x.sum,
        "x[0]": lambda: x[0],
        "x[1:, 0]": lambda: x[1:, 0],
        "x.view(64)": lambda: x.view(64),
        "x.shape": lambda: x.shape,
        "torch.cat([x] * 8)": lambda: torch.cat(eight),
        "torch.zeros(8, 8)": lambda: torch.zeros(8, 8),
        "torch.zeros_like(x)": lambda: torch.zeros_like(x),
        "F.relu(x)": lambda: F.relu(x),
        "y.add_(y)": lambda: y.add_(y),
        "y.mul_(1.0)": lambda: y.mul_(1.0),
        "y[0] = 1.0": setitem,
    }


def time_call(call: Callable[[], object]) -> float:
    """Return microseconds of a call, the minimum of some repetitions."""
    return min(timeit.repeat(call, number=TIMES, repeat=REPEATS)) / TIMES * 1e6


def main() -> None:
    """Print, for each call, its bare time and the time that tracking adds, in microseconds."""
    columns: list[dict[str, tuple[float, float]]] = []
    for grad in (False, True):
        x, w = torch.ones(8, 8), torch.ones(8, 8, requires_grad=grad)
        bare, tracked = (time_in_body(x, w, check) for check in (False, True))
        columns.append({name: (bare[name], tracked[name] - bare[name]) for name in bare})
    print(f"{'':24}{'without grad':>22}{'with grad':>22}")
    print(f"{'microseconds':24}" + f"{'bare':>12}{'added':>10}" * 2)
    for name, (bare_us, added) in columns[0].items():
        grad_bare, grad_added = columns[1][name]
        print(f"{name:24}{bare_us:12.2f}{added:10.2f}{grad_bare:12.2f}{grad_added:10.2f}")


def time_in_body(x: torch.Tensor, w: torch.Tensor, check: bool) -> dict[str, float]:
    """Return the microseconds of each call in the body of a mapped function."""
    times: dict[str, float] = {}

    def body(x: torch.Tensor, w: torch.Tensor) -> None:
        times.update({name: time_call(call) for name, call in calls(x, w).items()})

    mesh = fs.Mesh(x=1)
    specs = (fs.P("x"), fs.P())
    fs.shard_map(body, mesh=mesh, in_specs=specs, out_specs=None, check=check)(x, w)
    return times


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
