"""`fs.propagate`: the strategy of one operation call, from the specs of its operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from fshard._torch.dynamo import skip_frames_below
from fshard._torch.modes import DisableTorchFunction, without_dispatch_modes
from fshard._torch.operators import (
    OpOverload,
    OpOverloadPacket,
    overload_or_self,
    packet_of,
    resolve_overload,
    schema_of,
    torch_decomposition,
)
from fshard._util.cache import CACHE_SIZE
from fshard._util.errors import ShardingError, fail, raise_if
from fshard._util.text import plural
from fshard.layout.spec import Spec
from fshard.ops.core.cache_keys import freeze, unfreeze_call
from fshard.ops.core.call import (
    Meta,
    OpCall,
    check_callable,
    fill_call,
    instances_in,
    map_call,
    name_of,
)
from fshard.ops.core.registry import Row, functional_of, read_arguments, registry_version, row_of
from fshard.ops.core.rule import Rule
from fshard.ops.core.rule import rule as parse_rule
from fshard.ops.core.sharding_lists import rule_from_shardings
from fshard.ops.meta.result_metas import result_metas
from fshard.ops.propagate.choice_hints import NO_ARGUMENTS, Arguments, LayoutHint, OperandAxes
from fshard.ops.propagate.foreach import foreach_strategy, is_foreach
from fshard.ops.propagate.select import select_strategy
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.trace import trace
from fshard.program.cost.topology import Topology
from fshard.program.program_arguments import as_topology
from fshard.run.transports.divergence_report import raise_line

T = TypeVar("T")


def _cached_by_arguments(function: Callable[..., T]) -> Callable[..., T]:
    """Cache a function of an operation, its arguments and options, if all of them can be hashed."""

    @lru_cache(maxsize=CACHE_SIZE)
    def cached(state: Any, op: Any, args: Any, kwargs: Any, options: Any) -> T:
        return function(op, *unfreeze_call(args, kwargs), *options)

    def lookup(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *options: Any) -> T:
        state = registry_version(), torch.get_default_dtype()
        key = state, op, freeze(tuple(args)), freeze(dict(kwargs)), options
        try:
            hash(key)
        except TypeError:
            return function(op, tuple(args), kwargs, *options)
        return cached(*key)

    return lookup


@skip_frames_below("fs.propagate plans with the sizes of its specs: it is called outside of graphs")
def propagate(op: Any, /, *args: Any, **kwargs: Any) -> Strategy:
    """Choose the layouts in which an operation runs fastest on operands of given layouts.

    Nothing runs, and no program is planned before it is requested of the strategy. The fastest
    strategy takes the least time to redistribute the operands, to compute, and to reduce later
    what stays unreduced; between equals, the least to redistribute gradients, then the first in
    the rule. Every mesh axis is costed by itself, so that the work grows with the number of axes.

    A spec has integer sizes, so a symbolic size is read as the integer it stands for: a graph of
    `make_fx` or `torch.export` with symbolic sizes then holds for this shape alone, and
    `torch.compile` ends its graph before this function.

    Args:
        op: a `torch.ops` overload or packet, a function that `fs.register_rule` gave a rule, or
            any function of tensors that calls one operation.
        *args: the arguments of the call, with a `Spec` in the place of every tensor.
        **kwargs: the keyword arguments of the call, and two options, unless the operation has a
            parameter of that name: `topology=`, on which collectives are costed (None is one
            node), and `grad=True`, to choose only among strategies whose gradients are right.

    Returns:
        The fastest `Strategy`, with operands in the order of the operation that `op` calls; its
        `alternatives` are the next ones.

    Raises:
        ShardingError: if the operation has no rule, if the specs are on several meshes, if the
            operation refuses the arguments, or if `op` calls several operations.

    After GSPMD (arXiv 2105.04663) and the factors of Shardy.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=4)
    >>> x = fs.Spec(mesh, fs.P("dp", "tp"), shape=(8, 16))
    >>> w = fs.Spec(mesh, fs.P("tp"), shape=(16, 4))
    >>> fs.propagate(torch.matmul, x, w).out_specs
    (f32[8@dp,4]{unreduced: tp},)
    >>> fs.propagate(torch.nn.functional.relu, x).out_specs
    (f32[8@dp,16@tp],)
    """
    options = take_options("fs.propagate", op, kwargs, ("topology", "grad"))
    topology, grad = options.get("topology"), bool(options.get("grad", False))
    op = overload_or_self(op)
    if is_composite(op, args, kwargs):
        op, args, kwargs = _only_operation(op, args, kwargs)
    return strategy_for(op, args, kwargs, topology, grad)


def _only_operation(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the call of the one operation that a function of PyTorch's functions makes.

    Raises:
        ShardingError: for a function of several operations, or of none.
    """
    where, specs = f"fs.propagate({name_of(op)})", instances_in((*args, *kwargs.values()), Spec)

    def flat(*tensors: torch.Tensor) -> list[Any]:
        placed, named = fill_call(args, kwargs, Spec, tensors)
        return instances_in(op(*placed, **named), torch.Tensor)

    graph = trace(flat, [Meta.of(spec) for spec in specs], where).graph.graph
    operands = dict(zip(graph.find_nodes(op="placeholder"), specs, strict=True))
    calls = [node for node in graph.nodes if node.op == "call_function"
             and getattr(node.target, "__name__", "") != "getitem"]  # fmt: skip
    closure = graph.find_nodes(op="get_attr")
    if len(calls) != 1 or closure or any(x not in operands for x in calls[0].all_input_nodes):
        names = ", ".join(node.name for node in calls) or "none"
        fail(where, f"{plural(len(calls), 'operation')} ({names}) on "
             f"{plural(len(specs), 'spec')} and {plural(len(closure), 'tensor')} of a closure",
             "a strategy must be of one operation on specs",
             "fs.partition(fn, mesh=mesh).explain(*specs) shows the layouts of all; "
             f"fs.register_rule({name_of(op)})('bd,d->bd') makes it one")  # fmt: skip
    call = calls[0]
    return call.target, *map_call(call.args, call.kwargs, fx.Node, operands.__getitem__)


class _Options(NamedTuple):
    """Options of `propagate`, and the last five of `select_strategy`."""

    topology: Topology | None
    grad: bool
    local: bool = False
    hint: LayoutHint = None
    held: OperandAxes = frozenset()
    kept: OperandAxes = frozenset()
    arguments: Arguments = NO_ARGUMENTS


def strategy_for(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    topology: Topology | None,
    grad: bool,
    hint: LayoutHint = None,
    held: OperandAxes = frozenset(),
    kept: OperandAxes = frozenset(),
    arguments: Arguments = NO_ARGUMENTS,
) -> Strategy:
    """Return the strategy of `propagate`, with the last four of `select_strategy`."""
    options = _Options(topology, grad, hint=hint, held=held, kept=kept, arguments=arguments)
    strategy = _strategy(op, args, kwargs, options)
    assert strategy is not None, f"{op}: all operands replicated is always possible"
    return strategy


def local_strategy_for(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], topology: Topology | None, grad: bool
) -> Strategy | None:
    """Return the fastest strategy that sends nothing, None if all send."""
    return _strategy(op, args, kwargs, _Options(topology, grad, local=True))


@_cached_by_arguments
def _strategy(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: _Options
) -> Strategy | None:
    kwargs = read_arguments(op, kwargs)
    specs = instances_in((*args, *kwargs.values()), Spec)
    meshes = [spec.mesh for spec in specs]
    topology = as_topology("fs.propagate", options.topology, meshes=meshes)
    if not specs:
        fail(f"fs.propagate({name_of(op)})", "no specs",
             "a spec stands in the place of every tensor",
             "fs.Spec(mesh, P(...), shape=..., dtype=...)")  # fmt: skip
    _check_mesh(op, specs)
    metas, named = map_call(args, kwargs, Spec, Meta.of)
    overload = overload_of(op, metas, named)
    if is_foreach(functional := functional_of(overload)):
        none: OperandAxes = frozenset()
        unhinted = options._replace(hint=None, held=none, kept=none, arguments=NO_ARGUMENTS)
        strategy_of = lambda op, args, kwargs: _strategy(op, args, kwargs, unhinted)  # noqa: E731
        return foreach_strategy(functional, args, kwargs, specs, strategy_of, grad=options.grad)
    call, tree = call_and_tree(overload, metas, named)
    return select_strategy(call, tree, rule_of(call), specs, topology, grad=options.grad,
                           local=options.local, hint=options.hint, held=options.held,
                           kept=options.kept, arguments=options.arguments)  # fmt: skip


def _check_mesh(op: Any, specs: Sequence[Spec]) -> None:
    meshes = dict.fromkeys(spec.mesh for spec in specs)
    if len(meshes) > 1:
        fail(f"fs.propagate({name_of(op)})", f"operands on {' and '.join(map(str, meshes))}",
             "an operation runs on one mesh",
             "move one of them there first: fs.reshard(pair, spec)")  # fmt: skip


# -- the call and its rule ----------------------------------------------------------------


def is_composite(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a function of several operations, or one without a rule that decomposes."""
    if row_of(op) is not None:
        return False
    if not isinstance(op, OpOverload) and packet_of(op) is None:
        return callable(op)
    return _is_composite_call(op, args, kwargs)


@_cached_by_arguments
def _is_composite_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    metas, named = map_call(args, kwargs, Spec, Meta.of)
    try:
        overload = overload_of(op, metas, named)
    except ShardingError:
        # Functions of `torch` take an int in the place of a list of one: they are traced.
        return not isinstance(op, OpOverload | OpOverloadPacket)
    return row_of(overload) is None and torch_decomposition(functional_of(overload)) is not None


def overload_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the overload that a call of `op` runs, or `op` if it has a rule of its own.

    Args:
        op: an overload, a packet, or a function of `torch` that calls one.
        args: the arguments, with `Meta` in the places of tensors.
        kwargs: the keyword arguments, likewise.

    Raises:
        ShardingError: for a function that is not an operation, for arguments that no overload
            takes, and for an int that would match a bool or dtype parameter.
    """
    if row_of(op) is not None or isinstance(op, OpOverload):
        return op
    packet = packet_of(op)
    if packet is None:
        fail(f"fs.propagate({name_of(op)})", "a function that is not an operation of PyTorch",
             "a function that runs as one operation must have a sharding rule",
             f"fs.register_rule({name_of(op)})('bd,d->bd') gives it one; "
             "fs.partition lays out the operations of a function")  # fmt: skip
    make = lambda m: torch.empty(m.shape, dtype=m.dtype, device="meta")  # noqa: E731
    # One tensor stands for a list of them: PyTorch would print all of them for every overload.
    shorten = lambda arg: arg[:1] if _is_tensor_list(arg) else arg  # noqa: E731
    tensors, named = map_call(args, kwargs, list, shorten)
    with without_dispatch_modes(), DisableTorchFunction():
        tensors, named = map_call(tensors, named, Meta, make)
    try:
        name = resolve_overload(packet, tensors, named)
    except RuntimeError as error:
        fail(f"fs.propagate({packet})", "these arguments", f"no overload takes them: {error}",
             "check them with the same call on global tensors")  # fmt: skip
    overload = getattr(packet, name)
    if packet is not op and (misread := _misread_int(overload, tensors)):
        value, parameter = misread
        fail(f"fs.propagate({packet})", f"{value!r} for {parameter!r} of {overload}",
             "this int would match a bool or dtype parameter; an int must name a dim here",
             "a list of one in its place, or a keyword: dim=0")  # fmt: skip
    return overload


_FLAGS = frozenset(("bool", "Optional[bool]", "ScalarType", "Optional[ScalarType]"))


def _misread_int(overload: OpOverload[..., Any], args: Sequence[Any]) -> tuple[int, str] | None:
    """Return an int that would match a bool or dtype parameter, and the name of the parameter.

    The overload resolution of TorchScript allows it, Python does not: `torch.var(x, 0)`
    names a dim.
    """
    for parameter, value in zip(schema_of(overload).arguments, args, strict=False):
        if type(value) is int and str(parameter.real_type) in _FLAGS:
            return value, parameter.name
    return None


def _is_tensor_list(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, Meta) for item in value)


def parameters_of(op: Any) -> frozenset[str]:
    """Return the names of an operation's own parameters.

    >>> sorted(parameters_of(torch.nn.functional.pad))
    ['input', 'mode', 'pad', 'value']
    """
    packet = packet_of(op)
    if packet is not None:
        return _packet_parameters(packet)
    if isinstance(op, OpOverload):
        return frozenset(parameter.name for parameter in schema_of(op).arguments)
    function = op.forward if isinstance(op, torch.nn.Module) else op
    code = None if hasattr(function, "__wrapped__") else getattr(function, "__code__", None)
    if code is not None:
        return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset()


MODES = ("explicit", "auto")


def check_mode(where: str, mode: str) -> None:
    """Raise `ShardingError` unless `mode` is one of those of `fs.apply`."""
    if mode not in MODES:
        fail(where, f"mode={mode!r}", "mode must be 'explicit' or 'auto'", "mode='auto'")


def take_options(
    where: str, op: Any, kwargs: dict[str, Any], names: Sequence[str]
) -> dict[str, Any]:
    """Remove the options `names` from `kwargs` and return them; the operation's own stay.

    Raises:
        ShardingError: if `op` is not callable, or takes any keyword, so that the option could also
            be its argument.
    """
    if not callable(op):
        check_callable(op, where)
    named = [name for name in names if name in kwargs and name not in parameters_of(op)]
    if named and _takes_any_keyword(op):
        name = named[0]
        fail(f"{where}({name_of(op)})", f"{name}={kwargs[name]!r}",
             f"{name_of(op)} takes any keyword, so {name} must be said to be an option or its own",
             f"fs.on_pairs({name_of(op)}, {name}=...)(...) for the option, "
             f"functools.partial({name_of(op)}, {name}=...) for the argument")  # fmt: skip
    return {name: kwargs.pop(name) for name in named}


def _takes_any_keyword(op: Any) -> bool:
    """Return True for a function with `**kwargs` that is not PyTorch's."""
    function = op.forward if isinstance(op, torch.nn.Module) else op
    if str(getattr(function, "__module__", "")).partition(".")[0] == "torch":
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


@lru_cache(maxsize=CACHE_SIZE)
def _packet_parameters(packet: OpOverloadPacket[..., Any]) -> frozenset[str]:
    overloads = (getattr(packet, name) for name in packet.overloads())
    return frozenset(p.name for overload in overloads for p in schema_of(overload).arguments)


@_cached_by_arguments
def call_and_tree(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[OpCall, Any]:
    """Return the call of an overload, and the tree of its results with indices for tensors."""
    functional, kwargs = functional_of(op), read_arguments(op, kwargs)
    results, tree = result_metas(functional, args, kwargs)
    operands = tuple(instances_in((*args, *kwargs.values()), Meta))
    return OpCall(functional, args, dict(kwargs), operands, results), tree


def rule_of(call: OpCall) -> Rule:
    """Return the rule of a call; raise `ShardingError` if there is none."""
    row = row_of(call.op)
    rule = None if row is None else _generated(row, call)
    if rule is None:
        name = str(call.op)
        reason = "it has none" if row is None else "the one it has is not for these arguments"
        fail(f"fs.propagate({name})", ", ".join(f"{list(m.shape)}" for m in call.operands),
             f"an operation on layouts must have a sharding rule: {reason}",
             f"fs.register_rule(torch.ops.{name})('bd,d->bd') gives it one; on replicated "
             "tensors, fs.unshard(pair), it runs as it is")  # fmt: skip
    return rule


def _generated(row: Row, call: OpCall) -> Rule | None:
    """Return the rule that a row's generator makes for a call, None if it has none for it."""
    where = f"fs.register_rule({name_of(row.op)}): its generator"
    try:
        rule = row.generator(call)
        rule = parse_rule(rule) if isinstance(rule, str) else rule
    except ShardingError as error:
        if not row.is_builtin:
            raise_if(where, error.problems)
        raise
    except Exception as error:  # noqa: BLE001 - it is the user's function that ran
        fail(f"{where}{raise_line(error.__traceback__)}", f"{type(error).__name__}: {error}",
             "a generator must take one argument, an OpCall, and return a rule for it",
             "call.args are the operation's arguments, x.shape and x.dtype those of a tensor x; "
             "return None for a call without a rule")  # fmt: skip
    match rule:
        case Rule() | None:
            return rule
        case list():
            return rule_from_shardings(call, rule)
    fail(where, f"{type(rule).__name__} {rule!r}",
         "the result must be a rule's text, an fs.Rule, a list of shardings, or None",
         'return "bd,d->bd", say')  # fmt: skip
