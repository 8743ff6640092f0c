"""Groups of mesh axes that are labelled as one axis, where all axes apart have too many labels.

Layouts and roles on the merged axes are ones on the axes themselves, in which the axes of a group
shard the same dims and factors. So labels of few axes are good choices on many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.propagate.choice_hints import RoleHint
from fshard.program.cost.topology import Topology


@dataclass(frozen=True, slots=True)
class MergedAxes:
    """Mesh with one axis for each group of the axes of another mesh.

    Attributes:
        groups: the axes of the other mesh, by the name of the merged axis.
        mesh: the mesh of merged axes.
        separate: the mesh of the axes themselves.
    """

    groups: Mapping[str, tuple[str, ...]]
    mesh: Mesh
    separate: Mesh

    @staticmethod
    def of(mesh: Mesh, groups: Sequence[tuple[str, ...]]) -> MergedAxes:
        """Return the merged axes of a mesh; axes in no group keep their names.

        >>> MergedAxes.of(Mesh(a=2, b=2, c=2), [("a", "c"), ("b",)]).mesh.shape
        mappingproxy({'a_c': 4, 'b': 2})
        """
        named, merged = dict[str, tuple[str, ...]](), mesh
        for group in groups:
            name = "_".join(group)
            while name in {*mesh.axes} - {*group}:
                name += "_"
            named[name], merged = group, merged.flatten(group, name)
        return MergedAxes(named, merged, mesh)

    def merge(self, p: PartitionSpec) -> PartitionSpec | None:
        """Return a layout on the merged mesh, None if axes of a group differ in it."""
        dims = {axis: dim for dim, axes in enumerate(p.dims) for axis in axes}
        reduced, unreduced = dict(p.reduced_kinds), dict(p.unreduced_kinds)
        states = {
            name: {(dims.get(x), reduced.get(x), unreduced.get(x)) for x in group}
            for name, group in self.groups.items()
        }
        if any(len(x) > 1 for x in states.values()):
            return None
        state = {name: only for name, (only,) in states.items()}
        entries = [tuple(name for name in state if state[name][0] == dim) or None
                   for dim in range(len(p.dims))]  # fmt: skip
        return PartitionSpec(*entries, reduced={n: x for n, (_, x, _) in state.items() if x},
                             unreduced={n: x for n, (_, _, x) in state.items() if x})  # fmt: skip

    def merge_all(
        self, layouts: Sequence[PartitionSpec | Spec | None]
    ) -> list[PartitionSpec | None] | None:
        """Return layouts on the merged mesh, None if axes of a group differ in one."""
        given = [p.partition if isinstance(p, Spec) else p for p in layouts]
        merged = [None if p is None else self.merge(p) for p in given]
        return None if merged.count(None) > given.count(None) else merged

    def separated(self, p: PartitionSpec) -> PartitionSpec:
        """Return the layout on the axes themselves of a layout without sums on the merged mesh."""
        axes = [{x for name in names for x in self.groups.get(name, (name,))} for names in p.dims]
        return PartitionSpec(*(tuple(a for a in self.separate.axes if a in x) or None
                               for x in axes))  # fmt: skip

    def separated_roles(self, hints: Mapping[str, RoleHint]) -> dict[str, RoleHint]:
        """Return roles on the axes themselves."""
        roles = {
            node: {x: role for name, role in hint.roles for x in self.groups.get(name, (name,))}
            for node, hint in hints.items()
        }
        return {
            node: RoleHint(tuple((x, by_axis[x]) for x in self.separate.axes if x in by_axis))
            for node, by_axis in roles.items()
        }


def mergers(
    mesh: Mesh, topology: Topology, count: int, *, distinct: bool
) -> Iterator[MergedAxes]:  # fmt: skip
    """Yield the ways to merge axes to `count`, with `distinct` one of equal sizes and links.

    >>> on = Topology.node()
    >>> [[*merged.groups] for merged in mergers(Mesh(a=2, b=2, c=2), on, 2, distinct=True)]
    [['a', 'b_c']]
    """
    axes, seen = tuple(axis for axis in mesh.axes if mesh.shape[axis] > 1), set()
    for groups in _groupings(axes, count):
        merged = MergedAxes.of(mesh, groups)
        key = tuple(sorted(
            (merged.mesh.shape[name], *(
                (link.latency, link.bandwidth) for exchange in (False, True)
                for link in [topology.link(merged.mesh, (name,), exchange=exchange)]
            )) for name in merged.groups
        ))  # fmt: skip
        if not distinct or key not in seen:
            seen.add(key)
            yield merged


def _groupings(axes: tuple[str, ...], count: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield the partitions of axes into `count` groups."""
    if not axes or not count:
        if not axes and not count:
            yield ()
        return
    first, rest = axes[:1], axes[1:]
    for groups in _groupings(rest, count - 1):
        yield (first, *groups)
    for groups in _groupings(rest, count):
        for index, group in enumerate(groups):
            yield (*groups[:index], first + group, *groups[index + 1 :])
