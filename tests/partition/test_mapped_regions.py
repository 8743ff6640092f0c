"""Mapped functions in partitioned functions: their bodies run on locals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import P, ShardingError
from tests.helpers.spec_grid import message

MESH = fs.Mesh(dp=2, ep=2)
F64 = torch.float64
TOKENS, WIDTH, EXPERTS = 8, 4, 4


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def mixture(w: torch.Tensor, x: torch.Tensor, gates: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the outputs of some experts; each computes the tokens that `nonzero` selects."""
    out = torch.zeros_like(x)
    for index, expert in enumerate(w):
        (rows,) = torch.nonzero(gates.argmax(-1) == first + index, as_tuple=True)
        weight = gates[rows, first + index, None]
        out = out.index_add(0, rows, torch.tanh(x[rows] @ expert) * weight)
    return out


def local_mixture(w: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    first = int(fs.axis_index("ep")) * w.shape[0]
    return fs.psum(mixture(w, x, gates, first), "ep")


def layer(experts: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ params["in"])
        gates = F.softmax(h @ params["gate"], -1)
        return (h + experts(params["w"], h, gates)).square().mean()

    return run


def params() -> dict[str, torch.Tensor]:
    shapes = {"in": (WIDTH, WIDTH), "gate": (WIDTH, EXPERTS), "w": (EXPERTS, WIDTH, WIDTH)}
    return {
        name: values(*shape, seed=seed).requires_grad_()
        for seed, (name, shape) in enumerate(shapes.items())
    }


IN_SPECS, OUT_SPECS = (P("ep"), P("dp"), P("dp")), P("dp")


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("batch", [P("dp"), P(("dp", "ep")), P()])
def test_mixture_with_nonzero_dispatch_equals_one_device(check: bool, batch: P) -> None:
    """Values and all gradients, with types tracked and with casts by hand."""

    def body(w: torch.Tensor, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        w, x, gates = fs.pcast(w, "dp", to="varying"), *fs.pcast((x, gates), "ep", to="varying")
        return local_mixture(w, x, gates)

    mapped = fs.shard_map(
        local_mixture if check else body,
        mesh=MESH,
        in_specs=IN_SPECS,
        out_specs=OUT_SPECS,
        check=check,
    )
    specs = {"in": P("ep"), "gate": P(), "w": P("ep")}
    part = fs.partition(layer(mapped), mesh=MESH, in_specs=(specs, batch), out_specs=P())
    expected, given, x = params(), params(), values(TOKENS, WIDTH, seed=9)
    loss, wanted = part(given, x), layer(mixture)(expected, x)
    torch.testing.assert_close(loss, wanted)
    grads = torch.autograd.grad(loss, [*given.values()])
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, [*expected.values()]))
    assert "shard_map" in str(part.explain(given, x))


def test_body_runs_at_every_call() -> None:
    scale = [1.0]
    mapped = fs.shard_map(lambda x: scale[0] * x, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    part = fs.partition(lambda x: mapped(x) + 1, mesh=MESH, in_specs=P("ep"))
    x = torch.arange(4.0)
    assert torch.equal(part(x), x + 1)
    scale[0] = 2.0
    assert torch.equal(part(x), 2 * x + 1)


def test_closures_of_a_body_are_differentiated() -> None:
    w = torch.ones(3, requires_grad=True)
    mapped = fs.local_map(
        lambda x: fs.pcast(w, "dp", to="varying") * x,
        mesh=fs.Mesh(dp=2),
        in_specs=P("dp"),
        out_specs=P("dp"),
    )
    part = fs.partition(lambda x: mapped(x).sum(), mesh=fs.Mesh(dp=2), in_specs=P("dp"))
    part(torch.arange(12.0).reshape(4, 3)).backward()
    assert torch.equal(w.grad, torch.tensor([18.0, 22.0, 26.0]))


def test_results_are_trees_with_layouts() -> None:
    def body(x: torch.Tensor, scale: int) -> dict[str, Any]:
        return {"x": scale * x, "sum": fs.psum(x.sum(0), "dp")}

    mapped = fs.shard_map(
        body, mesh=MESH, in_specs=(P("dp"), None), out_specs={"x": P("dp"), "sum": P()}
    )
    part = fs.partition(lambda x: mapped(x, 3), mesh=MESH, in_specs=P("dp"))
    x = torch.arange(12.0).reshape(6, 2)
    results = part(x)
    assert torch.equal(results["x"], 3 * x)
    assert torch.equal(results["sum"], x.sum(0))
    call = part.trace(x)
    assert [str(spec) for spec in call.out_specs] == ["f32[2]", "f32[6@dp,2]"]


def refused(fn: Callable[..., Any], *args: Any, mesh: fs.Mesh = MESH) -> str:
    with pytest.raises(ShardingError) as error:
        fs.partition(fn, mesh=mesh)(*args)
    return str(error.value)


def test_a_body_that_closes_over_traced_tensors_is_refused() -> None:
    def run(w: torch.Tensor, x: torch.Tensor) -> Any:
        return fs.shard_map(lambda x: w * x, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))(x)

    assert refused(run, torch.ones(2), torch.ones(4, 2)) == message(
        "shard_map(<lambda>)",
        "aten.mul.Tensor of a tensor of the function that is traced",
        "a mapped function in a partitioned one must take such tensors as arguments",
        "fs.shard_map(lambda w, x: x @ w, ...)(w, x)",
    )


def test_a_body_on_another_mesh_is_refused() -> None:
    mapped = fs.shard_map(lambda x: x, mesh=fs.Mesh(dp=4), in_specs=P("dp"), out_specs=P("dp"))
    assert refused(mapped, torch.ones(4)) == message(
        "fs.partition: shard_map(<lambda>)",
        "a function mapped over Mesh(dp=4)",
        "a mapped function must be mapped over the mesh of the partition, Mesh(dp=2, ep=2)",
        "mesh=Mesh(dp=2, ep=2), and specs that leave axes out",
    )


def test_arguments_without_a_spec_are_refused() -> None:
    mapped = fs.shard_map(lambda x: x, mesh=MESH, in_specs=None, out_specs=P())
    assert refused(mapped, torch.ones(4)) == message(
        "shard_map(<lambda>)",
        "0 tensors with a spec in a traced function",
        "a mapped function in a partitioned one must have tensors, each with a spec, and "
        "numbers with known values",
        "P() for a replicated tensor",
    )


def test_keyed_block_around_a_region_is_refused() -> None:
    mapped = fs.shard_map(torch.sin, mesh=MESH, in_specs=P(), out_specs=P())

    def draws(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return mapped(x)

    part = fs.partition(draws, mesh=MESH)
    with pytest.raises(ShardingError, match=r"a fs\.random\.keyed block around a mapped function"):
        part(fs.random.key(0), torch.ones(4))
