"""Rules of pooling, interpolation, padding, im2col, col2im, grid_sample and affine_grid.

Batch and channels may be sharded. Spatial dims may be sharded only between windows that tile
them; other windows read elements of other ranks.
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
from fshard.ops.rules.letters import letters, text_dims
from fshard.ops.rules.window.convolution import windows_tile
from fshard.ops.rules.shard_call import SetLocalShape, ShardCall
from fshard.ops.strategy.local_call import (
    Args,
    Kwargs,
    LocalCall,
    LocalRewrite,
    RankContext,
    with_argument,
)

aten = torch.ops.aten

LINEAR = """
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_lanczos2d_aa
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
    replication_pad3d max_unpool2d max_unpool3d
"""
"""Operations linear in their first operand."""
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
    """Return the number of spatial dims in the operation's name."""
    match = re.search(r"([123])d", base_name(call.op))
    assert match is not None
    return int(match[1])


def planes(meta: Meta, spatial: int) -> Dims:
    """Return the factors of the dims before the spatial ones; channels are the last of them."""
    lead = meta.ndim - spatial
    return text_dims("nc"[max(2 - lead, 0) :][:lead]) + ((),) * spatial


def per_plane(call: OpCall, modes: tuple[Mode, ...] = ()) -> Rule:
    """Return the rule `nc11->nc11` of an operation on each plane: spatial dims stay unsharded."""
    spatial = spatial_dims(call)
    lead = call.operands[0].ndim - spatial
    first = planes(call.operands[0], spatial)[:lead]
    dims = [(first + ((),) * max(meta.ndim - lead, 0)) for meta in call.operands]
    results = tuple(
        None if meta is None else first + ((),) * (meta.ndim - lead) for meta in call.results
    )
    return Rule(tuple(dims), results, modes=modes, local=ShardCall())


WINDOWED = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d")


def windowed(call: OpCall, modes: tuple[Mode, ...]) -> Rule:
    """Return `per_plane` with spatial dims that may be sharded between tiling windows."""
    x, spatial, kernel = call.operands[0], spatial_dims(call), call.get("kernel_size")
    names = letters(2 * spatial, "cn")
    lead = planes(x, spatial)[: x.ndim - spatial]
    operand_dims: list[tuple[str, ...]] = []
    result_dims: list[tuple[str, ...]] = []
    for i in range(spatial):
        width = kernel[i if len(kernel) > 1 else 0]
        tiles = windows_tile(call, i, x.shape[x.ndim - spatial + i], width)
        operand_dims.append((names[i], names[spatial + i]) if tiles else ())
        result_dims.append((names[i],) if tiles else ())
    inner = frozenset(f for dim in operand_dims for f in dim[1:])
    return Rule(((*lead, *operand_dims),), ((*lead, *result_dims),), unsharded=inner, modes=modes,
                local=ShardCall())  # fmt: skip


MAX_SCALE = 32
"""Maximum scale; PyTorch computes source indices in float32, wrong from a scale of 41 on."""


@register_rule(*NEAREST.split())
def upsample_nearest(call: OpCall) -> Rule:
    """Rule of nearest-neighbour upsampling: dims may be sharded if all elements repeat equally."""
    x, result_meta, spatial = call.operands[0], call.result, spatial_dims(call)
    names = letters(2 * spatial, "cn")
    operand_dims: list[tuple[str, ...]] = []
    result_dims: list[tuple[str, ...]] = []
    for i in range(spatial):
        size, larger = x.shape[i - spatial], result_meta.shape[i - spatial]
        is_multiple = size > 0 and larger % size == 0 and larger // size <= MAX_SCALE
        is_multiple = is_multiple and _scales_as(call, i, larger, size)
        operand_dims.append((names[i],) if is_multiple else ())
        result_dims.append((names[i], names[spatial + i]) if is_multiple else ())
    lead = planes(x, spatial)[: x.ndim - spatial]
    inner = frozenset(f for dim in result_dims for f in dim[1:])
    return Rule(((*lead, *operand_dims),), ((*lead, *result_dims),), unsharded=inner,
                modes=all_modes(0),
                local=ShardCall(rewrites=(_SetOutputSize(spatial),)))  # fmt: skip


def _scales_as(call: OpCall, dim: int, larger: int, size: int) -> bool:
    """Return True if a scale argument of a dim agrees with the sizes."""
    if call.has("scale_factors"):
        scales = call.get("scale_factors")
    else:
        names = ("scales_d", "scales_h", "scales_w") if call.has("scales_h") else ("scales",)
        scales = [call.get(name) for name in names if call.has(name)]
    return not scales or scales[dim] is None or scales[dim] * size == larger


@dataclass(frozen=True, slots=True)
class _SetOutputSize:
    """Rewrite: set `output_size` to the rank's size."""

    spatial: int

    def __call__(self, call: LocalCall, ctx: RankContext) -> LocalCall:
        """Return the rewritten call."""
        if argument(*call, "output_size") is None:
            return call
        return with_argument(*call, "output_size", list(ctx.shape()[-self.spatial :]))


@register_rule(*LINEAR.split())
def linear_in_plane(call: OpCall) -> Rule:
    """Rule of operations linear in the tensor they read, unless they divide integers."""
    moves = any(word in base_name(call.op) for word in ("pad", "unpool"))
    modes = linear_modes(0) if moves or is_inexact(call.operands[0]) else ()
    return windowed(call, modes) if base_name(call.op) in WINDOWED else per_plane(call, modes)


@register_rule(*MAXIMA.split())
def max_pool(call: OpCall) -> Rule:
    """Rule `nc(be)(df)->ncbd` of maximum pooling with windows `ef` that tile the plane.

    An unreduced maximum passes, unless indices are requested.
    """
    if base_name(call.op) in WINDOWED:
        return windowed(call, kind_modes(0, {"max": "max"}))
    return per_plane(call)


# -- padding --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LocalPad(LocalRewrite):
    """Local padding before the dim's first element and after its last one.

    `before` is the global padding in front of each dim.
    """

    before: tuple[int, ...]

    def call(self, op: Any, args: Args, kwargs: Kwargs, ctx: RankContext) -> LocalCall:
        """Return the padding by which the rank's result exceeds its operand."""
        pairs = []
        for dim, before in reversed(list(enumerate(self.before))):
            begin = ctx.result_offset(dim) - before
            end = begin + ctx.shape()[dim]
            pairs += [ctx.offset(0, dim) - begin, end - ctx.end(0, dim)]
        value = argument(op, args, kwargs, "value")
        return aten.constant_pad_nd.default, (args[0], pairs, value or 0), {}


@register_rule(aten.constant_pad_nd, aten.pad, aten._pad_enum, aten._pad_circular)  # fmt: skip
def pad(call: OpCall) -> Rule:
    """Rule of padding by constants, added to the first and the last shard of a dim.

    Zeros are linear, other constants keep averages and extremes. Dims padded by reflection and
    other modes stay unsharded.
    """
    x, pairs = call.operands[0], call.get("pad")
    names = letters(2 * x.ndim)
    dims: Dims = tuple((factor,) for factor in names[: x.ndim])
    if not _is_constant(call):
        padded_dims = range(x.ndim - len(pairs) // 2, x.ndim)
        dims = tuple(() if dim in padded_dims else factor for dim, factor in enumerate(dims))
        return Rule((dims,), (dims,), modes=all_modes(0), local=ShardCall())
    padding = {x.ndim - 1 - i // 2: pairs[i : i + 2] for i in range(0, len(pairs), 2)}
    operand_dims, result_dims, slices = list(dims), list(dims), list[Slice]()
    for dim, (before, after) in padding.items():
        if min(before, after) < 0:
            operand_dims[dim] = result_dims[dim] = ()
        elif before or after:
            size, name = x.shape[dim], names[x.ndim + dim]
            slices.append(Slice(name, dims[dim][0], -before, size + after))
            result_dims[dim] = (name,)
    value = (call.get("value") if call.has("value") else 0) or 0
    modes = linear_modes(0, affine=value != 0) if is_inexact(x) or value == 0 else ()
    modes += kind_modes(0, {"max": "max", "min": "min"})
    fronts = tuple(padding[dim][0] if dim in padding else 0 for dim in range(x.ndim))
    return Rule((tuple(operand_dims),), (tuple(result_dims),), modes=modes, local=_LocalPad(fronts),
                slices=tuple(slices))  # fmt: skip


def _is_constant(call: OpCall) -> bool:
    mode = call.get("mode") if call.has("mode") else "constant"
    return mode in ("constant", 0) and base_name(call.op) != "_pad_circular"


# -- windows and grids ----------------------------------------------------------------------


@register_rule(aten.im2col)
def im2col(call: OpCall) -> Rule:
    """Rule `nc11->n(ck)1` of `im2col`: channels are major to a window's elements."""
    first = planes(call.operands[0], 2)[:-2]
    result_dims = (*first[:-1], ("c", "k"), ())
    return Rule(((*first, (), ()),), (result_dims,), unsharded=frozenset("k"),
                modes=linear_modes(0), local=ShardCall())  # fmt: skip


@register_rule(aten.col2im)
def col2im(call: OpCall) -> Rule:
    """Rule `n(ck)1->nc11` of `col2im`, which adds up columns at the positions of their windows."""
    result = call.result
    first = planes(result, 2)[:-2]
    column_dims = (*first[:-1], ("c", "k"), ())
    return Rule((column_dims,), ((*first, (), ()),), unsharded=frozenset("k"),
                modes=linear_modes(0), local=ShardCall())  # fmt: skip


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
    f"{name}_backward" for name in (LINEAR + NEAREST).split() if "upsample" in name
)


@register_rule(*POOL_GRADIENTS.split())
def pool_backward(call: OpCall) -> Rule:
    """Rule of pooling gradients: each plane, linear in the incoming gradient."""
    return per_plane(call, linear_modes(0))


@register_rule(*UPSAMPLE_GRADIENTS.split())
def upsample_backward(call: OpCall) -> Rule:
    """Rule of upsampling gradients: each plane; `input_size` becomes the rank's."""
    rule = per_plane(call, linear_modes(0))
    return replace(rule, local=ShardCall(rewrites=(SetLocalShape("input_size"),)))


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
