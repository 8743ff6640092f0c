"""Programs behind the gradient of a maximum or a minimum over ranks.

A program is split at its maxima and minima, which are not linear. The gradient of one goes to the
elements that attain it, in equal shares between ties, as in `torch.amax`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import fail
from fshard.layout.partition_spec import LINEAR, PartitionSpec, remove_kinds
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


@lru_cache(maxsize=CACHE_SIZE)
def linear_parts(prog: Program) -> tuple[Program, ...]:
    """Split a program at its non-linear steps, each of which becomes a program by itself.

    The steps of linear parts do not reduce a tensor that is unreduced by `max`; its gradient is a
    sum, so it is typed as unreduced by `sum` in them. All parts have the wire dtypes of `prog`.
    """
    part = partial(Program, forward_dtype=prog.forward_dtype, backward_dtype=prog.backward_dtype)
    parts: list[Program] = []
    linear_steps: list[Step] = []
    start = prog.src
    for step, src, dst in zip(prog.steps, prog.specs, prog.specs[1:], strict=False):
        if is_linear(step, src):
            linear_steps.append(_step_of_sums(step))
            continue
        axes = _extreme_axes(step, src, dst)
        if not axes:
            fail(f"running {prog.src} -> {prog.dst}", f"{step} on a tensor that requires grad",
                 "a reduction with a gradient must be a sum, average, maximum or minimum",
                 "detach() the local, or reduce by another reduction")  # fmt: skip
        if linear_steps:
            parts.append(part(_of_sums(start), tuple(linear_steps)))
        reducing_step, linear_steps = _split_conversions(step, src, dst)
        parts.append(part(src, (reducing_step,)))
        start = parts[-1].dst
    if linear_steps:
        parts.append(part(_of_sums(start), tuple(linear_steps)))
    return tuple(parts)


def _extreme_axes(step: Step, src: Spec, dst: Spec) -> tuple[str, ...]:
    """Return the axes along which a step takes a maximum or minimum, () if it does not."""
    after = dst.partition.unreduced
    new_kinds = {after[axis] for axis in converted_axes(src, dst) if axis in after}
    match step:
        case AllReduce(axes) | ReduceScatter(axes):
            reduced = axes
        case Exchange() if new_kinds <= set(LINEAR):
            reduced = reduction_axes(src, dst)
        case _:
            return ()
    kinds = {src.partition.unreduced[axis] for axis in reduced}
    return reduced if kinds <= {"max", "min"} else ()


def _split_conversions(step: Step, src: Spec, dst: Spec) -> tuple[Step, list[Step]]:
    """Split a step into one that reduces and exchanges, and steps that convert axes after it."""
    if not isinstance(step, Exchange):
        return step, []
    if converted_axes(src, dst):
        return AllReduce(reduction_axes(src, dst)), [_step_of_sums(step)]
    p = dst.partition
    new = {axis: kind for axis, kind in p.reduced_kinds if axis not in src.partition.reduced}
    kept = tuple(pair for pair in p.reduced_kinds if pair[0] not in new)
    plain = PartitionSpec._of(p.dims, p.unreduced_kinds, kept)
    conversions: list[Step] = [
        InvariantToReduced(tuple(axis for axis in new if new[axis] == kind), kind)
        for kind in sorted(set(new.values()))
    ]
    return replace(step, partition=plain), conversions


def _step_of_sums(step: Step) -> Step:
    """Return the step on a tensor that is unreduced by `sum` instead of `max` or `min`."""
    if isinstance(step, CollectivePermute | Exchange | Remesh):
        return replace(step, partition=_partition_of_sums(step.partition))
    return step


def _of_sums(spec: Spec) -> Spec:
    return spec._with(partition=_partition_of_sums(spec.partition))


def _partition_of_sums(p: PartitionSpec) -> PartitionSpec:
    kinds = tuple((axis, kind if kind in LINEAR else "sum") for axis, kind in p.unreduced_kinds)
    return PartitionSpec._of(p.dims, kinds, p.reduced_kinds)


@lru_cache(maxsize=CACHE_SIZE)
def extreme_gradient(prog: Program) -> tuple[Program, Program, Program]:
    """Return the programs of the gradient of a one-step maximum or minimum.

    Returns:
        A program that counts ties, one that replicates the result, and one that replicates its
        cotangent. Each rank uses the cotangent for its own elements, hence it is `reduced`: a
        second derivative adds what the ranks computed from it. Ties and cotangents are sent in
        `backward_dtype`, the result and second derivatives in `forward_dtype`.
    """
    (step,) = prog.steps
    axes = _extreme_axes(step, prog.src, prog.dst)
    before, after = _of_sums(prog.src), _of_sums(prog.dst)
    forward, backward = prog.forward_dtype, prog.backward_dtype
    of_result = partial(Program, forward_dtype=forward)
    of_cotangent = partial(Program, forward_dtype=backward, backward_dtype=forward)
    count = Program(before, (AllReduce(axes),), forward_dtype=backward)
    match step:
        case ReduceScatter(_, dim):
            gather = (AllGather(axes, dim, "reduced"),)
            return count, of_result(after, gather), of_cotangent(after, gather)
        case Exchange():
            p = before.partition
            reduced = p.reduced_kinds + tuple((axis, "sum") for axis in axes)
            partition = PartitionSpec._of(p.dims, remove_kinds(p.unreduced_kinds, axes), reduced)
            back = (Exchange(partition, before.sizes, before.mesh),)
            return count, of_result(after, back), of_cotangent(after, back)
    assert isinstance(step, AllReduce)
    p = after.partition
    p = PartitionSpec._of(p.dims, p.unreduced_kinds, remove_kinds(p.reduced_kinds, axes))
    invariant = after._with(partition=p)
    if step.to == "reduced":
        kinds = p.unreduced_kinds + tuple((axis, "sum") for axis in axes)
        unreduced = after._with(partition=PartitionSpec._of(p.dims, kinds, p.reduced_kinds))
        return count, Program(invariant, ()), of_cotangent(unreduced, (AllReduce(axes, "reduced"),))
    # An invariant cotangent is not sent.
    same = Program(invariant, (InvariantToReduced(axes),), backward_dtype=forward)
    return count, Program(invariant, ()), same
