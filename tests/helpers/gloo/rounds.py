"""Timed forward and backward passes of a benchmark's contenders on the processes of ranks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Passes = list[list[float]]
"""For each round the seconds of a forward pass and of both passes, and both in CPU seconds."""


def rotations(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield the names in the order of each round: each comes first, and after each other, in turn.

    Caches and memory that one contender leaves behind change the time of the next one.

    >>> [*rotations("abc", 4)]
    [['a', 'b', 'c'], ['c', 'b', 'a'], ['b', 'c', 'a'], ['a', 'c', 'b']]
    """
    for i in range(rounds):
        turn = i // 2 % len(names)
        row = [*names[turn:], *names[:turn]]
        yield row[::-1] if i % 2 else row


def bind_to_core(rank: int) -> None:
    """Bind all threads of this process, and those that they start, to one of its CPU cores."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def time_passes(
    forwards: Mapping[str, Callable[[], Tensor]],
    backward: Callable[[str, Tensor], Sequence[Tensor]],
    rounds: int,
) -> dict[str, Passes]:
    """Return the times of contenders on this rank, which is bound to a core.

    In every round each contender runs twice, and its second call is timed: the first one fills
    caches. Results must agree.

    Args:
        forwards: the forward passes by name.
        backward: function of a name and the result of its forward pass to gradients.
        rounds: the number of rounds.
    """
    if hasattr(os, "sched_setaffinity"):
        bind_to_core(dist.get_rank())
    times: dict[str, Passes] = {name: [] for name in forwards}
    results: dict[str, list[Tensor]] = {}

    def now() -> tuple[float, float]:
        dist.barrier()
        return time.perf_counter(), time.process_time()

    for order in rotations([*forwards], rounds):
        for name in order:
            backward(name, forwards[name]())
            start = now()
            y = forwards[name]()
            middle = now()
            gradients = backward(name, y)
            rows = zip(start, middle, now(), strict=True)
            wall, cpu = [[b - a, c - a] for a, b, c in rows]
            times[name].append([*wall, *cpu])
            results[name] = [y.detach(), *gradients]
    first = results[next(iter(forwards))]
    for result in results.values():
        torch.testing.assert_close(result, first, rtol=1e-3, atol=1e-3)
    return times


def summaries(ranks: Sequence[dict[str, Passes]]) -> dict[str, list[str]]:
    """Return for each contender texts of its times and of their ratios to the first contender's.

    They are the median seconds of both columns, the medians of the ratios of each round, and those
    of the CPU seconds of all ranks, which other load of the machine changes less.
    """
    columns: dict[str, list[list[float]]] = {}
    for name in ranks[0]:
        rounds = [*zip(*(rank[name] for rank in ranks), strict=True)]
        columns[name] = [
            [(max if i < 2 else sum)(row[i] for row in rows) for rows in rounds] for i in range(4)
        ]
    first = next(iter(columns.values()))
    return {
        name: [f"{statistics.median(column) * 1e3:.1f} ms" for column in own[:2]]
        + [
            f"{statistics.median(a / b for a, b in zip(*pair, strict=True)):.2f}"
            for pair in zip(own, first, strict=True)
        ]
        for name, own in columns.items()
    }
