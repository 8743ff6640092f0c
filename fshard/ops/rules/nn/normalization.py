"""Rules of normalizations and their gradients.

layer_norm, rms_norm, group_norm, batch_norm, instance_norm, weight_norm, renorm,
cosine_similarity. Dims of a statistic stay unsharded, all others may be sharded: `bsd,d,d->bsd`
shards a layer norm's batch and sequence; groups are sharded with their channels. The result is
linear in weight and bias together. Running statistics are not written in place:
`aten._native_batch_norm_legit_functional` returns them. `normalization_decompositions`
covers sharded dims of statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fshard.ops.core.builders import align_factors, dim_factors, linear_modes, wrap_dim
from fshard.ops.core.call import Meta, OpCall, argument, base_name, schema_arguments
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.rules.reduce.reductions import ZerosIfEmpty, functional_overloads, typed, zeros
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext


def _names(dims: Dims) -> frozenset[str]:
    return frozenset(f for dim in dims for f in dim)


def _affine(call: OpCall) -> tuple[Mode, ...]:
    """Return the modes of weight and bias: linear in both together, or in a weight without bias."""
    weight, bias = (call.operand_index("weight"),
                    call.operand_index("bias") if call.has("bias") else None)  # fmt: skip
    present = tuple(operand for operand in (weight, bias) if operand is not None)
    if not present:
        return ()
    alone = (
        tuple(_first(call, (operand,), "avg") for operand in present) if bias is not None else ()
    )
    if weight is None:
        return alone
    return (_first(call, present, "sum"), _first(call, present, "avg"), *alone)


def _first(call: OpCall, operands: tuple[int, ...], kind: str) -> Mode:
    """Return a mode in which only the first result is unreduced."""
    return Mode(operands, kind, (kind, *(None,) * (len(call.results) - 1)))


# -- layers --------------------------------------------------------------------------------


def layer_norm(call: OpCall) -> Rule:
    """Rule `abc,c,c->abc` of layer norms: `c`, the normalized dims, stays unsharded."""
    x = call.operands[0]
    factors, lead = _layer(call, x)
    weights = (factors[lead:],) * (len(call.operands) - 1)
    return Rule((factors, *weights), tuple(_statistics(meta, x, lead) for meta in call.results),
                unsharded=_names(factors[lead:]), modes=_affine(call),
                local=ZerosIfEmpty())  # fmt: skip


def _layer(call: OpCall, x: Meta) -> tuple[Dims, int]:
    return dim_factors(x.ndim), x.ndim - len(call.get("normalized_shape"))


def _statistics(meta: Meta | None, x: Meta, lead: int) -> Dims | None:
    """Return the factors of a tensor like `x`, or of a statistic of its last dims."""
    if meta is None:
        return None
    factors = dim_factors(x.ndim)
    return factors if meta.shape == x.shape else factors[:lead] + ((),) * (x.ndim - lead)


def layer_norm_backward(call: OpCall) -> Rule:
    """Rule of layer norms' gradients; weight and bias sum theirs over the other dims."""
    x = call.operands[1]
    factors, lead = _layer(call, x)
    normalized, statistics = factors[lead:], (*factors[:lead], *(((),) * (x.ndim - lead)))
    operands = [factors, factors]
    operands += [statistics for name in ("mean", "rstd") if call.has(name)]
    operands += [normalized] * (len(call.operands) - len(operands))
    results = (factors, normalized, normalized)[: len(call.results)]
    result_dims = tuple(m and d for m, d in zip(call.results, results, strict=True))
    return Rule(tuple(operands), result_dims,
                tuple((f, "sum") for f in _names(factors[:lead])), _names(normalized),
                modes=linear_modes(0, results=len(call.results)), local=ZerosIfEmpty())  # fmt: skip


# -- groups --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalGroupNorm:
    """Local group norm with the shard's sizes and `channels` per group."""

    channels: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Normalize one rank's groups."""
        x: torch.Tensor = args[0]
        if not x.numel():
            return zeros(x, ctx)
        batch, channels = x.shape[:2]
        counts = {
            "N": batch, "C": channels, "HxW": x.numel() // (batch * channels),
            "group": channels // self.channels, "num_groups": channels // self.channels,
        }  # fmt: skip
        names = [argument.name for argument in schema_arguments(op)]
        new_args = [counts.get(name, value) for name, value in zip(names, args, strict=False)]
        return op(*new_args, **{key: counts.get(key, value) for key, value in kwargs.items()})


def group_norm(call: OpCall) -> Rule:
    """Rule `n(gc)s,(gc),(gc)->n(gc)s` of group norms: `n` and `g` may be sharded."""
    x = call.operands[0]
    groups = call.get("num_groups" if call.has("num_groups") else "group")
    channels = x.shape[1] // groups
    factors: Dims = (("n",), ("g", "c"), *dim_factors(x.ndim - 2))
    backward = base_name(call.op).endswith("backward")
    results = (factors, (("g", "c"),), (("g", "c"),)) if backward else (
        (factors, (("n",), ("g",)), (("n",), ("g",))))  # fmt: skip
    shapes = {x.ndim: factors, 1: (("g", "c"),)}
    operands = tuple(
        (("n",), ("g",)) if backward and i in (2, 3) else shapes[meta.ndim]
        for i, meta in enumerate(call.operands)
    )
    result_dims = tuple(m and d for m, d in zip(call.results, results, strict=False))
    return Rule(operands, result_dims, (("n", "sum"),) if backward else (),
                _names(factors[2:]) | {"c"},
                modes=linear_modes(0, results=3) if backward else _affine(call),
                local=LocalGroupNorm(channels), sizes=(("c", channels), ("g", groups)))  # fmt: skip


# -- batches and instances -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalBatchNorm:
    """Local batch norm that writes into copies of the running statistics.

    If `given`, the running statistics normalize, and are returned as some kernels do.
    """

    given: bool

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """Normalize one rank's shard."""
        if args[0].numel():
            names = [value.name for value in schema_arguments(op)]
            new_args = [_apart(name, value) for name, value in zip(names, args, strict=False)]
            outputs = op(*new_args, **{key: _apart(key, value) for key, value in kwargs.items()})
        else:
            outputs = zeros(args[0], ctx)
        if isinstance(outputs, torch.Tensor) or not self.given:
            return typed(outputs, ctx)
        mean, var = (argument(op, args, kwargs, f"running_{value}") for value in ("mean", "var"))
        statistics = (mean, (var + argument(op, args, kwargs, "eps")).rsqrt(), mean, var)
        fits = [ctx.shape(i) == mean.shape for i in range(1, len(outputs))]
        others = zip(outputs[1:], statistics, fits, strict=False)
        return typed(
            [outputs[0], *(statistic.clone() if fit else x for x, statistic, fit in others)], ctx
        )


def _apart(name: str, value: Any) -> Any:
    written = name in ("running_mean", "running_var") and isinstance(value, torch.Tensor)
    return value.clone() if written else value


def _own_statistics(call: OpCall) -> bool:
    """Return True if a batch or an instance is normalized by its own statistics."""
    for name in ("training", "use_input_stats", "train", "update"):
        if call.has(name):
            return bool(call.get(name))
    return "with_update" in base_name(call.op)


def batch_norm(call: OpCall) -> Rule:
    """Rule `nca,c,c->nca` of batch norms: `n` and `a` may be sharded if statistics are given."""
    x, own_statistics = call.operands[0], _own_statistics(call)
    factors: Dims = (("n",), ("c",), *dim_factors(x.ndim - 2))
    operands = tuple(factors if i == 0 else (("c",),) for i in range(len(call.operands)))
    results = tuple(_of_channels(meta, x, factors) for meta in call.results)
    reduced = _names((factors[0], *factors[2:]))
    unsharded = reduced if own_statistics else frozenset()
    if base_name(call.op) == "instance_norm":
        unsharded -= {"n"}
    # Given statistics are the same on all ranks, and equal their maximum.
    maxima = tuple((f, "max") for f in sorted(_names(factors)))
    return Rule(operands, results, () if own_statistics else maxima, unsharded, modes=_affine(call),
                local=LocalBatchNorm(not own_statistics))  # fmt: skip


def _of_channels(meta: Meta | None, x: Meta, factors: Dims) -> Dims | None:
    if meta is None or meta.ndim == x.ndim:
        return meta and factors
    return (("c",),) if meta.shape == x.shape[1:2] else ((),) * meta.ndim


def batch_norm_backward(call: OpCall) -> Rule:
    """Rule of batch norms' gradients; weight and bias sum theirs over samples and positions."""
    x, own_statistics = call.operands[1], _own_statistics(call)
    factors: Dims = (("n",), ("c",), *dim_factors(x.ndim - 2))
    reduced = _names((factors[0], *factors[2:]))
    operands = tuple(_of_channels(meta, x, factors) or () for meta in call.operands)
    results = tuple(_of_channels(meta, x, factors) for meta in call.results)
    sums = () if own_statistics else tuple((f, "sum") for f in sorted(reduced))
    return Rule(operands, results, sums, reduced if own_statistics else frozenset(),
                modes=linear_modes(0, results=3), local=ZerosIfEmpty())  # fmt: skip


# -- norms of other things -----------------------------------------------------------------


def renorm(call: OpCall) -> Rule:
    """Rule of `renorm`: the dim of the bounded norms may be sharded."""
    x = call.operands[0]
    factors, dim = dim_factors(x.ndim), wrap_dim(call.get("dim"), x.ndim)
    return Rule((factors,), (factors,), unsharded=_names(factors[:dim] + factors[dim + 1 :]),
                local=ZerosIfEmpty())  # fmt: skip


def cosine_similarity(call: OpCall) -> Rule:
    """Rule `ab,ab->a` of `cosine_similarity`: `b` stays unsharded, other dims may broadcast."""
    shape = torch.broadcast_shapes(*(meta.shape for meta in call.operands))
    factors, dim = dim_factors(len(shape)), wrap_dim(call.get("dim"), len(shape))
    operands = tuple(align_factors(meta.shape, shape, factors) for meta in call.operands)
    result = factors[:dim] + factors[dim + 1 :] if shape else ()
    return Rule(operands, (result,), unsharded=_names(factors[dim : dim + 1]))


def weight_norm(call: OpCall) -> Rule:
    """Rule of weight norms: the dim with norms of its own may be sharded."""
    widest = max(call.operands, key=lambda m: m.ndim)
    factors, dim = dim_factors(widest.ndim), call.get("dim")
    free = {wrap_dim(dim, widest.ndim)} if dim >= 0 or "interface" in base_name(call.op) else set()

    def dims(meta: Meta | None) -> Dims | None:
        if meta is None or meta.shape == widest.shape:
            return meta and factors
        return tuple(meta if i in free else () for i, meta in enumerate(dim_factors(meta.ndim)))

    name, none = base_name(call.op), (None,) * (len(call.results) - 1)
    modes: tuple[Mode, ...] = ()
    if name in ("_weight_norm", "_weight_norm_interface"):
        modes = tuple(Mode((1,), kind, (kind, *none)) for kind in ("sum", "avg"))
    elif name.endswith("backward"):
        modes = linear_modes(0, results=len(call.results))
    unsharded = frozenset(f for i, meta in enumerate(factors) for f in meta if i not in free)
    return Rule(tuple(dims(meta) or () for meta in call.operands), tuple(map(dims, call.results)),
                unsharded=unsharded, modes=modes, local=ZerosIfEmpty())  # fmt: skip


GENERATORS = {
    layer_norm: ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"),
    layer_norm_backward: ("native_layer_norm_backward", "_fused_rms_norm_backward"),
    group_norm: ("group_norm", "native_group_norm", "native_group_norm_backward"),
    batch_norm: (
        "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_no_update",
        "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
        "_batch_norm_with_update_functional", "instance_norm",
    ),
    batch_norm_backward: ("native_batch_norm_backward", "batch_norm_backward"),
    renorm: ("renorm",),
    cosine_similarity: ("cosine_similarity",),
    weight_norm: (
        "_weight_norm", "_weight_norm_interface", "norm_except_dim",
        "_weight_norm_interface_backward", "_weight_norm_differentiable_backward",
    ),
}  # fmt: skip

for _generator, _ops in GENERATORS.items():
    register_rule(*functional_overloads(*_ops))(_generator)
