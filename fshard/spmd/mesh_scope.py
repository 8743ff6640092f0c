"""Scope of a call of a mapped function: the axes that it maps, and the axis names it binds.

A `shard_map` in the body of another maps further axes of the same mesh. A rank's values are then
sharded and assembled over the mesh of the axes that are not mapped yet, at this rank's coordinates
of the others; collectives may name all axes that are mapped. After nested `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from fshard._util.errors import Problem, did_you_mean, fail, raise_if
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.spec import Spec
from fshard.spmd.axis_env import BoundAxes

OPTIONS = ("in_specs", "out_specs", "mesh", "axis_names", "redistribute_inputs", "check")
CHECKS = ("strict", "values", "collectives")


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """Axes of one call; equal calls share one scope, so that caches look it up by identity.

    Attributes:
        mesh: the mesh over which values are sharded.
        axes: its axes that the call maps.
        named_mesh: the mesh that axis names in the body refer to.
        bound_axes: its axes that collectives may name.
        rank: the rank of this process or simulated rank, None if the call runs all ranks.
        uneven_axes: the axes along which shards of an argument have different sizes.
    """

    mesh: Mesh
    axes: frozenset[str]
    named_mesh: Mesh
    bound_axes: frozenset[str]
    rank: int | None
    uneven_axes: frozenset[str] = frozenset()

    @property
    def mapped_axes(self) -> tuple[str, ...]:
        """Mapped axes in the order of the mesh."""
        return tuple([axis for axis in self.mesh.axes if axis in self.axes])

    def adopt(self, spec: Spec) -> Spec | None:
        """Return `spec` on `mesh`, or None if its mesh is not another view of it.

        Such views are `named_mesh`, and submeshes of it at this rank's coordinates.
        """
        if spec.mesh == self.mesh:
            return spec
        if self.rank is None or not _is_submesh(spec.mesh, self.named_mesh, self.rank):
            return None
        if not all(axis in self.mesh.axes for axis in spec.partition.axes):
            return None
        return Spec._of(self.mesh, spec.partition, spec.shape, spec.dtype, spec.sizes)

    def with_uneven(self, axes: frozenset[str], outer: BoundAxes | None) -> Scope:
        """Return the scope of a call whose arguments are uneven along `axes`, within `outer`."""
        uneven = axes if outer is None else axes | outer.uneven
        return replace(self, uneven_axes=uneven) if uneven else self


def refuse_unknown_options(unknown: Mapping[str, object], where: str) -> None:
    """Raise `ShardingError` for unknown options; the fix translates those of JAX."""
    known = ", ".join(f"{name}=" for name in OPTIONS)
    check = "check=True, which tracks the types of tensors, or check=False"
    fixes = {
        "check_vma": check,
        "check_rep": check,
        "auto": "axis_names=, the axes that are mapped: all but those of auto",
    }
    raise_if(
        where,
        [
            Problem(
                f"{name}={value!r}",
                f"the options are {known}",
                fixes.get(name, did_you_mean(name, OPTIONS, f"leave {name} out")),
            )
            for name, value in unknown.items()
        ],
    )


def check_check(check: object, where: str) -> None:
    """Raise `ShardingError` unless `check` is a valid value of the option."""
    if isinstance(check, bool) or (isinstance(check, str) and check in CHECKS):
        return
    fix = "leave it out: True"
    fail(
        where,
        f"check={check!r}",
        "check must be True, False, 'strict', 'values' or 'collectives'",
        did_you_mean(check, CHECKS, fix) if isinstance(check, str) else fix,
    )


def check_axis_names(axis_names: object, mesh: object, where: str) -> frozenset[str]:
    """Return `axis_names` as a set; raise `ShardingError` for anything but a set or tuple."""
    if isinstance(axis_names, set | frozenset | tuple) and all(
        isinstance(name, str) for name in axis_names
    ):
        return frozenset(axis_names)
    if axis_names is None:
        return frozenset()
    names = [axis_names] if isinstance(axis_names, str) else axis_names
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        fix = f"axis_names={{{_quoted(names)}}}"
    elif isinstance(mesh, Mesh) and mesh.axes:
        fix = f"axis_names={{{mesh.axes[0]!r}}}, or leave it out: all of {mesh}"
    else:
        fix = "leave it out: all that are not mapped yet"
    fail(where, f"axis_names={axis_names!r}",
         "axis_names must be a set, frozenset or tuple of axis names", fix)  # fmt: skip


def mapped_mesh(mesh: object, where: str) -> Mesh | None:
    """Return a mesh with axes, or None; raise `ShardingError` for anything else."""
    if mesh is None:
        return None
    result = as_mesh(mesh, where)
    if not result.axes:
        fail(where, f"mesh={mesh}", "there must be at least one axis to map", "mesh=fs.Mesh(x=1)")
    return result


def shard_map_scope(
    where: str,
    mesh: Mesh | None,
    axis_names: frozenset[str],
    outer: BoundAxes | None,
    rank: int | None,
) -> Scope:
    """Return the scope of a `shard_map`; empty `axis_names` mean all axes not mapped yet.

    Raises `ShardingError` without a mesh, for another mesh than the enclosing one, and for axes
    that are unknown or mapped already.
    """
    if outer is not None and rank is not None and rank in outer.mesh:
        if mesh is not None and mesh != outer.mesh:
            fail(where, f"mesh={mesh} in a running shard_map over {outer.mesh}",
                 "a shard_map in the body of another must map axes of the same mesh",
                 "mesh=None, which takes the enclosing mesh")  # fmt: skip
        bound = outer.axes
        if outer.backward_task is not None and (
            axis_names & bound or bound.issuperset(outer.mesh.axes)
        ):
            bound = outer.outer_axes  # the backward pass may recompute the call itself
        return _inner_scope(where, outer.mesh, axis_names, bound, rank)
    if mesh is None:
        fail(where, "mesh=None outside of a running shard_map",
             "mesh=None takes the mesh of the enclosing shard_map", "mesh=fs.Mesh(x=2)",
        )  # fmt: skip
    return _outer_scope(where, mesh, axis_names, rank)


@lru_cache(maxsize=1024)
def _outer_scope(where: str, mesh: Mesh, axis_names: frozenset[str], rank: int | None) -> Scope:
    mesh.check_axes(_in_mesh_order(axis_names, mesh), where)
    axes = axis_names or frozenset(mesh.axes)
    return Scope(mesh, axes, mesh, axes, rank)


@lru_cache(maxsize=1024)
def _inner_scope(
    where: str, mesh: Mesh, axis_names: frozenset[str], outer: frozenset[str], rank: int
) -> Scope:
    mesh.check_axes(_in_mesh_order(axis_names, mesh), where)
    unmapped = tuple(axis for axis in mesh.axes if axis not in outer)
    if not unmapped:
        fail(where, f"a shard_map in a running one that maps every axis of {mesh}",
             "a shard_map in the body of another must map further axes",
             "call the function itself: its collectives may name the mapped axes")  # fmt: skip
    raise_if(
        where,
        [
            Problem(
                f"axis {axis!r} in axis_names={{{_quoted(_in_mesh_order(axis_names, mesh))}}}",
                f"{axis!r} of {mesh} is mapped already, by the enclosing shard_map",
                f"axis_names={{{_quoted(unmapped)}}}, or leave axis_names out",
            )
            for axis in _in_mesh_order(axis_names, mesh)
            if axis in outer
        ],
    )
    coords = {axis: index for axis, index in mesh.coords(rank).items() if axis in outer}
    axes = axis_names or frozenset(unmapped)
    return Scope(mesh.submesh(*unmapped, **coords), axes, mesh, outer | axes, rank)


def local_map_scope(mesh: Mesh, outer: BoundAxes | None, rank: int | None) -> Scope:
    """Return the scope of a `local_map` over pairs of `mesh`, all of whose axes are mapped.

    If `mesh` is a submesh of a running `shard_map`'s mesh, the names of that stay bound.
    """
    if outer is None or rank is None or not _is_submesh(mesh, outer.mesh, rank):
        return _full_scope(mesh, mesh, frozenset(), rank)
    return _full_scope(mesh, outer.mesh, outer.axes, rank)


@lru_cache(maxsize=1024)
def _full_scope(mesh: Mesh, named_mesh: Mesh, outer: frozenset[str], rank: int | None) -> Scope:
    axes = frozenset(mesh.axes)
    return Scope(mesh, axes, named_mesh, outer | axes, rank)


@lru_cache(maxsize=1024)
def _is_submesh(mesh: Mesh, full: Mesh, rank: int) -> bool:
    """Return True if `mesh` has some axes of `full`, at the coordinates of `rank` of the others."""
    if rank not in full or not set(mesh.axes) <= set(full.axes):
        return False
    coords = {axis: i for axis, i in full.coords(rank).items() if axis not in mesh.axes}
    return mesh == full.submesh(*mesh.axes, **coords)


def _in_mesh_order(names: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    """Return names in the order of the mesh, unknown ones last."""
    names = set(names)
    return (*(a for a in mesh.axes if a in names), *sorted(names - set(mesh.axes)))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
