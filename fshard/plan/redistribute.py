"""`redistribute(spec_a, spec_b)`: the program from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, overload

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.plan.batch.batch import BUCKET, Batch, bucket_problems
from fshard.plan.batch.plan_batch import plan_batch
from fshard.plan.cross_mesh import plan_between
from fshard.program.cast_rules import holds
from fshard.program.cost.topology import Topology
from fshard.program.program import (
    Program,
    as_types,
    endpoint_problems,
    exclude_problems,
    wire_problems,
)
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    ReduceScatter,
    Step,
)

__all__ = ["redistribute"]

NODE = Topology.node()
Steps = tuple[type, ...]
Wires = tuple[torch.dtype | None, torch.dtype | None]
COLLECTIVES = {AllGather, AllReduce, AllToAll, CollectivePermute, ReduceScatter}
"""Those in which a rank may receive more than it lacks: all but the exchange."""


@overload
def redistribute(
    src: Spec,
    dst: Spec,
    /,
    *,
    cost: Topology | str | None = None,
    max_memory: int | None = None,
    exclude: type | Iterable[type] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = BUCKET,
) -> Program: ...
@overload
def redistribute(
    src: Any,
    dst: Any,
    /,
    *,
    cost: Topology | str | None = None,
    max_memory: int | None = None,
    exclude: type | Iterable[type] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = BUCKET,
) -> Batch: ...
def redistribute(
    src: Any,
    dst: Any,
    /,
    *,
    cost: Topology | str | None = None,
    max_memory: int | None = None,
    exclude: type | Iterable[type] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = BUCKET,
) -> Program | Batch:
    """The cheapest program of collectives from `src` to `dst`, planned without communicating.

    `cost` is a `Topology` or "bytes", what the busiest rank receives. The default is a single
    node, however many devices the mesh has: of several nodes give the topology,
    `fs.Topology.dgx_h100()` say, and give the same one to `prog.cost`, `prog.explain` and
    `prog.simplify`, whose default is a node too. On several nodes an axis `x` may be split into
    `x_0`, the major part, between nodes, and `x_1` inside.

    `max_memory` bounds the bytes of the largest local on the way; a step holds its input and its
    output at once, so that a run needs up to twice that. `exclude` names step types not to use;
    `forward_dtype` and `backward_dtype` are what the program and its transpose send. The specs
    may be of two meshes, on the same devices, on some or on none in common. The search goes
    beyond Rink et al., arXiv 2112.01075; a plan is cached by its arguments.

    Of two trees of specs it is a `Batch`: all leaves are planned together, collectives of one
    kind are one launch, of at most `bucket_bytes` unless a leaf has more. Options are then
    those of every leaf.

    Raises `ShardingError` where the global shapes differ, where a reduction would turn into
    another, and where no program keeps to the restrictions; of trees with the
    path of each leaf, and where they are of different structures.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> mesh = Mesh(dp=2, tp=4)
    >>> src = Spec(mesh, P("dp", "tp"), shape=(1024, 512))
    >>> print(redistribute(src, src.replace(partition=P(("dp", "tp"), None))))
    f32[1024@dp,512@tp] -> f32[1024@(dp,tp),512] on Mesh(dp=2, tp=4)
      all_to_all(tp, dim 1 -> 0)  f32[1024@(dp,tp),512]  196,608 B
    """
    options = (
        max_memory,
        as_types(exclude),
        forward_dtype,
        backward_dtype,
    )
    raise_if("fs.redistribute", bucket_problems(bucket_bytes))
    known = NODE if cost is None else cost
    if isinstance(src, Spec) and isinstance(dst, Spec):
        return _plan(src, dst, known, *options)
    return plan_batch(src, dst, _plan, _exchange, known, options, bucket_bytes)


@lru_cache(maxsize=16384)
def _plan(
    src: Spec,
    dst: Spec,
    cost: Topology | str,
    max_memory: int | None,
    exclude: Steps,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Program:
    wires = (forward_dtype, backward_dtype)
    raise_if("fs.redistribute", _problems(src, dst, cost, max_memory, exclude, wires))
    topology = None if isinstance(cost, str) else cost
    find = partial(_find, src, dst, topology, wires=wires)
    prog = find(max_memory, frozenset(exclude))
    if prog is not None:
        return prog
    fail(
        "fs.redistribute",
        f"{src} -> {dst}{_restrictions(max_memory, exclude)}",
        "no program keeps to the restrictions",
        _way_out(find, max_memory, frozenset(exclude)),
    )


def _exchange(
    src: Spec,
    dst: Spec,
    cost: Topology | str,
    max_memory: int | None,
    exclude: Steps,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Program | None:
    """A program in which no rank receives but what it lacks, where there is one.

    That of the busiest rank alone may be no shorter: in a batch the others have leaves too.
    """
    if Exchange in exclude:
        return None
    topology = None if isinstance(cost, str) else cost
    others, wires = frozenset(exclude) | COLLECTIVES, (forward_dtype, backward_dtype)
    return _find(src, dst, topology, max_memory, others, wires)


def _find(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    max_memory: int | None,
    exclude: frozenset[type],
    wires: Wires = (None, None),
) -> Program | None:
    """The cheapest program that keeps to the restrictions, if there is one."""

    def plan(here: Spec, there: Spec) -> list[Step] | None:
        if wires[0] is not None:  # what goes over the wires is what is weighed
            here, there = here._with(dtype=wires[0]), there._with(dtype=wires[0])
        return plan_between(here, there, topology, max_memory, exclude)

    parts: list[list[Step] | None]
    if src.dtype == dst.dtype:
        parts = [plan(src, dst)]
    else:
        before, after = _cast_between(src, dst)
        parts = [plan(src, before), [Cast(dst.dtype)], plan(after, dst)]
    if None in parts:
        return None
    steps = [step for part in parts if part is not None for step in part]
    prog = Program(src, steps, dst, forward_dtype=wires[0], backward_dtype=wires[1])
    fits = max_memory is None or not steps or prog.cost().peak_memory <= max_memory
    return prog if fits else None


def _cast_between(src: Spec, dst: Spec) -> tuple[Spec, Spec]:
    """The layout in which the dtype changes, before and after.

    At the end that sends fewer bytes, where that end's states allow both dtypes and the cast
    commutes with their reductions; else between the two, where nothing is unreduced.
    """
    for end in [src, dst] if dst.dtype.itemsize < src.dtype.itemsize else [dst, src]:
        p = end.partition
        allowed = not any(
            state_problems(p.unreduced_kinds, p.reduced_kinds, dtype)
            for dtype in (src.dtype, dst.dtype)
        )
        if allowed and (not p.unreduced_kinds or holds(dst.dtype, src.dtype)):
            return end._with(dtype=src.dtype), end._with(dtype=dst.dtype)
    whole = dst._with(partition=PartitionSpec._of(dst.partition.dims))
    return whole._with(dtype=src.dtype), whole


def _problems(
    src: Spec,
    dst: Spec,
    cost: Topology | str,
    max_memory: int | None,
    exclude: Steps,
    wires: Wires,
) -> list[Problem]:
    problems = endpoint_problems("redistribute", src, dst)
    if not isinstance(src, Spec) or not isinstance(dst, Spec):
        return problems
    problems += _option_problems(src, cost, max_memory, exclude, wires)
    if src.dtype.is_complex and not dst.dtype.is_complex:
        problems.append(
            Problem(
                f"{src} -> {dst}",
                "a cast from complex to real drops the imaginary part",
                "take torch.real first, or keep the dtype",
            )
        )
    before, after = src.partition.unreduced, dst.partition.unreduced
    for axis in before if src.mesh == dst.mesh else ():
        kinds = {before[axis], after.get(axis, before[axis])}
        if len(kinds) == 2 and not kinds <= {"sum", "avg"}:
            problems.append(
                Problem(
                    f"axis {axis!r} from unreduced {before[axis]} to unreduced {after[axis]}",
                    f"candidates of {before[axis]} are not addends of {after[axis]}",
                    f"reduce over {axis!r} first: a target without it among unreduced=",
                )
            )
    return problems


def _option_problems(
    src: Spec,
    cost: Topology | str,
    max_memory: int | None,
    exclude: Steps,
    wires: Wires,
) -> list[Problem]:
    problems = []
    if not isinstance(cost, Topology) and cost != "bytes":
        problems.append(
            Problem(
                f"cost={cost!r}",
                'cost is a Topology or "bytes"',
                'cost=fs.Topology.cluster(), or cost="bytes"',
            )
        )
    problems += exclude_problems(exclude)
    whole = isinstance(max_memory, int) and not isinstance(max_memory, bool)
    if max_memory is not None and (not whole or max_memory < 0):
        problems.append(
            Problem(f"max_memory={max_memory!r}", "bytes are a whole number", "max_memory=2**30")
        )
    problems += wire_problems(src, wires)
    return problems


def _restrictions(max_memory: int | None, exclude: Steps) -> str:
    """Those that were given, after a comma each."""
    given = [] if max_memory is None else [f"max_memory={max_memory}"]
    names = ", ".join(each.__name__ for each in exclude)
    given += [f"exclude={names if len(exclude) == 1 else f'({names})'}"] if exclude else []
    return "".join(f", {each}" for each in given)


def _way_out(
    find: Callable[[int | None, frozenset[type]], Program | None],
    max_memory: int | None,
    exclude: frozenset[type],
) -> str:
    """A fix that was tried: the least memory that suffices, or what an unrestricted plan uses."""
    least, prog = None, find(None, exclude)
    while prog is not None:
        least = prog.cost().peak_memory
        prog = find(least - 1, exclude)
        if prog is not None and not prog.steps:
            break
    if least is not None:
        return f"give max_memory={least}, the least there is"
    freely = find(None, frozenset())
    assert freely is not None
    used = sorted({type(step).__name__ for step in freely.steps if type(step) in exclude})
    fixes = [f"allow {', '.join(used)}"] if used else []
    peak = freely.cost().peak_memory
    if max_memory is not None and peak > max_memory:
        fixes.append(f"give max_memory={peak}")
    return " and ".join(fixes) or "lift one of the two restrictions"
