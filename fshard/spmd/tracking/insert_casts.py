"""The tensors in the arguments of a call, and the casts that make them agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fshard.layout.tree import tensors_in
from fshard.spmd.tracking.torch_effects import Action, OpEffect, adds_number, stays_linear
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import INVARIANT, JoinedStates, States, TypeConflict, TypeRule, join_states

__all__ = ["join_operands", "replace_tensors", "run_with_casts"]


def replace_tensors(value: Any, new: Mapping[int, torch.Tensor]) -> Any:
    """Arguments with other tensors in place of some, by id."""
    if isinstance(value, torch.Tensor):
        return new.get(id(value), value)
    if isinstance(value, list):
        return [replace_tensors(each, new) for each in value]
    if type(value) is tuple:
        return tuple(replace_tensors(each, new) for each in value)
    if isinstance(value, Mapping):
        return {key: replace_tensors(each, new) for key, each in value.items()}
    return value


def join_operands(
    tracker: Tracker, effect: OpEffect, args: Any, kwargs: Any, *, also: tuple[States, ...] = ()
) -> tuple[States, dict[int, torch.Tensor]]:
    """The states of a result, and the casts of operands that it takes, by id of the operand."""
    tensors = _listed(args, kwargs)
    operands = tuple(map(tracker.states, tensors))
    extra = (*also, tracker.read_states) if tracker.read_states.items else also
    joined = join_states(operands + extra, effect.rule)
    number = False
    if isinstance(joined, JoinedStates) and joined.result.unreduced:
        if adds_number(effect.name, args, kwargs):
            joined, number = join_states((*operands, *extra, INVARIANT), effect.rule), True
        elif not stays_linear(effect.name, args, kwargs):
            joined = join_states(operands + extra, TypeRule.OTHER)
    if isinstance(joined, TypeConflict):
        listed = " and ".join(str(tracker.typeof(x)) for x in tensors)
        others = " and a number" if number else ""
        rule = joined.rule
        if extra and isinstance(join_states(operands, effect.rule), JoinedStates):
            rule += "; what follows may depend on what varies: " + "; ".join(tracker.read_sites)
        tracker.fail(effect.name, f"{listed}{others}", rule, joined.fix)
    new: dict[int, torch.Tensor] = {}
    for x, states, target in zip(tensors, operands, joined.operands, strict=False):
        if states is not target:
            tracker.check_cast(x, states, target, effect.name)
            cast = tracker.cast(x, states, target)
            if cast is not x:
                new[id(x)] = cast
    return joined.result, new


def run_with_casts(
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
    effect = OpEffect(name, Action.OP, TypeRule.OTHER)
    states, new = join_operands(tracker, effect, (*operands, *others), {}, also=(also,))
    with tracker.pause():
        made = run(*replace_tensors(tuple(operands), new))
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
