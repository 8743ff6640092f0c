"""How `in_specs` meet the arguments of a call: by position or by name, over pytrees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import fail
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import broadcast_prefix, paths

__all__ = ["ArgSignature", "Argument", "DimSpec", "PathSpec", "match_specs"]


@dataclass(frozen=True, slots=True)
class DimSpec:
    """A leaf of specs that counts from either end: `axis` cuts dim `dim`."""

    axis: str
    dim: int
    word: str

    def of(self, ndim: int) -> PartitionSpec:
        """The partition of a tensor of `ndim` dims; raises `ShardingError` if it has no such."""
        if not -ndim <= self.dim < ndim:
            fail(
                "fs.smap",
                f"{self.word} {self.dim} for a tensor of {ndim} dims",
                f"a dim is in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims",
                "name a dim it has" if ndim else f"x[None], or {self.word} None",
            )
        return PartitionSpec(*(None,) * (self.dim % ndim), self.axis)

    @property
    def smallest(self) -> PartitionSpec:
        """The partition of a tensor of as few dims as it takes."""
        after = (None,) * (-self.dim - 1)
        return PartitionSpec(*(None,) * max(self.dim, 0), self.axis, *after)


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of the arguments, and how it becomes a local; without a `spec` it passes through.

    Nothing here depends on numbers.
    """

    path: str
    spec: Spec | None = None
    local: Callable[[Any], Any] = lambda value: value


PathSpec = tuple[str, Any]
"""The path of a leaf, and the spec that is given for it."""


class ArgSignature:
    """What of a function's parameters its calls need, read once."""

    __slots__ = ("fixed", "free", "parameters", "signature")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.signature: inspect.Signature | None
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError):  # builtins have none
            self.signature = None
        found = None if self.signature is None else self.signature.parameters
        self.parameters = list(found.values()) if found is not None else []
        named = [p for p in self.parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.fixed = len(named)
        self.free = not self.parameters or any(p.kind is p.VAR_POSITIONAL for p in self.parameters)


def match_specs(
    where: str,
    signature: ArgSignature,
    in_specs: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[PathSpec, ...]:
    """Path and spec of every leaf of `(args, kwargs)`, in the order of that tree's leaves.

    They depend on the structure of the arguments alone. Raises `ShardingError` where `in_specs`
    is no prefix of them.
    """
    if signature.signature is not None:
        # Python's own TypeError for a call that does not fit.
        signature.signature.bind(*args, **kwargs)
    slots: list[PathSpec] = []
    for at, value in enumerate(args):
        name = _name(signature.parameters, at)
        slots += _leaves(where, name, value, *_entry(where, signature, in_specs, args, name, at))
    for key in sorted(kwargs):
        place = next((at for at, p in enumerate(signature.parameters) if p.name == key), None)
        slots += _leaves(
            where, key, kwargs[key], *_entry(where, signature, in_specs, args, key, place)
        )
    return tuple(slots)


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
    signature: ArgSignature,
    in_specs: Any,
    args: Sequence[Any],
    name: str,
    at: int | None,
) -> tuple[Any, str]:
    """The part of `in_specs` for one argument, and how it is written."""
    if in_specs is None or isinstance(in_specs, PartitionSpec | Spec | DimSpec):
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
    if not isinstance(in_specs, tuple):
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
    most = len(args) if signature.free else signature.fixed
    if at >= len(in_specs) or len(in_specs) > most:
        fail(
            where,
            f"in_specs of length {len(in_specs)} for {most} arguments",
            "in_specs has one entry per argument, by position",
            "a tuple with one entry each, or one P for all",
        )
    return in_specs[at], f"in_specs[{at}]"


def _leaves(where: str, name: str, value: Any, prefix: Any, written: str) -> list[PathSpec]:
    specs = broadcast_prefix(prefix, value, written, where)
    return list(zip(paths(value, name), specs, strict=True))
