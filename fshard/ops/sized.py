"""Operations whose results have a stated size, where PyTorch's size depends on values.

They have the names, truncation and padding of `jax.numpy`. They are compositions of operations of
static shape, so that they run in `partition`, `shard_map`, `torch.func` and `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail


def nonzero(x: Tensor, /, *, size: int, fill_value: int | Sequence[int] = 0) -> tuple[Tensor, ...]:
    """Return the indices of the first `size` nonzero elements, in row-major order.

    Args:
        x: a tensor of one dim or more.
        size: number of indices; further nonzero elements are left out.
        fill_value: index that pads the result if there are fewer; one for all dims, or one for
            every dim.

    Returns:
        An int64 tensor of shape `(size,)` for every dim of `x`, so that `x[fs.nonzero(x, size=n)]`
        are the elements.

    Raises:
        ShardingError: if `size` is not an int of 0 or more, or `x` has no dims.

    The result has no gradient. In `fs.partition` at most a bool of every element is gathered. After
    `jax.numpy.nonzero`.

    >>> import torch
    >>> import fshard as fs
    >>> fs.nonzero(torch.tensor([0, 5, 0, 6, 7]), size=2)
    (tensor([1, 3]),)
    >>> fs.nonzero(torch.tensor([[0, 5], [6, 0]]), size=3, fill_value=-1)
    (tensor([ 0,  1, -1]), tensor([ 1,  0, -1]))
    """
    check_size(size, "fs.nonzero", "size")
    if not x.ndim:
        fail("fs.nonzero", "a tensor of 0 dims", "x must have one dim or more", "x.reshape(1)")
    fills = [fill_value] * x.ndim if isinstance(fill_value, int) else [*fill_value]
    if len(fills) != x.ndim:
        fail(
            "fs.nonzero",
            f"fill_value of {len(fills)} items for a tensor of {x.ndim} dims",
            "fill_value must be an int, or have an item for every dim",
            "fill_value=0",
        )
    positions = _first_true(x.ne(0).flatten(), size)
    present = positions < x.numel()
    indices, after = [], x.numel()
    for length, fill in zip(x.shape, fills, strict=True):
        after //= max(length, 1)
        index = positions // max(after, 1) % max(length, 1)
        indices.append(torch.where(present, index, fill))
    return tuple(indices)


def masked_select(x: Tensor, mask: Tensor, /, *, size: int, fill_value: float = 0) -> Tensor:
    """Return the first `size` elements of `x` whose `mask` is True, in row-major order.

    Args:
        x: a tensor.
        mask: a bool tensor; it and `x` are broadcast to one shape.
        size: number of elements; further ones are left out.
        fill_value: value that pads the result if there are fewer.

    Returns:
        A tensor of shape `(size,)` and the dtype of `x`.

    Raises:
        ShardingError: if `size` is not an int of 0 or more, or `mask` is not of bools.

    Selected elements have the gradients of the result, all others zero. In
    `fs.partition` at most the mask is gathered, and every rank selects from its shard: the result
    is unreduced. After `jax.numpy.extract` and `torch.masked_select`.

    >>> import torch
    >>> import fshard as fs
    >>> x = torch.tensor([3.0, 1.0, 4.0, 2.0])
    >>> fs.masked_select(x, x > 1, size=2), fs.masked_select(x, x > 3, size=2, fill_value=-1)
    (tensor([3., 4.]), tensor([ 4., -1.]))
    """
    check_size(size, "fs.masked_select", "size")
    if mask.dtype != torch.bool:
        fail("fs.masked_select", f"a mask of {mask.dtype}", "mask must be of bools", "mask != 0")
    x, mask = torch.broadcast_tensors(x, mask)
    n = x.numel()
    if not n:
        return x.new_full((size,), fill_value)
    positions = _first_true(mask.flatten(), size)
    selected = x.flatten().index_select(0, positions.clamp(max=n - 1))
    return torch.where(positions < n, selected, fill_value).to(x.dtype)


def unique(
    x: Tensor,
    /,
    *,
    size: int,
    fill_value: float | None = None,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Return the `size` smallest of the unique values, in ascending order.

    Args:
        x: a tensor of one element or more, of any shape. NaNs are equal, and follow all numbers.
        size: number of values; further ones are left out.
        fill_value: value that pads the result if there are fewer; None is the smallest value.
        return_index: also return the index in `x.flatten()` where every value occurs first.
        return_inverse: also return the index of every element's value, in the shape of `x`; values
            that are left out have indices from `size` on.
        return_counts: also return how often every value occurs.

    Returns:
        The values, of shape `(size,)`, or a tuple of them and the indices, the inverse and the
        counts that are requested. Padding has the index of the smallest value, and counts of 0.

    Raises:
        ShardingError: if `size` is not an int of 0 or more, or `x` has no elements.

    Values have the gradient of the elements that occur first; the rest have none. In `fs.partition`
    the tensor is gathered and sorted. After `jax.numpy.unique`.

    >>> import torch
    >>> import fshard as fs
    >>> fs.unique(torch.tensor([3, 1, 3, 2, 1]), size=2)
    tensor([1, 2])
    >>> fs.unique(torch.tensor([3, 1, 3]), size=3, fill_value=-1, return_counts=True)
    (tensor([ 1,  3, -1]), tensor([1, 2, 0]))
    """
    check_size(size, "fs.unique", "size")
    n = x.numel()
    if not n:
        fail(
            "fs.unique",
            f"a tensor of shape {tuple(x.shape)}",
            "x must have an element, for its smallest pads the result",
            "x.new_zeros(size) in place of it",
        )
    values, order = x.flatten().sort(stable=True)
    left, right = values[:-1], values[1:]
    differ = (left != right) & ~((left != left) & (right != right))
    starts = torch.cat((torch.ones_like(values[:1], dtype=torch.bool), differ))
    bounds = _first_true(starts, size + 1)
    present = bounds[:-1] < n
    firsts = torch.where(present, bounds[:-1], 0)
    unique_values = values.index_select(0, firsts)
    if fill_value is not None:
        unique_values = torch.where(present, unique_values, fill_value).to(x.dtype)
    results = [unique_values]
    if return_index:
        results.append(order.index_select(0, firsts))
    if return_inverse:
        ranks = starts.cumsum(0) - 1
        results.append(torch.zeros_like(order).scatter(0, order, ranks).reshape(x.shape))
    if return_counts:
        results.append(bounds.diff())
    return tuple(results) if results[1:] else unique_values


def bincount(x: Tensor, weights: Tensor | None = None, /, *, length: int) -> Tensor:
    """Return how often every int below `length` occurs, or the sum of the weights where it does.

    Args:
        x: ints, of shape `(n,)`. Negative ones count as 0, those from `length` on are left out.
        weights: the weight of every element, of shape `(n,)`; None counts.
        length: length of the result.

    Returns:
        A tensor of shape `(length,)`, of int64 or the dtype of `weights`.

    Raises:
        ShardingError: if `length` is not an int of 0 or more, or `x` is not of ints of one dim.

    A weight has the gradient of its sum. In `fs.partition` every rank counts its shard: the
    result is unreduced. After `jax.numpy.bincount`.

    >>> import torch
    >>> import fshard as fs
    >>> fs.bincount(torch.tensor([1, 1, 0, 7]), length=3)
    tensor([1, 2, 0])
    """
    check_size(length, "fs.bincount", "length")
    if x.ndim != 1 or is_inexact(x) or x.dtype == torch.bool:
        fail(
            "fs.bincount",
            f"a tensor of {x.dtype} of shape {tuple(x.shape)}",
            "x must be of ints and have one dim",
            "x.long().flatten()",
        )
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.int64)
    # Values that are left out are summed in an element more.
    sums = torch.zeros(length + 1, dtype=weights.dtype, device=x.device)
    return sums.scatter_add(0, x.long().clamp(0, length), weights)[:length]


def check_size(size: object, where: str, name: str) -> None:
    """Raise `ShardingError` unless a size is an int of 0 or more."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        fail(
            where,
            f"{name}={size!r}",
            f"{name} must be an int of 0 or more, known before the run",
            f"{name}=8; further elements are left out",
        )


def _first_true(mask: Tensor, size: int) -> Tensor:
    """Return the positions of the first `size` True elements of a mask, its length for others."""
    return torch.searchsorted(mask.cumsum(0), torch.arange(1, size + 1, device=mask.device))
