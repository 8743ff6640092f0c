"""How `in_specs` meet the arguments of a call: by position or by name, over pytrees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fshard.errors import fail
from fshard.partition import PartitionSpec
from fshard.spec import Spec
from fshard.tree import broadcast_prefix, flatten, paths

__all__ = ["Argument", "match_specs", "signature_of"]


@dataclass(slots=True)
class Argument:
    """One leaf of the arguments: its path, its value, what `in_specs` say of it."""

    path: str
    value: Any
    given: Any
    spec: Spec | None = None
    local: Any = None


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of `fn`, or None for builtins that have none."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def match_specs(
    where: str,
    signature: inspect.Signature | None,
    in_specs: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Argument]:
    """Every leaf of `(args, kwargs)`, in the order of that tree's leaves, with its spec.

    Raises `ShardingError` where `in_specs` is no prefix of the arguments.
    """
    if signature is not None:
        signature.bind(*args, **kwargs)  # Python's own TypeError for a call that does not fit
    parameters = list(signature.parameters.values()) if signature is not None else []
    arguments: list[Argument] = []
    for at, value in enumerate(args):
        name = _name(parameters, at)
        arguments += _leaves(
            where, name, value, *_entry(where, parameters, in_specs, args, name, at)
        )
    for key in sorted(kwargs):
        place = next((at for at, p in enumerate(parameters) if p.name == key), None)
        arguments += _leaves(
            where, key, kwargs[key], *_entry(where, parameters, in_specs, args, key, place)
        )
    return arguments


def _name(parameters: Sequence[inspect.Parameter], at: int) -> str:
    """The name of the positional argument `at`."""
    for place, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL and at >= place:
            return f"{parameter.name}[{at - place}]"
        if place == at:
            return parameter.name
    return f"args[{at}]"


def _entry(
    where: str,
    parameters: Sequence[inspect.Parameter],
    in_specs: Any,
    args: Sequence[Any],
    name: str,
    at: int | None,
) -> tuple[Any, str]:
    """The part of `in_specs` for one argument, and how it is written."""
    if in_specs is None or isinstance(in_specs, PartitionSpec | Spec):
        return in_specs, "in_specs"
    if isinstance(in_specs, Mapping):
        if name not in in_specs:
            fail(
                where,
                f"in_specs for {', '.join(map(str, in_specs))}",
                f"every argument given has a spec; {name!r} has none",
                f"in_specs={{..., {name!r}: P()}}",
            )
        return in_specs[name], f"in_specs[{name!r}]"
    if not isinstance(in_specs, tuple | list):
        fail(
            where,
            f"in_specs of type {type(in_specs).__name__}",
            "in_specs is a P, a tuple by position, or a dict by name",
            "in_specs=(P('x'), P())",
        )
    if at is None:
        fail(
            where,
            f"{name!r} by keyword with in_specs by position",
            f"{name!r} has no position in the function's signature",
            f"in_specs={{{name!r}: P(), ...}}, by name",
        )
    fixed = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    free = not parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if at >= len(in_specs) or len(in_specs) > (len(args) if free else len(fixed)):
        fail(
            where,
            f"in_specs of length {len(in_specs)} for {len(args) if free else len(fixed)} arguments",
            "in_specs has one entry per argument, by position",
            "a tuple with one entry each, or one P for all",
        )
    return in_specs[at], f"in_specs[{at}]"


def _leaves(where: str, name: str, value: Any, prefix: Any, written: str) -> list[Argument]:
    specs = broadcast_prefix(prefix, value, written, where)
    leaves, _ = flatten(value)
    return [Argument(*each) for each in zip(paths(value, name), leaves, specs, strict=True)]
