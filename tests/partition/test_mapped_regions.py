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


# -- surroundings of the call -------------------------------------------------------------------


def test_keyed_block_may_enclose_a_region_that_draws_nothing() -> None:
    """Draws around it are those of one device; a draw in the body is refused, as by `shard_map`."""
    mapped = fs.shard_map(torch.sin, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))
    specs: Any = {"in_specs": P("dp"), "out_specs": P("dp"), "check": False}
    drawing = fs.shard_map(F.dropout, mesh=MESH, **specs)

    def draws(key: torch.Tensor, x: torch.Tensor, sin: Any = torch.sin) -> torch.Tensor:
        with fs.random.keyed(key):
            x = F.dropout(x)
            return sin(x) + torch.rand(4, 4)

    key, x = fs.random.key(0), torch.ones(4, 4)
    part = fs.partition(lambda key, x: draws(key, x, mapped), mesh=MESH, in_specs=(P(), P("dp")))
    assert torch.equal(part(key, x), draws(key, x))
    part = fs.partition(lambda key, x: draws(key, x, drawing), mesh=MESH)
    with pytest.raises(ShardingError, match="the block must be in the mapped function"):
        part(key, x)


def test_keyed_block_refuses_a_draw_that_tracing_did_not_reach() -> None:
    mapped = fs.shard_map(
        lambda x: F.dropout(x) if float(fs.pmax(x.sum(), "dp")) > 0 else x,
        mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), check=False,
    )  # fmt: skip

    def run(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return mapped(x)

    part = fs.partition(run, mesh=MESH, in_specs=(P(), P("dp")))
    assert torch.equal(part(fs.random.key(0), torch.zeros(4)), torch.zeros(4))
    with pytest.raises(ShardingError, match="the block must be in the mapped function"):
        part(fs.random.key(0), torch.ones(4))


def test_body_runs_under_the_autocast_that_encloses_it() -> None:
    mapped = fs.shard_map(lambda x: x @ x.T, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"))

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mapped(x)

    x = torch.randn(4, 4, requires_grad=True)
    result = fs.partition(run, mesh=MESH)(x)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, run(x))


def test_body_runs_under_the_function_modes_that_enclose_it() -> None:
    mapped = fs.shard_map(
        lambda x: x + torch.zeros(()).is_meta, mesh=MESH, in_specs=P("dp"), out_specs=P("dp")
    )

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.device("meta"):
            return mapped(x)

    x = torch.zeros(4)
    assert torch.equal(fs.partition(run, mesh=MESH)(x), x + 1)


def test_tracing_draws_and_logs_nothing() -> None:
    """The generator and `comm_log` are in the first call as in the second one."""

    def body(x: torch.Tensor) -> torch.Tensor:
        return fs.psum(x * float(x.sum()), "dp") + torch.rand(2)

    mapped = fs.shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P("dp"), check=False)
    part = fs.partition(mapped, mesh=MESH, in_specs=P("dp"))
    x, outcomes = torch.ones(4), []
    for _ in range(2):
        torch.manual_seed(0)
        with fs.comm_log() as log:
            outcomes.append((part(x).tolist(), log.to_dict()))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x: torch.func.vmap(f)(x[None]),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
        lambda f: torch.func.grad(lambda x: f(x).sum()),
    ],
)
def test_transforms_of_a_region_are_refused(transform: Any) -> None:
    specs: Any = {"mesh": MESH, "in_specs": P("dp"), "out_specs": P("dp")}
    x = torch.arange(4.0)
    assert refused(transform(fs.shard_map(torch.sin, **specs)), x) == message(
        "shard_map(sin)",
        "a call that torch.func transforms in a traced function, by vmap, grad, jvp or the like, "
        "or in a dual_level",
        "the body of a mapped function is not traced, so it must be called untransformed",
        "take the transform in the body; or torch.autograd.grad of the partitioned function's "
        "result",
    )
    # The fix.
    body = fs.shard_map(torch.func.grad(lambda x: torch.sin(x).sum()), **specs)
    assert torch.equal(fs.partition(body, mesh=MESH)(x), torch.cos(x))


def test_error_of_a_body_is_raised_by_its_first_run() -> None:
    runs = []

    def body(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.device.type)
        raise KeyError("w")

    assert "KeyError: 'w'" in refused(
        fs.shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P("dp")), torch.ones(4)
    )
    assert runs == ["meta"]


# -- costs of the body --------------------------------------------------------------------------


def collectives(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return rows of `x`; every collective moves them."""
    x = fs.psum(torch.tanh(x @ w), "ep") / 2
    x = fs.all_to_all(x, "dp", 1, 0, tiled=True)
    x = fs.all_to_all(x, "dp", 0, 1, tiled=True)
    x = fs.psum_scatter(x, "dp", tiled=True)
    x = fs.all_gather(x, "dp", tiled=True)
    x = fs.ppermute(x, "dp", [(0, 1), (1, 0)])
    return x + fs.pmax(x.detach(), "dp")


@pytest.mark.parametrize("reads", [False, True])
def test_costs_of_a_body_are_those_of_its_run(reads: bool) -> None:
    """Launches and bytes, forward and backward, equal those that a log counts."""

    def body(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return collectives(w, x) * (1 + float(x.isnan().any()) if reads else 1)

    specs: Any = {"in_specs": (P(), P("dp")), "out_specs": P("dp")}
    mapped = fs.shard_map(body, mesh=MESH, **specs)
    part = fs.partition(lambda w, x: mapped(w, x.sin()), mesh=MESH, in_specs=(P(), P("dp")))
    w, x = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
    call, pairs = part.trace(w, x), (fs.shard(w, MESH, P()), fs.shard(x, MESH, P("dp")))
    with fs.comm_log() as log:
        y = part(*pairs)
        torch.autograd.grad(y.local, (*pairs[0].local, *pairs[1].local), y.local)
    for cost, phase in ((call.cost(), log.forward), (call.cost(backward=True), log.backward)):
        assert cost.launches == phase.counts.total() > 3
        assert cost.bytes_sent == phase.total_bytes
        assert cost.time > cost.launches * call._topology.launch
    text = str(part.explain(w, x))
    assert "→ all_reduce(ep)" in text
    assert "← " in text


def test_bodies_without_gradient_have_no_backward_cost() -> None:
    mapped = fs.shard_map(
        lambda x: fs.psum(x.sum(), "dp"), mesh=MESH, in_specs=P("dp"), out_specs=P()
    )
    part = fs.partition(lambda x: (x.sin(), mapped(x).detach()), mesh=MESH, in_specs=P("dp"))
    call = part.trace(torch.ones(4, requires_grad=True))
    assert call.cost().launches == 1
    assert call.cost(backward=True).launches == 0
