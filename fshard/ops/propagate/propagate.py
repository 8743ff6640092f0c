"""`propagate`: from the specs of operands to the ways an operation can run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from fshard._torch.dynamo import skip_frames_below
from fshard._torch.modes import DisableTorchFunction, without_dispatch_modes
from fshard._torch.operators import (
    OpOverload,
    OpOverloadPacket,
    resolve_overload,
    schema_of,
    torch_decomposition,
)
from fshard._util.errors import ShardingError, fail
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.ops.core.cache_keys import freeze, unfreeze_call
from fshard.ops.core.call import (
    Meta,
    OpCall,
    instances_in,
    map_call,
    name_of,
)
from fshard.ops.core.registry import functional_of, read_arguments, registry_version, row_of
from fshard.ops.core.rule import Rule
from fshard.ops.core.sharding_lists import rule_from_shardings
from fshard.ops.meta.result_metas import results_of
from fshard.ops.propagate.foreach import foreach_strategy, is_foreach
from fshard.ops.propagate.select import select_strategy
from fshard.ops.strategy.strategy import Strategy
from fshard.program.cost.topology import Topology
from fshard.program.program import as_topology

__all__ = [
    "call_of", "is_several", "local_strategy_for", "overload_of", "propagate",
    "strategy_for",
]  # fmt: skip


@skip_frames_below("fs.propagate plans with the sizes of its specs: it is called outside of graphs")
def propagate(
    op: Any,
    *args: Any,
    cost: Topology | None = None,
    grad: bool = False,
    **kwargs: Any,
) -> Strategy:
    """The best way to run `op` on layouts: a `Strategy`, with the other ways beside it.

    `args` and `kwargs` are those of the call, with a `Spec` in the place of every tensor. `op` is
    a `torch` function that is a single operation, a `torch.ops` overload or packet, or what
    `fs.register_rule` was told of. Nothing runs and nothing is planned: the programs are when
    they are asked for. With `grad` only ways whose gradients are right count.

    The best way is the one that takes the least time for moving the operands, computing, and
    reducing later what stays unreduced; of equals the one with the least on the gradient's way
    back, then the one that comes first in the rule. Every axis is weighed for itself, so that the
    work grows with the axes' number, not with the product of what they can do.

    A layout is of sizes that are numbers, so symbols are read as those that they stand for:
    where `make_fx` or `torch.export` trace with symbolic sizes, making a spec of a shape tells
    them that what they make holds for this shape alone; in what `torch.compile` compiles, a graph
    ends before this function, `fs.apply`, `fs.shard` and partitioned functions, which run as they
    are. No symbol is a key of a cache, and nothing of a trace is in one.

    Raises `ShardingError` for an operation without a rule, specs on several meshes, and arguments
    that the operation itself refuses. After GSPMD (arXiv 2105.04663) and Shardy's factors.

    >>> from fshard import Mesh, P, Spec
    >>> mesh = Mesh(dp=2, tp=4)
    >>> x, w = Spec(mesh, P("dp", "tp"), shape=(8, 16)), Spec(mesh, P("tp"), shape=(16, 4))
    >>> propagate(torch.matmul, x, w).out_specs
    (f32[8@dp,4]{unreduced: tp},)
    """
    return strategy_for(op, args, kwargs, cost, grad)


class _Asked(NamedTuple):
    """What a strategy is asked for beside the call."""

    cost: Topology | None
    grad: bool
    local: bool = False
    wish: PartitionSpec | None = None


def strategy_for(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cost: Topology | None,
    grad: bool,
    wish: PartitionSpec | None = None,
) -> Strategy:
    """`propagate` with the arguments of the call in two places of their own.

    `wish` is how the result had better lie: such cuts need no operand that has them.
    """
    return _strategy(op, args, kwargs, _Asked(cost, grad, wish=wish)) or _no_way(op)


def local_strategy_for(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], cost: Topology | None, grad: bool
) -> Strategy | None:
    """The best strategy that sends nothing; None if there is none."""
    return _strategy(op, args, kwargs, _Asked(cost, grad, local=True))


def _strategy(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], asked: _Asked
) -> Strategy | None:
    key = (op, freeze(tuple(args)), freeze(dict(kwargs)), asked)
    try:
        hash(key)
    except TypeError:
        return _compute(op, args, kwargs, asked)
    return _cached(registry_version(), *key)


@lru_cache(maxsize=16384)
def _cached(rules: int, op: Any, args: Any, kwargs: Any, asked: _Asked) -> Strategy | None:
    return _compute(op, *unfreeze_call(args, kwargs), asked)


def _no_way(op: Any) -> NoReturn:
    raise AssertionError(f"{op}: all operands whole is always a way")


def _compute(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], asked: _Asked
) -> Strategy | None:
    topology, kwargs = as_topology("fs.propagate", asked.cost), read_arguments(op, kwargs)
    specs = instances_in((*args, *kwargs.values()), Spec)
    if not specs:
        fail(f"fs.propagate({name_of(op)})", "no specs",
             "a spec stands in the place of every tensor",
             "fs.Spec(mesh, P(...), shape=..., dtype=...)")  # fmt: skip
    _check_mesh(op, specs)
    metas, named = map_call(args, kwargs, Spec, Meta.of)
    overload = overload_of(op, metas, named)
    if is_foreach(functional := functional_of(overload)):
        each = asked._replace(wish=None)
        one = lambda op, args, kwargs: _strategy(op, args, kwargs, each)  # noqa: E731
        return foreach_strategy(functional, args, kwargs, specs, one, grad=asked.grad)
    call, tree = call_and_tree(overload, metas, named)
    return select_strategy(call, tree, rule_of(call), specs, topology, grad=asked.grad,
                  local=asked.local, hint=asked.wish)  # fmt: skip


def _check_mesh(op: Any, specs: Sequence[Spec]) -> None:
    meshes = dict.fromkeys(spec.mesh for spec in specs)
    if len(meshes) > 1:
        fail(f"fs.propagate({name_of(op)})", f"operands on {' and '.join(map(str, meshes))}",
             "an operation runs on one mesh",
             "move one of them there first: fs.reshard(pair, spec)")  # fmt: skip


# -- the call and its rule ----------------------------------------------------------------


def is_several(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function is more than one operation, or one that has no rule and can be others."""
    if row_of(op) is not None:
        return False
    if not isinstance(op, OpOverload | OpOverloadPacket) and _packet(op) is None:
        return callable(op)
    key = op, freeze(tuple(args)), freeze(dict(kwargs))
    try:
        hash(key)
    except TypeError:
        return _is_several(op, args, kwargs)
    return _is_several_before(registry_version(), *key)


@lru_cache(maxsize=16384)
def _is_several_before(rules: int, op: Any, args: Any, kwargs: Any) -> bool:
    return _is_several(op, *unfreeze_call(args, kwargs))


def _is_several(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    metas, named = map_call(args, kwargs, Spec, Meta.of)
    try:
        overload = overload_of(op, metas, named)
    except ShardingError:
        # Functions of `torch` take a number in the place of a list of one: they are traced.
        return not isinstance(op, OpOverload | OpOverloadPacket)
    return row_of(overload) is None and torch_decomposition(functional_of(overload)) is not None


def overload_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The overload that a call of `op` runs, or a Python function that has a rule of its own.

    Raises `ShardingError` for a function that is neither.
    """
    if row_of(op) is not None or isinstance(op, OpOverload):
        return op
    packet = op if isinstance(op, OpOverloadPacket) else _packet(op)
    if packet is None:
        fail(f"fs.propagate({name_of(op)})", "a function that is no operation of PyTorch",
             "what runs as one operation has a sharding rule",
             f"fs.register_rule({name_of(op)})('bd,d->bd') gives it one; "
             "fs.partition lays out what it is made of")  # fmt: skip
    make = lambda m: torch.empty(m.shape, dtype=m.dtype, device="meta")  # noqa: E731
    # One tensor of a list stands for all: PyTorch writes every one down for each overload in vain.
    real, named = map_call(args, kwargs, list, lambda each: each[:1] if _is_list(each) else each)
    with without_dispatch_modes(), DisableTorchFunction():
        real, named = map_call(real, named, Meta, make)
    try:
        name = resolve_overload(packet, real, named)
    except RuntimeError as error:
        fail(f"fs.propagate({packet})", "these arguments", f"no overload takes them: {error}",
             "check them with the same call on whole tensors")  # fmt: skip
    overload = getattr(packet, name)
    if packet is not op and (other := _misread(overload, real)):
        fail(f"fs.propagate({packet})", f"{other[0]!r}, which {overload} takes for its {other[1]}",
             "of functions of torch a number is no flag and no dtype",
             "a list of one in its place, or the argument by name, dim=0 say")  # fmt: skip
    return overload


_FLAGS = frozenset(("bool", "Optional[bool]", "ScalarType", "Optional[ScalarType]"))


def _misread(overload: OpOverload[..., Any], args: Sequence[Any]) -> tuple[int, str] | None:
    """A number that stands for a flag or a dtype, and its name there.

    TorchScript's choice of overloads allows it, Python's does not: `torch.var(x, 0)` names a dim.
    """
    for each, value in zip(schema_of(overload).arguments, args, strict=False):
        if type(value) is int and str(each.real_type) in _FLAGS:
            return value, each.name
    return None


def _is_list(value: list[Any]) -> bool:
    """Whether a list is one of tensors."""
    return bool(value) and all(isinstance(each, Meta) for each in value)


BUILTIN = ("builtin_function_or_method", "method_descriptor")


def _packet(op: Callable[..., Any]) -> OpOverloadPacket[..., Any] | None:
    """The operation that a builtin of PyTorch calls; None for functions written in Python."""
    # What a user writes is not remembered, for it would be kept alive. Python's own `sum` is none.
    owner = getattr(op, "__objclass__", None)
    home = (owner or op).__module__ or ""
    is_torchs = type(op).__name__ in BUILTIN and home.partition(".")[0] == "torch"
    return _packet_named(op.__name__) if is_torchs else None


@lru_cache(maxsize=4096)
def _packet_named(name: str) -> OpOverloadPacket[..., Any] | None:
    for each in (name, name.strip("_"), f"linalg_{name}"):
        packet = getattr(torch.ops.aten, each, None)
        if isinstance(packet, OpOverloadPacket):
            return packet
    return None


def call_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    """The call of an overload with `Meta` in the places of tensors, results included."""
    return call_and_tree(op, args, kwargs)[0]


def call_and_tree(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[OpCall, Any]:
    """The call, and the tree of its results with their numbers in the places of tensors.

    The operation runs on meta tensors once for arguments of one kind.
    """
    key = op, freeze(tuple(args)), freeze(dict(kwargs))
    try:
        hash(key)
    except TypeError:
        return _called(op, tuple(args), kwargs)
    return _called_before(*key)


@lru_cache(maxsize=16384)
def _called_before(op: Any, args: Any, kwargs: Any) -> tuple[OpCall, Any]:
    return _called(op, *unfreeze_call(args, kwargs))


def _called(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[OpCall, Any]:
    functional, kwargs = functional_of(op), read_arguments(op, kwargs)
    results, tree = results_of(functional, args, kwargs)
    operands = tuple(instances_in((*args, *kwargs.values()), Meta))
    return OpCall(functional, args, dict(kwargs), operands, results), tree


def rule_of(call: OpCall) -> Rule:
    """The rule of a call; raises `ShardingError` where there is none."""
    row = row_of(call.op)
    made = None if row is None else row.generator(call)
    if isinstance(made, list):
        made = rule_from_shardings(call, made)
    if made is None:
        name = str(call.op)
        what = "it has none" if row is None else "the one it has is not for these arguments"
        fail(f"fs.propagate({name})", ", ".join(f"{list(m.shape)}" for m in call.operands),
             f"an operation on layouts needs a sharding rule: {what}",
             f"fs.register_rule(torch.ops.{name})('bd,d->bd') gives it one, and reshard to whole "
             "tensors runs it as it is")  # fmt: skip
    return made
