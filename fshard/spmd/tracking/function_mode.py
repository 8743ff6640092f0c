"""The types of results: every PyTorch call of a mapped function, seen on its way.

The operands of a call are looked up, the casts that JAX's type system inserts are inserted (or,
if strict, the line where one is missing is named), and the result is written down. `spmd_types`
(PyTorch's own checker) works in the same way, without inserting.

Outside of what is tracked, and taken for invariant unless it shares memory with what is known:
what user threads, `torch._C.DisableTorchFunction`, nested tensors, wrapper subclasses made in the
body, dlpack capsules and kernels that are no functions of PyTorch compute (but not what these
write into the empty results of an `autograd.Function`), numbers read off printed text or raw
memory, and indices of a sparse tensor that are written in place. What hooks and the backward of
custom functions compute is taken to be what a gradient is: of the dual type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
    writes_state,
)
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import INVARIANT, States, TypeRule

__all__ = ["track_types"]

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
NO_KWARGS: Kwargs = {}
NUMBERS = (bool, int, float, complex)


class TypeTrackingMode(TorchFunctionMode):
    """Sees the calls of one rank's body, on behalf of its tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or NO_KWARGS
        effect = effect_of(func)
        if effect.action is Action.NONE:
            return func(*args, **kwargs)
        tracker = self.tracker
        if effect.sizes and (len(args) > 1 or kwargs or 0 in effect.sizes):
            _tell_sizes(tracker, effect, args, kwargs)
        if (
            effect.action is not Action.OP
            or tracker.read_states.items
            or (kwargs and _writes(kwargs))
        ):
            return _special(tracker, func, effect, args, kwargs)
        # The common case: all operands in one state, nothing to cast.
        states, table = None, tracker.table
        for group in (args, kwargs.values()) if kwargs else (args,):
            for value in group:
                if isinstance(value, torch.Tensor):
                    known = table.get(id(value))
                    found = known.states if known is not None else tracker.states(value)
                    if found is not states:
                        if states is not None:
                            return _computed(tracker, func, effect, args, kwargs)
                        states = found
                elif isinstance(value, tuple | list):
                    for each in value:
                        if isinstance(each, torch.Tensor):
                            found = tracker.states(each)
                            if found is not states:
                                if states is not None:
                                    return _computed(tracker, func, effect, args, kwargs)
                                states = found
                        elif isinstance(each, tuple | list):
                            return _computed(tracker, func, effect, args, kwargs)
        if states is None:
            states = INVARIANT
        elif states.unreduced:
            return _computed(tracker, func, effect, args, kwargs)
        result = func(*args, **kwargs)
        tracker.record(result, states)
        if isinstance(result, NUMBERS):
            tracker.record_read(states, _called(effect))
        return result


def _called(effect: OpEffect) -> str:
    return f"{effect.name.strip('_')}()"


def _tell_sizes(tracker: Tracker, effect: OpEffect, args: Args, kwargs: Kwargs) -> None:
    """Tell of the tensors that are given for sizes, which the host reads."""
    given = [each for at, each in enumerate(args) if at in effect.sizes]
    given += [each for key, each in kwargs.items() if key in effect.sizes]
    for x in tensors_in(given):
        tracker.record_read(tracker.states(x), f"a tensor for a size in {_called(effect)}")


def _writes(kwargs: Kwargs) -> bool:
    return kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def _special(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    """A call that does more than to compute from its operands."""
    if _writes(kwargs) and effect.action in (Action.OP, Action.READS_VALUE):
        return _write(tracker, func, effect, args, kwargs)
    match effect.action:
        case Action.INDEX:
            index = args[1]
            entries = index if type(index) is tuple else (index,)
            if tracker.read_states.items or not all(map(_is_plain, entries)):
                return _computed(tracker, func, effect, args, kwargs)
            states = tracker.states(args[0])
            result = func(*args)
            tracker.record(result, states)
            return result
        case Action.OP | Action.READS_VALUE:
            return _computed(tracker, func, effect, args, kwargs)
        case Action.NONE:
            return func(*args, **kwargs)
        case Action.SAME:
            tracker.states(args[0])
            return func(*args, **kwargs)
        case Action.LIKE:
            states, new = join_operands(tracker, effect, args[:1], NO_KWARGS)
            result = func(*replace_tensors(args, new), **kwargs)
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
            return _drawn(tracker, func, effect, args, kwargs)
        case Action.WRITE:
            return _write(tracker, func, effect, args, kwargs)
        case Action.LISTS | Action.WRITE_LISTS:
            return _lists(tracker, func, effect, args, kwargs)
        case Action.STATE:
            return _state(tracker, func, effect, args, kwargs)
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


def _computed(
    tracker: Tracker,
    func: Any,
    effect: OpEffect,
    args: Args,
    kwargs: Kwargs,
    *,
    also: tuple[States, ...] = (),
) -> Any:
    states, new = join_operands(tracker, effect, args, kwargs, also=also)
    if new:
        args, kwargs = replace_tensors(args, new), replace_tensors(kwargs, new)
    if effect.action is Action.READS_VALUE and reads_values(effect.name, args, kwargs):
        tracker.record_read(states, _called(effect))
    elif effect.action is Action.INDEX and (found := _sizes(args[1])):
        tracker.record_read(states, found)
    result = func(*args, **kwargs)
    tracker.record(result, states)
    if isinstance(result, NUMBERS):
        tracker.record_read(states, _called(effect))
    return result


def _is_plain(entry: Any) -> bool:
    """Whether an entry of an index is written in numbers."""
    if type(entry) is slice:
        parts = (entry.start, entry.stop, entry.step)
        return not any(isinstance(each, torch.Tensor) for each in parts)
    return type(entry) is int or entry is None or entry is ...


def _sizes(index: Any) -> str:
    """What in an index decides by its values how many elements there are, if anything."""
    entries = index if isinstance(index, tuple | list) else [index]
    if any(isinstance(each, slice) and any(True for _ in tensors_in(each)) for each in entries):
        return "a slice to a tensor"
    masks = any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(index))
    return "indexing by a mask" if masks else ""


def _drawn(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    writes = effect.name.endswith("_") or _writes(kwargs)
    act = _write if writes else _computed
    also = (
        (tracker.draw_states(effect.name, kwargs),)
        if draws(func, effect.name, args, kwargs)
        else ()
    )
    return act(tracker, func, effect, args, kwargs, also=also)


# -- writes ------------------------------------------------------------------------------


def _write(
    tracker: Tracker,
    func: Any,
    effect: OpEffect,
    args: Args,
    kwargs: Kwargs,
    *,
    also: tuple[States, ...] = (),
) -> Any:
    """A call that writes its first operand, or what `out=` names."""
    if not (kwargs or also or tracker.read_states.items or effect.name in OVERWRITES) and _is_level(
        tracker, args
    ):
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
    whole = all(tracker.overwrites_all(target) for target in targets)
    over = out is not None or (effect.name in OVERWRITES and whole)
    if not (over and whole):
        also += tuple(each for target in targets for each in tracker.states_beside(target))
        also += tuple(map(tracker.states, targets)) if over else ()
    read_args = args[1:] if over and out is None else args
    read_kwargs = {
        key: value
        for key, value in kwargs.items()
        if key != "out" and not (over and value is targets[0])
    }
    if not all(map(_has_fractions, targets)) and any(map(_has_fractions, tensors_in(read_args))):
        effect = replace(effect, rule=TypeRule.OTHER)  # each part of a sum is cut to a whole number
    states, new = join_operands(tracker, effect, read_args, read_kwargs, also=also)
    for target in targets:
        if id(target) in new:
            _no_cast_of_target(tracker, effect, target, states)
    if new:
        args, kwargs = (*args[:1], *replace_tensors(args[1:], new)), replace_tensors(kwargs, new)
    if effect.action is Action.READS_VALUE and reads_values(effect.name, args, kwargs):
        tracker.record_read(states, _called(effect))
    result = func(*args, **kwargs)
    if effect.name == "data =":
        tracker.forget(targets[0])
    for target in targets:
        tracker.record_write(target, states)
    tracker.record(result, states)
    return result


def _is_level(tracker: Tracker, args: Args) -> bool:
    """Whether all operands of a write, and what shares memory with the first, are in one state."""
    if not isinstance(args[0], torch.Tensor) or args[0].layout is not torch.strided:
        return False
    states = tracker.states(args[0])
    if states.unreduced:
        return False
    for each in args[1:]:
        if isinstance(each, torch.Tensor):
            if tracker.states(each) is not states:
                return False
        elif isinstance(each, tuple | list | slice) and any(
            tracker.states(x) is not states for x in tensors_in(each)
        ):
            return False
    return all(each is states for each in tracker.states_beside(args[0]))


def _has_fractions(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _no_cast_of_target(
    tracker: Tracker, effect: OpEffect, target: torch.Tensor, states: States
) -> None:
    was = tracker.typeof(target)
    tracker.fail(
        effect.name,
        f"a write of {states} into {was}, which requires grad",
        "its gradient is to be summed from here on, but not for what it was before",
        f"compute a new tensor: {effect.name.rstrip('_')}(x, ...) in place of {effect.name}",
    )


def _lists(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    """An operation on the elements of lists: the first of all, the second of all, and so on."""
    given = (*args, *kwargs.values())
    lists = [each for each in given if isinstance(each, list | tuple) and list(tensors_in(each))]
    rest = [each for each in given if isinstance(each, torch.Tensor)]
    height = max((len(each) for each in lists), default=0)
    rows = [[each[at] for each in lists if len(each) == height] for at in range(height)]
    agreed = _rows(tracker, effect, rows, rest, ())
    if any(id(each) in new for each in rest for _, new in agreed):  # then all rows use a cast of it
        agreed = _rows(tracker, effect, rows, rest, tuple(map(tracker.states, tensors_in(lists))))
    if effect.action is Action.LISTS:
        outs = func(*(_with_casts(each, agreed) for each in args),
                    **{key: _with_casts(each, agreed) for key, each in kwargs.items()})  # fmt: skip
        for out, (states, _) in zip(outs, agreed, strict=True):
            tracker.record(out, states)
        return outs
    # Fused optimizers write all of their lists, other functions the first.
    written = lists if effect.name.startswith("_fused_") else lists[:1]
    # The amp kernel also writes whether any of all elements was not finite.
    found = rest[:1] if effect.name.startswith("_amp_foreach_") else []
    for flag in found:
        tracker.check_write(flag, effect.name)
    for each in written:
        for target, (states, new) in zip(each, agreed, strict=False):
            tracker.check_write(target, effect.name)
            if id(target) in new:
                _no_cast_of_target(tracker, effect, target, states)
    args = (*args[:1], *(_with_casts(each, agreed) for each in args[1:]))
    result = func(*args, **{key: _with_casts(each, agreed) for key, each in kwargs.items()})
    for each in written:
        for target, (states, _) in zip(each, agreed, strict=False):
            tracker.record_write(target, states)
    for flag in found:
        states, _ = join_operands(tracker, effect, written, NO_KWARGS)
        tracker.record_write(flag, states)
    return result


Agreed = list[tuple[States, dict[int, torch.Tensor]]]
"""Per row of lists: the states of what comes out of it, and the casts of its operands."""


def _rows(
    tracker: Tracker,
    effect: OpEffect,
    rows: list[list[Any]],
    rest: list[torch.Tensor],
    also: tuple[States, ...],
) -> Agreed:
    writes = effect.action is Action.WRITE_LISTS
    return [
        join_operands(
            tracker,
            effect,
            [*row, *rest],
            NO_KWARGS,
            also=(*also, *tracker.states_beside(row[0])) if writes else also,
        )
        for row in rows
    ]


def _with_casts(value: Any, agreed: Agreed) -> Any:
    """A list with each row's own casts; what is no list with any, as they are the same."""
    if isinstance(value, list | tuple) and len(value) == len(agreed):
        return [replace_tensors(each, new) for each, (_, new) in zip(value, agreed, strict=True)]
    return replace_tensors(value, {key: cast for _, new in agreed for key, cast in new.items()})


def _state(tracker: Tracker, func: Any, effect: OpEffect, args: Args, kwargs: Kwargs) -> Any:
    """A call that also writes an argument: batch norm in training its statistics, say."""
    written = list(tensors_in(writes_state(func, effect.name, args, kwargs)))
    for target in written:
        tracker.check_write(target, effect.name)
    beside = tuple(each for target in written for each in tracker.states_beside(target))
    states, new = join_operands(tracker, effect, args, kwargs, also=beside)
    result = func(*replace_tensors(args, new), **replace_tensors(kwargs, new))
    for target in written:
        tracker.record_write(target, states)
    tracker.record(result, states)
    return result


@contextmanager
def track_types(tracker: Tracker) -> Iterator[None]:
    """Track the types of what the block computes."""
    with patched_entry_points(tracker), TypeTrackingMode(tracker):
        yield
