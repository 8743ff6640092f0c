"""The typing rules of `Exchange` and `Remesh`, which name the layout that they make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec
from fshard.program.steps import Exchange, Remesh, Step

__all__ = ["exchanged", "padded", "refuse", "remeshed"]

PLAN = "fs.redistribute(src, dst) plans what has to move"
ADDENDS = "an axis must be sharded, or unreduced by the same reduction, before an exchange leaves it unreduced"
COPIES = "a reduced axis must stay so in an exchange, by the same reduction, or become sharded"


def refuse(step: Step, spec: Spec, rule: str, fix: str) -> NoReturn:
    """Raise for a step that does not apply to `spec`."""
    fail(f"{step}", f"{spec} on {spec.mesh}", rule, fix)


def padded(step: Step, spec: Spec, partition: PartitionSpec) -> PartitionSpec:
    """`partition` with one entry per dim of `spec`; raises where it has more."""
    if len(partition) > spec.ndim:
        refuse(
            step,
            spec,
            f"a partition must have at most one entry per dim: {len(partition)} is more than {spec.ndim}",
            "leave out the entries of dims that it does not have",
        )
    dims = (*partition.dims, *((),) * (spec.ndim - len(partition)))
    return PartitionSpec._of(dims, partition.unreduced_kinds, partition.reduced_kinds)


# -- exchange -----------------------------------------------------------------------------


def exchanged(step: Exchange, spec: Spec) -> Spec:
    """What an exchange makes of `spec`: any layout in which shards alone become unreduced."""
    mesh = spec.mesh if step.mesh is None else step.mesh
    partition = padded(step, spec, step.partition)
    if set(partition.axes) <= set(mesh.axes) and (
        problems := list(_size_problems(step, spec, mesh, partition))
    ):
        raise_if(f"{step} on {spec}", problems)
    sizes = {dim: each for dim, each in enumerate(step.sizes or ()) if each is not None}
    to = _laid(step, spec, mesh, partition, sizes)
    if problems := [*_lost(spec, to), *_made(spec, to)]:
        raise_if(f"{step} on {spec}", problems)
    return to


def _size_problems(
    step: Exchange, spec: Spec, mesh: Mesh, partition: PartitionSpec
) -> Iterator[Problem]:
    """What is wrong with the sizes, or with giving none."""
    given = step.sizes or ()
    if len(given) > spec.ndim:
        yield Problem(
            f"sizes={given}",
            f"sizes are by dim: {len(given)} is more than {spec.ndim}",
            f"sizes={given[: spec.ndim]}",
        )
        return
    works: list[tuple[int, ...] | None] = [*given, *(None,) * (spec.ndim - len(given))]
    rules: dict[int, str] = {}
    for dim, (size, axes, sizes) in enumerate(zip(spec.shape, partition.dims, works, strict=True)):
        shards = mesh.axis_size(axes)
        if sizes is None and size % shards:
            rules[dim] = f"without sizes they must be equal: {size} % {shards} = {size % shards}"
        if sizes is not None and (len(sizes), sum(sizes), min(*sizes, 0)) != (shards, size, 0):
            rules[dim] = (
                f"{shards} sizes of at least 0 that sum to {size}, not {len(sizes)} "
                f"that sum to {sum(sizes)}"
            )
    for dim in rules:
        works[dim] = chunk_sizes(spec.shape[dim], [mesh.shape[a] for a in partition.dims[dim]])
    for dim, rule in rules.items():
        what = f"dim {dim} of size {spec.shape[dim]} over {partition.dims[dim] or 'no axes'}"
        yield Problem(what, f"it has {mesh.axis_size(partition.dims[dim])} shards; {rule}",
                      f"sizes={tuple(works)}, say")  # fmt: skip


def _made(spec: Spec, to: Spec) -> Iterator[Problem]:
    """Axes that would become unreduced, of which no shards are."""
    other = to.mesh != spec.mesh
    sharded = {axis for axes in spec.partition.dims for axis in axes}
    for axis, kind in to.partition.unreduced_kinds:
        if other or (axis not in sharded and spec.partition.unreduced.get(axis) != kind):
            made = f"{axis!r}" if kind == "sum" else f"{axis!r}, {kind!r}"
            yield Problem(
                f"{axis!r} unreduced{_by(kind)} in {to}{_on(to, other)}",
                "a spec on another mesh must not be unreduced: partial sums are reduced on the way"
                if other
                else ADDENDS,
                f"leave {axis!r} out, then fs.ReplicatedToUnreduced({made})",
            )


def _lost(spec: Spec, to: Spec) -> Iterator[Problem]:
    """Axes that would not stay reduced, and shard nothing."""
    other = to.mesh != spec.mesh
    sharded = {axis for axes in to.partition.dims for axis in axes}
    for axis, kind in spec.partition.reduced_kinds:
        if other or (axis not in sharded and to.partition.reduced.get(axis) != kind):
            yield Problem(
                f"{axis!r} reduced{_by(kind)} in {spec}{_on(spec, other)}",
                "a spec must not be reduced where the mesh changes" if other else COPIES,
                f"fs.ReducedToInvariant({axis!r}) first",
            )


def _by(kind: str) -> str:
    return "" if kind == "sum" else f" by {kind}"


def _on(spec: Spec, other: bool) -> str:
    return f" on {spec.mesh}" if other else ""


# -- remesh -------------------------------------------------------------------------------


def remeshed(step: Remesh, spec: Spec) -> Spec:
    """`spec` on another mesh, where every rank holds and means the same."""
    if spec.mesh.ranks != step.mesh.ranks:
        rule = f"both meshes must have the same devices: {step.mesh} has others"
        refuse(step, spec, rule, "fs.Exchange goes to other devices; " + PLAN)
    partition = padded(step, spec, step.partition)
    if not set(partition.axes) <= set(step.mesh.axes):
        step.mesh.check_axes(partition.axes, f"{step} on {spec}")
    for dim, axes in enumerate(partition.dims):
        before, shards = spec.dim_shards(dim), step.mesh.axis_size(axes)
        if shards != before:
            rule = f"dim {dim} keeps its {before} shards: {axes or 'no axes'} make {shards}"
            refuse(step, spec, rule, PLAN)
    sizes = {dim: each for dim, each in enumerate(spec.sizes) if each is not None}
    to = _laid(step, spec, step.mesh, partition, sizes)
    if not to.is_equivalent(spec):
        refuse(step, spec, _difference(spec, to), PLAN)
    return to


def _difference(spec: Spec, to: Spec) -> str:
    """Why two specs are not the same shards on the same devices, by the first rank that differs."""
    for rank in spec.mesh.ranks:
        here, there = (_box_text(each, rank) for each in (spec, to))
        if here != there:
            return f"every rank must keep its shard: rank {rank} has {here}, in {to} {there}"
    return f"every rank must stay unreduced and reduced with the same ranks: in {to} with others"


def _box_text(spec: Spec, rank: int) -> str:
    return f"[{', '.join(f'{each.start}:{each.stop}' for each in spec.index(rank))}]"


def _laid(
    step: Step, spec: Spec, mesh: Mesh, partition: PartitionSpec, sizes: dict[int, tuple[int, ...]]
) -> Spec:
    """The spec that the step names; what is wrong with it is the step's."""
    try:
        return Spec(mesh, partition, shape=spec.shape, dtype=spec.dtype, sizes=sizes)
    except ShardingError as error:
        raise_if(f"{step} on {spec}", error.problems)
        raise
