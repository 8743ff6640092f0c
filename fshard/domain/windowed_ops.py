"""Windowed operations on pairs, with the names and arguments of `torch.nn.functional`.

They are thin forms of the rules that `fs.apply` and `fs.partition` use: spatial dims may be sharded
in any sizes, and each rank receives the elements of its window that it lacks. An element of a
result is on the rank that has the middle of its window. Gradients add up where windows overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch.nn.functional as F

from fshard._util.errors import raise_if
from fshard.ops.core.window_arguments import argument_problems
from fshard.partition.apply import on_pairs

Ints = int | Sequence[int]
"""One int for all spatial dims, or one for each."""


def _run(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run a function of `torch.nn.functional` on pairs, in the layouts that they have.

    A call that is refused names the problems of its arguments.
    """
    try:
        return _on_pairs(name)(*args, **kwargs)
    except Exception:
        problems = argument_problems(getattr(F, name), args, kwargs)
        if not problems:
            raise
    raise_if(f"fs.domain.{name}", problems)


@cache
def _on_pairs(name: str) -> Callable[..., Any]:
    """Return a function of `torch.nn.functional` as one of pairs."""
    return on_pairs(getattr(F, name), mode="auto")


def _listed(values: Any) -> Any:
    """Return an int as a list of one, by which an operation's overload is found without a trace."""
    return [values] if type(values) is int else values


def _named(function: Callable[..., Any], name: str, n: int, doc: str) -> Callable[..., Any]:
    """Return the function of `n` spatial dims with a name and a docstring."""
    function.__doc__ = doc.format(n=n).strip()
    function.__name__ = function.__qualname__ = name
    return function


# -- convolutions -------------------------------------------------------------------------------

CONVOLUTION = """
    Convolve a pair with {n} spatial dims, which may be sharded.

    Args:
        input: pair of shape ([batch,] channels, *spatial).
        weight: pair or tensor of shape (out channels, channels / groups, *kernel).
        bias: pair or tensor of shape (out channels,), or None.
        stride: distance of windows in elements, one for all spatial dims or one for each.
        padding: zeros at both ends of the spatial dims; "valid" for none, "same" for a result of
            the input's size.
        dilation: distance of the elements of a window.
        groups: number of groups of channels.

    Returns:
        The pair of the result, whose dims are sharded over the axes of the input's; the weight's
        gradient is unreduced along the axes of spatial dims.

    Raises:
        ShardingError: arguments that `torch.nn.functional.conv{n}d` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x, weight = torch.randn(1, 2, *(8,) * {n}), torch.randn(4, 2, *(3,) * {n})
    >>> pair = fs.shard(x, fs.Mesh(h=2), fs.P(None, None, "h"))
    >>> y = fs.domain.conv{n}d(pair, weight, stride=2, padding=1)
    >>> full = torch.nn.functional.conv{n}d(x, weight, stride=2, padding=1)
    >>> torch.allclose(fs.unshard(y), full, atol=1e-4)
    True
"""


def _convolution(n: int) -> Callable[..., Any]:
    def conv(
        input: Any, weight: Any, bias: Any = None, stride: Ints = 1, padding: Ints | str = 0,
        dilation: Ints = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        sizes = map(_listed, (stride, padding, dilation))
        return _run(f"conv{n}d", input, weight, bias, *sizes, groups)

    return _named(conv, f"conv{n}d", n, CONVOLUTION)


conv1d, conv2d, conv3d = map(_convolution, (1, 2, 3))

TRANSPOSED = """
    Apply a transposed convolution to a pair with {n} spatial dims, which may be sharded.

    Args:
        input: pair of shape ([batch,] channels, *spatial).
        weight: pair or tensor of shape (channels, out channels / groups, *kernel).
        bias: pair or tensor of shape (out channels,), or None.
        stride: distance of the windows of the result in elements, one for all spatial dims or one
            for each.
        padding: elements that the result is cropped by at both ends.
        output_padding: elements that are added at the end of the result.
        groups: number of groups of channels.
        dilation: distance of the elements of a window.

    Returns:
        The pair of the result; the weight's gradient is unreduced along the axes of spatial dims.

    Raises:
        ShardingError: arguments that `torch.nn.functional.conv_transpose{n}d` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x, weight = torch.randn(1, 2, *(6,) * {n}), torch.randn(2, 4, *(3,) * {n})
    >>> pair = fs.shard(x, fs.Mesh(h=2), fs.P(None, None, "h"))
    >>> y = fs.domain.conv_transpose{n}d(pair, weight, stride=2)
    >>> full = torch.nn.functional.conv_transpose{n}d(x, weight, stride=2)
    >>> torch.allclose(fs.unshard(y), full, atol=1e-4)
    True
"""


def _transposed(n: int) -> Callable[..., Any]:
    def conv(
        input: Any, weight: Any, bias: Any = None, stride: Ints = 1, padding: Ints = 0,
        output_padding: Ints = 0, groups: int = 1, dilation: Ints = 1,
    ) -> Any:  # fmt: skip
        sizes = map(_listed, (stride, padding, output_padding))
        return _run(f"conv_transpose{n}d", input, weight, bias, *sizes, groups,
                    _listed(dilation))  # fmt: skip

    return _named(conv, f"conv_transpose{n}d", n, TRANSPOSED)


conv_transpose1d, conv_transpose2d, conv_transpose3d = map(_transposed, (1, 2, 3))


# -- pooling ------------------------------------------------------------------------------------

AVERAGE = """
    Average windows of a pair with {n} spatial dims, which may be sharded.

    Args:
        input: pair of shape ([batch,] channels, *spatial).
        kernel_size: elements of a window, one for all spatial dims or one for each.
        stride: distance of windows; None is the kernel size.
        padding: zeros at both ends of the spatial dims.
        ceil_mode: also take windows that begin in the dim and end after its padding.
        count_include_pad: divide by the number of elements and zeros of a window.
        **divisor: `divisor_override` of 2 and 3 dims, the number to divide by.

    Returns:
        The pair of the averages, whose dims are sharded over the axes of the input's.

    Raises:
        ShardingError: arguments that `torch.nn.functional.avg_pool{n}d` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x = torch.randn(1, 2, *(9,) * {n})
    >>> spec = fs.Spec(fs.Mesh(h=2), fs.P(None, None, "h"), shape=x.shape, sizes={{2: (5, 4)}})
    >>> y = fs.domain.avg_pool{n}d(fs.shard(x, spec), 3, stride=2, padding=1)
    >>> full = torch.nn.functional.avg_pool{n}d(x, 3, stride=2, padding=1)
    >>> torch.allclose(fs.unshard(y), full, atol=1e-5)
    True
"""


def _average(n: int) -> Callable[..., Any]:
    def pool(
        input: Any, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0,
        ceil_mode: bool = False, count_include_pad: bool = True, **divisor: int,
    ) -> Any:  # fmt: skip
        return _run(f"avg_pool{n}d", input, kernel_size, stride, padding, ceil_mode,
                    count_include_pad, **divisor)  # fmt: skip

    return _named(pool, f"avg_pool{n}d", n, AVERAGE)


avg_pool1d, avg_pool2d, avg_pool3d = map(_average, (1, 2, 3))

MAXIMUM = """
    Take the maxima of windows of a pair with {n} spatial dims, which may be sharded.

    Args:
        input: pair of shape ([batch,] channels, *spatial).
        kernel_size: elements of a window, one for all spatial dims or one for each.
        stride: distance of windows; None is the kernel size.
        padding: positions at both ends of the spatial dims that are in windows, without elements.
        dilation: distance of the elements of a window.
        ceil_mode: also take windows that begin in the dim and end after its padding.
        return_indices: also return the flat index of every maximum in its global plane.

    Returns:
        The pair of the maxima, or the pairs of maxima and indices.

    Raises:
        ShardingError: arguments that `torch.nn.functional.max_pool{n}d` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x = torch.randn(1, 2, *(9,) * {n})
    >>> spec = fs.Spec(fs.Mesh(h=2), fs.P(None, None, "h"), shape=x.shape, sizes={{2: (5, 4)}})
    >>> y, indices = fs.domain.max_pool{n}d(fs.shard(x, spec), 3, 2, return_indices=True)
    >>> full = torch.nn.functional.max_pool{n}d(x, 3, 2, return_indices=True)
    >>> torch.equal(fs.unshard(y), full[0]), torch.equal(fs.unshard(indices), full[1])
    (True, True)
"""


def _maximum(n: int) -> Callable[..., Any]:
    def pool(
        input: Any, kernel_size: Ints, stride: Ints | None = None, padding: Ints = 0,
        dilation: Ints = 1, ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        return _run(f"max_pool{n}d", input, kernel_size, stride, padding, dilation,
                    ceil_mode=ceil_mode, return_indices=return_indices)  # fmt: skip

    return _named(pool, f"max_pool{n}d", n, MAXIMUM)


max_pool1d, max_pool2d, max_pool3d = map(_maximum, (1, 2, 3))

ADAPTIVE_AVERAGE = """
    Average a pair with {n} spatial dims, which may be sharded, to a result of a given size.

    Args:
        input: pair of shape ([batch,] channels, *spatial).
        output_size: elements of the result, one for all spatial dims or one for each; None is the
            size of the input.

    Returns:
        The pair of the averages.

    Raises:
        ShardingError: arguments that `torch.nn.functional.adaptive_avg_pool{n}d` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x = torch.randn(1, 2, *(8,) * {n})
    >>> pair = fs.shard(x, fs.Mesh(h=2), fs.P(None, None, "h"))
    >>> y = fs.domain.adaptive_avg_pool{n}d(pair, 3)
    >>> torch.allclose(fs.unshard(y), torch.nn.functional.adaptive_avg_pool{n}d(x, 3), atol=1e-5)
    True
"""


def _adaptive_average(n: int) -> Callable[..., Any]:
    def pool(input: Any, output_size: int | Sequence[int | None]) -> Any:
        return _run(f"adaptive_avg_pool{n}d", input, output_size)

    return _named(pool, f"adaptive_avg_pool{n}d", n, ADAPTIVE_AVERAGE)


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = map(_adaptive_average, (1, 2, 3))

ADAPTIVE_MAXIMUM = """
    Take maxima of a pair with {n} spatial dims, which may be sharded, to a result of a given size.

    Args:
        input: pair of shape ([batch,] channels, *spatial).
        output_size: elements of the result, one for all spatial dims or one for each.
        return_indices: also return the flat index of every maximum in its global plane.

    Returns:
        The pair of the maxima, or the pairs of maxima and indices.

    Raises:
        ShardingError: arguments that `torch.nn.functional.adaptive_max_pool{n}d` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x = torch.randn(1, 2, *(8,) * {n})
    >>> pair = fs.shard(x, fs.Mesh(h=2), fs.P(None, None, "h"))
    >>> y = fs.domain.adaptive_max_pool{n}d(pair, 3)
    >>> torch.equal(fs.unshard(y), torch.nn.functional.adaptive_max_pool{n}d(x, 3))
    True
"""


def _adaptive_maximum(n: int) -> Callable[..., Any]:
    def pool(input: Any, output_size: Ints, return_indices: bool = False) -> Any:
        return _run(f"adaptive_max_pool{n}d", input, output_size, return_indices=return_indices)

    return _named(pool, f"adaptive_max_pool{n}d", n, ADAPTIVE_MAXIMUM)


adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = map(_adaptive_maximum, (1, 2, 3))


# -- other operations -----------------------------------------------------------------------------


def interpolate(
    input: Any,
    size: Ints | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    """Interpolate a pair whose spatial dims may be sharded.

    Args:
        input: pair of shape (batch, channels, *spatial).
        size: elements of the result, one for all spatial dims or one for each; or
        scale_factor: the quotient of the sizes of result and input.
        mode: "nearest", "nearest-exact", "linear", "bilinear", "bicubic", "trilinear" or "area".
        align_corners: keep the centers of the first and last elements in place.
        recompute_scale_factor: compute the scale from the sizes.
        antialias: weight elements by a filter that is as wide as the coarser grid.

    Returns:
        The pair of the result.

    Raises:
        ShardingError: arguments that `torch.nn.functional.interpolate` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x = torch.randn(1, 2, 8, 8)
    >>> pair = fs.shard(x, fs.Mesh(h=2), fs.P(None, None, "h"))
    >>> y = fs.domain.interpolate(pair, scale_factor=1.5, mode="bilinear")
    >>> full = torch.nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear")
    >>> y.spec, torch.allclose(fs.unshard(y), full, atol=1e-5)
    (f32[1,2,12@h,12], True)
    """
    return _run("interpolate", input, size, scale_factor, mode, align_corners,
                recompute_scale_factor, antialias)  # fmt: skip


def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Any:
    """Pad a pair whose padded dims may be sharded.

    Args:
        input: pair of any shape.
        pad: elements before and after the last dim, then the one before it, and so on; negative
            numbers crop.
        mode: "constant", "reflect", "replicate" or "circular".
        value: the constant, 0 by default.

    Returns:
        The pair of the result, its first and last shards larger.

    Raises:
        ShardingError: arguments that `torch.nn.functional.pad` refuses.

    >>> import torch
    >>> import fshard as fs
    >>> x = fs.shard(torch.arange(8.0).view(1, 1, 8), fs.Mesh(h=2), fs.P(None, None, "h"))
    >>> y = fs.domain.pad(x, (2, 1), mode="circular")
    >>> y.spec, y.local[0][0, 0]
    (f32[1,1,11@h:chunk], tensor([6., 7., 0., 1., 2., 3.]))
    """
    return _run("pad", input, pad, mode, value)


def unfold(
    input: Any, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0, stride: Ints = 1
) -> Any:
    """Return the windows of a pair's planes as columns, sharded by rows.

    Args:
        input: pair of shape (batch, channels, height, width). No spec describes the windows of a
            part of each row: a sharded width is redistributed, by an all-to-all, so that rows,
            channels or the batch are sharded in its place.
        kernel_size: rows and columns of a window, an int or two.
        dilation: distance of the elements of a window.
        padding: zeros at both ends of the rows and columns.
        stride: distance of windows.

    Returns:
        The pair of shape (batch, channels * kernel, windows), sharded by rows of windows.

    Raises:
        ShardingError: arguments that `torch.nn.functional.unfold` refuses.

    The transpose is `fs.domain.fold`.

    >>> import torch
    >>> import fshard as fs
    >>> x = torch.randn(1, 2, 8, 4)
    >>> y = fs.domain.unfold(fs.shard(x, fs.Mesh(h=2), fs.P(None, None, "h")), 3, padding=1)
    >>> y.spec, torch.equal(fs.unshard(y), torch.nn.functional.unfold(x, 3, padding=1))
    (f32[1,18,32@h], True)
    """
    return _run("unfold", input, kernel_size, dilation, padding, stride)


def fold(
    input: Any, output_size: Ints, kernel_size: Ints, dilation: Ints = 1, padding: Ints = 0,
    stride: Ints = 1,
) -> Any:  # fmt: skip
    """Add the columns of a pair to planes where their windows are; columns may be sharded by rows.

    Args:
        input: pair of shape (batch, channels * kernel, windows).
        output_size: height and width of the planes, an int or two.
        kernel_size: rows and columns of a window.
        dilation: distance of the elements of a window.
        padding: rows and columns at both ends that are dropped.
        stride: distance of windows.

    Returns:
        The pair of shape (batch, channels, height, width), rows sharded evenly.

    Raises:
        ShardingError: arguments that `torch.nn.functional.fold` refuses.

    The transpose is `fs.domain.unfold`.

    >>> import torch
    >>> import fshard as fs
    >>> columns = torch.randn(1, 18, 32)
    >>> pair = fs.shard(columns, fs.Mesh(h=2), fs.P(None, None, "h"))
    >>> y = fs.domain.fold(pair, (8, 4), 3, padding=1)
    >>> full = torch.nn.functional.fold(columns, (8, 4), 3, padding=1)
    >>> y.spec, torch.allclose(fs.unshard(y), full, atol=1e-5)
    (f32[1,2,8@h,4], True)
    """
    return _run("fold", input, output_size, kernel_size, dilation, padding, stride)
