"""`redistribute`: plan the program of collectives from one layout to another."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, overload

import torch

from fshard._torch.dynamo import skip_frames_below
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten
from fshard.layout.validation import state_problems
from fshard.plan.batch.batch import BUCKET_BYTES, Batch, bucket_problems
from fshard.plan.batch.plan_batch import plan_batch
from fshard.plan.cast_layouts import cast_layouts
from fshard.plan.cross_mesh import plan_between
from fshard.plan.plan_options import Objective, PlanOptions, objective_problems
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import max_local_nbytes
from fshard.program.program import Program, peak_memory, program_time
from fshard.program.program_arguments import as_topology, as_types, endpoint_problems, wire_problems
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

LOGGER = logging.getLogger("fshard.plan")
COLLECTIVES = (AllGather, AllReduce, AllToAll, CollectivePermute, ReduceScatter)
"""Step types in which a rank may receive more than it lacks: all but the exchange."""


@overload
def redistribute(
    src: Spec, dst: Spec, /, *, topology: Topology | None = ..., objective: Objective = ...,
    max_memory: int | None = ..., exclude: type | Iterable[type] = ...,
    forward_dtype: torch.dtype | None = ..., backward_dtype: torch.dtype | None = ...,
    bucket_bytes: int | None = ...,
) -> Program: ...  # fmt: skip
@overload
def redistribute(
    src: Any, dst: Any, /, *, topology: Topology | None = ..., objective: Objective = ...,
    max_memory: int | None = ..., exclude: type | Iterable[type] = ...,
    forward_dtype: torch.dtype | None = ..., backward_dtype: torch.dtype | None = ...,
    bucket_bytes: int | None = ...,
) -> Batch: ...  # fmt: skip
@skip_frames_below("fs.redistribute plans outside of graphs; fs.reshard is a part of them")
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
    are cached by their arguments, on which alone they depend: no call has to clear a cache. Sums
    and averages turn into each other by reducing, as scaling unreduced values could overflow.

    Args:
        src: The `Spec` to start from, or a tree of specs (`None` leaves allowed).
        dst: The `Spec` to reach, or a tree of the same structure. Global shapes must agree; the
            dtype may differ: it changes where the program costs least, and of equal ones its
            transpose. The mesh may be another one, on the same devices or on others.
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
    problems = [*objective_problems(topology, objective), *bucket_problems(bucket_bytes)]
    raise_if("fs.redistribute", problems)
    if topology is not None and topology.links:
        specs = [spec for spec in (*flatten(src)[0], *flatten(dst)[0]) if isinstance(spec, Spec)]
        as_topology("fs.redistribute", topology, meshes=[spec.mesh for spec in specs])
    options = PlanOptions(
        topology, objective, max_memory, as_types(exclude), forward_dtype, backward_dtype
    )
    if not options.is_hashable():
        raise_if("fs.redistribute", options.restriction_problems())
    if isinstance(src, Spec) and isinstance(dst, Spec):
        return _plan(src, dst, options)
    return plan_batch(src, dst, _plan, _plan_exchange, options, bucket_bytes)


@lru_cache(maxsize=16384)
def _plan(src: Spec, dst: Spec, options: PlanOptions) -> Program:
    raise_if("fs.redistribute", _problems(src, dst, options))
    prog = _find(src, dst, options)
    if prog is not None:
        if LOGGER.isEnabledFor(logging.DEBUG):
            LOGGER.debug("%s\n  %s", prog, prog.cost())
        return prog
    fail("fs.redistribute", f"{src} -> {dst}{options.restrictions()}",
         "no program meets the restrictions", _fix(src, dst, options))  # fmt: skip


def _plan_exchange(src: Spec, dst: Spec, options: PlanOptions) -> Program | None:
    """Return a program in which no rank receives more than it lacks, or None.

    Its busiest rank alone may gain nothing; in a batch other ranks have other leaves to receive.
    """
    if Exchange in options.exclude:
        return None
    return _find(src, dst, options._replace(exclude=(*options.exclude, *COLLECTIVES)))


def _find(src: Spec, dst: Spec, options: PlanOptions) -> Program | None:
    """Return the cheapest program that meets the restrictions, or None."""
    if src.dtype == dst.dtype:
        return _within(src, dst, [_steps(src, dst, options)], options)
    choices = []
    for layout in cast_layouts(src, dst, _layouts_between(src, dst, options)):
        before, after = layout, layout._with(dtype=dst.dtype)
        parts = [_steps(src, before, options), (Cast(dst.dtype),), _steps(after, dst, options)]
        choices.append(_within(src, dst, parts, options))
    return min(filter(None, choices), key=lambda prog: _rank(prog, options), default=None)


def _steps(src: Spec, dst: Spec, options: PlanOptions) -> tuple[Step, ...] | None:
    """Return the cheapest steps between layouts of one dtype, or None."""
    wire = options.forward_dtype
    if wire is not None:  # costs are those of the dtype that is sent
        src, dst = src._with(dtype=wire), dst._with(dtype=wire)
    steps = plan_between(
        src, dst, options.cost_topology, options.max_memory, frozenset(options.exclude),
        options.enough,
    )  # fmt: skip
    return None if steps is None else tuple(steps)


def _within(
    src: Spec, dst: Spec, parts: list[tuple[Step, ...] | None], options: PlanOptions
) -> Program | None:
    """Return the program of the parts, or None if one is missing or it exceeds the memory."""
    if None in parts:
        return None
    steps = tuple(step for part in parts if part is not None for step in part)
    prog = Program(
        src, steps, dst, forward_dtype=options.forward_dtype,
        backward_dtype=options.backward_dtype, topology=options.topology,
    )  # fmt: skip
    limit = options.max_memory
    return prog if limit is None or not steps or peak_memory(prog) <= limit else None


def _layouts_between(src: Spec, dst: Spec, options: PlanOptions) -> Iterator[Spec]:
    """Return the layouts of the plans in which the dtype does not change."""
    for dtype in (src.dtype, dst.dtype):
        start, end = src._with(dtype=dtype), dst._with(dtype=dtype)
        if not endpoint_problems("redistribute", start, end) and _allows(start) and _allows(end):
            yield from Program(start, _steps(start, end, options) or ()).specs


def _allows(spec: Spec) -> bool:
    p = spec.partition
    return not state_problems(p.unreduced_kinds, p.reduced_kinds, spec.dtype)


def _rank(prog: Program, options: PlanOptions) -> tuple[float, ...]:
    """Return the cost of a program, and that of its transpose, by which equal ones are ordered."""
    progs = [prog, prog.T] if prog.is_linear else [prog]
    if options.cost_topology is not None:
        return tuple(program_time(prog, options.cost_topology) for prog in progs)
    costs = [prog.cost(options.topology) for prog in progs]
    return tuple(
        float(x) for cost in costs for x in (cost.bytes_received, cost.launches, cost.time)
    )


def _problems(src: Spec, dst: Spec, options: PlanOptions) -> list[Problem]:
    problems = endpoint_problems("redistribute", src, dst)
    if not isinstance(src, Spec) or not isinstance(dst, Spec):
        return problems
    problems += options.restriction_problems()
    wires = options.forward_dtype, options.backward_dtype
    problems += wire_problems(src, [wire for wire in wires if isinstance(wire, torch.dtype)])
    if src.dtype.is_complex and not dst.dtype.is_complex:
        problems.append(Problem(
            f"{src} -> {dst}", "a cast from complex to real drops the imaginary part",
            "take torch.real first, or keep the dtype"))  # fmt: skip
    before, after = src.partition.unreduced, dst.partition.unreduced
    for axis in before if src.mesh == dst.mesh else ():
        kinds = {before[axis], after.get(axis, before[axis])}
        if len(kinds) == 2 and not kinds <= {"sum", "avg"}:
            problems.append(Problem(
                f"axis {axis!r} from unreduced {before[axis]} to unreduced {after[axis]}",
                f"unreduced {before[axis]} cannot become unreduced {after[axis]}",
                f"reduce over {axis!r} first: a target without it among unreduced="))  # fmt: skip
    return problems


def _fix(src: Spec, dst: Spec, options: PlanOptions) -> str:
    """Return a fix that was tried: the least sufficient memory, or step types to allow."""

    def find(max_memory: int | None) -> Program | None:
        """Return any program within the memory."""
        return _find(src, dst, options._replace(max_memory=max_memory, enough=math.inf))

    least, prog = None, None
    if options.max_memory is not None:
        ends = max(max_local_nbytes(src), max_local_nbytes(dst))
        too_little = max(options.max_memory, ends - 1)
        if too_little < ends:  # mostly enough
            prog = find(ends)
            too_little = ends if prog is None else too_little
        prog = prog or find(None)
        while prog is not None:
            least = peak_memory(prog)
            enough = least <= too_little + 1
            prog = None if enough else find(least - 1)
    if least is not None:
        return f"give max_memory={least}, the least there is"
    unrestricted = _find(src, dst, options._replace(max_memory=None, exclude=()))
    assert unrestricted is not None
    excluded = options.exclude
    used = {type(step).__name__ for step in unrestricted.steps if type(step) in excluded}
    fixes = [f"allow {', '.join(sorted(used))}"] if used else []
    peak = peak_memory(unrestricted)
    if options.max_memory is not None and peak > options.max_memory:
        fixes.append(f"give max_memory={peak}")
    return " and ".join(fixes) or "lift one of the two restrictions"
