"""The typing rules of `Exchange` and `Remesh`, which name the layout that they make."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from fshard.errors import Problem, ShardingError, fail, raise_if
from fshard.mesh import Mesh
from fshard.partition import PartitionSpec
from fshard.program.steps import Exchange, Remesh, Step
from fshard.spec import Spec

__all__ = ["exchanged", "padded", "refuse", "remeshed"]


def refuse(step: Step, spec: Spec, rule: str, fix: str) -> NoReturn:
    """Raise for a step that does not apply to `spec`."""
    fail(f"{step}", f"{spec} on {spec.mesh}", rule, fix)


def padded(step: Step, spec: Spec, partition: PartitionSpec) -> PartitionSpec:
    """`partition` with one entry per dim of `spec`; raises where it has more."""
    if len(partition) > spec.ndim:
        refuse(
            step,
            spec,
            f"the partition has at most {spec.ndim} entries, one per dim, not {len(partition)}",
            "leave out what is not sharded",
        )
    dims = (*partition.dims, *((),) * (spec.ndim - len(partition)))
    return PartitionSpec._of(dims, partition.unreduced_kinds, partition.reduced_kinds)


def exchanged(step: Exchange, spec: Spec) -> Spec:
    """What an exchange makes of `spec`: any layout in which nothing becomes unreduced."""
    sizes = {dim: each for dim, each in enumerate(step.sizes or ()) if each is not None}
    to = _laid(step, spec, spec.mesh if step.mesh is None else step.mesh, sizes)
    before, after = spec.partition, to.partition
    other = to.mesh != spec.mesh
    problems = [
        Problem(
            f"axis {axis!r} unreduced{_by(kind)} in the result, on {spec}",
            "another mesh has other addends: there nothing is unreduced"
            if other
            else "an exchange leaves axes unreduced as they are, and makes none",
            f"leave {axis!r} out, then replicated_to_unreduced({axis})",
        )
        for axis, kind in after.unreduced_kinds
        if other or before.unreduced.get(axis) != kind
    ]
    problems += [
        Problem(
            f"axis {axis!r} reduced{_by(kind)} in {spec}, on {to}",
            "on another mesh nothing stays reduced"
            if other
            else "an exchange leaves reduced axes as they are",
            f"reduced_to_invariant({axis}) first",
        )
        for axis, kind in before.reduced_kinds
        if other or after.reduced.get(axis) != kind
    ]
    if problems:
        raise_if(f"{step} on {spec}", problems)
    return to


def remeshed(step: Remesh, spec: Spec) -> Spec:
    """`spec` on another mesh, where every rank holds and means the same."""
    counts = step.mesh.shape if isinstance(step.mesh, Mesh) else {}
    sizes: dict[int, tuple[int, ...]] = {}
    for dim, axes in enumerate(padded(step, spec, step.partition).dims):
        shards = math.prod(counts.get(axis, 1) for axis in axes)
        if counts and shards != spec.dim_shards(dim):
            refuse(
                step,
                spec,
                f"dim {dim} has {spec.dim_shards(dim)} shards on both meshes, not {shards}",
                f"fs.{Exchange.__name__}({step.partition!r}, mesh={step.mesh}) moves them",
            )
        mine = spec.sizes[dim]
        if mine is not None:
            sizes[dim] = mine
    to = _laid(step, spec, step.mesh, sizes)
    if not to.is_equivalent(spec):
        refuse(
            step,
            spec,
            f"every rank holds the same on both meshes, which {to} on {to.mesh} does not",
            f"fs.{Exchange.__name__}({step.partition!r}, mesh={step.mesh}) moves what differs",
        )
    return to


def _laid(step: Step, spec: Spec, mesh: Mesh, sizes: Mapping[int, tuple[int, ...]]) -> Spec:
    """The spec that the step names; what is wrong with it is the step's."""
    assert isinstance(step, Exchange | Remesh)
    partition = padded(step, spec, step.partition)
    try:
        return Spec(mesh, partition, shape=spec.shape, dtype=spec.dtype, sizes=sizes)
    except ShardingError as error:
        raise_if(f"{step} on {spec}", error.problems)
        raise


def _by(kind: str) -> str:
    return "" if kind == "sum" else f" by {kind}"
