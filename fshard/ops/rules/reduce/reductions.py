"""Rules of reductions.

sum, mean, prod, amax, max, argmax, any, all, var, std, median, mode, kthvalue, logsumexp,
count_nonzero, trace, quantile, cov, corrcoef, sum_to_size.

A reduced dim has a factor that the result lacks. It may be sharded if a sum, product, maximum or
minimum combines the partial results; an empty shard contributes the neutral element, and partial
means are weighted by their share of all elements. Ties of extremes share the global gradient, so
that extremes with gradients are decomposed over sharded dims, as are variances, positions and
norms of other orders: see `reduction_decompositions` and `vector_norms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.operators import OpOverloadPacket, schema_of
from fshard._util.dtypes import is_inexact
from fshard.ops.core.builders import dim_factors, kind_modes, linear_modes, normalize_dims
from fshard.ops.core.call import Meta, OpCall, base_name, schema_arguments
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
)
from fshard.run.transports.reduce_dtypes import neutral_like


def functional_overloads(*names: str) -> Iterator[Any]:
    """Yield the overloads of aten operations by name that return new tensors."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if not isinstance(packet, OpOverloadPacket):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if not schema_of(op).is_mutable:
                yield op


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """Return the non-negative dims that a call reduces; an empty list is all, or none."""
    argument = next((key for key in ("dim", "dims") if call.has(key)), None)
    dims = None if argument is None else call.get(argument)
    ndim = call.operands[0].ndim
    is_list = dims is not None and not isinstance(dims, int)
    if is_list and not dims and (base_name(call.op) in ("any", "all") or _reduces_nothing(call)):
        return ()
    return normalize_dims(dims, ndim) if ndim else ()


def _reduces_nothing(call: OpCall) -> bool:
    """Return True if a primitive reduces nothing: some reduce all dims if none is listed."""
    result = call.results[0]
    return call.op.namespace == "prims" and result is not None and (
        result.shape == call.operands[0].shape)  # fmt: skip


def reduction_rule(
    call: OpCall, how: Mapping[int, str | None], *, modes: tuple[Mode, ...] = (),
    shares: bool = False, non_negative: bool = False,
) -> Rule:  # fmt: skip
    """Return the rule of a call that reduces dims of its first operand, such as `ab->a`.

    `how` maps reduced dims to the reduction of partial results, None if the dim must be unsharded.
    With `shares` an element's gradient depends on elements of other shards, as for extremes with
    ties and for products; with `non_negative` results are not negative.
    """
    factors = dim_factors(call.operands[0].ndim)
    unsharded = frozenset(factors[dim][0] for dim, kind in how.items() if kind is None)
    sharded = {dim: kind for dim, kind in how.items() if kind is not None}
    extremes = sorted({kind for kind in sharded.values() if kind in ("max", "min")})
    results = tuple(result_factors(call, meta, how) for meta in call.results)
    others = tuple(((),) * meta.ndim for meta in call.operands[1:])
    return Rule(
        (factors, *others),
        results,
        tuple((factors[dim][0], kind) for dim, kind in sharded.items()),
        unsharded,
        modes=modes,
        no_grad=frozenset((*(factors[dim][0] for dim in sharded), *modes) if shares else ()),
        local=NeutralIfEmpty(extremes[0], (tuple(sharded),), non_negative) if extremes else None,
    )


def result_factors(call: OpCall, result: Meta | None, how: Mapping[int, Any]) -> Dims | None:
    """Return the factors of a result that has only the dims that are not reduced."""
    if result is None:
        return None
    factors = dim_factors(call.operands[0].ndim)
    dims = [() if dim in how else factor for dim, factor in enumerate(factors)]
    if result.ndim == len(factors):
        return tuple(dims)
    return tuple(factor for dim, factor in enumerate(factors) if dim not in how)


def keeps_values(call: OpCall, operand: int = 0) -> bool:
    """Return True if the result's dtype holds the operand's values; integers keep their size."""
    source, result = call.operands[operand], call.results[0]
    return result is not None and (
        source.dtype == result.dtype or (is_inexact(source) and is_inexact(result))
    )


# -- on one rank ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeutralIfEmpty:
    """Local reduction by `kind` that returns the neutral element if a reduced dim is empty.

    `dims` are the reduced dims of each operand. A maximum of no `non_negative` values is zero, as
    PyTorch's norms of empty tensors are.
    """

    kind: str
    dims: tuple[tuple[int, ...], ...]
    non_negative: bool = False

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Reduce one rank's shards."""
        x: torch.Tensor = args[0]
        if all(t.shape[dim] for t, dims in zip(args, self.dims, strict=False) for dim in dims):
            return op(*args, **kwargs)
        if self.non_negative and self.kind == "max":
            return zeros(x, ctx)
        return neutral_like(x.new_empty((), dtype=ctx.result.dtype), self.kind, ctx.shape())


@dataclass(frozen=True, slots=True)
class LocalMean:
    """Local mean over `dims`, times this rank's share of all elements."""

    dims: tuple[int, ...]

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Compute the local result."""
        x: torch.Tensor = args[0]
        global_count = math.prod(ctx.operands[0].shape[dim] for dim in self.dims)
        local_count = math.prod(x.shape[dim] for dim in self.dims)
        if local_count == global_count:
            return op(*args, **kwargs)
        if not local_count:
            return x.to(ctx.result.dtype).sum(self.dims).reshape(ctx.shape())
        return op(*args, **kwargs) * (local_count / global_count)


@dataclass(frozen=True, slots=True)
class ZerosIfEmpty(LocalRewrite):
    """Local call that returns zeros for an empty shard, in the dtypes of the layouts.

    Some kernels return other dtypes than their meta forms.
    """

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall | None:
        """Return the operation itself for one result in the dtype of the first operand."""
        x, results = ctx.operands[0], ctx.results
        if len(results) > 1 or results[0] is None or results[0].dtype != x.dtype:
            return None
        is_empty = math.prod(x.shape) and not math.prod(x.local_shape(ctx.rank))
        return None if is_empty else (op, tuple(args), dict(kwargs))

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Run the operation, or return zeros in the shapes of the rank's results."""
        if args[0].numel() or not math.prod(ctx.operands[0].shape):
            return typed(op(*args, **kwargs), ctx)
        return zeros(args[0], ctx)


def typed(results: Any, ctx: RankContext) -> Any:
    """Cast the results of an operation to the dtypes of their layouts."""
    if isinstance(results, torch.Tensor):
        return results if ctx.results[0] is None else results.to(ctx.results[0].dtype)
    pairs = zip(results, ctx.results, strict=True)
    return [x if x is None or spec is None else x.to(spec.dtype) for x, spec in pairs]


def zeros(like: torch.Tensor, ctx: RankContext) -> Any:
    """Return local results that are zeros."""
    results = [
        None if spec is None else like.new_zeros(spec.local_shape(ctx.rank), dtype=spec.dtype)
        for spec in ctx.results
    ]
    return results[0] if len(results) == 1 else results


@dataclass(frozen=True, slots=True)
class LocalTrace:
    """Local trace: the sum of the global diagonal's part in the shard."""

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Compute the local result."""
        return torch.diagonal(args[0], ctx.offset(0, 0) - ctx.offset(0, 1)).sum()


# -- by an operation's name ----------------------------------------------------------------

KINDS: dict[str, str | None] = {
    "sum": "sum", "nansum": "sum", "mean": "sum", "count_nonzero": "sum", "prod": "product",
    "linalg__powsum": "sum", "any": "max", "all": "min", "_is_any_true": "max",
    "_is_all_true": "min", "amax": "max", "amin": "min", "max": "max", "min": "min",
}  # fmt: skip
"""Reductions of partial results, by operation; other operations need unsharded dims."""
EXTREMES = ("amax", "amin", "max", "min")
UNSHARDED = (
    "nanmean", "aminmax", "_aminmax", "argmax", "argmin", "var", "std", "var_mean", "std_mean",
    "logsumexp", "special_logsumexp", "median", "nanmedian", "mode", "kthvalue", "hash_tensor",
)  # fmt: skip


def reduction(call: OpCall) -> Rule:
    """Rule `ab->a` of a reduction by its name; `b` stays unsharded if it has several results."""
    name, dims = base_name(call.op), reduced_dims(call)
    kind = KINDS.get(name) if len(call.results) == 1 else None
    rule = reduction_rule(call, dict.fromkeys(dims, kind), modes=_modes(call, name, kind),
                          shares=name in (*EXTREMES, "prod"))  # fmt: skip
    if name == "mean":
        return Rule(rule.operands, rule.results, rule.reductions, modes=rule.modes,
                    local=LocalMean(dims))  # fmt: skip
    return rule


def _modes(call: OpCall, name: str, kind: str | None) -> tuple[Mode, ...]:
    """Return modes of unreduced operands of the operation's own reduction."""
    if kind is None or not keeps_values(call):
        return ()
    if name in ("sum", "mean"):
        return linear_modes(0)
    if name in ("prod", "any", "all", *EXTREMES):
        return kind_modes(0, {kind: kind})
    return ()


def trace(call: OpCall) -> Rule:
    """Rule `ab->` of `trace`: both dims are summed."""
    kinds = {0: "sum", 1: "sum"}
    rule = reduction_rule(call, kinds, modes=linear_modes(0) if keeps_values(call) else ())
    return Rule(rule.operands, rule.results, rule.reductions, modes=rule.modes, local=LocalTrace())


def sum_to_size(call: OpCall) -> Rule:
    """Rule of `sum_to_size`: dims that the result lacks, or has with size 1, are summed."""
    x, meta = call.operands[0], call.result
    lead = x.ndim - meta.ndim
    summed = [d for d in range(x.ndim) if d < lead or meta.shape[d - lead] != x.shape[d]]
    factors = dim_factors(x.ndim)
    result = tuple(() if d in summed else factors[d] for d in range(lead, x.ndim))
    return Rule((factors,), (result,), tuple((factors[d][0], "sum") for d in summed),
                modes=linear_modes(0), local=_LocalSumToSize())  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LocalSumToSize:
    """Local `sum_to_size`, a new tensor also where the rank has nothing to sum."""

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
        """Run the operation on one rank."""
        out: torch.Tensor = op(args[0], list(ctx.shape()))
        return out.clone() if out is args[0] else out


def quantile(call: OpCall) -> Rule:
    """Rule of `quantile`: the dim stays unsharded; a vector of fractions is dim 0 of the result."""
    dims, meta = dict.fromkeys(reduced_dims(call)), call.result
    is_vector = tuple(meta.ndim == 1 for meta in call.operands[1:])
    fractions = (("q",),) if any(is_vector) else ()
    inner = Meta(meta.shape[len(fractions) :], meta.dtype)
    inner_dims = result_factors(call, inner, dims) or ()
    factors = dim_factors(call.operands[0].ndim)
    operands = (factors, *((fractions,) if is_vector else ()))
    unsharded = frozenset(factors[dim][0] for dim in dims)
    return Rule(operands, ((*fractions, *inner_dims),), unsharded=unsharded, local=ZerosIfEmpty())


def unsharded_operands(call: OpCall) -> Rule:
    """Rule of `cov` and `corrcoef`: all dims stay unsharded."""
    operands = tuple(dim_factors(meta.ndim, "abc"[i]) for i, meta in enumerate(call.operands))
    results = tuple(None if m is None else ((),) * m.ndim for m in call.results)
    return Rule(operands, results, unsharded=frozenset(f for o in operands for d in o for f in d))


# -- norms ---------------------------------------------------------------------------------


def _of_one(name: str, *names: str) -> list[Any]:
    """Return the overloads that reduce one tensor, without those like `max` of two tensors."""
    return [
        op
        for op in functional_overloads(name, *names)
        if not any(a.name == "other" for a in schema_arguments(op))
    ]


PRIMS = [getattr(torch.ops.prims, each).default
         for each in ("sum", "prod", "amax", "amin", "var", "xor_sum")]  # fmt: skip
OTHERS = {
    "trace": trace, "sum_to_size": sum_to_size, "quantile": quantile, "nanquantile": quantile,
    "cov": unsharded_operands, "corrcoef": unsharded_operands,
}  # fmt: skip

register_rule(*_of_one(*KINDS, *UNSHARDED), *PRIMS)(reduction)
for _name, _generator in OTHERS.items():
    register_rule(*functional_overloads(_name))(_generator)
