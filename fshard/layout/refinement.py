"""Refinements: meshes of finer axes that two meshes or two layouts have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec

Parts = tuple[tuple[str, tuple[str, ...]], ...]
"""Coarse axes of one mesh, each with its fine axes."""


@dataclass(frozen=True, slots=True)
class Refinement:
    """Finer mesh of the same devices, with the axes of coarser meshes in terms of its own.

    Attributes:
        mesh: the fine mesh.
        parts: for each coarse mesh its axes, each with its fine axes, major to minor.
    """

    mesh: Mesh
    parts: tuple[Parts, ...]

    def refine(self, partition: PartitionSpec, /, which: int = 0) -> PartitionSpec:
        """Return a partition on coarse mesh number `which` as a partition on the fine mesh.

        >>> fine = prime_refinement(Mesh(x=4, y=2))
        >>> fine.refine(PartitionSpec(("y", "x")))
        P(('y', 'x_0', 'x_1'))
        """
        parts = dict(self.parts[which])

        def refined(kinds: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
            return tuple((fine, kind) for axis, kind in kinds.items() for fine in parts[axis])

        dims = tuple(
            tuple(fine for axis in axes for fine in parts[axis]) for axes in partition.dims
        )
        return PartitionSpec._of(dims, refined(partition.unreduced), refined(partition.reduced))


def common_refinement(a: Mesh, b: Mesh, /) -> Refinement | None:
    """Return the coarsest mesh that refines both meshes axis by axis, None without one.

    The result is None if the devices differ in order, or the grids cross (2x3 and 3x2). Axes of `a`
    that are not split keep their names.

    >>> fine = common_refinement(Mesh(x=4, y=2), Mesh(all=8))
    >>> fine.mesh, fine.parts[1]
    (Mesh(x=4, y=2), (('all', ('x', 'y')),))
    >>> common_refinement(Mesh(x=4), Mesh(a=2, b=2)).mesh
    Mesh(x_0=2, x_1=2)
    >>> common_refinement(Mesh(x=2, y=3), Mesh(a=3, b=2)) is None
    True
    """
    if a.devices != b.devices:
        return None
    strides = sorted({*_strides(a), *_strides(b)}, reverse=True)
    if any(major % minor for major, minor in itertools.pairwise(strides)):
        return None
    factors = [
        [major // minor for major, minor in itertools.pairwise(strides) if low <= minor < high]
        for high, low in itertools.pairwise(_strides(a))
    ]
    fine = _refined(a, factors, b.axes)
    ends = list(itertools.pairwise(_strides(fine.mesh)))
    b_parts = [
        [
            name
            for name, (major, minor) in zip(fine.mesh.axes, ends, strict=True)
            if low <= minor < major <= high
        ]
        for high, low in itertools.pairwise(_strides(b))
    ]
    return Refinement(
        fine.mesh, (*fine.parts, tuple(zip(b.axes, map(tuple, b_parts), strict=True)))
    )


def prime_refinement(mesh: Mesh, /) -> Refinement:
    """Return the mesh with every axis split into axes of prime size, the smallest major.

    >>> prime_refinement(Mesh(dp=12, tp=2)).mesh
    Mesh(dp_0=2, dp_1=2, dp_2=3, tp=2)
    """
    return _refined(mesh, [list(_primes(size)) for size in mesh.sizes])


def _refined(
    mesh: Mesh, factors: Sequence[Sequence[int]], reserved: Sequence[str] = ()
) -> Refinement:
    """Return the mesh with its axes split into sizes; new names are not among `reserved`."""
    names = {*mesh.axes, *reserved}
    grid: dict[str, int] = {}
    parts: list[tuple[str, tuple[str, ...]]] = []
    for axis, size, sizes in zip(mesh.axes, mesh.sizes, factors, strict=True):
        if len(sizes) < 2:
            grid[axis] = size
            parts.append((axis, (axis,)))
            continue
        new_names = (name for i in itertools.count() if (name := f"{axis}_{i}") not in names)
        fine = dict(zip(itertools.islice(new_names, len(sizes)), sizes, strict=True))
        names |= set(fine)
        grid |= fine
        parts.append((axis, tuple(fine)))
    return Refinement(Mesh(grid, devices=mesh.devices), (tuple(parts),))


def _strides(mesh: Mesh) -> list[int]:
    """Return the stride in devices before each axis, major to minor, and a final 1."""
    return [*itertools.accumulate(reversed(mesh.sizes), lambda a, b: a * b, initial=1)][::-1]


def _primes(n: int) -> Iterator[int]:
    """Yield the prime factors of n, the smallest first."""
    factor = 2
    while n > 1:
        if factor * factor > n:
            factor = n
        while n % factor == 0:
            yield factor
            n //= factor
        factor += 1
