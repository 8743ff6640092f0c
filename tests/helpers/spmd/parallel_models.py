"""Models of one device, and the same in tensor, sequence, data and expert parallel bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fshard as fs

Tensors = dict[str, torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
Step = Callable[[torch.Tensor], torch.Tensor]
BATCH, TIME, WIDTH, HIDDEN, HEAD, VOCABULARY, EXPERTS, CAPACITY = 4, 8, 8, 16, 2, 24, 4, 3
CHECKS = (False, True, "strict")


def same(x: torch.Tensor) -> torch.Tensor:
    return x


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


REPLICATED = ("g1", "g2", "bo", "b2")
