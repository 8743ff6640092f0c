"""Rules of normalizations: of layers, groups, batches, instances, weights; and their gradients.

What statistics are taken over is whole, all else is cut: `bsd,d,d->bsd` leaves a layer's batch and
sequence free, groups are cut with the channels that are theirs. Weight and bias together are what
the result is linear in. Where a batch is normalized by its own statistics, those that run along
are written by no rank: `aten._native_batch_norm_legit_functional` returns them. How it is done over
dims that stay cut, `decompositions` says.
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

__all__: list[str] = []


def _names(dims: Dims) -> frozenset[str]:
    return frozenset(f for dim in dims for f in dim)


def _affine(call: OpCall) -> tuple[Mode, ...]:
    """Modes of weight and bias: linear in both together, or in a weight without a bias."""
    weight, bias = (
        call.operand_index("weight"),
        call.operand_index("bias") if call.has("bias") else None,
    )
    given = tuple(each for each in (weight, bias) if each is not None)
    if not given:
        return ()
    alone = tuple(_first(call, (each,), "avg") for each in given) if bias is not None else ()
    if weight is None:
        return alone
    return (_first(call, given, "sum"), _first(call, given, "avg"), *alone)


def _first(call: OpCall, places: tuple[int, ...], kind: str) -> Mode:
    """A mode that the first result alone is unreduced in."""
    return Mode(places, kind, (kind, *(None,) * (len(call.results) - 1)))


# -- layers --------------------------------------------------------------------------------


def layer_norm(call: OpCall) -> Rule:
    """The normalized dims are whole, those before them free."""
    x = call.operands[0]
    factors, lead = _layer(call, x)
    weights = (factors[lead:],) * (len(call.operands) - 1)
    return Rule((factors, *weights), tuple(_statistics(each, x, lead) for each in call.results),
                unsharded=_names(factors[lead:]), modes=_affine(call), local=ZerosIfEmpty())  # fmt: skip


def _layer(call: OpCall, x: Meta) -> tuple[Dims, int]:
    return dim_factors(x.ndim), x.ndim - len(call.get("normalized_shape"))


def _statistics(meta: Meta | None, x: Meta, lead: int) -> Dims | None:
    """The factors of a tensor like `x`, or of a number for all of its last dims."""
    if meta is None:
        return None
    factors = dim_factors(x.ndim)
    return factors if meta.shape == x.shape else factors[:lead] + ((),) * (x.ndim - lead)


def layer_norm_backward(call: OpCall) -> Rule:
    """Gradients of weight and bias are sums over the dims that are free."""
    x = call.operands[1]
    factors, lead = _layer(call, x)
    inner, numbers = factors[lead:], (*factors[:lead], *(((),) * (x.ndim - lead)))
    operands = [factors, factors]
    operands += [numbers for name in ("mean", "rstd") if call.has(name)]
    operands += [inner] * (len(call.operands) - len(operands))
    results = (factors, inner, inner)[: len(call.results)]
    given = tuple(m and d for m, d in zip(call.results, results, strict=True))
    return Rule(tuple(operands), given,
                tuple((f, "sum") for f in _names(factors[:lead])), _names(inner),
                modes=linear_modes(0, results=len(call.results)), local=ZerosIfEmpty())  # fmt: skip


# -- groups --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalGroupNorm:
    """A group norm on one rank: its counts are those of the part, `channels` to a group."""

    channels: int

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        x: torch.Tensor = args[0]
        if not x.numel():
            return zeros(x, ctx)
        batch, channels = x.shape[:2]
        counts = {
            "N": batch, "C": channels, "HxW": x.numel() // (batch * channels),
            "group": channels // self.channels, "num_groups": channels // self.channels,
        }  # fmt: skip
        places = [argument.name for argument in schema_arguments(op)]
        placed = [counts.get(name, each) for name, each in zip(places, args, strict=False)]
        return op(*placed, **{key: counts.get(key, each) for key, each in kwargs.items()})


def group_norm(call: OpCall) -> Rule:
    """Samples are free, and groups: channels are theirs, one after the other."""
    x = call.operands[0]
    groups = call.get("num_groups" if call.has("num_groups") else "group")
    per = x.shape[1] // groups
    factors: Dims = (("n",), ("g", "c"), *dim_factors(x.ndim - 2))
    backward = base_name(call.op).endswith("backward")
    results = (factors, (("g", "c"),), (("g", "c"),)) if backward else (
        (factors, (("n",), ("g",)), (("n",), ("g",))))  # fmt: skip
    shapes = {x.ndim: factors, 1: (("g", "c"),)}
    operands = tuple(
        (("n",), ("g",)) if backward and at in (2, 3) else shapes[each.ndim]
        for at, each in enumerate(call.operands)
    )
    given = tuple(m and d for m, d in zip(call.results, results, strict=False))
    return Rule(operands, given, (("n", "sum"),) if backward else (), _names(factors[2:]) | {"c"},
                modes=linear_modes(0, results=3) if backward else _affine(call), local=LocalGroupNorm(per),
                sizes=(("c", per), ("g", groups)))  # fmt: skip


# -- batches and instances -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalBatchNorm:
    """A norm on one rank, with running statistics of its own: none that others see are written.

    Where `given` they are what it is normalized by, and are told again, as some kernels do.
    """

    given: bool

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        if args[0].numel():
            places = [each.name for each in schema_arguments(op)]
            placed = [_apart(name, each) for name, each in zip(places, args, strict=False)]
            made = op(*placed, **{key: _apart(key, each) for key, each in kwargs.items()})
        else:
            made = zeros(args[0], ctx)
        if isinstance(made, torch.Tensor) or not self.given:
            return typed(made, ctx)
        mean, var = (argument(op, args, kwargs, f"running_{each}") for each in ("mean", "var"))
        told = (mean, (var + argument(op, args, kwargs, "eps")).rsqrt(), mean, var)
        fits = [ctx.shape(at) == mean.shape for at in range(1, len(made))]
        rest = zip(made[1:], told, fits, strict=False)
        return typed([made[0], *(same.clone() if fit else x for x, same, fit in rest)], ctx)


def _apart(name: str, value: Any) -> Any:
    written = name in ("running_mean", "running_var") and isinstance(value, torch.Tensor)
    return value.clone() if written else value


def _own_statistics(call: OpCall) -> bool:
    """Whether a batch or an instance is normalized by its own statistics."""
    for name in ("training", "use_input_stats", "train", "update"):
        if call.has(name):
            return bool(call.get(name))
    return "with_update" in base_name(call.op)


def batch_norm(call: OpCall) -> Rule:
    """Channels are free; samples and places too, where the statistics are given."""
    x, own = call.operands[0], _own_statistics(call)
    factors: Dims = (("n",), ("c",), *dim_factors(x.ndim - 2))
    operands = tuple(factors if at == 0 else (("c",),) for at in range(len(call.operands)))
    results = tuple(_of_channels(each, x, factors) for each in call.results)
    over = _names((factors[0], *factors[2:]))
    whole = over if own else frozenset()
    if base_name(call.op) == "instance_norm":
        whole -= {"n"}
    # Statistics that are given are the same on all ranks: any maximum of them is one of them.
    same = tuple((f, "max") for f in sorted(_names(factors)))
    return Rule(operands, results, () if own else same, whole, modes=_affine(call),
                local=LocalBatchNorm(not own))  # fmt: skip


def _of_channels(meta: Meta | None, x: Meta, factors: Dims) -> Dims | None:
    if meta is None or meta.ndim == x.ndim:
        return meta and factors
    return (("c",),) if meta.shape == x.shape[1:2] else ((),) * meta.ndim


def batch_norm_backward(call: OpCall) -> Rule:
    """Gradients of weight and bias are sums over samples and places."""
    x, own = call.operands[1], _own_statistics(call)
    factors: Dims = (("n",), ("c",), *dim_factors(x.ndim - 2))
    over = _names((factors[0], *factors[2:]))
    operands = tuple(_of_channels(each, x, factors) or () for each in call.operands)
    results = tuple(_of_channels(each, x, factors) for each in call.results)
    sums = () if own else tuple((f, "sum") for f in sorted(over))
    return Rule(operands, results, sums, over if own else frozenset(),
                modes=linear_modes(0, results=3), local=ZerosIfEmpty())  # fmt: skip


# -- norms of other things -----------------------------------------------------------------


def renorm(call: OpCall) -> Rule:
    """The parts whose norm is bounded are free, their own dims whole."""
    x = call.operands[0]
    factors, dim = dim_factors(x.ndim), wrap_dim(call.get("dim"), x.ndim)
    return Rule((factors,), (factors,), unsharded=_names(factors[:dim] + factors[dim + 1 :]),
                local=ZerosIfEmpty())  # fmt: skip


def cosine_similarity(call: OpCall) -> Rule:
    """The dim of the vectors is whole; all others are free, and may broadcast."""
    shape = torch.broadcast_shapes(*(each.shape for each in call.operands))
    factors, dim = dim_factors(len(shape)), wrap_dim(call.get("dim"), len(shape))
    operands = tuple(align_factors(each.shape, shape, factors) for each in call.operands)
    kept = factors[:dim] + factors[dim + 1 :] if shape else ()
    return Rule(operands, (kept,), unsharded=_names(factors[dim : dim + 1]))


def weight_norm(call: OpCall) -> Rule:
    """The dim that has norms of its own is free, those that they are over are whole."""
    widest = max(call.operands, key=lambda m: m.ndim)
    factors, dim = dim_factors(widest.ndim), call.get("dim")
    kept = {wrap_dim(dim, widest.ndim)} if dim >= 0 or "interface" in base_name(call.op) else set()

    def dims(meta: Meta | None) -> Dims | None:
        if meta is None or meta.shape == widest.shape:
            return meta and factors
        return tuple(each if at in kept else () for at, each in enumerate(dim_factors(meta.ndim)))

    name, rest = base_name(call.op), (None,) * (len(call.results) - 1)
    modes: tuple[Mode, ...] = ()
    if name in ("_weight_norm", "_weight_norm_interface"):
        modes = tuple(Mode((1,), kind, (kind, *rest)) for kind in ("sum", "avg"))
    elif name.endswith("backward"):
        modes = linear_modes(0, results=len(call.results))
    whole = frozenset(f for at, each in enumerate(factors) for f in each if at not in kept)
    return Rule(tuple(dims(each) or () for each in call.operands), tuple(map(dims, call.results)),
                unsharded=whole, modes=modes, local=ZerosIfEmpty())  # fmt: skip


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
