"""Cost of draws with a key, beside `torch.rand` and, where it is installed, `jax.random`.

`python -m tests.benchmarks.bench_random` prints nanoseconds per element for draws of a few sizes,
and microseconds per derived key. It reports the fastest of interleaved runs; `--threads 1`
compares single cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs

REPEATS = 9
KEY = fs.random.key(0)
Draw = Callable[[], Any]


def fshard_and_torch(n: int) -> dict[str, dict[str, Draw]]:
    """Return, for each draw, the calls that draw `n` values."""
    x = torch.ones(n)

    def keyed() -> torch.Tensor:
        with fs.random.keyed(KEY):
            return F.dropout(x, 0.1)

    f16, f64 = torch.bfloat16, torch.float64
    return {
        "uniform": {"fshard": lambda: fs.random.uniform(KEY, n), "torch": lambda: torch.rand(n)},
        "uniform bfloat16": {
            "fshard": lambda: fs.random.uniform(KEY, n, dtype=f16),
            "torch": lambda: torch.rand(n, dtype=f16),
        },
        "uniform float64": {
            "fshard": lambda: fs.random.uniform(KEY, n, dtype=f64),
            "torch": lambda: torch.rand(n, dtype=f64),
        },
        "normal": {"fshard": lambda: fs.random.normal(KEY, n), "torch": lambda: torch.randn(n)},
        "randint": {
            "fshard": lambda: fs.random.randint(KEY, n, 0, 10),
            "torch": lambda: torch.randint(0, 10, (n,)),
        },
        "dropout": {"fshard": keyed, "torch": lambda: F.dropout(x, 0.1)},
    }


def add_jax(calls: dict[str, dict[str, Draw]], n: int) -> None:
    """Add the compiled draws of `jax.random`, where JAX is installed."""
    if importlib.util.find_spec("jax") is None:
        return
    import jax

    jax.config.update("jax_platforms", "cpu")
    key = jax.random.PRNGKey(0)
    draws = {"uniform": jax.random.uniform, "normal": jax.random.normal}
    for name, draw in draws.items():
        run = jax.jit(lambda key, draw=draw: draw(key, (n,)))
        calls[name]["jax"] = lambda run=run: run(key).block_until_ready()


def time_calls(calls: dict[str, Draw]) -> dict[str, float]:
    """Return the seconds of each call, the minimum over interleaved runs."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first run compiles
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sizes", type=int, nargs="*", default=[1 << 10, 1 << 16, 1 << 22])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for n in options.sizes:
        calls = fshard_and_torch(n)
        add_jax(calls, n)
        print(f"{n:,} numbers, nanoseconds each, {options.threads} threads")
        for name, by_library in calls.items():
            times = (
                f"{library} {s / n * 1e9:8.2f}" for library, s in time_calls(by_library).items()
            )
            print(f"  {name:20}{'   '.join(times)}")
    key_times = time_calls({
        "fold_in": lambda: fs.random.fold_in(KEY, 7),
        "split in 2": lambda: fs.random.split(KEY),
        "split in 1000": lambda: fs.random.split(KEY, 1000),
    })  # fmt: skip
    print("keys, microseconds")
    for name, seconds in key_times.items():
        print(f"  {name:20}{seconds * 1e6:8.1f}")


if __name__ == "__main__":
    main()
