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

from fshard.program.cost import step_axes
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
from fshard.run.packing import Tensors
from fshard.run.transport import Finish, Transport
from fshard.run.wire import Wire, begin, wire_of
from fshard.spec import Spec

__all__ = ["collectives", "launch", "neutral_like", "stages"]

Local = Tensors
"""A step that moves nothing: the local before to the local afterwards."""


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

    Casts to the dtype that is sent and back are among them. For a rank outside of the program it
    is one function, which gives an empty tensor.
    """
    if rank not in prog.src.mesh:
        dtype = prog.dst.dtype
        return (lambda x: x.new_empty((0,), dtype=dtype),)
    wire = prog.forward_dtype
    rows = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
    steps = tuple(_stage(*row, rank, wire) for row in rows)
    if wire is None:
        return steps
    back = prog.dst.dtype
    return (lambda x: x.to(wire), *steps, lambda x: x.to(back))


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
    """How many steps of a program communicate."""
    steps = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
    return sum(bool(0 not in src.shape and _wire_axes(step, src, dst)) for step, src, dst in steps)


def _wire_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes with more than one device that a collective step runs over; else none."""
    match step:
        case AllGather() | AllReduce() | ReduceScatter() | AllToAll() | CollectivePermute():
            return step_axes(step, src, dst)
        case _:
            return ()


def _stage(step: Step, src: Spec, dst: Spec, rank: int, wire: torch.dtype | None) -> Local | Wire:
    """One step of one rank; `wire` is the dtype that replaces the casts, if any."""
    shape, dtype = dst.local_shape(rank), wire or dst.dtype
    if 0 in src.shape:
        return lambda x: x.new_empty(shape, dtype=dtype)
    axes = _wire_axes(step, src, dst)
    if axes:
        return wire_of(step, src, dst, rank, axes)
    return functools.partial(_local, step, src, dst, rank=rank, wire=wire)


# -- local steps ----------------------------------------------------------------------


def _local(
    step: Step, src: Spec, dst: Spec, x: torch.Tensor, /, rank: int, wire: torch.dtype | None
) -> torch.Tensor:
    """A step that moves nothing; a collective over axes of one device is its share of one."""
    mesh = src.mesh
    match step:
        case AllGather() | AllReduce() | ReduceScatter() | AllToAll() | CollectivePermute():
            return x.clone()  # a collective's result is memory of its own, of one device too
        case AllSlice(axes, dim):
            offset = dst.offsets(rank)[dim] - src.offsets(rank)[dim]
            mine = x.narrow(dim, offset, dst.local_shape(rank)[dim])
            return _times(mine, _averaged(src, axes)).clone(memory_format=torch.contiguous_format)
        case InvariantToReduced(axes, kind):
            return x / mesh.axis_size(axes) if kind == "avg" else x
        case ReducedToInvariant(axes):
            return _times(x, _averaged(src, axes))
        case ReplicatedToUnreduced(axes, kind):
            x = _times(x, _averaged(src, axes))
            if kind == "avg" or mesh.index(rank, axes) == 0:
                return x
            return neutral_like(x, kind)
        case ShardedToUnreduced(axes, dim, kind, by):
            share = mesh.axis_size(axes) if kind == "avg" else 1
            if by:
                agree = mesh.index(rank, axes) == mesh.index(rank, by)
                mine = _times(x, share * _averaged(src, by))
                return mine if agree else neutral_like(x, kind, dst.local_shape(rank))
            whole = neutral_like(x, kind, dst.local_shape(rank))
            offset = src.offsets(rank)[dim] - dst.offsets(rank)[dim]
            whole.narrow(dim, offset, x.shape[dim]).copy_(_times(x, share))
            return whole
        case Remesh():
            return x
        case Exchange():
            raise NotImplementedError
        case Cast(dtype):
            return x if wire is not None else x.to(dtype)
        case _:
            assert_never(step)


def _averaged(src: Spec, axes: Sequence[str]) -> int:
    """What undoes the shares of an average: the devices along the axes reduced by it."""
    kinds = dict(src.partition.reduced_kinds)
    return math.prod(src.mesh.shape[axis] for axis in axes if kinds.get(axis) == "avg")


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x if factor == 1 else x * factor


def neutral_like(x: torch.Tensor, kind: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of the reduction's neutral element, of `x`'s shape unless another is given."""
    value: float | int | bool
    if kind in ("sum", "avg"):
        value = 0
    elif kind == "product":
        value = 1
    elif x.dtype == torch.bool:
        value = kind == "min"
    elif x.dtype.is_floating_point:
        value = -math.inf if kind == "max" else math.inf
    else:
        info = torch.iinfo(x.dtype)
        value = info.min if kind == "max" else info.max
    return x.new_full(x.shape if shape is None else shape, value)
