"""`fs.domain.balance`: shard sizes that balance the weights of a dim's indices."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from fshard._util.errors import fail
from fshard._util.text import plural
from fshard.layout.spec import Spec

NAME = "fs.domain.balance"


def balance(spec: Spec, weights: Any, /, *, dim: int | None = None) -> Spec:
    """Return a layout whose shards of a dim have the least largest sum of weights.

    Args:
        spec: the layout, of which a dim is sharded.
        weights: the weight of each index of the dim, at least 0: a sequence of numbers or a tensor,
            the same on every rank.
        dim: the dim; None is the only sharded one.

    Returns:
        `spec` with other sizes of the dim, as for `fs.reshard(pair, fs.domain.balance(...))`. No
        contiguous sizes have a smaller largest sum; of several such sizes the ones whose first
        shards are largest. Shards at the end may be empty.

    Raises:
        ShardingError: several sharded dims without `dim`, weights that are negative, not finite or
            not one for each index.

    Exact bisection: the largest sum is bisected between its bounds, each bound being the sum of an
    interval, with greedy intervals as the test (Nicol, 1994; Pinar and Aykanat, 2004). It takes
    O(p log n) per probe.

    >>> import fshard as fs
    >>> spec = fs.Spec(fs.Mesh(x=3), fs.P("x"), shape=(6,))
    >>> fs.domain.balance(spec, [5, 1, 1, 1, 2, 2])
    f32[6@x:1+4+1]
    """
    dims = [i for i, axes in enumerate(spec.partition.dims) if axes]
    if dim is None and len(dims) != 1:
        fail(NAME, f"{spec}, of which {plural(len(dims), 'dim')} are sharded",
             "dim must be given unless one dim is sharded", "dim=0")  # fmt: skip
    if dim is not None and dim not in {*dims, *(i - spec.ndim for i in dims)}:
        fail(NAME, f"dim={dim!r} of {spec}", f"dim must be a sharded one, of {dims}",
             f"dim={dims[0] if dims else 0}")  # fmt: skip
    index = dims[0] if dim is None else dim % spec.ndim
    given, size = _as_tensor(weights), spec.shape[index]
    values = None if given is None or given.is_complex() else given.double()
    if values is None or values.shape != (size,) or not bool(
        ((values >= 0) & (values < math.inf)).all()
    ):  # fmt: skip
        text = f"{weights!r}" if given is None else f"{given.dtype} of shape {tuple(given.shape)}"
        fail(NAME, f"weights {text} for dim {index} of {spec}",
             f"weights must be {plural(size, 'finite number')} of at least 0",
             f"torch.ones({size})")  # fmt: skip
    sizes = balanced_sizes(values.tolist(), spec.dim_shards(index))
    return spec.replace(sizes={index: sizes})


def _as_tensor(weights: Any) -> torch.Tensor | None:
    """Return numbers as a tensor, None for anything else."""
    try:
        return torch.as_tensor(weights)
    except (TypeError, ValueError, RuntimeError):
        return None


def balanced_sizes(weights: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return sizes of contiguous parts of indices with the least largest sum of weights.

    >>> balanced_sizes([1, 1, 1, 1, 1], 4)
    (2, 2, 1, 0)
    """
    sums = list(itertools.accumulate(weights, initial=0.0))
    low = max([sums[-1] / parts, *weights], default=0.0)
    high = math.inf
    while True:
        ends, larger = _greedy(sums, parts, low)
        if ends[-1] == len(weights):  # the least sum is reached
            break
        # No sum below `larger` lets an interval be longer.
        low = larger
        middle = (low + high) / 2 if high < math.inf else 2 * low
        ends, larger = _greedy(sums, parts, middle)
        if ends[-1] == len(weights):
            high = max(sums[b] - sums[a] for a, b in itertools.pairwise(ends))
        else:
            low = max(low, larger)
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _greedy(sums: Sequence[float], parts: int, limit: float) -> tuple[list[int], float]:
    """Return the ends of the longest intervals with sums up to `limit`, and the next larger sum."""
    ends, larger = [0], math.inf
    for _ in range(parts):
        start = ends[-1]
        end = bisect_right(sums, sums[start] + limit) - 1
        while end > start and sums[end] - sums[start] > limit:  # rounding
            end -= 1
        if end + 1 < len(sums):
            larger = min(larger, sums[end + 1] - sums[start])
        ends.append(end)
    return ends, larger
