"""A mapped function whose types are tracked: what goes in, what comes out, one in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from fshard._torch.autograd_state import graph_task_id
from fshard._util.errors import fail
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.run.execute import Pending, run_typed_hook
from fshard.run.execute_batch import run_typed_leaves_hook
from fshard.run.transports.divergence_report import explain_with
from fshard.spmd.axis_env import current_axes, current_tracker
from fshard.spmd.in_specs import Argument, DimSpec, PathSpec
from fshard.spmd.mesh_scope import Scope
from fshard.spmd.tracking.function_mode import track_types
from fshard.spmd.tracking.out_spec_check import (
    ARGUMENTS,
    NonTensor,
    Promise,
    check_promises,
    check_values,
)
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import INVARIANT, States, states_of

__all__ = [
    "check_inner", "check_result_types", "new_tracker", "pause_types", "set_argument_types",
    "set_result_types", "track_body",
]  # fmt: skip

NOTHING = nullcontext()


def new_tracker(check: bool | str, scope: Scope, name: str) -> Tracker | None:
    """The tracker of one rank's body; None with `check=False`, and in a body that has none.

    What varies there is not known. Taken for invariant, its gradient would be summed.
    """
    if check is False or is_inner(scope):
        return None
    return Tracker(scope.named_mesh, name, strict=check == "strict", values=check == "values")


def is_inner(scope: Scope) -> bool:
    """Whether a call maps further axes in the body of another."""
    return scope.bound_axes != scope.axes


def check_inner(check: bool | str, scope: Scope, outer: Tracker | None, where: str) -> None:
    """Raise `ShardingError` for a check that the enclosing call, whose check holds, does not do."""
    # In backward a body is run again without types: it has been checked.
    if check not in ("strict", "values") or graph_task_id() != -1:
        return
    if is_inner(scope) and not getattr(outer, check, False):
        fail(
            where,
            f"check={check!r} in the body of a call without it",
            "the check of the outermost shard_map holds in all of its body",
            f"check={check!r} there, or leave it out here",
        )


def pause_types(tracker: Tracker | None) -> AbstractContextManager[None]:
    """Track nothing in the block, which is no code of the body."""
    return NOTHING if tracker is None else tracker.pause()


@contextmanager
def track_body(tracker: Tracker, *, inner: bool) -> Iterator[None]:
    """Track the types of what the block, the body of the innermost call, computes."""
    bound = current_axes()
    assert bound is not None
    before, bound.tracker = bound.tracker, tracker
    try:
        if inner:  # the enclosing body is tracked already
            yield
        else:
            explain_with(lambda: tracker.read_note)
            try:
                with track_types(tracker):
                    yield
            finally:
                # A cast holds its graph, and that what it is a cast of: neither would be let go.
                for known in list(tracker.table.values()):
                    known.casts = None
    finally:
        # What is differentiated under the same names, once the body has run, is typed already.
        bound.tracker = before


def set_argument_types(
    tracker: Tracker,
    scope: Scope,
    arguments: Sequence[Argument],
    values: Sequence[Any],
    locals_: Sequence[torch.Tensor],
) -> None:
    """Write down the types of arguments: what their specs say of the axes that are mapped.

    Along axes mapped by an enclosing call they are what their values are there.
    """
    mine = iter(locals_)
    promises = []
    for each, value in zip(arguments, values, strict=True):
        if each.spec is None:
            continue
        x = next(mine)
        held = value[0] if is_pair(value) else value
        outer = tracker.states(held) if isinstance(held, torch.Tensor) else INVARIANT
        states = {axis: state for axis, state in outer.items if axis not in scope.axes}
        tracker.enter(x, States.of(states | dict(states_of(each.spec.partition).items)))
        promises.append(Promise(each.path, x, each.spec.partition))
    if tracker.values:
        with tracker.pause():
            check_values(tracker.mesh, _mapped(scope), promises, tracker.name, what=ARGUMENTS)


def check_result_types(
    tracker: Tracker,
    scope: Scope,
    slots: Sequence[PathSpec],
    ys: Sequence[torch.Tensor],
    others: Sequence[NonTensor],
) -> tuple[torch.Tensor, ...]:
    """Results as their out specs promise them, along the axes that are mapped."""
    promises = []
    for (path, given), y in zip(slots, ys, strict=True):
        p = _partition(given, y.ndim)
        if p is None:
            return tuple(ys)  # refused when results are read
        promises.append(Promise(path, y, p))
    return tuple(check_promises(tracker, _mapped(scope), promises, others))


def _partition(given: Any, ndim: int) -> PartitionSpec | None:
    """What an out spec says of a tensor, if it can say anything."""
    if isinstance(given, DimSpec):
        return given.of(ndim) if -ndim <= given.dim < ndim else None
    return given.partition if isinstance(given, Spec) else given


def set_result_types(
    tracker: Tracker, scope: Scope, ys: Sequence[torch.Tensor], results: Sequence[Any]
) -> None:
    """Write down, for the enclosing body, the types of a call's results."""
    for y, result in zip(ys, results, strict=True):
        if isinstance(result, torch.Tensor):
            tracker.record(result, tracker.states(y).updated(scope.axes, None))


@run_typed_hook.set
def run_typed(
    where: str,
    x: torch.Tensor,
    src: Spec,
    dst: Spec,
    run: Callable[[torch.Tensor], Any],
) -> Any:
    """`run(x)` in a body: a local that lies as `src`, and becomes one that lies as `dst`.

    Raises `ShardingError` where the type of `x` does not show the first.
    """
    tracker: Tracker | None = current_tracker()
    if tracker is None:
        return run(x)
    x, given = _checked(tracker, where, x, src, dst)

    def record(made: Any) -> Any:
        tracker.record(made.local if is_pair(made) else made, given)
        return made

    with tracker.pause():
        made = run(x)
    if isinstance(made, Pending):
        return Pending(lambda: record(made.wait()))
    return record(made)


@run_typed_leaves_hook.set
def run_typed_leaves(
    names: Sequence[str],
    xs: tuple[torch.Tensor, ...],
    ends: Sequence[tuple[Spec, Spec]],
    start: Callable[[tuple[torch.Tensor, ...]], Callable[[], tuple[torch.Tensor, ...]]],
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """`start(xs)` of several locals in a body, each with the specs of its ends; see `run_typed`."""
    tracker: Tracker | None = current_tracker()
    if tracker is None:
        return start(xs)
    checked = [
        _checked(tracker, f"the batch at {name}" if name else "the batch", x, *each)
        for name, x, each in zip(names, xs, ends, strict=True)
    ]
    with tracker.pause():
        finish = start(tuple(x for x, _ in checked))

    def record() -> tuple[torch.Tensor, ...]:
        with tracker.pause():
            ys = finish()
        for y, (_, given) in zip(ys, checked, strict=True):
            tracker.record(y, given)
        return ys

    return record


def _checked(
    tracker: Tracker, where: str, x: torch.Tensor, src: Spec, dst: Spec
) -> tuple[torch.Tensor, States]:
    """A local whose type shows that it lies as `src`, and the type of what lies as `dst`."""
    outer = tracker.states(x)
    (x,) = check_promises(
        tracker, src.mesh.axes, [Promise(where, x, src.partition, is_result=False)]
    )
    states = {axis: state for axis, state in outer.items if axis not in src.mesh.axes}
    return x, States.of(states | dict(states_of(dst.partition).items))


def _mapped(scope: Scope) -> list[str]:
    return [axis for axis in scope.mesh.axes if axis in scope.axes]
