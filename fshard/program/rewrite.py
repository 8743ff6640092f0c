"""Rewrites that leave a program's meaning as it is."""

from __future__ import annotations

from collections.abc import Iterable

from fshard.program.infer import infer
from fshard.program.steps import AllSlice, Step
from fshard.spec import Spec

__all__ = ["fuse_slices"]


def fuse_slices(src: Spec, steps: Iterable[Step]) -> list[Step]:
    """The same steps with neighbouring slices of one dim as one step over several axes.

    Slices of different dims commute, so a run of slices is first sorted by dim (stably: the
    order of the axes of one dim is its meaning). Invariant and reduced axes are not mixed.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition import PartitionSpec as P
    >>> src = Spec(Mesh(x=2, y=2), P(), shape=(4, 4))
    >>> fuse_slices(src, [AllSlice("x", 1), AllSlice("x", 1)][:1] + [AllSlice("y", 1)])
    [AllSlice(axes=('x', 'y'), dim=1, sizes=None)]
    """
    fused: list[Step] = []
    before = spec = src
    for step in _by_dim(list(steps)):
        last = fused[-1] if fused else None
        if isinstance(step, AllSlice) and isinstance(last, AllSlice) and last.dim == step.dim:
            kinds = {before.partition.reduced.get(axis) for axis in last.axes + step.axes}
            if len(kinds) == 1:
                fused[-1] = AllSlice(last.axes + step.axes, step.dim, step.sizes)
                spec = infer(step, spec)
                continue
        before = spec
        fused.append(step)
        spec = infer(step, spec)
    return fused


def _by_dim(steps: list[Step]) -> list[Step]:
    """Every run of slices sorted by dim."""
    ordered: list[Step] = []
    run: list[AllSlice] = []
    for step in (*steps, None):
        if isinstance(step, AllSlice):
            run.append(step)
            continue
        run.sort(key=_dim)
        ordered += run
        run = []
        if step is not None:
            ordered.append(step)
    return ordered


def _dim(step: AllSlice) -> int:
    return step.dim
