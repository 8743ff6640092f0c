"""`visualize`: pictures of layouts, tensors, meshes and programs."""

from __future__ import annotations

from typing import overload

import torch

from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.layout.sharded import Pair
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.program.program_arguments import as_topology
from fshard.run.execute import check_local, check_shards
from fshard.run.transports.base import current_rank
from fshard.show.pictures.layout_picture import Picture
from fshard.show.pictures.mesh_picture import MeshPicture
from fshard.show.pictures.program_picture import ProgramPicture

WHERE = "fs.visualize"


@overload
def visualize(value: Spec | Pair, /, *, header: str = "", values: bool = False) -> Picture: ...


@overload
def visualize(
    value: Mesh, /, *, header: str = "", topology: Topology | None = None
) -> MeshPicture: ...


@overload
def visualize(
    value: Program, /, *, header: str = "", topology: Topology | None = None
) -> ProgramPicture: ...


def visualize(
    value: Spec | Pair | Mesh | Program, /, *, header: str = "", values: bool = False,
    topology: Topology | None = None,
) -> Picture | MeshPicture | ProgramPicture:  # fmt: skip
    """Draw a layout, a sharded tensor, a mesh on its machine, or a program.

    Layouts: two dims are drawn in proportion, the last ones that are sharded, with a grid for each
    shard of the other dims. A cell is a shard with the ranks that hold it: a comma between
    invariant replicas, `&` between reduced ones, a plus between unreduced values. Meshes: the ranks
    of every node, or of a torus with its links, and the rates along every axis. Programs: the
    layouts at both ends, the time of each step, and the bytes that ranks send to each other.

    Every mesh axis has a colour and a mark. Of many shards, ranks and nodes only the first and the
    last are shown.

    Args:
        value: A `Spec`; a (local, spec) pair, which also shows how its locals make up the global
            tensor; a `Mesh`; or a `Program`.
        header: Line above the picture, as in DTensor's `visualize_sharding`.
        values: True to show the values of a pair in its cells, for small tensors. Replicas that
            differ are shown one by one.
        topology: The machine of a mesh or of a program; None draws a mesh by its coordinates, and
            is the program's own topology.

    Returns:
        A picture, which prints as text, in `rich` and as HTML in a notebook.

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
    is_machine = isinstance(value, Mesh | Program)
    if topology is not None and not is_machine and isinstance(value, Spec | tuple):
        fail(WHERE, f"topology= for a {type(value).__name__}", "topology must be that of a Mesh or "
             "a Program", "fs.visualize(spec.mesh, topology=topology)")  # fmt: skip
    if values and (is_machine or isinstance(value, Spec)):
        fail(WHERE, f"values=True for the {type(value).__name__} {value}", "values must be those "
             "of a pair", "fs.visualize((local, spec), values=True)")  # fmt: skip
    if isinstance(value, Mesh):
        machine = None if topology is None else as_topology(WHERE, topology, meshes=(value,))
        return MeshPicture(value, machine, header)
    if isinstance(value, Program):
        meshes = value.src.mesh, value.dst.mesh
        return ProgramPicture(value, as_topology(WHERE, topology, value.topology, meshes), header)
    if isinstance(value, Spec):
        return Picture(value, header=header)
    return _pair_picture(value, header, values)


def _pair_picture(value: Pair, header: str, values: bool) -> Picture:
    """Return the picture of a pair; raise `ShardingError` if it is not one that fits."""
    if not is_pair(value):
        rule = "the value must be a Spec, a (local, spec) pair, a Mesh or a Program"
        fail(WHERE, f"a {type(value).__name__}", rule,
             "fs.visualize(spec) or fs.visualize((local, spec))")  # fmt: skip
    local, spec = value
    if not isinstance(local, torch.Tensor):
        check_shards(local, spec, WHERE)
        ranks = tuple(spec.mesh.ranks)
        shown = dict(zip(ranks, local, strict=True)) if values else None
        return Picture(spec, ranks, header, shown)
    transport = current_rank(spec.mesh, WHERE)
    check_local(local, spec, transport, WHERE)
    if transport.rank not in spec.mesh:
        return Picture(spec, header=header)
    return Picture(spec, (transport.rank,), header, {transport.rank: local} if values else None)
