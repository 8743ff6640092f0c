"""`fs.partition`: values and gradients of one device, the collectives of hand-written code."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import Operation
from fshard.partition.partition import Partition
from tests.helpers.ops import blocks
from tests.helpers.ops.block_cases import (
    BLOCKS,
    BYTES,
    MESH,
    MLP_PARAMS,
    Block,
    collectives_of,
    mlp,
    sample,
)


def check_equal(part: Partition, fn: Block, *args: Any) -> None:
    """Assert that values and gradients of a partitioned function are those of one device."""
    actual, expected = part(*args), fn(*args)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)
    leaves = [x for arg in args for x in (arg.values() if isinstance(arg, dict) else [arg])]
    grads, expected_grads = (torch.autograd.grad(y.sin().sum(), leaves) for y in (actual, expected))
    torch.testing.assert_close(grads, expected_grads, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_equal_one_device(name: str) -> None:
    fn, params, specs, shape = BLOCKS[name]
    p = params()
    part = fs.partition(fn, mesh=MESH, params={k: specs.get(k, P()) for k in p})
    check_equal(part, fn, p, sample(*shape))


@pytest.mark.parametrize(("name", "pairs"), [("gpt", 2), ("llama", 2), ("vit", 2), ("resnet", 1)])
def test_megatron_collectives(name: str, pairs: int) -> None:
    """One all-reduce per pair of layers forward and backward, one per gradient."""
    fn, params, specs, shape = BLOCKS[name]
    p = params()
    part = fs.partition(
        fn, mesh=MESH, params={k: specs.get(k, P()) for k in p}, in_specs=(P("dp"),)
    )
    x = sample(*shape)
    check_equal(part, fn, p, x)
    forward, backward = collectives_of(part.trace(p, x))
    assert forward == {("AllReduce", ("tp",)): pairs}
    data = sum(n for (kind, axes), n in backward.items() if kind == "AllReduce" and "dp" in axes)
    assert backward["AllReduce", ("tp",)] == pairs
    assert data == len(p)
    assert backward.total() == pairs + len(p)


@pytest.mark.parametrize("name", BLOCKS)
def test_fsdp_collectives(name: str) -> None:
    """Every parameter is gathered once forward, its gradient reduce-scattered once backward."""
    fn, params, _, shape = BLOCKS[name]
    p, mesh = params(), Mesh(dp=2)
    specs = {k: P("dp") for k in p}
    part = fs.partition(fn, mesh=mesh, params=specs, in_specs=(P("dp"),), topology=BYTES)
    x = sample(64, *shape[1:])
    check_equal(part, fn, p, x)
    forward, backward = collectives_of(part.trace(p, x))
    assert forward == {("AllGather", ("dp",)): len(p)}
    assert backward == {("ReduceScatter", ("dp",)): len(p)}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_sequence_parallel_collectives(name: str) -> None:
    """A sequence sharded between layers has gathers and reduce-scatters, no all-reduces.

    Its activations have fewer bytes than the weights, which would be gathered in their place.
    """
    fn, params, specs, shape = BLOCKS[name]
    p, mesh = params(), Mesh(tp=2)
    part = fs.partition(fn, mesh=mesh, params={k: specs.get(k, P()) for k in p},
                        in_specs=(P(None, "tp"),), out_specs=P(None, "tp"))  # fmt: skip
    x = sample(2, *shape[1:])
    check_equal(part, fn, p, x)
    forward, _ = collectives_of(part.trace(p, x))
    assert forward == {("AllGather", ("tp",)): 2, ("ReduceScatter", ("tp",)): 2}


@pytest.mark.parametrize("tokens", [16, 64, 1024, 4096])
def test_bias_does_not_change_the_strategy_of_a_linear_layer(tokens: int) -> None:
    """A weight and a bias are gathered in one launch, whose latency counts once."""
    for mesh in (Mesh(x=2), Mesh(x=4)):
        x, weight, bias = (
            fs.Spec(mesh, P("x"), shape=shape) for shape in ((tokens, 256), (256, 256), (256,))
        )
        part = fs.partition(F.linear, mesh=mesh, in_specs=P("x"))
        outputs = part.trace(x, weight, bias).out_specs
        assert outputs == part.trace(x, weight).out_specs
        expected = P("x") if tokens > 256 else P(None, "x")
        assert outputs[0] == fs.Spec(mesh, expected, shape=(tokens, 256))


@pytest.mark.parametrize("width", [32, 128])
def test_sharded_parameters_are_gathered_for_tiny_batches_too(width: int) -> None:
    """Once one parameter is gathered, gathers of others have no latency of their own."""

    def layers(table: Any, params: list[torch.Tensor], words: torch.Tensor) -> torch.Tensor:
        x = F.embedding(words, table)
        for weight, bias in zip(params[::2], params[1::2], strict=True):
            x = F.linear(x, weight, bias).tanh()
        return x.sum()

    mesh = Mesh(x=2)
    part = fs.partition(layers, mesh=mesh, in_specs=P("x"), out_specs=P())
    shapes = [(width, width), (width,)] * 4
    table, *params = (fs.Spec(mesh, P("x"), shape=shape) for shape in [(64, width), *shapes])
    call = part.trace(table, params, fs.Spec(mesh, P("x"), shape=(4, 8), dtype=torch.int64))
    assert collectives_of(call)[0] == {("AllGather", ("x",)): 9, ("AllReduce", ("x",)): 1}
    assert call.cost().launches == 2


def test_parameters_sharded_over_two_axes_are_gathered_by_one_collective_each() -> None:
    """The gather over both axes has one latency, and those of two parameters share it."""
    axes = ("x", "y")
    part = fs.partition(lambda a, b, x: (x @ a).relu() @ b, mesh=Mesh(x=2, y=4), in_specs=P(axes))
    call = part.trace(*(torch.empty(shape) for shape in ((16, 64), (64, 16), (4096, 16))))
    steps = [step for prog in call.programs for step in prog.steps]
    assert [(type(step), step.axes) for step in steps] == [(fs.AllGather, axes)] * 2
    assert call.cost().launches == 1
    assert call.out_specs[0] is not None
    assert call.out_specs[0].partition == P(axes, None)


def test_constraint_or_out_spec_becomes_reduce_scatter() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),), out_specs=P(("dp", "tp")))  # fmt: skip
    x = sample(4, 8)
    check_equal(part, mlp, MLP_PARAMS, x)
    assert collectives_of(part.trace(MLP_PARAMS, x))[0] == {("ReduceScatter", ("tp",)): 1}

    def hinted(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        return fs.constrain(mlp(p, x), P(("dp", "tp"))) * 2

    part = fs.partition(hinted, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),))  # fmt: skip
    check_equal(part, hinted, MLP_PARAMS, x)
    call = part.trace(MLP_PARAMS, x)
    assert collectives_of(call)[0] == {("ReduceScatter", ("tp",)): 1}
    assert call.out_specs[0] is not None
    assert call.out_specs[0].partition == P(("dp", "tp"), None)


def test_results_are_redistributed_from_the_nearest_version() -> None:
    def fn(p: blocks.Params, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x @ p["a"]) @ p["b"]
        return y, torch.relu(y)

    part = fs.partition(fn, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),), out_specs=(P("dp"), P("dp")))  # fmt: skip
    x = sample(4, 8)
    assert collectives_of(part.trace(MLP_PARAMS, x))[0] == {("AllReduce", ("tp",)): 1}
    torch.testing.assert_close(part(MLP_PARAMS, x), fn(MLP_PARAMS, x))


def test_unreduced_max_is_reduced_before_unreduced_sum() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.amax(0)

    part = fs.partition(fn, mesh=MESH, in_specs=(P("dp"),), out_specs=P(unreduced={"dp"}))
    x = sample(4, 8)
    result = part(fs.shard(x, part.trace(x).in_specs[0]))
    assert str(result.spec) == "f64[8]{unreduced: dp}"
    check_equal(part, fn, x)


def test_pairs_return_pairs_in_simulation_and_rank_local_code() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),))  # fmt: skip
    x = sample(4, 8)
    specs = part.trace(MLP_PARAMS, x).in_specs
    a, b, pair = (
        fs.shard(t.detach(), s) for t, s in zip((*MLP_PARAMS.values(), x), specs, strict=True)
    )
    out = part({"a": a, "b": b}, pair)
    assert isinstance(out, fs.Sharded)
    assert out.spec.partition == P("dp", None)
    torch.testing.assert_close(fs.unshard(out), mlp(MLP_PARAMS, x).detach())

    def on_rank(a: Any, b: Any, x: Any) -> Any:
        return part({"a": a, "b": b}, x).local

    ranks = fs.simulate(MESH, on_rank, a, b, pair)
    torch.testing.assert_close(ranks, list(out.local))


def test_second_call_of_the_same_kind_is_cached() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")})
    x = sample(4, 8)
    part(MLP_PARAMS, x)
    first = part.trace(MLP_PARAMS, x)
    assert part.trace(MLP_PARAMS, x * 2) is first
    assert part.trace(MLP_PARAMS, x.detach()) is not first or not first.grad


def test_non_tensor_arguments_are_keys_with_their_types() -> None:
    part = fs.partition(lambda x, by: x * by, mesh=MESH)
    x = torch.arange(4)
    for by in (1, 1.0, True, 2, 0.0, -0.0):
        actual, expected = part(x, by), x * by
        assert actual.dtype == expected.dtype
        assert torch.equal(1 / actual, 1 / expected)
    part = fs.partition(lambda x, keep: x * len(keep), mesh=MESH)
    assert [int(part(x, item)[1]) for item in ({1}, {1, 2}, {3})] == [
        1,
        2,
        1,
    ]  # a set cannot be a key


def test_explain_lists_every_operation() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),))  # fmt: skip
    call = part.trace(MLP_PARAMS, sample(4, 8))
    assert str(call.explain(only="layouts")).splitlines() == [
        "4 operations on Mesh(dp=2, tp=2), topology node",
        "                  spec                        forward  backward  saved",
        "──────────────────────────────────────────────────────────────────────",
        "args[0]['a']      f64[8,16@tp]",
        "← all_reduce(dp)  f64[8,16@tp]                            512 B",
        "args[0]['b']      f64[16@tp,8]",
        "← all_reduce(dp)  f64[16@tp,8]                            512 B",
        "args[1]           f64[4@dp,8]",
        "← all_reduce(tp)  f64[4@dp,8]                             128 B",
        "matmul            f64[4@dp,16@tp]",
        "relu              f64[4@dp,16@tp]                                128 B",
        "matmul_1          f64[4@dp,8]{unreduced: tp}",
        "→ all_reduce(tp)  f64[4@dp,8]                   128 B",
        "add               f64[4@dp,8]",
        "result            f64[4@dp,8]",
        "──────────────────────────────────────────────────────────────────────",
        "launches                                            1         2",
        "sent                                            128 B   1,152 B",
        "communication                                 6.75 µs   13.5 µs",
        "saved                                                            128 B",
        "in one launch: ← all_reduce of 2 over dp",
    ]
    assert str(part.explain()) == str(part.explain(MLP_PARAMS, sample(4, 8))) == str(call)
    assert str(call.explain(fs.Topology.cluster(2))).startswith("4 operations on ")
    assert str(call) == f"{call.explain(only='layouts')}\n\n{call.roofline()}"
    assert call._repr_mimebundle_()["text/plain"] == str(call)
    assert "torch.ops.aten.matmul.default" in part.graph.code


@pytest.mark.parametrize("name", BLOCKS)
def test_explain_fits_80_columns_and_sums_bytes(name: str) -> None:
    fn, params, specs, shape = BLOCKS[name]
    p = params()
    call = fs.partition(fn, mesh=MESH, params={k: specs.get(k, P()) for k in p},
                        in_specs=(P("dp"),)).trace(p, sample(*shape))  # fmt: skip
    assert max(map(len, str(call).splitlines())) <= 80
    rows = call.explain(only="layouts").rows
    for backward, column in ((False, 2), (True, 3)):
        sent, layers = 0, 1
        for name, *_, cell in (row[: column + 1] for row in rows):
            if name.startswith("each of "):
                layers = int(name.split()[2])
            elif cell:
                nbytes = int(cell.removesuffix(" B").replace(",", ""))
                sent += nbytes * (layers if name.startswith("  ") else 1)
        assert sent == call.cost(backward=backward).bytes_sent
    without = fs.partition(fn, mesh=MESH, in_specs=P()).trace(
        {k: v.detach() for k, v in p.items()}, sample(*shape).detach())  # fmt: skip
    table = without.explain(only="layouts")
    assert [column.name for column in table.columns] == ["", "spec", "forward"]


def test_uneven_shards_and_closures() -> None:
    scale = torch.full((8,), 2.0, dtype=torch.float64)

    def fn(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        y = mlp(p, x) * scale + torch.arange(8, dtype=torch.float64)
        return y[:, 1:].sum(0) + torch.ones(7, dtype=torch.float64)

    mesh = Mesh(x=3)
    spec = fs.Spec(mesh, P("x"), shape=(7, 8), dtype=torch.float64, uneven="chunk")
    part = fs.partition(fn, mesh=mesh, params=P(), in_specs=(spec,))
    check_equal(part, fn, MLP_PARAMS, sample(7, 8))


def test_writes_into_results() -> None:
    def fn(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        y = x @ p["a"]
        y += 1
        y.mul_(2)
        torch.relu_(y)
        return y @ p["b"]

    part = fs.partition(fn, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")})
    check_equal(part, fn, MLP_PARAMS, sample(4, 8))


def test_written_tensor_keeps_its_dtype() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.float() * 2
        z = y.add_(torch.ones(4, dtype=torch.float64)).mul_(2)
        out = torch.zeros(4)
        torch.add(x.detach().float(), 1, out=out)
        return y + z + out

    x = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    actual, expected = fs.partition(fn, mesh=MESH, in_specs=(P("dp"),))(x), fn(x)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (actual, expected)))


def without_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute in float32, as rotary embeddings do, with a write in place."""
    with torch.autocast("cpu", enabled=False):
        angles = (x.float() * 2).sin()
    angles[0] = 0
    return angles @ w


def with_autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = torch.nn.functional.linear(x, w).softmax(-1)
        with torch.autocast("cpu", enabled=False):
            scale = hidden.float().exp()
        out: torch.Tensor = (scale @ w).float() + hidden
        return out


@pytest.mark.parametrize("fn", [without_autocast, with_autocast])
def test_autocast_within_a_function_casts(fn: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]
    actual, expected = fs.partition(fn, mesh=MESH, in_specs=(P("dp"), P()))(*inputs), fn(*inputs)
    tolerance = {"rtol": 0.02, "atol": 0.1} if fn is with_autocast else {}
    torch.testing.assert_close(actual, expected, **tolerance)
    grads, expected_grads = (torch.autograd.grad(y.sum(), inputs) for y in (actual, expected))
    torch.testing.assert_close(grads, expected_grads, **tolerance)


def test_autocast_around_a_call_is_refused() -> None:
    x = torch.ones(4, 4)
    part = fs.partition(lambda x: x @ x, mesh=MESH)
    part(x)
    pair = fs.shard(x, fs.Spec(MESH, P("dp"), shape=(4, 4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for run in (lambda: part(x), lambda: fs.apply(torch.matmul, pair, x)):
            with pytest.raises(fs.ShardingError, match="the dtype of every result is in its spec"):
                run()


def on_empty_shards(case: str) -> Callable[[], list[torch.Tensor]]:
    mesh = Mesh(x=3)
    fn = EMPTY[case]
    x = sample(4, 5)
    spec = fs.Spec(mesh, P("x"), shape=(4, 5), dtype=torch.float64, sizes={0: (4, 0, 0)})
    part = fs.partition(fn, mesh=mesh, in_specs=(spec,))

    def on_rank() -> list[torch.Tensor]:
        leaf = x.detach().clone().requires_grad_()
        out = fs.unshard(part(fs.shard(leaf, spec)))
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaf)]

    return on_rank


EMPTY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (5,)),
    "sum": lambda x: x.sum(0),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([0, 2]), x),
    "select": lambda x: x.select(0, 1),
    "index_select": lambda x: x.index_select(0, torch.tensor([0, 1])),
    "logsumexp": lambda x: x.logsumexp(0),
}


@pytest.mark.parametrize("case", EMPTY)
def test_ranks_with_empty_shards_take_part_in_backward(case: str) -> None:
    x = sample(4, 5)
    result = EMPTY[case](x)
    expected = [result.detach(), *torch.autograd.grad(result.sin().sum(), x)]
    for results in fs.simulate(Mesh(x=3), on_empty_shards(case)):
        torch.testing.assert_close(results, expected)


def test_threads_may_call_one_partitioned_function() -> None:
    part = fs.partition(mlp, mesh=MESH, params=P(), in_specs=(P("dp"),))
    inputs = [sample(2 * (1 + i % 3), 8).detach() for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda x: part(MLP_PARAMS, x), inputs))
    torch.testing.assert_close(results, [mlp(MLP_PARAMS, x) for x in inputs])


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x + 1, x * 2])),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("sizes", [(2, 2), (4, 0)])
def test_torch_func_transforms_partitioned_functions_and_apply(
    name: str, sizes: tuple[int, ...]
) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm((x * x).cumsum(0), (3,)).select(0, 1)

    spec = fs.Spec(Mesh(x=2), P("x"), shape=(4, 3), dtype=torch.float64, sizes={0: sizes})
    part = fs.partition(fn, mesh=spec.mesh, in_specs=(spec,))
    x = sample(4, 3).detach()
    torch.testing.assert_close(TRANSFORMS[name](part, x), TRANSFORMS[name](fn, x))

    def summed(x: torch.Tensor) -> torch.Tensor:
        return fs.unshard(fs.apply(torch.cumsum, fs.shard(x, spec), 0, mode="auto"))

    expected = TRANSFORMS[name](lambda x: x.cumsum(0), x)
    torch.testing.assert_close(TRANSFORMS[name](summed, x), expected)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_functions_that_make_and_write_tensors(name: str) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, 4, dtype=x.dtype)
        y = x * torch.tensor([1.0, 2.0, 1.0, 2.0]) * times
        y[2:].mul_(torch.full((2,), 2.0))
        rows = torch.zeros_like(x)
        rows[1:] = y[1:]
        inner = torch.func.grad(lambda t: (t * torch.ones(4)).square().sum())(x)
        return y * rows + x.new_ones(4) + inner

    part = fs.partition(fn, mesh=Mesh(x=2), in_specs=P("x"))
    x = sample(4).detach()
    torch.testing.assert_close(TRANSFORMS[name](part, x), TRANSFORMS[name](fn, x))

    def closes_over(y: torch.Tensor) -> torch.Tensor:
        part = fs.partition(lambda x: x * y + torch.arange(4), mesh=Mesh(x=2), in_specs=P("x"))
        result: torch.Tensor = part(x)
        return result

    expected = TRANSFORMS[name](lambda y: x * y + torch.arange(4), x)
    torch.testing.assert_close(TRANSFORMS[name](closes_over, x), expected)


def test_tensors_made_beside_vmapped_closures_in_grad_are_refused() -> None:
    def gradient(y: torch.Tensor) -> torch.Tensor:
        part = fs.partition(lambda x: (x * y * torch.ones(4)).sum(), mesh=Mesh(x=2))
        return torch.func.grad(part)(torch.ones(4))

    with pytest.raises(fs.ShardingError, match="closes over from a vmap"):
        torch.vmap(gradient)(torch.ones(3, 4))


def test_no_grad_regions_and_detached_values() -> None:
    def fn(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = (x @ p["a"]).amax()
        return x @ p["a"] - shift - (x @ p["a"]).detach().mean()

    part = fs.partition(
        fn, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")}, in_specs=(P("dp"),)
    )
    x = sample(4, 8)
    actual, expected = part(MLP_PARAMS, x), fn(MLP_PARAMS, x)
    torch.testing.assert_close(actual, expected)
    leaves = [MLP_PARAMS["a"], x]
    grads = [torch.autograd.grad(y.sin().sum(), leaves) for y in (actual, expected)]
    torch.testing.assert_close(*grads)


def scaled(
    x: torch.Tensor, scale: float = 2.0, mask: torch.Tensor | None = None, *, sign: int = 1
) -> torch.Tensor:
    return x * scale * sign if mask is None else x * scale * mask * sign


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if mask is None else x * mask)


def test_keyword_arguments() -> None:
    x, mask = torch.ones(4), torch.arange(4.0)
    part = fs.partition(scaled, mesh=MESH, in_specs=P("dp"))
    for keywords in ({"mask": mask}, {"scale": 3.0}, {"mask": mask, "scale": 3.0}):
        torch.testing.assert_close(part(x, **keywords), scaled(x, **keywords))  # type: ignore[arg-type]
    torch.testing.assert_close(part(x=x), scaled(x))
    assert str(part.explain(x, mask=mask)) == str(part.explain(x, 2.0, mask))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        part(mask=mask)
    torch.testing.assert_close(part(x, sign=-1), scaled(x, sign=-1))
    module = Scaled(4, 2)
    part = fs.partition(module, mesh=MESH, params=P("tp"), in_specs=P())
    p = dict(module.named_parameters())
    torch.testing.assert_close(part(p, x=x, mask=mask), module(x, mask))


def test_repr_of_a_partition() -> None:
    part = fs.partition(mlp, mesh=MESH)
    assert repr(part) == "fs.partition(mlp) on Mesh(dp=2, tp=2), planned for 0 signatures"
    part(MLP_PARAMS, sample(4, 8))
    assert repr(part) == "fs.partition(mlp) on Mesh(dp=2, tp=2), planned for 1 signature"


def test_module_is_called_with_its_parameters() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ).double()
    params = dict(module.named_parameters())
    specs = {"0.weight": P("tp"), "0.bias": P("tp"), "2.weight": P(None, "tp"), "2.bias": P()}
    part = fs.partition(module, mesh=MESH, params=specs, in_specs=(P("dp"),))
    x = sample(4, 4)
    torch.testing.assert_close(part(params, x), module(x))
    assert sum(isinstance(line, Operation) for line in part.trace(params, x).lines) == 3


def test_created_tensors_are_on_the_device_of_the_arguments() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w + torch.arange(x.shape[1], device=x.device)[:, None]
        target = torch.zeros(y.shape[:-1], dtype=torch.long, device=y.device)
        # The decomposition creates tensors too.
        return torch.nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()) + y.cumsum(1)

    part = fs.partition(fn, mesh=MESH, in_specs=(P(None, "tp"), P("dp")))
    w, x = sample(8, 16), sample(4, 6, 8)
    torch.testing.assert_close(part(w, x), fn(w, x))
    result = part(w.to("meta"), x.to("meta"))
    assert (result.shape, result.device.type) == ((4, 6, 16), "meta")
