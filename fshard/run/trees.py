"""`batch(tree)`: a batch is one differentiable operation on the locals of all its leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from typing import Any

import torch

from fshard import hooks
from fshard.errors import fail
from fshard.mesh import Mesh
from fshard.plan.batch import Batch, of_leaves
from fshard.program.program import Program
from fshard.run.autograd import (
    FinishAll,
    Run,
    Shards,
    apply_linear,
    apply_program,
    is_differentiated,
    is_transformed,
    start_linear,
)
from fshard.run.buckets import launch_batch
from fshard.run.execute import Pending, check_given, check_shards, nothing_of
from fshard.run.fingerprint import call_line
from fshard.run.interpreter import ranks_of
from fshard.run.simulate import run_ranks, run_together
from fshard.run.transport import (
    Label,
    Transport,
    current_rank,
    current_transport,
    labelled,
    under,
)
from fshard.tree import matching, paths, unflatten

__all__ = ["Together", "run_batch"]

WHERE = "the batch"


# -- an operation ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Together:
    """A batch without empty leaves as one linear operation of the ranks of a mesh.

    A `Linear`, and an `Everywhere`.
    """

    batch: Batch
    mesh: Mesh

    @property
    def T(self) -> Together:  # noqa: N802
        """The transposed batch."""
        return Together(self.batch.T, self.mesh)

    def wider(self, n: int) -> Together:
        """The batch with one more dim in every leaf, which no step touches."""
        return Together(_wider(self.batch, n), self.mesh)

    def launch(self, transport: Transport, xs: Shards) -> FinishAll:
        """Start the programs on this rank's locals."""
        return launch_batch(self.batch, transport, xs)

    def everywhere(self, xs: Shards) -> Shards:
        """Run the programs on the locals of all ranks: of each leaf in turn those in rank order."""
        batch, n = self.batch, self.mesh.size
        values = [xs[place::n] for place in range(n)]
        start: Any = partial(launch_batch, batch)
        outs: list[Any]
        if len(batch.buckets) == 1 and len(batch.rounds(batch.buckets[0])) < 2:
            # Nobody waits before all is launched: no threads are needed.
            outs = run_together(self.mesh, start, values)
        else:
            outs = run_ranks(self.mesh, lambda rank, own: start(rank, own)(), values)
        return tuple(y for ys in zip(*outs, strict=True) for y in ys)


@lru_cache(maxsize=256)
def _wider(batch: Batch, n: int) -> Batch:
    progs = tuple(leaf for leaf in batch.leaves if leaf is not None)
    return Batch(list(Run(progs).wider(n).progs), bucket_bytes=batch.bucket_bytes)


@lru_cache(maxsize=256)
def _mesh(batch: Batch) -> Mesh:
    """The mesh of the leaves' ranks; of several that which has all, or one in their order."""
    meshes = dict.fromkeys(ranks_of(leaf) for leaf in batch.leaves if leaf)
    ranks = sorted({rank for mesh in meshes for rank in mesh.ranks})
    whole = next((mesh for mesh in meshes if mesh.size == len(ranks)), None)
    return whole or (Mesh({"rank": len(ranks)}, devices=ranks) if ranks else Mesh())


# -- a tree of locals -----------------------------------------------------------------


@hooks.register("run_batch")
def run_batch(batch: Batch, tree: Any, *, async_op: bool = False) -> Any:
    """Run a batch on a tree of tuples of shards (a simulation) or of this rank's locals.

    For ranks outside of a leaf's meshes the same holds as for a program alone.
    """
    parts = matching(batch.programs, tree, ("batch.src", "locals"), WHERE)
    names = paths(batch.programs, "")
    there = [at for at, leaf in enumerate(batch.leaves) if leaf is not None]
    given, at = [parts[place] for place in there], [names[place] for place in there]
    own = batch.only([leaf is not None for leaf in batch.leaves])
    one = current_transport() is not None or any(isinstance(x, torch.Tensor) for x in given)
    finish = (_start_one if one else _start_everywhere)(own, given, at, async_op)

    def whole() -> Any:
        for place, y in zip(there, finish(), strict=True):
            parts[place] = y
        return unflatten(batch.structure, parts)

    return Pending(whole) if async_op else whole()


# What `torch.compiler.disable` sets: to import that takes a second.
run_batch._torchdynamo_disable = True  # type: ignore[attr-defined]
run_batch._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a batch's call is no node of a graph: call it outside of what torch.compile traces"
)


def _start_one(batch: Batch, given: list[Any], names: Sequence[str], ahead: bool) -> FinishAll:
    """Start a batch on this rank's locals."""
    mesh, progs = _mesh(batch), _programs(batch)
    transport = current_rank(mesh, WHERE)
    checks = [partial(_own_local, x, prog, transport) for x, prog in zip(given, progs, strict=True)]
    xs = tuple(of_leaves(WHERE, names, checks))
    label = Label(WHERE, mesh, call_line() if ahead else "")

    def run(xs: Shards) -> FinishAll:
        with labelled(label):
            finish = _start(batch, mesh, [(x,) for x in xs], names, everywhere=False, ahead=ahead)
        return under(label, lambda: tuple(y for (y,) in finish()))

    ends = [(prog.src, prog.dst) for prog in progs]
    started: FinishAll = hooks.call("typed_leaves", names, xs, ends, run)
    return started


def _own_local(x: Any, prog: Program, transport: Transport) -> torch.Tensor:
    """What this rank gives for one leaf, checked."""
    x = nothing_of(prog) if x is None else x
    if not isinstance(x, torch.Tensor):
        fail(WHERE, f"a local of type {type(x).__name__}",
             "on a rank of the source's mesh a local is a tensor",
             "give this rank's own")  # fmt: skip
    check_given(prog, x, transport, WHERE)
    return x


def _start_everywhere(
    batch: Batch, given: list[Any], names: Sequence[str], ahead: bool
) -> Callable[[], list[Shards]]:
    """Start a batch on all shards of a simulation."""
    mesh, progs = _mesh(batch), _programs(batch)
    checks = [
        partial(check_shards, x, prog.src, WHERE) for x, prog in zip(given, progs, strict=True)
    ]
    xs = []
    for shards, prog in zip(of_leaves(WHERE, names, checks), progs, strict=True):
        held = dict(zip(prog.src.mesh.ranks, shards, strict=True))
        xs.append(tuple(held.get(rank, shards[0].new_empty(0)) for rank in mesh.ranks))
    finish = _start(batch, mesh, xs, names, everywhere=True, ahead=ahead)

    def of_ranks() -> list[Shards]:
        return [
            tuple(y for y, rank in zip(ys, mesh.ranks, strict=True) if rank in prog.dst.mesh)
            for ys, prog in zip(finish(), progs, strict=True)
        ]

    return of_ranks


def _programs(batch: Batch) -> tuple[Program, ...]:
    return tuple(leaf for leaf in batch.leaves if leaf is not None)


def _start(
    batch: Batch,
    mesh: Mesh,
    xs: list[Shards],
    names: Sequence[str],
    *,
    everywhere: bool,
    ahead: bool,
) -> Callable[[], list[Shards]]:
    """Start a batch on the locals of this rank, or of all of the mesh, differentiably.

    Maxima and minima that need a gradient have a rule of their own: they run after the others.
    """
    progs = _programs(batch)
    wanted = [any(map(is_differentiated, shards)) for shards in xs]
    alone = [need and not prog.is_linear for need, prog in zip(wanted, progs, strict=True)]
    if ahead and any(alone):
        at = alone.index(True)
        fail("batch(locals, async_op=True)", f"{f'at {names[at]}: ' if names[at] else ''}a program "
             f"with a maximum or minimum, {progs[at].src} -> {progs[at].dst}, of a local that "
             "requires grad", "only linear programs run ahead with gradients",
             "run it without async_op, or detach() the local")  # fmt: skip
    others = [not each for each in alone]
    op = Together(batch.only(others), mesh)
    together = _start_linear(
        op, list(compress(xs, others)), list(compress(wanted, others)), everywhere
    )

    def finish() -> list[Shards]:
        done = iter(together())
        return [
            _run_alone(prog, shards, mesh, everywhere) if each else next(done)
            for prog, shards, each in zip(progs, xs, alone, strict=True)
        ]

    return finish


def _run_alone(prog: Program, shards: Shards, mesh: Mesh, everywhere: bool) -> Shards:
    """Run one program on locals of the ranks of a mesh that has its ranks and perhaps others."""
    if not everywhere:
        return apply_program(prog, shards, everywhere=False)
    own = [rank in ranks_of(prog) for rank in mesh.ranks]
    done = iter(apply_program(prog, tuple(compress(shards, own)), everywhere=True))
    return tuple(next(done) if each else x for each, x in zip(own, shards, strict=True))


def _start_linear(
    op: Together, xs: list[Shards], wanted: Sequence[bool], everywhere: bool
) -> Callable[[], list[Shards]]:
    """Start linear programs, and what needs no gradient: only the others are sent back."""
    n = op.mesh.size if everywhere else 1
    if not xs:
        return list
    if is_transformed():  # what was launched now would be wrappers, not what they hold
        return lambda: _by_leaf(apply_linear(op, _flat(xs), everywhere), n)
    with torch.no_grad():
        launched: FinishAll
        if everywhere:
            launched = partial(tuple, op.everywhere(_flat(xs)))
        else:
            launched = start_linear(op, _flat(xs), WHERE)

    def finish() -> list[Shards]:
        with torch.no_grad():
            ys = _by_leaf(launched(), n)
        if any(wanted):
            some = Together(op.batch.only(wanted), op.mesh)
            own, theirs = (_flat(list(compress(each, wanted))) for each in (xs, ys))
            outs = iter(_by_leaf(apply_linear(some, own, everywhere, lambda: theirs), n))
            ys = [next(outs) if need else y for y, need in zip(ys, wanted, strict=True)]
        return ys

    return finish


def _flat(xs: Sequence[Shards]) -> Shards:
    return tuple(x for shards in xs for x in shards)


def _by_leaf(ys: Shards, n: int) -> list[Shards]:
    return [ys[at : at + n] for at in range(0, len(ys), n)]
