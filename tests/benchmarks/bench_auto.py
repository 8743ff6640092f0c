"""Distance of `fs.auto` from the best of all layouts, on small programs.

`python -m tests.benchmarks.bench_auto` costs every layout of the arguments of programs of up to
six operations, with shared operands, branches and joins, on two axes: the optimum of the model.
Beside it are the choice of `fs.auto`, and the seconds of both.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import fshard as fs
from fshard import Mesh, Topology
from fshard.partition.auto import _Search

GOAL = 1.05
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


def every_choice(search: _Search) -> Iterator[tuple[Any, ...]]:
    """Return all layouts of all arguments that `fs.auto` may choose."""
    return itertools.product(*(search.layouts(leaf) for leaf in range(len(search.leaves))))


def compared(
    program: SmallProgram, mesh: Mesh, topology: Topology
) -> tuple[float, float, float, float, Any]:
    """Return the best time of all choices, that of `fs.auto`, and the seconds of both searches."""
    args = arguments(program)
    start = time.perf_counter()
    result = fs.auto(program.function, mesh, args, topology=topology)
    middle = time.perf_counter()
    search = _Search(program.function, mesh, args, topology, None, {})
    best = min(every_choice(search), key=search.rank)
    least, _ = search.cost(best)
    return least, result.time, middle - start, time.perf_counter() - middle, (best, result.in_specs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="which, with commas between")
    parser.add_argument("--show", action="store_true", help="the layouts that are not the best")
    options = parser.parse_args()
    table = Table(title=f"fs.auto beside the best of all layouts (goal {GOAL})")
    for head in ("program", "mesh", "topology", "best, µs", "auto", "seconds", "of all"):
        table.add_column(head, justify="left" if head in ("program", "mesh") else "right")
    console, worst = Console(width=110), 1.0
    for name in options.programs.split(","):
        for mesh, (kind, on) in itertools.product(MESHES, TOPOLOGIES.items()):
            least, spent, quick, slow, layouts = compared(PROGRAMS[name], mesh, on)
            worst = max(worst, spent / least)
            table.add_row(name, str(mesh), kind, f"{least * 1e6:.1f}", f"{spent / least:.3f}",
                          f"{quick:.1f}", f"{slow:.1f}")  # fmt: skip
            if options.show and spent > least * 1.001:
                console.print(f"{name} on {mesh}, {kind}: best {layouts[0]}, chosen {layouts[1]}")
    console.print(table)
    console.print(f"worst: {worst:.3f}")


if __name__ == "__main__":
    main()
