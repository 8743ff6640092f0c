"""Whole functions on layouts: values, gradients, and the collectives of hand-written code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, PartitionSpec
from fshard.partition.ir import Redistribution, Operation
from fshard.partition.partitioned_call import PartitionedCall
from tests.helpers.ops import blocks

MESH = Mesh(dp=2, tp=2)
BYTES = fs.Topology("bytes", inner=fs.Link(1e-9, 1e9), launch=1e-9, message=0.0)
"""For tensors as small as these: a launch would count more than all that they hold."""
COLUMNS, ROWS = P("tp"), P(None, "tp")
Block = Callable[[blocks.Params, torch.Tensor], torch.Tensor]


def sample(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


Case = tuple[Block, Callable[[], blocks.Params], dict[str, PartitionSpec], torch.Size]
BLOCKS: dict[str, Case] = {
    "gpt": (
        blocks.gpt, blocks.gpt_params,
        {**{f"{t}{c}": COLUMNS for t in "wb" for c in "qkv1"}, "wo": ROWS, "w2": ROWS},
        torch.Size((4, 6, 16)),
    ),
    "llama": (
        blocks.llama, blocks.llama_params,
        {**{f"w{c}": COLUMNS for c in "qkvgu"}, "wo": ROWS, "wd": ROWS}, torch.Size((4, 6, 32)),
    ),
    "resnet": (
        blocks.resnet, blocks.resnet_params,
        {"c1": COLUMNS, "g1": COLUMNS, "h1": COLUMNS, "c2": ROWS}, torch.Size((4, 8, 6, 6)),
    ),
    "vit": (
        blocks.vit, blocks.vit_params,
        {"qkv": COLUMNS, "w1": COLUMNS, "wo": ROWS, "w2": ROWS}, torch.Size((4, 3, 8, 8)),
    ),
}  # fmt: skip


def sent(made: PartitionedCall) -> tuple[Counter[tuple[str, tuple[str, ...]]], ...]:
    """The collectives of a call, forward and backward: kind and axes of each."""
    forward: Counter[tuple[str, tuple[str, ...]]] = Counter()
    backward: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for line in made.lines:
        if isinstance(line, Redistribution):
            ways = [(forward, line.program), *([(backward, line.program.T)] if line.grad else [])]
            for found, prog in ways:
                for step, wire in zip(prog.steps, prog.step_bytes, strict=True):
                    if wire:
                        found[type(step).__name__, step.axes] += 1
    return forward, backward


def check_equal(part: fs.ops.partition.Partition, fn: Block, *args: Any) -> None:
    """Values and gradients of a partitioned function are those of one device."""
    made, whole = part(*args), fn(*args)
    torch.testing.assert_close(made, whole, rtol=1e-11, atol=1e-11)
    leaves = [x for each in args for x in (each.values() if isinstance(each, dict) else [each])]
    grads = torch.autograd.grad(made.sin().sum(), leaves)
    expected = torch.autograd.grad(whole.sin().sum(), leaves)
    for one, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_from_specs_on_parameters_alone_equal_one_device(name: str) -> None:
    fn, params, asked, shape = BLOCKS[name]
    p = params()
    part = fs.partition(fn, mesh=MESH, params={k: asked.get(k, P()) for k in p})
    check_equal(part, fn, p, sample(*shape))


@pytest.mark.parametrize(("name", "pairs"), [("gpt", 2), ("llama", 2), ("vit", 2), ("resnet", 1)])
def test_megatron_collectives(name: str, pairs: int) -> None:
    """One all-reduce for each pair of layers forward and backward, and one for every gradient."""
    fn, params, asked, shape = BLOCKS[name]
    p = params()
    part = fs.partition(
        fn, mesh=MESH, params={k: asked.get(k, P()) for k in p}, in_specs=(P("dp"),)
    )
    x = sample(*shape)
    check_equal(part, fn, p, x)
    forward, backward = sent(part.trace(p, x))
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
    forward, backward = sent(part.trace(p, x))
    assert forward == {("AllGather", ("dp",)): len(p)}
    assert backward == {("ReduceScatter", ("dp",)): len(p)}


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_sequence_parallel_collectives(name: str) -> None:
    """With the sequence cut between the parts, gathers and reduce-scatters replace all-reduces."""
    fn, params, asked, shape = BLOCKS[name]
    p, mesh = params(), Mesh(tp=2)
    part = fs.partition(fn, mesh=mesh, params={k: asked.get(k, P()) for k in p},
                        in_specs=(P(None, "tp"),), out_specs=P(None, "tp"))  # fmt: skip
    x = sample(*shape)
    check_equal(part, fn, p, x)
    forward, _ = sent(part.trace(p, x))
    assert forward == {("AllGather", ("tp",)): 2, ("ReduceScatter", ("tp",)): 2}


def mlp(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
    return x + torch.relu(x @ p["a"]) @ p["b"]


MLP = blocks._make({"a": (8, 16), "b": (16, 8)}, 5)


def test_what_constraints_and_out_specs_ask_for_is_reduced_where_it_is_made() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),), out_specs=P(("dp", "tp")))  # fmt: skip
    x = sample(4, 8)
    check_equal(part, mlp, MLP, x)
    assert sent(part.trace(MLP, x))[0] == {("ReduceScatter", ("tp",)): 1}

    def hinted(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        return fs.constrain(mlp(p, x), P(("dp", "tp"))) * 2

    part = fs.partition(hinted, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),))  # fmt: skip
    check_equal(part, hinted, MLP, x)
    made = part.trace(MLP, x)
    assert sent(made)[0] == {("ReduceScatter", ("tp",)): 1}
    assert made.out_specs[0] is not None
    assert made.out_specs[0].partition == P(("dp", "tp"), None)


def test_results_are_brought_to_out_specs_from_the_nearest_layout() -> None:
    def fn(p: blocks.Params, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x @ p["a"]) @ p["b"]
        return y, torch.relu(y)

    part = fs.partition(fn, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),), out_specs=(P("dp"), P("dp")))  # fmt: skip
    x = sample(4, 8)
    assert sent(part.trace(MLP, x))[0] == {("AllReduce", ("tp",)): 1}
    torch.testing.assert_close(part(MLP, x), fn(MLP, x))


def test_candidates_of_a_maximum_are_reduced_before_they_are_addends() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.amax(0)

    part = fs.partition(fn, mesh=MESH, in_specs=(P("dp"),), out_specs=P(unreduced={"dp"}))
    x = sample(4, 8)
    made = part(fs.shard(x, part.trace(x).in_specs[0]))
    assert str(made.spec) == "f64[8]{unreduced: dp}"
    check_equal(part, fn, x)


def test_pairs_give_pairs_and_locals_of_one_rank_run_the_graph() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),))  # fmt: skip
    x = sample(4, 8)
    specs = part.trace(MLP, x).in_specs
    a, b, whole = (fs.shard(t.detach(), s) for t, s in zip((*MLP.values(), x), specs, strict=True))
    out = part({"a": a, "b": b}, whole)
    assert isinstance(out, fs.ops.partition.Sharded)
    assert out.spec.partition == P("dp", None)
    torch.testing.assert_close(fs.unshard(out), mlp(MLP, x).detach())

    def on_rank(a: Any, b: Any, x: Any) -> Any:
        return part({"a": a, "b": b}, x).local

    ranks = fs.simulate(MESH, on_rank, a, b, whole)
    for mine, theirs in zip(ranks, out.local, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_second_call_of_the_same_kind_lays_nothing_out_anew() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")})
    x = sample(4, 8)
    part(MLP, x)
    first = part.trace(MLP, x)
    assert part.trace(MLP, x * 2) is first
    assert part.trace(MLP, x.detach()) is not first or not first.grad


def test_arguments_that_are_no_tensors_are_told_apart_by_type_too() -> None:
    part = fs.partition(lambda x, by: x * by, mesh=MESH)
    x = torch.arange(4)
    for by in (1, 1.0, True, 2, 0.0, -0.0):
        made, whole = part(x, by), x * by
        assert made.dtype == whole.dtype
        assert torch.equal(1 / made, 1 / whole)
    part = fs.partition(lambda x, keep: x * len(keep), mesh=MESH)
    assert [int(part(x, each)[1]) for each in ({1}, {1, 2}, {3})] == [1, 2, 1]  # no hash: no key


def test_explain_has_a_line_for_every_operation() -> None:
    part = fs.partition(mlp, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")},
                        in_specs=(P("dp"),))  # fmt: skip
    made = part.trace(MLP, sample(4, 8))
    assert str(made).splitlines() == [
        "4 operations on Mesh(dp=2, tp=2), topology node",
        "                  spec                        forward  backward",
        "───────────────────────────────────────────────────────────────",
        "args[0]['a']      f64[8,16@tp]",
        "← all_reduce(dp)  f64[8,16@tp]                            512 B",
        "args[0]['b']      f64[16@tp,8]",
        "← all_reduce(dp)  f64[16@tp,8]                            512 B",
        "args[1]           f64[4@dp,8]",
        "← all_reduce(tp)  f64[4@dp,8]                             128 B",
        "matmul            f64[4@dp,16@tp]",
        "relu              f64[4@dp,16@tp]",
        "matmul_1          f64[4@dp,8]{unreduced: tp}",
        "→ all_reduce(tp)  f64[4@dp,8]                   128 B",
        "add               f64[4@dp,8]",
        "result            f64[4@dp,8]",
        "───────────────────────────────────────────────────────────────",
        "launches                                            1         3",
        "sent                                            128 B   1,152 B",
        "time                                          6.75 µs   20.3 µs",
    ]
    assert str(part.explain()) == str(part.explain(MLP, sample(4, 8))) == str(made)
    assert str(made.explain(fs.Topology.cluster(2))).startswith("4 operations on ")
    assert made._repr_mimebundle_()["text/plain"] == str(made)
    assert "torch.ops.aten.matmul.default" in part.graph.code


@pytest.mark.parametrize("name", BLOCKS)
def test_explain_fits_80_columns_and_adds_up(name: str) -> None:
    fn, params, asked, shape = BLOCKS[name]
    p = params()
    made = fs.partition(fn, mesh=MESH, params={k: asked.get(k, P()) for k in p},
                        in_specs=(P("dp"),)).trace(p, sample(*shape))  # fmt: skip
    table = made.explain()
    assert max(map(len, str(table).splitlines())) <= 80
    for way, place in ((False, 2), (True, 3)):
        cells = [row[place] for row in table.rows if row[place]]
        sent = sum(int(each.removesuffix(" B").replace(",", "")) for each in cells)
        assert sent == made.cost(backward=way).bytes_sent
    without = fs.partition(fn, mesh=MESH, in_specs=P()).trace(
        {k: v.detach() for k, v in p.items()}, sample(*shape).detach())  # fmt: skip
    assert [column.name for column in without.explain().columns] == ["", "spec", "forward"]


def test_uneven_shards_and_closures() -> None:
    scale = torch.full((8,), 2.0, dtype=torch.float64)

    def fn(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        y = mlp(p, x) * scale + torch.arange(8, dtype=torch.float64)
        return y[:, 1:].sum(0) + torch.ones(7, dtype=torch.float64)

    mesh = Mesh(x=3)
    spec = fs.Spec(mesh, P("x"), shape=(7, 8), dtype=torch.float64, uneven="chunk")
    part = fs.partition(fn, mesh=mesh, params=P(), in_specs=(spec,))
    check_equal(part, fn, MLP, sample(7, 8))


def test_what_is_written_in_place_is_another_value_from_then_on() -> None:
    def fn(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        y = x @ p["a"]
        y += 1
        y.mul_(2)
        torch.relu_(y)
        return y @ p["b"]

    part = fs.partition(fn, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")})
    check_equal(part, fn, MLP, sample(4, 8))


def test_what_is_written_keeps_its_dtype() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x.float() * 2
        z = y.add_(torch.ones(4, dtype=torch.float64)).mul_(2)
        out = torch.zeros(4)
        torch.add(x.detach().float(), 1, out=out)
        return y + z + out

    x = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    made, whole = fs.partition(fn, mesh=MESH, in_specs=(P("dp"),))(x), fn(x)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, whole)
    one, other = (torch.autograd.grad(y.sum(), x) for y in (made, whole))
    torch.testing.assert_close(one, other)


def test_autocast_is_refused() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x

    x = torch.ones(4, 4)
    part = fs.partition(lambda x: x @ x, mesh=MESH)
    part(x)
    pair = fs.shard(x, fs.Spec(MESH, P("dp"), shape=(4, 4)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for run in (lambda: part(x), lambda: fs.apply(torch.matmul, pair, x)):
            with pytest.raises(fs.ShardingError, match="the dtype of every result is in its spec"):
                run()
    with pytest.raises(fs.ShardingError, match="the dtype of every result is in its spec"):
        fs.partition(inside, mesh=MESH)(x)


def on_parts_that_are_empty(case: str) -> Callable[[], list[torch.Tensor]]:
    mesh = Mesh(x=3)
    fn = EMPTY[case]
    x = sample(4, 5)
    spec = fs.Spec(mesh, P("x"), shape=(4, 5), dtype=torch.float64, sizes={0: (4, 0, 0)})
    part = fs.partition(fn, mesh=mesh, in_specs=(spec,))

    def on_rank() -> list[torch.Tensor]:
        mine = x.detach().clone().requires_grad_()
        out = fs.unshard(part(fs.shard(mine, spec)))
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), mine)]

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
def test_ranks_that_hold_nothing_take_part_in_the_backward_pass(case: str) -> None:
    x = sample(4, 5)
    whole = EMPTY[case](x)
    right = [whole.detach(), *torch.autograd.grad(whole.sin().sum(), x)]
    for found in fs.simulate(Mesh(x=3), on_parts_that_are_empty(case)):
        torch.testing.assert_close(found, right)


def test_threads_may_call_one_partitioned_function() -> None:
    part = fs.partition(mlp, mesh=MESH, params=P(), in_specs=(P("dp"),))
    inputs = [sample(2 * (1 + each % 3), 8).detach() for each in range(12)]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda x: part(MLP, x), inputs))
    torch.testing.assert_close(found, [mlp(MLP, x) for x in inputs])


TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x + 1, x * 2])),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # of PyTorch itself
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

    right = TRANSFORMS[name](lambda x: x.cumsum(0), x)
    torch.testing.assert_close(TRANSFORMS[name](summed, x), right)


def test_no_grad_regions_and_detached_values_ask_for_no_gradient() -> None:
    def fn(p: blocks.Params, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = (x @ p["a"]).amax()
        return x @ p["a"] - shift - (x @ p["a"]).detach().mean()

    part = fs.partition(
        fn, mesh=MESH, params={"a": P(None, "tp"), "b": P("tp")}, in_specs=(P("dp"),)
    )
    x = sample(4, 8)
    made, whole = part(MLP, x), fn(MLP, x)
    torch.testing.assert_close(made, whole)
    one, other = (torch.autograd.grad(y.sin().sum(), [MLP["a"], x]) for y in (made, whole))
    for g, e in zip(one, other, strict=True):
        torch.testing.assert_close(g, e)


NUMBERS = (
    "the function is traced once on tensors without numbers, of the global shapes",
    ("torch.where instead of masks and branches on values, no .item(), counts by one_hot; "
     "validate_args=False of a distribution"),
)  # fmt: skip


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def selects(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].sum()


def multiplies(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("fn", "given", "rule", "fix"),
    [
        (branches, "aten._local_scalar_dense.default reads a tensor's numbers", *NUMBERS),
        (selects, "aten.nonzero.default returns a shape that depends on a tensor's numbers",
         *NUMBERS),
        (multiplies, "RuntimeError: a and b must have same reduction dim, but got [2, 2] X [3, 3].",
         "the function is traced once on tensors of the global shapes",
         "check that it runs on whole tensors; no numpy() of them"),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_names_its_line(
    fn: Any, given: str, rule: str, fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(fs.ShardingError) as error:
        fs.partition(fn, mesh=MESH)(torch.ones(2, 2))
    line = f"{__file__}:{fn.__code__.co_firstlineno + 1}"
    assert str(error.value) == (
        f"fs.partition({fn.__name__}) at {line}\n  given: {given}\n  rule:  {rule}\n  fix:   {fix}"
    )
    assert not [each for each in caplog.records if each.levelname != "DEBUG"]


def test_refusals_teach() -> None:
    part = fs.partition(lambda x: x.sum().item(), mesh=MESH)
    with pytest.raises(fs.ShardingError, match="traced once on tensors without numbers"):
        part(torch.ones(2))
    part = fs.partition(lambda x: x + torch.rand(2), mesh=MESH)
    with pytest.raises(fs.ShardingError, match="draws numbers"):
        part(torch.ones(2))
    part = fs.partition(lambda x: x + 1, mesh=MESH, in_specs=(P("dp"),))
    pair = fs.shard(torch.ones(4), fs.Spec(MESH, P("tp"), shape=(4,)))
    with pytest.raises(fs.ShardingError, match="the function asks for"):
        part(pair)


def scaled(
    x: torch.Tensor, scale: float = 2.0, mask: torch.Tensor | None = None, *, sign: int = 1
) -> torch.Tensor:
    return x * scale * sign if mask is None else x * scale * mask * sign


class Scaled(torch.nn.Linear):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if mask is None else x * mask)


def test_arguments_are_given_by_name() -> None:
    x, mask = torch.ones(4), torch.arange(4.0)
    part = fs.partition(scaled, mesh=MESH, in_specs=P("dp"))
    for given in ({"mask": mask}, {"scale": 3.0}, {"mask": mask, "scale": 3.0}):
        torch.testing.assert_close(part(x, **given), scaled(x, **given))  # type: ignore[arg-type]
    torch.testing.assert_close(part(x=x), scaled(x))
    assert str(part.explain(x, mask=mask)) == str(part.explain(x, 2.0, mask))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        part(mask=mask)
    with pytest.raises(fs.ShardingError) as caught:
        part(x, sign=-1)
    assert str(caught.value) == (
        "fs.partition(scaled)\n"
        "  given: sign given by name\n"
        "  rule:  a spec is that of an argument by its place\n"
        "  fix:   functools.partial(fn, ...) for what is no tensor, or a place for it"
    )
    module = Scaled(4, 2)
    part = fs.partition(module, mesh=MESH, params=P("tp"), in_specs=P())
    p = dict(module.named_parameters())
    torch.testing.assert_close(part(p, x=x, mask=mask), module(x, mask))


@dataclass
class Result:
    loss: torch.Tensor


CACHE: list[torch.Tensor] = []


def collects(x: torch.Tensor) -> torch.Tensor:
    CACHE.append(x * 2)
    return x.sum()


def test_tensors_where_no_tree_is_and_outside_are_refused() -> None:
    part = fs.partition(lambda x: Result(x.sum()), mesh=MESH)
    rest = (
        "\n  rule:  tensors are seen as they are, in tuples, named tuples, lists and dicts"
        "\n  fix:   a dict of them: vars(...) of a dataclass"
    )
    head = "fs.partition(<lambda>)\n  given: "
    assert said(part, torch.ones(2)) == f"{head}result is a Result, with tensors in it{rest}"
    part = fs.partition(lambda x, y: x * y["a"].loss, mesh=MESH)
    given = torch.ones(2), {"a": Result(torch.ones(2))}
    assert said(part, *given) == f"{head}args[1]['a'] is a Result, with tensors in it{rest}"
    assert said(fs.partition(collects, mesh=MESH), torch.ones(2)) == (
        "fs.partition(collects)\n"
        "  given: a result of mul is kept outside of the function\n"
        "  rule:  the function is traced once on tensors without numbers, which are of no use "
        "after it\n"
        "  fix:   return it; what a module or a cache keeps is made before, by a call on whole "
        "tensors"
    )
    CACHE.clear()


def said(part: fs.ops.partition.Partition, *args: Any) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(fs.ShardingError) as caught:
        part(*args)
    return str(caught.value)


def test_refusals_name_the_place() -> None:
    x = torch.ones(3, 4)
    part = fs.partition(lambda *xs: xs, mesh=MESH, in_specs=(P("dp"), P("zz"), P()))
    assert said(part, x, x, x) == (
        "fs.partition(<lambda>)\n"
        "  given: args[0]: P('dp'), dim 0 of size 3 over dp=2\n"
        "  rule:  2 shards must divide the dim; 3 % 2 = 1\n"
        "  fix:   a Spec in in_specs with uneven='chunk' (shards of (2, 1)), sizes={0: (...)}, "
        "or pad the dim to 4\n\n"
        "  given: args[1]: P('zz'), axis 'zz' on Mesh(dp=2, tp=2)\n"
        "  rule:  an axis must be one of dp, tp\n"
        "  fix:   use one of dp, tp"
    )
    part = fs.partition(lambda x: (x, x * 2), mesh=MESH, out_specs=(P(), P("zz")))
    assert said(part, x) == (
        "fs.partition(<lambda>): out_specs\n"
        "  given: result 1: P('zz'), axis 'zz' on Mesh(dp=2, tp=2)\n"
        "  rule:  an axis must be one of dp, tp\n"
        "  fix:   use one of dp, tp"
    )
    pair = fs.shard(torch.ones(4), fs.Spec(Mesh(a=2), P("a"), shape=(4,)))
    assert said(fs.partition(lambda x: x, mesh=MESH), pair) == (
        "fs.partition(<lambda>)\n"
        "  given: args[0]: f32[4@a] on Mesh(a=2)\n"
        "  rule:  the function runs on Mesh(dp=2, tp=2)\n"
        "  fix:   fs.reshard(pair, spec) with a spec on that mesh"
    )
    assert said(fs.partition(torch.nn.Linear(4, 4), mesh=MESH), x) == (
        "fs.partition(Linear)\n"
        "  given: a first argument that is no dict\n"
        "  rule:  a module is called with its parameters, and then with its arguments\n"
        "  fix:   part(dict(module.named_parameters()), *args)"
    )


def test_constraints_that_cannot_be_name_their_line() -> None:
    def axis(x: torch.Tensor) -> torch.Tensor:
        return fs.constrain(x * 2, P("zz")) + 1

    def dims(x: torch.Tensor) -> torch.Tensor:
        return fs.constrain(x * 2, P(None, "dp")) + 1

    line = f"fs.constrain at {__file__}:{axis.__code__.co_firstlineno + 1}"
    assert said(fs.partition(axis, mesh=MESH), torch.ones(4)) == (
        f"{line}\n"
        "  given: axis 'zz' on Mesh(dp=2, tp=2)\n"
        "  rule:  an axis must be one of dp, tp\n"
        "  fix:   use one of dp, tp"
    )
    line = f"fs.constrain at {__file__}:{dims.__code__.co_firstlineno + 1}"
    assert said(fs.partition(dims, mesh=MESH), torch.ones(4)) == (
        f"{line}\n"
        "  given: P(None, 'dp') for f32[4]: P(None, 'dp') with 2 entries for shape (4,)\n"
        "  rule:  a tensor of 1 dims must have at most 1 entries\n"
        "  fix:   drop 1 of them, trailing None too"
    )


def test_a_constraint_chunks_what_it_does_not_divide() -> None:
    x = sample(5, 3).detach()
    part = fs.partition(lambda x: fs.constrain(x * 2, P("dp")) + 1, mesh=MESH)
    made = part(fs.shard(x, fs.Spec(MESH, P(), shape=x.shape, dtype=x.dtype)))
    assert str(made.spec) == "f64[5@dp:chunk,3]"
    torch.testing.assert_close(fs.unshard(made), x * 2 + 1)


def test_a_partition_says_what_it_is() -> None:
    part = fs.partition(mlp, mesh=MESH)
    assert repr(part) == "fs.partition(mlp) on Mesh(dp=2, tp=2), laid out for 0 signatures"
    part(MLP, sample(4, 8))
    assert repr(part) == "fs.partition(mlp) on Mesh(dp=2, tp=2), laid out for 1 signature"


def test_a_module_is_called_with_its_parameters() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
    ).double()
    params = dict(module.named_parameters())
    specs = {"0.weight": P("tp"), "0.bias": P("tp"), "2.weight": P(None, "tp"), "2.bias": P()}
    part = fs.partition(module, mesh=MESH, params=specs, in_specs=(P("dp"),))
    x = sample(4, 4)
    torch.testing.assert_close(part(params, x), module(x))
    assert sum(isinstance(line, Operation) for line in part.trace(params, x).lines) == 3


def test_what_a_function_makes_is_where_its_arguments_are() -> None:
    def fn(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = x @ w + torch.arange(x.shape[1], device=x.device)[:, None]
        target = torch.zeros(y.shape[:-1], dtype=torch.long, device=y.device)
        # What it is decomposed to makes tensors too.
        return torch.nn.functional.cross_entropy(y.flatten(0, 1), target.flatten()) + y.cumsum(1)

    part = fs.partition(fn, mesh=MESH, in_specs=(P(None, "tp"), P("dp")))
    w, x = sample(8, 16), sample(4, 6, 8)
    torch.testing.assert_close(part(w, x), fn(w, x))
    made = part(w.to("meta"), x.to("meta"))
    assert (made.shape, made.device.type) == ((4, 6, 16), "meta")
