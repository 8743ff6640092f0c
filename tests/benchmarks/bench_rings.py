"""Ring attention on gloo ranks, beside a ring by hand and a gather of the keys; and its memory.

`python -m tests.benchmarks.bench_rings` prints seconds of a forward and backward pass of attention
whose sequence is sharded over 4 ranks, and the median of the ratios to the ring by hand, and of the
CPU seconds of all ranks (`tests/helpers/gloo/rounds`). `--memory` prints the peak bytes of live
tensors of a rank, for lengths up to 65,536 and several numbers of ranks, for the ring and for the
gather: those of the ring are in proportion to a rank's share. Memory within PyTorch's kernels is
not counted.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import close_all, run_ranks
from tests.helpers.gloo.rounds import summaries, time_passes
from tests.helpers.tensor_memory import LiveBytes

RANKS, LENGTH, HEADS, WIDTH, ROUNDS = 4, 4096, 2, 32, 40
aten = torch.ops.aten
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RingByHand(torch.autograd.Function):
    """Ring attention with `torch.distributed` and PyTorch's kernels, as one writes it by hand."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block, n = torch.stack([k, v]), dist.get_world_size()
        for step in range(n):
            waiting = exchange(block, 1) if step + 1 < n else None
            part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(q, *block)
            if step == 0:
                out, lse = part, part_lse
            else:
                share = torch.sigmoid(part_lse - lse).unsqueeze(-1)
                out, lse = torch.lerp(out, part, share), torch.logaddexp(lse, part_lse)
            block = waiting() if waiting else block
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        block, dq, n = torch.stack([k, v]), torch.zeros_like(q), dist.get_world_size()
        own, returning = torch.zeros_like(block), None
        for step in range(n):
            waiting = exchange(block, 1) if step + 1 < n else None
            g, *of_block = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, *block, out, lse, 0.0, False
            )
            dq, mine = dq + g, torch.stack(of_block)
            if step == 0:
                own = mine
            else:
                mine = mine + returning() if returning else mine
                returning = exchange(mine, 1)
            block = waiting() if waiting else block
        total = own + returning() if returning else own
        return dq, total[0], total[1]


def exchange(x: Tensor, by: int) -> Callable[[], Tensor]:
    """Send a tensor `by` ranks on; return the wait for the one that arrives."""
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), (rank + by) % n),
        dist.P2POp(dist.irecv, received, (rank - by) % n),
    ]
    works = dist.batch_isend_irecv(ops)

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def of_pairs(mesh: Mesh, attend: Callable[..., Any], length: int) -> Attend:
    """Return an attention of pairs as one of locals."""
    partition = P(None, None, "cp")

    @functools.cache
    def spec(heads: int, width: int) -> fs.Spec:
        return fs.Spec(mesh, partition, shape=(1, heads, length, width))

    def run(*locals_: Tensor) -> Tensor:
        pairs = [fs.Sharded(x, spec(x.shape[1], x.shape[3])) for x in locals_]
        result: Tensor = attend(*pairs).local
        return result

    return run


def gathered(mesh: Mesh) -> Attend:
    """Return attention to gathered keys."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = fs.all_gather((k, v), "cp", axis=2, tiled=True, mesh=mesh)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return run


def contenders(mesh: Mesh, length: int) -> dict[str, Attend]:
    """Return the attentions of locals by name."""
    by_hand: Attend = RingByHand.apply
    return {
        "ring by hand": by_hand,
        "fs.domain": of_pairs(mesh, fs.domain.scaled_dot_product_attention, length),
        "gather": gathered(mesh),
    }


def locals_of(mesh: Mesh, length: int, heads: int, width: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = 1, heads, length // mesh.size, width
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def times_on_rank(length: int, rounds: int) -> Any:
    """Return the times of the contenders on this rank."""
    mesh = Mesh(cp=RANKS)
    fs.init(mesh, timeout=120)
    torch.set_num_threads(1)
    xs = locals_of(mesh, length, HEADS, WIDTH)
    forwards = {name: functools.partial(run, *xs) for name, run in contenders(mesh, length).items()}
    return time_passes(forwards, lambda _, y: torch.autograd.grad(y, xs, y.detach()), rounds)


def memory_on_rank(ranks: int, length: int) -> dict[str, int]:
    """Return the peak bytes of a rank by contender, forward and backward, causal."""
    mesh = Mesh(cp=ranks)
    fs.init(mesh, timeout=600)
    torch.set_num_threads(1)
    xs = locals_of(mesh, length, 1, 16)
    ring = of_pairs(mesh, fs.domain.scaled_dot_product_attention, length)
    peaks = {}
    for name, attend in (("ring", ring), ("gather", gathered(mesh))):
        with LiveBytes() as live:
            y = attend(*xs)
            grads = torch.autograd.grad(y, xs, y.detach())
        del y, grads
        peaks[name] = live.peak
    return peaks


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=LENGTH)
    args = parser.parse_args()
    console = Console()
    if args.memory:
        table = Table(
            "tokens", "ranks", "ring, bytes", "gather, bytes", "ring, bytes per own token"
        )
        for length in args.lengths:
            for ranks in args.ranks:
                peaks = run_ranks(ranks, memory_on_rank, ranks, length, timeout=1800)
                ring, gather = (max(peak[name] for peak in peaks) for name in ("ring", "gather"))
                row = length, ranks, ring, gather, ring * ranks // length
                table.add_row(*(f"{value:,}" for value in row))
                console.print(f"{length:,} tokens on {ranks}: {peaks[0]}")
    else:
        ranks = run_ranks(RANKS, times_on_rank, args.length, ROUNDS, timeout=600)
        table = Table("contender", "forward", "both", "ratio forward", "ratio both",
                      "of CPU forward", "of CPU both")  # fmt: skip
        for name, texts in summaries(ranks).items():
            table.add_row(name, *texts)
    console.print(table)
    close_all()


if __name__ == "__main__":
    main()
