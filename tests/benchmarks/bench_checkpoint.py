"""Bandwidth and memory of checkpoints, beside PyTorch's own.

`python -m tests.benchmarks.bench_checkpoint [--megabytes 512] [--rounds 5] [--directory /dev/shm]`
saves and loads a state of matrices by `fs.state`, `torch.save` and `torch.distributed.checkpoint`,
in turn, and prints the best bandwidths, and the median over the rounds of the time beside that of
`torch.save, synced` or `torch.load`, with quartiles. `fs.state` and `dcp` write to the disk,
`torch.save` to the cache of the OS, and beside it with a sync. Loads read that cache; `fs.state`
alone compares checksums: by isal, by zlib, which is used where isal is missing, and without.
`--directory` is where files are written: one in
memory, as `/dev/shm`, leaves out the disk. `--slices` saves
the state and loads one eighth of each matrix in another process, for each rank and sharded by rows
and by columns, and prints by how much the memory of these processes grows at most (Linux only).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

import fshard as fs
from fshard import Mesh, P
from fshard.state.checkpoints import shard_files

MATRICES = 16
RANKS = 8


def state(megabytes: int) -> dict[str, torch.Tensor]:
    """Return matrices of float32 with that many bytes in all."""
    rows = megabytes * 2**20 // (MATRICES * 4 * 1024)
    return {f"layers.{i}.weight": torch.randn(rows, 1024) for i in range(MATRICES)}


def contenders(tree: dict[str, torch.Tensor], root: Path) -> dict[str, Callable[[], Any]]:
    """Return functions that save and load, by name."""
    mesh = Mesh(x=RANKS)
    pairs = fs.state.tree_shard(tree, P("x"), mesh=mesh)
    file = root / "state.pt"

    def load_dcp() -> None:
        target = {name: torch.empty_like(x) for name, x in tree.items()}
        dcp.load(target, checkpoint_id=root / "dcp", no_dist=True)

    def by_zlib(*specs: P) -> None:
        with patch.object(shard_files, "crc32", zlib.crc32):
            fs.state.load(root / "fshard", *specs, mesh=mesh)

    def save_synced() -> None:
        torch.save(tree, file)
        with file.open("rb") as opened:
            os.fsync(opened.fileno())

    return {
        "save fs.state": lambda: fs.state.save(root / "fshard", pairs),
        "save torch.save": lambda: torch.save(tree, file),
        "save torch.save, synced": save_synced,
        "save dcp": lambda: dcp.save(tree, checkpoint_id=root / "dcp", no_dist=True),
        "load fs.state": lambda: fs.state.load(root / "fshard", P("x"), mesh=mesh),
        "load fs.state, zlib": lambda: by_zlib(P("x")),
        "load fs.state, no checksums": lambda: fs.state.load(
            root / "fshard", P("x"), mesh=mesh, checksums=False),
        "load fs.state, unsharded": lambda: fs.state.load(root / "fshard"),
        "load fs.state, unsharded, zlib": by_zlib,
        "load fs.state, unsharded, no checksums": lambda: fs.state.load(
            root / "fshard", checksums=False),
        "load torch.load": lambda: torch.load(file),
        "load dcp": load_dcp,
    }  # fmt: skip


def measured(megabytes: int, rounds: int, parent: str | None) -> dict[str, list[float]]:
    """Return the seconds of every contender in every round; all run in each."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=parent) as directory:
        runs = contenders(state(megabytes), Path(directory))
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                times.setdefault(name, []).append(time.perf_counter() - start)
    return times


LOAD = """
import sys, fshard as fs
from fshard.run.transports.base import as_rank

large, small, number, dim = sys.argv[1:]

class Rank:
    rank, all_ranks = int(number), range(8)

    def accepts(self, device):
        return True

def read(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

fs.state.load(small)
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = read("VmRSS")
with as_rank(Rank()):
    tree = fs.state.load(large, fs.P(*(None,) * int(dim), "x"), mesh=fs.Mesh(x=8))
print(sum(pair.local.nbytes for pair in tree.values()), read("VmHWM") - before)
"""
"""Code of a process that loads as one of 8 ranks and prints its bytes and the growth of memory."""


def slices(megabytes: int) -> Iterator[tuple[str, int, int]]:
    """Yield the layout of slices, the bytes of each rank's, and the largest growth of memory.

    Each process loads a small checkpoint first, so that imports do not count.
    """
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        fs.state.save(root / "large", state(megabytes))
        fs.state.save(root / "small", {"w": torch.ones(4)})
        for dim, name in enumerate(("rows", "columns")):
            outputs = []
            for rank in range(RANKS):
                arguments = str(root / "large"), str(root / "small"), str(rank), str(dim)
                command = [sys.executable, "-c", LOAD, *arguments]
                text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                outputs.append(tuple(map(int, text.split())))
            yield name, max(held for held, _ in outputs), max(grown for _, grown in outputs)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="where files are written; the default is temporary")
    parser.add_argument("--slices", action="store_true")
    options = parser.parse_args()
    console = Console()
    if options.slices:
        for name, held, grown in slices(options.megabytes):
            mib, grown_mib = held / 2**20, grown / 2**20
            console.print(f"{name} of {mib:,.0f} MiB, memory grew by {grown_mib:,.0f} MiB")
        return
    title = f"{options.megabytes} MB in {MATRICES} matrices"
    table = Table("contender", "MB/s", "time over torch", title=title)
    times = measured(options.megabytes, options.rounds, options.directory)
    for name, seconds in times.items():
        peer = times["save torch.save, synced" if name.startswith("save") else "load torch.load"]
        ratios = [a / b for a, b in zip(seconds, peer, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        table.add_row(name, f"{options.megabytes / min(seconds):,.0f}",
                      f"{ratio:.2f} ({low:.2f} to {high:.2f})")  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
