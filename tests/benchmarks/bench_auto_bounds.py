"""Bounds of `fs.auto` beside the fastest plans of many layouts, on small functions.

`python -m tests.benchmarks.bench_auto_bounds` plans functions in layouts drawn at random, on meshes
and topologies, and prints the bound as a share of the fastest plan. A plan that undercuts the bound
of its own layouts, or that of all layouts, is an error of the bound.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fshard import Mesh, Topology
from fshard.partition.ir import Operation
from fshard.partition.layout_search.choice_search import MAX_ATTEMPTS, RATE, ChoiceSearch
from fshard.partition.partitioned_call import PartitionedCall

MACHINES = (
    (Mesh(x=2, y=2), Topology.node()),
    (Mesh(x=4, y=2), Topology.node()),
    (Mesh(x=4), Topology.cluster(2)),
    (Mesh(x=4, y=2), Topology.cluster(4)),
    (Mesh(x=2, y=4), Topology.tpu_v5e((2, 4))),
    (Mesh(x=2, y=2), Topology.tpu_v5e((4, 1))),
    (Mesh(x=8), Topology.dgx_h100()),
    (Mesh(x=4, y=4), Topology.dgx_h100()),
)
"""Meshes on machines; two axes that share a dim of a torus, and ones that leave a node, too."""


@dataclass(frozen=True)
class Case:
    """Function and its arguments on the meta device."""

    function: Callable[..., Any]
    arguments: tuple[Tensor, ...]


def _real(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)


def _data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def _labels(*shape: int) -> Tensor:
    return torch.zeros(shape, device="meta", dtype=torch.long)


def _gradient_inside(x: Tensor, w: Tensor) -> Tensor:
    grad = torch.func.grad(lambda w: torch.softmax(x @ w, -1).square().sum())(w)
    return w - 0.1 * grad


def _loss_gradient(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return torch.func.grad(lambda w: F.cross_entropy(x @ w, labels))(w)


def _norm_gradient(x: Tensor, w: Tensor) -> Tensor:
    return torch.func.grad(lambda w: F.layer_norm(x, x.shape[-1:], w).square().sum())(w)


def _step(x: Tensor, w: Tensor) -> Tensor:
    loss = (torch.relu(x @ w) @ w.t()).square().mean()
    return torch.autograd.grad(loss, w)[0]


def _reused(x: Tensor, w: Tensor) -> Tensor:
    h = torch.relu(x @ w)
    return torch.softmax(h, -1) @ w.t() + h.sum(-1, keepdim=True)


def _two_results(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return h.argmax(-1), F.softmax(h, -1)


def _chosen(x: Tensor) -> Tensor:
    return torch.relu(x).gather(1, torch.relu(x).argmax(-1, keepdim=True))


def _accuracy(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w
    return F.cross_entropy(h, labels), (h.argmax(-1) == labels).float().mean()


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


X, D = (1024, 4096), 4096
CASES: dict[str, Case] = {
    "pointwise": Case(lambda x, y: torch.relu(x * y + 1).tanh(), (_real(*X), _data(*X))),
    "broadcast": Case(lambda x, y: (x + y).exp() * y, (_real(*X), _real(D))),
    "transposed": Case(lambda x: x.t() + x.sigmoid().t(), (_real(*X),)),
    "sum": Case(lambda x: x.square().sum(), (_real(*X),)),
    "mean of rows": Case(lambda x: x - x.mean(0), (_real(*X),)),
    "maximum": Case(lambda x: x.amax(-1), (_real(*X),)),
    "maximum with index": Case(lambda x: x.max(-1)[0] * 2, (_real(*X),)),
    "reshaped": Case(lambda x: x.reshape(32, 32, D).sum(1).relu(), (_real(*X),)),
    "cat": Case(lambda x, y: torch.cat([x, y.exp()], 1).relu(), (_real(*X), _real(*X))),
    "stacked": Case(lambda x, y: torch.stack([x, y]).sum(0), (_real(*X), _data(*X))),
    "where": Case(lambda x: torch.where(x > 0, x, x.exp()), (_real(*X),)),
    "product": Case(lambda x, w: (x @ w).relu(), (_data(256, D), _real(D, D))),
    "two products": Case(lambda x, v, w: torch.relu(x @ v) @ w,
                         (_data(256, D), _real(D, D), _real(D, 512))),
    "product twice": Case(lambda x, w: torch.relu(x @ w) @ w, (_real(256, D), _real(D, D))),
    "product and sum": Case(lambda x, w: (x @ w).sum(0).exp(), (_data(256, D), _real(D, D))),
    "batched product": Case(_attention, ((_real(4, 1024, 64),) * 3)),
    "einsum": Case(lambda x, w: torch.einsum("td,edf->etf", x, w).relu(),
                   (_data(512, 256), _real(8, 256, 512))),
    "attention": Case(F.scaled_dot_product_attention, ((_real(2, 4, 1024, 64),) * 3)),
    "causal attention": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (_real(1, 2, 2048, 64),) * 3),
    "softmax": Case(lambda x: torch.softmax(x, -1), (_real(*X),)),
    "softmax of rows": Case(lambda x: torch.softmax(x, 0) * 2, (_real(*X),)),
    "softmax of data": Case(lambda x: torch.softmax(x, -1), (_data(*X),)),
    "softmax of a vector": Case(lambda x: torch.softmax(x, -1) * 2, (_real(1 << 22),)),
    "log softmax of a vector": Case(lambda x: torch.log_softmax(x, -1), (_real(1 << 22),)),
    "softmax in float32": Case(lambda x: torch.softmax(x, -1, dtype=torch.float32),
                               (_real(*X, dtype=torch.bfloat16),)),
    "two softmaxes": Case(lambda x: torch.softmax(torch.softmax(x, -1), 0), (_real(*X),)),
    "log softmax": Case(lambda x, w: torch.log_softmax(x @ w, -1).sum(),
                        (_data(64, D), _real(D, 8192))),
    "logsumexp": Case(lambda x: x.logsumexp(-1), (_real(*X),)),
    "layer norm": Case(lambda x, w, b: F.layer_norm(x, (D,), w, b),
                       (_real(*X), _real(D), _real(D))),
    "layer norm of data": Case(lambda x: F.layer_norm(x, (D,)), (_data(*X),)),
    "layer norm of all": Case(lambda x, w: F.layer_norm(x, X, w), (_real(*X), _real(*X))),
    "layer norm in bfloat16": Case(lambda x, w: F.layer_norm(x, (D,), w).relu(),
                                   (_real(*X, dtype=torch.bfloat16),
                                    _real(D, dtype=torch.bfloat16))),
    "rms norm": Case(lambda x, w: F.rms_norm(x, (D,), w), (_real(*X), _real(D))),
    "rms norm and product": Case(lambda x, w, v: F.rms_norm(x, (D,), w) @ v,
                                 (_real(*X), _real(D), _real(D, 512))),
    "group norm": Case(lambda x: F.group_norm(x, 8), (_real(16, 64, 32, 32),)),
    "batch norm": Case(lambda x: F.batch_norm(x, None, None, training=True),
                       (_real(64, 64, 32, 32),)),
    "instance norm": Case(F.instance_norm, (_real(8, 16, 64, 64),)),
    "normalize": Case(lambda x: F.normalize(x, dim=-1), (_real(*X),)),
    "vector norm": Case(lambda x: x / torch.linalg.vector_norm(x), (_real(*X),)),
    "variance": Case(lambda x: x.var(-1), (_real(*X),)),
    "deviation": Case(lambda x: x / x.std(0), (_real(*X),)),
    "cosine similarity": Case(F.cosine_similarity, (_real(*X), _real(*X))),
    "glu": Case(lambda x: F.glu(x, -1), (_real(*X),)),
    "gelu and softmax": Case(lambda x, a, b: torch.softmax(F.gelu(x @ a) @ b, -1),
                             (_data(256, 1024), _real(1024, D), _real(D, 1024))),
    "cross entropy": Case(F.cross_entropy, (_real(*X), _labels(1024))),
    "cross entropy of a product": Case(lambda x, w, y: F.cross_entropy(x @ w, y),
                                       (_data(256, 512), _real(512, 16384), _labels(256))),
    "smoothed cross entropy": Case(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
                                   (_real(*X), _labels(1024))),
    "sum of cross entropies": Case(lambda x, y: F.cross_entropy(x, y, reduction="sum"),
                                   (_real(*X), _labels(1024))),
    "weighted cross entropy": Case(lambda x, y, w: F.cross_entropy(x, y, w, reduction="none"),
                                   (_real(*X), _labels(1024), _data(D))),
    "entropy of probabilities": Case(F.cross_entropy, (_real(*X), _data(*X))),
    "negative likelihood": Case(lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
                                (_real(*X), _labels(1024))),
    "binary entropy": Case(F.binary_cross_entropy_with_logits, (_real(*X), _data(*X))),
    "mean squared error": Case(F.mse_loss, (_real(*X), _data(*X))),
    "Huber loss": Case(F.huber_loss, (_real(*X), _data(*X))),
    "divergence": Case(lambda x, y: F.kl_div(F.log_softmax(x, -1), y, reduction="batchmean"),
                       (_real(*X), _data(*X))),
    "argmax": Case(lambda x: x.argmax(-1), (_real(*X),)),
    "argmax of relu": Case(lambda x: torch.relu(x).argmax(-1), (_real(*X),)),
    "argmax of a product": Case(lambda x, w: (x @ w).argmax(-1),
                                (_real(256, 1024), _real(1024, D))),
    "argmin of all": Case(lambda x: x.exp().argmin(), (_real(*X),)),
    "argmax and softmax": Case(_two_results, (_data(256, 512), _real(512, D))),
    "argmax and gather": Case(_chosen, (_real(*X),)),
    "loss and accuracy": Case(_accuracy, (_data(256, 512), _real(512, D), _labels(256))),
    "comparison": Case(lambda x, y: (x.exp() > y).sum(), (_real(*X), _real(*X))),
    "detached": Case(lambda x: x.exp().detach().softmax(-1) * 2, (_real(*X),)),
    "partly detached": Case(lambda x: x / x.detach().abs().amax(-1, keepdim=True), (_real(*X),)),
    "rounded": Case(lambda x: (x * 2).round().long().sum(0), (_real(*X),)),
    "sort": Case(lambda x: x.sort(-1)[0], (_real(*X),)),
    "argsort": Case(lambda x: x.argsort(-1), (_real(*X),)),
    "top values": Case(lambda x: x.topk(4, -1)[0], (_real(*X),)),
    "indices of top values": Case(lambda x: x.topk(4, -1)[1], (_real(*X),)),
    "median": Case(lambda x: x.median(-1)[0], (_real(*X),)),
    "cumulative sum": Case(lambda x: x.cumsum(-1) * 2, (_real(*X),)),
    "cumulative sum of rows": Case(lambda x: x.cumsum(0).relu(), (_real(*X),)),
    "cumulative maximum": Case(lambda x: x.cummax(0)[0], (_real(*X),)),
    "cumulative logsumexp": Case(lambda x: x.logcumsumexp(0), (_real(*X),)),
    "flip": Case(lambda x: x.flip(0) + x, (_real(*X),)),
    "roll": Case(lambda x: x.roll(3, 0) + x, (_real(*X),)),
    "embedding": Case(F.embedding, (_labels(1024), _real(8192, 512))),
    "softmax of embedding": Case(lambda i, w: torch.softmax(F.embedding(i, w), -1),
                                 (_labels(1024), _real(8192, 512))),
    "tied embedding": Case(lambda i, w: F.embedding(i, w) @ w.t(),
                           (_labels(512), _real(8192, 512))),
    "gathered": Case(lambda x, i: x.gather(1, i).exp(), (_real(*X), _labels(1024, 16))),
    "scattered": Case(lambda x, i: torch.zeros(512, D, device=x.device).index_add(0, i, x),
                      (_real(*X), _labels(1024))),
    "convolution": Case(lambda x, w: F.conv2d(x, w, padding=1),
                        (_real(8, 16, 64, 64), _real(32, 16, 3, 3))),
    "convolution and pool": Case(lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=1).relu(), 2),
                                 (_real(4, 4, 128, 128), _real(4, 4, 3, 3))),
    "two convolutions": Case(lambda x, v, w: F.conv2d(F.conv2d(x, v, padding=1), w, padding=1),
                             (_data(2, 4, 128, 128), _real(8, 4, 3, 3), _real(4, 8, 3, 3))),
    "convolution in time": Case(lambda x, w: torch.softmax(F.conv1d(x, w, padding=2), -1),
                                (_real(4, 8, 4096), _real(8, 8, 5))),
    "pool and interpolation": Case(
        lambda x: F.interpolate(F.avg_pool2d(x, 2), scale_factor=2.0), (_real(4, 8, 128, 128),)),
    "padded": Case(lambda x: F.pad(x, (1, 1)).exp(), (_real(*X),)),
    "differences": Case(lambda x: x[1:] - x[:-1], (_real(*X),)),
    "gradient inside": Case(_gradient_inside, (_data(256, 1024), _real(1024, D))),
    "gradient of a loss": Case(_loss_gradient, (_data(256, 512), _data(512, D), _labels(256))),
    "gradient of a norm": Case(_norm_gradient, (_data(*X), _data(D))),
    "gradient by autograd": Case(_step, (_data(256, 1024), _real(1024, D))),
    "reused": Case(_reused, (_data(256, 1024), _real(1024, D))),
    "softmax of small": Case(lambda x: torch.softmax(x, -1), (_real(16, 64),)),
    "small norm and product": Case(lambda x, w: F.layer_norm(x, (64,)) @ w,
                                   (_real(32, 64), _real(64, 64))),
    "Fourier transform": Case(lambda x: torch.fft.fft(x, dim=-1).abs(), (_real(*X),)),
    "Fourier transform of two dims": Case(lambda x: torch.fft.fft2(x).abs(), (_real(8, 512, 512),)),
    "windows": Case(
        lambda x: torch.stft(x, 256, window=torch.ones(256, device=x.device), return_complex=True)
        .abs(), (_real(8, 65536),)),
    "adaptive pool": Case(lambda x: F.adaptive_avg_pool2d(x, 4), (_real(8, 16, 64, 64),)),
    "steps": Case(lambda x: torch.diff(x, dim=0), (_real(1025, D),)),
    "trapezoids": Case(lambda x: torch.trapezoid(x, dim=-1), (_real(*X),)),
    "turned": Case(lambda x: torch.rot90(x) * 2, (_real(*X),)),
    "matrix norm": Case(lambda x: x / torch.linalg.matrix_norm(x), (_real(*X),)),
    "mean without NaN": Case(lambda x: x - x.nanmean(-1, keepdim=True), (_real(*X),)),
    "extremes": Case(lambda x: torch.aminmax(x, dim=0)[1] * 2, (_real(*X),)),
    "distances of pairs": Case(F.pairwise_distance, (_real(*X), _real(*X))),
    "triplets": Case(F.triplet_margin_loss,
                     (_real(*X), _real(*X), _real(*X))),
    "weight norm": Case(lambda x, v, g: x @ torch._weight_norm(v, g, 0).t(),
                        (_data(256, 1024), _real(D, 1024), _real(D, 1))),
    "masked attention": Case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        (_real(2, 2, 512, 64), _real(2, 2, 1024, 64), _real(2, 2, 1024, 32), _data(512, 1024))),
    "grouped attention": Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        (_real(1, 8, 1024, 64), _real(1, 2, 1024, 64), _real(1, 2, 1024, 64))),
    "attention to data": Case(F.scaled_dot_product_attention,
                              (_real(1, 2, 512, 64), _data(1, 2, 2048, 64), _data(1, 2, 2048, 64))),
    "cumulative sum of much": Case(lambda x: x.cumsum(-1).relu(), (_real(8, 1 << 24),)),
    "cumulative sum of a vector": Case(lambda x: x.cumsum(-1).relu(), (_real(1 << 24),)),
    "triangle": Case(lambda x: torch.softmax(x.tril(), -1), (_real(1024, 1024),)),
    "dropout": Case(lambda x: F.dropout(x, 0.5, training=False).softmax(-1), (_real(*X),)),
}  # fmt: skip


@dataclass(frozen=True)
class BoundCheck:
    """Bound of a function, and the seconds of the fastest of some plans.

    `excess` is the most by which a bound exceeds a plan of its layouts, as a share.
    """

    bound: float
    least: float
    excess: float


def checked(case: Case, mesh: Mesh, on: Topology, layouts: int, seed: int = 0) -> BoundCheck | None:
    """Return the bounds beside plans of at most `layouts` layouts; None without a labelling."""
    search = ChoiceSearch(case.function, mesh, [*case.arguments], on, None, {})
    labels = search.labels(search.cost(search.replicated()).call)
    if labels is None:
        return None
    draw, least, excess, bound = random.Random(seed), float("inf"), 0.0, 0.0
    choices = {search.replicated(), search.smallest(), search.sharded_data()}
    for attempt in range(MAX_ATTEMPTS):
        choice, roles, weight = labels.solve()
        bound = max(bound, weight)
        search.cost(choice, roles)
        choices.add(choice)
        labels.improve_shares(RATE / (1 + attempt) ** 0.5)
    options = [list(x or [None]) for x in search.options]
    for _ in range(3 * layouts):
        if len(choices) < layouts:
            choices.add(tuple(map(draw.choice, options)))
    for choice in choices:
        _, roles, weight = labels.solve(layouts=choice)
        plans = search.cost(choice), search.cost(choice, roles)
        times = [plan.time for plan in plans if _is_even(plan.call)]
        for time in times:
            least = min(least, time)
            excess = max(excess, (weight - time) / time if time else weight)
    excess = max(excess, (bound - least) / least if least else bound)
    return BoundCheck(bound, least, excess)


def _is_even(call: PartitionedCall) -> bool:
    """Return True if all shards are even: the bound covers no others."""
    specs = [spec for line in call.lines if isinstance(line, Operation)
             for spec in (*line.strategy.shard_specs, *line.strategy.out_specs)]  # fmt: skip
    return all(spec is None or spec.is_even for spec in specs)


def checks(
    names: list[str], layouts: int, machines: int, seed: int
) -> Iterator[tuple[str, Mesh, Topology, BoundCheck]]:
    """Yield the checks of functions on some machines each, one after the other."""
    order = itertools.cycle(range(len(MACHINES)))
    for name in names:
        for index in itertools.islice(order, machines):
            mesh, on = MACHINES[index]
            result = checked(CASES[name], mesh, on, layouts, seed)
            if result is not None:
                yield name, mesh, on, result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", default=",".join(CASES), help="which, with commas between")
    parser.add_argument("--layouts", type=int, default=12, help="layouts of each")
    parser.add_argument("--machines", type=int, default=3, help="meshes and topologies of each")
    parser.add_argument("--seed", type=int, default=0, help="of the layouts")
    options = parser.parse_args()
    table = Table(title="bounds of fs.auto as a share of the fastest plan")
    for head in ("function", "mesh", "topology", "fastest, µs", "share", "exceeds by"):
        table.add_column(head, justify="right" if head[-1] in "sey" else "left")
    shares, wrong = [], 0
    for name, mesh, on, result in checks(
        options.functions.split(","), options.layouts, options.machines, options.seed
    ):
        shares.append(result.bound / result.least if result.least else 1.0)
        exceeds = result.excess > 1e-9
        wrong += exceeds
        table.add_row(name, str(mesh), on.name, f"{result.least * 1e6:.1f}", f"{shares[-1]:.2f}",
                      f"{result.excess:.1e}" if exceeds else "")  # fmt: skip
    console = Console(width=110)
    console.print(table)
    console.print(f"{wrong} of {len(shares)} exceed a plan; median share "
                  f"{statistics.median(shares):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
