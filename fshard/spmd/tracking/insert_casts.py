"""Casts of a call's operands to states that agree, as JAX's type system inserts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fshard.layout.tree import tensors_in
from fshard.spmd.tracking.torch_effects import Action, OpEffect, adds_number, stays_linear
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import INVARIANT, JoinedStates, States, TypeConflict, TypeRule, join_states


def replace_tensors(value: Any, casts: Mapping[int, torch.Tensor]) -> Any:
    """Return arguments with some tensors replaced, by id."""
    if isinstance(value, torch.Tensor):
        return casts.get(id(value), value)
    if isinstance(value, list):
        return [replace_tensors(item, casts) for item in value]
    if type(value) is tuple:
        return tuple(replace_tensors(item, casts) for item in value)
    if isinstance(value, Mapping):
        return {key: replace_tensors(item, casts) for key, item in value.items()}
    return value


def join_operands(
    tracker: Tracker, effect: OpEffect, args: Any, kwargs: Any, *, also: tuple[States, ...] = ()
) -> tuple[States, dict[int, torch.Tensor]]:
    """Return the states of a call's result, and the casts of its operands by id.

    `also` are further states that the result depends on. Raises `ShardingError` if the operands
    have no common states.
    """
    tensors = _tensors_of(args, kwargs)
    operands = tuple(map(tracker.states, tensors))
    extra = (*also, tracker.read_states) if tracker.read_states.items else also
    joined = join_states(operands + extra, effect.rule)
    adds = False
    if isinstance(joined, JoinedStates) and joined.result.unreduced:
        if adds_number(effect.name, args, kwargs):
            joined = join_states((*operands, *extra, INVARIANT), effect.rule)
            adds = True
        elif not stays_linear(effect.name, args, kwargs):
            joined = join_states(operands + extra, TypeRule.OTHER)
    if isinstance(joined, TypeConflict):
        listed = " and ".join(str(tracker.typeof(x)) for x in tensors)
        number = " and a number" if adds else ""
        rule = joined.rule
        if extra and isinstance(join_states(operands, effect.rule), JoinedStates):
            rule += "; later code may depend on varying values: " + "; ".join(tracker.read_sites)
        tracker.fail(effect.name, f"{listed}{number}", rule, joined.fix)
    casts: dict[int, torch.Tensor] = {}
    for x, states, target in zip(tensors, operands, joined.operands, strict=False):
        if states is not target:
            tracker.check_cast(x, states, target, effect.name)
            cast = tracker.cast(x, states, target)
            if cast is not x:
                casts[id(x)] = cast
    return joined.result, casts


def run_with_casts(
    tracker: Tracker,
    name: str,
    operands: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    also: States,
    run: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Return `run(*operands)`, with operands cast to agree with `others` and with `also`.

    The states of the result depend on all of them.
    """
    effect = OpEffect(name, Action.OP, TypeRule.OTHER)
    states, casts = join_operands(tracker, effect, (*operands, *others), {}, also=(also,))
    with tracker.pause():
        result = run(*replace_tensors(tuple(operands), casts))
    tracker.record(result, states)
    return result


def _tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a call, first the tensors that `TypeRule` identifies by position."""
    tensors = []
    if kwargs:
        first = [kwargs[key] for key in ("condition", "self", "input") if key in kwargs]
        rest = (kwargs[key] for key in kwargs if key not in ("condition", "self", "input"))
        args = (*args, *first, *rest)
    for value in args:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list | slice | Mapping):
            tensors += tensors_in(value)
    return tensors
