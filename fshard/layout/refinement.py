"""Sub-axes: the axes of a mesh cut finer, so that two meshes or two layouts have them in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec

__all__ = ["Refinement", "common_refinement", "prime_refinement"]

Parts = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class Refinement:
    """A finer mesh of the same devices, and what the axes of coarser ones are on it.

    `parts` has for each coarse mesh its axes, each with its fine axes, major to minor.
    """

    mesh: Mesh
    parts: tuple[Parts, ...]

    def refine(self, partition: PartitionSpec, /, which: int = 0) -> PartitionSpec:
        """A partition on a coarse mesh (the first, or number `which`) as one on the fine mesh.

        >>> fine = prime_refinement(Mesh(x=4, y=2))
        >>> fine.refine(PartitionSpec(("y", "x")))
        P(('y', 'x_0', 'x_1'))
        """
        parts = dict(self.parts[which])

        def kinds(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
            return tuple((fine, kind) for axis, kind in given.items() for fine in parts[axis])

        dims = tuple(
            tuple(fine for axis in axes for fine in parts[axis]) for axes in partition.dims
        )
        return PartitionSpec._of(dims, kinds(partition.unreduced), kinds(partition.reduced))


def common_refinement(a: Mesh, b: Mesh, /) -> Refinement | None:
    """The coarsest mesh that both meshes are coarser than, axis by axis.

    None where there is none: the devices come in another order, or their grids cross (2x3 and
    3x2). Axes of `a` that are not cut keep their names.

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
    cuts = [
        [major // minor for major, minor in itertools.pairwise(strides) if low <= minor < high]
        for high, low in itertools.pairwise(_strides(a))
    ]
    fine = _refined(a, cuts, b.axes)
    ends = list(itertools.pairwise(_strides(fine.mesh)))
    of_b = [
        [
            name
            for name, (major, minor) in zip(fine.mesh.axes, ends, strict=True)
            if low <= minor < major <= high
        ]
        for high, low in itertools.pairwise(_strides(b))
    ]
    return Refinement(fine.mesh, (*fine.parts, tuple(zip(b.axes, map(tuple, of_b), strict=True))))


def prime_refinement(mesh: Mesh, /) -> Refinement:
    """The mesh with every axis cut into axes of prime size, the smallest major.

    >>> prime_refinement(Mesh(dp=12, tp=2)).mesh
    Mesh(dp_0=2, dp_1=2, dp_2=3, tp=2)
    """
    return _refined(mesh, [list(_primes(size)) for size in mesh.sizes])


def _refined(mesh: Mesh, cuts: Sequence[Sequence[int]], taken: Sequence[str] = ()) -> Refinement:
    """The mesh with its axes cut into sizes; new names are not among `taken`."""
    names = {*mesh.axes, *taken}
    grid: dict[str, int] = {}
    parts: list[tuple[str, tuple[str, ...]]] = []
    for axis, size, cut in zip(mesh.axes, mesh.sizes, cuts, strict=True):
        if len(cut) < 2:
            grid[axis] = size
            parts.append((axis, (axis,)))
            continue
        fresh = (name for at in itertools.count() if (name := f"{axis}_{at}") not in names)
        fine = dict(zip(itertools.islice(fresh, len(cut)), cut, strict=True))
        names |= set(fine)
        grid |= fine
        parts.append((axis, tuple(fine)))
    return Refinement(Mesh(grid, devices=mesh.devices), (tuple(parts),))


def _strides(mesh: Mesh) -> list[int]:
    """How many devices each axis spans, and in the end one."""
    return [*itertools.accumulate(reversed(mesh.sizes), lambda a, b: a * b, initial=1)][::-1]


def _primes(n: int) -> Iterator[int]:
    factor = 2
    while n > 1:
        if factor * factor > n:
            factor = n
        while n % factor == 0:
            yield factor
            n //= factor
        factor += 1
