"""The types of results: every PyTorch call of a mapped function, seen on its way.

The operands of a call are looked up, the casts that JAX's type system inserts are inserted (or,
if strict, the line where one is missing is named), and the result is written down. `spmd_types`
(PyTorch's own checker) works in the same way, without inserting.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fshard.spmd.engine import backward, gradients, telling
from fshard.spmd.kinds import Kind, Word, draws, kind_of
from fshard.spmd.operands import agree, replaced, tensors_in
from fshard.spmd.tracking import Tracker
from fshard.spmd.types import INVARIANT, States

__all__ = ["tracked"]

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
NO_KWARGS: Kwargs = {}


class _Typed(TorchFunctionMode):
    """Sees the calls of one rank's body, on behalf of its tracker."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or NO_KWARGS
        kind = kind_of(func)
        if kind.word is Word.NOTHING:
            return func(*args, **kwargs)
        tracker = self.tracker
        if kind.word is not Word.OP or tracker.told.items or (kwargs and _writes(kwargs)):
            return _special(tracker, func, kind, args, kwargs)
        # The common case: all operands in one state, nothing to cast.
        states, table = None, tracker.table
        for group in (args, kwargs.values()) if kwargs else (args,):
            for value in group:
                if isinstance(value, torch.Tensor):
                    known = table.get(id(value))
                    found = known.states if known is not None else tracker.states(value)
                    if found is not states:
                        if states is not None:
                            return _computed(tracker, func, kind, args, kwargs)
                        states = found
                elif isinstance(value, tuple | list):
                    for each in value:
                        if isinstance(each, torch.Tensor):
                            found = tracker.states(each)
                            if found is not states:
                                if states is not None:
                                    return _computed(tracker, func, kind, args, kwargs)
                                states = found
                        elif isinstance(each, tuple | list):
                            return _computed(tracker, func, kind, args, kwargs)
        if states is None:
            states = INVARIANT
        elif states.unreduced:
            return _computed(tracker, func, kind, args, kwargs)
        result = func(*args, **kwargs)
        tracker.record(result, states)
        return result


def _writes(kwargs: Kwargs) -> bool:
    return kwargs.get("out") is not None or bool(kwargs.get("inplace"))


def _special(tracker: Tracker, func: Any, kind: Kind, args: Args, kwargs: Kwargs) -> Any:
    """A call that does more than to compute from its operands."""
    if _writes(kwargs) and kind.word in (Word.OP, Word.TELLS):
        return _write(tracker, func, kind, args, kwargs)
    match kind.word:
        case Word.OP | Word.TELLS:
            return _computed(tracker, func, kind, args, kwargs)
        case Word.NOTHING:
            return func(*args, **kwargs)
        case Word.FRESH:
            result = func(*args, **kwargs)
            tracker.record(result, tracker.told)
            return result
        case Word.RANDOM:
            return _drawn(tracker, func, kind, args, kwargs)
        case Word.WRITE:
            return _write(tracker, func, kind, args, kwargs)
        case Word.LISTS | Word.WRITE_LISTS:
            return _lists(tracker, func, kind, args, kwargs)
        case Word.STATISTICS:
            return _statistics(tracker, func, kind, args, kwargs)
        case Word.GRAD:
            result = func(*args, **kwargs)
            tracker.record(result, tracker.states(args[0]).dual)
            return result
        case Word.GRADIENTS:
            return gradients(tracker, func, args, kwargs)
        case Word.BACKWARD:
            return backward(tracker, func, args, kwargs)


# -- results ------------------------------------------------------------------------------


def _computed(
    tracker: Tracker,
    func: Any,
    kind: Kind,
    args: Args,
    kwargs: Kwargs,
    *,
    also: tuple[States, ...] = (),
) -> Any:
    states, new = agree(tracker, kind, args, kwargs, also=also)
    if new:
        args, kwargs = replaced(args, new), replaced(kwargs, new)
    if kind.word is Word.TELLS:
        tracker.tell(states, kind.name)
    elif kind.name == "__getitem__" and _masks(args[1]):
        tracker.tell(states, "indexing by a mask")
    result = func(*args, **kwargs)
    tracker.record(result, states)
    return result


def _masks(index: Any) -> bool:
    """Whether an index decides by its values how many elements there are."""
    return any(each.dtype in (torch.bool, torch.uint8) for each in tensors_in(index))


def _drawn(tracker: Tracker, func: Any, kind: Kind, args: Args, kwargs: Kwargs) -> Any:
    if not draws(func, kind.name, args, kwargs):
        return _computed(tracker, func, kind, args, kwargs)
    drawn = tracker.draw(kind.name, kwargs)
    writes = kind.name.endswith("_") or _writes(kwargs)
    act = _write if writes else _computed
    return act(tracker, func, kind, args, kwargs, also=(drawn,))


# -- writes ------------------------------------------------------------------------------


def _write(
    tracker: Tracker,
    func: Any,
    kind: Kind,
    args: Args,
    kwargs: Kwargs,
    *,
    also: tuple[States, ...] = (),
) -> Any:
    """A call that writes its first operand, or what `out=` names."""
    out = kwargs.get("out")
    targets = (
        list(tensors_in(out))
        if out is not None
        else list(tensors_in([*args, *kwargs.values()]))[:1]
    )
    for target in targets:
        tracker.check_write(target, kind.name)
    # What is overwritten as a whole does not count.
    over = out is not None or kind.name in ("copy_", "data =")
    read_args = args[1:] if over and out is None else args
    read_kwargs = {key: value for key, value in kwargs.items() if key != "out"}
    states, new = agree(tracker, kind, read_args, read_kwargs, also=also)
    for target in targets:
        if id(target) in new:
            _no_cast_of_target(tracker, kind, target, states)
    if new:
        args, kwargs = (*args[:1], *replaced(args[1:], new)), replaced(kwargs, new)
    result = func(*args, **kwargs)
    for target in targets:
        tracker.written(target, states, kind.name, whole=over and not target._is_view())
    tracker.record(result, states)
    return result


def _no_cast_of_target(tracker: Tracker, kind: Kind, target: torch.Tensor, states: States) -> None:
    was = tracker.typeof(target)
    tracker.fail(
        kind.name,
        f"a write of {states} into {was}, which requires grad",
        "its gradient is to be summed from here on, but not for what it was before",
        f"compute a new tensor: {kind.name.rstrip('_')}(x, ...) in place of {kind.name}",
    )


def _lists(tracker: Tracker, func: Any, kind: Kind, args: Args, kwargs: Kwargs) -> Any:
    """An operation on the elements of lists: the first of all, the second of all, and so on."""
    lists = [
        each
        for each in (*args, *kwargs.values())
        if isinstance(each, list | tuple) and any(True for _ in tensors_in(each))
    ]
    height = max((len(each) for each in lists), default=0)
    rest = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
    results: list[States] = []
    new: dict[int, torch.Tensor] = {}
    for at in range(height):
        row = [each[at] for each in lists if len(each) == height]
        states, casts = agree(tracker, kind, [*row, *rest], ())
        results.append(states)
        new |= casts
    if kind.word is Word.LISTS:
        if new:
            args, kwargs = replaced(args, new), replaced(kwargs, new)
        outs = func(*args, **kwargs)
        for out, states in zip(outs, results, strict=True):
            tracker.record(out, states)
        return outs
    # Fused optimizers write all of their lists, other functions the first.
    written = lists if kind.name.startswith("_fused_") else lists[:1]
    for target in (x for each in written for x in tensors_in(each)):
        tracker.check_write(target, kind.name)
        if id(target) in new:
            _no_cast_of_target(tracker, kind, target, tracker.states(new[id(target)]))
    out = func(*args, **kwargs)
    for each in written:
        for target, states in zip(each, results, strict=False):
            if isinstance(target, torch.Tensor):
                tracker.written(target, states, kind.name, whole=False)
    return out


def _statistics(tracker: Tracker, func: Any, kind: Kind, args: Args, kwargs: Kwargs) -> Any:
    """Batch norm and its like: in training they write the statistics that they are given."""
    given = inspect.signature(func).bind(*args, **kwargs) if inspect.isfunction(func) else None
    written: list[torch.Tensor] = []
    if given is not None:
        given.apply_defaults()
        if given.arguments.get("training", given.arguments.get("use_input_stats", True)):
            named = (given.arguments.get(name) for name in ("running_mean", "running_var"))
            written = [each for each in named if each is not None]
    for target in written:
        tracker.check_write(target, kind.name)
    result = _computed(tracker, func, kind, args, kwargs)
    for target in written:
        tracker.written(target, tracker.states(result), kind.name, whole=False)
    return result


@contextmanager
def tracked(tracker: Tracker) -> Iterator[None]:
    """Track the types of what the block computes."""
    with telling(tracker), _Typed(tracker):
        yield
