"""Coalesced redistributions of partitioned functions: launches, gradients, order of lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from fshard.partition.ir import LaunchBatch, Operation, WaitBatch
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)
LAYERS = 4
Gradients = list[torch.Tensor | None]


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (8,)] * LAYERS
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def chain(params: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss of all layers but the last, and one of the last."""
    for w, b in zip(params[:-2:2], params[1:-2:2], strict=True):
        x = torch.tanh(x @ w + b)
    return x.square().sum(), torch.tanh(x @ params[-2] + params[-1]).sum()


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(4, 8)


def gradients(
    losses: tuple[torch.Tensor, torch.Tensor], leaves: list[torch.Tensor]
) -> tuple[Gradients, Gradients]:
    """Return the gradients of the first loss, and second-order ones of both."""
    firsts = torch.autograd.grad(losses[0], leaves, retain_graph=True, allow_unused=True)
    grads = torch.autograd.grad(losses[0] + losses[1], leaves, create_graph=True)
    # Every rank has the gradient of a replicated leaf: the norm is that of one of them.
    products = [(grad * leaf.detach()).sum() for grad, leaf in zip(grads, leaves, strict=True)]
    seconds = torch.autograd.grad(torch.stack(products).sum(), leaves)
    return [*firsts], [*seconds]


def sharded_gradients(layout: fs.PartitionSpec) -> tuple[Any, Any, dict[str, Any]]:
    """Return the gradients of the partitioned chain, and the collectives of its first call."""
    spec = lambda p, x: fs.Spec(MESH, p, shape=x.shape, dtype=x.dtype)  # noqa: E731
    pairs = [fs.shard(p, spec(layout, p)) for p in parameters()]
    locals_ = [(p.local,) if isinstance(p.local, torch.Tensor) else p.local for p in pairs]
    shards = [tuple(x.clone().requires_grad_() for x in xs) for xs in locals_]
    params = [
        fs.Sharded(xs if len(xs) > 1 else xs[0], pair.spec)
        for xs, pair in zip(shards, pairs, strict=True)
    ]
    leaves = [x for xs in shards for x in xs]
    part = fs.partition(chain, mesh=MESH, in_specs=(layout, P("x")), out_specs=P())
    x = fs.shard(batch(), spec(P("x"), batch()))
    with fs.comm_log() as log:
        outputs = part(params, x)
        (fs.unshard(outputs[0]) + fs.unshard(outputs[1])).backward()
    grads = gradients(tuple(map(fs.unshard, part(params, x))), leaves)
    return *grads, log.to_dict()


def on_rank(layout: fs.PartitionSpec) -> Any:
    fs.init(MESH)
    return sharded_gradients(layout)


def check(layout: fs.PartitionSpec, results: Any, ranks: range) -> None:
    """Compare gradients of some ranks with those of one device."""
    leaves = [param.requires_grad_() for param in parameters()]
    for grads, wants in zip(results[:2], gradients(chain(leaves, batch()), leaves), strict=True):
        rows = [grads[i : i + len(ranks)] for i in range(0, len(grads), len(ranks))]
        for row, expected, leaf in zip(rows, wants, leaves, strict=True):
            spec = fs.Spec(MESH, layout, shape=leaf.shape, dtype=leaf.dtype)
            locals_ = (None,) * 2 if expected is None else fs.shard(expected, spec).local
            for rank, grad in zip(ranks, row, strict=True):
                torch.testing.assert_close(grad, locals_[rank], rtol=0, atol=1e-12)


def check_counts(layout: fs.PartitionSpec, log: dict[str, Any]) -> None:
    counts = {(phase, i["op"]): i["count"] for phase in ("forward", "backward") for i in log[phase]}
    gathers = {("forward", "all_gather"): 1, ("backward", "reduce_scatter"): 1}
    sums = {("backward", "all_reduce"): 1}
    assert counts == {("forward", "all_reduce"): 1, **(gathers if layout == P("x") else sums)}


@pytest.mark.parametrize("layout", [P(), P("x")], ids=str)
def test_coalesced_gradients_are_those_of_one_device(layout: fs.PartitionSpec) -> None:
    results = sharded_gradients(layout)
    check(layout, results, range(2))
    check_counts(layout, results[2])


@pytest.mark.parametrize("layout", [P(), P("x")], ids=str)
def test_coalesced_gradients_on_processes(layout: fs.PartitionSpec) -> None:
    for rank, results in enumerate(run_ranks(2, on_rank, layout)):
        check(layout, results, range(rank, rank + 1))
        check_counts(layout, results[2])


def gradient_memories() -> int:
    """Return the number of storages of the gradients of all parameters."""
    fs.init(MESH)
    params = [param.requires_grad_() for param in parameters()]
    pairs = [fs.Sharded(p, fs.Spec(MESH, P(), shape=p.shape, dtype=p.dtype)) for p in params]
    part = fs.partition(chain, mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    x = fs.shard(batch(), fs.Spec(MESH, P("x"), shape=(4, 8), dtype=torch.float64))
    sum(fs.unshard(loss) for loss in part(pairs, x)).backward()
    return len({p.grad.untyped_storage().data_ptr() for p in params if p.grad is not None})


def test_gradients_of_a_bucket_are_not_copied() -> None:
    assert run_ranks(2, gradient_memories) == [1, 1]


def gradients_of_three_steps() -> tuple[list[list[torch.Tensor]], list[int]]:
    """Return the gradients of steps of inputs 1, 2, 3, and their addresses; the third's are kept.

    The gradients of the first step are held until the end, those of the second are freed.
    """
    fs.init(MESH)
    params = [param.requires_grad_() for param in parameters()]
    pairs = [fs.Sharded(p, fs.Spec(MESH, P(), shape=p.shape, dtype=p.dtype)) for p in params]
    part = fs.partition(chain, mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    values: list[list[torch.Tensor]] = []
    held, addresses = [], []
    for step in (1, 2, 3):
        x = fs.shard(step * batch(), fs.Spec(MESH, P("x"), shape=(4, 8), dtype=torch.float64))
        fs.unshard(part(pairs, x)[0]).backward()
        grads = [p.grad for p in params if p.grad is not None]
        addresses.append(grads[0].data_ptr())
        values.append([grad.clone() for grad in grads])
        if step == 1:
            held = grads
        for p in params:
            p.grad = None
        del grads
    assert all(map(torch.equal, held, values[0]))
    return values, addresses


def test_memory_of_a_bucket_is_used_again_once_its_gradients_are_freed() -> None:
    for values, addresses in run_ranks(2, gradients_of_three_steps):
        assert addresses[0] != addresses[1] == addresses[2]
        for step, grads in zip((1, 2, 3), values, strict=True):
            leaves = [param.requires_grad_() for param in parameters()]
            wants = torch.autograd.grad(chain(leaves, step * batch())[0], leaves[:-2])
            for grad, want in zip(grads, wants, strict=True):
                torch.testing.assert_close(grad, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("width", "buckets"), [(256, [[16], [6, 10]]), (1024, [[3, 5, 5, 3], [2, 3, 3, 3, 3, 2]])]
)
def test_gradients_are_split_into_buckets_by_their_startup(
    width: int, buckets: list[list[int]]
) -> None:
    params = [torch.empty(width, width, device="meta", requires_grad=True) for _ in range(16)]
    for topology, counts in zip((fs.Topology.node(), fs.Topology.cpu_host()), buckets, strict=True):
        part = fs.partition(large_chain, mesh=MESH, in_specs=(P(), P("x")), topology=topology)
        schedule = part.trace(params, torch.empty(8, width, device="meta")).schedule
        launches = [line for line in schedule if isinstance(line, LaunchBatch)]
        # 4 and 64 MiB, at most 25 in a bucket; a startup takes as long as 30 MB on a node,
        # and 0.7 MB on a host. The first bucket, the last one to be reduced, is smaller.
        assert [len(line.sources) for line in launches] == counts
        # Nothing overlaps with a single one.
        assert [line.waits for line in launches] == [len(counts) == 1] * len(counts)


def test_coalesced_gradients_of_simulated_ranks() -> None:
    for rank, results in enumerate(fs.simulate(MESH, lambda: sharded_gradients(P("x")))):
        check(P("x"), results, range(rank, rank + 1))


def test_transforms_of_a_coalesced_function() -> None:
    params, x = parameters(), batch()
    loss = lambda params: chain(params, x)[0]  # noqa: E731
    part = fs.partition(loss, mesh=MESH, in_specs=(P("x"),), out_specs=P())
    tangents = [torch.ones_like(param) for param in params]
    for run in (
        lambda f: torch.func.grad(f)(params),
        lambda f: torch.func.jvp(f, (params,), (tangents,)),
        lambda f: torch.func.vmap(f)([torch.stack([param, 2 * param]) for param in params]),
    ):
        torch.testing.assert_close(run(part), run(loss))


def large_chain(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = torch.tanh(x @ w)
    return x.sum()


def test_sharded_parameters_are_gathered_one_bucket_ahead() -> None:
    params = [torch.empty(1024, 1024, device="meta", requires_grad=True) for _ in range(6)]
    x = torch.empty(8192, 1024, device="meta")
    part = fs.partition(large_chain, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P())
    schedule = part.trace(params, x).schedule
    kinds = {LaunchBatch: "L", WaitBatch: "W", Operation: "."}
    order = "".join([kinds.get(type(line), "") for line in schedule])
    # The first bucket has one parameter of 4 MiB, others have two, and the last one has what is
    # left. The next one is launched before the last is waited for.
    assert order == "LLW..LW....LW....W..."


@pytest.mark.parametrize(("width", "count"), [(128, 1), (512, 4)])
def test_few_parameters_have_their_memory_twice_as_they_are_gathered(
    width: int, count: int
) -> None:
    params = [torch.empty(width, width, device="meta", requires_grad=True) for _ in range(16)]
    part = fs.partition(large_chain, mesh=MESH, in_specs=(P("x"), P("x")), out_specs=P())
    schedule = part.trace(params, torch.empty(8192, width, device="meta")).schedule
    # 1 and 16 MiB; a startup takes as long as 30 MB.
    assert sum(isinstance(line, LaunchBatch) for line in schedule) == count


def masked_mean(w: torch.Tensor, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(torch.tanh(x @ w), targets)


def test_counts_of_targets_are_sent_before_the_model_runs() -> None:
    x, targets = torch.ones(4, 8), torch.arange(4)
    part = fs.partition(masked_mean, mesh=MESH, in_specs=(P(), P("x"), P("x")))
    lines = part.trace(torch.ones(8, 8), x, targets).schedule
    names = [line.name if isinstance(line, Operation) else type(line).__name__ for line in lines]
    assert names.index("LaunchBatch") < names.index("matmul") < names.index("WaitBatch")


def test_explain_and_graph_show_coalesced_launches() -> None:
    part = fs.partition(chain, mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    call = part.trace([param.requires_grad_() for param in parameters()], batch())
    text = " ".join(str(call).split())
    assert "in one launch: ← all_reduce of 8 over x" in text
    assert "in one launch: → all_reduce of 2 over x" in text
    assert "launches 1 1 " in text
    assert call.cost(backward=True).launches == 1
    assert "launch_invariant_to_reduced" in call.graph().code


def loss_of(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w, b in zip(params[::2], params[1::2], strict=True):
        x = torch.tanh(x @ w + b)
    return x.square().mean()


def sgd(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Take gradients and write the parameters, as README's training step."""
    loss = loss_of(params, x)
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for w, g in zip(params, grads, strict=True):
            w.sub_(0.1 * g)
    return loss.detach()


def clipped(params: list[torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors that are clipped by their global norm, one norm after the other."""
    norms = [torch.linalg.vector_norm(w.detach()) for w in params]
    scale = (1 / torch.linalg.vector_norm(torch.stack(norms))).clamp(max=1)
    return [w.detach() * scale for w in params]


@pytest.mark.parametrize(("step", "layout"), [(sgd, P()), (clipped, P("x"))])
def test_gradients_and_norms_in_a_function_are_one_launch(
    step: Any, layout: fs.PartitionSpec
) -> None:
    ours, expected = ([w.requires_grad_() for w in parameters()] for _ in range(2))
    out_specs = P() if step is sgd else layout
    mesh = Mesh(x=4)
    part = fs.partition(step, mesh=mesh, params=layout, in_specs=P("x"), out_specs=out_specs)
    with fs.comm_log() as log:
        results = part(ours, batch())
    torch.testing.assert_close(results, step(expected, batch()), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    # Results that are global tensors are gathered one by one.
    assert {op: n for (op, _), n in log.counts.items() if op != "all_gather"} == {"all_reduce": 1}
