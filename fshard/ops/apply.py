"""`apply`: one operation on pairs; functions that are several run as `partition` lays them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch

from fshard.errors import fail
from fshard.lines import below, columns
from fshard.mesh import Mesh
from fshard.ops.call import READ, Plain, fill_call, name_of, parts_of
from fshard.ops.keys import frozen, thawed_call
from fshard.ops.local import rank_here, run_local
from fshard.ops.partition import Partition, wants_grad
from fshard.ops.propagate import is_several, local_strategy_for, strategy_for
from fshard.ops.registry import decomposition_of, read_by
from fshard.ops.strategy import Strategy
from fshard.ops.trace import refuse_autocast
from fshard.partition_spec import PartitionSpec
from fshard.program.cost import Cost
from fshard.program.topology import Topology
from fshard.run.execute import check_tuple
from fshard.run.spreading import spread
from fshard.spec import Sharded, Spec
from fshard.tree import is_pair
from fshard.units import bytes_text, time_text

__all__ = ["apply"]

MODES = ("explicit", "auto")


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
    kwargs = read_by(op, kwargs)
    refuse_autocast(f"fs.apply({name_of(op)})")
    given = [pair for each in (*args, *kwargs.values()) for pair in _operands(each)]
    mesh, everywhere = _mesh(op, given)
    pairs = [_as_pair(each, mesh, everywhere) for each in given]
    grad = torch.is_grad_enabled() and any(wants_grad(local) for local, _ in pairs)
    left = iter(pairs)
    specs = [_map(each, lambda _: next(left)[1]) for each in args]
    named = {key: _map(each, lambda _: next(left)[1]) for key, each in kwargs.items()}
    if is_several(op, specs, named):
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


def _by_others(
    op: Any, specs: Sequence[Any], named: Mapping[str, Any], pairs: Sequence[tuple[Any, Spec]],
    mode: str, cost: Topology | None,
) -> Any:  # fmt: skip
    """What is several operations, or can be done by others, as `fs.partition` does it."""
    part = _partition(op, frozen(tuple(specs)), frozen(dict(named)), cost)
    made = part.trace(*pairs)
    progs = [prog for prog in made.programs if not prog.is_local]
    if mode == "explicit" and progs:
        ways = [(f"{prog.src} -> {prog.dst}", prog.cost(cost)) for prog in progs]
        fail(f"fs.apply({name_of(op)})", ", ".join(str(spec) for _, spec in pairs),
             f"it is made of operations that need communication:\n{_table(ways)}",
             'mode="auto" runs it; fs.partition(...).explain() shows each of them')  # fmt: skip
    return part(*pairs)


@lru_cache(maxsize=1024)
def _partition(op: Any, args: Any, kwargs: Any, cost: Topology | None) -> Partition:
    """An operation as a function of its tensors alone."""
    given, named = thawed_call(args, kwargs)
    mesh = parts_of((*given, *named.values()), Spec)[0].mesh

    def run(*tensors: torch.Tensor) -> Any:
        placed, filled = fill_call(given, named, Spec, tensors)
        return op(*placed, **filled)

    return Partition(run, mesh, None, None, None, cost, drop_writes=True)


def _operands(value: Any) -> list[Any]:
    """The pairs and tensors in an argument, in order."""
    if is_pair(value) or isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for inner in value for each in _operands(inner)]
    return []


def _map(value: Any, change: Any) -> Any:
    if is_pair(value) or isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_map(each, change) for each in value)
    return value


def _mesh(op: Any, given: Sequence[Any]) -> tuple[Mesh, bool]:
    """The mesh of the pairs, and whether their locals are all ranks' shards."""
    pairs = [each for each in given if is_pair(each)]
    if not pairs:
        fail(f"fs.apply({name_of(op)})", "no pairs",
             "at least one argument is a pair (local, spec)",
             "fs.shard(tensor, spec) makes one")  # fmt: skip
    simulated = [not isinstance(local, torch.Tensor) for local, _ in pairs]
    if len(set(simulated)) > 1:
        fail(f"fs.apply({name_of(op)})", "locals of one rank and of all ranks",
             "all pairs hold one rank's local, or all hold the tuple of all shards",
             "make them the same way")  # fmt: skip
    return pairs[0][1].mesh, simulated[0]


def _as_pair(given: Any, mesh: Mesh, everywhere: bool) -> tuple[Any, Spec]:
    if is_pair(given):
        local, spec = given
        return (check_tuple(local, spec.mesh, "fs.apply") if everywhere else local), spec
    spec = Spec(mesh, PartitionSpec(), shape=given.shape, dtype=given.dtype)
    return (spread(given, mesh.size) if everywhere else given), spec


def _all_send(best: Strategy) -> NoReturn:
    ways = []
    for each in (best, *best.alternatives):
        ins, outs = ", ".join(map(_told, each.in_specs)), ", ".join(map(str, each.out_specs))
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
    if strategy.tree is READ:
        # Its operands are the same on every rank, and so is the number.
        read = iter([each[0] for each in locals_] if everywhere else locals_)
        placed = [_map(each, lambda _: next(read)) for each in args]
        named = {key: _map(each, lambda _: next(read)) for key, each in kwargs.items()}
        return strategy.call.op(*placed, **named)

    def on(rank: int, mine: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        left = iter(mine)
        placed = [_map(each, lambda _: next(left)) for each in args]
        named = {key: _map(v, lambda _: next(left)) for key, v in kwargs.items()}
        return run_local(strategy, rank, placed, named)

    if everywhere:
        shards = [on(rank, mine) for rank, mine in
                  zip(mesh.ranks, zip(*locals_, strict=True), strict=True)]  # fmt: skip
        found: list[Any] = [
            None if spec is None else tuple(each[at] for each in shards)
            for at, spec in enumerate(strategy.out_specs)
        ]
    else:
        found = list(on(rank_here(mesh, "fs.apply"), locals_))
    pairs = [
        None if spec is None else Sharded(local, spec)
        for local, spec in zip(found, strategy.out_specs, strict=True)
    ]
    return _as_returned(strategy.tree, pairs)


def _as_returned(tree: Any, pairs: Sequence[Any]) -> Any:
    """The results in the tree in which the operation returns them."""
    if isinstance(tree, Plain):
        return tree.value
    if isinstance(tree, int):
        return pairs[tree]
    made = [_as_returned(each, pairs) for each in tree]
    return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
