"""`torch.compile(fullgraph=True)` around calls of mapped functions, programs and conversions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.spmd import graph_call
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import random_global

MESH = Mesh(i=2)
F64 = torch.float64
X, W = random_global((4, 4), F64, 0) / 4, random_global((4, 2), F64, 1) / 4
SRC = Spec(MESH, P("i"), shape=(4, 4), dtype=F64)
PROGRAM = fs.redistribute(SRC, SRC.replace(partition=P(None, "i")))


def mapped(body: Callable[..., Any], *out: str, **options: Any) -> Any:
    return fs.shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P(*out), **options)


def weighted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return fs.psum(torch.tanh(x @ fs.pcast(w, "i", to="varying")).sum(0), "i")


class Layer(torch.nn.Module):
    """A mapped function of a module's parameter, which it closes over."""

    def __init__(self, check: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(W.clone())
        body = lambda x: torch.tanh(x @ fs.pcast(self.weight, "i", to="varying"))  # noqa: E731
        self.mapped = fs.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P("i"), check=check)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mapped(x)
        return y


def of_globals(check: bool) -> Callable[..., Any]:
    f = mapped(weighted, check=check)
    return lambda x, w: 2 * f(x.sin(), w=w)


def of_pairs(check: bool) -> Callable[..., Any]:
    f = mapped(lambda x, w: x @ w, "i", check=check)
    return lambda x, w: fs.unshard(f(fs.shard(x, MESH, P("i")), w)).cos()


def of_trees(check: bool) -> Callable[..., Any]:
    body = lambda tree, act, n: {"y": act(tree["x"]) * n, "n": n, "none": tree["none"]}  # noqa: E731
    out = {"y": P("i"), "n": None, "none": None}
    ins = ({"x": P("i"), "none": None}, None, None)
    f = fs.shard_map(body, mesh=MESH, in_specs=ins, out_specs=out, check=check)

    def around(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        result = f({"x": x, "none": None}, torch.sin, 3)
        assert result["none"] is None
        y: torch.Tensor = result["y"] * result["n"] @ w
        return y

    return around


def of_closures(check: bool) -> Callable[..., Any]:
    layer = Layer(check)
    return lambda x, w: layer(x) * w.sum()


def of_programs(check: bool) -> Callable[..., Any]:
    def around(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        started = PROGRAM(fs.shard(x, SRC).local, async_op=True)
        pair = fs.reshard((PROGRAM(x[:2].sin()), PROGRAM.dst), P(unreduced={"i"}))
        y: torch.Tensor = fs.unshard(pair) @ w
        return y + started.wait().sum()

    return around


def of_pairs_alone(check: bool) -> Callable[..., Any]:
    f = fs.local_map(lambda x: fs.psum(x, "i"), in_specs=None, out_specs=P())

    def around(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        local, spec = f(fs.shard(x, SRC))
        y: torch.Tensor = local.sin() @ w * spec.mesh.size * spec.shape[0]
        return y

    return around


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.MUST_RECOMPUTE


def of_checkpoints(check: bool) -> Callable[..., Any]:
    """Call selective checkpoints in a mapped and in a partitioned function."""
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        run = lambda x, w: torch.tanh(x @ w).sin()  # noqa: E731
        y: torch.Tensor = checkpoint(run, x, w, use_reentrant=False, context_fn=contexts)
        return y

    f = mapped(lambda x, w: body(x, fs.pcast(w, "i", to="varying")), "i", check=check)
    part = fs.partition(body, mesh=MESH, in_specs=(P("i"), P()))
    return lambda x, w: part(x.cos(), w) * f(x, w)


CALLS = [of_globals, of_pairs, of_trees, of_closures]
CASES = [(make, check) for make in CALLS for check in (True, False)]
CASES += [(of_programs, False), (of_pairs_alone, False), (of_checkpoints, False)]


def value_and_gradients(fn: Callable[..., Any]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (X, W)]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


def run_case(at: int) -> tuple[Any, ...]:
    fs.init(MESH)
    torch._dynamo.reset()
    make, check = CASES[at]
    fn = make(check)
    expected = value_and_gradients(fn)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    return expected, value_and_gradients(compiled), value_and_gradients(compiled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "at", range(len(CASES)), ids=lambda at: f"{CASES[at][0].__name__} {CASES[at][1]}"
)
def test_calls_are_parts_of_one_graph(at: int) -> None:
    for expected, first, second in run_ranks(2, run_case, at):
        torch.testing.assert_close(first, expected)
        torch.testing.assert_close(second, expected)


# -- checks ------------------------------------------------------------------------------


def run_checked() -> tuple[int, list[str], list[str]]:
    fs.init(MESH)
    calls, run_typed = [], graph_call._run_typed
    targets: dict[bool, list[str]] = {}
    for check in (True, False):
        f = mapped(weighted, check=check)

        def record(graph: Any, _: Any, check: bool = check) -> Any:
            targets[check] = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
            return graph.forward

        backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=record)
        torch._dynamo.reset()
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        compiled(X, W)
        graph_call._run_typed = lambda *args: calls.append(args) or run_typed(*args)
        compiled(X, W)
        graph_call._run_typed = run_typed
    return len(calls), targets[True], targets[False]


def test_checked_body_is_typed_while_it_is_traced() -> None:
    for calls, checked, unchecked in run_ranks(2, run_checked):
        assert calls == 0
        assert [op for op in checked if op != "aten.view.default"] == unchecked  # casts are views


class Body(torch.nn.Module):
    """A module as the body of a mapped function."""

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return weighted(x, w)


def run_compiled_bodies() -> list[tuple[float, int]]:
    fs.init(MESH)
    expected = value_and_gradients(mapped(weighted))
    part = torch.compile(torch.tanh, backend="eager")
    within = lambda x, w: fs.psum(part(x @ fs.pcast(w, "i", to="varying")).sum(0), "i")  # noqa: E731
    results = []
    for body, check in ((weighted, True), (Body(), True), (within, True), (weighted, "values")):
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
        found = value_and_gradients(mapped(body if body is within else compiled, check=check))
        difference = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
        results.append((difference, counters["stats"]["unique_graphs"]))
    return results


def test_compiled_bodies_are_typed_in_their_graph() -> None:
    for results in run_ranks(2, run_compiled_bodies):
        assert max(difference for difference, _ in results) < 1e-12
        # In a body it runs uncompiled, and so do comparisons of values.
        assert [graphs for _, graphs in results] == [1, 1, 0, 0]


def run_refused() -> list[str]:
    fs.init(MESH)
    texts = []
    for body in (lambda x, w: x @ w, lambda x, w: (x @ w)[:3]):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="shard_map") as caught:
            torch.compile(mapped(body), backend="aot_eager")(X, W)
        texts.append(str(caught.value))
    layer = torch.nn.Linear(4, 2, dtype=F64)
    part = fs.partition(lambda x: layer(x).sin(), mesh=MESH, in_specs=P("i"))
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        with pytest.raises(Exception, match="nonstrict_trace"):
            torch.compile(part, backend="eager", fullgraph=True)(X)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(part, backend="eager")(X), layer(X).sin())
    texts.append("".join(str(w.message) for w in caught_warnings))
    return texts


def test_errors_of_types_are_raised_while_tracing() -> None:
    for unreduced, _, closure in run_ranks(2, run_refused):
        assert "result: f64[2,2]{varying: i} with the out spec P()" in unreduced
        assert "no graph of torch.compile has this call:\nfs.partition(<lambda>)" in closure
        assert "given: a closure that requires grad, in a graph of torch.compile" in closure


def run_broken() -> list[float]:
    fs.init(MESH)
    torch._dynamo.reset()

    def reads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fs.psum(x.sum() * (2 if w.sum().item() > 0 else 3), "i")

    f, g = mapped(reads), mapped(weighted, check="values")
    small = Mesh({"i": 1}, devices=(0,))
    h = fs.shard_map(weighted, mesh=small, in_specs=P(), out_specs=P())
    results = []
    for fn in (f, g, h):
        compiled = torch.compile(lambda x, w, fn=fn: fn(x.sin(), w) * 2, backend="eager")
        results += [(compiled(X, W) - fn(X.sin(), W) * 2).abs().sum().item()]
    return results


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_reads_and_checks_of_values_end_the_graph() -> None:
    for differences in run_ranks(2, run_broken):
        assert differences == [0, 0, 0]
