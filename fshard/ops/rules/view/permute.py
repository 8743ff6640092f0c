"""TODO."""

from __future__ import annotations

from collections.abc import Iterable

from fshard.ops.core.builders import normalize_dims, wrap_dim
from fshard.ops.core.call import Meta, OpCall, base_name, dry_run
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Rule
from fshard.ops.rules.view.view_factors import rule_of_moved_dims

__all__: list[str] = []

TRANSPOSES = """
    permute permute_copy transpose.int transpose_copy.int t t_copy mT mH numpy_T matrix_H adjoint
    swapaxes swapdims movedim moveaxis prims::transpose
"""


@register_rule(*TRANSPOSES.split())
def permuting(call: OpCall) -> Rule:
    """Where every dim goes is asked of the operation, on a tensor with no two sizes alike."""
    sizes = range(2, 2 + call.operands[0].ndim)
    marked = Meta(tuple(sizes), call.operands[0].dtype)
    shape = dry_run(call.op, (marked, *call.args[1:]), call.kwargs, "meta").shape
    return rule_of_moved_dims(call, [size - 2 for size in shape])


@register_rule("flip", "fliplr", "flipud", "prims::rev")
def flipped(call: OpCall) -> Rule:
    """The dims that are turned around keep their elements on other ranks."""
    name, ndim = base_name(call.op), call.operands[0].ndim
    at = {"fliplr": [1], "flipud": [0]}.get(name)
    dims = call.args[1] if at is None and call.args[1:] else call.kwargs.get("dims", at)
    turned = [wrap_dim(dim, ndim) for dim in dims or ()]
    return rule_of_moved_dims(call, range(ndim), permuted=_long(call, turned))


@register_rule("roll")
def rolled(call: OpCall) -> Rule:
    """Without dims the whole tensor is rolled as one dim; all around it, it stays as it is."""
    x, given = call.operands[0], call.get("dims")
    ndim, shifts = x.ndim, call.get("shifts")
    dims: Iterable[int] = normalize_dims(given, ndim)
    if given and x.ndim:
        pairs = zip(dims, shifts if isinstance(shifts, list | tuple) else [shifts], strict=True)
        dims = [dim for dim, shift in pairs if x.shape[dim] and shift % x.shape[dim]]
    return rule_of_moved_dims(call, range(ndim), permuted=_long(call, dims))


@register_rule("rot90")
def turned(call: OpCall) -> Rule:
    """A quarter is a transpose and one dim turned around, a half is both dims turned around."""
    ndim, quarters = call.operands[0].ndim, call.get("k") % 4
    one, other = (wrap_dim(dim, ndim) for dim in call.get("dims"))
    order = list(range(ndim))
    if quarters % 2:
        order[one], order[other] = other, one
    moving = ((), (other,), (one, other), (one,))[quarters]
    return rule_of_moved_dims(call, order, permuted=_long(call, moving))


def _long(call: OpCall, dims: Iterable[int]) -> list[int]:
    """Of dims those of more than one element: in others there is nothing to move."""
    return [dim for dim in dims if call.operands[0].ndim and call.operands[0].shape[dim] > 1]


@register_rule("channel_shuffle", "native_channel_shuffle")
def shuffled(call: OpCall) -> Rule:
    """Channels change places all over their dim."""
    return rule_of_moved_dims(call, range(call.operands[0].ndim), permuted=[1])
