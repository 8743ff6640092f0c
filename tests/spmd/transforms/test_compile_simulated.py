"""`torch.compile` around and inside simulated mapped functions: they run uncompiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(i=2)
F64 = torch.float64
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
W = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), dtype=F64)


def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return fs.psum(torch.tanh(x @ w).sum(0), "i")


def mapped(body: Callable[..., Any], **options: Any) -> Any:
    return fs.shard_map(body, mesh=MESH, in_specs=(P("i"), P()), out_specs=P(), **options)


def value_and_gradients(fn: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in (X, W)]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.fixture
def counters() -> Any:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    return counters


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of Dynamo, after breaks
@pytest.mark.parametrize("check", [True, "strict"])
def test_mapped_function_is_one_graph_break(check: bool | str, counters: Any) -> None:
    f = mapped(lambda x, w: layer(x, fs.pcast(w, "i", to="varying")), check=check)

    def around(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = f(x.sin(), w.cos())
        return 2 * y

    results = value_and_gradients(torch.compile(around, backend="aot_eager"))
    torch.testing.assert_close(results, value_and_gradients(around))
    assert sum(counters["graph_break"].values()) == 1
    assert counters["frames"]["total"] == 2  # `around` before the call, and after it


def test_backward_passes_of_a_compiled_transform_run_uncompiled(counters: Any) -> None:
    gradient = torch.func.grad(mapped(lambda x, w: layer(x, w).square().sum()), 1)
    for fn, w in (
        (gradient, W),
        (torch.func.vmap(gradient, (None, 0)), torch.stack([W, 2 * W])),
    ):
        torch.testing.assert_close(torch.compile(fn, backend="eager")(X, w), fn(X, w))


def test_compiled_functions_may_map_functions(counters: Any) -> None:
    around = lambda w: 2 * mapped(layer)(X, w)  # noqa: E731
    torch.testing.assert_close(torch.compile(around, backend="eager")(W), around(W))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_body_runs_uncompiled(check: bool, fullgraph: bool, counters: Any) -> None:
    body = torch.compile(lambda x: fs.psum(x.tanh(), "i"), backend="eager", fullgraph=fullgraph)
    f = fs.shard_map(body, mesh=MESH, in_specs=P("i"), out_specs=P(), check=check)
    torch.testing.assert_close(f(X), X.tanh()[:2] + X.tanh()[2:])
    assert not counters["frames"]
    assert fs.simulate(MESH, torch.compile(torch.sin, backend="eager"), X)[1].equal(X.sin())
    torch.compile(torch.sin, backend="eager")(X)
    assert counters["frames"]["total"] == 1  # only a simulation is uncompiled
