"""Ring attention as a strategy of `scaled_dot_product_attention`.

Where keys are sharded, partitioned functions and `fs.apply` cost it beside the gather of the keys,
the all-to-all to sharded heads, and the decomposition, which reduces results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import ShardingError
from fshard.domain.sharded_attention import SEQUENCE, AttentionOptions, ring_layouts
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.call import OpCall
from fshard.ops.core.registry import MappedStrategy, register_mapped_strategy
from fshard.spmd.mapped_function import MappedFunction


@register_mapped_strategy(torch.ops.aten.scaled_dot_product_attention.default)
def ring_strategy(call: OpCall, specs: Sequence[Spec]) -> MappedStrategy | None:
    """Return the ring of an attention whose keys are sharded, None if it has none."""
    if call.get("dropout_p"):
        return None
    options = AttentionOptions(
        0.0, bool(call.get("is_causal")), call.get("scale"), bool(call.get("enable_gqa"))
    )
    sharded = tuple(
        spec.replace(partition=PartitionSpec(*(dim or None for dim in spec.partition.dims)))
        for spec in specs
    )
    return _ring_strategy(options, sharded, call.result.shape)


@lru_cache(maxsize=CACHE_SIZE)
def _ring_strategy(
    options: AttentionOptions, specs: tuple[Spec, ...], shape: tuple[int, ...]
) -> MappedStrategy | None:
    try:
        layouts = ring_layouts(specs, shape)
    except ShardingError:
        return None
    if layouts is None:
        return None
    run = MappedFunction(
        layouts.body(options), "", None, None, layouts.result, None,
        redistribute_inputs=False, check=False,
    )  # fmt: skip
    run.where = "ring_attention"
    query, key = layouts.operands[:2]
    rows = math.prod(layouts.result.local_shape(layouts.result.mesh.ranks[0])[:-1])
    n = query.mesh.axis_size(layouts.axes)
    # Two products with a multiplication and an addition each; half of the scores if causal.
    flops = (2 if options.is_causal else 4) * rows * key.shape[SEQUENCE] * query.shape[-1]
    return MappedStrategy(run, layouts.operands, flops * (n - 1) / n)
