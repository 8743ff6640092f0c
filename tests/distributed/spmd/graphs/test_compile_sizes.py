"""`torch.compile` of calls whose tensors have other sizes in every call: few graphs for all."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import random_global

MESH = Mesh(i=2)
F64 = torch.float64
SIZES = range(6, 26, 2)
W = random_global((3, 4), F64, 1) / 4
Row = tuple[list[float], int]


def rows(n: int) -> torch.Tensor:
    return random_global((n, 3), F64, n) / 4


def of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's operand of a collective outside of a map: other values on each rank."""
    return x * (1 + rank)


class Weighted(torch.nn.Module):
    """A mapped function of a module's parameter."""

    def __init__(self, check: bool, x_spec: P, out_spec: P) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(W.clone())
        body = lambda x: torch.tanh(x @ fs.pcast(self.weight, "i", to="varying"))  # noqa: E731
        self.mapped = fs.shard_map(
            body, mesh=MESH, in_specs=x_spec, out_specs=out_spec, check=check
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mapped(x.sin())
        return y


def mapped(check: bool) -> Callable[..., torch.Tensor]:
    ins = P(None, None), P(None, "i")
    body = lambda x, w: (x.sum(0) @ w).sin() * x.shape[0]  # noqa: E731
    f = fs.shard_map(body, mesh=MESH, in_specs=ins, out_specs=P("i"), check=check)
    return lambda x: f(x, W)


def gathered(x: torch.Tensor) -> torch.Tensor:
    total: Any = fs.psum({"a": x, "b": (W, x[:, 0])}, "i", mesh=MESH)
    y: torch.Tensor = fs.all_gather(total["a"] @ total["b"][0], "i", axis=1, tiled=True, mesh=MESH)
    return y * total["b"][1][:, None]


def gathered_densely(x: torch.Tensor) -> torch.Tensor:
    y = 3 * x @ (2 * W)
    return torch.cat([y, y], 1) * 3 * x[:, :1]


def scattered(x: torch.Tensor) -> torch.Tensor:
    part = fs.psum_scatter(x, "i", tiled=True, mesh=MESH)
    moved = fs.all_to_all(part @ W, "i", 1, 0, tiled=True, mesh=MESH)
    y: torch.Tensor = fs.pbroadcast(fs.ppermute(moved, "i", [(0, 1), (1, 0)], mesh=MESH), "i", 0,
                                    mesh=MESH)  # fmt: skip
    return fs.pmax(y, "i", mesh=MESH)


def scattered_densely(x: torch.Tensor) -> torch.Tensor:
    return (3 * x @ W)[:, 2:]


CASES: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[..., Any]]] = {
    "rows": (lambda: Weighted(True, P("i"), P("i")), lambda x: torch.tanh(x.sin() @ W)),
    "unchecked": (lambda: Weighted(False, P("i"), P("i")), lambda x: torch.tanh(x.sin() @ W)),
    "columns": (lambda: mapped(True), lambda x: (x.sum(0) @ W).sin() * x.shape[0]),
    "unchecked columns": (lambda: mapped(False), lambda x: (x.sum(0) @ W).sin() * x.shape[0]),
    "gathered": (lambda: gathered, gathered_densely),
    "scattered": (lambda: scattered, scattered_densely),
}
OUTSIDE = "gathered", "scattered"


def gradient(fn: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = fn(leaf)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaf)]


def run_sizes(name: str, dynamic: bool | None) -> Row:
    fs.init(MESH)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    make, dense = CASES[name]
    eager = make()
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    differences = []
    for n in SIZES:
        x = of_rank(rows(n), dist.get_rank()) if name in OUTSIDE else rows(n)
        found = gradient(compiled, x)
        expected = [dense(rows(n)), gradient(eager, x)[1]]
        differences += [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    return differences, counters["stats"]["unique_graphs"]


DEFAULT = {("rows", None)}
"""Cases of every run; compiling takes seconds."""


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow)
        for case in itertools.product(CASES, [None, True])
    ],
)
def test_ten_sizes_are_two_graphs(name: str, dynamic: bool | None) -> None:
    for differences, graphs in run_ranks(2, run_sizes, name, dynamic):
        assert max(differences) < 1e-10
        assert graphs == (2 if dynamic is None else 1)


# -- calls that are planned by size ----------------------------------------------------------

PART = fs.partition(lambda x, w: torch.tanh(x @ w), mesh=MESH, in_specs=(P("i"), P()))


def on_pairs(x: torch.Tensor) -> torch.Tensor:
    y = fs.apply(torch.sin, fs.shard(torch.cos(x), MESH, P("i")))
    return torch.exp(fs.unshard(fs.reshard(y, P(None, "i", reduced=())))) + x


def partitioned(x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = fs.unshard(PART(fs.shard(torch.cos(x), MESH, P("i")), W))
    return torch.exp(y) + PART(x, W)


def by_program(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(moved(torch.cos(x)))


@torch.compiler.disable
def moved(x: torch.Tensor) -> torch.Tensor:
    """Return rows as columns, by a program of this size."""
    src = fs.Spec(MESH, P("i"), shape=x.shape, dtype=F64)
    dst = src.replace(partition=P(None, "i"), uneven="chunk")
    y: torch.Tensor = fs.redistribute(src, dst)(fs.shard(x, src).local)
    return y


class Layers(torch.nn.Module):
    """Layers of which each calls a partitioned function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3, dtype=F64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.block(layer(x))
        return x

    def block(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.cos(PART(torch.cos(x), W)[:, :3])
        return y


PLANNED: dict[str, Callable[..., Any]] = {
    "pairs": on_pairs, "partitioned": partitioned, "program": by_program, "layers": Layers,
}  # fmt: skip


def run_planned(name: str, dynamic: bool | None) -> tuple[list[float], list[int]]:
    """Return differences from uncompiled calls, and the frames compiled up to each size."""
    fs.init(MESH)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    eager = PLANNED[name]() if name == "layers" else PLANNED[name]
    compiled, differences = torch.compile(eager, backend="aot_eager", dynamic=dynamic), []
    frames = []
    with warnings.catch_warnings():
        # PyTorch's tracer looks for the gradients of tensors that an earlier graph returned.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for x in map(rows, SIZES):
            pairs = zip(gradient(compiled, x), gradient(eager, x), strict=True)
            differences += [(a - b).abs().max().item() for a, b in pairs]
            frames.append(counters["frames"]["total"])
    return differences, frames


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param(*case, marks=[] if case == ("partitioned", True) else pytest.mark.slow)
        for case in itertools.product(PLANNED, [None, True])
    ],
)
def test_calls_that_are_planned_by_size_end_graphs(name: str, dynamic: bool | None) -> None:
    for differences, frames in run_ranks(2, run_planned, name, dynamic):
        assert max(differences) < 1e-12
        assert frames[0] <= 6
        assert frames[-1] == frames[0 if dynamic else 6]  # a static and a dynamic one by call


# -- one graph for each spec -----------------------------------------------------------------


def run_specialized() -> list[Row]:
    fs.init(MESH)

    def redistributed(x: torch.Tensor) -> torch.Tensor:
        return fs.unshard(fs.reshard(fs.shard(x, MESH, P("i")), P(unreduced={"i"}))).sin()

    part = fs.partition(lambda x, w: (x @ w).sin(), mesh=MESH, in_specs=(P("i"), P()))
    partitioned = lambda x: fs.unshard(part(fs.shard(x, MESH, P("i")), W))  # noqa: E731
    results = []
    cases: list[tuple[Callable[..., Any], Callable[..., Any]]]
    cases = [(redistributed, torch.sin), (partitioned, lambda x: (x @ W).sin())]
    for fn, dense in cases:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        compiled = torch.compile(fn, backend="eager", fullgraph=True, dynamic=True)
        xs = [rows(n) for n in (4, 5, 6)]  # 5 rows are uneven shards
        differences = [(compiled(x) - dense(x)).abs().max().item() for x in xs]
        results.append((differences, counters["stats"]["unique_graphs"]))
    return results


def test_each_spec_is_a_graph() -> None:
    for results in run_ranks(2, run_specialized):
        for differences, graphs in results:
            assert max(differences) < 1e-10
            assert graphs == 3


def run_beyond_the_limit() -> list[tuple[list[str], float]]:
    fs.init(MESH)

    def planned(x: torch.Tensor) -> torch.Tensor:
        return fs.reshard(fs.shard(x, MESH, P("i")), P()).local

    on_pairs = fs.local_map(torch.sin, in_specs=None, out_specs=P("i"))
    mapped = lambda x: fs.unshard(on_pairs(fs.shard(x, MESH, P("i")))).asin()  # noqa: E731
    results = []
    for fn in (planned, mapped):
        torch._dynamo.reset()
        compiled = torch.compile(
            fn, backend="eager", fullgraph=True, dynamic=True, recompile_limit=2
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            differences = [(compiled(x) - x).abs().max().item() for x in map(rows, (4, 6))]
        texts = [str(w.message) for w in caught if "the last of 2 graphs" in str(w.message)]
        results.append((texts, max(differences)))
    return results


def test_the_last_graph_that_the_limit_allows_warns() -> None:
    for results in run_ranks(2, run_beyond_the_limit):
        for texts, difference in results:
            assert "pad tensors to a few sizes, which take a graph each" in texts[0]
            assert "torch.compile(fn, recompile_limit=...) allows more graphs" in texts[0]
            assert difference < 1e-12


def run_padded() -> Row:
    """Run ten sizes that are padded to three, and then one that is marked as dynamic."""
    fs.init(MESH)
    part = fs.partition(torch.sin, mesh=MESH, in_specs=P("i"))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return part(x) + fs.unshard(fs.apply(torch.sin, fs.shard(x, MESH, P("i"))))

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled, differences = torch.compile(fn, backend="eager", fullgraph=True), []
    for x in map(rows, SIZES):
        padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 8))
        differences.append((compiled(padded)[: len(x)] - 2 * x.sin()).abs().max().item())
    graphs, marked = counters["stats"]["unique_graphs"], rows(2)
    torch._dynamo.mark_dynamic(marked, 0)
    with pytest.raises(Exception, match="specialized it to be a constant"):
        compiled(marked)
    return differences, graphs


def test_padded_sizes_are_a_graph_each() -> None:
    for differences, graphs in run_ranks(2, run_padded):
        assert max(differences) < 1e-12
        assert graphs == 3


def run_indivisible() -> str:
    fs.init(MESH)
    f = fs.shard_map(torch.sin, mesh=MESH, in_specs=P("i"), out_specs=P("i"))
    compiled = torch.compile(f, backend="aot_eager", dynamic=True)
    compiled(rows(4))
    with pytest.raises(ShardingError) as caught:
        compiled(rows(5))
    return str(caught.value)


def test_sizes_that_the_ranks_do_not_divide_are_refused() -> None:
    for text in run_ranks(2, run_indivisible):
        assert "dim 0 of size 5" in text
