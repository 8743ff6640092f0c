"""Rules of attention: batch, heads, queries and the values' width can be cut; keys need all.

LocalGroupNorm queries have compound heads: those of a key, major, and the queries that share it, minor.
Dropout inside is refused: the draws of a rank's generator are not those of the whole tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard._util.errors import fail
from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import Meta, OpCall, argument
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.einsum_letters import drop_broadcast, letters, text_dims, unsharded_dims
from fshard.ops.rules.elementwise.random_ops import KEYED
from fshard.ops.rules.reduce.reduction_decompositions import wide
from fshard.ops.rules.shard_call import ShardCall
from fshard.ops.strategy.local_call import LocalCall, RankContext, with_argument

__all__ = ["in_products"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _HeadDims:
    """The dims of queries, keys, values and results, without width; heads of queries may be two."""

    batch: Dims
    queries: Dims
    keys: Dims

    def operand(self, last: Sequence[str], *, of_keys: bool) -> Dims:
        """A tensor of these heads with further dims, a blank one of no factor."""
        more = tuple((each,) if each else () for each in last)
        return self.batch + (self.keys if of_keys else self.queries) + more

    def aligned(self, meta: Meta, last: Sequence[str], sizes: Sequence[int]) -> Dims:
        """A tensor that broadcasts to results of these heads, as a mask does."""
        full = self.operand(last, of_keys=False)
        more = len(full) - meta.ndim
        return tuple(
            full[more + at] if size == sizes[more + at] else ()
            for at, size in enumerate(meta.shape)
        )


def _heads(call: OpCall) -> _HeadDims:
    q, k = _named(call, "query"), _named(call, "key")
    v = _named(call, "value")
    widest = max(each.ndim for each in (q, k, v))
    if widest < 3:
        return _HeadDims((), (), ())
    batch = text_dims(letters(widest - 3, "hgqkv"))
    counts = {each.shape[-3] for each in (q, k, v) if each.ndim > 2} - {1}
    if len(counts) <= 1:
        return _HeadDims(batch, (("h",),), (("h",),))
    shared = min(k.ndim, v.ndim) > 2 and k.shape[-3] == v.shape[-3] != 0
    return _HeadDims(batch, (("h", "g"),), (("h",),)) if shared else _HeadDims(batch, ((),), ((),))


def _named(call: OpCall, name: str) -> Meta:
    place = call.operand_index(name)
    assert place is not None
    return call.operands[place]


def _refuse_dropout(call: OpCall) -> None:
    rate = call.get("dropout_p")
    if rate:
        fail(f"fs.propagate({call.op})", f"dropout_p={rate}",
             "a rank's generator does not draw what the whole tensor's does",
             f"{KEYED}; dropout_p=0.0 drops nothing")  # fmt: skip


@dataclass(frozen=True, slots=True)
class _CausalMask:
    """A change: where causal queries begin in the middle, the mask says so."""

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """The call with it."""
        op, args, kwargs = call
        query, key = args[0], args[1]
        dim = query.dim() - 2
        if not argument(op, args, kwargs, "is_causal") or ctx.is_unsharded(0, dim):
            return call
        rows = torch.arange(ctx.offset(0, dim), ctx.end(0, dim), device=query.device)
        mask = rows.unsqueeze(-1) >= torch.arange(key.shape[-2], device=query.device)
        call = with_argument(*call, "is_causal", False)
        return with_argument(*call, "attn_mask", mask)


@register_rule(aten.scaled_dot_product_attention)
def attention(call: OpCall) -> Rule:
    """`bhqe,bhke,bhkv->bhqv`: linear in the values; causal queries that are cut get a mask."""
    _refuse_dropout(call)
    heads = _heads(call)
    made = call.result
    sizes = (*made.shape[:-1], _named(call, "key").shape[-2])
    dims = [
        heads.operand(("q", ""), of_keys=False),
        heads.operand(("", ""), of_keys=True),
        heads.operand(("", "v"), of_keys=True),
    ]
    if call.operand_index("attn_mask") is not None:
        dims.append(heads.aligned(call.operands[3], ("q", ""), sizes))
    result = heads.operand(("q", "v"), of_keys=False)
    # Tensors of fewer dims broadcast along the first ones.
    last = [each[len(each) - m.ndim :] for each, m in zip(dims, call.operands, strict=True)]
    return Rule(
        drop_broadcast(last, call.operands),
        (result,),
        modes=linear_modes(2),
        local=ShardCall(changes=(_CausalMask(),)),
    )


# -- the fused forms ------------------------------------------------------------------------

FUSED = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    aten._scaled_dot_product_attention_math.default,
)


@register_rule(*FUSED)
def fused(call: OpCall) -> Rule:
    """Batch and heads pass, and queries that are not causal, but where rows are padded.

    What fused kernels return beside (counts, seeds of the generator) is the same on every rank, so
    that the largest of all is any.
    """
    _refuse_dropout(call)
    heads, made, query = _heads(call), call.result, _query(call)
    operands = [heads.operand((query if not at else "", ""), of_keys=at > 0) for at in range(3)]
    sizes = (*made.shape[:-1], _named(call, "key").shape[-2])
    operands += [heads.aligned(meta, (query, ""), sizes) for meta in call.operands[3:]]
    rows = heads.operand((query,), of_keys=False)
    results = [
        None if each is None
        else rows + ((),) * (each.ndim - len(rows)) if each.ndim >= len(rows) > 1
        else unsharded_dims(each)
        for each in call.results
    ]  # fmt: skip
    return Rule(drop_broadcast(operands, call.operands), tuple(results), _lacking(rows, results, "max"),
                local=ShardCall())  # fmt: skip


def _query(call: OpCall) -> str:
    """The factor of queries, none where they need to be whole."""
    padded = "efficient" in schema_of(call.op).name
    return "" if call.get("is_causal") or padded else "q"


def _lacking(rows: Dims, results: Sequence[Dims | None], kind: str) -> tuple[tuple[str, str], ...]:
    """Factors that a result lacks, with their kind of reduction."""
    return tuple(
        (f, kind) for f in sorted(f for dim in rows for f in dim)
        if any(dims is not None and all(f not in dim for dim in dims) for dims in results)
    )  # fmt: skip


BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)


@register_rule(*BACKWARD)
def attention_backward(call: OpCall) -> Rule:
    """Keys' and values' gradients sum over the queries that share them; linear in what comes."""
    _refuse_dropout(call)
    heads, q = _heads(call), _query(call)
    rows = heads.operand((q,), of_keys=False)
    sizes = (*_named(call, "query").shape[:-1], _named(call, "key").shape[-2])
    queries = heads.operand((q, ""), of_keys=False)
    keys = heads.operand(("", ""), of_keys=True)
    by_name = {"query": queries, "grad_out": queries, "out": queries, "key": keys, "value": keys}
    operands: list[Dims] = []
    mask: Dims = ()
    for each in schema_of(call.op).arguments:
        place = call.operand_index(each.name)
        if place is None:
            continue
        name, meta = each.name.rstrip("_"), call.operands[place]
        if name in ("attn_bias", "attn_mask"):
            mask = heads.aligned(meta, (q, ""), sizes) if meta.ndim > 1 else unsharded_dims(meta)
            operands.append(mask)
        elif name == "logsumexp":
            operands.append(rows + ((),) * (meta.ndim - len(rows)))
        else:
            operands.append(by_name.get(name, unsharded_dims(meta)))
    made = (queries, keys, keys, mask)[: len(call.results)]
    results = tuple(
        None if meta is None else dims if len(dims) == meta.ndim else unsharded_dims(meta)
        for dims, meta in zip(made, call.results, strict=True)
    )
    return Rule(tuple(operands), results, _lacking(rows, results, "sum"),
                modes=linear_modes(0, results=len(results)), local=ShardCall())  # fmt: skip


# -- in products and sums -------------------------------------------------------------------


@register_decomposition(aten.scaled_dot_product_attention.default)
def in_products(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:
    """Attention as a product, an exponential, and a product that is divided by its weights' sums.

    With the keys cut every rank has the weights of its own, and only maxima and sums are reduced;
    with the width cut the first product is. Rows that may look at nothing are zero, as PyTorch's.
    Numbers of half precision are multiplied in single, as its kernels add them up. `drop` drops
    weights; `dropout_p`, which does not say which, the rule has refused.
    """
    width, dtype = query.shape[-1], query.dtype
    query, key, value = wide(query), wide(key), wide(value)
    grouped = enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3]
    if grouped:
        query = query.unflatten(-3, (key.shape[-3], -1))
        key, value = key.unsqueeze(-3), value.unsqueeze(-3)
        if attn_mask is not None and attn_mask.dim() > 2:
            heads = attn_mask.shape[-3]
            attn_mask = (attn_mask.unflatten(-3, (key.shape[-4], -1)) if heads > 1
                         else attn_mask.unsqueeze(-3))  # fmt: skip
    scores = (query @ key.mT) * (1 / math.sqrt(width) if scale is None else scale)
    if is_causal:
        rows = torch.arange(scores.shape[-2], device=scores.device)
        columns = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(columns > rows.unsqueeze(-1), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    weights = drop(weights) if drop is not None else weights
    made = ((weights @ value) / total.masked_fill(total == 0, 1.0)).to(dtype)
    return made.flatten(-4, -3) if grouped else made
