"""Rules of pooling, resampling, padding and windows: batch and channels pass, spatial dims do not.

What a window reads may lie on another rank: cutting spatial dims is `fs.domain`'s, but where
windows lie one beside the other and dims are cut between them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard.ops.core.builders import all_modes, is_inexact, kind_modes, linear_modes
from fshard.ops.core.call import Meta, OpCall, argument, base_name
from fshard.ops.core.registry import register_rule
from fshard.ops.core.rule import Dims, Mode, Rule, Slice
from fshard.ops.rules.einsum_letters import letters, text_dims
from fshard.ops.rules.nn.convolution import are_apart
from fshard.ops.rules.shard_call import SetLocalShape, ShardCall
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
    with_argument,
)

__all__: list[str] = []

aten = torch.ops.aten

AVERAGES = """
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_lanczos2d_aa
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d max_unpool2d max_unpool3d
"""
"""Linear in their first operand."""
NEAREST = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d
"""
MAXIMA = """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    fractional_max_pool2d fractional_max_pool3d
"""


def spatial_dims(call: OpCall) -> int:
    """The number of spatial dims, as the operation's name says it."""
    found = re.search(r"([123])d", base_name(call.op))
    assert found is not None
    return int(found[1])


def planes(meta: Meta, spatial: int) -> Dims:
    """Factors of the dims before the spatial ones, the last of them the channels."""
    lead = meta.ndim - spatial
    return text_dims("nc"[max(2 - lead, 0) :][:lead]) + ((),) * spatial


def per_plane(call: OpCall, modes: tuple[Mode, ...] = ()) -> Rule:
    """Every plane of every tensor alone; those of fewer dims have no spatial ones."""
    spatial = spatial_dims(call)
    lead = call.operands[0].ndim - spatial
    first = planes(call.operands[0], spatial)[:lead]
    dims = [(first + ((),) * max(each.ndim - lead, 0)) for each in call.operands]
    results = tuple(
        None if each is None else first + ((),) * (each.ndim - lead) for each in call.results
    )
    return Rule(tuple(dims), results, modes=modes, local=ShardCall())


WINDOWED = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")


def windowed(call: OpCall, modes: tuple[Mode, ...]) -> Rule:
    """Where windows lie apart, as `per_plane` with dims of windows that can be cut between them."""
    x, spatial, kernel = call.operands[0], spatial_dims(call), call.get("kernel_size")
    every = letters(2 * spatial, "cn")
    lead = planes(x, spatial)[: x.ndim - spatial]
    reads: list[tuple[str, ...]] = []
    makes: list[tuple[str, ...]] = []
    for at in range(spatial):
        width = kernel[at if len(kernel) > 1 else 0]
        apart = are_apart(call, at, x.shape[x.ndim - spatial + at], width)
        reads.append((every[at], every[spatial + at]) if apart else ())
        makes.append((every[at],) if apart else ())
    whole = frozenset(f for dim in reads for f in dim[1:])
    return Rule(
        ((*lead, *reads),), ((*lead, *makes),), unsharded=whole, modes=modes, local=ShardCall()
    )


MOST_REPEATED = 32
"""Up to 40 times PyTorch's single-precision source of an element is the right one, not at 41."""


@register_rule(*NEAREST.split())
def repeated(call: OpCall) -> Rule:
    """Where every element is repeated as often, dims can be cut between elements."""
    x, made, spatial = call.operands[0], call.result, spatial_dims(call)
    every = letters(2 * spatial, "cn")
    reads: list[tuple[str, ...]] = []
    makes: list[tuple[str, ...]] = []
    for at in range(spatial):
        size, larger = x.shape[at - spatial], made.shape[at - spatial]
        whole = size > 0 and larger % size == 0 and larger // size <= MOST_REPEATED
        whole = whole and _scales_as(call, at, larger, size)
        reads.append((every[at],) if whole else ())
        makes.append((every[at], every[spatial + at]) if whole else ())
    lead = planes(x, spatial)[: x.ndim - spatial]
    inner = frozenset(f for dim in makes for f in dim[1:])
    return Rule(((*lead, *reads),), ((*lead, *makes),), unsharded=inner, modes=all_modes(0),
                local=ShardCall(changes=(_SetOutputSize(spatial),)))  # fmt: skip


def _scales_as(call: OpCall, at: int, larger: int, size: int) -> bool:
    """Whether a scale that is given along a dim is that of the sizes."""
    if call.has("scale_factors"):
        given = call.get("scale_factors")
    else:
        names = ("scales_d", "scales_h", "scales_w") if call.has("scales_h") else ("scales",)
        given = [call.get(name) for name in names if call.has(name)]
    return not given or given[at] is None or given[at] * size == larger


@dataclass(frozen=True, slots=True)
class _SetOutputSize:
    """A change: the size that comes out is the rank's."""

    spatial: int

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """The call with it."""
        if argument(*call, "output_size") is None:
            return call
        return with_argument(*call, "output_size", list(ctx.shape()[-self.spatial :]))


@register_rule(*AVERAGES.split())
def averaged(call: OpCall) -> Rule:
    """Linear in the tensor that it reads, but where integers are divided."""
    moves = any(word in base_name(call.op) for word in ("pad", "unpool"))
    modes = linear_modes(0) if moves or is_inexact(call.operands[0]) else ()
    return windowed(call, modes) if base_name(call.op) in WINDOWED else per_plane(call, modes)


@register_rule(*MAXIMA.split())
def largest(call: OpCall) -> Rule:
    """Of candidates the maxima are those of the maxima, but not where the indices are asked for."""
    if base_name(call.op) in WINDOWED:
        return windowed(call, kind_modes(0, {"max": "max"}))
    return per_plane(call)


# -- padding --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalPad(LocalRewrite):
    """A rank's part with what is added before its first and after its last element.

    `before` has for every dim how many elements the operation adds in front of all.
    """

    before: tuple[int, ...]

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """The padding by as much as the result begins before the part, and ends after it."""
        pairs = []
        for dim, before in reversed(list(enumerate(self.before))):
            begin = ctx.result_offset(dim) - before
            end = begin + ctx.shape()[dim]
            pairs += [ctx.offset(0, dim) - begin, end - ctx.end(0, dim)]
        value = argument(op, args, kwargs, "value")
        return aten.constant_pad_nd.default, (args[0], pairs, value or 0), {}


@register_rule(aten.constant_pad_nd, aten.pad, aten._pad_enum, aten._pad_circular)  # fmt: skip
def padded(call: OpCall) -> Rule:
    """Constants are added at the first and the last part of a dim that is cut.

    Zeros are linear, other constants keep averages and extremes. Dims that reflections and their
    like are for are whole: those of size 0 they refuse, padded or not.
    """
    x, pairs = call.operands[0], call.get("pad")
    every = letters(2 * x.ndim)
    dims: Dims = tuple((each,) for each in every[: x.ndim])
    if not _is_constant(call):
        whole = range(x.ndim - len(pairs) // 2, x.ndim)
        dims = tuple(() if dim in whole else each for dim, each in enumerate(dims))
        return Rule((dims,), (dims,), modes=all_modes(0), local=ShardCall())
    added = {x.ndim - 1 - at // 2: pairs[at : at + 2] for at in range(0, len(pairs), 2)}
    given, made, slices = list(dims), list(dims), list[Slice]()
    for dim, (before, after) in added.items():
        if min(before, after) < 0:
            given[dim] = made[dim] = ()
        elif before or after:
            size, name = x.shape[dim], every[x.ndim + dim]
            slices.append(Slice(name, dims[dim][0], -before, size + after))
            made[dim] = (name,)
    value = (call.get("value") if call.has("value") else 0) or 0
    modes = linear_modes(0, affine=value != 0) if is_inexact(x) or value == 0 else ()
    modes += kind_modes(0, {"max": "max", "min": "min"})
    fronts = tuple(added[dim][0] if dim in added else 0 for dim in range(x.ndim))
    return Rule((tuple(given),), (tuple(made),), modes=modes, local=_LocalPad(fronts),
                slices=tuple(slices))  # fmt: skip


def _is_constant(call: OpCall) -> bool:
    mode = call.get("mode") if call.has("mode") else "constant"
    return mode in ("constant", 0) and base_name(call.op) != "_pad_circular"


# -- windows and grids ----------------------------------------------------------------------


@register_rule(aten.im2col)
def im2col(call: OpCall) -> Rule:
    """Windows laid out as columns: channels are major to a window's elements."""
    first = planes(call.operands[0], 2)[:-2]
    made = (*first[:-1], ("c", "k"), ())
    return Rule(
        ((*first, (), ()),),
        (made,),
        unsharded=frozenset("k"),
        modes=linear_modes(0),
        local=ShardCall(),
    )


@register_rule(aten.col2im)
def col2im(call: OpCall) -> Rule:
    """Columns added up where their windows lie."""
    result = call.result
    first = planes(result, 2)[:-2]
    lies = (*first[:-1], ("c", "k"), ())
    return Rule(
        (lies,),
        ((*first, (), ()),),
        unsharded=frozenset("k"),
        modes=linear_modes(0),
        local=ShardCall(),
    )


@register_rule(aten.grid_sampler, aten.grid_sampler_2d, aten.grid_sampler_3d)
def grid_sampler(call: OpCall) -> Rule:
    """Points of a grid, each read from a whole plane: `nc11,nhw1->nchw`."""
    x, made = sampled(call.operands[0].ndim - 2)
    return Rule((x, (made[0], *made[2:], ())), (made,), modes=linear_modes(0), local=ShardCall())


def sampled(spatial: int) -> tuple[Dims, Dims]:
    """The dims of what is sampled, and of what comes out."""
    points = text_dims("dhw"[-spatial:])
    return (("n",), ("c",), *((),) * spatial), (("n",), ("c",), *points)


@dataclass(frozen=True, slots=True)
class _SetBatchSize:
    """A change: an argument of sizes begins with the rank's part of the batch."""

    name: str = "size"

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """The call with it."""
        sizes = argument(*call, self.name)
        return with_argument(*call, self.name, [ctx.shape()[0], *sizes[1:]])


@register_rule(aten.affine_grid_generator)
def affine_grid(call: OpCall) -> Rule:
    """Grids of transformed points: linear in the transformations."""
    made = call.result
    theta: Dims = (("n",), ("a",), ())
    return Rule((theta,), ((("n",), *((),) * (made.ndim - 2), ("a",)),), unsharded=frozenset("a"),
                modes=linear_modes(0), local=ShardCall(changes=(_SetBatchSize(),)))  # fmt: skip


# -- gradients ------------------------------------------------------------------------------

POOL_GRADIENTS = """
    avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward
    _adaptive_avg_pool3d_backward max_pool2d_with_indices_backward
    max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
    fractional_max_pool2d_backward reflection_pad1d_backward
    reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
    replication_pad2d_backward replication_pad3d_backward
"""
UPSAMPLE_GRADIENTS = " ".join(
    f"{name}_backward" for name in (AVERAGES + NEAREST).split() if "upsample" in name
)


@register_rule(*POOL_GRADIENTS.split())
def pool_backward(call: OpCall) -> Rule:
    """The gradient of every plane alone, linear in what comes."""
    return per_plane(call, linear_modes(0))


@register_rule(*UPSAMPLE_GRADIENTS.split())
def upsample_backward(call: OpCall) -> Rule:
    """The gradient of every plane alone; the input's shape is that of the rank's planes."""
    made = per_plane(call, linear_modes(0))
    return replace(made, local=ShardCall(changes=(SetLocalShape("input_size"),)))


@register_rule(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward)
def grid_sampler_backward(call: OpCall) -> Rule:
    """The planes' gradient sums over points, that of the grid over channels."""
    x, made = sampled(call.operands[1].ndim - 2)
    grid = (made[0], *made[2:], ())
    results = tuple(
        None if meta is None else dims for dims, meta in zip((x, grid), call.results, strict=True)
    )
    lacking = {
        f for dim in made for f in dim
        if any(dims is not None and dim not in dims for dims in results)
    }  # fmt: skip
    return Rule((made, x, grid), results, tuple(sorted((f, "sum") for f in lacking)),
                modes=linear_modes(0, results=2), local=ShardCall())  # fmt: skip


@register_rule(aten.affine_grid_generator_backward)
def affine_grid_backward(call: OpCall) -> Rule:
    """Points are summed into the transformations' gradient."""
    points = ((),) * (call.operands[0].ndim - 2)
    return Rule(((("n",), *points, ("a",)),), ((("n",), ("a",), ()),), unsharded=frozenset("a"),
                modes=linear_modes(0), local=ShardCall(changes=(_SetBatchSize(),)))  # fmt: skip
