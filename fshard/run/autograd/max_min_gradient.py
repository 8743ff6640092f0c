"""The programs behind the gradient of a maximum or a minimum over ranks.

Neither is linear: a program is cut at them, and the gradient of each goes to the candidates that
reach it, in equal shares where several do, as in `torch.amax`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from fshard._util.errors import fail
from fshard.layout.partition_spec import LINEAR, PartitionSpec
from fshard.layout.spec import Spec
from fshard.program.exchange_boxes import converted_axes, reduction_axes
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReduceScatter,
    Remesh,
    Step,
)
from fshard.program.transpose import is_linear

__all__ = ["extreme_gradient", "linear_parts"]


@lru_cache(maxsize=1024)
def linear_parts(prog: Program) -> tuple[Program, ...]:
    """The program cut at its non-linear steps, each a program by itself.

    In the linear parts candidates of a maximum are passengers: their reduction is none of
    these steps' business, and their gradients are addends, so they are typed as a sum's.
    """
    parts: list[Program] = []
    run: list[Step] = []
    start = prog.src
    for step, src, dst in zip(prog.steps, prog.specs, prog.specs[1:], strict=False):
        if is_linear(step, src):
            run.append(_of_addends(step))
            continue
        axes = _extreme_axes(step, src, dst)
        if not axes:
            fail(
                f"running {prog.src} -> {prog.dst}",
                f"{step} on a tensor that requires grad",
                "sums, averages, maxima and minima have a gradient, this step has none",
                "detach() the local, or reduce by another reduction",
            )
        if run:
            parts.append(Program(_as_addends(start), run))
        only, run = _apart(step, src, dst)
        parts.append(Program(src, (only,)))
        start = parts[-1].dst
    return (*parts, Program(_as_addends(start), run)) if run else tuple(parts)


def _extreme_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """The axes along which the step takes a maximum or a minimum; none where it takes neither."""
    after = dst.partition.unreduced
    made = {after[axis] for axis in converted_axes(src, dst) if axis in after}
    match step:
        case AllReduce(axes) | ReduceScatter(axes):
            taken = axes
        case Exchange() if made <= set(LINEAR):
            taken = reduction_axes(src, dst)
        case _:
            return ()
    kinds = {src.partition.unreduced[axis] for axis in taken}
    return taken if kinds <= {"max", "min"} else ()


def _apart(step: Step, src: Spec, dst: Spec) -> tuple[Step, list[Step]]:
    """The step that reduces and moves, and those that put axes to other uses afterwards.

    Where shards become addends too they do so afterwards.
    """
    if not isinstance(step, Exchange):
        return step, []
    if converted_axes(src, dst):
        return AllReduce(reduction_axes(src, dst)), [_of_addends(step)]
    p = dst.partition
    new = {axis: kind for axis, kind in p.reduced_kinds if axis not in src.partition.reduced}
    kept = tuple(each for each in p.reduced_kinds if each[0] not in new)
    plain = PartitionSpec._of(p.dims, p.unreduced_kinds, kept)
    uses: list[Step] = [
        InvariantToReduced(tuple(axis for axis in new if new[axis] == kind), kind)
        for kind in sorted(set(new.values()))
    ]
    return replace(step, partition=plain), uses


def _of_addends(step: Step) -> Step:
    """The step where candidates are typed as addends."""
    if isinstance(step, CollectivePermute | Exchange | Remesh):
        return replace(step, partition=_addends(step.partition))
    return step


def _as_addends(spec: Spec) -> Spec:
    return spec._with(partition=_addends(spec.partition))


def _addends(p: PartitionSpec) -> PartitionSpec:
    kinds = tuple((axis, kind if kind in LINEAR else "sum") for axis, kind in p.unreduced_kinds)
    return PartitionSpec._of(p.dims, kinds, p.reduced_kinds)


@lru_cache(maxsize=1024)
def extreme_gradient(prog: Program) -> tuple[Program, Program, Program]:
    """Programs that count ties, and that make the result and its cotangent whole on every rank.

    Each rank uses the cotangent for candidates of its own, hence reduced: a second derivative
    adds up what the ranks made of it. The program is of one step, as `linear_parts` cuts it.
    """
    (step,) = prog.steps
    axes = _extreme_axes(step, prog.src, prog.dst)
    before, plain = _as_addends(prog.src), _as_addends(prog.dst)
    count = Program(before, (AllReduce(axes),))
    match step:
        case ReduceScatter(_, dim):
            gather = AllGather(axes, dim, "reduced")
            return count, Program(plain, (gather,)), Program(plain, (gather,))
        case Exchange():
            p = before.partition
            reduced = p.reduced_kinds + tuple((axis, "sum") for axis in axes)
            there = PartitionSpec._of(p.dims, _except(p.unreduced_kinds, axes), reduced)
            back = Program(plain, (Exchange(there, before.sizes, before.mesh),))
            return count, back, back
    assert isinstance(step, AllReduce)
    bare = _without(plain, axes)
    if step.to == "reduced":
        p = bare.partition
        addends = p.unreduced_kinds + tuple((axis, "sum") for axis in axes)
        unreduced = bare._with(partition=PartitionSpec._of(p.dims, addends, p.reduced_kinds))
        return count, Program(bare, ()), Program(unreduced, (AllReduce(axes, "reduced"),))
    return count, Program(bare, ()), Program(bare, (InvariantToReduced(axes),))


def _without(spec: Spec, axes: tuple[str, ...]) -> Spec:
    p = spec.partition
    return spec._with(
        partition=PartitionSpec._of(p.dims, p.unreduced_kinds, _except(p.reduced_kinds, axes))
    )


def _except(kinds: Iterable[tuple[str, str]], axes: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    return tuple(each for each in kinds if each[0] not in axes)
