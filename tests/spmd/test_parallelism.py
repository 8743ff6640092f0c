"""The parallelisms of large models, written by hand: gradients of one device, counted traffic.

Each body is what a user would write. What it is checked against is the same model on one
device in float64, and the exact collectives of forward and backward, per mesh axis. The
arguments are pairs: parameters stay where they lie, and nothing is gathered at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import Mesh, P, PartitionSpec, Sharded, Spec

Tensors = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Step = Callable[[torch.Tensor], torch.Tensor]
Counts = dict[tuple[str, str], int]

BATCH, TIME, WIDTH, HIDDEN, HEAD, VOCABULARY, EXPERTS, CAPACITY = 4, 8, 8, 16, 2, 24, 4, 3
CHECKS = (False, True, "strict")
Check = bool | str


def same(x: torch.Tensor) -> torch.Tensor:
    return x


# -- a model of one device ----------------------------------------------------------------


def layer_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, scale.shape, scale)


def attention(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Causal attention of as many heads as the weights are wide."""
    q, k, v = (
        (x @ p[name]).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in ("wq", "wk", "wv")
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2) @ p["wo"]


def mlp(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ p["w1"] + p["b1"]) @ p["w2"]


def block(p: Tensors, x: torch.Tensor, enter: Step = same, leave: Step = same) -> torch.Tensor:
    """A transformer block; `enter` and `leave` bracket what is computed in parallel."""
    x = x + leave(attention(p, enter(layer_norm(x, p["g1"])))) + p["bo"]
    return x + leave(mlp(p, enter(layer_norm(x, p["g2"])))) + p["b2"]


def error(y: torch.Tensor, batch: Tensors) -> torch.Tensor:
    return ((y - batch["t"]) ** 2).mean()


def block_loss(p: Tensors, batch: Tensors) -> torch.Tensor:
    return error(block(p, batch["x"]), batch)


# -- tensor parallel ----------------------------------------------------------------------


def varying(axis: str) -> Step:
    """Megatron's f: nothing forward, an all-reduce backward."""
    return lambda x: fs.pcast(x, axis, to="varying")


def summed(axis: str) -> Step:
    """Megatron's g: an all-reduce forward, nothing backward."""
    return lambda x: fs.psum(x, axis)


def gathered(axis: str) -> Step:
    """Megatron's g of sequences: gather them, scatter the sum of their cotangents."""
    return lambda x: fs.all_gather(x, axis, axis=1, tiled=True)


def scattered(axis: str) -> Step:
    return lambda x: fs.psum_scatter(x, axis, scatter_dimension=1, tiled=True)


def mlp_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    return error(fs.psum(mlp(p, fs.pcast(batch["x"], "tp", to="varying")), "tp") + p["b2"], batch)


def attention_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    x = fs.pcast(batch["x"], "tp", to="varying")
    return error(fs.psum(attention(p, x), "tp") + p["bo"], batch)


def block_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    return error(block(p, batch["x"], varying("tp"), summed("tp")), batch)


def block_sequence(p: Tensors, batch: Tensors) -> torch.Tensor:
    """Between the brackets each rank has a part of the sequence, and all of these parameters."""
    p = p | fs.pcast({name: p[name] for name in REPLICATED}, "tp", to="varying")
    return fs.pmean(error(block(p, batch["x"], gathered("tp"), scattered("tp")), batch), "tp")


# -- a vocabulary in parts ------------------------------------------------------------------


def language_loss(p: Tensors, batch: Tensors) -> torch.Tensor:
    x = p["table"][batch["tokens"]]
    return F.cross_entropy((x @ p["w"] @ p["table"].T).flatten(0, 1), batch["next"].flatten())


def own_rows(tokens: torch.Tensor, rows: int, axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens as rows of this rank's part of the vocabulary, and which of them are in it."""
    local = tokens - rows * fs.axis_index(axis)
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def embed(table: torch.Tensor, tokens: torch.Tensor, axis: str) -> torch.Tensor:
    rows, mine = own_rows(tokens, len(table), axis)
    return fs.psum(table[rows] * mine[..., None], axis)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor, axis: str) -> torch.Tensor:
    """Of logits whose last dim is in parts along the axis: they are never gathered."""
    rows, mine = own_rows(tokens, logits.shape[-1], axis)
    top = fs.pmax(logits.detach().amax(-1), axis)
    logits = logits - fs.pcast(top, axis, to="varying")[..., None]
    chosen = logits.gather(-1, rows[..., None])[..., 0] * mine
    total, target = fs.psum((logits.exp().sum(-1), chosen), axis)
    return (total.log() - target).mean()


def language_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    x = embed(p["table"], batch["tokens"], "tp") @ p["w"]
    return cross_entropy(fs.pcast(x, "tp", to="varying") @ p["table"].T, batch["next"], "tp")


# -- data parallel, fully sharded too -------------------------------------------------------


def whole(p: Tensors, axis: str, sent: torch.dtype | None = None) -> Tensors:
    """A layer's parameters, gathered for use in one launch; their gradients are added in f32."""
    back = None if sent is None else torch.float32
    return fs.all_gather(p, axis, tiled=True, forward_dtype=sent, backward_dtype=back)


def block_sharded(p: Tensors, batch: Tensors) -> torch.Tensor:
    return fs.pmean(block_loss(whole(p, "dp"), batch), "dp")


def block_again(p: Tensors, batch: Tensors) -> torch.Tensor:
    """What is gathered is not kept for the backward pass but gathered again."""

    def layer(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        return block(whole(p, "dp"), x)

    y = checkpoint(layer, p, batch["x"], use_reentrant=False)
    return fs.pmean(error(y, batch), "dp")


def block_mixed(p: Tensors, batch: Tensors) -> torch.Tensor:
    """Parameters in f32; they are gathered, and used, in bf16."""
    half = {name: w.bfloat16() for name, w in whole(p, "dp", torch.bfloat16).items()}
    return fs.pmean(error(block(half, batch["x"].bfloat16()).float(), batch), "dp")


def micro_batches(batch: Tensors) -> list[Tensors]:
    """The batch in two."""
    return [{name: x.chunk(2)[at] for name, x in batch.items()} for at in range(2)]


def block_data(p: Tensors, batch: Tensors) -> torch.Tensor:
    """Two micro-batches, one cast: its transpose adds what their gradients have added up to."""
    p = fs.pcast(p, "dp", to="varying")
    losses = [block_loss(p, each) for each in micro_batches(batch)]
    return fs.pmean(torch.stack(losses).mean(), "dp")


def accumulated(
    loss: Callable[[Tensors, Tensors], torch.Tensor], p: Tensors, batch: Tensors
) -> tuple[torch.Tensor, Tensors]:
    """Loss and gradients taken in the body, a micro-batch at a time; all are averaged at once."""
    # Of the cast values: their gradients are this rank's own, nothing is added up on the way.
    p = {name: w.detach().requires_grad_() for name, w in fs.pcast(p, "dp", to="varying").items()}
    steps = []
    for each in micro_batches(batch):
        value = loss(p, each)
        steps.append((value.detach(), *torch.autograd.grad(value, list(p.values()))))
    value, *grads = (torch.stack(each).mean(0) for each in zip(*steps, strict=True))
    return fs.pmean((value, dict(zip(p, grads, strict=True))), "dp")


def block_data_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    p = fs.pcast(p, "dp", to="varying")
    return fs.pmean(block_tensor(p, batch), "dp")


def block_sharded_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    return fs.pmean(block_tensor(whole(p, "dp"), batch), "dp")


# -- experts --------------------------------------------------------------------------------


def route(router: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best expert of every row, and how much of it is wanted."""
    gate, expert = (x @ router).softmax(-1).max(-1)
    return gate[:, None], expert


def experts(p: Tensors, rows: torch.Tensor) -> torch.Tensor:
    """Every expert on its own rows."""
    return F.gelu(rows @ p["up"]) @ p["down"]


def experts_loss(p: Tensors, batch: Tensors, capacity: int, parts: int = 4) -> torch.Tensor:
    """Row by row: an expert takes the first `capacity` of each part that want it."""
    ys = []
    for x in batch["x"].chunk(parts):
        gate, expert = route(p["router"], x)
        earlier = (expert[:, None] == expert).tril(-1).sum(1)
        each = {"up": p["up"][expert], "down": p["down"][expert]}
        ys.append(experts(each, x[:, None])[:, 0] * gate * (earlier < capacity)[:, None])
    return error(torch.cat(ys), batch)


def to_experts(p: Tensors, x: torch.Tensor, axis: str) -> torch.Tensor:
    """To slots of the experts and back, through one spare slot for what finds none."""
    gate, expert = route(p["router"], x)
    place = (F.one_hot(expert, EXPERTS).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
    slots = EXPERTS * CAPACITY
    slot = torch.where(place < CAPACITY, expert * CAPACITY + place, slots)
    rows = x.new_zeros(slots + 1, WIDTH).index_add(0, slot, x)[:-1]
    there = fs.all_to_all(rows.unflatten(0, (EXPERTS, -1)), axis, 0, 1, tiled=True)
    back = fs.all_to_all(experts(p, there), axis, 1, 0, tiled=True)
    return F.pad(back.flatten(0, 1), (0, 0, 0, 1))[slot] * gate


def to_experts_dropless(p: Tensors, x: torch.Tensor, axis: str) -> torch.Tensor:
    """As many rows to every rank as its experts are wanted for."""
    gate, expert = route(p["router"], x)
    n, here = fs.axis_size(axis), int(fs.axis_index(axis))
    order = expert.argsort(stable=True)
    wanted = fs.all_gather(torch.bincount(expert, minlength=EXPERTS), axis)
    wanted = wanted.unflatten(1, (n, -1))  # rows of a rank, for a rank, for one of its experts
    sizes = wanted.sum(2)
    leave, arrive = sizes.cumsum(1) - sizes, sizes.cumsum(0) - sizes
    rows = x[order]
    there = fs.ragged_all_to_all(
        rows, rows.new_zeros(int(sizes[:, here].sum()), WIDTH),
        leave[here], sizes[here], arrive[here], sizes[:, here], axis_name=axis,
    )  # fmt: skip
    mine = torch.arange(EXPERTS // n).repeat(n).repeat_interleave(wanted[:, here].flatten())
    done = experts({"up": p["up"][mine], "down": p["down"][mine]}, there[:, None])[:, 0]
    back = fs.ragged_all_to_all(
        done, torch.zeros_like(rows),
        arrive[:, here], sizes[:, here], leave[:, here], sizes[here], axis_name=axis,
    )  # fmt: skip
    return back[order.argsort()] * gate


def experts_parallel(
    layer: Callable[[Tensors, torch.Tensor, str], torch.Tensor],
) -> Callable[[Tensors, Tensors], torch.Tensor]:
    def body(p: Tensors, batch: Tensors) -> torch.Tensor:
        p = p | {"router": fs.pcast(p["router"], "ep", to="varying")}
        return fs.pmean(error(layer(p, batch["x"], "ep"), batch), "ep")

    return body


# -- cases ------------------------------------------------------------------------------------


def drawn(shapes: Shapes) -> Tensors:
    """Parameters or inputs, all of which want gradients but the targets."""
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
REPLICATED = ("g1", "g2", "bo", "b2")
LANGUAGE: Shapes = {"table": (VOCABULARY, WIDTH), "w": (WIDTH, WIDTH)}
MIXTURE: Shapes = {
    "router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)
}  # fmt: skip

BY_TENSOR = {
    **dict.fromkeys(("w1", "wq", "wk", "wv"), P(None, "tp")),
    **dict.fromkeys(("b1", "w2", "wo"), P("tp")),
    **dict.fromkeys(REPLICATED, P()),
}
"""Columns, then rows, over tp; the rest whole."""

BY_BOTH = {
    **dict.fromkeys(("w1", "wq", "wk", "wv"), P("dp", "tp")),
    **dict.fromkeys(("b1", "w2", "wo"), P(("tp", "dp"))),
    **dict.fromkeys(REPLICATED, P("dp")),
}
"""The parts of that once more over dp, along dim 0."""


@dataclass(frozen=True)
class Case:
    """A body, what it computes on one device, how its arguments lie, and what it may send."""

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
    """What more is sent where types are tracked: results that may depend on what a host learnt."""

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
        "fully sharded, gathered again", DP, block_again, block_loss,
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
    # The ragged exchange tells its own offsets in a small all_gather each time.
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


# -- what a case gives ------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Loss and gradients of the ranks at hand, one or all, and what ran."""

    losses: tuple[torch.Tensor, ...]
    grads: dict[str, tuple[torch.Tensor, ...]]
    forward: Counts
    backward: Counts


def parts(local: Any) -> tuple[torch.Tensor, ...]:
    """All shards of a simulation, or the one of this process."""
    return local if isinstance(local, tuple) else (local,)


def placed(xs: Tensors, mesh: Mesh, specs: Mapping[str, PartitionSpec]) -> dict[str, Sharded]:
    """Pairs whose locals begin a graph."""
    pairs = {}
    for name, x in xs.items():
        pair = fs.shard(x.detach(), Spec(mesh, specs[name], shape=x.shape, dtype=x.dtype))
        leaves = tuple(t.clone().requires_grad_(x.requires_grad) for t in parts(pair.local))
        pairs[name] = Sharded(leaves if isinstance(pair.local, tuple) else leaves[0], pair.spec)
    return pairs


def measure(case: Case, check: Check) -> Found:
    """Run a case forward and backward, simulated or as the rank that this process is."""
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
    return Found(losses, grads, dict(log.forward.counts), dict(log.backward.counts))  # type: ignore[arg-type]


def compare(case: Case, check: Check, found: Found, ranks: Sequence[int]) -> None:
    """Assert that the ranks' loss, gradients and traffic are those of the case."""
    params, batch = case.arguments()
    want = case.single(params, batch)
    names = list(found.grads)
    grads = dict(
        zip(names, torch.autograd.grad(want, [(params | batch)[n] for n in names]), strict=True)
    )
    for rank, loss in zip(ranks, found.losses, strict=True):
        torch.testing.assert_close(loss, want.detach(), atol=1e-12, rtol=0)
        for name in names:
            spec = Spec(
                case.mesh, case.param_specs.get(name, case.batch_spec), shape=grads[name].shape
            )
            mine, theirs = found.grads[name][ranks.index(rank)], grads[name][spec.index(rank)]
            assert torch.allclose(mine, theirs, atol=1e-12, rtol=0), f"{name} on rank {rank}"
    assert found.forward == case.forward | (case.compared if check else {})
    assert found.backward == case.backward


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_and_traffic(case: Case, check: Check) -> None:
    compare(case, check, measure(case, check), case.mesh.ranks)


@pytest.mark.parametrize("name", ["block by tensor", "data"])
def test_casts_that_types_insert(name: str) -> None:
    """Without a cast in the body: one for each tensor, where it first meets what varies."""
    (case,) = (each for each in CASES if each.name == name)
    if name == "data":
        body = lambda p, batch: fs.pmean(block_loss(p, batch), "dp")  # noqa: E731
        bare = replace(case, body=body, backward={("all_reduce", "dp"): len(BLOCK)})
    else:
        bare = replace(
            case, body=lambda p, batch: error(block(p, batch["x"], leave=summed("tp")), batch)
        )
    compare(bare, True, measure(bare, True), bare.mesh.ranks)


# -- gradients taken in the body --------------------------------------------------------------

ACCUMULATED = {
    "data": (Mesh(dp=2), block_loss, dict.fromkeys(BLOCK, P()), {}),
    "data and tensor": (BOTH, block_tensor, BY_TENSOR, {("all_reduce", "tp"): 4}),
}
"""Mesh, loss, where parameters lie, and what two micro-batches send backward."""


def accumulate(name: str, check: Check) -> tuple[torch.Tensor, Tensors, Counts, Counts]:
    """Global loss and gradients of a step taken in the body, and what ran."""
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
    whole = {name: fs.unshard(grad) for name, grad in grads.items()}
    return fs.unshard(value), whole, dict(log.forward.counts), dict(log.backward.counts)  # type: ignore[arg-type]


def compare_accumulated(name: str, found: tuple[torch.Tensor, Tensors, Counts, Counts]) -> None:
    loss, grads, forward, backward = found
    params = drawn(BLOCK)
    want = block_loss(params, drawn(ACTIVATIONS))
    torch.testing.assert_close(loss, want.detach(), atol=1e-12, rtol=0)
    for (word, grad), each in zip(
        grads.items(), torch.autograd.grad(want, list(params.values())), strict=True
    ):
        assert torch.allclose(grad, each, atol=1e-12, rtol=0), word
    sent = ACCUMULATED[name][3]
    assert forward == sent | {("all_reduce", "dp"): 1}
    assert backward == sent


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", ACCUMULATED)
def test_one_all_reduce_per_accumulated_step(name: str, check: Check) -> None:
    compare_accumulated(name, accumulate(name, check))


# -- mixed precision ----------------------------------------------------------------------------


def in_f32(shapes: Shapes) -> Tensors:
    return {
        name: x.detach().float().requires_grad_(x.requires_grad)
        for name, x in drawn(shapes).items()
    }


def mixed_by_hand(reduced_in: torch.dtype) -> tuple[torch.Tensor, Tensors]:
    """Loss and gradients of two halves of a batch in bf16, added in another dtype."""
    params = {name: w.detach() for name, w in in_f32(BLOCK).items()}
    losses, grads = [], []
    for batch in micro_batches(in_f32(ACTIVATIONS)):
        half = {name: w.bfloat16().requires_grad_() for name, w in params.items()}
        losses.append(error(block(half, batch["x"].bfloat16()).float(), batch))
        grads.append(torch.autograd.grad(losses[-1] / 2, list(half.values())))
    sums = (
        sum((g.to(reduced_in) for g in each), torch.zeros((), dtype=reduced_in))
        for each in zip(*grads, strict=True)
    )
    grad = {name: g.float() for name, g in zip(params, sums, strict=True)}
    return (losses[0].detach() + losses[1].detach()) / 2, grad


def mixed(check: Check) -> tuple[torch.Tensor, Tensors, dict[str, Counts]]:
    """Global loss and gradients with two ranks, and the bytes that ran."""
    mesh = Mesh(dp=2)
    specs = dict.fromkeys(BLOCK, P("dp")), dict.fromkeys(ACTIVATIONS, P("dp"))
    pairs = [
        placed(in_f32(shapes), mesh, each)
        for shapes, each in zip((BLOCK, ACTIVATIONS), specs, strict=True)
    ]
    f = fs.shard_map(block_mixed, mesh=mesh, in_specs=P("dp"), out_specs=P(), check=check)
    leaves = [parts(pair.local) for pair in pairs[0].values()]
    with fs.comm_log() as log:
        losses = f(*pairs)
        flat = iter(torch.autograd.grad(parts(losses.local), [t for ts in leaves for t in ts]))
    grads = {}
    for (name, pair), ts in zip(pairs[0].items(), leaves, strict=True):
        each = tuple(next(flat) for _ in ts)
        local = each if isinstance(pair.local, tuple) else each[0]
        grads[name] = fs.unshard((local, pair.spec.dual))
    sent = {"forward": dict(log.forward.bytes), "backward": dict(log.backward.bytes)}
    return fs.unshard(losses).detach(), grads, sent  # type: ignore[return-value]


def compare_mixed(found: tuple[torch.Tensor, Tensors, dict[str, Counts]]) -> None:
    """Equal to the last bit: two addends have one sum."""
    loss, grads, sent = found
    want_loss, want = mixed_by_hand(torch.float32)
    rounded = mixed_by_hand(torch.bfloat16)[1]
    torch.testing.assert_close(loss, want_loss, atol=0, rtol=0)
    for name, grad in grads.items():
        assert torch.equal(grad, want[name]), name
    assert any(not torch.equal(want[name], rounded[name]) for name in want)
    local = sum(w.numel() for w in in_f32(BLOCK).values()) // 2
    assert sent == {
        "forward": {("all_gather", "dp"): 2 * local, ("all_reduce", "dp"): 4},
        "backward": {("reduce_scatter", "dp"): 4 * local},
    }


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_travel_in_bf16_and_gradients_in_f32(check: Check) -> None:
    compare_mixed(mixed(check))
