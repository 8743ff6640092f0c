"""Interpreter of programs: each step as a function of one rank's local tensor, or a `Wire`.

Everything in a step that depends on specs alone (groups, shapes, byte counts) is computed once per
rank and cached; `launch` then runs the functions and starts the collectives over any transport.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import assert_never

import torch

from fshard._util.cache import CACHE_SIZE
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.program.cost.traffic import step_axes
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    HaloExchange,
    HaloReduce,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from fshard.run.collective import Wire, exchange, launch_wire, observed_launch, unchanged, wire_of
from fshard.run.halo import halo
from fshard.run.transports.base import OBSERVERS, Finish, Group, Label, Transport
from fshard.run.transports.observed_calls import notify
from fshard.run.transports.reduce_dtypes import TensorFunction, as_dtype, neutral_like, over, times
from fshard.run.transports.simulator import own_result, results_of

TEXT_LIMIT = 200
"""Characters of programs in errors."""
LocalFunction = TensorFunction
"""A step without communication: the local before it to the local after it."""
Stages = tuple[LocalFunction | Wire, ...]
GroupCall = tuple[Group, Wire, tuple[tuple[Sequence[int], Sequence[int]], ...]]
"""A collective of one group: the ranks, one rank's wire, and every rank's splits."""
LocalStep = (
    AllSlice
    | InvariantToReduced
    | Remesh
    | ReducedToInvariant
    | ReplicatedToUnreduced
    | ShardedToUnreduced
)


def launch(prog: Program, transport: Transport, x: torch.Tensor, *, owned: bool = False) -> Finish:
    """Run a program on this rank's local up to and including the start of its last collective.

    A rank outside of the target's mesh gets an empty tensor. A local that is `owned` may be
    written: no one else has its memory.
    """
    before, last, after = _split_at_last_wire(prog, transport.rank)
    for stage in before:
        x = launch_wire(stage, x, transport, owned=owned)() if isinstance(stage, Wire) else stage(x)
    if last is None:
        return lambda: x
    finish = launch_wire(last, x, transport, owned=owned)
    if not after:
        return finish

    def finish_after() -> torch.Tensor:
        y = finish()
        for function in after:
            y = function(y)
        return y

    return finish_after


def run_on_shards(
    prog: Program, mesh: Mesh, shards: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Run a program on the shards of all ranks of `mesh`, one step after the other.

    A collective is computed from the inputs of all ranks, without threads.
    """
    xs = tuple(shards)
    for step_stages, calls in _stages_by_step(prog, mesh):
        if not calls:
            xs = tuple([stage(x) for stage, x in zip(step_stages, xs, strict=True)])  # type: ignore[operator]
            continue
        payloads = {}
        for rank, stage, x in zip(mesh.ranks, step_stages, xs, strict=True):
            if isinstance(stage, Wire):
                payloads[rank] = payload = stage.pack(x)
                if observers := OBSERVERS.get():
                    notify(observed_launch(stage, payload, rank), observers)
        moved: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for group, wire, splits in calls:
                inputs = [payloads.pop(rank).detach() for rank in group]
                moved |= results_of(wire.op, wire.reduction, group, inputs, splits)
        xs = tuple(
            stage.unpack(own_result(moved, rank, stage.op), x)
            if isinstance(stage, Wire)
            else stage(x)
            for rank, stage, x in zip(mesh.ranks, step_stages, xs, strict=True)
        )
    return xs


@lru_cache(maxsize=CACHE_SIZE)
def _stages_by_step(prog: Program, mesh: Mesh) -> tuple[tuple[Stages, tuple[GroupCall, ...]], ...]:
    """Return for each step the ranks' stages, and the collectives of all its groups."""
    columns = zip_longest(*[stages(prog, rank) for rank in mesh.ranks], fillvalue=lambda x: x)
    steps: list[tuple[Stages, tuple[GroupCall, ...]]] = []
    for column in columns:
        wires = {
            rank: stage
            for rank, stage in zip(mesh.ranks, column, strict=True)
            if isinstance(stage, Wire)
        }
        calls = [
            (group, wires[group[0]], tuple((wires[r].send, wires[r].receive) for r in group))
            for group in dict.fromkeys(wire.group for wire in wires.values())
        ]
        steps.append((column, tuple(calls)))
    return tuple(steps)


@lru_cache(maxsize=CACHE_SIZE)
def stages(prog: Program, rank: int) -> Stages:
    """Return one rank's functions and collectives, one for each step of the program.

    With a `forward_dtype` a cast comes before them and one after them. A rank outside of the
    target's mesh has a last function that returns an empty tensor.
    """
    wire_dtype, dtype = prog.forward_dtype, prog.dst.dtype
    rows = zip(prog.steps, prog.specs, prog.specs[1:], strict=False)
    functions: list[LocalFunction | Wire] = []
    if wire_dtype is not None:
        functions.append(lambda x: x.to(wire_dtype))
    functions += [_stage(*row, rank, wire_dtype) for row in rows]
    if rank not in prog.dst.mesh:
        functions.append(lambda x: x.new_empty((0,), dtype=dtype))
    elif wire_dtype is not None:
        functions.append(lambda x: x.to(dtype))
    return tuple(functions)


@lru_cache(maxsize=CACHE_SIZE)
def ranks_of(*progs: Program) -> Mesh:
    """Return a mesh of all ranks that programs run on: theirs, or else a new one in rank order."""
    meshes = list(dict.fromkeys(spec.mesh for prog in progs for spec in prog.specs))
    if len(meshes) == 1:
        return meshes[0]
    ranks = sorted({rank for mesh in meshes for rank in mesh.ranks})
    full = next((mesh for mesh in meshes if mesh.size == len(ranks)), None)
    return full or (Mesh({"rank": len(ranks)}, devices=ranks) if ranks else Mesh())


@lru_cache(maxsize=CACHE_SIZE)
def program_text(*progs: Program) -> str:
    """Return the sources and steps of programs in a line; a long one ends with a checksum."""
    rows = [", ".join(map(str, (prog.src, *prog.steps))) for prog in progs]
    text = f"({'; '.join(rows)})"
    if len(text) <= TEXT_LIMIT:
        return text
    return f"{text[:TEXT_LIMIT]}... {zlib.crc32(text.encode()):08x})"


@lru_cache(maxsize=CACHE_SIZE)
def program_label(prog: Program) -> Label:
    """Return the label of a program's launches, with its source and steps as arguments."""
    name, ends = f"the program to {prog.dst}", (prog.src, prog.dst)
    return Label(name, ranks_of(prog), arguments=program_text(prog), ends=ends)


@lru_cache(maxsize=CACHE_SIZE)
def _split_at_last_wire(
    prog: Program, rank: int
) -> tuple[Stages, Wire | None, tuple[LocalFunction, ...]]:
    """Return a program's stages before its last collective, that collective, and the rest."""
    functions = stages(prog, rank)
    index = max((i for i, stage in enumerate(functions) if isinstance(stage, Wire)), default=None)
    if index is None:
        return functions, None, ()
    last = functions[index]
    assert isinstance(last, Wire)
    return functions[:index], last, functions[index + 1 :]  # type: ignore[return-value]


def _stage(
    step: Step, src: Spec, dst: Spec, rank: int, wire_dtype: torch.dtype | None
) -> LocalFunction | Wire:
    """Return one step of one rank; with a `wire_dtype` the casts are identities."""
    match step:
        case Cast(dtype):
            return lambda x: x if wire_dtype is not None else as_dtype(x, dtype)
        case _ if rank not in src.mesh and rank not in dst.mesh:
            return unchanged
        case HaloExchange() | HaloReduce():
            return halo(step, src, dst, rank)
        case _ if 0 in src.shape:
            shape = dst.local_shape(rank) if rank in dst.mesh else (0,)
            return lambda x: x.new_empty(shape)
        case Exchange():
            return exchange(step, src, dst, rank)
        case AllGather() | AllReduce() | ReduceScatter() | AllToAll() | CollectivePermute():
            axes = step_axes(step, src, dst)
            # Also on one device the result of a collective has its own memory.
            return wire_of(step, src, dst, rank, axes) if axes else torch.clone
        case _:
            return _local_step(step, src, dst, rank)


# -- local steps ----------------------------------------------------------------------


def _local_step(step: LocalStep, src: Spec, dst: Spec, rank: int) -> LocalFunction:
    """Return one step that needs no communication as a function of the local."""
    if isinstance(step, Remesh):
        return unchanged
    mesh, shape = src.mesh, dst.local_shape(rank)
    match step:
        case AllSlice(axes, dim):
            offset = dst.offsets(rank)[dim] - src.offsets(rank)[dim]
            return _scaled_slice(dim, offset, shape[dim], _avg_factor(src, axes))
        case InvariantToReduced(axes, kind):
            divisor = mesh.axis_size(axes) if kind == "avg" else 1
            return unchanged if divisor == 1 else lambda x: over(x, divisor)
        case ReducedToInvariant(axes):
            factor = _avg_factor(src, axes)
            return unchanged if factor == 1 else lambda x: times(x, factor)
        case ReplicatedToUnreduced(axes, kind):
            factor = _avg_factor(src, axes)
            if kind == "avg" or mesh.index(rank, axes) == 0:
                return lambda x: times(x, factor)
            return lambda x: neutral_like(x, kind)
        case ShardedToUnreduced(axes, dim, kind, by):
            factor = mesh.axis_size(axes) if kind == "avg" else 1
            if by:
                factor *= _avg_factor(src, by)
                if mesh.index(rank, axes) == mesh.index(rank, by):
                    return lambda x: times(x, factor)
                return lambda x: neutral_like(x, kind, shape)
            offset = src.offsets(rank)[dim] - dst.offsets(rank)[dim]

            def embed(x: torch.Tensor) -> torch.Tensor:
                result = neutral_like(x, kind, shape)
                result.narrow(dim, offset, x.shape[dim]).copy_(times(x, factor))
                return result

            return embed
        case _:
            assert_never(step)


def _scaled_slice(dim: int, offset: int, size: int, factor: int) -> LocalFunction:
    def run(x: torch.Tensor) -> torch.Tensor:
        part = x.narrow(dim, offset, size)
        part = part if factor == 1 else times(part, factor)
        return part.clone(memory_format=torch.contiguous_format)

    return run


def _avg_factor(src: Spec, axes: Sequence[str]) -> int:
    """Return the number of devices along those `axes` over which `src` is reduced by `avg`."""
    kinds = dict(src.partition.reduced_kinds)
    return math.prod(src.mesh.shape[axis] for axis in axes if kinds.get(axis) == "avg")
