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


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def layer_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, scale.shape, scale)


def attention(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Return causal attention; the width of the weights determines the number of heads."""
    q, k, v = (
        (x @ p[name]).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in ("wq", "wk", "wv")
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2) @ p["wo"]


def mlp(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ p["w1"] + p["b1"]) @ p["w2"]


def block(
    p: Tensors, x: torch.Tensor, enter: Step = identity, leave: Step = identity
) -> torch.Tensor:
    """Return a transformer block; `enter` and `leave` enclose its parallel parts."""
    x = x + leave(attention(p, enter(layer_norm(x, p["g1"])))) + p["bo"]
    return x + leave(mlp(p, enter(layer_norm(x, p["g2"])))) + p["b2"]


def error(y: torch.Tensor, batch: Tensors) -> torch.Tensor:
    return ((y - batch["t"]) ** 2).mean()


def block_loss(p: Tensors, batch: Tensors) -> torch.Tensor:
    return error(block(p, batch["x"]), batch)


def vary_over(axis: str) -> Step:
    """Return Megatron's f: nothing forward, an all-reduce backward."""
    return lambda x: fs.pcast(x, axis, to="varying")


def sum_over(axis: str) -> Step:
    """Return Megatron's g: an all-reduce forward, nothing backward."""
    return lambda x: fs.psum(x, axis)


def gather_sequence(axis: str) -> Step:
    """Return Megatron's g for sequences: all-gather forward, reduce-scatter backward."""
    return lambda x: fs.all_gather(x, axis, axis=1, tiled=True)


def scatter_sequence(axis: str) -> Step:
    return lambda x: fs.psum_scatter(x, axis, scatter_dimension=1, tiled=True)


def mlp_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    return error(fs.psum(mlp(p, fs.pcast(batch["x"], "tp", to="varying")), "tp") + p["b2"], batch)


def attention_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    x = fs.pcast(batch["x"], "tp", to="varying")
    return error(fs.psum(attention(p, x), "tp") + p["bo"], batch)


def block_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    return error(block(p, batch["x"], vary_over("tp"), sum_over("tp")), batch)


def block_sequence(p: Tensors, batch: Tensors) -> torch.Tensor:
    """Outside of the parallel parts each rank has a part of the sequence."""
    p = p | fs.pcast({name: p[name] for name in REPLICATED}, "tp", to="varying")
    y = block(p, batch["x"], gather_sequence("tp"), scatter_sequence("tp"))
    return fs.pmean(error(y, batch), "tp")


def language_loss(p: Tensors, batch: Tensors) -> torch.Tensor:
    x = p["table"][batch["tokens"]]
    return F.cross_entropy((x @ p["w"] @ p["table"].T).flatten(0, 1), batch["next"].flatten())


def own_rows(tokens: torch.Tensor, rows: int, axis: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens as rows of this rank's part of the vocabulary, and a mask of those in it."""
    local = tokens - rows * fs.axis_index(axis)
    return local.clamp(0, rows - 1), (local >= 0) & (local < rows)


def embed(table: torch.Tensor, tokens: torch.Tensor, axis: str) -> torch.Tensor:
    rows, mine = own_rows(tokens, len(table), axis)
    return fs.psum(table[rows] * mine[..., None], axis)


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor, axis: str) -> torch.Tensor:
    """Return the loss of logits sharded over the vocabulary, without gathering them."""
    rows, mine = own_rows(tokens, logits.shape[-1], axis)
    top = fs.pmax(logits.detach().amax(-1), axis)
    logits = logits - fs.pcast(top, axis, to="varying")[..., None]
    chosen = logits.gather(-1, rows[..., None])[..., 0] * mine
    total, target = fs.psum((logits.exp().sum(-1), chosen), axis)
    return (total.log() - target).mean()


def language_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    x = embed(p["table"], batch["tokens"], "tp") @ p["w"]
    return cross_entropy(fs.pcast(x, "tp", to="varying") @ p["table"].T, batch["next"], "tp")


def gathered_params(p: Tensors, axis: str, sent: torch.dtype | None = None) -> Tensors:
    """Gather a layer's parameters in one launch; gradients are added in f32."""
    back = None if sent is None else torch.float32
    return fs.all_gather(p, axis, tiled=True, forward_dtype=sent, backward_dtype=back)


def block_sharded(p: Tensors, batch: Tensors) -> torch.Tensor:
    return fs.pmean(block_loss(gathered_params(p, "dp"), batch), "dp")


def block_regathered(p: Tensors, batch: Tensors) -> torch.Tensor:
    """Gather parameters again in the backward pass instead of keeping them."""

    def layer(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        return block(gathered_params(p, "dp"), x)

    y = checkpoint(layer, p, batch["x"], use_reentrant=False)
    return fs.pmean(error(y, batch), "dp")


def block_mixed(p: Tensors, batch: Tensors) -> torch.Tensor:
    """Gather and use f32 parameters in bf16."""
    half = {name: w.bfloat16() for name, w in gathered_params(p, "dp", torch.bfloat16).items()}
    return fs.pmean(error(block(half, batch["x"].bfloat16()).float(), batch), "dp")


def micro_batches(batch: Tensors) -> list[Tensors]:
    """Split the batch in two."""
    return [{name: x.chunk(2)[index] for name, x in batch.items()} for index in range(2)]


def block_data(p: Tensors, batch: Tensors) -> torch.Tensor:
    """Run two micro-batches after one cast, whose transpose sums their gradients' sum."""
    p = fs.pcast(p, "dp", to="varying")
    losses = [block_loss(p, item) for item in micro_batches(batch)]
    return fs.pmean(torch.stack(losses).mean(), "dp")


def accumulated(
    loss: Callable[[Tensors, Tensors], torch.Tensor], p: Tensors, batch: Tensors
) -> tuple[torch.Tensor, Tensors]:
    """Return loss and gradients of the body's micro-batches, averaged in one launch."""
    # Gradients of the cast values are not summed over ranks.
    p = {name: w.detach().requires_grad_() for name, w in fs.pcast(p, "dp", to="varying").items()}
    steps = []
    for item in micro_batches(batch):
        value = loss(p, item)
        steps.append((value.detach(), *torch.autograd.grad(value, list(p.values()))))
    value, *grads = (torch.stack(item).mean(0) for item in zip(*steps, strict=True))
    return fs.pmean((value, dict(zip(p, grads, strict=True))), "dp")


def block_data_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    p = fs.pcast(p, "dp", to="varying")
    return fs.pmean(block_tensor(p, batch), "dp")


def block_sharded_tensor(p: Tensors, batch: Tensors) -> torch.Tensor:
    return fs.pmean(block_tensor(gathered_params(p, "dp"), batch), "dp")


def route(router: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best expert of every row, and its gate."""
    gate, expert = (x @ router).softmax(-1).max(-1)
    return gate[:, None], expert


def experts(p: Tensors, rows: torch.Tensor) -> torch.Tensor:
    """Apply every expert to its own rows."""
    return F.gelu(rows @ p["up"]) @ p["down"]


def experts_loss(p: Tensors, batch: Tensors, capacity: int, parts: int = 4) -> torch.Tensor:
    """Apply experts row by row; each takes the first `capacity` of its rows in each part."""
    ys = []
    for x in batch["x"].chunk(parts):
        gate, expert = route(p["router"], x)
        earlier = (expert[:, None] == expert).tril(-1).sum(1)
        item = {"up": p["up"][expert], "down": p["down"][expert]}
        ys.append(experts(item, x[:, None])[:, 0] * gate * (earlier < capacity)[:, None])
    return error(torch.cat(ys), batch)


def to_experts(p: Tensors, x: torch.Tensor, axis: str) -> torch.Tensor:
    """Send rows to slots of the experts and back; a spare slot is for dropped rows."""
    gate, expert = route(p["router"], x)
    place = (F.one_hot(expert, EXPERTS).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
    slots = EXPERTS * CAPACITY
    slot = torch.where(place < CAPACITY, expert * CAPACITY + place, slots)
    rows = x.new_zeros(slots + 1, WIDTH).index_add(0, slot, x)[:-1]
    there = fs.all_to_all(rows.unflatten(0, (EXPERTS, -1)), axis, 0, 1, tiled=True)
    back = fs.all_to_all(experts(p, there), axis, 1, 0, tiled=True)
    return F.pad(back.flatten(0, 1), (0, 0, 0, 1))[slot] * gate


def to_experts_dropless(p: Tensors, x: torch.Tensor, axis: str) -> torch.Tensor:
    """Send every rank all rows for its experts."""
    gate, expert = route(p["router"], x)
    n, rank = fs.axis_size(axis), int(fs.axis_index(axis))
    order = expert.argsort(stable=True)
    wanted = fs.all_gather(torch.bincount(expert, minlength=EXPERTS), axis)
    wanted = wanted.unflatten(1, (n, -1))  # rows of a rank for a rank's expert
    sizes = wanted.sum(2)
    leave, arrive = sizes.cumsum(1) - sizes, sizes.cumsum(0) - sizes
    rows = x[order]
    there = fs.ragged_all_to_all(
        rows, rows.new_zeros(int(sizes[:, rank].sum()), WIDTH),
        leave[rank], sizes[rank], arrive[rank], sizes[:, rank], axis_name=axis,
    )  # fmt: skip
    mine = torch.arange(EXPERTS // n).repeat(n).repeat_interleave(wanted[:, rank].flatten())
    done = experts({"up": p["up"][mine], "down": p["down"][mine]}, there[:, None])[:, 0]
    back = fs.ragged_all_to_all(
        done, torch.zeros_like(rows),
        arrive[:, rank], sizes[:, rank], leave[:, rank], sizes[rank], axis_name=axis,
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
