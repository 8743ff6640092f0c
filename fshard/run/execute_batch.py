"""Execution of `batch(tree)`: one differentiable operation on the locals of all leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from itertools import compress
from typing import Any

import torch

from fshard._torch.functorch import is_transformed
from fshard._util.cache import CACHE_SIZE
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
    launch_linear,
)
from fshard.run.execute import (
    Pending,
    check_local_input,
    check_shards,
    compare_layouts,
    current_tracker_hook,
    empty_local,
)
from fshard.run.interpreter import program_text, ranks_of
from fshard.run.transports.base import (
    Label,
    Transport,
    current_rank,
    current_transport,
    labelled,
    with_label,
)
from fshard.run.transports.divergence_report import deferred_label
from fshard.run.transports.shape_only import is_abstract

WHERE = "the batch"
LeafTensors = list[Tensors]
"""For each leaf its local, or the shards of all ranks."""


@run_batch_hook.set
def run_batch(batch: Batch, tree: Any, *, async_op: bool = False) -> Any:
    """Run a batch on a tree of this rank's locals, or of tuples of the shards of all ranks.

    For ranks outside of a leaf's meshes see `run_program`.
    """
    values = flatten_like(batch.programs, tree, ("batch.src", "locals"), WHERE)
    all_paths = _paths(batch)
    places = [i for i, prog in enumerate(batch.leaves) if prog is not None]
    leaves, names = [values[i] for i in places], [all_paths[i] for i in places]
    progs = tuple(prog for prog in batch.leaves if prog is not None)
    op = ProgramGroup(progs, ranks_of(*progs), batch.bucket_bytes)
    is_local = current_transport() is not None or any(isinstance(x, torch.Tensor) for x in leaves)
    finish = (_launch_local if is_local else _launch_on_shards)(op, leaves, names, async_op)

    def finish_tree() -> Any:
        for i, y in zip(places, finish(), strict=True):
            values[i] = y
        return unflatten(batch.structure, values)

    return Pending(finish_tree) if async_op else finish_tree()


@lru_cache(maxsize=CACHE_SIZE)
def _paths(batch: Batch) -> list[str]:
    return paths(batch.programs, "")


def _launch_local(
    op: ProgramGroup, leaves: list[Any], names: Sequence[str], async_op: bool
) -> FinishAll:
    """Launch a batch on this rank's locals."""
    transport = current_rank(op.mesh, WHERE)
    checks = [
        partial(_checked_local, x, prog, transport)
        for x, prog in zip(leaves, op.progs, strict=True)
    ]
    locals_ = tuple(map_leaves(WHERE, names, checks))
    label = Label(WHERE, op.mesh, arguments=program_text(*op.progs))
    if not any(map(is_abstract, locals_)):
        compare_layouts(label, op.progs, transport.rank)
    label = deferred_label(label) if async_op else label

    def run(xs: Tensors) -> FinishAll:
        with labelled(label):
            finish = _launch(op, [(x,) for x in xs], names, on_shards=False, async_op=async_op)
        return with_label(label, lambda: tuple(y for (y,) in finish()))

    if current_tracker_hook.call() is None:
        return run(locals_)
    ends = [(prog.src, prog.dst) for prog in op.progs]
    return run_typed_leaves_hook.call(names, locals_, ends, run)


def _checked_local(x: Any, prog: Program, transport: Transport) -> torch.Tensor:
    """Return this rank's local of one leaf, or raise `ShardingError`."""
    x = empty_local(prog) if x is None else x
    if not isinstance(x, torch.Tensor):
        fail(WHERE, f"a local of type {type(x).__name__}",
             "on a rank of the source's mesh a local must be a tensor",
             "pass this rank's tensor")  # fmt: skip
    check_local_input(prog, x, transport, WHERE)
    return x


def _launch_on_shards(
    op: ProgramGroup, leaves: list[Any], names: Sequence[str], async_op: bool
) -> Callable[[], LeafTensors]:
    """Launch a batch on the shards of all ranks of a simulation."""
    progs, ranks = op.progs, op.mesh.ranks
    checks = [
        partial(check_shards, x, prog.src, WHERE) for x, prog in zip(leaves, progs, strict=True)
    ]
    xs = []
    for shards, prog in zip(map_leaves(WHERE, names, checks), progs, strict=True):
        by_rank = dict(zip(prog.src.mesh.ranks, shards, strict=True))
        xs.append(tuple(by_rank.get(rank, shards[0].new_empty(0)) for rank in ranks))
    finish = _launch(op, xs, names, on_shards=True, async_op=async_op)

    def finish_targets() -> LeafTensors:
        return [
            tuple(y for y, rank in zip(ys, ranks, strict=True) if rank in prog.dst.mesh)
            for ys, prog in zip(finish(), progs, strict=True)
        ]

    return finish_targets


def _launch(
    op: ProgramGroup, xs: LeafTensors, names: Sequence[str], *, on_shards: bool, async_op: bool
) -> Callable[[], LeafTensors]:
    """Launch programs differentiably; maxima and minima with gradients run after the others."""
    need_grad = [is_differentiated(*shards) for shards in xs]
    is_late = [need and not prog.is_linear for need, prog in zip(need_grad, op.progs, strict=True)]
    if async_op and any(is_late):
        i = is_late.index(True)
        prog, path = op.progs[i], f"at {names[i]}: " if names[i] else ""
        fail("batch(locals, async_op=True)", f"{path}a program with a maximum or minimum, "
             f"{prog.src} -> {prog.dst}, of a local that requires grad",
             "programs must be linear to run ahead with gradients",
             "run it without async_op, or detach() the local")  # fmt: skip
    is_early = [not late for late in is_late]
    n = op.mesh.size if on_shards else 1
    linear = op.with_programs(compress(op.progs, is_early))
    launched = _launch_linear(linear, list(compress(xs, is_early)), n, on_shards)

    def finish() -> LeafTensors:
        early, late = iter(launched()), iter(LeafTensors())
        if any(is_late):
            extremes = op.with_programs(compress(op.progs, is_late))
            inputs = _flatten(compress(xs, is_late))
            late = iter(_by_leaf(apply_programs(extremes, inputs, on_shards), n))
        return [next(late) if is_leaf_late else next(early) for is_leaf_late in is_late]

    return finish


def _launch_linear(
    op: ProgramGroup, xs: LeafTensors, n: int, on_shards: bool
) -> Callable[[], LeafTensors]:
    """Launch linear programs; only those of leaves that need a gradient have a backward."""
    if not xs:
        return list
    if is_transformed():  # a launch would send the wrappers of `torch.func`
        return lambda: _by_leaf(apply_linear(op, _flatten(xs), on_shards), n)
    with torch.no_grad():
        launched: FinishAll
        if on_shards:
            launched = partial(tuple, op.run_on_shards(_flatten(xs)))
        else:
            launched = launch_linear(op, _flatten(xs), WHERE)
    need_grad = [is_differentiated(*shards) for shards in xs]

    def finish() -> LeafTensors:
        with torch.no_grad():
            ys = _by_leaf(launched(), n)
        if any(need_grad):
            group = op.with_programs(compress(op.progs, need_grad))
            inputs, results = _flatten(compress(xs, need_grad)), _flatten(compress(ys, need_grad))
            outputs = iter(_by_leaf(apply_linear(group, inputs, on_shards, lambda: results), n))
            ys = [next(outputs) if need else y for y, need in zip(ys, need_grad, strict=True)]
        return ys

    return finish


def _flatten(xs: Iterable[Tensors]) -> Tensors:
    return tuple(x for shards in xs for x in shards)


def _by_leaf(ys: Tensors, n: int) -> LeafTensors:
    return [ys[i : i + n] for i in range(0, len(ys), n)]


@Hook
def run_typed_leaves_hook(
    names: Sequence[str],
    xs: Tensors,
    ends: Sequence[tuple[Spec, Spec]],
    start: Callable[[Tensors], FinishAll],
) -> FinishAll:
    """Return `start(xs)` as `run_typed_hook` does; set by `spmd/tracking/typed_body.py`."""
    raise NotImplementedError
