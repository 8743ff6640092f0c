"""The registry of rules: a row for each operation, found by its overload or functional form."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fshard._util.errors import did_you_mean, fail
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Rule, rule

__all__ = [
    "Generator", "Row", "decomposition_of", "functional_of", "overloads", "register_decomposition",
    "register_rule", "registry_version", "row_of", "rows",
]  # fmt: skip

Generator = Callable[[OpCall], Rule | list[Any] | None]
G = TypeVar("G", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Row:
    """Rule of one operation, generated for each call."""

    op: Any
    generator: Generator

    @property
    def module(self) -> str:
        """Name of the module that defines the generator."""
        return str(getattr(self.generator, "__module__", ""))

    @property
    def is_builtin(self) -> bool:
        """Whether the rule is fshard's own, which a user's rule replaces."""
        return self.module.startswith(_RULES)


@dataclass(frozen=True, slots=True)
class _Always:
    """The generator of one rule for all calls."""

    made: Rule

    def __call__(self, call: OpCall) -> Rule:
        return self.made


_ROWS: dict[Any, Row] = {}
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
_COUNT = [0]
_RULES = "fshard.ops.rules"
"""Package whose modules register the built-in rules, imported at the first look-up."""


def register_rule(*ops: Any) -> Callable[[Any], Any]:
    """Give operations a sharding rule: as decorator of a generator, or with a rule's text.

    An operation is a `torch.ops` overload or packet (all of its overloads), a `torch` function
    that has one, or any Python function of tensors. A generator gets the `OpCall` and returns a
    `Rule`, a list of acceptable shardings (pairs of results' and operands' states, see
    `acceptable`), or None where it has none for these arguments. The last registration wins.

    >>> def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    ...     return x * w
    >>> made = register_rule(scaled)("bd,d->bd")
    >>> print(rows()[scaled].generator(None))
    bd,d->bd
    """

    def keep(given: Any) -> Any:
        made = rule(given) if isinstance(given, str) else given
        generator: Generator = _Always(made) if isinstance(made, Rule) else made
        for op in ops:
            for overload in overloads(op):
                # A user's rule may be registered before the built-in ones are loaded.
                row, before = Row(overload, generator), _ROWS.get(overload)
                if before is None or before.is_builtin or not row.is_builtin:
                    _ROWS[overload] = row
        _COUNT[0] += 1
        _functional.cache_clear()
        return given

    return keep


def register_decomposition(*ops: Any) -> Callable[[G], G]:
    """Say how operations can be done by others, for where their own rule would move operands.

    The function takes the operation's arguments and computes the same of whole tensors, in
    PyTorch's functions: a softmax by a maximum, a sum and a division, so that a dim that the
    softmax needs whole stays cut. What it holds constant it detaches before it is computed.
    """

    def keep(given: G) -> G:
        for op in ops:
            for each in overloads(op):
                _DECOMPOSITIONS[each] = given
        return given

    return keep


def registry_version() -> int:
    """A number that is another one after each registration: a part of the keys of caches."""
    return _COUNT[0]


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """How an operation can be done by others, if somebody has said so."""
    _load()
    return _DECOMPOSITIONS.get(op)


def rows() -> dict[Any, Row]:
    """All rows by operation; a copy."""
    _load()
    return dict(_ROWS)


@lru_cache(maxsize=1)
def _load() -> None:
    # A second of PyTorch's own work, which who only moves tensors need not wait for.
    rules = importlib.import_module(_RULES)
    for module in pkgutil.walk_packages(rules.__path__, f"{_RULES}."):
        importlib.import_module(module.name)


def overloads(op: Any) -> Iterable[Any]:
    """The overloads that an operation stands for; a Python function stands for itself."""
    if isinstance(op, str):
        return _named(op)
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    return [op]


def _named(name: str) -> Iterable[Any]:
    """`"add"` all overloads of aten's, `"add.Tensor"` one, `"prims::add"` another namespace's."""
    space, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, space or "aten"), base)
        return overloads(getattr(packet, overload) if overload else packet)
    except AttributeError:
        known = [each for each in dir(torch.ops.aten) if each[0] == base[0]]
        fail("fs.register_rule", repr(name), "PyTorch has no operation of this name",
             did_you_mean(base, known, "torch.ops.aten has their names"))  # fmt: skip


def row_of(op: Any) -> Row | None:
    """The row of an operation; in-place and `out=` variants have that of their functional form."""
    _load()
    row = _ROWS.get(op)
    if row is None and isinstance(op, OpOverload):
        functional = functional_of(op)
        row = None if functional is op else _ROWS.get(functional)
    return row


def functional_of(op: Any) -> Any:
    """The overload that computes what `op` writes and writes nothing; `op` where it is that one.

    >>> functional_of(torch.ops.aten.add_.Tensor), functional_of(torch.ops.aten.add.out)
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.add', overload='Tensor')>)
    """
    return _functional(op) if isinstance(op, OpOverload) else op


def read_arguments(op: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name that an operation reads: without those that it writes into."""
    if not kwargs:
        return {}
    outs = {"out"}
    if isinstance(op, OpOverload):
        outs = {each.name for each in op._schema.arguments if each.is_out}
    return {key: each for key, each in kwargs.items() if key not in outs}


@cache
def _functional(op: OpOverload[..., Any]) -> Any:
    if not op._schema.is_mutable:
        return op
    space, _, name = op._schema.name.partition("::")
    read = _shapes(op)
    for base in dict.fromkeys((name, name.rstrip("_"), f"{name.rstrip('_')}_functional")):
        packet = getattr(getattr(torch.ops, space), base, None)
        if not isinstance(packet, OpOverloadPacket):
            continue
        for each in packet.overloads():
            found = getattr(packet, each)
            if not found._schema.is_mutable and _shapes(found) == read:
                return found
    return op


def _shapes(op: OpOverload[..., Any]) -> list[tuple[str, str]]:
    """Names and types of what an operation reads; the first, `self` or `input`, by its type."""
    read = [each for each in op._schema.arguments if not each.is_out]
    return [("" if at == 0 else each.name, str(each.type)) for at, each in enumerate(read)]
