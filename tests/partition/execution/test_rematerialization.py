"""`fs.partition(remat=)`: gradients, launches, and the memory that the backward pass keeps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

import fshard as fs
from fshard import Mesh, P
from fshard._torch.saved_tensors import StorageWeakRef
from fshard.partition.execution import run_lines
from fshard.partition.execution.saved_bytes import SavedBytes
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd import remat_cases
from tests.helpers.spmd.remat_cases import (
    CASES,
    LAYERS,
    ROWS,
    SHAPES,
    WIDTH,
    call_on_pairs,
    launch_order,
    locals_in,
    loss,
    measured,
    nbytes,
    one_device,
    saved_storages,
)

MESH = Mesh(x=2, y=2)
FSDP = P(("x", "y"))
F64 = torch.float64
Policy = Callable[..., Any]
OFTEN = (
    "data parallel", "FSDP", "FSDP, gathered again", "FSDP, checkpointed", "FSDP, products kept",
    "tensor parallel", "hybrid, gathered again",
)  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow]) for name in CASES
])  # fmt: skip
def test_saved_bytes_are_those_of_autograd(name: str) -> None:
    expected, expected_grads = one_device()
    result = measured(MESH, name)
    saved: SavedBytes = result["predicted"]
    assert result["measured"] == result["all ranks"] == MESH.size * saved.total
    torch.testing.assert_close(result["loss"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(result["grads"], list(expected_grads), rtol=1e-10, atol=1e-12)
    assert result["launches"] == sum(result["backward"].values())


def test_gathered_parameters_follow_the_formula() -> None:
    """FSDP keeps the activations and each gathered weight, gathered again the activations alone."""
    elements = {k: torch.Size(shape).numel() for k, shape in SHAPES.items()}
    weights = LAYERS * 8 * sum(n for k, n in elements.items() if k != "bias")  # no use backward
    rows, statistics = ROWS // MESH.size, 2  # of the layer norm: mean, reciprocal deviation
    # Input (but for the first, an argument), output of the norm, hidden units before and after.
    activations = 8 * rows * (LAYERS * (WIDTH + WIDTH + 4 * WIDTH + 4 * WIDTH + statistics))
    kept, again = (measured(MESH, k)["predicted"] for k in ("FSDP", "FSDP, gathered again"))
    assert (kept.gathered, kept.activations) == (weights, activations)
    assert (again.gathered, again.activations) == (0, activations)


@pytest.mark.parametrize("remat", [None, "gathers"])
def test_gathered_parameters_are_freed_after_their_use(
    remat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's hooks do not see all that is alive: the memory itself is observed."""
    references: list[StorageWeakRef] = []

    def wait(finish: Any) -> Any:
        outputs = finish()
        references.extend(StorageWeakRef(y.untyped_storage()) for y in outputs)
        return outputs

    part, pairs, x = call_on_pairs(MESH, FSDP, FSDP, remat, loss)
    assert bool(part.trace(pairs, x).remat_plan.units) == (remat is not None)
    monkeypatch.setattr(run_lines, "wait", wait)
    out = part(pairs, x)
    gc.collect()
    alive = {reference.cdata for reference in references if not reference.expired()}
    assert len(references) == MESH.size * LAYERS * len(SHAPES)
    assert bool(alive) == (remat is None)
    assert out.local[0].requires_grad


def test_launches_run_again_in_buckets_ahead_of_their_use() -> None:
    """The launch of a layer's parameters is before the reduction of the layer after it."""
    gather, scatter = ("backward", "all_gather"), ("backward", "reduce_scatter")
    expected = [("forward", "all_gather")] * LAYERS
    expected += [gather, gather, scatter, gather, scatter, gather, scatter, scatter]
    assert launch_order(Mesh(x=2)) == expected
    assert launch_order(Mesh(x=2), None) == [expected[0]] * LAYERS + [scatter] * LAYERS


def test_recomputed_buckets_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's parameters are freed before the backward pass takes those of the one before."""
    with remat_cases.bucket_bytes(20_000):
        part, pairs, x = call_on_pairs(MESH, FSDP, FSDP, "gathers", loss)
        assert len(part.trace(pairs, x).remat_plan.units) == LAYERS
    out = part(pairs, x)
    references: list[list[StorageWeakRef]] = []
    alive: list[int] = []

    def wait(finish: Any) -> Any:
        outputs = finish()
        alive.append(sum(any(not y.expired() for y in ys) for ys in references))
        references.append([StorageWeakRef(y.untyped_storage()) for y in outputs])
        return outputs

    monkeypatch.setattr(run_lines, "wait", wait)
    sum(out.local).backward()
    assert alive == [0] * LAYERS
    assert all(y.expired() for ys in references for y in ys)


# -- policies ----------------------------------------------------------------------------------


def keeps(*names: str) -> Policy:
    return lambda op, *args, **kwargs: getattr(op, "__name__", "").partition(".")[0] in names


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "dropout": remat_cases.dropped,
    "loss": lambda w, x: F.cross_entropy(x @ w, x.argmax(1) % w.shape[1]),
    "attention": lambda w, x: F.scaled_dot_product_attention(
        (x @ w).view(2, -1, 2, 4).transpose(1, 2), *[x.view(2, -1, 2, 4).transpose(1, 2)] * 2
    ).square().mean(),
    "views": lambda w, x: torch.cat((x @ w).tanh().split(4, 1)[::-1], 1).T.exp().sum(),
    "several results": lambda w, x: torch.stack((x @ w).tanh().unbind(1)).sort(1)[0][2:].exp()
    .sum(),
    "complex": lambda w, x: torch.view_as_real(torch.fft.fft(x @ w, dim=-1)).square().mean(),
    "written": lambda w, x: (x @ w).mul_(2).tanh().square().sum(),
    "cast": lambda w, x: (x @ w.to(torch.float32).to(F64)).tanh().sum(),
    "grad mode": lambda w, x: ((x @ w).tanh() * (x @ w).detach().exp()).sum(),
}  # fmt: skip
POLICIES = {
    "gathers": "gathers", "all": "all", "tanh": keeps("tanh"),
    "products": ["matmul", torch.ops.aten.bmm],
    "saves": lambda *args, **kwargs: CheckpointPolicy.PREFER_SAVE,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "specs", [(P("x"), P("y")), pytest.param((P(None, ("x", "y")), P()), marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_policies_have_the_gradients_of_one_device(name: str, specs: Any) -> None:
    fn = FUNCTIONS[name]
    w, x = (random_global((8, 8), F64, i).div(4).requires_grad_() for i in range(2))
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    value = fn(w, x)
    first = torch.autograd.grad(value, (w, x), **options)  # type: ignore[arg-type]
    for policy in POLICIES.values():
        part = fs.partition(fn, mesh=MESH, in_specs=specs, out_specs=P(), remat=policy)
        storages = [w, x]
        with saved_storages(storages):
            out = part(w, x)
        grads = torch.autograd.grad(out, (w, x), retain_graph=True)
        again = torch.autograd.grad(out, (w, x), **options)  # type: ignore[arg-type]
        torch.testing.assert_close((out, *grads), (value, *first), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(again, first, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("remat", ["gathers", "all"])
def test_backward_passes_may_read_parts(remat: Any) -> None:
    """Passes to some parameters, in any order, leave others to recompute what is missing."""
    part, pairs, x = call_on_pairs(MESH, FSDP, FSDP, remat, loss)
    leaves = [*locals_in(pair for p in pairs for pair in p.values())]
    total = sum(part(pairs, x).local)
    expected = torch.autograd.grad(total, leaves, retain_graph=True)
    order = Random(0).sample(range(len(leaves)), len(leaves))
    for start in range(0, len(order), 7):
        some = order[start : start + 7]
        grads = torch.autograd.grad(total, [leaves[i] for i in some], retain_graph=True)
        assert all(torch.equal(grad, expected[i]) for grad, i in zip(grads, some, strict=True))


def test_a_policy_gets_operations_and_programs_with_specs() -> None:
    calls: list[tuple[Any, ...]] = []

    def policy(op: Any, *args: Any, **kwargs: Any) -> bool:
        calls.append((op, *args))
        return isinstance(op, fs.Program)

    w, x = torch.ones(4, 8, requires_grad=True), torch.ones(512, 4)
    part = fs.partition(
        lambda w, x: (x @ w).tanh(), mesh=MESH, in_specs=P(("x", "y")), remat=policy
    )
    call = part.trace(w, x)
    kept = call.saved_bytes()
    matmul, tanh = (line.strategy for line in call.lines if hasattr(line, "strategy"))
    (program,) = call.programs
    assert calls == [
        (program, program.src), (torch.ops.aten.matmul.default, *matmul.in_specs),
        (torch.ops.aten.tanh.default, *tanh.in_specs),
    ]  # fmt: skip
    # tanh saves its result, which is recomputed from the gathered weight and the argument x.
    assert (kept.total, kept.gathered) == (128, 128)
    assert [unit.lines[0].name for unit in call.remat_plan.units] == ["matmul", "tanh"]  # type: ignore[union-attr]


def test_explain_marks_what_runs_again() -> None:
    part, pairs, x = call_on_pairs(MESH, FSDP, FSDP, "gathers", loss)
    rows = [tuple(row) for row in part.explain(pairs, x, only="layouts").rows]
    again = [row for row in rows if row[0].startswith("↻")]
    assert again
    for name, spec, forward, sent, _ in again:
        assert (name.replace("↻", "→"), spec, sent, "", "↻") in rows
        assert not forward
    text = str(part.explain())
    assert "↻ runs again in the backward pass" in text
    assert "in one launch: ↻ all_gather of 16 over x, y" in text
    plain = fs.partition(loss, mesh=MESH, params=part.params, in_specs=FSDP)
    rows = [tuple(row) for row in plain.explain(pairs, x, only="layouts").rows]
    assert ("each of 4 layers:", "", "", "", "") in rows
    total = sum(
        int(row[4].removesuffix(" B").replace(",", "")) * (4 if row[0].startswith("  ") else 1)
        for row in rows if row[4]
    )  # fmt: skip
    assert total == plain.trace(pairs, x).saved_bytes().total
    assert "↻" not in str(plain.explain())


def test_ranks_with_empty_shards_wait_for_no_launch() -> None:
    """A rank without rows does not read the weight that the other ranks would gather again."""
    mesh = Mesh(x=2, y=3)
    rows = fs.Spec(mesh, P(("y", "x")), shape=(3, 2), dtype=F64, uneven="chunk")

    def fn(w: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.pad(w, (0, 0, 1, 0)), w, b)

    w, b = (random_global(s, F64, i).requires_grad_() for i, s in enumerate([(3, 2), (3,)]))
    expected = torch.autograd.grad(fn(w, b).square().sum(), (w, b))
    part = fs.partition(fn, mesh=mesh, in_specs=(rows, P("y")), remat="all")

    def of_rank() -> list[Tensor]:
        xs = [w.detach().requires_grad_(), b.detach().requires_grad_()]
        pairs = [fs.shard(x, spec) for x, spec in zip(xs, part.trace(w, b).in_specs, strict=True)]
        return [*torch.autograd.grad(fs.unshard(part(*pairs)).square().sum(), xs)]

    for grads in fs.simulate(mesh, of_rank):
        torch.testing.assert_close(grads, [*expected], rtol=0, atol=1e-10)


@pytest.mark.parametrize("remat", ["gathers", "all"])
def test_a_function_without_operations_has_nothing_to_recompute(remat: Any) -> None:
    part = fs.partition(lambda x: x, mesh=MESH, in_specs=P("x"), remat=remat)
    x = torch.ones(4, requires_grad=True)
    assert torch.equal(part(x), x)
    assert part.trace(x).saved_bytes().total == 0


def test_numbers_of_any_value_are_inputs_of_what_runs_again() -> None:
    def fn(x: Tensor, n: float, k: int) -> Tensor:
        return (x * (1 / (n - 1))).tanh() * 2**n + (x.int() << k) * x

    part = fs.partition(fn, mesh=MESH, in_specs=(P("x"), None, None), remat="all")
    x = random_global((4, 4), F64, 1).requires_grad_()
    for n, k in ((2.0, 1), (3.0, 2), (4.0, 3), (5.0, 4)):
        grads = [torch.autograd.grad(f(x, n, k).sum(), x) for f in (part, fn)]
        torch.testing.assert_close(*grads)
    call = part.trace(x, 6.0, 5)
    assert call.number_types == (float, int)
    assert call.saved_bytes().total == 0


def test_explain_says_why_saved_bytes_are_unknown() -> None:
    part = fs.partition(lambda x, n: (x * (1 / (n - 7))).tanh(), mesh=MESH, in_specs=(P("x"), None))
    x = torch.ones(4, requires_grad=True)
    for n in (8, 9, 10):
        part(x, n)
    assert part.explain().tables == (part.explain().layouts,)
    table = part.explain(only="layouts")
    assert table.footer[-1][-1] == "unknown"
    assert table.notes[:2] == (
        "times are unknown: ZeroDivisionError: division by zero",
        "saved bytes are unknown: ZeroDivisionError: division by zero",
    )
    with pytest.raises(fs.ShardingError, match="each operation must run on tensors without values"):
        part.trace(x, 11).saved_bytes()


# -- writes, other hooks, transforms -----------------------------------------------------------


def test_a_write_after_the_call_is_refused() -> None:
    """Without remat the gradient is that of the values before the write."""
    part, pairs, x = call_on_pairs(MESH, FSDP, FSDP, "gathers", loss)
    out = part(pairs, x)
    with torch.no_grad():
        pairs[2]["down"].local[1].mul_(2)
    with pytest.raises(fs.ShardingError, match=r"args\[0\]\[2\]\['down'\], written in place"):
        sum(out.local).backward()


def test_arguments_that_the_function_writes_are_kept() -> None:
    def step(w: Tensor, x: Tensor) -> Tensor:
        y = (x @ w).tanh().square().mean()
        with torch.no_grad():
            x.mul_(0.5)
        return y

    w = random_global((4, 8), F64, 1).requires_grad_()
    x = random_global((512, 4), F64, 2)
    (expected,) = torch.autograd.grad((x @ w).tanh().square().mean(), w)
    part = fs.partition(step, mesh=MESH, in_specs=(P(), P(None, "x")), remat="all",
                        replicate="x")  # fmt: skip
    (grad,) = torch.autograd.grad(part(w, x.clone()), w)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("remat", [None, "gathers", "all"])
def test_a_checkpoint_around_the_call_keeps_its_arguments_alone(remat: Any) -> None:
    part, pairs, x = call_on_pairs(MESH, FSDP, FSDP, remat, loss)
    leaves = [*locals_in(pair for p in pairs for pair in p.values())]

    def run(*locals_: Tensor) -> Tensor:
        total = sum(part(pairs, x).local)
        assert isinstance(total, Tensor)
        return total

    expected = torch.autograd.grad(run(), leaves)
    with saved_storages([*leaves, *locals_in([x])]) as saved:
        value = torch.utils.checkpoint.checkpoint(run, *leaves, use_reentrant=False)
    assert nbytes(saved) == 0
    grads = torch.autograd.grad(value, leaves)
    assert all(map(torch.equal, grads, expected))


def test_hooks_around_the_call_get_what_is_kept() -> None:
    part, pairs, x = call_on_pairs(MESH, FSDP, FSDP, "gathers", loss)
    leaves = [*locals_in(pair for p in pairs for pair in p.values())]
    expected = torch.autograd.grad(sum(part(pairs, x).local), leaves)
    with torch.autograd.graph.save_on_cpu():
        out = part(pairs, x)
    assert all(map(torch.equal, torch.autograd.grad(sum(out.local), leaves), expected))


def test_transforms_of_torch_func_keep_what_they_keep() -> None:
    w, x = random_global((8, 8), F64, 1), random_global((8, 8), F64, 2)
    fn = FUNCTIONS["views"]
    part = fs.partition(fn, mesh=MESH, in_specs=P("x"), out_specs=P(), remat="all")
    torch.testing.assert_close(torch.func.grad(part)(w, x), torch.func.grad(fn)(w, x))
    twice = [
        torch.func.grad(lambda w, f=f: torch.func.grad(f)(w, x).square().sum())(w)
        for f in (part, fn)
    ]
    torch.testing.assert_close(*twice)


# -- refused -----------------------------------------------------------------------------------


def test_other_policies_are_refused() -> None:
    with pytest.raises(fs.ShardingError, match=r"remat must be None, 'gathers', 'all', a"):
        fs.partition(loss, mesh=MESH, remat="gather")
    args = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    part = fs.partition(FUNCTIONS["views"], mesh=MESH, in_specs=P("x"), remat=lambda *a, **k: "no")
    with pytest.raises(fs.ShardingError, match=r"the policy's answer 'no' for"):
        part(*args)
    with pytest.raises(fs.ShardingError, match=r"(?s)fs.partition: remat.*'matmull'.*matmul"):
        fs.partition(FUNCTIONS["views"], mesh=MESH, remat=["matmull"])
    part = fs.partition(FUNCTIONS["views"], mesh=MESH, in_specs=P("x"), remat=["mm"])
    with pytest.raises(fs.ShardingError, match=r"remat=\[torch.ops.aten.matmul.default\]"):
        part(*args)


def test_lists_keep_the_results_of_their_operations() -> None:
    fn = lambda w, x: (x @ w).tanh().exp().sum()  # noqa: E731
    saved = []
    for remat in (["matmul"], [torch.ops.aten.matmul.default], keeps("matmul"), "all"):
        part = fs.partition(fn, mesh=MESH, in_specs=(P(), P("x")), remat=remat)
        saved.append(
            part.trace(torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)).saved_bytes().total
        )
    assert saved[0] == saved[1] == saved[2] > saved[3]


def test_partial_passes_that_keep_the_graph_run_again() -> None:
    def outputs(params: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor) -> tuple[Any, Any]:
        w, v = params
        a, b = (x @ w).chunk(2, 1)
        return torch.sin(a * b).sum(), torch.exp(b * v).sum()

    w, v, x = (torch.randn(4, n, dtype=torch.float64) / 4 for n in (4, 2, 4))
    w.requires_grad_()
    part = fs.partition(outputs, mesh=fs.Mesh(x=2), params=(fs.P("x"), fs.P()),
                        in_specs=fs.P("x"), remat="all")  # fmt: skip
    results, expected = part((w, v), x), outputs((w, v), x)
    for index in (0, 0, 1, 0, 1):
        grads = [torch.autograd.grad(y[index], w, retain_graph=True) for y in (results, expected)]
        torch.testing.assert_close(*grads)
