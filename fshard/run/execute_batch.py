"""`batch(tree)`: a batch is one differentiable operation on the locals of all its leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import compress
from typing import Any

import torch

from fshard._torch.dynamo import skip_frame
from fshard._torch.functorch import is_transformed
from fshard._util.errors import fail
from fshard._util.hooks import Hook
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten_like, paths, unflatten
from fshard.plan.batch.batch import Batch, map_leaves, run_batch_hook
from fshard.program.program import Program
from fshard.run.autograd.linear_function import (
    FinishAll,
    ProgramGroup,
    Tensors,
    apply_linear,
    apply_programs,
    is_differentiated,
    start_linear,
)
from fshard.run.execute import Pending, check_local_input, check_shards, empty_local
from fshard.run.interpreter import ranks_of
from fshard.run.transports.base import (
    Label,
    Transport,
    current_rank,
    current_transport,
    labelled,
    under,
)
from fshard.run.transports.divergence_report import call_line

__all__ = ["run_batch"]

WHERE = "the batch"


@run_batch_hook.set
@skip_frame(
    "a batch's call is no node of a graph: call it outside of what torch.compile traces"
)
def run_batch(batch: Batch, tree: Any, *, async_op: bool = False) -> Any:
    """Run a batch on a tree of tuples of shards (a simulation) or of this rank's locals.

    For ranks outside of a leaf's meshes the same holds as for a program alone.
    """
    parts = flatten_like(batch.programs, tree, ("batch.src", "locals"), WHERE)
    names = _paths(batch)
    there = [at for at, leaf in enumerate(batch.leaves) if leaf is not None]
    given, at = [parts[place] for place in there], [names[place] for place in there]
    progs = tuple(leaf for leaf in batch.leaves if leaf is not None)
    op = ProgramGroup(progs, ranks_of(*progs), batch.bucket_bytes)
    one = current_transport() is not None or any(isinstance(x, torch.Tensor) for x in given)
    finish = (_start_one if one else _start_everywhere)(op, given, at, async_op)

    def whole() -> Any:
        for place, y in zip(there, finish(), strict=True):
            parts[place] = y
        return unflatten(batch.structure, parts)

    return Pending(whole) if async_op else whole()


@lru_cache(maxsize=256)
def _paths(batch: Batch) -> list[str]:
    return paths(batch.programs, "")


def _start_one(op: ProgramGroup, given: list[Any], names: Sequence[str], ahead: bool) -> FinishAll:
    """Start a batch on this rank's locals."""
    transport = current_rank(op.mesh, WHERE)
    checks = [
        partial(_own_local, x, prog, transport) for x, prog in zip(given, op.progs, strict=True)
    ]
    xs = tuple(map_leaves(WHERE, names, checks))
    label = Label(WHERE, op.mesh, call_line() if ahead else "")

    def run(xs: Tensors) -> FinishAll:
        with labelled(label):
            finish = _start(op, [(x,) for x in xs], names, everywhere=False, ahead=ahead)
        return under(label, lambda: tuple(y for (y,) in finish()))

    ends = [(prog.src, prog.dst) for prog in op.progs]
    return run_typed_leaves_hook.call(names, xs, ends, run)


def _own_local(x: Any, prog: Program, transport: Transport) -> torch.Tensor:
    """What this rank gives for one leaf, checked."""
    x = empty_local(prog) if x is None else x
    if not isinstance(x, torch.Tensor):
        fail(WHERE, f"a local of type {type(x).__name__}",
             "on a rank of the source's mesh a local is a tensor",
             "give this rank's own")  # fmt: skip
    check_local_input(prog, x, transport, WHERE)
    return x


def _start_everywhere(
    op: ProgramGroup, given: list[Any], names: Sequence[str], ahead: bool
) -> Callable[[], list[Tensors]]:
    """Start a batch on all shards of a simulation."""
    progs, ranks = op.progs, op.mesh.ranks
    checks = [
        partial(check_shards, x, prog.src, WHERE) for x, prog in zip(given, progs, strict=True)
    ]
    xs = []
    for shards, prog in zip(map_leaves(WHERE, names, checks), progs, strict=True):
        held = dict(zip(prog.src.mesh.ranks, shards, strict=True))
        xs.append(tuple(held.get(rank, shards[0].new_empty(0)) for rank in ranks))
    finish = _start(op, xs, names, everywhere=True, ahead=ahead)

    def of_ranks() -> list[Tensors]:
        return [
            tuple(y for y, rank in zip(ys, ranks, strict=True) if rank in prog.dst.mesh)
            for ys, prog in zip(finish(), progs, strict=True)
        ]

    return of_ranks


def _start(
    op: ProgramGroup, xs: list[Tensors], names: Sequence[str], *, everywhere: bool, ahead: bool
) -> Callable[[], list[Tensors]]:
    """Start programs on the locals of this rank, or of all, differentiably.

    Maxima and minima that need a gradient have a rule of their own: they run after the others.
    """
    wanted = [is_differentiated(*shards) for shards in xs]
    later = [need and not prog.is_linear for need, prog in zip(wanted, op.progs, strict=True)]
    if ahead and any(later):
        at = later.index(True)
        prog, path = op.progs[at], f"at {names[at]}: " if names[at] else ""
        fail("batch(locals, async_op=True)", f"{path}a program with a maximum or minimum, "
             f"{prog.src} -> {prog.dst}, of a local that requires grad",
             "only linear programs run ahead with gradients",
             "run it without async_op, or detach() the local")  # fmt: skip
    others = [not each for each in later]
    n = op.mesh.size if everywhere else 1
    linear = op.with_programs(compress(op.progs, others))
    started = _start_linear(linear, list(compress(xs, others)), n, everywhere)

    def finish() -> list[Tensors]:
        first, second = iter(started()), iter(list[Tensors]())
        if any(later):
            extremes, theirs = op.with_programs(compress(op.progs, later)), _flat(compress(xs, later))
            second = iter(_by_leaf(apply_programs(extremes, theirs, everywhere), n))
        return [next(second) if each else next(first) for each in later]

    return finish


def _start_linear(
    op: ProgramGroup, xs: list[Tensors], n: int, everywhere: bool
) -> Callable[[], list[Tensors]]:
    """Start linear programs, and what needs no gradient: only the others are sent back."""
    if not xs:
        return list
    if is_transformed():  # what was launched now would be wrappers, not what they hold
        return lambda: _by_leaf(apply_linear(op, _flat(xs), everywhere), n)
    with torch.no_grad():
        launched: FinishAll
        if everywhere:
            launched = partial(tuple, op.run_on_shards(_flat(xs)))
        else:
            launched = start_linear(op, _flat(xs), WHERE)
    wanted = [is_differentiated(*shards) for shards in xs]

    def finish() -> list[Tensors]:
        with torch.no_grad():
            ys = _by_leaf(launched(), n)
        if any(wanted):
            some = op.with_programs(compress(op.progs, wanted))
            own, theirs = _flat(compress(xs, wanted)), _flat(compress(ys, wanted))
            outs = iter(_by_leaf(apply_linear(some, own, everywhere, lambda: theirs), n))
            ys = [next(outs) if need else y for y, need in zip(ys, wanted, strict=True)]
        return ys

    return finish


def _flat(xs: Iterable[Tensors]) -> Tensors:
    return tuple(x for shards in xs for x in shards)


def _by_leaf(ys: Tensors, n: int) -> list[Tensors]:
    return [ys[at : at + n] for at in range(0, len(ys), n)]


@Hook
def run_typed_leaves_hook(
    names: Sequence[str],
    xs: Tensors,
    ends: Sequence[tuple[Spec, Spec]],
    start: Callable[[Tensors], FinishAll],
) -> FinishAll:
    """Return `start(xs)` as `run_typed_hook` does; set by `spmd/tracking/typed_body.py`."""
    raise NotImplementedError
