"""How normalizations are done by others, over dims that stay cut: two means and a product.

With a layer's width cut over an axis, a layer norm is two sums of one number to a position; with a
batch cut, a batch norm is one over all of it. Gradients that have operations of their own likewise.
Statistics of layers and batches that are returned have no gradient, as PyTorch's have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.ops.core.registry import register_decomposition
from fshard.ops.rules.reduce.reduction_decompositions import wide
from fshard.ops.rules.reduce.vector_norms import vector_norm

__all__: list[str] = []

Given = Tensor | None


def _normal(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The normalized, its mean, one over its deviation and its variance, all in wide numbers."""
    numbers = wide(x)
    mean = numbers.mean(dims, True)
    apart = numbers - mean
    variance = (apart * apart).mean(dims, True)
    rstd = (variance + eps).rsqrt()
    return apart * rstd, mean, rstd, variance


def _affine(x: Tensor, weight: Given, bias: Given, shape: Sequence[int] | None = None) -> Tensor:
    if weight is not None:
        x = x * (weight if shape is None else weight.reshape(shape))
    return x if bias is None else x + (bias if shape is None else bias.reshape(shape))


def _back(grad: Tensor, normal: Tensor, rstd: Tensor, dims: list[int]) -> Tensor:
    """The gradient of what was normalized, from that of the normalized."""
    return rstd * (grad - grad.mean(dims, True) - normal * (grad * normal).mean(dims, True))


def _last(x: Tensor, shape: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dims before the normalized ones, and those."""
    lead = x.ndim - len(shape)
    return list(range(lead)), list(range(lead, x.ndim))


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    return x.sum(dims) if dims else x


# -- layers --------------------------------------------------------------------------------


@register_decomposition("native_layer_norm")
def _native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Given, bias: Given, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    normal, mean, rstd, _ = _normal(x, _last(x, shape)[1], eps)
    return _affine(normal, weight, bias).to(x.dtype), mean.detach(), rstd.detach()


@register_decomposition("layer_norm")
def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Given = None, bias: Given = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    return _native_layer_norm(x, shape, weight, bias, eps)[0]


@register_decomposition("native_layer_norm_backward")
def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Given,
    bias: Given, output_mask: Sequence[bool],
) -> tuple[Given, Given, Given]:  # fmt: skip
    lead, dims = _last(x, shape)
    given, normal = wide(grad), (wide(x) - mean) * rstd
    into = _back(_affine(given, weight, None), normal, rstd, dims).to(x.dtype)
    made = into, _summed(given * normal, lead), _summed(given, lead)
    return tuple(each if asked else None for each, asked in zip(made, output_mask, strict=True))  # type: ignore[return-value]


@register_decomposition("_fused_rms_norm")
def _fused_rms_norm(
    x: Tensor, shape: Sequence[int], weight: Given, eps: float | None
) -> tuple[Tensor, Tensor]:
    numbers = wide(x)
    small = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = ((numbers * numbers).mean(_last(x, shape)[1], True) + small).rsqrt()
    return _affine(numbers * rstd, weight, None).to(x.dtype), rstd


@register_decomposition("rms_norm")
def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Given = None, eps: float | None = None
) -> Tensor:
    return _fused_rms_norm(x, shape, weight, eps)[0]


@register_decomposition("_fused_rms_norm_backward")
def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Given,
    output_mask: Sequence[bool],
) -> tuple[Given, Given]:  # fmt: skip
    lead, dims = _last(x, shape)
    given, normal = wide(grad), wide(x) * rstd
    inner = _affine(given, weight, None)
    into = (rstd * (inner - normal * (inner * normal).mean(dims, True))).to(x.dtype)
    scale = _summed(given * normal, lead).to(x.dtype) if output_mask[1] else None
    return (into if output_mask[0] else None), scale


# -- groups --------------------------------------------------------------------------------


def _in_groups(x: Tensor, groups: int) -> tuple[Tensor, list[int]]:
    """Channels apart by groups, and the dims that a group has."""
    apart = x.unflatten(1, (groups, x.shape[1] // groups))
    return apart, list(range(2, apart.ndim))


def _channels(x: Tensor) -> list[int]:
    """The shape in which channels broadcast to `x`."""
    return [1, x.shape[1], *(1 for _ in x.shape[2:])]


@register_decomposition("native_group_norm")
def _native_group_norm(
    x: Tensor, weight: Given, bias: Given, N: int, C: int, HxW: int, group: int, eps: float,  # noqa: N803
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    apart, dims = _in_groups(x, group)
    normal, mean, rstd, _ = _normal(apart, dims, eps)
    made = _affine(normal.flatten(1, 2), weight, bias, _channels(x)).to(x.dtype)
    return made, mean.squeeze(dims).to(x.dtype), rstd.squeeze(dims).to(x.dtype)


@register_decomposition("group_norm")
def _group_norm(
    x: Tensor, num_groups: int, weight: Given = None, bias: Given = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    return _native_group_norm(x, weight, bias, 0, 0, 0, num_groups, eps)[0]


@register_decomposition("native_group_norm_backward")
def _group_norm_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Given, N: int, C: int, HxW: int,  # noqa: N803
    group: int, output_mask: Sequence[bool],
) -> tuple[Given, Given, Given]:  # fmt: skip
    apart, dims = _in_groups(wide(x), group)
    numbers = (*mean.shape, *(1 for _ in dims))
    scale = wide(rstd).reshape(numbers)
    normal = (apart - wide(mean).reshape(numbers)) * scale
    inner = _in_groups(_affine(wide(grad), weight, None, _channels(x)), group)[0]
    into = _back(inner, normal, scale, dims).flatten(1, 2).to(x.dtype)
    over = [0, *range(2, x.ndim)]
    scales = (wide(grad) * normal.flatten(1, 2)).sum(over).to(x.dtype)
    made = into, scales, wide(grad).sum(over).to(x.dtype)
    return tuple(each if asked else None for each, asked in zip(made, output_mask, strict=True))  # type: ignore[return-value]


# -- batches and instances -----------------------------------------------------------------


def _over_batch(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _batch_norm(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, own: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch norm by its own statistics or those given; mean, inverse deviation and variance."""
    shape = _channels(x)
    if own:
        normal, *told = _normal(x, _over_batch(x), eps)
        mean, rstd, var = (each.flatten() for each in told)
    else:
        assert mean is not None
        assert var is not None
        rstd = (var + eps).rsqrt()
        normal = (wide(x) - mean.reshape(shape)) * rstd.reshape(shape)
    made = _affine(normal, weight, bias, shape).to(x.dtype)
    return made, mean.detach(), rstd.detach(), var.detach()


@register_decomposition("batch_norm")
def _batch_norm_first(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    return _batch_norm(x, weight, bias, mean, var, training, eps)[0]


@register_decomposition("native_batch_norm")
def _native_batch_norm(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _batch_norm(x, weight, bias, mean, var, training, eps)[:3]


@register_decomposition("_native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(
    x: Tensor, weight: Given, bias: Given, training: bool, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm(x, weight, bias, None, None, training, eps)[:3]


@register_decomposition("_native_batch_norm_legit_functional")
def _batch_norm_functional(
    x: Tensor, weight: Given, bias: Given, mean: Tensor, var: Tensor, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    *made, spread = _batch_norm(x, weight, bias, mean, var, training, eps)
    if not training:
        return (*made, mean.clone(), var.clone())
    count = x.numel() // x.shape[1]
    spread = spread * (count / (count - 1) if count > 1 else math.inf)
    return (*made, mean + momentum * (made[1] - mean), var + momentum * (spread - var))


@register_decomposition("_batch_norm_with_update_functional")
def _batch_norm_with_update(
    x: Tensor, weight: Given, bias: Given, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    made = _batch_norm_functional(x, weight, bias, mean, var, True, momentum, eps)
    return (*made[:3], torch.empty(0, dtype=torch.uint8), *made[3:])


@register_decomposition("instance_norm")
def _instance_norm(
    x: Tensor, weight: Given, bias: Given, mean: Given, var: Given, use_input_stats: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    if not use_input_stats:
        return _batch_norm(x, weight, bias, mean, var, False, eps)[0]
    normal = _normal(x, list(range(2, x.ndim)), eps)[0]
    return _affine(normal, weight, bias, _channels(x)).to(x.dtype)


@register_decomposition("native_batch_norm_backward")
def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Given, running_mean: Given, running_var: Given,
    save_mean: Given, save_invstd: Given, train: bool, eps: float, output_mask: Sequence[bool],
) -> tuple[Given, Given, Given]:  # fmt: skip
    shape, over, given = _channels(x), _over_batch(x), wide(grad)
    if train:
        mean, rstd = save_mean, save_invstd
    else:
        mean, rstd = running_mean, None if running_var is None else (running_var + eps).rsqrt()
    assert mean is not None
    assert rstd is not None
    scale = rstd.reshape(shape)
    normal = (wide(x) - mean.reshape(shape)) * scale
    inner = _affine(given, weight, None, shape)
    into = _back(inner, normal, scale, over) if train else inner * scale
    made = into.to(x.dtype), (given * normal).sum(over), given.sum(over)
    return tuple(each if asked else None for each, asked in zip(made, output_mask, strict=True))  # type: ignore[return-value]


# -- norms of other things -----------------------------------------------------------------


@register_decomposition("renorm")
def _renorm(x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    others = [at for at in range(x.ndim) if at != dim % x.ndim]
    size = vector_norm(wide(x), float(p), others, True)
    return (x * torch.where(size > maxnorm, maxnorm / (size + 1e-7), 1)).to(x.dtype)


@register_decomposition("cosine_similarity")
def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    x, y = torch.broadcast_tensors(x, y)

    def size(each: Tensor) -> Tensor:
        # The gradient does not see that sizes are at least eps.
        made = vector_norm(each, 2.0, dim, True)
        return made + (made.clamp_min(eps) - made).detach()

    return ((x / size(x)) * (y / size(y))).sum(dim)


def _sizes(v: Tensor, dim: int, order: float = 2.0) -> Tensor:
    """Norms over all dims but one."""
    if dim == -1:
        return vector_norm(v, order)
    return vector_norm(v, order, [at for at in range(v.ndim) if at != dim], True)


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
