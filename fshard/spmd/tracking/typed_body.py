"""Types of the arguments and results of a mapped function, and of programs that run in its body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fshard._torch.autograd_state import graph_task_id
from fshard._torch.functorch import is_transformed
from fshard._torch.memory import innermost
from fshard._util.errors import fail
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.run.execute import Pending, run_typed_hook
from fshard.run.execute_batch import run_typed_leaves_hook
from fshard.run.transports.divergence_report import explain_with
from fshard.spmd.axis_env import current_axes, current_tracker
from fshard.spmd.closure_inputs import replaced_closures
from fshard.spmd.in_specs import Argument, DimSpec, PathSpec
from fshard.spmd.mesh_scope import Scope
from fshard.spmd.tracking.function_mode import track_types
from fshard.spmd.tracking.gradient_sums import outer_gradient_sums
from fshard.spmd.tracking.out_spec_check import (
    ARGUMENTS,
    NonTensor,
    Promise,
    check_promises,
    check_values,
    sums_problem,
)
from fshard.spmd.tracking.tracker import Tracker, read_note
from fshard.spmd.types import INVARIANT, LocalType, States, states_of

NO_OP = nullcontext()


def new_tracker(check: bool | str, scope: Scope, name: str) -> Tracker | None:
    """Return the tracker of one rank's body; None with `check=False`, and within an untracked body.

    States in an untracked body are unknown: a varying closure would count as invariant, and its
    gradient would be summed.
    """
    if check is False or is_inner(scope):
        return None
    return Tracker(scope.named_mesh, name, strict=check == "strict", values=check == "values")


def is_inner(scope: Scope) -> bool:
    """Return True if a call maps further axes in the body of another."""
    return scope.bound_axes != scope.axes


def check_inner(check: bool | str, scope: Scope, outer: Tracker | None, where: str) -> None:
    """Raise `ShardingError` if a check is requested that the enclosing call does not have."""
    # Backward reruns the body without types; forward has checked it.
    if check not in ("strict", "values") or graph_task_id() != -1:
        return
    if is_inner(scope) and not getattr(outer, check, False):
        fail(
            where,
            f"check={check!r} in the body of a call without it",
            "the check of the outermost shard_map must include it",
            f"check={check!r} there, or omit it here",
        )


def pause_types(tracker: Tracker | None) -> AbstractContextManager[None]:
    """Track nothing in the block, which is not code of the body."""
    return NO_OP if tracker is None else tracker.pause()


@contextmanager
def track_body(tracker: Tracker, *, inner: bool) -> Iterator[None]:
    """Track the types in the block, which is the body of the innermost call."""
    bound = current_axes()
    assert bound is not None
    before, bound.tracker = bound.tracker, tracker
    try:
        if inner:  # the enclosing body is being tracked
            yield
        else:
            sites = tracker.read_sites  # without the tracker, which holds tensors
            explain_with(lambda: read_note(sites))
            try:
                with track_types(tracker):
                    yield
            finally:
                tracker.roll_calls.end()
                # A cast and its source refer to each other through the graph: break the cycle.
                for record in list(tracker.table.values()):
                    record.casts = None
    finally:
        # Backward under the same axis names needs no types.
        bound.tracker = before


def set_argument_types(
    tracker: Tracker,
    scope: Scope,
    arguments: Sequence[Argument],
    values: Sequence[Any],
    locals_: Sequence[torch.Tensor],
) -> None:
    """Record the types of arguments: along the mapped axes the states of their specs.

    Along axes that an enclosing call maps, they have the states of the values there.
    """
    local_iter = iter(locals_)
    promises = []
    for argument, value in zip(arguments, values, strict=True):
        if argument.spec is None:
            continue
        x = next(local_iter)
        tensor = value.local if isinstance(value, Sharded) else value
        outer = tracker.states(innermost(tensor)) if isinstance(tensor, torch.Tensor) else INVARIANT
        states = {axis: state for axis, state in outer.items if axis not in scope.axes}
        tracker.enter(x, States.of(states | dict(states_of(argument.spec.partition).items)))
        promises.append(Promise(argument.path, x, argument.spec.partition))
    if tracker.values:
        with tracker.pause():
            check_values(tracker.mesh, _mapped(scope), promises, tracker.name, subject=ARGUMENTS)


def check_result_types(
    tracker: Tracker,
    scope: Scope,
    slots: Sequence[PathSpec],
    ys: Sequence[torch.Tensor],
    others: Sequence[NonTensor],
) -> tuple[torch.Tensor, ...]:
    """Return the results, cast to the states that their out specs require."""
    promises = []
    for (path, out_spec), y in zip(slots, ys, strict=True):
        partition = _partition(out_spec, y.ndim)
        if partition is None:
            return tuple(ys)  # the reader of results refuses it
        promises.append(Promise(path, y, partition))
    last = not is_inner(scope)
    results = tuple(check_promises(tracker, _mapped(scope), promises, others, last=last))
    # A simulation compares the gradients themselves.
    may_differ = tracker.all_have_read and torch.is_grad_enabled()
    if may_differ and last:
        return _guarded(tracker, results)
    return results


def _guarded(tracker: Tracker, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return results whose backward pass raises where ranks have other collectives in it."""
    problem = sums_problem(tracker, outer_gradient_sums(tracker, results))
    if problem is None:
        return results
    if is_transformed():  # a hook would see gradients of the innermost level alone
        tracker.raise_all([problem])

    def refuse(_: torch.Tensor) -> None:
        tracker.raise_all([problem])

    with tracker.pause():
        results = tuple(y.view_as(y) if y.requires_grad else y for y in results)
    for y in results:
        if y.requires_grad:
            y.register_hook(refuse)
    return results


def _partition(out_spec: Any, ndim: int) -> PartitionSpec | None:
    """Return the partition of an out spec for a tensor with `ndim` dims, or None if invalid."""
    if isinstance(out_spec, DimSpec):
        return out_spec.of(ndim) if -ndim <= out_spec.dim < ndim else None
    return out_spec.partition if isinstance(out_spec, Spec) else out_spec


def set_result_types(
    tracker: Tracker, scope: Scope, ys: Sequence[torch.Tensor], results: Sequence[Any]
) -> None:
    """Record, for the enclosing body, the types of a call's results."""
    for y, result in zip(ys, results, strict=True):
        if isinstance(result, torch.Tensor):
            tracker.record(result, tracker.states(y).updated(scope.axes, None))


def typeof(x: torch.Tensor, /) -> LocalType:
    """Return the type of a tensor in a running `shard_map`: shape, dtype, and states.

    Args:
        x: A tensor of the body.

    Returns:
        A `LocalType`; `str` gives, for instance, `f32[2,16]{varying: dp}`. For even shards it is
        equal on every rank, and may be returned with the out spec None.

    Raises:
        ShardingError: If no types are tracked (outside of a `shard_map`, or with `check=False`),
            or `x` is not a tensor.

    As `jax.typeof` under `check_vma=True`.

    >>> import torch
    >>> import fshard as fs
    >>> @fs.shard_map(mesh=fs.Mesh(i=2), in_specs=fs.P("i"), out_specs=None)
    ... def types(x):
    ...     return fs.typeof(x), fs.typeof(fs.psum(x, "i"))
    >>> types(torch.ones(4))
    (f32[2]{varying: i}, f32[2])
    """
    tracker = current_tracker()
    if tracker is None:
        fail(
            "fs.typeof",
            "a call where no types are tracked",
            "fs.typeof must be called in the body of a shard_map with check=True",
            "fs.shard_map(..., check=True)",
        )
    x = replaced_closures(x)
    if not isinstance(x, torch.Tensor):
        fail("fs.typeof", f"a {type(x).__name__}", "x must be a tensor",
             "torch.as_tensor(x)")  # fmt: skip
    local_type: LocalType = tracker.typeof(x)
    return local_type


@run_typed_hook.set
def run_typed(
    where: str, x: torch.Tensor, src: Spec, dst: Spec, run: Callable[[torch.Tensor], Any]
) -> Any:
    """Run `run(x)` in a body: `x` has the layout `src`, and the result has `dst`.

    Raises `ShardingError` if the type of `x` contradicts `src`.
    """
    tracker: Tracker | None = current_tracker()
    x = replaced_closures(x)
    if tracker is None:
        return run(x)
    x, states = _checked(tracker, where, x, src, dst)

    def record(result: Any) -> Any:
        tracker.record(result.local if isinstance(result, Sharded) else result, states)
        return result

    with tracker.pause():
        result = run(x)
    if isinstance(result, Pending):
        return Pending(lambda: record(result.wait()))
    return record(result)


@run_typed_leaves_hook.set
def run_typed_leaves(
    names: Sequence[str],
    xs: tuple[torch.Tensor, ...],
    ends: Sequence[tuple[Spec, Spec]],
    start: Callable[[tuple[torch.Tensor, ...]], Callable[[], tuple[torch.Tensor, ...]]],
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Run `start(xs)` in a body; each tensor has its own layouts `(src, dst)`. See `run_typed`."""
    tracker: Tracker | None = current_tracker()
    xs = replaced_closures(xs)
    if tracker is None:
        return start(xs)
    checked = [
        _checked(tracker, f"the batch at {name}" if name else "the batch", x, *specs)
        for name, x, specs in zip(names, xs, ends, strict=True)
    ]
    with tracker.pause():
        finish = start(tuple(x for x, _ in checked))

    def record() -> tuple[torch.Tensor, ...]:
        with tracker.pause():
            ys = finish()
        for y, (_, states) in zip(ys, checked, strict=True):
            tracker.record(y, states)
        return ys

    return record


def _checked(
    tracker: Tracker, where: str, x: torch.Tensor, src: Spec, dst: Spec
) -> tuple[torch.Tensor, States]:
    """Return `x` cast to the states of `src`, and the states that `dst` gives the result."""
    outer = tracker.states(x)
    (x,) = check_promises(
        tracker, src.mesh.axes, [Promise(where, x, src.partition, is_result=False)]
    )
    states = {axis: state for axis, state in outer.items if axis not in src.mesh.axes}
    return x, States.of(states | dict(states_of(dst.partition).items))


def _mapped(scope: Scope) -> list[str]:
    return [axis for axis in scope.mesh.axes if axis in scope.axes]
