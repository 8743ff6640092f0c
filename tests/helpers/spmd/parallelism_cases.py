"""Cases of parallelism: arguments, specs and traffic, measured and compared with one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P, PartitionSpec, Sharded, Spec
from tests.helpers.spmd.parallel_models import (
    BATCH,
    CAPACITY,
    EXPERTS,
    HIDDEN,
    REPLICATED,
    TIME,
    VOCABULARY,
    WIDTH,
    Shapes,
    Tensors,
    accumulated,
    attention,
    attention_tensor,
    block,
    block_data,
    block_data_tensor,
    block_loss,
    block_mixed,
    block_regathered,
    block_sequence,
    block_sharded,
    block_sharded_tensor,
    block_tensor,
    error,
    experts_loss,
    experts_parallel,
    language_loss,
    language_tensor,
    micro_batches,
    mlp,
    mlp_tensor,
    to_experts,
    to_experts_dropless,
)

Counts = dict[tuple[str, str], int]
Check = bool | str


def drawn(shapes: Shapes) -> Tensors:
    """Return parameters or inputs; all but the targets require grad."""
    source = torch.Generator().manual_seed(0)
    drawn = {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}
    return {name: (x.double() / 2).requires_grad_(name != "t") for name, x in drawn.items()}


ACTIVATIONS: Shapes = {"x": (BATCH, TIME, WIDTH), "t": (BATCH, TIME, WIDTH)}
ROWS: Shapes = {"x": (32, WIDTH), "t": (32, WIDTH)}
MLP: Shapes = {"w1": (WIDTH, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, WIDTH), "b2": (WIDTH,)}
ATTENTION: Shapes = {
    **dict.fromkeys(("wq", "wk", "wv"), (WIDTH, WIDTH)), "wo": (WIDTH, WIDTH), "bo": (WIDTH,)
}  # fmt: skip
BLOCK: Shapes = {**MLP, **ATTENTION, "g1": (WIDTH,), "g2": (WIDTH,)}
LANGUAGE: Shapes = {"table": (VOCABULARY, WIDTH), "w": (WIDTH, WIDTH)}
MIXTURE: Shapes = {
    "router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)
}  # fmt: skip
BY_TENSOR = {
    **dict.fromkeys(("w1", "wq", "wk", "wv"), P(None, "tp")),
    **dict.fromkeys(("b1", "w2", "wo"), P("tp")),
    **dict.fromkeys(REPLICATED, P()),
}
"""Columns, then rows, over tp; the rest replicated."""
BY_BOTH = {
    **dict.fromkeys(("w1", "wq", "wk", "wv"), P("dp", "tp")),
    **dict.fromkeys(("b1", "w2", "wo"), P(("tp", "dp"))),
    **dict.fromkeys(REPLICATED, P("dp")),
}
"""`BY_TENSOR` sharded once more over dp, along dim 0."""


@dataclass(frozen=True)
class Case:
    """Parallel body, its model on one device, the specs of its arguments, and its traffic."""

    name: str
    mesh: Mesh
    body: Callable[[Tensors, Tensors], torch.Tensor]
    single: Callable[[Tensors, Tensors], torch.Tensor]
    params: Shapes
    param_specs: Mapping[str, PartitionSpec]
    batch_spec: PartitionSpec
    forward: Counts
    backward: Counts
    compared: Counts = field(default_factory=dict)
    """Traffic with type tracking, for results that depend on values read by the host.

    Processes gather twice more: the places of their reads, and the collectives of their gradients.
    """

    def arguments(self) -> tuple[Tensors, Tensors]:
        if self.params is LANGUAGE:
            source = torch.Generator().manual_seed(1)
            tokens = torch.randint(VOCABULARY, (2, BATCH, TIME), generator=source)
            return drawn(self.params), {"tokens": tokens[0], "next": tokens[1]}
        return drawn(self.params), drawn(ROWS if self.params is MIXTURE else ACTIVATIONS)


DP, TP, EP, BOTH = Mesh(dp=4), Mesh(tp=4), Mesh(ep=4), Mesh(dp=2, tp=2)
CASES = [
    Case(
        "mlp by tensor", TP, mlp_tensor, lambda p, b: error(mlp(p, b["x"]) + p["b2"], b),
        MLP, BY_TENSOR, P(), {("all_reduce", "tp"): 1}, {("all_reduce", "tp"): 1},
    ),
    Case(
        "attention by tensor", TP, attention_tensor,
        lambda p, b: error(attention(p, b["x"]) + p["bo"], b),
        ATTENTION, BY_TENSOR, P(), {("all_reduce", "tp"): 1}, {("all_reduce", "tp"): 1},
    ),
    Case(
        "block by tensor", TP, block_tensor, block_loss,
        BLOCK, BY_TENSOR, P(), {("all_reduce", "tp"): 2}, {("all_reduce", "tp"): 2},
    ),
    Case(
        "block by tensor and sequence", TP, block_sequence, block_loss,
        BLOCK, BY_TENSOR, P(None, "tp"),
        {("all_gather", "tp"): 2, ("reduce_scatter", "tp"): 2, ("all_reduce", "tp"): 1},
        {("reduce_scatter", "tp"): 2, ("all_gather", "tp"): 2, ("all_reduce", "tp"): 1},
    ),
    Case(
        "vocabulary by tensor", TP, language_tensor, language_loss,
        LANGUAGE, {"table": P("tp"), "w": P()}, P(),
        {("all_reduce", "tp"): 3}, {("all_reduce", "tp"): 1},
    ),
    Case(
        "fully sharded", DP, block_sharded, block_loss,
        BLOCK, dict.fromkeys(BLOCK, P("dp")), P("dp"),
        {("all_gather", "dp"): 1, ("all_reduce", "dp"): 1}, {("reduce_scatter", "dp"): 1},
    ),
    Case(
        "fully sharded, gathered again", DP, block_regathered, block_loss,
        BLOCK, dict.fromkeys(BLOCK, P("dp")), P("dp"),
        {("all_gather", "dp"): 1, ("all_reduce", "dp"): 1},
        {("all_gather", "dp"): 1, ("reduce_scatter", "dp"): 1},
    ),
    Case(
        "data", Mesh(dp=2), block_data, block_loss,
        BLOCK, dict.fromkeys(BLOCK, P()), P("dp"),
        {("all_reduce", "dp"): 1}, {("all_reduce", "dp"): 1},
    ),
    Case(
        "experts with capacity", EP, experts_parallel(to_experts),
        lambda p, b: experts_loss(p, b, CAPACITY),
        MIXTURE, {"router": P(), "up": P("ep"), "down": P("ep")}, P("ep"),
        {("all_to_all", "ep"): 2, ("all_reduce", "ep"): 1},
        {("all_to_all", "ep"): 2, ("all_reduce", "ep"): 1},
    ),
    # Each ragged exchange gathers its offsets in a small all_gather.
    Case(
        "experts, dropless", Mesh(ep=2), experts_parallel(to_experts_dropless),
        lambda p, b: experts_loss(p, b, capacity=99),
        MIXTURE, {"router": P(), "up": P("ep"), "down": P("ep")}, P("ep"),
        {("all_gather", "ep"): 3, ("ragged_all_to_all", "ep"): 2, ("all_reduce", "ep"): 1},
        {("ragged_all_to_all", "ep"): 2, ("all_reduce", "ep"): 1},
        compared={("all_gather", "ep"): 5},
    ),
    Case(
        "data and tensor", BOTH, block_data_tensor, block_loss,
        BLOCK, BY_TENSOR, P("dp"),
        {("all_reduce", "tp"): 2, ("all_reduce", "dp"): 1},
        {("all_reduce", "tp"): 2, ("all_reduce", "dp"): 1},
    ),
    Case(
        "fully sharded and tensor", BOTH, block_sharded_tensor, block_loss,
        BLOCK, BY_BOTH, P("dp"),
        {("all_gather", "dp"): 1, ("all_reduce", "tp"): 2, ("all_reduce", "dp"): 1},
        {("reduce_scatter", "dp"): 1, ("all_reduce", "tp"): 2},
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """Loss and gradients of one rank or all, and the collectives that ran."""

    losses: tuple[torch.Tensor, ...]
    grads: dict[str, tuple[torch.Tensor, ...]]
    forward: Counts
    backward: Counts


def parts(local: Any) -> tuple[torch.Tensor, ...]:
    """Return all shards of a simulation, or the one of this process."""
    return local if isinstance(local, tuple) else (local,)


def placed(xs: Tensors, mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> dict[str, Sharded]:
    """Return pairs whose locals are leaves."""
    pairs = {}
    for name, x in xs.items():
        pair = fs.shard(x.detach(), Spec(mesh, specs[name], shape=x.shape, dtype=x.dtype))
        leaves = tuple(t.clone().requires_grad_(x.requires_grad) for t in parts(pair.local))
        pairs[name] = Sharded(leaves if isinstance(pair.local, tuple) else leaves[0], pair.spec)
    return pairs


def measure(case: Case, check: Check) -> Measurement:
    """Run a case forward and backward, simulated or as this process's rank."""
    params, batch = case.arguments()
    batch_specs = dict.fromkeys(batch, case.batch_spec)
    param_specs = {name: case.param_specs[name] for name in params}
    pairs = placed(params, case.mesh, param_specs), placed(batch, case.mesh, batch_specs)
    leaves = {
        name: parts(pair.local)
        for tree in pairs for name, pair in tree.items() if parts(pair.local)[0].requires_grad
    }  # fmt: skip
    f = fs.shard_map(
        case.body, mesh=case.mesh, in_specs=(param_specs, batch_specs), out_specs=P(), check=check
    )
    with fs.comm_log() as log:
        losses = parts(f(*pairs).local)
        flat = iter(torch.autograd.grad(losses, [t for ts in leaves.values() for t in ts]))
    grads = {name: tuple(next(flat) for _ in ts) for name, ts in leaves.items()}
    losses = tuple(loss.detach() for loss in losses)
    return Measurement(losses, grads, dict(log.forward.counts), dict(log.backward.counts))  # type: ignore[arg-type]


def compare(case: Case, check: Check, results: Measurement, ranks: Sequence[int]) -> None:
    """Assert that the ranks' loss, gradients and traffic are those of the case."""
    params, batch = case.arguments()
    expected = case.single(params, batch)
    names = list(results.grads)
    grads = dict(
        zip(names, torch.autograd.grad(expected, [(params | batch)[n] for n in names]), strict=True)
    )
    for rank, loss in zip(ranks, results.losses, strict=True):
        torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=0)
        for name in names:
            spec = Spec(
                case.mesh, case.param_specs.get(name, case.batch_spec), shape=grads[name].shape
            )
            mine, theirs = results.grads[name][ranks.index(rank)], grads[name][spec.index(rank)]
            assert torch.allclose(mine, theirs, atol=1e-12, rtol=0), f"{name} on rank {rank}"
    compared = case.compared if check else {}
    further = 2 if len(ranks) < case.mesh.size else 0
    assert results.forward == case.forward | {key: n + further for key, n in compared.items()}
    assert results.backward == case.backward


ACCUMULATED = {
    "data": (Mesh(dp=2), block_loss, dict.fromkeys(BLOCK, P()), {}),
    "data and tensor": (BOTH, block_tensor, BY_TENSOR, {("all_reduce", "tp"): 4}),
}
"""Mesh, loss, specs of parameters, and backward traffic of two micro-batches."""


def accumulate(name: str, check: Check) -> tuple[torch.Tensor, Tensors, Counts, Counts]:
    """Return global loss and gradients of a step in the body, and the collectives that ran."""
    mesh, loss, specs, _ = ACCUMULATED[name]
    params, batch = (
        {name: x.detach() for name, x in drawn(shapes).items()} for shapes in (BLOCK, ACTIVATIONS)
    )
    batch_specs = dict.fromkeys(batch, P("dp"))
    param_specs = {name: specs[name] for name in params}
    step = fs.shard_map(
        partial(accumulated, loss), mesh=mesh, in_specs=(param_specs, batch_specs),
        out_specs=(P(), param_specs), check=check,
    )  # fmt: skip
    pairs = placed(params, mesh, param_specs), placed(batch, mesh, batch_specs)
    with fs.comm_log() as log:
        value, grads = step(*pairs)
    full = {name: fs.unshard(grad) for name, grad in grads.items()}
    return fs.unshard(value), full, dict(log.forward.counts), dict(log.backward.counts)  # type: ignore[arg-type]


def compare_accumulated(name: str, results: tuple[torch.Tensor, Tensors, Counts, Counts]) -> None:
    loss, grads, forward, backward = results
    params = drawn(BLOCK)
    expected = block_loss(params, drawn(ACTIVATIONS))
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=0)
    for (word, grad), item in zip(
        grads.items(), torch.autograd.grad(expected, list(params.values())), strict=True
    ):
        assert torch.allclose(grad, item, atol=1e-12, rtol=0), word
    sent = ACCUMULATED[name][3]
    assert forward == sent | {("all_reduce", "dp"): 1}
    assert backward == sent


def in_f32(shapes: Shapes) -> Tensors:
    return {
        name: x.detach().float().requires_grad_(x.requires_grad)
        for name, x in drawn(shapes).items()
    }


def mixed_by_hand(reduced_in: torch.dtype) -> tuple[torch.Tensor, Tensors]:
    """Return loss and gradients of two halves of a batch in bf16, added in `reduced_in`."""
    params = {name: w.detach() for name, w in in_f32(BLOCK).items()}
    losses, grads = [], []
    for batch in micro_batches(in_f32(ACTIVATIONS)):
        half = {name: w.bfloat16().requires_grad_() for name, w in params.items()}
        losses.append(error(block(half, batch["x"].bfloat16()).float(), batch))
        grads.append(torch.autograd.grad(losses[-1] / 2, list(half.values())))
    sums = (
        sum((g.to(reduced_in) for g in item), torch.zeros((), dtype=reduced_in))
        for item in zip(*grads, strict=True)
    )
    grad = {name: g.float() for name, g in zip(params, sums, strict=True)}
    return (losses[0].detach() + losses[1].detach()) / 2, grad


def mixed(check: Check) -> tuple[torch.Tensor, Tensors, dict[str, Counts]]:
    """Return global loss and gradients of two ranks, and the bytes sent."""
    mesh = Mesh(dp=2)
    specs = dict.fromkeys(BLOCK, P("dp")), dict.fromkeys(ACTIVATIONS, P("dp"))
    pairs = [
        placed(in_f32(shapes), mesh, item)
        for shapes, item in zip((BLOCK, ACTIVATIONS), specs, strict=True)
    ]
    f = fs.shard_map(block_mixed, mesh=mesh, in_specs=P("dp"), out_specs=P(), check=check)
    leaves = [parts(pair.local) for pair in pairs[0].values()]
    with fs.comm_log() as log:
        losses = f(*pairs)
        flat = iter(torch.autograd.grad(parts(losses.local), [t for ts in leaves for t in ts]))
    grads = {}
    for (name, pair), ts in zip(pairs[0].items(), leaves, strict=True):
        item = tuple(next(flat) for _ in ts)
        local = item if isinstance(pair.local, tuple) else item[0]
        grads[name] = fs.unshard((local, pair.spec.dual))
    sent = {"forward": dict(log.forward.bytes), "backward": dict(log.backward.bytes)}
    return fs.unshard(losses).detach(), grads, sent  # type: ignore[return-value]


def compare_mixed(results: tuple[torch.Tensor, Tensors, dict[str, Counts]]) -> None:
    """Assert bit-equal results, as a sum of two values has one order."""
    loss, grads, sent = results
    want_loss, expected = mixed_by_hand(torch.float32)
    rounded = mixed_by_hand(torch.bfloat16)[1]
    torch.testing.assert_close(loss, want_loss, atol=0, rtol=0)
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name
    assert any(not torch.equal(expected[name], rounded[name]) for name in expected)
    local = sum(w.numel() for w in in_f32(BLOCK).values()) // 2
    assert sent == {
        "forward": {("all_gather", "dp"): 2 * local, ("all_reduce", "dp"): 4},
        "backward": {("reduce_scatter", "dp"): 4 * local},
    }
