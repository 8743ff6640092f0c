"""Rules of scaled_dot_product_attention, its fused kernels and their gradients.

Batch, heads, queries and the values' width may be sharded; each query needs all keys. Over
sharded keys attention is decomposed, or a ring (`domain/ring_strategy`). With grouped queries the
query heads are a product of the key heads, major, and the queries that share a key head. Dropout
inside is refused.
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
from fshard.ops.rules.elementwise.random_ops import KEYED
from fshard.ops.rules.letters import drop_broadcast, letters, no_factors, text_dims
from fshard.ops.rules.reduce.moments import wide
from fshard.ops.rules.shard_call import ShardCall, StaticRewrite
from fshard.ops.strategy.local_call import LocalCall, RankContext, with_argument

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _HeadDims:
    """Dims of queries and keys without sequence and width; query heads may be two factors."""

    batch: Dims
    queries: Dims
    keys: Dims

    def operand(self, last: Sequence[str], *, of_keys: bool) -> Dims:
        """Return the dims of a tensor with these heads and `last` factors, "" for none."""
        factors = tuple((name,) if name else () for name in last)
        return self.batch + (self.keys if of_keys else self.queries) + factors

    def aligned(self, meta: Meta, last: Sequence[str], sizes: Sequence[int]) -> Dims:
        """Return the dims of a tensor, such as a mask, that broadcasts to these heads."""
        full = self.operand(last, of_keys=False)
        lead = len(full) - meta.ndim
        return tuple(
            full[lead + i] if size == sizes[lead + i] else () for i, size in enumerate(meta.shape)
        )


def _heads(call: OpCall) -> _HeadDims:
    q, k = _operand_named(call, "query"), _operand_named(call, "key")
    v = _operand_named(call, "value")
    widest = max(meta.ndim for meta in (q, k, v))
    if widest < 3:
        return _HeadDims((), (), ())
    batch = text_dims(letters(widest - 3, "hgqkev"))
    counts = {meta.shape[-3] for meta in (q, k, v) if meta.ndim > 2} - {1}
    if len(counts) <= 1:
        return _HeadDims(batch, (("h",),), (("h",),))
    shared = min(k.ndim, v.ndim) > 2 and k.shape[-3] == v.shape[-3] != 0
    return _HeadDims(batch, (("h", "g"),), (("h",),)) if shared else _HeadDims(batch, ((),), ((),))


def _operand_named(call: OpCall, name: str) -> Meta:
    place = call.operand_index(name)
    assert place is not None
    return call.operands[place]


def _refuse_dropout(call: OpCall) -> None:
    rate = call.get("dropout_p")
    if rate:
        fail(
            f"fs.propagate({call.op})",
            f"dropout_p={rate}",
            "draws must be keyed: a rank's generator does not draw the values of the global tensor",
            f"{KEYED}; dropout_p=0.0 drops nothing",
        )


@dataclass(frozen=True, slots=True)
class _CausalMask(StaticRewrite):
    """Rewrite: replace `is_causal` by a mask if this rank's queries do not begin at zero."""

    def is_static(self, call: LocalCall, ctx: RankContext) -> bool:
        """Return True if the call stays as it is: a mask is on the device of the query."""
        return not argument(*call, "is_causal") or ctx.is_unsharded(0, ctx.operands[0].ndim - 2)

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        if self.is_static(call, ctx):
            return call
        _, args, _ = call
        query, key = args[0], args[1]
        dim = query.dim() - 2
        rows = torch.arange(ctx.offset(0, dim), ctx.end(0, dim), device=query.device)
        mask = rows.unsqueeze(-1) >= torch.arange(key.shape[-2], device=query.device)
        call = with_argument(*call, "is_causal", False)
        return with_argument(*call, "attn_mask", mask)


@register_rule(aten.scaled_dot_product_attention)
def attention(call: OpCall) -> Rule:
    """Rule `bhqe,bhke,bhkv->bhqv`: linear in the values; sharded causal queries get a mask."""
    _refuse_dropout(call)
    heads = _heads(call)
    result_meta = call.result
    sizes = (*result_meta.shape[:-1], _operand_named(call, "key").shape[-2])
    dims = [heads.operand(("q", "e"), of_keys=False), heads.operand(("k", "e"), of_keys=True),
            heads.operand(("k", "v"), of_keys=True)]  # fmt: skip
    if call.operand_index("attn_mask") is not None:
        dims.append(heads.aligned(call.operands[3], ("q", "k"), sizes))
    result = heads.operand(("q", "v"), of_keys=False)
    # Tensors with fewer dims broadcast along the leading ones.
    last = [full[len(full) - m.ndim :] for full, m in zip(dims, call.operands, strict=True)]
    return Rule(drop_broadcast(last, call.operands), (result,), unsharded=frozenset("ke"),
                modes=linear_modes(2), local=ShardCall(rewrites=(_CausalMask(),)))  # fmt: skip


# -- the fused forms ------------------------------------------------------------------------

FUSED = (aten._scaled_dot_product_flash_attention.default,
         aten._scaled_dot_product_flash_attention_for_cpu.default,
         aten._scaled_dot_product_efficient_attention.default,
         aten._scaled_dot_product_cudnn_attention.default,
         aten._scaled_dot_product_fused_attention_overrideable.default,
         aten._scaled_dot_product_attention_math.default)  # fmt: skip


@register_rule(*FUSED)
def fused_attention(call: OpCall) -> Rule:
    """Rule of fused kernels: batch and heads may be sharded, and queries unless causal or padded.

    Counts and generator seeds that kernels also return are the same on every rank: a maximum.
    """
    _refuse_dropout(call)
    heads, result_meta, query = _heads(call), call.result, _query(call)
    operands = [heads.operand((query if not i else "", ""), of_keys=i > 0) for i in range(3)]
    sizes = (*result_meta.shape[:-1], _operand_named(call, "key").shape[-2])
    operands += [heads.aligned(meta, (query, ""), sizes) for meta in call.operands[3:]]
    rows = heads.operand((query,), of_keys=False)
    results = [
        None if meta is None
        else rows + ((),) * (meta.ndim - len(rows)) if meta.ndim >= len(rows) > 1
        else no_factors(meta)
        for meta in call.results
    ]  # fmt: skip
    return Rule(drop_broadcast(operands, call.operands), tuple(results),
                _missing_factors(rows, results, "max"), local=ShardCall())  # fmt: skip


def _query(call: OpCall) -> str:
    """Return the factor of queries, empty if they must be unsharded."""
    padded = "efficient" in schema_of(call.op).name
    return "" if call.get("is_causal") or padded else "q"


def _missing_factors(
    rows: Dims, results: Sequence[Dims | None], kind: str
) -> tuple[tuple[str, str], ...]:
    """Return the factors that some result lacks, with their reduction."""
    return tuple(
        (f, kind) for f in sorted(f for dim in rows for f in dim)
        if any(dims is not None and all(f not in dim for dim in dims) for dims in results)
    )  # fmt: skip


BACKWARD = (aten._scaled_dot_product_flash_attention_backward.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            aten._scaled_dot_product_efficient_attention_backward.default,
            aten._scaled_dot_product_cudnn_attention_backward.default,
            aten._scaled_dot_product_fused_attention_overrideable_backward.default)  # fmt: skip


@register_rule(*BACKWARD)
def attention_backward(call: OpCall) -> Rule:
    """Rule of fused gradients, in which keys and values sum over the queries that share them."""
    _refuse_dropout(call)
    heads, q = _heads(call), _query(call)
    rows = heads.operand((q,), of_keys=False)
    sizes = (*_operand_named(call, "query").shape[:-1], _operand_named(call, "key").shape[-2])
    queries = heads.operand((q, ""), of_keys=False)
    keys = heads.operand(("", ""), of_keys=True)
    by_name = {"query": queries, "grad_out": queries, "out": queries, "key": keys, "value": keys}
    operands: list[Dims] = []
    mask: Dims = ()
    for parameter in schema_of(call.op).arguments:
        place = call.operand_index(parameter.name)
        if place is None:
            continue
        name, meta = parameter.name.rstrip("_"), call.operands[place]
        if name in ("attn_bias", "attn_mask"):
            mask = heads.aligned(meta, (q, ""), sizes) if meta.ndim > 1 else no_factors(meta)
            operands.append(mask)
        elif name == "logsumexp":
            operands.append(rows + ((),) * (meta.ndim - len(rows)))
        else:
            operands.append(by_name.get(name, no_factors(meta)))
    gradients = (queries, keys, keys, mask)[: len(call.results)]
    results = tuple(
        None if meta is None else dims if len(dims) == meta.ndim else no_factors(meta)
        for dims, meta in zip(gradients, call.results, strict=True)
    )
    return Rule(tuple(operands), results, _missing_factors(rows, results, "sum"),
                modes=linear_modes(0, results=len(results)), local=ShardCall())  # fmt: skip


# -- decomposition -----------------------------------------------------------------------------


@register_decomposition(aten.scaled_dot_product_attention.default)
def attention_by_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
    drop: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Any:  # fmt: skip
    """Return attention as a product, an exponential, and a product divided by sums of weights.

    With sharded keys every rank has the weights of its own keys, and maxima and sums are reduced;
    with a sharded width the first product is. Rows that attend to nothing are zero, as in PyTorch.
    Half precision is multiplied in float32, as in PyTorch's kernels. `drop` drops weights;
    `dropout_p` is refused by the rule.
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
    result = ((weights @ value) / total.masked_fill(total == 0, 1.0)).to(dtype)
    return result.flatten(-4, -3) if grouped else result
