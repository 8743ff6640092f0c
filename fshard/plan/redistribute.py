"""`redistribute`: plan the program of collectives from one layout to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, overload

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.plan.batch.batch import BUCKET_BYTES, Batch, bucket_problems
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
StepTypes = tuple[type, ...]
WireDtypes = tuple[torch.dtype | None, torch.dtype | None]
Objective = Literal["time", "bytes"]
COLLECTIVES = {AllGather, AllReduce, AllToAll, CollectivePermute, ReduceScatter}
"""Step types in which a rank may receive more than it lacks: all but the exchange."""


@overload
def redistribute(
    src: Spec,
    dst: Spec,
    /,
    *,
    topology: Topology | None = None,
    objective: Objective = "time",
    max_memory: int | None = None,
    exclude: type | Iterable[type] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> Program: ...
@overload
def redistribute(
    src: Any,
    dst: Any,
    /,
    *,
    topology: Topology | None = None,
    objective: Objective = "time",
    max_memory: int | None = None,
    exclude: type | Iterable[type] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> Batch: ...
def redistribute(
    src: Any,
    dst: Any,
    /,
    *,
    topology: Topology | None = None,
    objective: Objective = "time",
    max_memory: int | None = None,
    exclude: type | Iterable[type] = (),
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
) -> Program | Batch:
    """Plan the cheapest program of collectives from `src` to `dst`, without communicating.

    The transpose `.T` of the result, from `dst.dual` to `src.dual`, is its backward pass. Plans
    are cached by their arguments.

    Args:
        src: The `Spec` to start from, or a tree of specs (`None` leaves allowed).
        dst: The `Spec` to reach, or a tree of the same structure. Global shapes must agree; the
            dtype may differ. The mesh may be another one, on the same devices or on others.
        topology: The machine to plan for; by default a single node, however many devices the mesh
            has. The result remembers it for `cost`, `explain` and `simplify`. On several nodes an
            axis `x` may be split into `x_0`, the major part between nodes, and `x_1` inside.
        objective: "time" minimizes the estimated seconds, "bytes" the bytes that the busiest rank
            receives.
        max_memory: Most bytes of any rank's local between two steps. A step holds its input and
            its output at once, so a run may need twice as much.
        exclude: A step type, or several, that the program must not contain.
        forward_dtype: The dtype in which the program sends.
        backward_dtype: The dtype in which its transpose sends.
        bucket_bytes: For trees, the most bytes that a rank sends or receives in one launch, unless
            a single leaf has more; `None` is unlimited.

    Returns:
        A `Program`, or for trees a `Batch`: its leaves are planned together, and collectives of
        one kind are coalesced into one launch.

    Raises:
        ShardingError: If global shapes or tree structures differ, if a reduction would turn into
            another, if an option is invalid, or if no program meets the restrictions. Problems of
            trees name the path of each leaf.

    The search extends Rink et al., "Memory-efficient array redistribution through portable
    collective communication" (arXiv 2112.01075).

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(dp=2, tp=4), fs.P("dp", "tp"), shape=(1024, 512))
    >>> print(fs.redistribute(src, src.replace(partition=fs.P(("dp", "tp"), None))))
    f32[1024@dp,512@tp] -> f32[1024@(dp,tp),512] on Mesh(dp=2, tp=4)
      all_to_all(tp, dim 1 -> 0)  f32[1024@(dp,tp),512]  196,608 B
    """
    options = (max_memory, as_types(exclude), forward_dtype, backward_dtype)
    problems = [*_objective_problems(topology, objective), *bucket_problems(bucket_bytes)]
    raise_if("fs.redistribute", problems)
    if isinstance(src, Spec) and isinstance(dst, Spec):
        return _plan(src, dst, topology, objective, *options)
    return plan_batch(src, dst, _plan, _plan_exchange, topology, objective, options, bucket_bytes)


@lru_cache(maxsize=16384)
def _plan(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    objective: Objective,
    max_memory: int | None,
    exclude: StepTypes,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    sharers: int = 1,
) -> Program:
    """Return the cheapest program if `sharers` programs share each launch."""
    wires = (forward_dtype, backward_dtype)
    raise_if("fs.redistribute", _problems(src, dst, max_memory, exclude, wires))
    find = partial(_find, src, dst, topology, objective, wires, sharers)
    prog = find(max_memory, frozenset(exclude))
    if prog is not None:
        return prog
    fail(
        "fs.redistribute",
        f"{src} -> {dst}{_restrictions(max_memory, exclude)}",
        "no program meets the restrictions",
        _fix(find, max_memory, frozenset(exclude)),
    )


def _plan_exchange(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    objective: Objective,
    max_memory: int | None,
    exclude: StepTypes,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> Program | None:
    """Return a program in which no rank receives more than it lacks, or None.

    Its busiest rank alone may gain nothing; in a batch other ranks have other leaves to receive.
    """
    if Exchange in exclude:
        return None
    excluded, wires = frozenset(exclude) | COLLECTIVES, (forward_dtype, backward_dtype)
    return _find(src, dst, topology, objective, wires, 1, max_memory, excluded)


def _find(
    src: Spec,
    dst: Spec,
    topology: Topology | None,
    objective: Objective,
    wires: WireDtypes,
    sharers: int,
    max_memory: int | None,
    exclude: frozenset[type],
) -> Program | None:
    """Return the cheapest program that meets the restrictions, or None."""
    model = (topology or NODE) if objective == "time" else None
    if model is not None and sharers > 1:
        model = replace(model, launch=model.launch / sharers)

    def plan(start: Spec, end: Spec) -> list[Step] | None:
        if wires[0] is not None:  # costs are those of the dtype that is sent
            start, end = start._with(dtype=wires[0]), end._with(dtype=wires[0])
        return plan_between(start, end, model, max_memory, exclude)

    parts: list[list[Step] | None]
    if src.dtype == dst.dtype:
        parts = [plan(src, dst)]
    else:
        before, after = _cast_between(src, dst)
        parts = [plan(src, before), [Cast(dst.dtype)], plan(after, dst)]
    if None in parts:
        return None
    steps = [step for part in parts if part is not None for step in part]
    forward, backward = wires
    prog = Program(
        src, steps, dst, forward_dtype=forward, backward_dtype=backward, topology=topology
    )
    fits = max_memory is None or not steps or prog.cost().peak_memory <= max_memory
    return prog if fits else None


def _cast_between(src: Spec, dst: Spec) -> tuple[Spec, Spec]:
    """Return the layout in which the dtype changes, with the dtype before and after.

    It is the layout of the end that sends fewer bytes, if the states there allow both dtypes and
    the cast commutes with their reductions; else `dst` with nothing unreduced or reduced.
    """
    for end in [src, dst] if dst.dtype.itemsize < src.dtype.itemsize else [dst, src]:
        p = end.partition
        allowed = not any(
            state_problems(p.unreduced_kinds, p.reduced_kinds, dtype)
            for dtype in (src.dtype, dst.dtype)
        )
        if allowed and (not p.unreduced_kinds or holds(dst.dtype, src.dtype)):
            return end._with(dtype=src.dtype), end._with(dtype=dst.dtype)
    invariant = dst._with(partition=PartitionSpec._of(dst.partition.dims))
    return invariant._with(dtype=src.dtype), invariant


def _problems(
    src: Spec,
    dst: Spec,
    max_memory: int | None,
    exclude: StepTypes,
    wires: WireDtypes,
) -> list[Problem]:
    problems = endpoint_problems("redistribute", src, dst)
    if not isinstance(src, Spec) or not isinstance(dst, Spec):
        return problems
    problems += exclude_problems(exclude)
    is_int = isinstance(max_memory, int) and not isinstance(max_memory, bool)
    if max_memory is not None and (not is_int or max_memory < 0):
        problems.append(
            Problem(
                f"max_memory={max_memory!r}",
                "max_memory must be a number of bytes, an int of at least 0",
                "max_memory=2**30",
            )
        )
    problems += wire_problems(src, wires)
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
                    f"unreduced {before[axis]} cannot become unreduced {after[axis]}",
                    f"reduce over {axis!r} first: a target without it among unreduced=",
                )
            )
    return problems


def _objective_problems(topology: object, objective: object) -> list[Problem]:
    """Return the problems of the options that say what is minimized."""
    problems = []
    if topology is not None and not isinstance(topology, Topology):
        fix = f'objective="{topology}"' if topology in ("time", "bytes") else (
            "topology=fs.Topology.cluster(8)")  # fmt: skip
        problems.append(Problem(f"topology={topology!r}", "topology must be a Topology", fix))
    if objective not in ("time", "bytes"):
        rule = "objective must be 'time' or 'bytes'"
        fix = "topology=, which takes the Topology" if isinstance(objective, Topology) else (
            'objective="bytes"')  # fmt: skip
        problems.append(Problem(f"objective={objective!r}", rule, fix))
    return problems


def _restrictions(max_memory: int | None, exclude: StepTypes) -> str:
    """Return the given restrictions as text, each after a comma."""
    texts = [] if max_memory is None else [f"max_memory={max_memory}"]
    names = ", ".join(step_type.__name__ for step_type in exclude)
    texts += [f"exclude={names if len(exclude) == 1 else f'({names})'}"] if exclude else []
    return "".join(f", {text}" for text in texts)


def _fix(
    find: Callable[[int | None, frozenset[type]], Program | None],
    max_memory: int | None,
    exclude: frozenset[type],
) -> str:
    """Return a fix that was tried: the least sufficient memory, or step types to allow."""
    least, prog = None, find(None, exclude)
    while prog is not None:
        least = prog.cost().peak_memory
        prog = find(least - 1, exclude)
        if prog is not None and not prog.steps:
            break
    if least is not None:
        return f"give max_memory={least}, the least there is"
    unrestricted = find(None, frozenset())
    assert unrestricted is not None
    used = {type(step).__name__ for step in unrestricted.steps if type(step) in exclude}
    fixes = [f"allow {', '.join(sorted(used))}"] if used else []
    peak = unrestricted.cost().peak_memory
    if max_memory is not None and peak > max_memory:
        fixes.append(f"give max_memory={peak}")
    return " and ".join(fixes) or "lift one of the two restrictions"
