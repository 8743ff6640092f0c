"""Rules of grid_sample and affine_grid, and their gradients.

Batch, channels and the points of the grid may be sharded; the plane that is read is unsharded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fshard.ops.core.builders import linear_modes
from fshard.ops.core.call import OpCall, argument
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Rule
from fshard.ops.rules.letters import text_dims
from fshard.ops.rules.shard_call import ShardCall
from fshard.ops.strategy.local_call import LocalCall, RankContext, with_argument

aten = torch.ops.aten


@register_rule(aten.grid_sampler, aten.grid_sampler_2d, aten.grid_sampler_3d)
def grid_sampler(call: OpCall) -> Rule:
    """Rule `nc11,nhw1->nchw`: each point of a grid reads an unsharded plane."""
    x, result_dims = sampled(call.operands[0].ndim - 2)
    return Rule((x, (result_dims[0], *result_dims[2:], ())), (result_dims,), modes=linear_modes(0),
                local=ShardCall())  # fmt: skip


def sampled(spatial: int) -> tuple[Dims, Dims]:
    """Return the dims of the sampled tensor and of the result."""
    points = text_dims("dhw"[-spatial:])
    return (("n",), ("c",), *((),) * spatial), (("n",), ("c",), *points)


@dataclass(frozen=True, slots=True)
class _SetBatchSize:
    """Rewrite: set the first of an argument of sizes to the rank's batch size."""

    name: str = "size"

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        sizes = argument(*call, self.name)
        return with_argument(*call, self.name, [ctx.shape()[0], *sizes[1:]])


@register_rule(aten.affine_grid_generator)
def affine_grid(call: OpCall) -> Rule:
    """Rule `na1->n11a` of `affine_grid_generator`: batch may be sharded; linear in `theta`."""
    result_meta = call.result
    theta: Dims = (("n",), ("a",), ())
    return Rule((theta,), ((("n",), *((),) * (result_meta.ndim - 2), ("a",)),),
                unsharded=frozenset("a"), modes=linear_modes(0),
                local=ShardCall(rewrites=(_SetBatchSize(),)))  # fmt: skip


@register_rule(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward)
def grid_sampler_backward(call: OpCall) -> Rule:
    """Rule of `grid_sampler`'s gradients: sums over points for the input, channels for the grid."""
    x, result_dims = sampled(call.operands[1].ndim - 2)
    grid = (result_dims[0], *result_dims[2:], ())
    results = tuple(
        None if meta is None else dims for dims, meta in zip((x, grid), call.results, strict=True)
    )
    missing = {
        f for dim in result_dims for f in dim
        if any(dims is not None and dim not in dims for dims in results)
    }  # fmt: skip
    return Rule((result_dims, x, grid), results, tuple(sorted((f, "sum") for f in missing)),
                modes=linear_modes(0, results=2), local=ShardCall())  # fmt: skip


@register_rule(aten.affine_grid_generator_backward)
def affine_grid_backward(call: OpCall) -> Rule:
    """Rule of `affine_grid`'s gradient, a sum over points."""
    points = ((),) * (call.operands[0].ndim - 2)
    return Rule(((("n",), *points, ("a",)),), ((("n",), ("a",), ()),), unsharded=frozenset("a"),
                modes=linear_modes(0), local=ShardCall(rewrites=(_SetBatchSize(),)))  # fmt: skip
