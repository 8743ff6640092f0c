"""`fs.on_pairs` and `fs.apply`: one operation on pairs.

A function of several operations, or an operation without a rule, runs as `fs.partition` runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import MethodType
from typing import Any, NoReturn

import torch

from fshard._torch.modes import DispatchMode
from fshard._torch.operators import overload_or_self
from fshard._util.cache import CACHE_SIZE, BoundedDict
from fshard._util.errors import fail, raise_if
from fshard._util.text import below, bytes_text, columns, one_line, time_text
from fshard._util.tracebacks import hide_frames
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.sharded import Sharded
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten, is_pair, map_leaves, unflatten
from fshard.layout.validation import check_plain_tensor
from fshard.ops.core.cache_keys import freeze, unfreeze_call
from fshard.ops.core.call import (
    CREATED_BY,
    OP_ERRORS,
    READS_VALUE,
    ValueDependentShapeError,
    check_callable,
    fill_call,
    instances_in,
    map_call,
    name_of,
)
from fshard.ops.core.registry import has_other_forms, read_arguments
from fshard.ops.core.window_arguments import argument_problems
from fshard.ops.prng.keyed_block import KeyedBlock, keyed_block_hook
from fshard.ops.propagate.propagate import (
    MODES,
    check_mode,
    is_composite,
    local_strategy_for,
    parameters_of,
    strategy_for,
    take_options,
)
from fshard.ops.strategy.local_call import run_local
from fshard.ops.strategy.strategy import Strategy, has_unspecified_results
from fshard.ops.trace.trace import refuse_autocast
from fshard.partition.arguments import requires_grad
from fshard.partition.partition import Partition
from fshard.partition.repeated_calls import PLANS, RepeatedCall, as_pairs, remember
from fshard.plan.redistribute import redistribute
from fshard.program.cost.model import Cost
from fshard.program.cost.topology import Topology
from fshard.program.program_arguments import as_topology
from fshard.run.autograd.replicate import replicate_shards
from fshard.run.creation import rank_on_mesh
from fshard.run.execute import check_pair
from fshard.run.graphs.graph_node import graph_node
from fshard.spmd.tracking.torch_effects import Action, effect_of


def on_pairs(
    op: Any, /, *, mode: str = "explicit", topology: Topology | None = None
) -> Callable[..., Any]:
    """Transform an operation on tensors into one on pairs `(local, spec)`.

    All arguments of the returned function belong to `op`, also those named `mode` or `topology`.

    Args:
        op: a function of `torch`, a `torch.ops` overload or packet, or any function of tensors; a
            function of several operations runs as by `fs.partition`.
        mode: `"explicit"` runs only what needs no communication; `"auto"` runs the programs that
            the fastest strategy needs.
        topology: the topology that strategies are costed on; None is one node.

    Returns:
        A function of the arguments of `op` with a pair in the place of every sharded tensor; a
        plain tensor counts as replicated. At least one argument must be a pair. It returns
        `fs.Sharded` in the place of every tensor, unreduced where the operation leaves partial
        sums. It is differentiable: the gradient of an argument has the dual layout of the argument.
        Random operations draw by the key of the `fs.random.keyed` block around the call, the same
        values on all layouts.

    Raises:
        ShardingError: if `mode` is neither; and from the returned function, if all arguments
            lack a layout, if the operation lacks a rule, writes an argument or returns a property
            of a tensor's memory, and in explicit mode if every strategy needs communication (the
            error lists them with their costs).

    The explicit mode is that of JAX's explicit sharding.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(x=2)
    >>> x = fs.shard(torch.arange(4.0), fs.Spec(mesh, fs.P("x"), shape=(4,)))
    >>> total = fs.on_pairs(torch.sum)(x)
    >>> total.spec, fs.unshard(total)
    (f32[]{unreduced: x}, tensor(6.))
    >>> image = fs.shard(torch.ones(2, 3), fs.Spec(mesh, fs.P("x"), shape=(2, 3)))
    >>> fs.on_pairs(torch.nn.functional.pad, mode="auto")(image, (1, 1), mode="reflect").spec
    f32[2@x,5]
    """
    check_mode("fs.on_pairs", mode)
    check_callable(op, "fs.on_pairs")
    op = overload_or_self(op)
    if topology is not None:
        as_topology("fs.on_pairs", topology)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return _apply(op, mode, topology, *args, **kwargs)
        except Exception as error:
            problems = argument_problems(op, args, kwargs)
            if not problems:
                hide_frames(error)
                raise
        raise_if(f"fs.apply({name_of(op)})", problems)

    return call


@graph_node
def apply(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run one operation on pairs: `fs.on_pairs(op, mode=..., topology=...)(*args, **kwargs)`.

    Args:
        op: the operation, as for `fs.on_pairs`.
        *args: the arguments of the operation, with pairs in the places of sharded tensors.
        **kwargs: its keyword arguments. `mode=` and `topology=` are the options of `fs.on_pairs`
            unless the operation has a parameter of that name: `mode="reflect"` of
            `torch.nn.functional.pad` belongs to the operation, and `fs.on_pairs(F.pad,
            mode="auto")` takes the option. For an operation with `**kwargs` it must, too.

    Returns:
        The results of the operation, with `fs.Sharded` in the place of tensors.

    Raises:
        ShardingError: as `fs.on_pairs`.

    >>> import torch
    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=2)
    >>> x = fs.shard(torch.arange(8.0).reshape(4, 2), fs.Spec(mesh, fs.P("dp", "tp"), shape=(4, 2)))
    >>> w = fs.shard(torch.ones(2, 3), fs.Spec(mesh, fs.P("tp"), shape=(2, 3)))
    >>> y = fs.apply(torch.matmul, x, w)
    >>> y.spec, fs.unshard(y)[:, 0]
    (f32[4@dp,3]{unreduced: tp}, tensor([ 1.,  5.,  9., 13.]))
    """
    try:
        options = take_options("fs.apply", op, kwargs, ("mode", "topology"))
        check_mode("fs.apply", options.get("mode", "explicit"))
        if kwargs.get("mode") in MODES and str(getattr(op, "__module__", "")).startswith("torch"):
            fail(f"fs.apply({name_of(op)})", f"mode={kwargs['mode']!r}",
                 f"mode is a parameter of {name_of(op)} itself; the option must go to fs.on_pairs",
                 f"fs.on_pairs({name_of(op)}, mode={kwargs['mode']!r})(...)")  # fmt: skip
        return on_pairs(op, **options)(*args, **kwargs)
    except Exception as error:
        hide_frames(error)
        raise


def _auto(op: Any) -> str:
    """Return the expression that requests the auto mode of an operation."""
    if "mode" in parameters_of(op):
        return f'fs.on_pairs({name_of(op)}, mode="auto")'
    return 'mode="auto"'


@graph_node
def _apply(op: Any, mode: str, topology: Topology | None, /, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on pairs."""
    try:
        refuse_autocast(f"fs.apply({name_of(op)})")
        block = keyed_block_hook.call()
        repeated = RepeatedCall.of((op, mode, topology), args, kwargs) if block is None else None
        if repeated is not None and (plan := PLANS.get(repeated.key)) is not None:
            return plan.run(repeated)
        _refuse_writes(op, kwargs)
        placed, keywords, mesh, simulated = _as_pairs(op, args, kwargs)
        pairs = instances_in((*placed, *keywords.values()), Sharded)
        grad = torch.is_grad_enabled() and any(map(requires_grad, pairs))
        specs, named = map_call(placed, keywords, Sharded, lambda pair: pair.spec)
        if is_composite(op, specs, named) or (block and effect_of(op).action is Action.RANDOM):
            return _apply_partitioned(op, op, specs, named, pairs, mode, topology, block)
        # The layouts of pairs are intentions: a sharded one is not gathered to repeat work.
        kept = frozenset((i, axis) for i, _ in enumerate(pairs) for axis in mesh.axes)
        strategy = strategy_for(op, specs, named, topology, grad, kept=kept)
        if has_unspecified_results(strategy):
            return _apply_unsharded(op, mode, topology, mesh, simulated, placed, keywords)
        if not strategy.is_local and mode == "explicit":
            local = local_strategy_for(op, specs, named, topology, grad)
            strategy = local or _refuse_communication(op, strategy)
        elif not strategy.is_local and has_other_forms(strategy.call.op):
            call = strategy.call.op
            return _apply_partitioned(op, call, specs, named, pairs, mode, topology, None)
        if repeated is not None and strategy.tree is not READS_VALUE:
            remember(repeated, strategy, placed, keywords)
        locals_ = [
            prog(pair.local) if prog.steps else pair.local
            for pair, prog in zip(pairs, strategy.programs, strict=True)
        ]
        return _run(strategy, mesh, simulated, locals_, placed, keywords)
    except ValueDependentShapeError:
        pass
    return _apply_unsharded(op, mode, topology, mesh, simulated, placed, keywords)


def _as_pairs(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Mesh, bool]:
    """Return the arguments with `Sharded` for every tensor, the mesh, and True if simulated.

    A plain tensor becomes a replicated pair. In a simulation a local has the tensors of all ranks.
    """
    as_sharded = lambda x: Sharded(*x) if type(x) is tuple and is_pair(x) else x  # noqa: E731
    placed, named = map_leaves(as_sharded, list(args)), map_leaves(as_sharded, kwargs)
    pairs = instances_in((*placed, *named.values()), Sharded)
    where = f"fs.apply({name_of(op)})"
    for tensor in instances_in((*placed, *named.values()), torch.Tensor):
        check_plain_tensor(tensor, where)
    if not pairs:
        fail(where, "no pairs",
             "at least one argument must be a pair (local, spec)",
             CREATED_BY.get(name_of(op).partition(".")[0], "fs.shard(tensor, spec) makes one")
             )  # fmt: skip
    kinds = {isinstance(pair.local, torch.Tensor) for pair in pairs}
    if len(kinds) > 1:
        fail(where, "locals of one rank and of all ranks",
             "all pairs must hold one rank's local, or all the tuple of all shards",
             "make them the same way")  # fmt: skip
    mesh, simulated = pairs[0].spec.mesh, False in kinds

    def as_checked(arg: Sharded | torch.Tensor) -> Sharded:
        if isinstance(arg, torch.Tensor):
            spec = _replicated(mesh, arg.shape, arg.dtype)
            return Sharded(replicate_shards(arg, mesh.size) if simulated else arg, spec)
        check_pair(arg, where)
        return Sharded(tuple(arg.local) if simulated else arg.local, arg.spec)

    return (*map_call(placed, named, (Sharded, torch.Tensor), as_checked), mesh, simulated)


@lru_cache(maxsize=CACHE_SIZE)
def _replicated(mesh: Mesh, shape: torch.Size, dtype: torch.dtype) -> Spec:
    return Spec(mesh, PartitionSpec(), shape=shape, dtype=dtype)


# -- operations that are not functions of values ----------------------------------------------

WRITERS = (Action.WRITE, Action.WRITE_LISTS, Action.SAME)
"""Effects of operations that change an operand in place, or whether autograd tracks it."""


def _refuse_writes(op: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `ShardingError` for an in-place operation, and for an `out` argument."""
    outs = sorted(kwargs.keys() - read_arguments(op, kwargs).keys())
    if outs:
        _refuse_written(op, f"{outs[0]}=", f"{name_of(op)} without {outs[0]}=")
    action, full_name = effect_of(op).action, name_of(op).partition(".")[0]
    if action not in WRITERS and not (action is Action.RANDOM and full_name.endswith("_")):
        return
    name = full_name.rstrip("_")
    packet = getattr(torch.ops.aten, name, None)
    fix = "a function that returns a new tensor"
    _refuse_written(op, "its operand in place", f"torch.ops.aten.{name}" if packet else fix)


def _refuse_written(op: Any, given: str, fix: str) -> NoReturn:
    fail(f"fs.apply({name_of(op)})", f"an operation that writes {given}",
         "an operation on pairs must return new pairs, and change none",
         f"fs.apply of {fix}; or the operation on the tensors of pair.local")  # fmt: skip


def _refuse_host_results(op: Any, out: Any) -> None:
    """Raise `ShardingError` for a function of PyTorch that returns no tensor: an address, say."""
    origin = getattr(op, "__self__", None) if name_of(op) == "__get__" else op
    owner = getattr(origin, "__objclass__", origin)
    module = str(getattr(owner, "__module__", ""))
    if module.partition(".")[0] == "torch" and not instances_in(out, Sharded):
        name = name_of(origin)
        fail(f"fs.apply({name})", f"a result of type {type(out).__name__}",
             "an operation on pairs must return tensors, or be a query of shape or dtype that has "
             "a rule", "pair.shape and pair.dtype; or the operation on the tensors of pair.local, "
             "or on fs.unshard(pair)")  # fmt: skip


# -- functions of several operations ----------------------------------------------------------


def _apply_partitioned(
    op: Any, run: Any, specs: Sequence[Any], named: Mapping[str, Any],
    pairs: Sequence[Sharded], mode: str, topology: Topology | None, block: KeyedBlock | None,
) -> Any:  # fmt: skip
    """Run an operation without a rule, or of several operations, through `fs.partition` of `run`.

    Explicit mode refuses if that would communicate. In a keyed block the key and the number of the
    first draw are arguments of the partitioned function, and the number of draws is a result.
    """
    resume = None if block is None else block.resumed
    part = _partition(run, freeze(tuple(specs)), freeze(dict(named)), topology, resume)
    args: tuple[Any, ...] = tuple(pairs)
    if block is not None:
        first = torch.as_tensor(block.first + block.count, device=block.key.device)
        args = block.key, first, *pairs
    if mode == "explicit":
        progs = [prog for prog in part.trace(*args).programs if not prog.is_local]
        if progs:
            choices = [(f"{prog.src} -> {prog.dst}", prog.cost(topology)) for prog in progs]
            fail(f"fs.apply({name_of(op)})", ", ".join(str(spec) for _, spec in pairs),
                 f"its operations need communication:\n{_table(choices)}",
                 f"{_auto(op)} runs it; fs.partition(...).explain() shows each of "
                 "them")  # fmt: skip
    out = part(*args)
    if block is not None:
        out, count = out
        block.count += count
    _refuse_host_results(op, out)
    return out


Resume = Callable[[torch.Tensor, torch.Tensor], KeyedBlock]
_PARTITIONS: weakref.WeakKeyDictionary[Any, dict[Any, Partition]] = weakref.WeakKeyDictionary()


def _partition(
    op: Any, args: Any, kwargs: Any, topology: Topology | None, resume: Resume | None
) -> Partition:
    """Return an operation as a partitioned function of its tensors, cached while `op` lives.

    A method is cached while its instance lives; an object without weak references is not cached.
    """
    owner, function = (op.__self__, op.__func__) if isinstance(op, MethodType) else (op, None)
    key = function, args, kwargs, topology, resume
    try:
        cache = _PARTITIONS.setdefault(owner, BoundedDict())
        cached = cache.get(key)
    except TypeError:
        return _uncached_partition(lambda: op, args, kwargs, topology, resume)
    if cached is None:
        # The cache must not keep the operation alive; its caller does.
        reference = weakref.WeakMethod(op) if function is not None else weakref.ref(op)
        cached = _uncached_partition(reference, args, kwargs, topology, resume)
        cache[key] = cached
    return cached


def _uncached_partition(
    reference: Callable[[], Any],
    args: Any,
    kwargs: Any,
    topology: Topology | None,
    resume: Resume | None,
) -> Partition:
    placed, named = unfreeze_call(args, kwargs)
    mesh = instances_in((*placed, *named.values()), Spec)[0].mesh

    def run(*tensors: torch.Tensor) -> Any:
        filled, keywords = fill_call(placed, named, Spec, tensors)
        return reference()(*filled, **keywords)

    def run_keyed(key: torch.Tensor, first: torch.Tensor, *tensors: torch.Tensor) -> Any:
        assert resume is not None
        with resume(key, first) as block:
            out = run(*tensors)
        return out, block.count

    fn, where = run if resume is None else run_keyed, f"fs.apply({name_of(reference())})"
    return Partition(fn, mesh, None, None, None, topology, refuse_writes=True, where=where)


# -- shapes that depend on values -------------------------------------------------------------


def _apply_unsharded(
    op: Any, mode: str, topology: Topology | None, mesh: Mesh, simulated: bool,
    args: Sequence[Any], kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Run an operation without known result shapes on invariant operands, on every rank.

    The results are invariant, with the shapes that they have then.
    """
    pairs = instances_in((*args, *kwargs.values()), Sharded)
    progs = [redistribute(pair.spec, pair.spec.replace(partition=PartitionSpec()),
                          topology=topology) for pair in pairs]  # fmt: skip
    if mode == "explicit" and not all(prog.is_local for prog in progs):
        choices = [(f"{prog.src} -> {prog.dst}", prog.cost(topology)) for prog in progs]
        fail(f"fs.apply({name_of(op)})", ", ".join(str(pair.spec) for pair in pairs),
             f"a result's shape depends on values, so the operands must be unsharded:\n"
             f"{_table(choices)}", f"{_auto(op)} runs it")  # fmt: skip
    locals_ = [prog(pair.local) for pair, prog in zip(pairs, progs, strict=True)]
    ranks = zip(*locals_, strict=True) if simulated else [locals_]
    outs = []
    block = keyed_block_hook.call()
    for tensors in ranks:
        placed, named = fill_call(args, kwargs, Sharded, tensors)
        again = block.resumed(block.key, block.first + block.count) if block else nullcontext()
        with again as resumed, _RefuseDraws(op):
            outs.append(flatten(op(*placed, **named)))
    if block and resumed:
        block.count += resumed.count

    def as_pair(*leaves: Any) -> Any:
        first = leaves[0]
        if not isinstance(first, torch.Tensor):
            return first
        spec = Spec(mesh, PartitionSpec(), shape=first.shape, dtype=first.dtype)
        return Sharded(leaves if simulated else first, spec)

    results = [as_pair(*leaves) for leaves in zip(*(leaves for leaves, _ in outs), strict=True)]
    return unflatten(outs[0][1], results)


class _RefuseDraws(DispatchMode):
    """Mode that refuses draws from a generator, whose values would differ between ranks."""

    def __init__(self, op: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            fail(
                f"fs.apply({name_of(self.op)})",
                f"{func}, which draws random values",
                "draws must be keyed: every rank's generator draws other values",
                "with fs.random.keyed(key): around the call",
            )
        return func(*args, **(kwargs or {}))


# -- one operation ----------------------------------------------------------------------------


def _refuse_communication(op: Any, best: Strategy) -> NoReturn:
    """Raise `ShardingError` with the strategies of a call, all of which need communication."""
    choices = []
    for strategy in (best, *best.alternatives):
        ins = ", ".join(map(_without_reduced, strategy.in_specs))
        outs = ", ".join(map(str, strategy.out_specs)) or "a number"
        choices.append((f"{ins} -> {outs}", strategy.cost))
    fail(f"fs.apply({name_of(best.op)})", ", ".join(map(str, best.sources)),
         f"all strategies need communication (by time, later reducing included):\n"
         f"{_table(choices)}",
         f"{_auto(op)} runs the first; fs.reshard(pair, spec) before for another")  # fmt: skip


def _without_reduced(spec: Spec) -> str:
    """Return a spec as text without its reduced axes: to make an invariant one reduced is free."""
    p = spec.partition
    return str(spec.replace(partition=PartitionSpec._of(p.dims, p.unreduced_kinds, ())))


def _table(choices: Sequence[tuple[str, Cost]]) -> str:
    """Return lines of text with layouts and the cost of their communication."""
    rows = [
        (layouts, f"{bytes_text(cost.bytes_received)} received, {time_text(cost.time)}")
        for layouts, cost in choices
    ]
    return "\n".join(f"  {line}" for line in columns(rows) or below(rows))


def _run(
    strategy: Strategy, mesh: Mesh, simulated: bool, locals_: Sequence[Any], args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    """Run an operation by its strategy on locals that have its layouts."""
    if strategy.tree is READS_VALUE:
        # The operands are replicated, and so is the number that is read from them.
        tensors = [local[0] for local in locals_] if simulated else locals_
        placed, named = fill_call(args, kwargs, Sharded, tensors)
        try:
            return strategy.call.op(*placed, **named)
        except OP_ERRORS as error:
            fail(f"fs.apply({name_of(strategy.op)})", ", ".join(map(str, strategy.sources)),
                 f"it must run on tensors of these shapes: {one_line(error)}",
                 "check it on global tensors")  # fmt: skip

    def on_rank(rank: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return run_local(strategy, rank, *fill_call(args, kwargs, Sharded, tensors))

    if simulated:
        shards = [on_rank(rank, tensors) for rank, tensors in
                  zip(mesh.ranks, zip(*locals_, strict=True), strict=True)]  # fmt: skip
        results: list[Any] = [
            None if spec is None else tuple(shard[index] for shard in shards)
            for index, spec in enumerate(strategy.out_specs)
        ]
    else:
        results = list(on_rank(rank_on_mesh(mesh, "fs.apply"), locals_))
    return as_pairs(strategy, results)
