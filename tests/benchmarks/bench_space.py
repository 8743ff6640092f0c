"""Convolutions on sharded images on gloo ranks, beside halos by hand and a gather; and memory.

`python -m tests.benchmarks.bench_space` prints seconds of a forward and backward pass of a stack of
convolutions with kernels of 3, whose rows are sharded over 4 ranks, and the median of the ratios to
the exchange by hand; and ratios of the CPU seconds of all ranks (`tests/helpers/gloo/rounds`).
`--gather` adds the gather, which is much slower. `--grid` shards rows and columns over 2x2 ranks.
Beside the time it prints the bytes that the busiest rank sends forward, and the bound: the elements
of its windows that a rank lacks.

`--memory` prints for a ResNet-50 and a UNet the peak bytes of tensors that a rank creates, forward
and backward, on 1, 2 and 4 ranks: activations, and the gradients of the parameters, which do not
shrink, and what a rank sends.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import close_all, run_ranks
from tests.helpers.gloo.rounds import summaries, time_passes
from tests.helpers.ops.blocks import UNet
from tests.helpers.tensor_memory import LiveBytes
from tests.partition.models.zoo import import_torchvision

RANKS, LAYERS, CHANNELS, SIZE, ROUNDS = 4, 6, 16, 256, 40
Stack = Callable[[Tensor, list[Tensor]], Tensor]


class HaloByHand(torch.autograd.Function):
    """One row or column of each neighbour along a dim, zeros at the ends, by `torch.distributed`.

    `before` and `after` are the ranks of the neighbours, None at the ends.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, before: int | None, after: int | None) -> Tensor:
        ctx.dim, ctx.before, ctx.after = dim, before, after
        n = x.shape[dim]
        first, last = exchange(x.narrow(dim, 0, 1), x.narrow(dim, n - 1, 1), before, after)
        return torch.cat([first, x, last], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, n = ctx.dim, grad.shape[ctx.dim] - 2
        edges = grad.narrow(dim, 0, 1), grad.narrow(dim, n + 1, 1)
        first, last = exchange(*edges, ctx.before, ctx.after)
        result = grad.narrow(dim, 1, n).clone()
        result.narrow(dim, 0, 1).add_(first)
        result.narrow(dim, n - 1, 1).add_(last)
        return result, None, None, None


def exchange(
    first: Tensor, last: Tensor, before: int | None, after: int | None
) -> tuple[Tensor, Tensor]:
    """Send the first slice to the rank before and the last one on; return those that arrive."""
    arriving = torch.zeros_like(first, memory_format=torch.contiguous_format)
    received, ops = (arriving, torch.zeros_like(arriving)), []
    for peer, edge, into in ((before, first, received[0]), (after, last, received[1])):
        if peer is not None:
            ops += [dist.P2POp(dist.isend, edge.contiguous(), peer)]
            ops += [dist.P2POp(dist.irecv, into, peer)]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    return received


def stack(conv: Callable[[Any, Tensor], Any], relu: Callable[[Any], Any] = F.relu) -> Any:
    """Return the function of an image and weights that convolves in layers."""

    def run(x: Any, weights: list[Tensor]) -> Any:
        for weight in weights:
            x = relu(conv(x, weight))
        return x

    return run


def neighbours(mesh: Mesh) -> list[tuple[int, int | None, int | None]]:
    """Return for each sharded dim the ranks before and after this one."""
    rank, rows = dist.get_rank(), []
    for dim, axis in ((2, "h"), (3, "w")):
        if axis in mesh.axes:
            (group,) = (g for g in mesh.groups(axis) if rank in g)
            i = group.index(rank)
            rows.append((dim, group[i - 1] if i else None,
                         group[i + 1] if i + 1 < len(group) else None))  # fmt: skip
    return rows


def contenders(mesh: Mesh, spec: fs.Spec, gather: bool) -> dict[str, Stack]:
    """Return the stacks on the local of an image by name, with the gather if requested."""
    rows = neighbours(mesh)
    padding = (1 - any(d == 2 for d, *_ in rows), 1 - any(d == 3 for d, *_ in rows))

    def conv_by_hand(x: Tensor, weight: Tensor) -> Tensor:
        for dim, before, after in rows:
            halo: Tensor = HaloByHand.apply(x, dim, before, after)
            x = halo
        return F.conv2d(x, weight, padding=padding)

    def conv_gathered(x: Tensor, weight: Tensor) -> Tensor:
        full = fs.reshard(fs.Sharded(x, spec), P(reduced={*mesh.axes})).local
        y = F.conv2d(full, weight, padding=1)
        return y[spec.index(dist.get_rank())]

    conv = lambda x, weight: fs.domain.conv2d(x, weight, padding=1)  # noqa: E731
    on_pairs = stack(conv, lambda x: fs.apply(torch.relu, x))
    plain = stack(lambda x, weight: F.conv2d(x, weight, padding=1))
    part = fs.partition(lambda x, *weights: plain(x, weights), mesh=mesh,
                        in_specs=(spec, *(P(),) * LAYERS))  # fmt: skip
    runs = {
        "halos by hand": stack(conv_by_hand),
        "fs.domain": lambda x, weights: on_pairs(fs.Sharded(x, spec), weights).local,
        "fs.partition": lambda x, weights: part(fs.Sharded(x, spec), *weights).local,
        "gather": stack(conv_gathered),
    }
    return {name: run for name, run in runs.items() if gather or name != "gather"}


def summed(grads: list[Tensor]) -> list[Tensor]:
    """Return the sums of the weights' gradients over the ranks, in one all-reduce."""
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    parts = flat.split([grad.numel() for grad in grads])
    return [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)]


def space(mesh: Mesh, size: int, channels: int) -> fs.Spec:
    """Return the layout of an image whose space all axes shard."""
    axes = [axis if axis in mesh.axes else None for axis in ("h", "w")]
    return fs.Spec(mesh, P(None, None, *axes), shape=(1, channels, size, size))


def times_on_rank(axes: dict[str, int], size: int, rounds: int, gather: bool) -> Any:
    """Return the times of the contenders on this rank, and the bytes that they send forward."""
    mesh = Mesh(axes)
    fs.init(mesh, timeout=120)
    torch.set_num_threads(1)
    spec, generator = space(mesh, size, CHANNELS), torch.Generator().manual_seed(0)
    weights = [
        (torch.randn(CHANNELS, CHANNELS, 3, 3, generator=generator) / 12).requires_grad_()
        for _ in range(LAYERS)
    ]
    image = torch.randn(spec.shape, generator=generator)
    x = image[spec.index(dist.get_rank())].clone().requires_grad_()
    runs = contenders(mesh, spec, gather)

    def backward(name: str, y: Tensor) -> list[Tensor]:
        gx, *grads = torch.autograd.grad(y, [x, *weights], torch.cos(y.detach()))
        return [gx, *(summed(grads) if name in ("halos by hand", "gather") else grads)]

    forwards = {name: partial(run, x, weights) for name, run in runs.items()}
    return time_passes(forwards, backward, rounds), sent_forward(runs, x, weights)


def sent_forward(runs: dict[str, Stack], x: Tensor, weights: list[Tensor]) -> dict[str, int]:
    """Return the bytes that this rank sends forward in fshard's contenders."""
    sent = {}
    for name, run in runs.items():
        with fs.comm_log() as log, torch.no_grad():
            run(x, weights)
        sent[name] = log.total_bytes
    return sent


def bound(mesh: Mesh, size: int) -> int:
    """Return the bytes that the busiest rank lacks of its windows, in all layers."""
    spec, lacking = space(mesh, size, CHANNELS), []
    for rank in mesh.ranks:
        own = spec.local_shape(rank)
        window = [
            min(s.stop + 1, n) - max(s.start - 1, 0) if size < n else size
            for s, size, n in zip(spec.index(rank), own, spec.shape, strict=True)
        ]
        lacking.append((math.prod(window) - math.prod(own)) * spec.dtype.itemsize * LAYERS)
    return max(lacking)


# -- memory ---------------------------------------------------------------------------------------


def resnet(size: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a ResNet-50 of torchvision and the shape of its image."""
    import_torchvision()
    from torchvision.models import resnet50

    return resnet50(weights=None, num_classes=10), (1, 3, size, size)


def unet(size: int) -> tuple[nn.Module, tuple[int, ...]]:
    """Return a UNet and the shape of its image."""
    return UNet(16), (1, 3, size, size)


MODELS = {"ResNet-50": resnet, "UNet": unet}


def memory_on_rank(axes: dict[str, int], name: str, size: int) -> tuple[int, int, int]:
    """Return the peak bytes of tensors of a rank, bytes of gradients among them, and bytes sent."""
    mesh = Mesh(axes)
    fs.init(mesh, timeout=600)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, shape = MODELS[name](size)
    spec = space(mesh, size, shape[1])
    params = dict(module.state_dict(keep_vars=True))
    leaves = [p for p in params.values() if p.requires_grad]
    x = fs.Sharded(torch.randn(spec.local_shape(dist.get_rank())), spec)
    part = fs.partition(module, mesh=mesh, params=P(), in_specs=spec, out_specs=P())
    with fs.comm_log() as log, LiveBytes() as live:
        y = part(params, x)
        loss = (y.local if isinstance(y, fs.Sharded) else y).square().mean()
        grads = torch.autograd.grad(loss, leaves)
    return live.peak, sum(grad.nbytes for grad in grads), log.total_bytes


def print_times(console: Console, axes: dict[str, int], size: int, gather: bool) -> None:
    """Print the times of the contenders, and the bytes that they send beside the bound."""
    rows = run_ranks(RANKS, times_on_rank, axes, size, ROUNDS, gather, timeout=600)
    sent = {name: max(row[1][name] for row in rows) for name in rows[0][1]}
    table = Table("contender", "forward", "both", "ratio forward", "ratio both", "of CPU forward",
                  "of CPU both", "sent forward")  # fmt: skip
    for name, texts in summaries([row[0] for row in rows]).items():
        table.add_row(name, *texts, f"{sent[name]:,} B" if sent[name] else "")
    lacking = bound(Mesh(axes), size)
    table.add_row("bound", *[""] * 6, f"{lacking:,} B")
    console.print(table)


def print_memory(console: Console, name: str, size: int) -> None:
    """Print the peak bytes of a rank by the number of ranks."""
    table = Table("ranks", "peak bytes", "of 1 rank's", "gradients", "sent",
                  title=f"{name}, {size} x {size}")  # fmt: skip
    alone = 0
    for axes in ({"h": 1}, {"h": 2}, {"h": 2, "w": 2}):
        n = math.prod(axes.values())
        rows = run_ranks(n, memory_on_rank, axes, name, size, timeout=1200)
        peak, grads, sent = (max(row[i] for row in rows) for i in range(3))
        alone = alone or peak
        table.add_row(f"{n}", f"{peak:,}", f"{peak / alone:.2f}", f"{grads:,}", f"{sent:,} B")
    console.print(table)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--gather", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--size", type=int)
    args = parser.parse_args()
    console = Console()
    if args.memory:
        for name in MODELS:
            print_memory(console, name, args.size or 2 * SIZE)
    else:
        axes = {"h": 2, "w": 2} if args.grid else {"h": RANKS}
        print_times(console, axes, args.size or SIZE, args.gather)
    close_all()


if __name__ == "__main__":
    main()
