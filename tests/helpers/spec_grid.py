"""What the tests share: grids of specs, integer tensors, and an oracle of plain slicing.

Nothing here uses the library beyond its values, so that it can judge the rest.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec

__all__ = [
    "all_partitions",
    "all_specs",
    "global_of",
    "message",
    "pairing",
    "random_global",
    "random_locals",
    "sample_pairs",
]

STATES = ("invariant", "reduced", "unreduced")


def ordered_placements(
    axes: Sequence[str], ndim: int
) -> Iterator[tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]]:
    """Every way to put some of `axes` on dims, in every order: (axes of each dim, axes left)."""
    if ndim == 0:
        yield (), tuple(axes)
        return
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            left = tuple(axis for axis in axes if axis not in chosen)
            for cuts in itertools.combinations_with_replacement(range(count + 1), ndim - 1):
                edges = (0, *cuts, count)
                yield tuple(chosen[a:b] for a, b in itertools.pairwise(edges)), left


def all_partitions(
    axes: Sequence[str], ndim: int, states: Sequence[str] = STATES, kind: str = "sum"
) -> list[PartitionSpec]:
    """Every partition: each axis sharded (in every order), or in one of `states`.

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
    """The spec of every partition of `all_partitions` on `mesh`."""
    return [
        Spec(mesh, partition, shape=shape, dtype=dtype, uneven=uneven)
        for partition in all_partitions(mesh.axes, len(shape), states, kind)
    ]


def sample_pairs(specs: Sequence[Spec], count: int, seed: int = 0) -> list[tuple[Spec, Spec]]:
    """`count` distinct ordered pairs, the same ones every time."""
    places = random.Random(seed).sample(range(len(specs) ** 2), min(count, len(specs) ** 2))
    return [(specs[place // len(specs)], specs[place % len(specs)]) for place in sorted(places)]


def message(where: str, given: str, rule: str, fix: str) -> str:
    """The text of an error with one problem."""
    return f"{where}\n  given: {given}\n  rule:  {rule}\n  fix:   {fix}"


# -- an oracle of slices -------------------------------------------------------------------


def random_global(
    shape: Sequence[int], dtype: torch.dtype = torch.int64, seed: int = 0
) -> torch.Tensor:
    """A tensor of small integers, exact in every dtype and under every order of addition."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype)


def _others(spec: Spec) -> tuple[str, ...]:
    """The axes along which every rank holds the same."""
    named = {axis for dim in spec.partition.dims for axis in dim} | set(spec.partition.unreduced)
    return tuple(axis for axis in spec.mesh.axes if axis not in named)


def _scale(spec: Spec, kinds: Iterable[tuple[str, str]]) -> int:
    scale = 1
    for axis, kind in kinds:
        scale *= spec.mesh.shape[axis] if kind == "avg" else 1
    return scale


def random_locals(spec: Spec, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Locals that `spec` allows, one per rank in rank order: replicas equal, addends free.

    Addends are drawn for every place of the unreduced axes; `avg` multiplies them by the
    number averaged, so that values stay integers.
    """
    unreduced = tuple(spec.partition.unreduced)
    scale = _scale(spec, spec.partition.unreduced_kinds)
    locals_ = []
    for rank in spec.mesh.ranks:
        place = spec.mesh.index(rank, unreduced)
        whole = random_global(spec.shape, spec.dtype, seed * 7919 + place)
        locals_.append((whole[spec.index(rank)] * scale).to(spec.dtype).clone())
    return tuple(locals_)


_REDUCE = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def global_of(spec: Spec, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global value of `locals_` (rank order), by writing every shard to its place.

    Asserts that replicas are equal. Reductions of several kinds are done in axis order.
    """
    mesh = spec.mesh
    local = dict(zip(mesh.ranks, locals_, strict=True))
    for rank, tensor in local.items():
        assert tuple(tensor.shape) == spec.local_shape(rank), (spec, rank, tuple(tensor.shape))
        assert tensor.dtype == spec.dtype, (spec, rank, tensor.dtype)
    for axis in _others(spec):
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
    whole = torch.zeros(spec.shape, dtype=spec.dtype)
    for rank, tensor in local.items():
        whole[spec.index(rank)] = tensor
    return whole * _scale(spec, spec.partition.reduced_kinds)


def pairing(spec: Spec, x: Sequence[torch.Tensor], y: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inner product of `x` of `spec` with `y` of `spec.dual`: a global number.

    Invariant axes are one logical computation, counted once; on every other axis the ranks'
    products add up, a reduced value against the addends of its unreduced cotangent.
    """
    partition = spec.partition
    invariant = [axis for axis in spec.mesh.axes if axis not in partition.axes]
    total = torch.zeros((), dtype=spec.dtype)
    for rank, a, b in zip(spec.mesh.ranks, x, y, strict=True):
        if spec.mesh.index(rank, invariant) == 0:
            total = total + (a * b).sum()
    return total


@contextmanager
def held_under(nbytes: int) -> Iterator[None]:
    """Assert that Python never holds more than `nbytes` for what the block makes."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak:,} bytes at once"
