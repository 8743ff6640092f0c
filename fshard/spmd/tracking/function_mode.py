"""Function mode that infers the types of results of every PyTorch call in a mapped function.

It looks up the states of a call's operands, inserts the casts of JAX's type system (or, with
`check="strict"`, reports the line that lacks one), and records the states of the result. PyTorch's
own checker, `spmd_types`, works in the same way without inserting casts.

Some results are not tracked, and are invariant unless they share memory with a known tensor: those
of user threads, `torch._C.DisableTorchFunction`, nested tensors, wrapper subclasses created in the
body, dlpack capsules, kernels that are not functions of PyTorch (except writes into empty results
of an `autograd.Function`), numbers parsed from printed text or raw memory, and in-place writes of a
sparse tensor's indices. Results of hooks and of custom backwards have the dual type of the forward
value, as gradients have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fshard._torch.checkpointing import checkpoint_form
from fshard._torch.dynamo import without_compiler
from fshard._torch.forward_level import linearizing_by_jvp
from fshard._util.dtypes import is_inexact
from fshard._util.tracebacks import runs_users_operation
from fshard.layout.tree import tensors_in
from fshard.spmd.tracking.inner_autograd import (
    patched_entry_points,
    run_autograd_grad,
    run_backward,
)
from fshard.spmd.tracking.insert_casts import join_operands, replace_tensors
from fshard.spmd.tracking.torch_effects import (
    OVERWRITES,
    Action,
    OpEffect,
    draws,
    effect_of,
    reads_values,
    written_arguments,
)
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import INVARIANT, States, TypeRule

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
NO_KWARGS: Kwargs = {}
NUMBERS = (bool, int, float, complex)


class TypeTrackingMode(TorchFunctionMode):
    """Function mode of one rank's body, which reports to its tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    @runs_users_operation
    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or NO_KWARGS
        effect = effect_of(func)
        if effect.action is Action.NONE:
            return func(*args, **kwargs)
        tracker = self.tracker
        if effect.sizes and (len(args) > 1 or kwargs or 0 in effect.sizes):
            _record_size_reads(tracker, effect, args, kwargs)
        if (
            effect.action is not Action.OP
            or tracker.read_states.items
            or (kwargs and _writes(kwargs))
        ):
            return _run_special(tracker, func, effect, args, kwargs)
        # The common case: all operands in one state, nothing to cast.
        states, table = None, tracker.table
        for group in (args, kwargs.values()) if kwargs else (args,):
            for value in group:
                if isinstance(value, torch.Tensor):
                    record = table.get(id(value))
                    operand_states = record.states if record is not None else tracker.states(value)
                    if operand_states is not states:
                        if states is not None:
                            return _run_op(tracker, func, effect, args, kwargs)
                        states = operand_states
                elif isinstance(value, tuple | list):
                    for item in value:
                        if isinstance(item, torch.Tensor):
                            operand_states = tracker.states(item)
                            if operand_states is not states:
                                if states is not None:
                                    return _run_op(tracker, func, effect, args, kwargs)
                                states = operand_states
                        elif isinstance(item, tuple | list):
                            return _run_op(tracker, func, effect, args, kwargs)
        if states is None:
            states = INVARIANT
        elif states.unreduced:
            return _run_op(tracker, func, effect, args, kwargs)
        result = func(*args, **kwargs)
        tracker.record(result, states)
        if isinstance(result, NUMBERS):
            tracker.record_read(states, _call_text(effect))
        return result


def _call_text(effect: OpEffect) -> str:
    return f"{effect.name.strip('_')}()"


def _record_size_reads(tracker: Tracker, effect: OpEffect, args: Args, kwargs: Kwargs) -> None:
    """Record reads of the tensors that are passed as sizes."""
    size_args = [arg for i, arg in enumerate(args) if i in effect.sizes]
    size_args += [arg for key, arg in kwargs.items() if key in effect.sizes]
    for x in tensors_in(size_args):
        tracker.record_read(tracker.states(x), f"a tensor for a size in {_call_text(effect)}")


def _writes(kwargs: Kwargs) -> bool:
    return kwargs.get("out") is not None or bool(kwargs.get("inplace"))


@runs_users_operation
def _run_special(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    """Run a call with other effects than a result computed from its operands."""
    if _writes(kwargs) and effect.action in (Action.OP, Action.READS_VALUE):
        return _run_write(tracker, func, effect, args, kwargs)
    match effect.action:
        case Action.INDEX:
            index = args[1]
            entries = index if type(index) is tuple else (index,)
            if tracker.read_states.items or not all(map(_is_plain, entries)):
                return _run_op(tracker, func, effect, args, kwargs)
            states = tracker.states(args[0])
            result = func(*args)
            tracker.record(result, states)
            return result
        case Action.OP | Action.READS_VALUE:
            return _run_op(tracker, func, effect, args, kwargs)
        case Action.NONE:
            return func(*args, **kwargs)
        case Action.SAME:
            tracker.states(args[0])
            return func(*args, **kwargs)
        case Action.LIKE:
            states, casts = join_operands(tracker, effect, args[:1], NO_KWARGS)
            result = func(*replace_tensors(args, casts), **kwargs)
            tracker.record(result, states)
            return result
        case Action.FRESH | Action.BLANK:
            like = args[1:] if args and isinstance(args[0], torch.Tensor) else args
            states, _ = join_operands(tracker, effect, like, kwargs)
            result = func(*args, **kwargs)
            tracker.record(result, states)
            if effect.action is Action.BLANK:
                tracker.blank.add(id(result))
            return result
        case Action.RANDOM:
            return _run_random(tracker, func, effect, args, kwargs)
        case Action.WRITE:
            return _run_write(tracker, func, effect, args, kwargs)
        case Action.LISTS | Action.WRITE_LISTS:
            return _run_lists(tracker, func, effect, args, kwargs)
        case Action.WRITES_ARGUMENT:
            return _run_state(tracker, func, effect, args, kwargs)
        case Action.GRAD:
            result = func(*args, **kwargs)
            if result is not None and id(result) not in tracker.table:
                tracker.record(result, tracker.states(args[0]).dual)
            return result
        case Action.SET_GRAD:
            if args[1] is not None:
                tracker.states(args[1])
            return func(*args, **kwargs)
        case Action.GRADIENTS:
            return run_autograd_grad(tracker, func, args, kwargs)
        case Action.BACKWARD:
            return run_backward(tracker, func, args, kwargs)


# -- results ------------------------------------------------------------------------------


@runs_users_operation
def _run_op(
    tracker: Tracker,
    func: Any,
    effect: OpEffect,
    args: Args,
    kwargs: Kwargs,
    *,
    also: tuple[States, ...] = (),
) -> Any:
    states, casts = join_operands(tracker, effect, args, kwargs, also=also)
    if casts:
        args, kwargs = replace_tensors(args, casts), replace_tensors(kwargs, casts)
    if effect.action is Action.READS_VALUE and reads_values(effect.name, args, kwargs):
        tracker.record_read(states, _call_text(effect))
    elif effect.action is Action.INDEX and (cause := _sizes(args[1])):
        tracker.record_read(states, cause)
    result = func(*args, **kwargs)
    tracker.record(result, states)
    if isinstance(result, NUMBERS):
        tracker.record_read(states, _call_text(effect))
    return result


def _is_plain(entry: Any) -> bool:
    """Return True if an index entry contains no tensor."""
    if type(entry) is slice:
        parts = (entry.start, entry.stop, entry.step)
        return not any(isinstance(part, torch.Tensor) for part in parts)
    return type(entry) is int or entry is None or entry is ...


def _sizes(index: Any) -> str:
    """Return a description of the part of an index whose values determine a shape, or ""."""
    entries = index if isinstance(index, tuple | list) else [index]
    if any(isinstance(entry, slice) and any(True for _ in tensors_in(entry)) for entry in entries):
        return "a slice to a tensor"
    masks = any(entry.dtype in (torch.bool, torch.uint8) for entry in tensors_in(index))
    return "indexing by a mask" if masks else ""


def _run_random(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    writes = effect.name.endswith("_") or _writes(kwargs)
    act = _run_write if writes else _run_op
    also = (
        (tracker.draw_states(effect.name, kwargs),)
        if draws(func, effect.name, args, kwargs)
        else ()
    )
    return act(tracker, func, effect, args, kwargs, also=also)


# -- writes ------------------------------------------------------------------------------


def _run_write(
    tracker: Tracker,
    func: Any,
    effect: OpEffect,
    args: Args,
    kwargs: Kwargs,
    *,
    also: tuple[States, ...] = (),
) -> Any:
    """Run a call that writes its first operand, or `out`."""
    if not (
        kwargs or also or tracker.read_states.items or effect.name in OVERWRITES
    ) and _states_agree(tracker, args):
        tracker.check_write(args[0], effect.name)
        tracker.blank.discard(id(args[0]))
        return func(*args)
    out = kwargs.get("out")
    targets = (
        list(tensors_in(out))
        if out is not None
        else list(tensors_in([*args, *kwargs.values()]))[:1]
    )
    for target in targets:
        tracker.check_write(target, effect.name)
    replaces_all = all(map(tracker.overwrites_all, targets))
    overwrites = out is not None or (effect.name in OVERWRITES and replaces_all)
    if not (overwrites and replaces_all):
        also += tuple(states for target in targets for states in tracker.states_beside(target))
        also += tuple(map(tracker.states, targets)) if overwrites else ()
    read_args = args[1:] if overwrites and out is None else args
    read_kwargs = {
        key: value
        for key, value in kwargs.items()
        if key != "out" and not (overwrites and value is targets[0])
    }
    if not all(map(is_inexact, targets)) and any(map(is_inexact, tensors_in(read_args))):
        effect = replace(effect, rule=TypeRule.OTHER)  # rounding partial sums is not linear
    states, casts = join_operands(tracker, effect, read_args, read_kwargs, also=also)
    for target in targets:
        if id(target) in casts:
            _refuse_cast_of_target(tracker, effect, target, states)
    if casts:
        args = (*args[:1], *replace_tensors(args[1:], casts))
        kwargs = replace_tensors(kwargs, casts)
    if effect.action is Action.READS_VALUE and reads_values(effect.name, args, kwargs):
        tracker.record_read(states, _call_text(effect))
    result = func(*args, **kwargs)
    if effect.name == "data =":
        tracker.forget(targets[0])
    for target in targets:
        tracker.record_write(target, states)
    tracker.record(result, states)
    return result


def _states_agree(tracker: Tracker, args: Args) -> bool:
    """Return True if all operands of a write, and aliases of the target, have the same states."""
    if not isinstance(args[0], torch.Tensor) or args[0].layout is not torch.strided:
        return False
    states = tracker.states(args[0])
    if states.unreduced:
        return False
    for arg in args[1:]:
        if isinstance(arg, torch.Tensor):
            if tracker.states(arg) is not states:
                return False
        elif isinstance(arg, tuple | list | slice) and any(
            tracker.states(x) is not states for x in tensors_in(arg)
        ):
            return False
    return all(other is states for other in tracker.states_beside(args[0]))


def _refuse_cast_of_target(
    tracker: Tracker, effect: OpEffect, target: torch.Tensor, states: States
) -> None:
    target_type = tracker.typeof(target)
    tracker.fail(
        effect.name,
        f"a write of {states} into {target_type}, which requires grad",
        "a write must keep its target's states: the gradient would be summed from here on only",
        f"compute a new tensor: {effect.name.rstrip('_')}(x, ...) instead of {effect.name}",
    )


def _run_lists(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on the elements of lists: the first of all, the second of all, and so on."""
    values = (*args, *kwargs.values())
    lists = [arg for arg in values if isinstance(arg, list | tuple) and list(tensors_in(arg))]
    tensors = [arg for arg in values if isinstance(arg, torch.Tensor)]
    height = max((len(arg) for arg in lists), default=0)
    rows = [[arg[i] for arg in lists if len(arg) == height] for i in range(height)]
    joined = _join_rows(tracker, effect, rows, tensors, ())
    if any(id(arg) in casts for arg in tensors for _, casts in joined):  # all rows use its cast
        also = tuple(map(tracker.states, tensors_in(lists)))
        joined = _join_rows(tracker, effect, rows, tensors, also)
    if effect.action is Action.LISTS:
        outs = func(*(_with_casts(arg, joined) for arg in args),
                    **{key: _with_casts(arg, joined) for key, arg in kwargs.items()})  # fmt: skip
        for out, (states, _) in zip(outs, joined, strict=True):
            tracker.record(out, states)
        return outs
    # Fused optimizers write all of their lists, other functions the first.
    written_lists = lists if effect.name.startswith("_fused_") else lists[:1]
    # The amp kernel also writes a flag: whether any element is not finite.
    flags = tensors[:1] if effect.name.startswith("_amp_foreach_") else []
    for flag in flags:
        tracker.check_write(flag, effect.name)
    for arg in written_lists:
        for target, (states, casts) in zip(arg, joined, strict=False):
            tracker.check_write(target, effect.name)
            if id(target) in casts:
                _refuse_cast_of_target(tracker, effect, target, states)
    args = (*args[:1], *(_with_casts(arg, joined) for arg in args[1:]))
    result = func(*args, **{key: _with_casts(arg, joined) for key, arg in kwargs.items()})
    for arg in written_lists:
        for target, (states, _) in zip(arg, joined, strict=False):
            tracker.record_write(target, states)
    for flag in flags:
        states, _ = join_operands(tracker, effect, written_lists, NO_KWARGS)
        tracker.record_write(flag, states)
    return result


JoinedRows = list[tuple[States, dict[int, torch.Tensor]]]
"""States of the result, and casts of the operands by id, of each row of lists."""


def _join_rows(
    tracker: Tracker,
    effect: OpEffect,
    rows: list[list[Any]],
    tensors: list[torch.Tensor],
    also: tuple[States, ...],
) -> JoinedRows:
    writes = effect.action is Action.WRITE_LISTS
    return [
        join_operands(
            tracker,
            effect,
            [*row, *tensors],
            NO_KWARGS,
            also=(*also, *tracker.states_beside(row[0])) if writes else also,
        )
        for row in rows
    ]


def _with_casts(value: Any, joined: JoinedRows) -> Any:
    """Return a list with the casts of each row, or another argument with all casts."""
    if isinstance(value, list | tuple) and len(value) == len(joined):
        return [replace_tensors(x, casts) for x, (_, casts) in zip(value, joined, strict=True)]
    return replace_tensors(value, {key: x for _, casts in joined for key, x in casts.items()})


def _run_state(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    """Run a call that also writes an argument, such as the statistics of a batch norm."""
    written = list(tensors_in(written_arguments(func, effect.name, args, kwargs)))
    for target in written:
        tracker.check_write(target, effect.name)
    alias_states = tuple(states for target in written for states in tracker.states_beside(target))
    states, casts = join_operands(tracker, effect, args, kwargs, also=alias_states)
    result = func(*replace_tensors(args, casts), **replace_tensors(kwargs, casts))
    for target in written:
        tracker.record_write(target, states)
    tracker.record(result, states)
    return result


@contextmanager
def track_types(tracker: Tracker) -> Iterator[None]:
    """Track the types of all results in the block, where compiled functions run uncompiled."""
    mode = TypeTrackingMode(tracker)
    patched = patched_entry_points(tracker)
    with without_compiler(), checkpoint_form(), linearizing_by_jvp(), patched, mode:
        yield
