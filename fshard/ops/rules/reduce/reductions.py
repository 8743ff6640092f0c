"""Rules of reductions: sums, products, extremes, norms, variances, positions.

A dim that is reduced has a factor that the result lacks. Where the parts' results are put together
by a sum, a product, a maximum or a minimum the dim may stay cut; a part of no elements gives the
reduction's neutral element. A mean is a sum of parts, each weighed by its share of all elements.
Maxima share their gradient among ties as of the whole, so with gradients they are done by others,
as is what no reduction puts together: variances, norms of other orders, positions. How, the
`decompositions` say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.operators import OpOverloadPacket, schema_of
from fshard.ops.core.builders import (
    dim_factors,
    is_inexact,
    kind_modes,
    linear_modes,
    normalize_dims,
)
from fshard.ops.core.call import Meta, OpCall, base_name, schema_arguments
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_local_shape
from fshard.run.transports.reduce_dtypes import neutral_like

__all__ = [
    "NeutralIfEmpty", "ZerosIfEmpty", "functional_overloads", "reducing", "same_numbers", "typed",
    "zeros",
]  # fmt: skip


def functional_overloads(*names: str) -> Iterator[Any]:
    """The overloads of aten's operations of these names that return new tensors."""
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        if not isinstance(packet, OpOverloadPacket):
            continue
        for each in packet.overloads():
            op = getattr(packet, each)
            if not schema_of(op).is_mutable:
                yield op


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a call reduces, from 0 on; an empty list is all, or none in some."""
    name = next((each for each in ("dim", "dims") if call.has(each)), None)
    given = None if name is None else call.get(name)
    ndim = call.operands[0].ndim
    listed = given is not None and not isinstance(given, int)
    if listed and not given and (base_name(call.op) in ("any", "all") or _is_untouched(call)):
        return ()
    return normalize_dims(given, ndim) if ndim else ()


def _is_untouched(call: OpCall) -> bool:
    """Whether a primitive reduces nothing: some reduce all dims where none is listed."""
    made = call.results[0]
    return call.op.namespace == "prims" and made is not None and (
        made.shape == call.operands[0].shape)  # fmt: skip


def reducing(
    call: OpCall,
    how: Mapping[int, str | None],
    *,
    modes: tuple[Mode, ...] = (),
    shares: bool = False,
    sizes: bool = False,
) -> Rule:
    """The rule of a call that reduces dims of its first operand, each `how` it says, or whole.

    With `shares` the gradient of an element depends on elements of other parts, as it does of
    extremes with ties and of products; results that are `sizes` are not negative.
    """
    factors = dim_factors(call.operands[0].ndim)
    whole = frozenset(factors[dim][0] for dim, kind in how.items() if kind is None)
    cut = {dim: kind for dim, kind in how.items() if kind is not None}
    extremes = sorted({kind for kind in cut.values() if kind in ("max", "min")})
    outs = tuple(keeping(call, each, how) for each in call.results)
    rest = tuple(((),) * each.ndim for each in call.operands[1:])
    return Rule((factors, *rest), outs, tuple((factors[dim][0], kind) for dim, kind in cut.items()),
                whole, modes=modes,
                no_grad=frozenset((*(factors[dim][0] for dim in cut), *modes) if shares else ()),
                local=NeutralIfEmpty(extremes[0], (tuple(cut),), sizes) if extremes else None)  # fmt: skip


def keeping(call: OpCall, result: Meta | None, how: Mapping[int, Any]) -> Dims | None:
    """The factors of a result that has no others than those of dims that are not reduced."""
    if result is None:
        return None
    factors = dim_factors(call.operands[0].ndim)
    kept = [() if dim in how else each for dim, each in enumerate(factors)]
    if result.ndim == len(factors):
        return tuple(kept)
    return tuple(each for dim, each in enumerate(factors) if dim not in how)


def same_numbers(call: OpCall, operand: int = 0) -> bool:
    """Whether numbers stay what they are: integers of another size wrap elsewhere."""
    source, made = call.operands[operand], call.results[0]
    return made is not None and (
        source.dtype == made.dtype or (is_inexact(source) and is_inexact(made))
    )


# -- on one rank ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NeutralIfEmpty:
    """A reduction by `kind` on one rank: of no elements it is the neutral element.

    `dims` are those that are reduced, of every operand that has some. Of `sizes`, which are not
    negative, zero is as good a maximum of none, and what norms of nothing are.
    """

    kind: str
    dims: tuple[tuple[int, ...], ...]
    sizes: bool = False

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        x: torch.Tensor = args[0]
        if all(t.shape[dim] for t, dims in zip(args, self.dims, strict=False) for dim in dims):
            return op(*args, **kwargs)
        made = ctx.results[0]
        assert made is not None
        if self.sizes and self.kind == "max":
            return zeros(x, ctx)
        return neutral_like(x.new_empty((), dtype=made.dtype), self.kind, ctx.shape())


@dataclass(frozen=True, slots=True)
class LocalMean:
    """A mean on one rank: that of the elements there, times their share of all."""

    dims: tuple[int, ...]

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        x: torch.Tensor = args[0]
        whole = math.prod(ctx.operands[0].shape[dim] for dim in self.dims)
        mine = math.prod(x.shape[dim] for dim in self.dims)
        if mine == whole:
            return op(*args, **kwargs)
        if not mine:
            made = ctx.results[0]
            assert made is not None
            return x.to(made.dtype).sum(self.dims).reshape(ctx.shape())
        return op(*args, **kwargs) * (mine / whole)


@dataclass(frozen=True, slots=True)
class ZerosIfEmpty:
    """An operation on one rank that is not asked of a part of no elements: that gives zeros.

    Its results are of the dtypes that are told without a device: some kernels have others.
    """

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        """The operation, or zeros in the shapes of the rank's results."""
        if args[0].numel() or not math.prod(ctx.operands[0].shape):
            return typed(op(*args, **kwargs), ctx)
        return zeros(args[0], ctx)


def typed(made: Any, ctx: RankContext) -> Any:
    """What an operation returned, in the dtypes of the layouts."""
    if isinstance(made, torch.Tensor):
        return made if ctx.results[0] is None else made.to(ctx.results[0].dtype)
    pairs = zip(made, ctx.results, strict=True)
    return [x if x is None or spec is None else x.to(spec.dtype) for x, spec in pairs]


def zeros(like: torch.Tensor, ctx: RankContext) -> Any:
    """The results of an operation on one rank, of zeros."""
    made = [
        None if each is None else like.new_zeros(each.local_shape(ctx.rank), dtype=each.dtype)
        for each in ctx.results
    ]
    return made[0] if len(made) == 1 else made


@dataclass(frozen=True, slots=True)
class LocalTrace:
    """A trace on one rank: of the diagonal that crosses its block."""

    def __call__(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> Any:
        return torch.diagonal(args[0], ctx.offset(0, 0) - ctx.offset(0, 1)).sum()


# -- by an operation's name ----------------------------------------------------------------

KINDS: dict[str, str | None] = {
    "sum": "sum", "nansum": "sum", "mean": "sum", "count_nonzero": "sum", "prod": "product",
    "linalg__powsum": "sum", "any": "max", "all": "min", "_is_any_true": "max",
    "_is_all_true": "min", "amax": "max", "amin": "min", "max": "max", "min": "min",
}  # fmt: skip
"""How the parts' results are put together; everything else needs its dims whole."""
EXTREMES = ("amax", "amin", "max", "min")
WHOLE = (
    "nanmean", "aminmax", "_aminmax", "argmax", "argmin", "var", "std", "var_mean", "std_mean",
    "logsumexp", "special_logsumexp", "median", "nanmedian", "mode", "kthvalue", "hash_tensor",
)  # fmt: skip


def reduction(call: OpCall) -> Rule:
    """Dims that are reduced by the operation's kind, or whole where several results differ."""
    name, dims = base_name(call.op), reduced_dims(call)
    kind = KINDS.get(name) if len(call.results) == 1 else None
    made = reducing(call, dict.fromkeys(dims, kind), modes=_modes(call, name, kind),
                    shares=name in (*EXTREMES, "prod"))  # fmt: skip
    if name == "mean":
        return Rule(made.operands, made.results, made.reductions, modes=made.modes,
                    local=LocalMean(dims))  # fmt: skip
    return made


def _modes(call: OpCall, name: str, kind: str | None) -> tuple[Mode, ...]:
    """Which unreduced operands pass: those of the same kind, where numbers stay what they are."""
    if kind is None or not same_numbers(call):
        return ()
    if name in ("sum", "mean"):
        return linear_modes(0)
    if name in ("prod", "any", "all", *EXTREMES):
        return kind_modes(0, {kind: kind})
    return ()


def trace(call: OpCall) -> Rule:
    """Both dims may be cut: every block has a diagonal of its own."""
    cut = {0: "sum", 1: "sum"}
    made = reducing(call, cut, modes=linear_modes(0) if same_numbers(call) else ())
    return Rule(made.operands, made.results, made.reductions, modes=made.modes, local=LocalTrace())


def sum_to_size(call: OpCall) -> Rule:
    """Dims that the result has not, or has of size 1, are summed."""
    x, made = call.operands[0], call.result
    more = x.ndim - made.ndim
    gone = {d: "sum" for d in range(x.ndim) if d < more or made.shape[d - more] != x.shape[d]}
    factors = dim_factors(x.ndim)
    result = tuple(() if more + d in gone else factors[more + d] for d in range(made.ndim))
    return Rule((factors,), (result,), tuple((factors[d][0], kind) for d, kind in gone.items()),
                modes=linear_modes(0), local=with_local_shape("size"))  # fmt: skip


def quantile(call: OpCall) -> Rule:
    """The dim is whole; every fraction that is asked for is one of its own, in front."""
    dims, made = dict.fromkeys(reduced_dims(call)), call.result
    many = tuple(each.ndim == 1 for each in call.operands[1:])
    asked = (("q",),) if any(many) else ()
    kept = keeping(call, Meta(made.shape[len(asked) :], made.dtype), dims) or ()
    factors = dim_factors(call.operands[0].ndim)
    operands = (factors, *((asked,) if many else ()))
    whole = frozenset(factors[dim][0] for dim in dims)
    return Rule(operands, ((*asked, *kept),), unsharded=whole, local=ZerosIfEmpty())


def all_whole(call: OpCall) -> Rule:
    """Every part of the result is of every part of the operands."""
    operands = tuple(dim_factors(each.ndim, "abc"[at]) for at, each in enumerate(call.operands))
    results = tuple(None if m is None else ((),) * m.ndim for m in call.results)
    return Rule(operands, results, unsharded=frozenset(f for o in operands for d in o for f in d))


# -- norms ---------------------------------------------------------------------------------


def _of_one(name: str, *more: str) -> list[Any]:
    """The overloads of operations that reduce one tensor: `max` of two tensors is none."""
    return [
        op
        for op in functional_overloads(name, *more)
        if not any(a.name == "other" for a in schema_arguments(op))
    ]


PRIMS = [getattr(torch.ops.prims, each).default
         for each in ("sum", "prod", "amax", "amin", "var", "xor_sum")]  # fmt: skip
OTHERS = {
    "trace": trace, "sum_to_size": sum_to_size, "quantile": quantile, "nanquantile": quantile,
    "cov": all_whole, "corrcoef": all_whole,
}  # fmt: skip

register_rule(*_of_one(*KINDS, *WHOLE), *PRIMS)(reduction)
for _name, _generator in OTHERS.items():
    register_rule(*functional_overloads(_name))(_generator)
