"""A function run on every simulated rank, as one differentiable operation.

Each rank has its own autograd graph. The backward pass starts the ranks again, so that collectives
in backward meet as those in forward did. It is itself such an operation, derived from the recorded
graphs; so are tangents, and so derivatives of every order exist. Transforms of `torch.func` see one
`autograd.Function`: its forward runs on plain tensors, so that no rank sees their levels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from fshard._torch.autograd_state import keeps_graph
from fshard._torch.functorch import (
    apply_function,
    derivative_levels,
    innermost_derivative,
    is_transformed,
    make_duals,
    primal_of,
    transform_level,
    with_batch_at,
)
from fshard._torch.legacy_vmap import map_batch_elements
from fshard._torch.memory import own_memory, unaliased_all
from fshard._util.dtypes import is_inexact
from fshard._util.tracebacks import hiding_frames
from fshard.run.autograd.linear_function import is_differentiated
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.axis_env import BoundAxes, bind_for_backward
from fshard.spmd.closure_inputs import (
    GradientHook,
    check_backwards,
    find_closure_inputs,
    find_transformed_closures,
    refuse_closure,
    replacing,
    unreplaced,
)
from fshard.spmd.derived_calls import DerivedCall, Jvp, Vjp
from fshard.spmd.mesh_scope import Scope
from fshard.spmd.rank_calls import Locals, RankCall, RankFunction, RecordedCall


def map_ranks(
    scope: Scope,
    body: RankFunction,
    values: Sequence[Locals],
    fn: Callable[..., Any],
    check_agreement: Callable[[], None],
    share: Callable[[torch.Tensor], Locals],
) -> list[Locals]:
    """Return `body(rank, values[i])` for rank i of a simulated mesh, differentiably.

    Args:
        scope: the axes that the call maps.
        body: the function of one rank; it returns as many tensors on every rank.
        values: the ranks' tensors.
        fn: the function that `body` calls; tensors that it closes over are differentiated as
            arguments with `P()`.
        check_agreement: called after all ranks; raises if they returned other structures.
        share: function from a tensor that `fn` closes over to one for each rank.
    """
    mesh = scope.mesh

    if is_transformed():
        return _map_transformed(scope, body, values, fn, check_agreement, share)

    def function(rank: int, xs: Locals) -> Locals:
        return _run_bound(scope, body, rank, xs)

    if not torch.is_grad_enabled():
        outs = run_ranks(mesh, lambda rank, xs: function(rank.rank, xs), values)
        check_agreement()
        return outs
    levels = _innermost(_levels(values))
    call = RecordedCall(scope, function, levels, lambda _: check_agreement())
    results = call.run(values, record=True)
    if not any(y.requires_grad for ys in results for y in ys):
        return results
    assert call.graphs is not None
    inputs, outputs = ([x for graph in call.graphs for x in graph[side]] for side in (0, 1))
    call.closures = find_closure_inputs(fn, inputs, outputs)
    if call.closures:
        shared = zip(*map(share, call.closures), strict=True)
        values = [xs + others for xs, others in zip(values, shared, strict=True)]
        call.graphs = [(xs + call.closures, ys) for xs, ys in call.graphs]
    return _differentiable(call, values)


def _map_transformed(
    scope: Scope,
    body: RankFunction,
    values: Sequence[Locals],
    fn: Callable[..., Any],
    check_agreement: Callable[[], None],
    share: Callable[[torch.Tensor], Locals],
) -> list[Locals]:
    """Run `map_ranks` under a transform of `torch.func`, where closures are inputs of the run."""
    closures, where = find_transformed_closures(fn), getattr(fn, "__name__", type(fn).__name__)
    if closures:
        shared = zip(*map(share, closures), strict=True)
        values = [xs + others for xs, others in zip(values, shared, strict=True)]
    grad_mode, level, hooks = torch.is_grad_enabled(), innermost_derivative(), list[GradientHook]()
    nodes, leaves, levels = set[Any](), list[torch.Tensor](), _levels(values)
    is_nested = any(not ats <= {level} for ats in levels)

    def function(rank: int, xs: Locals) -> Locals:
        width = len(xs) - len(closures)
        with replacing(where, closures, xs[width:], hooks, is_nested):
            return _run_bound(scope, body, rank, xs[:width])

    def check(call: RecordedCall) -> None:
        check_agreement()
        graphs = call.graphs or []
        inputs, outputs = ([x for graph in graphs for x in graph[side]] for side in (0, 1))
        for x in find_closure_inputs(fn, inputs, outputs, nodes):
            refuse_closure(where, x)
        leaves.extend(inputs)

    call = RecordedCall(
        scope, function, _innermost(levels), check, grad_mode,
        level=level, hooks=hooks, transformed=True,
    )  # fmt: skip
    results = _apply(call, values)
    check_backwards(where, nodes, leaves)
    return results


def run_body(scope: Scope, body: RankFunction, rank: int, xs: Locals) -> Locals:
    """Return `body(rank, xs)` of the one rank that this process, or simulated rank, is."""
    ys = _run_bound(scope, body, rank, xs)
    inherited = scope.bound_axes - scope.axes
    unreplaced(bind_for_backward)(
        ys, scope.named_mesh, scope.bound_axes, inherited, scope.uneven_axes
    )
    return ys


def _run_bound(scope: Scope, body: RankFunction, rank: int, xs: Locals) -> Locals:
    with BoundAxes(scope.named_mesh, scope.bound_axes, scope.uneven_axes):
        return unaliased_all(body(rank, xs), xs)


def _levels(rows: Sequence[Locals]) -> list[set[int]]:
    """Return for each of a rank's inputs the levels of differentiation on any rank."""
    columns = zip(*rows, strict=True)
    return [set(chain.from_iterable(map(derivative_levels, xs))) for xs in columns]


def _innermost(levels: Sequence[set[int]]) -> tuple[int | None, ...]:
    """Return the innermost level of each input, None without one."""
    return tuple([max(ats, default=None) for ats in levels])


def _split_rows(flat: Sequence[torch.Tensor], size: int) -> list[Locals]:
    """Return the tensors of each of `size` ranks."""
    width = len(flat) // size
    return [tuple(flat[rank * width : (rank + 1) * width]) for rank in range(size)]


def _apply(call: RankCall, rows: Sequence[Locals]) -> list[Locals]:
    """Return the results of a call on every rank, differentiably."""
    flat = tuple(chain.from_iterable(rows))
    if not is_differentiated(*flat):
        return call.run(rows, record=False)
    return _differentiable(call, rows)


def _differentiable(call: RankCall, rows: Sequence[Locals]) -> list[Locals]:
    """Return the results of a call, which runs now if it did not, as those of a node."""
    return _split_rows(_apply_node(call, *chain.from_iterable(rows)), len(rows))


def _apply_node(call: RankCall, *flat: torch.Tensor) -> Locals:
    """Return the flat results of a call as those of a node."""
    node = _RecordedNode if isinstance(call, RecordedCall) else _RankNode
    results: Locals = apply_function(node, call, *flat)
    return results


class _RankNode(torch.autograd.Function):
    """Autograd node of a call on every rank; inputs are those of each rank in turn."""

    @staticmethod
    def forward(call: RankCall, *flat: torch.Tensor) -> Locals:
        rows = _split_rows(flat, call.root.scope.mesh.size)
        graphs = call.graphs
        if graphs is None:
            results = call.run(rows, record=any([x.requires_grad for x in flat]))  # noqa: C419
        else:  # an ordinary call, which has run
            results = [ys for _, ys in graphs]
        owned = own_memory if call.root.transformed else lambda y: y
        return tuple([owned(y).detach() for ys in results for y in ys])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Locals) -> None:
        call, *flat = inputs
        ctx.call, ctx.level = call, transform_level() or 0
        ctx.save_for_backward(*flat)
        ctx.save_for_forward(*flat)
        if call.graphs is not None and not is_transformed():
            columns = zip(*(ys for _, ys in call.graphs), strict=True)
            fixed = [not any(y.requires_grad for y in ys) for ys in columns]
            ctx.mark_non_differentiable(*(y for i, y in enumerate(output) if fixed[i % len(fixed)]))

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        call: RankCall = ctx.call
        if call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: "
                "the first backward() needs retain_graph=True"
            )
        root = call.root
        root.check_level(ctx.level)
        if isinstance(call, DerivedCall):
            call.check_differentiable()
        size, saved = root.scope.mesh.size, ctx.saved_tensors
        rows, width = _split_rows(saved, size), len(saved) // size
        needs = [any(ctx.needs_input_grad[1 + i :: width]) for i in range(width)]
        needed = tuple([i for i, need in enumerate(needs) if need])
        keep_graph = keeps_graph()
        # Ranks share the graphs behind closures; other levels and orders share those of ranks.
        retain = keep_graph or is_transformed() or call is not root or bool(root.closures)

        def gradients(cts: Sequence[torch.Tensor]) -> Locals:
            inputs = map(operator.add, rows, _split_rows(cts, size))
            vjp = Vjp(call, width, needed, retain)
            return tuple(chain.from_iterable(_apply(vjp, list(inputs))))

        create_graph = torch.is_grad_enabled()
        grads = iter(map_batch_elements(gradients, cts) if create_graph else gradients(cts))
        if not keep_graph:  # results must not keep arguments alive
            ctx.call = None
        return None, *(next(grads) if need else None for _ in range(size) for need in needs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> Locals:
        call: RankCall = ctx.call
        level, saved, size = transform_level() or 0, ctx.saved_tensors, call.root.scope.mesh.size
        if level == 0:
            saved = tuple(map(primal_of, saved))
        rows = map(operator.add, _split_rows(saved, size), _split_rows(tangents, size))
        width = len(saved) // size
        duals = call.duals(level, width)
        if duals is None:
            return tuple(chain.from_iterable(_apply(Jvp(call, width, range(width)), list(rows))))
        results = _apply(duals.call, [tuple([xs[i] for i in duals.inputs]) for xs in rows])
        return tuple([t for ys in results for t in ys[len(ys) // 2 :]])

    @staticmethod
    def needs_batch(level: int, call: RankCall, *flat: torch.Tensor) -> bool:
        """Return True if the graphs are those of batches, although no input is one."""
        return call.rebased(level) is not None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], call: RankCall, *flat: torch.Tensor) -> Any:
        level, size = (transform_level() or 0) + 1, call.root.scope.mesh.size
        dims, width = in_dims[1:], len(flat) // size
        batches = call.rebased(level)
        if batches is None:
            columns = [any(dim is not None for dim in dims[i::width]) for i in range(width)]
            batches = call.batched(
                level, info.batch_size, [0 if any_ else None for any_ in columns], info.randomness
            )
        positions = batches.inputs * size
        xs = [
            x if position is None else with_batch_at(x, dim, position, info.batch_size)
            for x, dim, position in zip(flat, dims, positions, strict=True)
        ]
        ys = _apply_node(batches.call, *xs)
        batches.finish(len(ys) // size)
        return ys, batches.outputs * size


class _RecordedNode(_RankNode):
    """Node of a recorded call, which runs in forward mode where its inputs have tangents."""

    @staticmethod
    def duals(level: int, args: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        call: RecordedCall
        call, *flat = args
        size = call.scope.mesh.size
        rows, tangent_rows = _split_rows(flat, size), _split_rows(tangents[1:], size)
        inner = [
            (known is not None and known > level) or any(level == 0 and x.requires_grad for x in xs)
            for known, xs in zip(call.levels, zip(*rows, strict=True), strict=True)
        ]
        # A gradient within has a tangent for each of its inputs.
        columns = [
            i
            for i, ts in enumerate(zip(*tangent_rows, strict=True))
            if inner[i] or any(t is not None for t in ts)
        ]
        duals = [
            xs + tuple([torch.zeros_like(xs[i]) if ts[i] is None else ts[i] for i in columns])
            for xs, ts in zip(rows, tangent_rows, strict=True)
        ]
        known_levels = [*call.levels, *[call.levels[i] for i in columns]]
        levels = [
            known if known is not None and known > level else here
            for known, here in zip(known_levels, _innermost(_levels(duals)), strict=True)
        ]
        if any(inner):  # for each element of a `vmap` outside
            levels = [max(x or 0, level) if i in columns else x for i, x in enumerate(levels)]
        dual_call = call.with_tangents(level, columns, levels, has_inner=any(inner))
        if level == 0 and any(inner):  # their gradients need the tangents of what a node saves
            dual_call.run(duals, record=True)
            ys = apply_function(_RankNode, call, *make_duals(flat, tangents[1:]))
            return ys, [None] * len(ys)
        results = _differentiable(dual_call, duals)
        half = len(results[0]) // 2
        ys = [y for results_ in results for y in results_[:half]]
        ts = [t for results_ in results for t in results_[half:]]
        return ys, [t if is_inexact(t) else None for t in ts]
