"""Decompositions of normalizations over sharded dims: one reduction each, and `normalize`.

A layer norm over a sharded width reduces the sums of each position; a batch norm over a sharded
batch uses the statistics of the global batch. Gradient operations are decomposed too. Returned
statistics of layers and batches have no gradient, as in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.ops.core.registry import register_decomposition
from fshard.ops.rules.nn.normalize import Maybe, normalize
from fshard.ops.rules.reduce.moments import mean_square, moments, reduced_together, wide
from fshard.ops.rules.reduce.vector_norms import vector_norm


def _normal(
    x: Tensor, dims: list[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the normalized tensor, mean, inverse deviation and variance."""
    both = moments(x, dims)
    mean, variance = both.unbind()
    return normalize(x, both, weight, bias, eps), mean, (variance + eps).rsqrt(), variance


def _scaled(x: Tensor, weight: Maybe, shape: Sequence[int] | None = None) -> Tensor:
    if weight is None:
        return x
    return x * (weight if shape is None else weight.reshape(shape))


def _shaped(x: Maybe, shape: Sequence[int]) -> Maybe:
    return None if x is None else x.reshape(shape)


def _back(grad: Tensor, normal: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    """Return the input's gradient of a normalization over `dims`, from that of its result."""
    means = [grad.mean(dims, True), (grad * normal).mean(dims, True)]
    mean, slope = reduced_together(torch.stack(means))
    return rstd * (grad - mean - normal * slope)


def _last(x: Tensor, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the dims before the normalized ones, and the normalized dims."""
    lead = x.ndim - len(shape)
    return list(range(lead)), list(range(lead, x.ndim))


def _requested(gradients: Sequence[Tensor], output_mask: Sequence[bool]) -> tuple[Maybe, ...]:
    """Replace the gradients that are not requested by None."""
    return tuple(x if needed else None for x, needed in zip(gradients, output_mask, strict=True))


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims) if dims else x


# -- layers --------------------------------------------------------------------------------


@register_decomposition("native_layer_norm")
def _native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    result, mean, rstd, _ = _normal(x, _last(x, shape)[1], weight, bias, eps)
    return result, mean.detach(), rstd.detach()


@register_decomposition("layer_norm")
def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    return _native_layer_norm(x, shape, weight, bias, eps)[0]


@register_decomposition("native_layer_norm_backward")
def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Maybe,
    bias: Maybe, output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:  # fmt: skip
    lead, dims = _last(x, shape)
    grads, normal = wide(grad), (wide(x) - mean) * rstd
    into = _back(_scaled(grads, weight), normal, rstd, dims).to(x.dtype)
    gradients = into, _summed(grads * normal, lead), _summed(grads, lead)
    return _requested(gradients, output_mask)


@register_decomposition("_fused_rms_norm")
def _fused_rms_norm(
    x: Tensor, shape: Sequence[int], weight: Maybe, eps: float | None
) -> tuple[Tensor, Tensor]:
    epsilon = torch.finfo(x.dtype).eps if eps is None else eps
    square = mean_square(x, _last(x, shape)[1])
    result: Tensor = normalize(x, square.unsqueeze(0), weight, None, epsilon)
    return result, (square + epsilon).rsqrt()


@register_decomposition("rms_norm")
def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Maybe = None, eps: float | None = None
) -> Tensor:
    return _fused_rms_norm(x, shape, weight, eps)[0]


@register_decomposition("_fused_rms_norm_backward")
def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Maybe,
    output_mask: Sequence[bool],
) -> tuple[Maybe, Maybe]:  # fmt: skip
    lead, dims = _last(x, shape)
    rstd, weight = rstd.conj(), None if weight is None else weight.conj()  # of complex values
    grads, normal = wide(grad), wide(x).conj() * rstd
    inner = _scaled(grads, weight)
    into = (rstd * (inner - normal * (inner * normal).mean(dims, True))).to(x.dtype)
    scale = _summed(grads * normal, lead).to(x.dtype) if output_mask[1] else None
    return (into if output_mask[0] else None), scale


# -- groups --------------------------------------------------------------------------------


def _in_groups(x: Tensor, groups: int) -> tuple[Tensor, list[int]]:
    """Split the channels into groups; return the dims of one group too."""
    groups_apart = x.unflatten(1, (groups, x.shape[1] // groups))
    return groups_apart, list(range(2, groups_apart.ndim))


def _channels(x: Tensor) -> list[int]:
    """Return the shape in which channels broadcast to `x`."""
    return [1, x.shape[1], *(1 for _ in x.shape[2:])]


@register_decomposition("native_group_norm")
def _native_group_norm(
    x: Tensor, weight: Maybe, bias: Maybe, N: int, C: int, HxW: int, group: int, eps: float,  # noqa: N803
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grouped, dims = _in_groups(x, group)
    shape = [1, *grouped.shape[1:3], *(1 for _ in dims[1:])]
    scale, shift = _shaped(weight, shape), _shaped(bias, shape)
    result, mean, rstd, _ = _normal(grouped, dims, scale, shift, eps)
    return result.flatten(1, 2), mean.squeeze(dims).to(x.dtype), rstd.squeeze(dims).to(x.dtype)


@register_decomposition("group_norm")
def _group_norm(
    x: Tensor, num_groups: int, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    return _native_group_norm(x, weight, bias, 0, 0, 0, num_groups, eps)[0]


@register_decomposition("native_group_norm_backward")
def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe, N: int, C: int, HxW: int,  # noqa: N803
    group: int, output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:  # fmt: skip
    grouped, dims = _in_groups(wide(x), group)
    shape = (*mean.shape, *(1 for _ in dims))
    scale = wide(rstd).reshape(shape)
    normal = (grouped - wide(mean).reshape(shape)) * scale
    inner = _in_groups(_scaled(wide(grad), weight, _channels(x)), group)[0]
    into = _back(inner, normal, scale, dims).flatten(1, 2).to(x.dtype)
    reduced = [0, *range(2, x.ndim)]
    scales = (wide(grad) * normal.flatten(1, 2)).sum(reduced).to(x.dtype)
    gradients = into, scales, wide(grad).sum(reduced).to(x.dtype)
    return _requested(gradients, output_mask)


# -- batches and instances -----------------------------------------------------------------


def _over_batch(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _batch_norm(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe,
    var: Maybe, own_statistics: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return a batch norm by its own or given statistics; mean, inverse deviation, variance."""
    shape = _channels(x)
    scale, shift = _shaped(weight, shape), _shaped(bias, shape)
    if own_statistics:
        result, *statistics = _normal(x, _over_batch(x), scale, shift, eps)
        mean, rstd, var = (statistic.detach().flatten() for statistic in statistics)
        return result, mean, rstd, var
    assert mean is not None
    assert var is not None
    given = torch.stack([mean.reshape(shape), var.reshape(shape)])
    result = normalize(x, given, scale, shift, eps)
    return result, mean.detach(), (var + eps).rsqrt().detach(), var.detach()


@register_decomposition("batch_norm")
def _batch_norm_first(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    return _batch_norm(x, weight, bias, mean, var, training, eps)[0]


@register_decomposition("native_batch_norm")
def _native_batch_norm(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _batch_norm(x, weight, bias, mean, var, training, eps)[:3]


@register_decomposition("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    x: Tensor, weight: Maybe, bias: Maybe, training: bool, momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _batch_norm(x, weight, bias, None, None, training, eps)[:3]


@register_decomposition("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, var: Tensor, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    *results, variance = _batch_norm(x, weight, bias, mean, var, training, eps)
    if not training:
        return (*results, mean.clone(), var.clone())
    count = x.numel() // x.shape[1]
    variance = variance * (count / (count - 1) if count > 1 else math.inf)
    return (*results, mean + momentum * (results[1] - mean), var + momentum * (variance - var))


@register_decomposition("_batch_norm_with_update_functional")
def _batch_norm_with_update(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, var: Tensor,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    results = _batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    return (*results[:3], torch.empty(0, dtype=torch.uint8), *results[3:])


@register_decomposition("instance_norm")
def _instance_norm(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, use_input_stats: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    if not use_input_stats:
        return _batch_norm(x, weight, bias, mean, var, False, eps)[0]
    scale, shift = _shaped(weight, _channels(x)), _shaped(bias, _channels(x))
    return _normal(x, list(range(2, x.ndim)), scale, shift, eps)[0]


@register_decomposition("native_batch_norm_backward")
def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Maybe, running_mean: Maybe, running_var: Maybe,
    save_mean: Maybe, save_invstd: Maybe, train: bool, eps: float, output_mask: Sequence[bool],
) -> tuple[Maybe, ...]:  # fmt: skip
    shape, reduced, grads = _channels(x), _over_batch(x), wide(grad)
    if train:
        mean, rstd = save_mean, save_invstd
    else:
        mean, rstd = running_mean, None if running_var is None else (running_var + eps).rsqrt()
    assert mean is not None
    assert rstd is not None
    scale = rstd.reshape(shape)
    normal = (wide(x) - mean.reshape(shape)) * scale
    inner = _scaled(grads, weight, shape)
    into = _back(inner, normal, scale, reduced) if train else inner * scale
    gradients = into.to(x.dtype), (grads * normal).sum(reduced), grads.sum(reduced)
    return _requested(gradients, output_mask)


# -- norms of other things -----------------------------------------------------------------


@register_decomposition("renorm")
def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    others = [d for d in range(x.ndim) if d != dim % x.ndim]
    size = vector_norm(wide(x), float(p), others, True)
    return (x * torch.where(size > maxnorm, maxnorm / (size + 1e-7), 1)).to(x.dtype)


@register_decomposition("cosine_similarity")
def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    x, y = torch.broadcast_tensors(x, y)

    def size(v: Tensor) -> Tensor:
        # The lower bound eps of a norm has no gradient.
        length = vector_norm(v, 2.0, dim, True)
        return length + (length.clamp_min(eps) - length).detach()

    return ((x / size(x)) * (y / size(y))).sum(dim)


def _sizes(v: Tensor, dim: int, order: float = 2.0) -> Tensor:
    """Return norms over all dims but one."""
    if dim == -1:
        return vector_norm(v, order)
    return vector_norm(v, order, [d for d in range(v.ndim) if d != dim], True)


@register_decomposition("norm_except_dim")
def _norm_except_dim(v: Tensor, pow: int = 2, dim: int = 0) -> Tensor:  # noqa: A002
    return _sizes(v, dim, float(pow))


@register_decomposition("_weight_norm")
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / _sizes(v, dim))


@register_decomposition("_weight_norm_interface")
def _weight_norm_interface(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    sizes = _sizes(v, dim % v.ndim)
    return v * (g / sizes), sizes.detach()
