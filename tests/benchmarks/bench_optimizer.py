"""Time of an AdamW step on the shards of a rank, beside hand-written ones and `torch.optim`.

`python -m tests.benchmarks.bench_optimizer [--widths 64 256 1024] [--rounds 30]` updates the
parameters of a GPT, sharded over two gloo ranks, in all ways of one kernel in turn: one step of
each in every round. The hand-written steps write the shards in place: tensor by tensor as
`examples/train_lm.py`, by one `torch._foreach_` call for all tensors or for each group of some that
stay in a cache, and by PyTorch's fused kernel. `fs.state.adamw` is either fused or by groups.
`copies` are the same on clones, for updates that donate no memory. Printed are the fastest steps of
rank 0, and the median over the rounds of the ratio to the hand-written step of the same kernel,
with quartiles. Parameters are compared at the end.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard import Mesh, P
from fshard.state.optimizers.elementwise import MAX_GROUP
from tests.helpers.gloo.harness import close_all, run_ranks

GOAL = 1.05
LAYERS, LR = 4, 1e-3
TIMEOUT = 600.0
Tensors = list[Tensor]


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a GPT, by name."""
    block = {
        "norm1": (width,), "bias1": (width,), "qkv": (3 * width, width), "out": (width, width),
        "norm2": (width,), "bias2": (width,), "up": (4 * width, width), "down": (width, 4 * width),
    }  # fmt: skip
    blocks = {f"{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    return {"embed": (256, width), **blocks, "norm": (width,)}


def tensor_by_tensor(
    params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, step: int
) -> None:
    """Take a step of AdamW in place, a few operations for each tensor."""
    for x, g, mean, square in zip(params, grads, means, squares, strict=True):
        x.mul_(1 - LR * 0.01)
        mean.lerp_(g, 1 - 0.9)
        square.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
        scale = (square.sqrt() / (1 - 0.999**step) ** 0.5).add_(1e-8)
        x.addcdiv_(mean, scale, value=-LR / (1 - 0.9**step))


def foreach(params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, step: int) -> None:
    """Take a step of AdamW in place, a few operations for all tensors."""
    torch._foreach_mul_(params, 1 - LR * 0.01)
    torch._foreach_lerp_(means, grads, 1 - 0.9)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, grads, grads, 1 - 0.999)
    scales = torch._foreach_sqrt(squares)
    torch._foreach_div_(scales, (1 - 0.999**step) ** 0.5)
    torch._foreach_add_(scales, 1e-8)
    torch._foreach_addcdiv_(params, means, scales, -LR / (1 - 0.9**step))


def fused(params: Tensors, grads: Tensors, means: Tensors, squares: Tensors, step: int) -> None:
    """Take a step of AdamW in place, by one operation."""
    torch._fused_adamw_(
        params, grads, means, squares, [], [torch.tensor(float(step))] * len(params), lr=LR,
        beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


Kernel = Callable[[Tensors, Tensors, Tensors, Tensors, int], None]
KERNELS: dict[str, tuple[Kernel, float]] = {
    "tensor by tensor": (tensor_by_tensor, math.inf),
    "foreach": (foreach, math.inf),
    "foreach in groups": (foreach, MAX_GROUP),
    "fused": (fused, math.inf),
}
"""By name the kernel, and the bytes of parameters that one call of it updates."""


class ByHand:
    """AdamW on lists of tensors, written in place."""

    def __init__(self, params: Tensors, grads: Tensors, kernel: str, *, copies: bool) -> None:
        self.kernel, limit = KERNELS[kernel]
        self.grads, self.copies = grads, copies
        self.params, self.step = [x.clone() for x in params], 0
        self.means, self.squares = ([torch.zeros_like(x) for x in params] for _ in range(2))
        self.groups: list[slice] = []
        first = total = 0
        for i, x in enumerate(params):
            total += x.nbytes
            if total > limit and i > first:
                self.groups.append(slice(first, i))
                first, total = i, x.nbytes
        self.groups.append(slice(first, len(params)))

    @torch.no_grad()
    def __call__(self) -> None:
        """Take a step."""
        self.step += 1
        if self.copies:
            columns = (self.params, self.means, self.squares)
            self.params, self.means, self.squares = ([x.clone() for x in xs] for xs in columns)
        columns = (self.params, self.grads, self.means, self.squares)
        for group in self.groups:
            self.kernel(*(xs[group] for xs in columns), self.step)


class OnPairs:
    """`fs.state.adamw` on a tree of pairs."""

    def __init__(self, pairs: Any, grads: Any, *, fused: bool, donate: bool) -> None:
        self.optimizer = fs.state.adamw(LR, fused=fused)
        self.pairs = {k: fs.Sharded(pair.local.clone(), pair.spec) for k, pair in pairs.items()}
        self.grads, self.donate = grads, donate
        self.state = self.optimizer.init(self.pairs)

    def __call__(self) -> None:
        """Take a step."""
        self.state, self.pairs = self.optimizer.update(
            self.grads, self.state, self.pairs, donate=self.donate
        )

    @property
    def params(self) -> Tensors:
        """The parameters of this rank."""
        return [pair.local for pair in self.pairs.values()]


class Torch:
    """`torch.optim.AdamW` on the shards of a rank."""

    def __init__(self, params: Tensors, grads: Tensors, kernel: str) -> None:
        self.params = [x.clone().requires_grad_() for x in params]
        options = {name: kernel == name for name in ("foreach", "fused")}
        self.optimizer = torch.optim.AdamW(self.params, LR, **options)
        for x, grad in zip(self.params, grads, strict=True):
            x.grad = grad

    def __call__(self) -> None:
        """Take a step."""
        self.optimizer.step()


def measured(width: int, kernel: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every contender of a kernel in every round, as one rank."""
    mesh = Mesh(x=2)
    fs.init(mesh)
    generator = torch.Generator().manual_seed(0)
    trees = [
        {name: fs.shard(torch.randn(shape, generator=generator), mesh, P("x"))
         for name, shape in shapes(width).items()}
        for _ in range(2)
    ]  # fmt: skip
    params, grads = ([pair.local for pair in tree.values()] for tree in trees)
    fused = kernel == "fused"
    contenders: dict[str, Any] = {
        f"by hand, {kernel}": ByHand(params, grads, kernel, copies=False),
        f"fs.state.adamw, {kernel}": OnPairs(*trees, fused=fused, donate=True),
        f"by hand, {kernel}, copies": ByHand(params, grads, kernel, copies=True),
        f"fs.state.adamw, {kernel}, copies": OnPairs(*trees, fused=fused, donate=False),
    }
    if kernel != "foreach in groups":
        contenders[f"torch.optim, {kernel}"] = Torch(params, grads, kernel)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, step in contenders.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    check([step.params for step in contenders.values()])
    return times


def check(columns: Sequence[Tensors]) -> None:
    """Raise `AssertionError` unless all contenders have the same parameters."""
    for column in columns[1:]:
        for x, y in zip(column, columns[0], strict=True):
            torch.testing.assert_close(x.detach(), y, rtol=1e-4, atol=1e-5)


def peer(name: str) -> str:
    """Return the hand-written step that a contender is compared with."""
    return f"by hand, {name.partition(', ')[2]}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    table = Table("width", "step", "fastest", "over by hand", title=f"goal {GOAL}")
    for width in options.widths:
        times: dict[str, list[float]] = {}
        for kernel in KERNELS:
            times |= run_ranks(2, measured, width, kernel, options.rounds, timeout=TIMEOUT)[0]
        for name, seconds in times.items():
            pairs = zip(seconds, times[peer(name)], strict=True)
            low, ratio, high = statistics.quantiles((a / b for a, b in pairs), n=4)
            table.add_row(str(width), name, f"{min(seconds) * 1e3:.3f} ms",
                          f"{ratio:.2f} ({low:.2f} to {high:.2f})")  # fmt: skip
    Console().print(table)
    close_all()


if __name__ == "__main__":
    main()
