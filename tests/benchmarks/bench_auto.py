"""Distance of `fs.auto` from the best of all layouts, on small programs.

`python -m tests.benchmarks.bench_auto` costs every layout of the arguments of programs of up to
six operations, with shared operands, branches and joins, on two axes: the optimum of the model.
Beside it are the choice of `fs.auto`, and the seconds of both.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard import Mesh, Topology
from fshard.partition.layout_search.choice_search import ChoiceSearch

TOPOLOGIES = {"node": Topology.node(), "cluster": Topology.cluster(2)}
MESHES = (Mesh(x=2, y=2), Mesh(x=4, y=2))


@dataclass(frozen=True)
class SmallProgram:
    """A function, the shapes of its arguments, and which of them have a gradient."""

    function: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    requires_grad: tuple[bool, ...]


def _chain(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torch.relu(x @ v) @ w)


def _diamond(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    h = torch.relu(x @ v)
    return h @ w + h.sum(1, keepdim=True)


def _shared(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w) @ w.t()


def _twice(x: Tensor, w: Tensor) -> Tensor:
    h = torch.relu(x @ w)
    return torch.relu(h @ w) @ w


def _residual(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return x + torch.relu(x @ v) @ w


def _gated(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ v) * (x @ w)


def _softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1) @ w.t()


def _gram(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return torch.softmax(h @ h.t(), -1) @ h


def _crossed(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
    a, b = x @ v, x @ w
    return (a * b.sum(0)) @ w.t() + b


def _norm(x: Tensor, w: Tensor) -> Tensor:
    h = x - x.mean(1, keepdim=True)
    return torch.tanh(h @ w).sum(0)


def _batched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(1, 2), -1) @ v


def _two_losses(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return h.square().sum() + h.abs().amax()


B, D, E = 4096, 1024, 4096
PROGRAMS = {
    "chain": SmallProgram(_chain, ((B, D), (D, E), (E, D)), (False, True, True)),
    "wide chain": SmallProgram(
        _chain, ((512, 8192), (8192, 8192), (8192, 512)), (False, True, True)
    ),
    "diamond": SmallProgram(_diamond, ((B, D), (D, E), (E, D)), (False, True, True)),
    "shared": SmallProgram(_shared, ((B, D), (D, E)), (False, True)),
    "shared of few rows": SmallProgram(_shared, ((64, D), (D, E)), (False, True)),
    "three times": SmallProgram(_twice, ((256, E), (E, E)), (True, True)),
    "residual": SmallProgram(_residual, ((B, D), (D, E), (E, D)), (True, True, True)),
    "residual of few rows": SmallProgram(_residual, ((64, D), (D, E), (E, D)), (True, True, True)),
    "gated": SmallProgram(_gated, ((256, E), (E, E), (E, E)), (False, True, True)),
    "softmax": SmallProgram(_softmax, ((128, E), (E, 32768)), (False, True)),
    "gram": SmallProgram(_gram, ((B, D), (D, 256)), (False, True)),
    "crossed": SmallProgram(_crossed, ((512, E), (E, E), (E, E)), (False, True, True)),
    "norm": SmallProgram(_norm, ((128, E), (E, E)), (True, True)),
    "attention": SmallProgram(_batched, ((4, 2048, 64),) * 3, (True, True, True)),
    "attention of one batch": SmallProgram(_batched, ((1, 4096, 64),) * 3, (True, True, True)),
    "losses": SmallProgram(_two_losses, ((512, E), (E, E)), (False, True)),
}


def arguments(program: SmallProgram) -> list[Any]:
    """Return tensors on the meta device."""
    return [
        torch.empty(shape, device="meta", requires_grad=requires_grad)
        for shape, requires_grad in zip(program.shapes, program.requires_grad, strict=True)
    ]


@dataclass(frozen=True)
class Comparison:
    """Answer of `fs.auto` beside the best of all layouts of the arguments, and the seconds of both.

    `least` is the time of the best; every choice is planned as `fs.partition` plans it, and with
    the roles of its own labelling.
    """

    answer: fs.Auto
    least: float
    layouts: Any
    seconds: tuple[float, float]


def compared(program: SmallProgram, mesh: Mesh, topology: Topology) -> Comparison:
    """Return the answer of `fs.auto` and the best of all choices."""
    args, start = arguments(program), time.perf_counter()
    answer = fs.auto(program.function, mesh, args, topology=topology)
    middle = time.perf_counter()
    search = ChoiceSearch(program.function, mesh, args, topology, None, {})
    labels = search.labels(search.cost(search.replicated()).call)
    assert labels is not None
    for choice in itertools.product(*(leaf.layouts(mesh) for leaf in search.leaves)):
        search.cost(choice)
        search.cost(choice, labels.solve(layouts=choice).roles)
    best = search.best()
    seconds = middle - start, time.perf_counter() - middle
    return Comparison(answer, search.cost(best).time, best, seconds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="which, with commas between")
    parser.add_argument("--show", action="store_true", help="the layouts that are not the best")
    options = parser.parse_args()
    table = Table(title="fs.auto beside the best of all layouts")
    for head in ("program", "mesh", "topology", "best, µs", "auto", "gap", "seconds", "of all"):
        table.add_column(head, justify="left" if head in ("program", "mesh") else "right")
    console, worst = Console(width=110), 1.0
    for name in options.programs.split(","):
        for mesh, (kind, on) in itertools.product(MESHES, TOPOLOGIES.items()):
            result = compared(PROGRAMS[name], mesh, on)
            ratio = result.answer.time / result.least
            worst = max(worst, ratio)
            table.add_row(name, str(mesh), kind, f"{result.least * 1e6:.1f}", f"{ratio:.3f}",
                          f"{100 * result.answer.gap:.1f} %",
                          *(f"{seconds:.1f}" for seconds in result.seconds))  # fmt: skip
            if options.show and ratio > 1.001:
                console.print(f"{name} on {mesh}, {kind}: best {result.layouts}")
                console.print(result.answer.explain())
    console.print(table)
    console.print(f"worst: {worst:.3f}")


if __name__ == "__main__":
    main()
