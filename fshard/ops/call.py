"""`Call`: one call of an operation with tensors known by shape and dtype alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from fshard.errors import fail

__all__ = ["Call", "Meta", "map_tensors", "meta_results", "schema_of"]

Op = OpOverload[..., Any]


class Meta(NamedTuple):
    """What a tensor is without its numbers: a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `op`: arguments with `Meta` in the places of tensors, and what it returns.

    `args` and `kwargs` are as given; `operands` are their tensors in order, `results` what comes
    out, None where the operation returns none there. Rule generators read all of it.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[Meta, ...]
    results: tuple[Meta | None, ...]

    def get(self, name: str) -> Any:
        """The argument called `name` in the operation's schema, its default where not given.

        Raises `KeyError` for a name that the schema has not.

        >>> from fshard.ops.propagate import call_of
        >>> x = Meta((2, 3), torch.float32)
        >>> call_of(torch.ops.aten.sum.dim_IntList, (x, [1]), {}).get("keepdim")
        False
        """
        for at, argument in enumerate(schema_of(self.op)):
            if argument.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                if at < len(self.args) and not argument.kwarg_only:
                    return self.args[at]
                return argument.default_value if argument.has_default_value() else None
        raise KeyError(name)

    def has(self, name: str) -> bool:
        """Whether the schema has an argument of that name."""
        return any(argument.name == name for argument in schema_of(self.op))

    def place(self, name: str) -> int | None:
        """The number among `operands` of the tensor argument `name`; None where it is absent."""
        seen = 0
        for at, argument in enumerate(schema_of(self.op)):
            given: Any = self.kwargs.get(argument.name)
            if argument.name not in self.kwargs and at < len(self.args):
                given = self.args[at] if not argument.kwarg_only else None
            if argument.name == name:
                return seen if isinstance(given, Meta) else None
            seen += len(tensors_in(given))
        raise KeyError(name)


def schema_of(op: Any) -> Sequence[Any]:
    """The arguments of an operation's schema."""
    arguments: Sequence[Any] = op._schema.arguments
    return arguments


def tensors_in(value: Any) -> list[Meta]:
    """The `Meta`s in an argument: itself, or those in a list of them."""
    if isinstance(value, Meta):
        return [value]
    if isinstance(value, list | tuple):
        return [each for inner in value for each in tensors_in(inner)]
    return []


def map_tensors(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """An argument with `change` applied to what is a `kind` in it, lists included."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(each, kind, change) for each in value)
    return value


def meta_results(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Meta | None, ...], Any]:
    """What a call returns, flat, and the tree of it with numbers in the place of tensors.

    The operation runs on meta tensors: it computes shapes and nothing else. Raises
    `ShardingError` where it refuses its arguments.
    """
    make = lambda m: torch.empty(m.shape, dtype=m.dtype, device="meta")  # noqa: E731
    real = [map_tensors(each, Meta, make) for each in args]
    named = {key: map_tensors(each, Meta, make) for key, each in kwargs.items()}
    if "device" in named:
        named["device"] = torch.device("meta")
    try:
        with torch.no_grad():
            out = op(*real, **named)
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError) as error:
        given = ", ".join(map(_text, (*args, *kwargs.values())))
        fail(f"fs.propagate({op})", given, f"it must run on tensors of these shapes: {error}",
             "check the arguments with the same call on whole tensors")  # fmt: skip
    found: list[Meta | None] = []

    def number(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            found.append(Meta(tuple(value.shape), value.dtype))
            return len(found) - 1
        if value is None:
            found.append(None)
            return len(found) - 1
        if isinstance(value, list | tuple):
            return type(value)(*map(number, value)) if hasattr(value, "_fields") else (
                type(value)(number(each) for each in value))  # fmt: skip
        return value

    tree = number(out)
    return tuple(found), tree


def _text(value: Any) -> str:
    if isinstance(value, Meta):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
