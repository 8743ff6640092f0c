"""Time of a partitioned training step relative to DDP's, FSDP2's and DTensor's tensor parallelism.

`python -m tests.benchmarks.bench_train_step` trains one GPT on gloo ranks in all ways in turn: some
steps of each in every round, so that a busy machine slows all of them. A step is the forward pass,
the backward pass and SGD; in the line "DDP, function" all three are one partitioned function. The
batch is sharded for DDP and FSDP2, and replicated for tensor parallelism. Printed are each
contender's fastest step, the median over the rounds of the partitioned step's time over its
peer's, and the most bytes that a step allocates beside what is there before it, on the first rank.
Losses are compared after every round.

`--peers "DDP, function"` measures this line alone, which the memory of the others does not slow.
`--remat none gathers all` compares FSDP2, which frees gathered parameters after their use
(`reshard_after_forward=True`), with partitioned steps under these policies.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import close_all, run_ranks

RANKS, WIDTHS = (2, 4), (128, 256, 512)
LAYERS, HEAD, WORDS, BATCH, LENGTH = 4, 32, 256, 8, 32
GOAL, STEPS = 0.95, 4
PEERS = "DDP", "DDP, function", "FSDP2", "DTensor"
COLUMNS, ROWS = ("query", "key", "value", "up"), ("out", "down")
Batch = tuple[Tensor, Tensor]
Layout = Callable[[str], fs.PartitionSpec]
Step = Callable[[], Tensor]
"""Training step that returns the mean loss of the global batch, or this rank's term of it."""


class Block(nn.Module):
    """Pre-norm transformer block: attention and a multilayer perceptron, with residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map a `(batch, length, width)` tensor to one of the same shape."""
        batch, length, _ = x.shape
        h = self.before_attention(x)
        q, k, v = (
            layer(h).view(batch, length, -1, HEAD).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        changed: Tensor = x + self.down(F.gelu(self.up(self.before_mlp(x))))
        return changed


class GPT(nn.Module):
    """Language model that returns the mean loss of predicting `following` from `words`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        """Return the mean cross entropy; both arguments are `(batch, length)` word indices."""
        x = self.blocks(self.words(words) + self.places.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def sgd_step(loss: Callable[[], Tensor], params: Any) -> Step:
    """Return a training step of a loss."""
    optimizer = torch.optim.SGD(params, lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value.detach()

    return step


def tensor_parallel(name: str) -> fs.PartitionSpec:
    """Return a parameter's layout: heads and hidden units sharded, others replicated."""
    layer, _, kind = name.rpartition(".")
    match layer.rpartition(".")[2], kind:
        case layer, _ if layer in COLUMNS:
            return P("x")
        case layer, "weight" if layer in ROWS:
            return P(None, "x")
        case _:
            return P()


def partitioned(
    model: nn.Module, batch: Batch, layout: Layout, data: fs.PartitionSpec, remat: str = "none"
) -> tuple[Step, float]:
    """Return a partitioned step, and the weight of this rank's loss in the global one."""
    mesh = Mesh(x=dist.get_world_size())
    specs = {k: fs.Spec(mesh, layout(k), shape=p.shape) for k, p in model.named_parameters()}
    pairs = {k: fs.shard(p.detach(), specs[k]) for k, p in model.named_parameters()}
    params = {
        k: fs.Sharded(pair.local.clone().requires_grad_(), pair.spec) for k, pair in pairs.items()
    }
    words, following = (
        fs.shard(x, fs.Spec(mesh, data, shape=x.shape, dtype=x.dtype)) for x in batch
    )
    part = fs.partition(model, mesh=mesh, params=specs, in_specs=data,
                        remat=None if remat == "none" else remat)  # fmt: skip
    leaves = [pair.local for pair in params.values()]
    weight = loss_weight(part, params, words, following)
    return sgd_step(lambda: part(params, words, following).local, leaves), weight


def functional(model: nn.Module, batch: Batch) -> tuple[Step, float]:
    """Return a data-parallel step that is one partitioned function, and its loss's weight.

    The function takes the gradients and updates the parameters.
    """
    mesh = Mesh(x=dist.get_world_size())
    params = {
        k: fs.Sharded(p.detach().clone(), fs.Spec(mesh, P(), shape=p.shape))
        for k, p in model.named_parameters()
    }
    words, following = (
        fs.shard(x, fs.Spec(mesh, P("x"), shape=x.shape, dtype=x.dtype)) for x in batch
    )

    def train(params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        def loss(params: dict[str, Tensor]) -> Tensor:
            result: Tensor = torch.func.functional_call(model, params, batch)
            return result

        grads, value = torch.func.grad_and_value(loss)(params)
        for name, param in params.items():
            param.sub_(grads[name], alpha=0.01)
        return value

    part = fs.partition(train, mesh=mesh, params=P(), in_specs=P("x"))
    weight = loss_weight(part, params, words, following)
    return lambda: part(params, words, following).local, weight


def loss_weight(part: Any, *args: Any) -> float:
    """Return the weight of this rank's loss in the global one, which is their sum."""
    (out,) = part.trace(*args).out_specs
    return 1.0 if out is not None and out.partition.unreduced else 1 / dist.get_world_size()


def ddp(model: nn.Module, batch: Batch) -> Step:
    """Return DDP's step."""
    from torch.nn.parallel import DistributedDataParallel

    wrapped, (words, following) = DistributedDataParallel(model), own_rows(batch)
    return sgd_step(lambda: wrapped(words, following), wrapped.parameters())


def fsdp(model: GPT, batch: Batch, reshard: bool | None = None) -> Step:
    """Return FSDP2's step; each block is one group of parameters.

    `reshard` frees gathered parameters after the forward pass; by default of all groups but the
    outermost.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    words, following = own_rows(batch)
    return sgd_step(lambda: model(words, following), model.parameters())


def dtensor(model: GPT, batch: Batch) -> Step:
    """Return the step of DTensor's tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {f"*.{k}": ColwiseParallel() for k in COLUMNS}
    plan |= {f"*.{k}": RowwiseParallel() for k in ROWS}  # type: ignore[dict-item, misc]
    parallelize_module(model.blocks, init_device_mesh("cpu", (dist.get_world_size(),)), plan)  # type: ignore[arg-type]
    return sgd_step(lambda: model(*batch), model.parameters())


def own_rows(batch: Batch) -> Batch:
    """Return this rank's rows of a batch."""
    words, following = (x.chunk(dist.get_world_size())[dist.get_rank()] for x in batch)
    return words, following


class Contest(NamedTuple):
    """A peer's step and the partitioned step with the same layouts.

    `weight` is that of this rank's partitioned loss in the global one, which is their sum.
    """

    peer: str
    step: Step
    partitioned: Step
    weight: float


def contests(width: int, rows: int, peers: Sequence[str], policies: Sequence[str]) -> list[Contest]:
    """Return the pairs of steps that are compared, all from the same parameters."""
    torch.manual_seed(0)
    model = GPT(width)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(WORDS, (rows, LENGTH + 1), generator=generator)
    batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    new = lambda: copy.deepcopy(model)  # noqa: E731
    ours = lambda *layouts: partitioned(new(), batch, *layouts)  # noqa: E731
    if policies:
        return [
            Contest(f"FSDP2, {policy}", fsdp(new(), batch, policy != "none"),
                    *ours(lambda _: P("x"), P("x"), policy))
            for policy in policies
        ]  # fmt: skip
    lines: dict[str, Callable[[str], Contest]] = {
        "DDP": lambda x: Contest(x, ddp(new(), batch), *ours(lambda _: P(), P("x"))),
        "DDP, function": lambda x: Contest(x, ddp(new(), batch), *functional(new(), batch)),
        "FSDP2": lambda x: Contest(x, fsdp(new(), batch), *ours(lambda _: P("x"), P("x"))),
        "DTensor": lambda x: Contest(x, dtensor(new(), batch), *ours(tensor_parallel, P())),
    }
    return [lines[peer](peer) for peer in peers]


def global_loss(loss: Tensor, weight: float) -> float:
    """Return the loss of the global batch: the weighted sum over all ranks."""
    total = weight * loss
    dist.all_reduce(total)
    return float(total)


def timed(step: Step) -> tuple[float, Tensor]:
    """Return the mean seconds of steps in sequence, as in training, and the last one's loss.

    After the first one, which is not timed, ranks are as far apart as between steps.
    """
    dist.barrier()
    step()
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = step()
    return (time.perf_counter() - start) / STEPS, loss


def peak_bytes(step: Step) -> int:
    """Return the most bytes that a step has allocated at a time, without what was there before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events: Any = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((nbytes for _, nbytes in changes), initial=0))


class Result(NamedTuple):
    """Seconds and peak bytes of the peer's steps and of the partitioned ones, and their losses."""

    peers: list[float]
    ours: list[float]
    peaks: list[int]
    differences: list[float]


def measure(
    width: int, rounds: int, rows: int, peers: Sequence[str], policies: Sequence[str]
) -> dict[str, Result]:
    """Return the times of all contests on this rank."""
    warnings.simplefilter("ignore")
    fs.init(Mesh(x=dist.get_world_size()))
    entered = contests(width, rows, peers, policies)
    results = {contest.peer: Result([], [], [], []) for contest in entered}
    for round_ in range(-3, rounds):
        for contest in entered:
            peer, loss = timed(contest.step)
            ours, our_loss = timed(contest.partitioned)
            one = global_loss(loss, 1 / dist.get_world_size())
            other = global_loss(our_loss, contest.weight)
            result = results[contest.peer]
            result.differences.append(abs(one - other))
            if round_ >= 0:
                result.peers.append(peer)
                result.ours.append(ours)
    for contest in entered:
        results[contest.peer].peaks.extend(map(peak_bytes, (contest.step, contest.partitioned)))
    return results


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--remat", nargs="*", choices=("none", "gathers", "all"), default=())
    options = parser.parse_args()
    # By its importable name: other processes do not know this module as __main__.
    from tests.benchmarks.bench_train_step import measure

    title = f"A training step of a GPT with {LAYERS} layers (goal {GOAL})"
    columns = (
        "ranks",
        "width",
        "peer",
        "peer, ms",
        "partition, ms",
        "over the peer",
        "peak, MiB",
        "losses differ",
    )
    table = Table(*columns, title=title)
    for ranks in options.ranks:
        for width in options.widths:
            args = width, options.rounds, options.batch, options.peers, options.remat
            results = run_ranks(ranks, measure, *args, timeout=600)[0]
            for peer, result in results.items():
                pairs = zip(result.peers, result.ours, strict=True)
                ratio = statistics.median(b / a for a, b in pairs)
                fastest = (f"{1000 * min(seconds):.1f}" for seconds in (result.peers, result.ours))
                peaks = " : ".join(f"{nbytes / 2**20:.1f}" for nbytes in result.peaks)
                cells = f"{ratio:.2f}", peaks, f"{max(result.differences):.0e}"
                table.add_row(str(ranks), str(width), peer, *fastest, *cells)
        table.add_section()
    close_all()
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
