"""Rules of operations that read a tensor's shape and dtype, and of those that return numbers.

Factories without operands: zeros, full, empty, arange and others; zeros_like, full_like and other
`*_like`, new_zeros and other `new_*`, linspace, logspace; queries of size, stride and dtype; item,
equal, allclose. Random `*_like` are in `random_ops`.
"""

from __future__ import annotations

from typing import Any

import torch

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import dim_factors, unread_modes
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.view.view_factors import letter_dims
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, WithLocalShape


@register_rule("zeros_like", "ones_like", "full_like", "empty_like", "zero", "fill.Scalar",
               "prims::full_like")  # fmt: skip
def like(call: OpCall) -> Rule:
    """Rule `ab->ab` of results like the operand; invariant if the operand is unreduced."""
    dims = letter_dims(call.operands[0].ndim)
    return Rule((dims,), (dims,), modes=unread_modes(0))


QUERIES = """
    sym_size sym_numel sym_stride sym_storage_offset sym_is_contiguous size.default size.int
    numel.default dim.default stride is_complex is_floating_point is_signed is_same_size
    is_contiguous is_conj is_neg result_type.Tensor result_type.Scalar result_type.Scalar_Tensor
    _assert_tensor_metadata
"""


@register_rule(*QUERIES.split())
def query(call: OpCall) -> Rule:
    """Rule of queries of global shape or dtype; the layout is irrelevant."""
    places = range(len(call.operands))
    return Rule(tuple(((),) * meta.ndim for meta in call.operands), (None,) * len(call.results),
                local=_nothing, unread=frozenset(places))  # fmt: skip


def _nothing(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> None:
    """Skip the query on one rank, whose local shape differs."""


@register_rule("_assert_async.default", "_assert_async.msg")
def asserted(call: OpCall) -> Rule:
    """Rule of an assertion on an unsharded tensor, the same on every rank."""
    return Rule(((),), (None,))


@register_rule("item", "_local_scalar_dense", "equal", "is_nonzero", "allclose", "prims::item")
def to_number(call: OpCall) -> Rule:
    """Rule of Python numbers read from tensors, which must be unsharded and not unreduced.

    In the place of `torch.equal`, `fs.apply(lambda a, b: (a == b).all(), a, b, mode="auto")`
    gathers neither: shards are compared, and to unshard the result sends one bool.
    """
    return Rule(tuple(((),) * meta.ndim for meta in call.operands), ())


@register_decomposition("_new_zeros_with_same_feature_meta")
def zero_tangent(
    x: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """Return zeros in the shape of `other`, as forward mode makes of operands without tangents."""
    return x.new_zeros((*x.shape[:self_num_batch_dims], *other.shape))


@register_rule("linspace", "logspace")
def ranges(call: OpCall) -> Rule:
    """Rule of ranges between tensor-valued ends: computed in full on every rank."""
    return Rule(((),) * len(call.operands), (((),),))


@register_rule("zeros", "ones", "full", "empty.memory_format")
def filled(call: OpCall) -> Rule:
    """Rule `->ab` of tensors of one value, or of arbitrary values."""
    return Rule((), (dim_factors(call.result.ndim),), local=WithLocalShape("size"))


@register_rule("empty_strided")
def empty_strided(call: OpCall) -> Rule:
    """Rule `->ab` of arbitrary values; strides are those of a local."""
    return Rule((), (dim_factors(call.result.ndim),), local=_empty_shard)


def _empty_shard(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    return torch.empty(ctx.shape(), **kwargs)


@register_rule("scalar_tensor")
def scalar(call: OpCall) -> Rule:
    """Rule of a tensor without dims."""
    return Rule((), ((),))


@register_rule("eye")
def eye(call: OpCall) -> Rule:
    """Rule `->ab` of the identity."""
    return Rule((), (dim_factors(2),), local=_eye_shard)


def _eye_shard(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    offset = ctx.result_offset(0) - ctx.result_offset(1)
    return torch.ones(ctx.shape(), **kwargs).tril_(offset).triu_(offset)


@register_rule("arange")
def arange(call: OpCall) -> Rule:
    """Rule `->a` of a range with integer ends; rounding of others depends on the first element."""
    numbers = [arg for arg in call.args if isinstance(arg, int | float)]
    exact = all(number == int(number) for number in numbers)
    return Rule((), (dim_factors(1) if exact else ((),),), local=_arange_shard)


def _arange_shard(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> torch.Tensor:
    start = args[0] if len(args) > 1 else 0
    step = args[2] if len(args) > 2 else 1
    first = start + step * ctx.result_offset(0)
    return torch.arange(first, first + step * ctx.shape()[0], step,
                        **{**kwargs, "dtype": ctx.result.dtype})  # fmt: skip


@register_rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def new_like(call: OpCall) -> Rule:
    """Rule of `new_*`: the operand's layout if the shape is the same, else unsharded."""
    result = call.result
    x = call.operands[0]
    if x.shape == result.shape and schema_of(call.op).name != "aten::new_empty_strided":
        dims = letter_dims(x.ndim)
        return Rule((dims,), (dims,), modes=unread_modes(0), local=WithLocalShape("size"))
    return Rule((((),) * x.ndim,), (((),) * result.ndim,), unread=frozenset({0}))
