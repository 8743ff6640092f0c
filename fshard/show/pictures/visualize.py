"""`visualize`: pictures of layouts, tensors, meshes and programs."""

from __future__ import annotations

import re
from typing import Any

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh, read_device_mesh
from fshard.layout.sharded import Pair, Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten, is_pair, leaf_names
from fshard.partition.step_cost.memory_timeline import StepMemory
from fshard.partition.step_cost.roofline import Roofline
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.program.program_arguments import as_topology
from fshard.run.execute import check_local, check_shards
from fshard.run.transports.base import current_rank
from fshard.show.pictures.drawing import Picture
from fshard.show.pictures.layout_picture import LayoutPicture
from fshard.show.pictures.memory_picture import MemoryPicture
from fshard.show.pictures.mesh_picture import MeshPicture
from fshard.show.pictures.program_picture import ProgramPicture
from fshard.show.pictures.step_picture import StepPicture
from fshard.show.pictures.tree_picture import TreePicture
from fshard.state.modules.distributed_module import DistributedModule

WHERE = "fs.visualize"


Drawable = Any
"""Spec, pair, tree of these, `Mesh`, `Program`, `Roofline`, `StepMemory` or distributed module."""


def visualize(
    value: Drawable, /, *, header: str = "", values: bool = False, topology: Topology | None = None
) -> Picture:
    """Draw a layout, a tensor, a tree of them, a mesh on its machine, a program, or a step.

    Layouts: two dims are drawn in proportion, the last ones that are sharded, with a grid for each
    shard of the other dims. A cell is a shard with the ranks that hold it: a comma between
    invariant replicas, `&` between reduced ones, a plus between unreduced values. Meshes: the ranks
    of every node, or of a torus with its links, and the rates along every axis. Programs: the
    layouts at both ends, the time of each step, and the bytes that ranks send to each other. The
    `roofline()` of a partitioned call: its computation and collectives on a time axis. Its
    `memory()`: the bytes over time.

    Trees of specs or pairs, and distributed modules: a row for each tensor by its path.

    Every mesh axis has a colour and a mark. Of many shards, ranks and nodes only the first and the
    last are shown.

    Args:
        value: A `Spec`; a (local, spec) pair, which also shows how its locals make up the global
            tensor; a `Mesh`; a `Program`; a `Roofline` or a `StepMemory`; a tree of specs
            or pairs.
        header: Line above the picture, as in DTensor's `visualize_sharding`.
        values: True to show the values of a pair in its cells, for small tensors. Replicas that
            differ are shown one by one.
        topology: The machine of a mesh or of a program; None draws a mesh by its coordinates, and
            is the program's own topology.

    Returns:
        A picture, which prints as text, in `rich` and as HTML in a notebook; `plot()` draws it with
        matplotlib.

    Raises:
        ShardingError: If a local does not fit its spec, `value` is of another type, or an option
            does not belong to it.

    >>> import fshard as fs
    >>> print(fs.visualize(fs.Spec(fs.Mesh(dp=2, tp=2), fs.P("tp"), shape=(4,))))
    f32[4@tp] on Mesh(dp=2, tp=2)
    ● dp=2 invariant   ▲ tp=2 shards dim 0
                     tp=0                     tp=1
    dim 0            0:2                      2:4
          ┌────────────────────────┬────────────────────────┐
          │          0, 2          │          1, 3          │
          └────────────────────────┴────────────────────────┘
    each rank holds f32[2], 8 B of 16 B
    invariant over dp: ranks such as 0, 2 hold the same
    """
    value = read_device_mesh(value)
    if topology is not None and not isinstance(value, Mesh | Program):
        fail(WHERE, f"topology= for a {type(value).__name__}", "topology must be that of a Mesh or "
             "a Program", "fs.visualize(spec.mesh, topology=topology)")  # fmt: skip
    if values and isinstance(value, Spec | Mesh | Program | Roofline | StepMemory):
        fail(WHERE, f"values=True for a {type(value).__name__}", "values must be those of a pair",
             "fs.visualize((local, spec), values=True)")  # fmt: skip
    if isinstance(value, Roofline):
        return StepPicture(value, header)
    if isinstance(value, StepMemory):
        return MemoryPicture(value, header)
    if isinstance(value, Mesh):
        machine = None if topology is None else as_topology(WHERE, topology, meshes=(value,))
        return MeshPicture(value, machine, header)
    if isinstance(value, Program):
        meshes = value.src.mesh, value.dst.mesh
        return ProgramPicture(value, as_topology(WHERE, topology, value.topology, meshes), header)
    if isinstance(value, Spec):
        return LayoutPicture(value, header=header)
    if not is_pair(value) and (specs := _specs_by_path(value)):
        return TreePicture(specs, header)
    return _pair_picture(value, header, values)


def _specs_by_path(tree: object) -> tuple[tuple[str, Spec], ...]:
    """Return the layouts of a tree of specs and pairs by path, none if it has other leaves."""
    if isinstance(tree, DistributedModule):
        return tuple(item for group in tree.specs.values() for item in group.items())
    leaves, _ = flatten(tree)
    specs = [leaf.spec if isinstance(leaf, Sharded) else leaf for leaf in leaves]
    if not all(isinstance(spec, Spec) for spec in specs):
        return ()
    return tuple(sorted(zip(leaf_names(tree), specs, strict=True), key=_path_order))


def _path_order(item: tuple[str, Spec]) -> list[tuple[bool, int | str]]:
    """Return the parts of a path, numbers by their value: layer 2 comes before layer 10."""
    parts = re.split(r"(\d+)", item[0])
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts]


def _pair_picture(value: Pair, header: str, values: bool) -> LayoutPicture:
    """Return the picture of a pair; raise `ShardingError` if it is not one that fits."""
    if not is_pair(value):
        rule = ("the value must be a Spec, a (local, spec) pair, a tree of them, a Mesh, a "
                "Program, or the roofline() or memory() of a partitioned call")  # fmt: skip
        fail(WHERE, f"a value of type {type(value).__name__}", rule,
             "fs.visualize(spec) or fs.visualize((local, spec))")  # fmt: skip
    local, spec = value
    if not isinstance(local, torch.Tensor):
        check_shards(local, spec, WHERE)
        ranks = tuple(spec.mesh.ranks)
        shown = dict(zip(ranks, local, strict=True)) if values else None
        return LayoutPicture(spec, ranks, header, shown)
    transport = current_rank(spec.mesh, WHERE)
    check_local(local, spec, transport, WHERE)
    if transport.rank not in spec.mesh:
        return LayoutPicture(spec, header=header)
    return LayoutPicture(
        spec, (transport.rank,), header, {transport.rank: local} if values else None
    )
