"""Where a mapped function runs: which axes of which mesh are mapped, and whose names are bound.

A `shard_map` in the body of another maps further axes of the same mesh. A rank's values are then
cut and put together over the mesh of the axes that are not mapped yet, at this rank's coordinates
of the others; collectives may name all that are mapped. After nested `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from fshard._util.errors import Problem, did_you_mean, fail, raise_if
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.spmd.axis_env import BoundAxes

__all__ = [
    "Scope", "check_axis_names", "check_check", "check_mesh", "pair_scope", "refuse", "scope_of",
]  # fmt: skip

OPTIONS = ("in_specs", "out_specs", "mesh", "axis_names", "redistribute_inputs", "check")
CHECKS = ("strict", "values", "collectives")


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """What one call maps: values over `mesh` along `axes`; names of `names` are bound.

    Equal calls have one scope, which therefore is looked up by what it is.
    """

    mesh: Mesh
    axes: frozenset[str]
    names: Mesh
    bound: frozenset[str]
    rank: int | None

    @property
    def mapped(self) -> str:
        """The mapped axes as text, in the order of the mesh."""
        return ", ".join(axis for axis in self.mesh.axes if axis in self.axes)

    def adopt(self, spec: Spec) -> Spec | None:
        """`spec` on the mesh that is mapped over, or None where its mesh is no other view of it.

        Such views are the whole mesh that names are bound of, and parts of it at this rank's
        coordinates.
        """
        if spec.mesh == self.mesh:
            return spec
        if self.rank is None or not _is_part(spec.mesh, self.names, self.rank):
            return None
        if not all(axis in self.mesh.axes for axis in spec.partition.axes):
            return None
        return Spec._of(self.mesh, spec.partition, spec.shape, spec.dtype, spec.sizes)


def refuse(unknown: Mapping[str, object], where: str) -> None:
    """Raise `ShardingError` for options that there are not: those of JAX are others here."""
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
    """Raise `ShardingError` unless `check` is one of those there are."""
    if not isinstance(check, bool) and not (isinstance(check, str) and check in CHECKS):
        fail(where, f"check={check!r}",
             "check is True, False, 'strict', 'values' or 'collectives'",
             "leave it out: True")  # fmt: skip


def check_axis_names(axis_names: object, mesh: object, where: str) -> frozenset[str]:
    """`axis_names` as a set; raises `ShardingError` for anything but a set or tuple of names."""
    if isinstance(axis_names, set | frozenset | tuple) and all(
        isinstance(name, str) for name in axis_names
    ):
        return frozenset(axis_names)
    if axis_names is None:
        return frozenset()
    given = [axis_names] if isinstance(axis_names, str) else axis_names
    if isinstance(given, list) and given and all(isinstance(name, str) for name in given):
        fix = f"axis_names={{{_names(given)}}}"
    elif isinstance(mesh, Mesh) and mesh.axes:
        fix = f"axis_names={{{mesh.axes[0]!r}}}, or leave it out: all of {mesh}"
    else:
        fix = "leave it out: all that are not mapped yet"
    fail(
        where,
        f"axis_names={axis_names!r}",
        "axis_names is a set, frozenset or tuple of axis names",
        fix,
    )


def check_mesh(mesh: object, where: str) -> None:
    """Raise `ShardingError` unless `mesh` is a mesh with axes, or None."""
    if mesh is not None and not isinstance(mesh, Mesh):
        fail(where, f"mesh={mesh!r}", "mesh is a fs.Mesh", "mesh=fs.Mesh(x=2)")
    if isinstance(mesh, Mesh) and not mesh.axes:
        fail(where, f"mesh={mesh}", "there is at least one axis to map", "mesh=fs.Mesh(x=1)")


def scope_of(
    where: str,
    mesh: Mesh | None,
    axis_names: frozenset[str],
    outer: BoundAxes | None,
    rank: int | None,
) -> Scope:
    """The scope of a `shard_map` of `axis_names`, none of which means all that are left.

    Raises `ShardingError` without a mesh, for another mesh than the enclosing one, and for axes
    that are unknown or mapped already.
    """
    if outer is not None and rank is not None and rank in outer.mesh:
        if mesh is not None and mesh != outer.mesh:
            fail(
                where,
                f"mesh={mesh} in a running shard_map over {outer.mesh}",
                "a shard_map in the body of another maps axes of the same mesh",
                "mesh=None, which takes the enclosing mesh",
            )
        bound = outer.axes
        if outer.task is not None and (axis_names & bound or bound.issuperset(outer.mesh.axes)):
            bound = outer.around  # in backward, what is computed again may be the call itself
        return _inner(where, outer.mesh, axis_names, bound, rank)
    if mesh is None:
        fail(
            where,
            "mesh=None outside of a running shard_map",
            "mesh=None takes the mesh of the enclosing shard_map",
            "mesh=fs.Mesh(x=2)",
        )
    return _outermost(where, mesh, axis_names, rank)


@lru_cache(maxsize=1024)
def _outermost(where: str, mesh: Mesh, axis_names: frozenset[str], rank: int | None) -> Scope:
    mesh.check_axes(_in_order(axis_names, mesh), where)
    axes = axis_names or frozenset(mesh.axes)
    return Scope(mesh, axes, mesh, axes, rank)


@lru_cache(maxsize=1024)
def _inner(
    where: str, mesh: Mesh, axis_names: frozenset[str], outer: frozenset[str], rank: int
) -> Scope:
    mesh.check_axes(_in_order(axis_names, mesh), where)
    left = tuple(axis for axis in mesh.axes if axis not in outer)
    if not left:
        fail(
            where,
            f"a shard_map in a running one that maps every axis of {mesh}",
            "a shard_map in the body of another maps further axes",
            "call the function itself: its collectives may name the mapped axes",
        )
    raise_if(
        where,
        [
            Problem(
                f"axis {axis!r} in axis_names={{{_names(_in_order(axis_names, mesh))}}}",
                f"{axis!r} of {mesh} is mapped already, by the enclosing shard_map",
                f"axis_names={{{_names(left)}}}, or leave axis_names out",
            )
            for axis in _in_order(axis_names, mesh)
            if axis in outer
        ],
    )
    coords = {axis: at for axis, at in mesh.coords(rank).items() if axis in outer}
    axes = axis_names or frozenset(left)
    return Scope(mesh.submesh(*left, **coords), axes, mesh, outer | axes, rank)


def pair_scope(mesh: Mesh, outer: BoundAxes | None, rank: int | None) -> Scope:
    """The scope of a `local_map` over pairs of `mesh`, all of whose axes are mapped.

    In a running `shard_map` whose mesh they are part of, its names stay bound.
    """
    if outer is None or rank is None or not _is_part(mesh, outer.mesh, rank):
        return _whole(mesh, mesh, frozenset(), rank)
    return _whole(mesh, outer.mesh, outer.axes, rank)


@lru_cache(maxsize=1024)
def _whole(mesh: Mesh, names: Mesh, outer: frozenset[str], rank: int | None) -> Scope:
    axes = frozenset(mesh.axes)
    return Scope(mesh, axes, names, outer | axes, rank)


@lru_cache(maxsize=1024)
def _is_part(mesh: Mesh, whole: Mesh, rank: int) -> bool:
    """Whether `mesh` has some axes of `whole` at the coordinates that `rank` has of the others."""
    if rank not in whole or not set(mesh.axes) <= set(whole.axes):
        return False
    coords = {axis: at for axis, at in whole.coords(rank).items() if axis not in mesh.axes}
    return mesh == whole.submesh(*mesh.axes, **coords)


def _in_order(names: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    """Names in the order of the mesh, unknown ones last."""
    names = set(names)
    return (*(a for a in mesh.axes if a in names), *sorted(names - set(mesh.axes)))


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
