"""Registry of sharding rules and decompositions, with one row for each operation.

A row is found by overload; an in-place or `out=` overload has the row of its functional form.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from fshard._torch.operators import (
    OpOverload,
    OpOverloadPacket,
    overload_or_self,
    packet_of,
    schema_of,
)
from fshard._util.errors import did_you_mean, fail
from fshard.layout.spec import Spec
from fshard.ops.core.call import OpCall
from fshard.ops.core.rule import Rule, rule
from fshard.spmd.mapped_function import MappedFunction

Generator = Callable[[OpCall], Any]
"""Function of a call that returns its rule, text, a list of shardings, or None."""
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
        """Return True for a rule of fshard itself, which a user's rule replaces."""
        return _is_builtin(self.generator)


@dataclass(frozen=True, slots=True)
class _Constant:
    """Generator of one rule for all calls."""

    rule: Rule

    def __call__(self, call: OpCall) -> Rule:
        return self.rule


class MappedStrategy(NamedTuple):
    """Strategy of a call that is a mapped function with collectives of its own, such as a ring.

    Attributes:
        function: the function of the operands, from pairs of the layouts `in_specs` to pairs.
        in_specs: the layouts of the operands.
        hiding: floating-point operations of a rank during its collectives; twice as many backward.
        keeps_sharded: whether it is preferred, whatever it costs, to strategies that gather an axis
            along which an operand is kept sharded.
    """

    function: MappedFunction
    in_specs: tuple[Spec, ...]
    hiding: float
    keeps_sharded: bool = False


MappedStrategyOf = Callable[[OpCall, Sequence[Spec]], MappedStrategy | None]
"""Function of a call and its operands' layouts to a strategy; None if there is none for them."""

_ROWS: dict[Any, Row] = {}
_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
_MAPPED: dict[Any, MappedStrategyOf] = {}
_COUNT = [0]
_RULES = "fshard.ops.rules"
"""Package whose modules register the built-in rules, imported at the first look-up."""


def _is_builtin(registered: Any) -> bool:
    """Return True for a generator or a decomposition of fshard itself."""
    return str(getattr(registered, "__module__", "")).startswith(_RULES)


def register_rule(*ops: Any) -> Callable[[Any], Any]:
    """Register the sharding rule of operations: `fs.register_rule(op)(rule)`, or a decorator.

    The last registration of an operation wins, over built-in rules too.

    Args:
        *ops: Operations: `torch.ops` overloads, packets (all overloads), names such as
            `"add.Tensor"`, builtins such as `torch.add`, functions of `torch.library.custom_op`, or
            other functions of tensors. `fs.apply` and `fs.propagate` use the rules of the last;
            `fs.partition` traces these functions, and uses the rules of what they call.

    Returns:
        A function that registers its argument and returns it: a rule's text, an `fs.Rule`, or a
        generator `(OpCall) -> str | Rule | list | None`. A list has acceptable shardings, one pair
        of the results' and the operands' states for each, as DTensor's `register_sharding` takes
        them; None means that the generator has no rule for these arguments.

    Raises:
        ShardingError: If a name is not an operation of PyTorch, or a rule's text is invalid; from
            a call, if the generator raises, or returns something else.

    After Shardy's `sdy.op_sharding_rule` and PyTorch's `register_sharding`.

    >>> import torch
    >>> import fshard as fs
    >>> def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    ...     return x * w
    >>> fs.register_rule(scaled)("bd,d->bd")
    'bd,d->bd'
    >>> mesh = fs.Mesh(i=2)
    >>> x, w = fs.parse("f32[8@i,4]", mesh), fs.parse("f32[4]", mesh)
    >>> print(fs.propagate(scaled, x, w).out_specs[0])
    f32[8@i,4]
    """

    def register(definition: Any) -> Any:
        parsed = rule(definition) if isinstance(definition, str) else definition
        generator: Generator = _Constant(parsed) if isinstance(parsed, Rule) else parsed
        for op in ops:
            for overload in overloads(op):
                # A user's rule may be registered before the built-in ones are loaded.
                row, before = Row(overload, generator), _ROWS.get(overload)
                if before is None or before.is_builtin or not row.is_builtin:
                    _ROWS[overload] = row
        _COUNT[0] += 1
        _functional.cache_clear()
        return definition

    return register


def register_decomposition(*ops: Any) -> Callable[[G], G]:
    """Register a decomposition of operations into others, used if their rule would redistribute.

    A softmax over a sharded dim, say, becomes a maximum, a sum and a division, of which only the
    small reduced tensors are communicated. The last registration of an operation wins, over
    built-in decompositions too.

    Args:
        *ops: Operations, as `fs.register_rule` takes them.

    Returns:
        A decorator of a function that takes the operation's arguments, as global tensors, and
        computes its result with other functions of PyTorch. It must detach a tensor that it holds
        constant before it computes with it.

    Raises:
        ShardingError: If a name is not an operation of PyTorch.

    After the decompositions of PyTorch (`torch._decomp`), of which it takes one for layouts.

    >>> import torch
    >>> import fshard as fs
    >>> def mean_square(x: torch.Tensor) -> torch.Tensor:
    ...     return (x * x).mean()
    >>> @fs.register_decomposition(mean_square)
    ... def _(x: torch.Tensor) -> torch.Tensor:
    ...     return x.square().sum() / x.numel()
    """

    def register(decomposition: G) -> G:
        for op in ops:
            for overload in overloads(op):
                before = _DECOMPOSITIONS.get(overload)
                if before is None or _is_builtin(before) or not _is_builtin(decomposition):
                    _DECOMPOSITIONS[overload] = decomposition
        _COUNT[0] += 1
        return decomposition

    return register


def register_mapped_strategy(op: Any) -> Callable[[MappedStrategyOf], MappedStrategyOf]:
    """Return a decorator that registers the strategies of an operation that are mapped functions.

    They are costed beside its rule and its decomposition, where the rule would redistribute.
    """

    def register(strategy_of: MappedStrategyOf) -> MappedStrategyOf:
        _MAPPED[op] = strategy_of
        return strategy_of

    return register


def mapped_strategy(call: OpCall, specs: Sequence[Spec]) -> MappedStrategy | None:
    """Return the strategy of a call that is a mapped function, None if it has none."""
    strategy_of = _MAPPED.get(call.op)
    return None if strategy_of is None else strategy_of(call, specs)


def has_other_forms(op: Any) -> bool:
    """Return True if an operation has strategies beside its rule: decomposed, or mapped."""
    return decomposition_of(op) is not None or is_mapped(op)


def is_mapped(op: Any) -> bool:
    """Return True if an operation has strategies that are mapped functions."""
    _load()
    return op in _MAPPED


def registry_version() -> int:
    """Return the number of registrations so far, a part of cache keys."""
    _load()
    return _COUNT[0]


def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """Return the registered decomposition of an operation, or None."""
    _load()
    return _DECOMPOSITIONS.get(op)


def rows() -> dict[Any, Row]:
    """Return a copy of the registry, by operation."""
    _load()
    return dict(_ROWS)


@lru_cache(maxsize=1)
def _load() -> None:
    # The imports take a second within PyTorch; programs that only redistribute need none of them.
    rules = importlib.import_module(_RULES)
    for module in pkgutil.walk_packages(rules.__path__, f"{_RULES}."):
        importlib.import_module(module.name)


def overloads(op: Any, where: str = "fs.register_rule") -> Iterable[Any]:
    """Return the overloads of a packet, a name or a builtin; others are their only ones."""
    if isinstance(op, str):
        return _named(op, where)
    packet = packet_of(op)
    if packet is not None:
        return [getattr(packet, name) for name in packet.overloads()]
    return [overload_or_self(op)]


def _named(name: str, where: str) -> Iterable[Any]:
    """Return the overloads of `"add"` (all of aten), `"add.Tensor"` (one) or `"prims::add"`."""
    space, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, space or "aten"), base)
        return overloads(getattr(packet, overload) if overload else packet)
    except AttributeError:
        candidates = [other for other in dir(torch.ops.aten) if other[0] == base[0]]
        fail(where, repr(name), "the name must be that of an operation of PyTorch",
             did_you_mean(base, candidates, "dir(torch.ops.aten) lists the names"))  # fmt: skip


def row_of(op: Any) -> Row | None:
    """Return the row of an operation or, for in-place and `out=` overloads, its functional form."""
    _load()
    row = _ROWS.get(op)
    if row is None and isinstance(op, OpOverload):
        functional = functional_of(op)
        row = None if functional is op else _ROWS.get(functional)
    return row


def functional_of(op: Any) -> Any:
    """Return the overload that returns what `op` writes; `op` itself if it writes nothing.

    >>> functional_of(torch.ops.aten.add_.Tensor), functional_of(torch.ops.aten.add.out)
    (<OpOverload(op='aten.add', overload='Tensor')>, <OpOverload(op='aten.add', overload='Tensor')>)
    """
    return _functional(op) if isinstance(op, OpOverload) else op


def read_arguments(op: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that an operation reads, without `out` arguments."""
    if not kwargs:
        return {}
    outs = {"out"}
    if isinstance(op, OpOverload):
        outs = {parameter.name for parameter in schema_of(op).arguments if parameter.is_out}
    return {name: arg for name, arg in kwargs.items() if name not in outs}


@cache
def _functional(op: OpOverload[..., Any]) -> Any:
    if not schema_of(op).is_mutable:
        return op
    space, _, name = schema_of(op).name.partition("::")
    signature = _read_signature(op)
    for base in dict.fromkeys((name, name.rstrip("_"), f"{name.rstrip('_')}_functional")):
        packet = getattr(getattr(torch.ops, space), base, None)
        if not isinstance(packet, OpOverloadPacket):
            continue
        for overload in overloads(packet):
            if not schema_of(overload).is_mutable and _read_signature(overload) == signature:
                return overload
    return op


def _read_signature(op: OpOverload[..., Any]) -> list[tuple[str, str]]:
    """Return name and type of each argument that is read; the first one's name is left out."""
    read = [parameter for parameter in schema_of(op).arguments if not parameter.is_out]
    return [("" if i == 0 else arg.name, str(arg.type)) for i, arg in enumerate(read)]
