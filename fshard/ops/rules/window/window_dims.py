"""Spatial dims of windowed operations: factors and windows of their rules, and local windows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fshard._util.cache import CACHE_SIZE
from fshard.layout.spec import Spec
from fshard.ops.core.call import Meta, OpCall, base_name
from fshard.ops.core.rule import Dims, Mode, Rule
from fshard.ops.core.windows import Reach, Window
from fshard.ops.rules.letters import text_dims
from fshard.ops.rules.shard_call import ShardCall

Windows = tuple[Window | None, ...]
"""Window of every spatial dim, None for one whose elements are computed from one element each."""


def spatial_value(call: OpCall, name: str, dim: int, default: Any) -> Any:
    """Return an argument's value for a spatial dim: a number or a list of one is for all dims."""
    values = call.get(name) if call.has(name) else default
    if isinstance(values, list | tuple):
        values = values[dim if len(values) > 1 else 0] if values else default
    return default if values is None else values


@dataclass(frozen=True, slots=True)
class SpatialFactors:
    """Factors of the spatial dims: of the tensor that is read, and of the result."""

    read: Dims
    output: Dims
    windows: tuple[Window, ...]

    @staticmethod
    def of(windows: Windows, names: Sequence[str]) -> SpatialFactors:
        """Return the factors of dims with these windows, the same of both tensors without one."""
        pairs = list(zip(windows, names, strict=False))
        read = tuple((name if window is None else window.of,) for window, name in pairs)
        output = tuple((name if window is None else window.name,) for window, name in pairs)
        return SpatialFactors(read, output, tuple(w for w in windows if w is not None))


class Span(NamedTuple):
    """Interval of a dim that a rank computes, and the interval that it reads.

    Attributes:
        start: the first position that is computed.
        stop: the position after the last one.
        reach: the positions that are read.
    """

    start: int
    stop: int
    reach: Reach

    @property
    def length(self) -> int:
        """Number of positions that are computed."""
        return self.stop - self.start


@lru_cache(maxsize=CACHE_SIZE)
def spans(windows: Windows, output: Spec, rank: int) -> tuple[Span | None, ...]:
    """Return the span of each spatial dim on a rank, None for a dim that is not sharded.

    Args:
        windows: the windows of the spatial dims, which are the last ones.
        output: the layout of the tensor that is computed of windows.
        rank: the rank.
    """
    offsets, shape, first = (
        output.offsets(rank),
        output.local_shape(rank),
        output.ndim - len(windows),
    )
    rows: list[Span | None] = []
    for i, window in enumerate(windows, first):
        if window is None or not output.partition.dims[i]:
            rows.append(None)
        else:
            stop = offsets[i] + shape[i]
            rows.append(Span(offsets[i], stop, window.reach(offsets[i], stop)))
    return tuple(rows)


def reads_nothing(parts: Sequence[Span | None]) -> bool:
    """Return True if a rank computes elements of padding alone along some dim."""
    return any(part is not None and part.reach.start == part.reach.stop for part in parts)


def padded(x: torch.Tensor, pairs: Sequence[tuple[int, int]], value: float = 0.0) -> torch.Tensor:
    """Return a tensor whose last dims are padded by (before, after); negative numbers crop."""
    if not any(map(any, pairs)):
        return x
    flat = [size for pair in reversed(pairs) for size in pair]
    return torch.ops.aten.constant_pad_nd.default(x, flat, value)  # type: ignore[no-any-return]


def spatial_dims(call: OpCall) -> int:
    """Return the number of spatial dims in the operation's name."""
    match = re.search(r"([123])d", base_name(call.op))
    assert match is not None
    return int(match[1])


def planes(meta: Meta, spatial: int) -> Dims:
    """Return the factors of the dims before the spatial ones; channels are the last of them."""
    lead = meta.ndim - spatial
    return text_dims("nc"[max(2 - lead, 0) :][:lead])


def per_plane(call: OpCall, modes: tuple[Mode, ...] = ()) -> Rule:
    """Return the rule `nc11->nc11` of an operation on each plane: spatial dims stay unsharded."""
    spatial = spatial_dims(call)
    lead = call.operands[0].ndim - spatial
    first = planes(call.operands[0], spatial)
    dims = [(first + ((),) * max(meta.ndim - lead, 0)) for meta in call.operands]
    results = tuple(
        None if meta is None else first + ((),) * (meta.ndim - lead) for meta in call.results
    )
    return Rule(tuple(dims), results, modes=modes, local=ShardCall())
