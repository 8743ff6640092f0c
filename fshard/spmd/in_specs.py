"""Matching of `in_specs` with the arguments of a call: by position or by name, over pytrees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fshard._util.errors import fail
from fshard._util.signatures import ANY_CALL, CALL, bind_call
from fshard._util.text import type_name
from fshard._util.tracebacks import runs_users_operation
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.tree import broadcast_prefix, paths
from fshard.run.autograd.replicate import GlobalInput


@dataclass(frozen=True, slots=True)
class DimSpec:
    """Leaf of specs that shards dim `dim` over `axis`; negative dims count from the last one."""

    axis: str
    dim: int
    keyword: str
    """Option of `smap` that it was given in, for error messages."""

    def of(self, ndim: int) -> PartitionSpec:
        """Return the partition of a tensor of `ndim` dims; raise `ShardingError` for a bad dim."""
        if not -ndim <= self.dim < ndim:
            fail("fs.smap", f"{self.keyword} {self.dim} for a tensor of {ndim} dims",
                 f"a dim must be in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims",
                 "name a dim it has" if ndim else f"x[None], or {self.keyword} None")  # fmt: skip
        return PartitionSpec(*(None,) * (self.dim % ndim), self.axis)

    @property
    def smallest(self) -> PartitionSpec:
        """Partition of a tensor with the fewest dims that have `dim` among them."""
        after = (None,) * (-self.dim - 1)
        return PartitionSpec(*(None,) * max(self.dim, 0), self.axis, *after)


@dataclass(frozen=True, slots=True)
class Argument:
    """One leaf of the arguments, and how it becomes a local; without `spec` it passes through.

    It depends on types, shapes and specs, not on values.

    Attributes:
        path: path of the leaf.
        spec: layout of a tensor or pair.
        to_local: function from the value to this rank's local, or to all shards of a pair.
        slot: slot of a global tensor in a simulation, in the place of `to_local`.
    """

    path: str
    spec: Spec | None = None
    to_local: Callable[[Any], Any] = lambda value: value
    slot: GlobalInput | None = None


PathSpec = tuple[str, Any]
"""Path of a leaf, and its leaf of `in_specs` or `out_specs`."""


class ArgSignature:
    """Parameters of a function, read once; without the first `skip`.

    Attributes:
        example: a call of the function for errors, where it is made of another.
        signature: the signature, None for builtins that have none.
        parameters: its parameters.
        num_named: number of parameters that are not `*args` or `**kwargs`.
        is_variadic: whether the number of positional arguments is not limited.
    """

    __slots__ = ("example", "is_variadic", "num_named", "parameters", "signature")

    def __init__(self, fn: Callable[..., Any], *, skip: int = 0) -> None:
        self.example = getattr(fn, CALL, ANY_CALL)
        self.signature: inspect.Signature | None
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = None
        if self.signature is not None and skip:
            kept = [p for i, p in enumerate(self.signature.parameters.values())
                    if i >= skip or p.kind is p.VAR_POSITIONAL]  # fmt: skip
            self.signature = self.signature.replace(parameters=kept)
        self.parameters = list(self.signature.parameters.values()) if self.signature else []
        kinds = [p.kind for p in self.parameters]
        variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        self.num_named = sum(kind not in variadic for kind in kinds)
        self.is_variadic = not kinds or inspect.Parameter.VAR_POSITIONAL in kinds

    @runs_users_operation
    def check(self, where: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise `SignatureError`, which is a TypeError too, for a call that does not fit."""
        if self.signature is not None:
            bind_call(where, self.signature, args, kwargs, self.example)


def match_specs(
    where: str,
    signature: ArgSignature,
    in_specs: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[PathSpec, ...]:
    """Return path and spec of every leaf of `(args, kwargs)`, in the order of that tree's leaves.

    They depend on the structure of the arguments alone. Raises `ShardingError` where `in_specs`
    is not a prefix of them.
    """
    path_specs: list[PathSpec] = []
    for index, value in enumerate(args):
        name = _arg_name(signature.parameters, index)
        entry, prefix = _entry(where, signature, in_specs, args, name, index)
        path_specs += _leaf_specs(where, name, value, entry, prefix)
    for key in sorted(kwargs):
        position = next((i for i, p in enumerate(signature.parameters) if p.name == key), None)
        entry, prefix = _entry(where, signature, in_specs, args, key, position)
        path_specs += _leaf_specs(where, key, kwargs[key], entry, prefix)
    return tuple(path_specs)


def _arg_name(parameters: Sequence[inspect.Parameter], index: int) -> str:
    """Return the name of the positional argument `index`."""
    for position, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL and index >= position:
            return f"{parameter.name}[{index - position}]"
        if position == index:
            return parameter.name
    return f"args[{index}]"


def _entry(
    where: str,
    signature: ArgSignature,
    in_specs: Any,
    args: Sequence[Any],
    name: str,
    position: int | None,
) -> tuple[Any, str]:
    """Return the part of `in_specs` for one argument, and its Python expression."""
    if in_specs is None or isinstance(in_specs, PartitionSpec | Spec | DimSpec):
        return in_specs, "in_specs"
    if isinstance(in_specs, Mapping):
        if name not in in_specs:
            fail(where, f"in_specs for {', '.join(map(str, in_specs))}",
                 f"every argument must have a spec; {name!r} has none",
                 f"in_specs={{..., {name!r}: P()}}")  # fmt: skip
        return in_specs[name], f"in_specs[{name!r}]"
    if not isinstance(in_specs, tuple):
        fail(where, f"in_specs of type {type_name(in_specs)}",
             "in_specs must be a P, a tuple by position, or a dict by name",
             "in_specs=(P('x'), P())")  # fmt: skip
    if position is None:
        fail(where, f"{name!r} by keyword with in_specs by position",
             f"{name!r} has no position in the function's signature",
             f"in_specs={{{name!r}: P(), ...}}, by name")  # fmt: skip
    limit = len(args) if signature.is_variadic else signature.num_named
    if position >= len(in_specs) or len(in_specs) > limit:
        fail(where, f"in_specs of length {len(in_specs)} for {limit} arguments",
             "in_specs must have one entry per argument, by position",
             "a tuple with one entry each, or one P for all")  # fmt: skip
    return in_specs[position], f"in_specs[{position}]"


def _leaf_specs(where: str, name: str, value: Any, entry: Any, prefix: str) -> list[PathSpec]:
    specs = broadcast_prefix(entry, value, prefix, where)
    return list(zip(paths(value, name), specs, strict=True))
