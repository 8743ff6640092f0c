"""The one interpreter: what a rank does for each step, over any transport.

What of a step depends on no numbers (groups, shapes, bytes) is worked out once for each rank:
then a step is a function of the local, or a `Wire`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import assert_never

import torch

from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.program.cost.model import step_axes
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.run.collective import Wire, begin, exchange, wire_of
from fshard.run.packing import Tensors
from fshard.run.transports.base import Finish, Transport
from fshard.run.transports.reduce_dtypes import as_dtype, neutral_like, over, times

__all__ = ["collectives", "launch", "ranks_of", "stages"]

Local = Tensors
"""A step that moves nothing: the local before to the local afterwards."""
LocalStep = (
    AllSlice
    | InvariantToReduced
    | Remesh
    | ReducedToInvariant
    | ReplicatedToUnreduced
    | ShardedToUnreduced
)


def launch(prog: Program, transport: Transport, x: torch.Tensor) -> Finish:
    """Start a program on this rank's local: it runs up to its last collective.

    A rank outside of the mesh gets an empty tensor and takes part in nothing.
    """
    before, last, after = _ready(prog, transport.rank)
    for stage in before:
        x = begin(stage, x, transport)() if isinstance(stage, Wire) else stage(x)
    finish: Finish = (lambda x=x: x) if last is None else begin(last, x, transport)  # type: ignore[misc]
    if not after:
        return finish

    def rest() -> torch.Tensor:
        y = finish()
        for local in after:
            y = local(y)
        return y

    return rest


@lru_cache(maxsize=8192)
def stages(prog: Program, rank: int) -> tuple[Local | Wire, ...]:
    """What a program is for one rank: functions of its local, and collectives, one by one.

    One for each step; before them a cast where the program has a `forward_dtype`, and after them
    the one back. For a rank outside of the target's mesh the last one gives an empty tensor.
    """
    wire, dtype = prog.forward_dtype, prog.dst.dtype
    rows = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
    every: list[Local | Wire] = [] if wire is None else [lambda x: x.to(wire)]
    every += [_stage(*row, rank, wire) for row in rows]
    if rank not in prog.dst.mesh:
        return (*every, lambda x: x.new_empty((0,), dtype=dtype))
    return tuple(every) if wire is None else (*every, lambda x: x.to(dtype))


@lru_cache(maxsize=4096)
def ranks_of(*progs: Program) -> Mesh:
    """The mesh of programs' ranks: of several that which has all, or else one in their order."""
    meshes = list(dict.fromkeys(spec.mesh for prog in progs for spec in prog.specs))
    if len(meshes) == 1:
        return meshes[0]
    ranks = sorted({rank for mesh in meshes for rank in mesh.ranks})
    whole = next((mesh for mesh in meshes if mesh.size == len(ranks)), None)
    return whole or (Mesh({"rank": len(ranks)}, devices=ranks) if ranks else Mesh())


@lru_cache(maxsize=8192)
def _ready(
    prog: Program, rank: int
) -> tuple[tuple[Local | Wire, ...], Wire | None, tuple[Local, ...]]:
    """A program's stages: those before its last collective, it, the others."""
    every = stages(prog, rank)
    at = max((at for at, stage in enumerate(every) if isinstance(stage, Wire)), default=None)
    if at is None:
        return every, None, ()
    last = every[at]
    assert isinstance(last, Wire)
    return every[:at], last, every[at + 1 :]  # type: ignore[return-value]


@lru_cache(maxsize=8192)
def collectives(prog: Program) -> int:
    """How many collectives a rank takes part in, at most."""
    return max(
        sum(isinstance(stage, Wire) for stage in stages(prog, rank))
        for rank in ranks_of(prog).ranks
    )


def _stage(step: Step, src: Spec, dst: Spec, rank: int, wire: torch.dtype | None) -> Local | Wire:
    """One step of one rank; `wire` is the dtype that replaces the casts, if any."""
    match step:
        case Cast(dtype):
            return lambda x: x if wire is not None else as_dtype(x, dtype)
        case _ if rank not in src.mesh and rank not in dst.mesh:
            return lambda x: x
        case _ if 0 in src.shape:
            shape = dst.local_shape(rank) if rank in dst.mesh else (0,)
            return lambda x: x.new_empty(shape)
        case Exchange():
            return exchange(step, src, dst, rank)
        case AllGather() | AllReduce() | ReduceScatter() | AllToAll() | CollectivePermute():
            axes = step_axes(step, src, dst)
            # A collective's result is memory of its own, of one device too.
            return wire_of(step, src, dst, rank, axes) if axes else torch.clone
        case _:
            return functools.partial(_local, step, src, dst, rank)


# -- local steps ----------------------------------------------------------------------


def _local(step: LocalStep, src: Spec, dst: Spec, rank: int, x: torch.Tensor) -> torch.Tensor:
    """A step that moves nothing."""
    mesh = src.mesh
    match step:
        case Remesh():
            return x
        case AllSlice(axes, dim):
            offset = dst.offsets(rank)[dim] - src.offsets(rank)[dim]
            mine = x.narrow(dim, offset, dst.local_shape(rank)[dim])
            return times(mine, _averaged(src, axes)).clone(memory_format=torch.contiguous_format)
        case InvariantToReduced(axes, kind):
            return over(x, mesh.axis_size(axes) if kind == "avg" else 1)
        case ReducedToInvariant(axes):
            return times(x, _averaged(src, axes))
        case ReplicatedToUnreduced(axes, kind):
            x = times(x, _averaged(src, axes))
            if kind == "avg" or mesh.index(rank, axes) == 0:
                return x
            return neutral_like(x, kind)
        case ShardedToUnreduced(axes, dim, kind, by):
            share = mesh.axis_size(axes) if kind == "avg" else 1
            if by:
                agree = mesh.index(rank, axes) == mesh.index(rank, by)
                mine = times(x, share * _averaged(src, by))
                return mine if agree else neutral_like(x, kind, dst.local_shape(rank))
            whole = neutral_like(x, kind, dst.local_shape(rank))
            offset = src.offsets(rank)[dim] - dst.offsets(rank)[dim]
            whole.narrow(dim, offset, x.shape[dim]).copy_(times(x, share))
            return whole
        case _:
            assert_never(step)


def _averaged(src: Spec, axes: Sequence[str]) -> int:
    """What undoes the shares of an average: the devices along the axes reduced by it."""
    kinds = dict(src.partition.reduced_kinds)
    return math.prod(src.mesh.shape[axis] for axis in axes if kinds.get(axis) == "avg")
