"""Collective matmul as a strategy of partitioned functions: chosen by cost, equal to one device."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, Spec

F64 = torch.float64
MESH = Mesh(dp=2, tp=3)
SLOW_LINKS = fs.Topology(
    "test", inner=fs.Link(0.0, 1e9), launch=0.0, message=0.0, memory=1e18, kernel=0.0,
    flops=(("float64", 1e9),),
)  # fmt: skip
"""Machine on which blocks of small tensors are worth to overlap."""
ROWS = {1: (3, 0, 2)}
RINGS = "all_gather_matmul", "matmul_reduce_scatter"


def specs_of(**layouts: tuple[P, tuple[int, ...]]) -> dict[str, Spec]:
    """Return specs by name from layouts and shapes."""
    return {name: Spec(MESH, p, shape=shape, dtype=F64) for name, (p, shape) in layouts.items()}


def mlp(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return Megatron-LM's MLP with biases."""
    return F.linear(torch.tanh(F.linear(x, p["up"], p["b"])), p["down"], p["c"])


def attention_scores(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return products of queries, keys and values, which share what is gathered."""
    q, k, v = x @ p["q"], torch.tanh(x @ p["k"]), x @ p["v"]
    return (q * k + v) @ p["o"]


def flattened(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return an MLP of matrices, by `addmm`."""
    h = torch.addmm(p["b"], x, p["up"]).square()
    return torch.addmm(p["c"], h, p["down"])


def checkpointed(p: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return an MLP whose values the backward pass computes again."""
    inner: Callable[..., Tensor] = checkpoint
    return x + inner(mlp, p, x, use_reentrant=False)


MLP = specs_of(up=(P("tp"), (6, 4)), b=(P("tp"), (6,)), down=(P(None, "tp"), (4, 6)), c=(P(), (4,)))
X = Spec(MESH, P("dp", "tp"), shape=(2, 5, 4), dtype=F64, sizes=ROWS)
CASES: dict[str, tuple[Callable[..., Tensor], dict[str, Spec], Spec, Any]] = {
    "biases": (mlp, MLP, X, X),
    "checkpoint": (checkpointed, MLP, X, X),
    "shared": (
        attention_scores,
        specs_of(**{n: (P(None, "tp"), (4, 6)) for n in "qkv"}, o=(P("tp"), (6, 4))), X, X,
    ),
    "matrices": (
        flattened,
        specs_of(up=(P(None, "tp"), (4, 6)), b=(P("tp"), (6,)), down=(P("tp"), (6, 3)),
                 c=(P(), (3,))),
        Spec(MESH, P(("dp", "tp")), shape=(12, 4), dtype=F64), P(("dp", "tp")),
    ),
    "columns": (
        lambda p, x: (x @ p["v"]) @ p["w"],
        specs_of(v=(P(None, "tp"), (6, 12)), w=(P("tp"), (12, 6))),
        Spec(MESH, P("dp", None, "tp"), shape=(2, 5, 6), dtype=F64), P("dp", None, "tp"),
    ),
}  # fmt: skip


def partitioned(name: str, topology: fs.Topology = SLOW_LINKS, **options: Any) -> fs.Partition:
    fn, params, x, out = CASES[name]
    return fs.partition(
        fn, mesh=MESH, params=params, in_specs=x, out_specs=out, topology=topology, hold="tp",
        **options,
    )  # fmt: skip


def arguments(name: str) -> tuple[dict[str, Tensor], Tensor]:
    _, params, x, _ = CASES[name]
    key = fs.random.key(3)
    values = [
        fs.random.normal(fs.random.fold_in(key, i), spec.shape, dtype=F64).requires_grad_()
        for i, spec in enumerate((*params.values(), x))
    ]
    return dict(zip(params, values, strict=False)), values[-1]


def rings_of(call: Any) -> list[str]:
    lines = str(call.explain(only="layouts")).splitlines()
    return [line.partition("  ")[0] for line in lines if line.startswith(RINGS)]


@pytest.mark.parametrize("name", CASES)
def test_rings_equal_one_device(name: str) -> None:
    """Uneven rows, biases, products that share a gather, and each dim of the result."""
    part, (params, x) = partitioned(name), arguments(name)
    # The scatter is after the checkpointed call.
    assert rings_of(part.trace(params, x)) == list(RINGS[: 1 if name == "checkpoint" else 2])
    fs.testing.assert_like_one_device(
        part, CASES[name][0], (params, x), second_order=name != "checkpoint", rtol=1e-10,
        atol=1e-10,
    )  # fmt: skip


def test_rings_run_without_gradients() -> None:
    part, (params, x) = partitioned("shared"), arguments("shared")
    with torch.no_grad():
        y = part(params, x)
        assert rings_of(part.trace(params, x)) == list(RINGS)
    torch.testing.assert_close(y, attention_scores(params, x), rtol=1e-10, atol=1e-10)


def test_transforms_go_around() -> None:
    part, (params, x) = partitioned("shared"), arguments("shared")
    grads = [
        torch.func.grad(lambda p, f=f: f(p, x).square().sum())(params)
        for f in (part, attention_scores)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    batch = torch.stack([x, -x])
    ys = [torch.func.vmap(f, (None, 0))(params, batch) for f in (part, attention_scores)]
    torch.testing.assert_close(*ys, rtol=1e-10, atol=1e-10)


def megatron(rows: int, topology: fs.Topology, **options: Any) -> Any:
    """Return the planned MLP of Megatron-LM, with a sharded sequence, in bfloat16."""
    width, mesh = 4096, Mesh(tp=8)
    params = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for name, shape in (("up", (width, 4 * width)), ("down", (4 * width, width)))
    }
    part = fs.partition(
        lambda p, x: torch.relu(x @ p["up"]) @ p["down"], mesh=mesh, topology=topology,
        params={"up": P(None, "tp"), "down": P("tp")}, in_specs=P("tp"), out_specs=P("tp"),
        hold="tp", **options,
    )  # fmt: skip
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return part.trace(params, x)


@pytest.mark.parametrize(
    ("topology", "rows", "expected"),
    [
        (fs.Topology.dgx_h100(), 65536, RINGS),
        (fs.Topology.dgx_h100(), 1024, ()),
        (replace(fs.Topology.dgx_h100(), overlap=0.0), 65536, ()),
        (fs.Topology.cpu_host(), 65536, ()),
    ],
    ids=["large", "small", "no overlap", "CPU"],
)
def test_rings_are_taken_where_the_model_says_that_they_pay(
    topology: fs.Topology, rows: int, expected: tuple[str, ...]
) -> None:
    """Small products have launches for nothing, and cores that communicate do not compute."""
    call, waiting = megatron(rows, topology), megatron(rows, topology, overlap=False)
    assert rings_of(call) == list(expected)
    assert rings_of(waiting) == []
    assert call.out_specs == waiting.out_specs
    times = [x.roofline().time for x in (call, waiting)]
    assert times[0] < times[1] if expected else times[0] == times[1]


def test_explain_shows_the_steps_and_what_they_hide() -> None:
    text = str(megatron(65536, fs.Topology.dgx_h100()).explain())
    assert re.search(r"→ 7 x ppermute\(tp\) +in the body", text)
    assert "ppermute(tp) beside all_gather_matmul" in text
    roofline = megatron(65536, fs.Topology.dgx_h100()).roofline()
    assert roofline.hidden > 0.8 * roofline.communication


def test_overlap_is_an_option_that_is_pickled() -> None:
    part = fs.partition(torch.matmul, mesh=MESH, in_specs=P("tp"), overlap=False)
    assert not pickle.loads(pickle.dumps(part)).overlap
