"""Time of an AdamW step on the shards of a rank, beside hand-written ones and `torch.optim`.

`python -m tests.benchmarks.bench_optimizer [--widths 64 256 1024] [--rounds 30]` updates the
parameters of a GPT, sharded over two gloo ranks, in all ways in turn: one step of each in every
round. The hand-written steps write the shards in place, tensor by tensor as `examples/train_lm.py`
and by PyTorch's fused kernel; `copies` are the same on clones, for updates that donate no memory.
Printed are the fastest steps of rank 0, and the median over the rounds of the ratio to the
hand-written step of the same kernel. Parameters are compared after every round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import close_all, run_ranks

GOAL = 1.05
LAYERS, LR = 4, 1e-3
Tensors = list[Tensor]


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a GPT, by name."""
    block = {
        "norm1": (width,), "bias1": (width,), "qkv": (3 * width, width), "out": (width, width),
        "norm2": (width,), "bias2": (width,), "up": (4 * width, width), "down": (width, 4 * width),
    }  # fmt: skip
    blocks = {f"{i}.{name}": shape for i in range(LAYERS) for name, shape in block.items()}
    return {"embed": (256, width), **blocks, "norm": (width,)}


class ByHand:
    """AdamW on lists of tensors, written in place."""

    def __init__(self, params: Tensors, grads: Tensors, *, fused: bool, copies: bool) -> None:
        self.grads, self.fused, self.copies = grads, fused, copies
        self.params, self.step = [x.clone() for x in params], 0
        self.means, self.squares = ([torch.zeros_like(x) for x in params] for _ in range(2))

    @torch.no_grad()
    def __call__(self) -> None:
        """Take a step."""
        self.step += 1
        if self.copies:
            columns = (self.params, self.means, self.squares)
            self.params, self.means, self.squares = ([x.clone() for x in xs] for xs in columns)
        if self.fused:
            steps = [torch.tensor(float(self.step))] * len(self.params)
            torch._fused_adamw_(
                self.params, self.grads, self.means, self.squares, [], steps, lr=LR, beta1=0.9,
                beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        for x, g, mean, square in zip(
            self.params, self.grads, self.means, self.squares, strict=True
        ):
            x.mul_(1 - LR * 0.01)
            mean.lerp_(g, 1 - 0.9)
            square.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
            scale = (square.sqrt() / (1 - 0.999**self.step) ** 0.5).add_(1e-8)
            x.addcdiv_(mean, scale, value=-LR / (1 - 0.9**self.step))


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

    def __init__(self, params: Tensors, grads: Tensors, *, fused: bool) -> None:
        self.params = [x.clone().requires_grad_() for x in params]
        self.optimizer = torch.optim.AdamW(self.params, LR, fused=fused)
        for x, grad in zip(self.params, grads, strict=True):
            x.grad = grad

    def __call__(self) -> None:
        """Take a step."""
        self.optimizer.step()


def measured(width: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every contender in every round, as one rank."""
    mesh = Mesh(x=2)
    fs.init(mesh)
    generator = torch.Generator().manual_seed(0)
    trees = [
        {name: fs.shard(torch.randn(shape, generator=generator), mesh, P("x"))
         for name, shape in shapes(width).items()}
        for _ in range(2)
    ]  # fmt: skip
    params, grads = ([pair.local for pair in tree.values()] for tree in trees)
    contenders: dict[str, Any] = {}
    for kernel, fused in (("tensor by tensor", False), ("fused", True)):
        contenders[f"by hand, {kernel}"] = ByHand(params, grads, fused=fused, copies=False)
        contenders[f"fs.state.adamw, {kernel}"] = OnPairs(*trees, fused=fused, donate=True)
        contenders[f"torch.optim, {kernel}"] = Torch(params, grads, fused=fused)
        contenders[f"by hand, {kernel}, copies"] = ByHand(params, grads, fused=fused, copies=True)
        contenders[f"fs.state.adamw, {kernel}, copies"] = OnPairs(*trees, fused=fused, donate=False)
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
        times = run_ranks(2, measured, width, options.rounds)[0]
        for name, seconds in times.items():
            pairs = zip(seconds, times[peer(name)], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            table.add_row(str(width), name, f"{min(seconds) * 1e3:.3f} ms", f"{ratio:.3f}")
    Console().print(table)
    close_all()


if __name__ == "__main__":
    main()
