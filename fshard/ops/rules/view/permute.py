"""Rules of operations that move dims, or elements along dims.

permute, transpose, t, mT, swapaxes, movedim, rot90, channel_shuffle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from fshard.ops.core.builders import wrap_dim
from fshard.ops.core.call import Meta, OpCall, dry_run
from fshard.ops.core.registry import register_decomposition, register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.view.view_factors import moved_dims_rule

TRANSPOSES = """
    permute permute_copy transpose.int transpose_copy.int t t_copy mT mH numpy_T matrix_H adjoint
    swapaxes swapdims movedim moveaxis prims::transpose
"""


@register_rule(*TRANSPOSES.split())
def permute(call: OpCall) -> Rule:
    """Rule `abc->cab` of permutations, found by a run of the operation on distinct sizes."""
    sizes = range(2, 2 + call.operands[0].ndim)
    marked = Meta(tuple(sizes), call.operands[0].dtype)
    shape = dry_run(call.op, (marked, *call.args[1:]), call.kwargs, "meta").shape
    return moved_dims_rule(call, [size - 2 for size in shape])


@register_rule("rot90")
def rot90(call: OpCall) -> Rule:
    """Rule of `rot90`: a quarter turn is a transpose and one flip, a half turn two flips."""
    ndim, quarters = call.operands[0].ndim, call.get("k") % 4
    first, second = (wrap_dim(dim, ndim) for dim in call.get("dims"))
    order = list(range(ndim))
    if quarters % 2:
        order[first], order[second] = second, first
    moving = ((), (second,), (first, second), (first,))[quarters]
    return moved_dims_rule(call, order, permuted=_nontrivial(call, moving))


def _nontrivial(call: OpCall, dims: Iterable[int]) -> list[int]:
    """Return the dims with more than one element, along which something moves."""
    return [dim for dim in dims if call.operands[0].ndim and call.operands[0].shape[dim] > 1]


@register_decomposition("rot90")
def turns(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    """Decompose quarter turns into flips and a transpose."""
    first, second = dims
    flipped = ((), (second,), (first, second), (first,))[k % 4]
    x = x.flip(flipped)
    return x.transpose(first, second) if k % 2 else x


@register_rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: OpCall) -> Rule:
    """Rule of `channel_shuffle`: channels move along their dim."""
    return moved_dims_rule(call, range(call.operands[0].ndim), permuted=[1])
