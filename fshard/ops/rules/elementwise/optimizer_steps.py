"""Rule of fused optimizer steps, element by element."""

from __future__ import annotations

from fshard.ops.core.builders import dim_factors
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule


@register_rule("fshard::fused_update")
def fused_update(call: OpCall) -> Rule:
    """Rule `ab,ab,1->ab` of parameter, state and gradient, and of scalars that all elements use."""
    dims, count = dim_factors(call.operands[0].ndim), len(call.results)
    scalars = len(call.operands) - count - 1
    return Rule((dims,) * (count + 1) + ((),) * scalars, (dims,) * count)
