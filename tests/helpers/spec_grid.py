"""Grids of specs, integer tensors, error texts, and an oracle that slices global tensors.

The oracle uses the library's values alone, so that it can judge the rest.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.steps import Exchange
from tests.helpers.thorough import THOROUGH

__all__ = [
    "all_partitions",
    "all_specs",
    "error_text",
    "even_and_uneven_specs",
    "exchange",
    "global_of",
    "may_exchange",
    "message",
    "one_in",
    "ordered_placements",
    "pairing",
    "peak_memory_below",
    "random_global",
    "random_locals",
    "sample_pairs",
]

STATES = ("invariant", "reduced", "unreduced")


def ordered_placements(
    axes: Sequence[str], ndim: int
) -> Iterator[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]]:
    """Yield every placement of axes on dims, in every order: (axes of each dim, axes left)."""
    if ndim == 0:
        yield (), tuple(axes)
        return
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            left = tuple(axis for axis in axes if axis not in chosen)
            for splits in itertools.combinations_with_replacement(range(count + 1), ndim - 1):
                edges = (0, *splits, count)
                yield tuple(chosen[a:b] for a, b in itertools.pairwise(edges)), left


def all_partitions(
    axes: Sequence[str], ndim: int, states: Sequence[str] = STATES, kind: str = "sum"
) -> list[PartitionSpec]:
    """Return every partition: each axis sharded (in every order), or in one of `states`.

    Over 2 dims there are 27 on 2 axes and 159 on 3; without `reduced` 18 and 92.
    """
    return [
        PartitionSpec(
            *dims,
            unreduced={a: kind for a, s in zip(left, chosen, strict=True) if s == "unreduced"},
            reduced={a for a, s in zip(left, chosen, strict=True) if s == "reduced"},
        )
        for dims, left in ordered_placements(axes, ndim)
        for chosen in itertools.product(states, repeat=len(left))
    ]


def all_specs(
    mesh: Mesh,
    shape: Sequence[int],
    states: Sequence[str] = STATES,
    *,
    kind: str = "sum",
    dtype: torch.dtype = torch.int64,
    uneven: str | None = None,
) -> list[Spec]:
    """Return the spec of every partition of `all_partitions` on `mesh`."""
    return [
        Spec(mesh, partition, shape=shape, dtype=dtype, uneven=uneven)
        for partition in all_partitions(mesh.axes, len(shape), states, kind)
    ]


def even_and_uneven_specs(mesh: Mesh, dtype: torch.dtype = torch.float64) -> list[Spec]:
    """Return every layout of a 6 x 12 and of a 7 x 5 tensor, which no axis divides."""
    return all_specs(mesh, (6, 12), dtype=dtype) + all_specs(
        mesh, (7, 5), ("invariant", "unreduced"), dtype=dtype, uneven="chunk"
    )


def one_in(step: int) -> pytest.MarkDecorator:
    """Parametrize `every`, the stride in which cases are run: `step`, and 1 of the slow test."""
    return pytest.mark.parametrize("every", [step, pytest.param(1, marks=pytest.mark.slow)])


def sample_pairs(
    specs: Sequence[Spec], count: int, seed: int = 0, *, fixed: bool = False
) -> list[tuple[Spec, Spec]]:
    """Return `count` distinct ordered pairs, a third of them unless `fixed` or in thorough runs."""
    count = count if fixed or THOROUGH else -(-count // 3)
    indices = random.Random(seed).sample(range(len(specs) ** 2), min(count, len(specs) ** 2))
    return [(specs[i // len(specs)], specs[i % len(specs)]) for i in sorted(indices)]


def message(where: str, given: str, rule: str, fix: str) -> str:
    """Return the text of an error with one problem."""
    return f"{where}\n  given: {given}\n  rule:  {rule}\n  fix:   {fix}"


def error_text(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the text of the `ShardingError` that a call raises."""
    with pytest.raises(ShardingError) as caught:
        call(*args, **options)
    return str(caught.value)


def exchange(src: Spec, dst: Spec) -> Exchange:
    """Return the step from any layout to another."""
    return Exchange(dst.partition, dst.sizes, dst.mesh)


def may_exchange(src: Spec, dst: Spec) -> bool:
    """Return True if an exchange applies: unreduced or sharded before unreduced, and the dual."""
    p, q = src.partition, dst.partition
    if src.mesh != dst.mesh:
        return not p.reduced and not q.unreduced
    before, after = ({*itertools.chain(*spec.partition.dims)} for spec in (src, dst))
    gained = {axis for axis, kind in q.unreduced.items() if p.unreduced.get(axis) != kind}
    lost = {axis for axis, kind in p.reduced.items() if q.reduced.get(axis) != kind}
    return gained <= before and lost <= after


# -- an oracle of slices -------------------------------------------------------------------


def random_global(
    shape: Sequence[int], dtype: torch.dtype = torch.int64, seed: int = 0
) -> torch.Tensor:
    """Return small random integers, exact in every dtype and under every order of addition."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def _replicated_axes(spec: Spec) -> tuple[str, ...]:
    """Return the axes along which every rank holds the same values."""
    named = {axis for dim in spec.partition.dims for axis in dim} | set(spec.partition.unreduced)
    return tuple(axis for axis in spec.mesh.axes if axis not in named)


def _scale(spec: Spec, kinds: Iterable[tuple[str, str]]) -> int:
    scale = 1
    for axis, kind in kinds:
        scale *= spec.mesh.shape[axis] if kind == "avg" else 1
    return scale


def random_locals(spec: Spec, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return random locals of `spec`, one per rank in rank order, with equal replicas.

    Unreduced values are drawn for every coordinate of the unreduced axes; for `avg` they are
    multiplied by the number of ranks, so that the average stays an integer.
    """
    unreduced = tuple(spec.partition.unreduced)
    scale = _scale(spec, spec.partition.unreduced_kinds)
    locals_ = []
    for rank in spec.mesh.ranks:
        index = spec.mesh.index(rank, unreduced)
        partial = random_global(spec.shape, spec.dtype, seed * 7919 + index)
        locals_.append((partial[spec.index(rank)] * scale).to(spec.dtype).clone())
    return tuple(locals_)


_REDUCE = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def global_of(spec: Spec, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the global value of `locals_` (in rank order), from every shard at its slice.

    Assert that replicas are equal. Reductions of several kinds are done in axis order.
    """
    mesh = spec.mesh
    local = dict(zip(mesh.ranks, locals_, strict=True))
    for rank, tensor in local.items():
        assert tuple(tensor.shape) == spec.local_shape(rank), (spec, rank, tuple(tensor.shape))
        assert tensor.dtype == spec.dtype, (spec, rank, tensor.dtype)
    for axis in _replicated_axes(spec):
        for group in mesh.groups(axis):
            for rank in group[1:]:
                assert torch.equal(local[rank], local[group[0]]), (spec, axis, group)
    for axis, kind in spec.partition.unreduced_kinds:
        for group in mesh.groups(axis):
            total = local[group[0]]
            for rank in group[1:]:
                total = _REDUCE[kind](total, local[rank])
            if kind == "avg":
                total = total / len(group)
            local.update(dict.fromkeys(group, total))
    value = torch.zeros(spec.shape, dtype=spec.dtype)
    for rank, tensor in local.items():
        value[spec.index(rank)] = tensor
    return value * _scale(spec, spec.partition.reduced_kinds)


def pairing(spec: Spec, x: Sequence[torch.Tensor], y: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the inner product of `x` of `spec` with `y` of `spec.dual`, as a 0-dim tensor.

    Invariant axes are one logical computation, counted once; on every other axis the ranks'
    products add up, a reduced value times the partial sums of its unreduced cotangent.
    """
    partition = spec.partition
    invariant = [axis for axis in spec.mesh.axes if axis not in partition.axes]
    total = torch.zeros((), dtype=spec.dtype)
    for rank, a, b in zip(spec.mesh.ranks, x, y, strict=True):
        if spec.mesh.index(rank, invariant) == 0:
            total = total + (a * b).sum()
    return total


@contextmanager
def peak_memory_below(nbytes: int) -> Iterator[None]:
    """Assert that Python allocates less than `nbytes` at any time in the block."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak:,} bytes at once"
