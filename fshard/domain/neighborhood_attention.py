"""`fs.domain.na1d`, `na2d` and `na3d`: attention to the neighborhood of each query."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._torch.functorch import is_transformed
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.tree import is_pair
from fshard.layout.validation import as_ints
from fshard.ops.rules.window.neighborhoods import Neighborhoods
from fshard.partition.apply import on_pairs

Ints = int | Sequence[int]
Flags = bool | Sequence[bool]

NEIGHBORHOOD = """
    Attend to the keys in the neighborhood of each query, over {n} spatial dims.

    On pairs, whose spatial dims may be sharded in any sizes, and on tensors, as in partitioned
    functions.

    Args:
        query: shape (batch, *spatial, heads, width); batch and heads may be sharded, too.
        key: the same shape.
        value: shape (batch, *spatial, heads, value width).
        kernel_size: keys of a neighborhood along each spatial dim, one number for all or one for
            each.
        dilation: distance of these keys; `kernel_size * dilation` is at most the dim's size.
        is_causal: attend only to the query's position and those before it, one flag for all dims
            or one for each.
        scale: factor of the scores; None is `1 / sqrt(width)`.

    Returns:
        The attention, shape (batch, *spatial, heads, value width), a pair if any operand is one.

    Raises:
        ShardingError: shapes or dtypes that do not match, neighborhoods that are larger than a dim.

    At the ends of a dim neighborhoods are shifted inside, so that every query attends to equally
    many keys; causal ones are cut off at the first key. Each rank receives the keys and values
    that it lacks, and gradients add up in the halos. Differentiable any number of times; second
    derivatives hold the keys of every neighborhood. Semantics of NATTEN's `na{n}d`
    (arXiv 2204.07143, 2209.15001), in PyTorch's own operations.

    >>> import torch
    >>> import fshard as fs
    >>> q, k, v = torch.randn(3, 1, *(6,) * {n}, 2, 4)
    >>> spec = fs.Spec(fs.Mesh(h=2), fs.P(None, "h"), shape=q.shape, sizes={{1: (4, 2)}})
    >>> pairs = [fs.shard(x, spec) for x in (q, k, v)]
    >>> y = fs.domain.na{n}d(*pairs, kernel_size=3)
    >>> torch.allclose(fs.unshard(y), fs.domain.na{n}d(q, k, v, kernel_size=3), atol=1e-5)
    True
"""


def _neighborhood(n: int) -> Callable[..., Any]:
    """Return the attention over `n` spatial dims."""
    name = f"na{n}d"

    def na(
        query: Any, key: Any, value: Any, kernel_size: Ints, dilation: Ints = 1,
        is_causal: Flags = False, scale: float | None = None,
    ) -> Any:  # fmt: skip
        where = f"fs.domain.{name}"
        _check_operands(where, n, query, key, value)
        kernels = _numbers(where, "kernel_size", kernel_size, n)
        steps = _numbers(where, "dilation", dilation, n)
        flags = is_causal if isinstance(is_causal, Sequence) else [is_causal] * n
        _check_sizes(where, tuple(query.shape[1:-2]), kernels, steps, flags)
        if scale is not None and not isinstance(scale, int | float):
            fail(where, f"scale={scale!r}", "scale must be a number or None", "scale=None")
        factor = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else float(scale)
        attention = Neighborhoods(kernels, steps, list(flags), factor)
        if any(map(is_pair, (query, key, value))):
            run = on_pairs(torch.ops.fshard.neighborhood_attention.default, mode="auto")
            return run(query, key, value, *attention.options)
        if is_transformed():
            return attention(query, key, value)
        return attention.forward(query, key, value)

    na.__doc__ = NEIGHBORHOOD.format(n=n).strip()
    na.__name__ = na.__qualname__ = name
    return na


na1d, na2d, na3d = map(_neighborhood, (1, 2, 3))


def _numbers(where: str, name: str, given: Any, n: int) -> list[int]:
    """Return an argument for each spatial dim; raise for anything but ints of at least 1."""
    numbers = (given,) * n if type(given) is int else as_ints(given)
    if numbers is None or len(numbers) != n or min(numbers) < 1:
        fail(where, f"{name}={given!r}", f"{name} must be an int of at least 1, or {n} of them",
             f"{name}={3 if name == 'kernel_size' else 1}")  # fmt: skip
    return list(numbers)


def _check_operands(where: str, n: int, *operands: Any) -> None:
    for x in operands:
        if not is_pair(x) and not isinstance(x, Tensor):
            fail(where, f"an operand of type {type(x).__name__}",
                 "query, key and value must be pairs or tensors", "fs.shard(x, spec)"
                 )  # fmt: skip
    shapes = [tuple(x.shape) for x in operands]
    query, key, value = shapes
    if len(query) != n + 3 or key != query or value[:-1] != query[:-1]:
        spatial = ", ".join("zyx"[-n:])
        fail(where, f"query {query}, key {key}, value {value}",
             f"they must have shape (batch, {spatial}, heads, width), the same but for the width "
             "of the value", "x.movedim(1, -2) of (batch, heads, ..., width)")  # fmt: skip
    dtypes = [x.dtype for x in operands]
    if len({*dtypes}) > 1 or not dtypes[0].is_floating_point:
        fail(where, f"dtypes {', '.join(map(str, dtypes))}",
             "query, key and value must have the same floating dtype", "x.to(torch.float32) of all"
             )  # fmt: skip


def _check_sizes(
    where: str, sizes: Sequence[int], kernels: Sequence[int], steps: Sequence[int],
    flags: Sequence[Any],
) -> None:  # fmt: skip
    problems = [
        Problem(f"kernel_size {kernel} and dilation {step} of a dim of {size}",
                f"their product must be at most {size}",
                f"kernel_size={size // step}" if size >= step else "dilation=1")
        for size, kernel, step in zip(sizes, kernels, steps, strict=True) if kernel * step > size
    ]  # fmt: skip
    if len(flags) != len(sizes) or not all(isinstance(flag, bool) for flag in flags):
        problems.append(Problem(f"is_causal={flags!r}", "is_causal must be a bool, or "
                                f"{len(sizes)} of them", "is_causal=False"))  # fmt: skip
    raise_if(where, problems)
