"""The registry of rules: a row for each operation, found by its overload or functional form."""

from __future__ import annotations

import importlib
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
    "Generator",
    "Row",
    "decomposition_of",
    "functional_of",
    "overloads",
    "register_decomposition",
    "register_rule",
    "registry_version",
    "row_of",
    "rows",
]  # fmt: skip

Generator = Callable[[OpCall], Rule | list[Any] | None]
G = TypeVar("G", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Row:
    """One operation's rule: how it is made from a call, and the family that it is of."""

    op: Any
    generator: Generator
    family: str


@dataclass(frozen=True, slots=True)
class _Always:
    """The generator of one rule for all calls."""

    made: Rule

    def __call__(self, call: OpCall) -> Rule:
        return self.made


_ROWS: dict[Any, Row] = {}
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
_COUNT = [0]
USER = "user"
_RULE_MODULES = (
    "rules.elementwise.pointwise",
    "rules.elementwise.factories",
    "rules.elementwise.random_ops",
    "rules.contraction.matmul",
    "rules.contraction.linalg",
    "rules.contraction.fft",
    "rules.reduce.reductions",
    "rules.reduce.scans",
    "rules.reduce.sorting",
    "rules.reduce.decompositions",
    "rules.view.views",
    "rules.view.diagonals",
    "rules.view.windows",
    "rules.view.concat",
    "rules.index.gather",
    "rules.index.scatter",
    "rules.nn.embedding",
    "rules.nn.losses",
    "rules.nn.class_losses",
    "rules.nn.norms",
    "rules.nn.convolution",
    "rules.nn.pooling",
    "rules.nn.attention",
    "rules.nn.recurrent",
    "rules.nn.norm_decompositions",
    "rules.backward",
)
"""Modules of `fshard.ops` that register rows, imported when the first row is requested."""


def register_rule(*ops: Any, family: str = USER) -> Callable[[Any], Any]:
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
            for each in overloads(op):
                # Families are loaded in any order, by whoever needs one of them first.
                before = _ROWS.get(each)
                assert family == USER or before is None or before.family in (family, USER), each
                if before is None or family == USER or before.family != USER:
                    _ROWS[each] = Row(each, generator, family)
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
    for module in _RULE_MODULES:
        importlib.import_module(f"fshard.ops.{module}")


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
