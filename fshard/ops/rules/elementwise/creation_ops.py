"""Rules of operations that take a tensor's shape or dtype and none of its elements."""

from __future__ import annotations

from typing import Any

from fshard._torch.operators import schema_of
from fshard.ops.core.builders import unread_modes
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.view.view_factors import letter_dims
from fshard.ops.strategy.local_call import Args, Kwargs, RankContext, with_local_shape

__all__: list[str] = []


@register_rule("zeros_like", "ones_like", "full_like", "empty_like", "zero", "fill.Scalar",
               "prims::full_like")  # fmt: skip
def alike(call: OpCall) -> Rule:
    """Lies as the operand does; where that is unreduced it is the same on every rank."""
    own = letter_dims(call.operands[0].ndim)
    return Rule((own,), (own,), modes=unread_modes(0))


TOLD = """
    sym_size sym_numel sym_stride sym_storage_offset sym_is_contiguous size.default size.int
    numel.default dim.default stride is_complex is_floating_point is_signed is_same_size
    is_contiguous is_conj is_neg result_type.Tensor result_type.Scalar result_type.Scalar_Tensor
    _assert_tensor_metadata
"""


@register_rule(*TOLD.split())
def told(call: OpCall) -> Rule:
    """What shapes and dtypes tell, of whole tensors however they lie."""
    places = range(len(call.operands))
    return Rule(tuple(((),) * each.ndim for each in call.operands), (None,) * len(call.results),
                local=_nothing, unread=frozenset(places))  # fmt: skip


def _nothing(op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> None:
    """A rank's part has another shape: nothing is asked of it."""


@register_rule("_assert_async.default", "_assert_async.msg")
def asserted(call: OpCall) -> Rule:
    """Every rank asserts the same."""
    return Rule(((),), (None,))


@register_rule("item", "_local_scalar_dense", "equal", "is_nonzero", "allclose", "prims::item")
def number(call: OpCall) -> Rule:
    """A number of Python's is of whole tensors, never of a rank's part or addend."""
    return Rule(tuple(((),) * each.ndim for each in call.operands), ())


@register_rule("linspace", "logspace")
def between(call: OpCall) -> Rule:
    """Numbers between two ends, of which a tensor has one at least; all ranks make all."""
    return Rule(((),) * len(call.operands), (((),),))


@register_rule("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
def anew(call: OpCall) -> Rule:
    """Of the operand's shape it lies as the operand does; of another shape it is whole."""
    result = call.result
    x = call.operands[0]
    if x.shape == result.shape and schema_of(call.op).name != "aten::new_empty_strided":
        own = letter_dims(x.ndim)
        return Rule((own,), (own,), modes=unread_modes(0), local=with_local_shape("size"))
    return Rule((((),) * x.ndim,), (((),) * result.ndim,), unread=frozenset({0}))
