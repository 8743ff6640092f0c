"""Weighted mean and variance, one packed reduction over ranks, of shards of any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._util.errors import fail
from fshard.layout.tree import is_pair
from fshard.ops.rules.reduce.exact_moments import weighted_moments
from fshard.partition.apply import on_pairs


def weighted_mean(
    x: Any, weights: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> Any:
    """Return the mean over dims, weighted: `sum(w * x) / sum(w)`.

    Args:
        x: values, a pair or a tensor, as in a partitioned function; any dim may be sharded.
        weights: weights, a pair or a tensor that broadcasts to `x`.
        dim: the dims to reduce; None is all.
        keepdim: keep reduced dims, of size 1.

    Returns:
        A pair if any operand is one, else a tensor; NaN where the weights add up to 0.

    Raises:
        ShardingError: dims out of range, and weights that do not broadcast to the values.

    Over sharded dims it takes one all-reduce, in double precision. Differentiable in `x` and
    `weights`. As `numpy.average` with weights.

    >>> import torch
    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,), sizes={0: (1, 3)})
    >>> x = fs.shard(torch.tensor([1.0, 2.0, 3.0, 6.0]), spec)
    >>> fs.unshard(fs.domain.weighted_mean(x, torch.tensor([1.0, 0.0, 2.0, 1.0])))
    tensor(3.2500)
    """
    return _run("fs.domain.weighted_mean", _mean, x, weights, dim, keepdim)


def weighted_var_mean(
    x: Any, weights: Any, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> tuple[Any, Any]:
    """Return the biased variance and the mean over dims, weighted by `weights`.

    Args:
        x: values, a pair or a tensor, as in a partitioned function; any dim may be sharded.
        weights: weights, a pair or a tensor that broadcasts to `x`.
        dim: the dims to reduce; None is all.
        keepdim: keep reduced dims, of size 1.

    Returns:
        `(variance, mean)`, pairs if any operand is one: `sum(w * (x - mean)**2) / sum(w)`.

    Raises:
        ShardingError: dims out of range, and weights that do not broadcast to the values.

    Over sharded dims it takes one all-reduce, of 96 bytes for each statistic. Shards merge as by
    Chan's update, without cancellation where means are much larger than deviations. Differentiable
    in `x` and `weights`.

    >>> import torch
    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,), sizes={0: (1, 3)})
    >>> x = fs.shard(torch.tensor([1.0, 2.0, 3.0, 6.0]), spec)
    >>> variance, mean = fs.domain.weighted_var_mean(x, torch.tensor([1.0, 0.0, 2.0, 1.0]))
    >>> fs.unshard(variance), fs.unshard(mean)
    (tensor(3.1875), tensor(3.2500))
    """
    where = "fs.domain.weighted_var_mean"
    variance, mean = _run(where, _variance, x, weights, dim, keepdim)
    return variance, mean


def _run(where: str, fn: Any, x: Any, weights: Any, dim: Any, keepdim: bool) -> Any:
    dims = tuple(range(len(x.shape))) if dim is None else (dim,) if isinstance(dim, int) else dim
    ndim = max(len(x.shape), 1)
    if not all(-ndim <= d < ndim for d in dims):
        fail(where, f"dim={dim!r} of a shape {tuple(x.shape)}",
             f"dims must be in {-ndim}..{ndim - 1}", f"dim={ndim - 1}")  # fmt: skip
    dims = tuple(sorted({d % ndim for d in dims}))
    shape, given = tuple(x.shape), tuple(weights.shape)
    sides = zip(reversed(shape), reversed(given), strict=False)
    if len(given) > len(shape) or not all(w in (1, n) for n, w in sides):
        fail(where, f"weights of shape {given} for values of shape {shape}",
             "weights must broadcast to the values", f"weights of shape {shape}")  # fmt: skip
    if is_pair(x) or is_pair(weights):
        return on_pairs(fn, mode="auto")(x, weights, dims, keepdim)
    return fn(x, weights, dims, keepdim)


def _moments(x: Tensor, weights: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return the mean and the variance, stacked, in the dtype of the results."""
    dtype = torch.result_type(x, weights) if x.dtype.is_floating_point else weights.dtype
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    moments = weighted_moments(x, weights.expand_as(x), list(dims))[1:].to(dtype)
    return moments if keepdim else moments.squeeze([dim + 1 for dim in dims])


def _mean(x: Tensor, weights: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    if not x.is_complex():
        return _moments(x, weights, dims, keepdim)[0]
    parts = torch.view_as_real(x)
    return torch.view_as_complex(_moments(parts, weights.unsqueeze(-1), dims, keepdim)[0])


def _variance(
    x: Tensor, weights: Tensor, dims: tuple[int, ...], keepdim: bool
) -> tuple[Tensor, Tensor]:
    mean, variance = _moments(x, weights, dims, keepdim)
    return variance, mean
