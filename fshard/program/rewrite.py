"""Rewrites that leave a program's meaning as it is."""

from __future__ import annotations

from collections.abc import Iterable

from fshard.program.infer import infer
from fshard.program.steps import AllSlice, Step
from fshard.spec import Spec

__all__ = ["fuse_slices"]


def fuse_slices(src: Spec, steps: Iterable[Step]) -> list[Step]:
    """The same steps with the slices of one dim in a row as one step over several axes.

    Slices of different dims commute, so a later slice joins an earlier one of its dim: what is
    held on the way only gets smaller. Invariant and reduced axes are not mixed.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2, z=2), P(), shape=(4, 4))
    >>> print(*fuse_slices(src, [AllSlice("x", 1), AllSlice("y", 0), AllSlice("z", 1)]))
    all_slice((x,z), dim 1) all_slice(y, dim 0)
    """
    fused: list[Step] = []
    run: dict[int, list[AllSlice]] = {}
    states: dict[str, str | None] = {}
    spec = src
    for step in steps:
        if isinstance(step, AllSlice):
            reduced = spec.partition.reduced
            states |= {axis: reduced.get(axis) for axis in step.axes}
            mine = run.setdefault(step.dim, [])
            if mine and states[mine[-1].axes[0]] == states[step.axes[0]]:
                mine[-1] = AllSlice(mine[-1].axes + step.axes, step.dim, step.sizes)
            else:
                mine.append(step)
        else:
            fused += [each for mine in run.values() for each in mine]
            fused.append(step)
            run = {}
        spec = infer(step, spec)
    return fused + [each for mine in run.values() for each in mine]
