"""The tensors in the arguments of a call, and the casts that make them agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fshard.layout.tree import tensors_in
from fshard.spmd.tracking.torch_effects import Kind, Word, adds_a_number, stays_linear
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import INVARIANT, JoinedStates, States, TypeConflict, TypeRule, join_states

__all__ = ["agree", "computed", "replaced"]


def replaced(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """Arguments with other tensors in place of some, by id."""
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if isinstance(value, list):
        return [replaced(each, new) for each in value]
    if type(value) is tuple:
        return tuple(replaced(each, new) for each in value)
    if isinstance(value, Mapping):
        return {key: replaced(each, new) for key, each in value.items()}
    return value


def agree(
    tracker: Tracker, kind: Kind, args: Any, kwargs: Any, *, also: tuple[States, ...] = ()
) -> tuple[States, dict[int, torch.Tensor]]:
    """The states of a result, and the casts of operands that it takes, by id of the operand."""
    tensors = _listed(args, kwargs)
    operands = tuple(map(tracker.states, tensors))
    extra = (*also, tracker.told) if tracker.told.items else also
    joined = join_states(operands + extra, kind.rule)
    number = False
    if isinstance(joined, JoinedStates) and joined.result.unreduced:
        if adds_a_number(kind.name, args, kwargs):
            joined, number = join_states((*operands, *extra, INVARIANT), kind.rule), True
        elif not stays_linear(kind.name, args, kwargs):
            joined = join_states(operands + extra, TypeRule.OTHER)
    if isinstance(joined, TypeConflict):
        listed = " and ".join(str(tracker.typeof(x)) for x in tensors)
        others = " and a number" if number else ""
        rule = joined.rule
        if extra and isinstance(join_states(operands, kind.rule), JoinedStates):
            rule += "; what follows may depend on what varies: " + "; ".join(tracker.told_at)
        tracker.fail(kind.name, f"{listed}{others}", rule, joined.fix)
    new: dict[int, torch.Tensor] = {}
    for x, states, target in zip(tensors, operands, joined.operands, strict=False):
        if states is not target:
            tracker.check_cast(x, states, target, kind.name)
            cast = tracker.cast(x, states, target)
            if cast is not x:
                new[id(x)] = cast
    return joined.result, new


def computed(
    tracker: Tracker,
    name: str,
    operands: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    also: States,
    run: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """`run(*operands)`, cast to agree with each other, with `others` and with `also`.

    So is the result, which depends on all of them.
    """
    kind = Kind(name, Word.OP, TypeRule.OTHER)
    states, new = agree(tracker, kind, (*operands, *others), {}, also=(also,))
    with tracker.pause():
        made = run(*replaced(tuple(operands), new))
    tracker.record(made, states)
    return made


def _listed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call, in order: those that `TypeRule` tells by their place come first."""
    found = []
    if kwargs:
        first = [kwargs[each] for each in ("condition", "self", "input") if each in kwargs]
        rest = (kwargs[each] for each in kwargs if each not in ("condition", "self", "input"))
        args = (*args, *first, *rest)
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list | slice | Mapping):
            found += tensors_in(value)
    return found
