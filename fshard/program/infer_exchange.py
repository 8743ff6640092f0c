"""Typing rules of `Exchange` and `Remesh`, which name the layout that they result in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from fshard._util.errors import Problem, ShardingError, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec, chunk_sizes
from fshard.layout.spec import Spec
from fshard.program.steps import Exchange, Remesh, Step

PLAN_FIX = "fs.redistribute(src, dst) plans the steps"
UNREDUCED_RULE = (
    "an axis must be sharded, or unreduced by the same reduction, before it is left unreduced"
)
REDUCED_RULE = (
    "a reduced axis must stay so in an exchange, by the same reduction, or become sharded"
)


def refuse(step: Step, spec: Spec, rule: str, fix: str) -> NoReturn:
    """Raise the error of a step that does not apply to `spec`."""
    fail(f"{step}", f"{spec} on {spec.mesh}", rule, fix)


def pad_partition(step: Step, spec: Spec, partition: PartitionSpec) -> PartitionSpec:
    """Return `partition` with one entry per dim of `spec`; raise if it has more."""
    if len(partition) > spec.ndim:
        rule = f"a partition must have at most one entry per dim: {len(partition)} > {spec.ndim}"
        refuse(step, spec, rule, "leave out the entries of dims that it does not have")
    dims = (*partition.dims, *((),) * (spec.ndim - len(partition)))
    return PartitionSpec._of(dims, partition.unreduced_kinds, partition.reduced_kinds)


# -- exchange -----------------------------------------------------------------------------


def infer_exchange(step: Exchange, spec: Spec) -> Spec:
    """Return the spec that an exchange results in; raise if its states cannot be reached."""
    mesh = spec.mesh if step.mesh is None else step.mesh
    partition = pad_partition(step, spec, step.partition)
    if set(partition.axes) <= set(mesh.axes) and (
        problems := list(_size_problems(step, spec, mesh, partition))
    ):
        raise_if(f"{step} on {spec}", problems)
    sizes = {dim: shards for dim, shards in enumerate(step.sizes or ()) if shards is not None}
    to = _named_spec(step, spec, mesh, partition, sizes)
    if problems := [*_reduced_problems(spec, to), *_unreduced_problems(spec, to)]:
        raise_if(f"{step} on {spec}", problems)
    return to


def _size_problems(
    step: Exchange, spec: Spec, mesh: Mesh, partition: PartitionSpec
) -> Iterator[Problem]:
    """Yield the problems of the sizes, or of leaving them out."""
    given = step.sizes or ()
    if len(given) > spec.ndim:
        yield Problem(
            f"sizes={given}",
            f"sizes must have at most one entry per dim: {len(given)} > {spec.ndim}",
            f"sizes={given[: spec.ndim]}",
        )
        return
    suggested: list[tuple[int, ...] | None] = [*given, *(None,) * (spec.ndim - len(given))]
    rules: dict[int, str] = {}
    for dim, (size, axes, sizes) in enumerate(
        zip(spec.shape, partition.dims, suggested, strict=True)
    ):
        shards = mesh.axis_size(axes)
        if sizes is None and size % shards:
            rules[dim] = f"without sizes they must be equal: {size} % {shards} = {size % shards}"
        if sizes is not None and (len(sizes), sum(sizes), min(*sizes, 0)) != (shards, size, 0):
            rules[dim] = (
                f"{shards} sizes of at least 0 that sum to {size}, not {len(sizes)} "
                f"that sum to {sum(sizes)}"
            )
    for dim in rules:
        suggested[dim] = chunk_sizes(spec.shape[dim], [mesh.shape[a] for a in partition.dims[dim]])
    for dim, rule in rules.items():
        place = f"dim {dim} of size {spec.shape[dim]} over {partition.dims[dim] or 'no axes'}"
        yield Problem(place, f"it has {mesh.axis_size(partition.dims[dim])} shards; {rule}",
                      f"sizes={tuple(suggested)}, say")  # fmt: skip


def _unreduced_problems(spec: Spec, to: Spec) -> Iterator[Problem]:
    """Yield a problem for each axis that would become unreduced but is not sharded."""
    other = to.mesh != spec.mesh
    sharded = {axis for axes in spec.partition.dims for axis in axes}
    for axis, kind in to.partition.unreduced_kinds:
        if other or (axis not in sharded and spec.partition.unreduced.get(axis) != kind):
            arguments = f"{axis!r}" if kind == "sum" else f"{axis!r}, {kind!r}"
            yield Problem(
                f"{axis!r} unreduced{_by(kind)} in {to}{_on(to, other)}",
                "a spec on another mesh must not be unreduced: partial sums are reduced on the way"
                if other
                else UNREDUCED_RULE,
                f"leave {axis!r} out, then fs.ReplicatedToUnreduced({arguments})",
            )


def _reduced_problems(spec: Spec, to: Spec) -> Iterator[Problem]:
    """Yield a problem for each axis that would not stay reduced and does not become sharded."""
    other = to.mesh != spec.mesh
    sharded = {axis for axes in to.partition.dims for axis in axes}
    for axis, kind in spec.partition.reduced_kinds:
        if other or (axis not in sharded and to.partition.reduced.get(axis) != kind):
            yield Problem(
                f"{axis!r} reduced{_by(kind)} in {spec}{_on(spec, other)}",
                "a spec must not be reduced where the mesh changes" if other else REDUCED_RULE,
                f"fs.ReducedToInvariant({axis!r}) first",
            )


def _by(kind: str) -> str:
    return "" if kind == "sum" else f" by {kind}"


def _on(spec: Spec, other: bool) -> str:
    return f" on {spec.mesh}" if other else ""


# -- remesh -------------------------------------------------------------------------------


def infer_remesh(step: Remesh, spec: Spec) -> Spec:
    """Return `spec` on another mesh; raise if a rank would hold or mean something else."""
    if spec.mesh.ranks != step.mesh.ranks:
        rule = f"both meshes must have the same devices: {step.mesh} has other ones"
        refuse(step, spec, rule, "fs.Exchange goes to other devices; " + PLAN_FIX)
    partition = pad_partition(step, spec, step.partition)
    if not set(partition.axes) <= set(step.mesh.axes):
        step.mesh.check_axes(partition.axes, f"{step} on {spec}")
    for dim, axes in enumerate(partition.dims):
        before, shards = spec.dim_shards(dim), step.mesh.axis_size(axes)
        if shards != before:
            rule = f"dim {dim} must keep its {before} shards: {axes or 'no axes'} make {shards}"
            refuse(step, spec, rule, PLAN_FIX)
    sizes = {dim: shards for dim, shards in enumerate(spec.sizes) if shards is not None}
    to = _named_spec(step, spec, step.mesh, partition, sizes)
    if not to.is_equivalent(spec):
        refuse(step, spec, _difference(spec, to), PLAN_FIX)
    return to


def _difference(spec: Spec, to: Spec) -> str:
    """Return the rule that two specs break if they are not equivalent, with the first such rank."""
    for rank in spec.mesh.ranks:
        before, after = _box_text(spec, rank), _box_text(to, rank)
        if before != after:
            return f"every rank must keep its shard: rank {rank} has {before}, in {to} {after}"
    return f"every rank must stay unreduced and reduced with the same ranks: in {to} with others"


def _box_text(spec: Spec, rank: int) -> str:
    return f"[{', '.join(f'{part.start}:{part.stop}' for part in spec.index(rank))}]"


def _named_spec(
    step: Step, spec: Spec, mesh: Mesh, partition: PartitionSpec, sizes: dict[int, tuple[int, ...]]
) -> Spec:
    """Return the spec that the step names, and attribute its problems to the step."""
    try:
        return Spec(mesh, partition, shape=spec.shape, dtype=spec.dtype, sizes=sizes)
    except ShardingError as error:
        raise_if(f"{step} on {spec}", error.problems)
        raise
