"""`apply`: one operation on pairs; functions that are several run as `partition` lays them out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch

from fshard._torch.dynamo import skip_frames_below
from fshard._util.errors import fail
from fshard._util.text import below, bytes_text, columns, time_text
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Sharded, Spec
from fshard.layout.tree import is_pair, map_leaves
from fshard.ops.core.cache_keys import freeze, unfreeze_call
from fshard.ops.core.call import (
    READS_VALUE,
    StaticResult,
    fill_call,
    instances_in,
    map_call,
    name_of,
)
from fshard.ops.core.registry import decomposition_of, read_arguments
from fshard.ops.propagate.propagate import is_composite, local_strategy_for, strategy_for
from fshard.ops.strategy.local_call import rank_on_mesh, run_local
from fshard.ops.strategy.strategy import Strategy
from fshard.ops.trace.trace import refuse_autocast
from fshard.partition.call_signature import wants_grad
from fshard.partition.partition import Partition
from fshard.program.cost.model import Cost
from fshard.program.cost.topology import Topology
from fshard.run.autograd.replicate import spread
from fshard.run.execute import check_tuple

__all__ = ["apply"]

MODES = ("explicit", "auto")


@skip_frames_below("fs.apply plans with the sizes of its pairs: it is called outside of graphs")
def apply(
    op: Any, *args: Any, mode: str = "explicit", cost: Topology | None = None, **kwargs: Any
) -> Any:
    """Run one operation on pairs: pairs in, pairs out; differentiable.

    `op`, `args` and `kwargs` are as of `fs.propagate`, with pairs in the places of tensors; a
    plain tensor is one that every rank holds whole. Results are unreduced where the operation
    leaves them so. `mode="explicit"` runs what needs no communication, and raises
    `ShardingError` with the choices and their cost where all ways need some, as JAX's explicit
    sharding does; `mode="auto"` runs the programs of the best way. In-place and `out=` variants
    write nothing: they return what their functional form does.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=2)
    >>> x = fs.shard(torch.arange(8.0).reshape(4, 2), fs.Spec(mesh, fs.P("dp", "tp"), shape=(4, 2)))
    >>> w = fs.shard(torch.ones(2, 3), fs.Spec(mesh, fs.P("tp"), shape=(2, 3)))
    >>> y = apply(torch.matmul, x, w)
    >>> y.spec, fs.unshard(y)[:, 0]
    (f32[4@dp,3]{unreduced: tp}, tensor([ 1.,  5.,  9., 13.]))
    """
    if mode not in MODES:
        fail("fs.apply", f"mode={mode!r}", "mode is 'explicit' or 'auto'", "mode='auto'")
    refuse_autocast(f"fs.apply({name_of(op)})")
    args, kwargs, mesh, everywhere = _laid(op, args, read_arguments(op, kwargs))
    pairs = instances_in((*args, *kwargs.values()), Sharded)
    grad = torch.is_grad_enabled() and any(map(wants_grad, pairs))
    specs, named = map_call(args, kwargs, Sharded, lambda pair: pair.spec)
    if is_composite(op, specs, named):
        return _by_others(op, specs, named, pairs, mode, cost)
    strategy = strategy_for(op, specs, named, cost, grad)
    if not strategy.is_local and mode == "explicit":
        strategy = local_strategy_for(op, specs, named, cost, grad) or _all_send(strategy)
    elif not strategy.is_local and decomposition_of(strategy.call.op) is not None:
        return _by_others(strategy.call.op, specs, named, pairs, mode, cost)
    locals_ = [
        local if prog.src == prog.dst else prog(local)
        for (local, _), prog in zip(pairs, strategy.programs, strict=True)
    ]
    return _run(strategy, mesh, everywhere, locals_, args, kwargs)


def _laid(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Mesh, bool]:
    """The arguments with `Sharded` for every tensor, the mesh, and whether locals are all ranks'.

    A tensor that is in no pair is whole on every rank.
    """
    as_sharded = lambda each: Sharded(*each) if is_pair(each) else each  # noqa: E731
    given, named = map_leaves(as_sharded, list(args)), map_leaves(as_sharded, kwargs)
    pairs = instances_in((*given, *named.values()), Sharded)
    if not pairs:
        fail(f"fs.apply({name_of(op)})", "no pairs",
             "at least one argument is a pair (local, spec)",
             "fs.shard(tensor, spec) makes one")  # fmt: skip
    simulated = [not isinstance(local, torch.Tensor) for local, _ in pairs]
    if len(set(simulated)) > 1:
        fail(f"fs.apply({name_of(op)})", "locals of one rank and of all ranks",
             "all pairs hold one rank's local, or all hold the tuple of all shards",
             "make them the same way")  # fmt: skip
    mesh, everywhere = pairs[0].spec.mesh, simulated[0]

    def lay(each: Sharded | torch.Tensor) -> Sharded:
        if isinstance(each, torch.Tensor):
            spec = Spec(mesh, PartitionSpec(), shape=each.shape, dtype=each.dtype)
            return Sharded(spread(each, mesh.size) if everywhere else each, spec)
        local, spec = each
        return Sharded(check_tuple(local, spec.mesh, "fs.apply") if everywhere else local, spec)

    return *map_call(given, named, (Sharded, torch.Tensor), lay), mesh, everywhere


def _by_others(
    op: Any, specs: Sequence[Any], named: Mapping[str, Any], pairs: Sequence[tuple[Any, Spec]],
    mode: str, cost: Topology | None,
) -> Any:  # fmt: skip
    """What is several operations, or can be done by others, as `fs.partition` does it."""
    part = _partition(op, freeze(tuple(specs)), freeze(dict(named)), cost)
    made = part.trace(*pairs)
    progs = [prog for prog in made.programs if not prog.is_local]
    if mode == "explicit" and progs:
        ways = [(f"{prog.src} -> {prog.dst}", prog.cost(cost)) for prog in progs]
        fail(f"fs.apply({name_of(op)})", ", ".join(str(spec) for _, spec in pairs),
             f"it is made of operations that need communication:\n{_table(ways)}",
             'mode="auto" runs it; fs.partition(...).explain() shows each of them')  # fmt: skip
    return part(*pairs)


MOST_CALLS = 1024
"""Of every operation so many kinds of calls are remembered."""
_KNOWN: weakref.WeakKeyDictionary[Any, dict[Any, Partition]] = weakref.WeakKeyDictionary()


def _partition(op: Any, args: Any, kwargs: Any, cost: Topology | None) -> Partition:
    """An operation as a function of its tensors alone, remembered as long as the operation lives.

    A method lives as long as what it is one of; what holds no weak references is not remembered.
    """
    owner, function = (op.__self__, op.__func__) if isinstance(op, MethodType) else (op, None)
    key = function, args, kwargs, cost
    try:
        known = _KNOWN.setdefault(owner, {})
        found = known.get(key)
    except TypeError:
        return _alone(lambda: op, args, kwargs, cost)
    if found is None:
        if len(known) >= MOST_CALLS:
            known.clear()
        # Who calls it has the operation at hand; what is remembered must not keep it alive.
        there = weakref.WeakMethod(op) if function is not None else weakref.ref(op)
        found = known[key] = _alone(there, args, kwargs, cost)
    return found


def _alone(there: Callable[[], Any], args: Any, kwargs: Any, cost: Topology | None) -> Partition:
    given, named = unfreeze_call(args, kwargs)
    mesh = instances_in((*given, *named.values()), Spec)[0].mesh

    def run(*tensors: torch.Tensor) -> Any:
        placed, filled = fill_call(given, named, Spec, tensors)
        return there()(*placed, **filled)

    where = f"fs.apply({name_of(there())})"
    return Partition(run, mesh, None, None, None, cost, drop_writes=True, where=where)


def _all_send(best: Strategy) -> NoReturn:
    ways = []
    for each in (best, *best.alternatives):
        ins = ", ".join(map(_told, each.in_specs))
        outs = ", ".join(map(str, each.out_specs)) or "a number"
        ways.append((f"{ins} -> {outs}", each.cost))
    fail(f"fs.apply({name_of(best.op)})", ", ".join(map(str, best.sources)),
         f"all ways need communication (by time, later reducing included):\n{_table(ways)}",
         'mode="auto" runs the first; fs.reshard(pair, spec) before for another')  # fmt: skip


def _told(spec: Spec) -> str:
    """A spec without the axes that it is reduced on: from invariant that takes nothing."""
    p = spec.partition
    return str(spec.replace(partition=PartitionSpec._of(p.dims, p.unreduced_kinds, ())))


def _table(ways: Sequence[tuple[str, Cost]]) -> str:
    """Layouts, and what must be sent for them."""
    rows = [(each, f"{bytes_text(cost.bytes_received)} received, {time_text(cost.time)}")
            for each, cost in ways]  # fmt: skip
    return "\n".join(f"  {line}" for line in columns(rows) or below(rows))


def _run(
    strategy: Strategy,
    mesh: Mesh,
    everywhere: bool,
    locals_: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    if strategy.tree is READS_VALUE:
        # Its operands are the same on every rank, and so is the number.
        read = [each[0] for each in locals_] if everywhere else locals_
        placed, named = fill_call(args, kwargs, Sharded, read)
        return strategy.call.op(*placed, **named)

    def on(rank: int, mine: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        return run_local(strategy, rank, *fill_call(args, kwargs, Sharded, mine))

    if everywhere:
        shards = [on(rank, mine) for rank, mine in
                  zip(mesh.ranks, zip(*locals_, strict=True), strict=True)]  # fmt: skip
        found: list[Any] = [
            None if spec is None else tuple(each[at] for each in shards)
            for at, spec in enumerate(strategy.out_specs)
        ]
    else:
        found = list(on(rank_on_mesh(mesh, "fs.apply"), locals_))
    pairs = [
        None if spec is None else Sharded(local, spec)
        for local, spec in zip(found, strategy.out_specs, strict=True)
    ]
    return _as_returned(strategy.tree, pairs)


def _as_returned(tree: Any, pairs: Sequence[Any]) -> Any:
    """The results in the tree in which the operation returns them."""
    if isinstance(tree, StaticResult):
        return tree.value
    if isinstance(tree, int):
        return pairs[tree]
    made = [_as_returned(each, pairs) for each in tree]
    return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
