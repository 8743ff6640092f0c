"""A function run on every simulated rank, as one differentiable operation.

Each rank has its own autograd graph. The backward pass starts the ranks again, so that collectives
in backward meet as those in forward did. It is itself such an operation, derived from the recorded
graphs; so are tangents, and so derivatives of every order exist. Transforms of `torch.func` see one
`autograd.Function`: its forward runs on plain tensors, so that no rank sees their levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from fshard._torch.autograd_state import UNSAFE_VIEW, keeps_graph, runs_in_backward
from fshard._torch.functorch import (
    apply_function,
    derivative_levels,
    innermost_derivative,
    is_transformed,
    levels_without_gradients,
    make_duals,
    primal_of,
    transform_level,
    with_batch_at,
)
from fshard._torch.legacy_vmap import map_batch_elements
from fshard._torch.memory import own_memory, unaliased_all
from fshard._torch.saved_tensors import innermost_hooks
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail
from fshard._util.tracebacks import hiding_frames
from fshard.run.autograd.linear_function import is_differentiated
from fshard.run.autograd.replicate import GlobalInput
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.axis_env import BoundAxes, bind_for_backward
from fshard.spmd.closure_inputs import (
    GradientHook,
    check_backwards,
    depends_on,
    find_closure_inputs,
    find_rank_leaves,
    find_transformed_closures,
    refuse_closure,
    replacing,
    unreplaced,
)
from fshard.spmd.derived_calls import DerivedCall, Jvp, Vjp
from fshard.spmd.mesh_scope import Scope
from fshard.spmd.rank_calls import Batches, Locals, RankCall, RankFunction, RecordedCall

T = TypeVar("T")
requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
Slots = tuple[GlobalInput | None, ...]
"""Places of tensors at a node: one global tensor each, or (None) the shards of all ranks."""


class Ends(NamedTuple):
    """Slots of the inputs and outputs of a node; an output of a recorded call is shards."""

    inputs: Slots
    outputs: Slots | None = None

    def output_slots(self, number: int) -> Slots:
        """Return the slots of a number of outputs."""
        return (None,) * number if self.outputs is None else self.outputs

    def transposed(self, needed: Sequence[int], num_outputs: int) -> Ends:
        """Return the slots of the gradients of needed inputs."""
        cotangents = _aliased(self.output_slots(num_outputs))
        return Ends(self.inputs + cotangents, tuple([self.inputs[i] for i in needed]))

    def with_tangents(self, inputs: Sequence[int] | None = None) -> Ends:
        """Return the slots with tangents; `inputs` are indices among the inputs and tangents."""
        both, outputs = self.inputs + _aliased(self.inputs), self.outputs
        if inputs is None:
            return Ends(both, outputs and _aliased(outputs))
        return Ends(tuple([both[i] for i in inputs]), outputs and outputs + _aliased(outputs))

    def batched(self, batches: Batches) -> Ends:
        """Return the slots of a call on batches."""
        outputs = self.outputs
        if outputs is not None:
            outputs = _batched(outputs, batches.outputs or (0,) * len(outputs))
        return Ends(_batched(self.inputs, batches.inputs), outputs)


def _aliased(slots: Slots) -> Slots:
    """Return the slots of tangents or cotangents, whose shards are not compared or written."""
    return tuple([slot and GlobalInput(slot.prog, batch_dims=slot.batch_dims) for slot in slots])


def _batched(slots: Slots, positions: Sequence[int | None]) -> Slots:
    """Return the slots with one more batch dim where a position of it is given."""
    return tuple(
        slot if slot is None or position is None else slot.batched()
        for slot, position in zip(slots, positions, strict=True)
    )


def _columns(slots: Slots, flat: Sequence[T], size: int) -> list[tuple[T, ...]]:
    """Return the tensors of each slot, of `size` ranks."""
    remaining = iter(flat)
    return [tuple(islice(remaining, size if slot is None else 1)) for slot in slots]


def map_ranks(
    scope: Scope,
    body: RankFunction,
    slots: Slots,
    flat: Locals,
    fn: Callable[..., Any],
    check_agreement: Callable[[], None],
    share: Callable[[torch.Tensor, bool], GlobalInput],
) -> list[Locals]:
    """Return the results of `body(rank, xs)` on every rank of a simulated mesh, differentiably.

    Args:
        scope: the axes that the call maps.
        body: the function of one rank; it returns as many tensors on every rank.
        slots: the arguments, each a global tensor or the shards of all ranks.
        flat: the tensors of the slots.
        fn: the function that `body` calls; tensors that it closes over are differentiated as
            arguments with `P()`.
        check_agreement: called after all ranks; raises if they returned other structures.
        share: function from a tensor that is no argument, and True if `fn` closes over it, to its
            slot; False if a rank has created it.

    Returns:
        The shards of each result.
    """
    if is_transformed():
        return _map_transformed(scope, body, slots, flat, fn, check_agreement, share)

    def function(rank: int, xs: Locals) -> Locals:
        return _run_bound(scope, body, rank, xs)

    mesh = scope.mesh
    rows = _rows(slots, flat, mesh.size)
    if not torch.is_grad_enabled():
        results = run_ranks(mesh, lambda rank, xs: function(rank.rank, xs), rows)
        check_agreement()
        return list(zip(*results, strict=True))
    levels = _innermost(_levels(_columns(slots, flat, mesh.size)))
    call = RecordedCall(scope, function, levels, lambda _: check_agreement())
    with call.recording():
        results = call.run(rows, record=True)
        _accumulate_gradients(call, slots, flat)
        if not any(y.requires_grad for ys in results for y in ys):
            return list(zip(*results, strict=True))
        assert call.graphs is not None
        inputs, outputs = ([x for graph in call.graphs for x in graph[side]] for side in (0, 1))
        call.closures = find_closure_inputs(fn, inputs, outputs)
        # Of what the node saves its edges count; the values are in the graphs, which check writes.
        flat = tuple([UNSAFE_VIEW(x, x.shape) for x in flat])
        if call.closures:
            created = find_rank_leaves(fn, [ys for _, ys in call.graphs], call.closures)
            slots += tuple([share(x, id(x) not in created) for x in call.closures])
            flat += call.closures
            call.graphs = [(xs + call.closures, ys) for xs, ys in call.graphs]
        return _shards(_apply_node(call, Ends(slots), flat), mesh.size)


def _accumulate_gradients(call: RecordedCall, slots: Slots, flat: Locals) -> None:
    """Pass gradients that `backward()` has left at the arguments of ranks to the caller's tensors.

    On processes it goes through the boundary itself; types, where they are tracked, refuse it.
    """
    inputs = zip(*[xs for xs, _ in call.graphs or ()], strict=True)
    columns = _columns(slots, flat, call.scope.mesh.size)
    for slot, xs, ends in zip(slots, columns, inputs, strict=True):
        grads = [x.grad for x in ends]
        if all(g is None for g in grads):
            continue
        if any(g is not None and g.requires_grad for g in grads):
            fail("shard_map", "backward(create_graph=True) in a body, down to an argument",
                 "a simulation passes no graphs to the gradients of the caller's tensors",
                 "torch.autograd.grad(..., create_graph=True) in the body, and the gradients as "
                 "results")  # fmt: skip
        if slot is None:
            pairs = [(x, g) for x, g in zip(xs, grads, strict=True) if x.requires_grad]
        else:
            shards = [torch.zeros_like(x) if x.grad is None else x.grad for x in ends]
            pairs = [(xs[0], slot.unsharded(tuple(shards)))]
        for end in ends:
            end.grad = None
        for x, g in pairs:
            if g is not None:
                x.backward(g, retain_graph=True)


def _map_transformed(
    scope: Scope,
    body: RankFunction,
    slots: Slots,
    flat: Locals,
    fn: Callable[..., Any],
    check_agreement: Callable[[], None],
    share: Callable[[torch.Tensor, bool], GlobalInput],
) -> list[Locals]:
    """Run `map_ranks` under a transform of `torch.func`, where closures are inputs of the run."""
    closures, where = find_transformed_closures(fn), getattr(fn, "__name__", type(fn).__name__)
    slots, flat = slots + tuple([share(x, True) for x in closures]), flat + closures
    grad_mode, level, hooks = torch.is_grad_enabled(), innermost_derivative(), list[GradientHook]()
    nodes, leaves = set[Any](), list[torch.Tensor]()
    levels = _levels(_columns(slots, flat, scope.mesh.size))
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
        level=level, hooks=hooks, transformed=True, constant_at=levels_without_gradients(),
    )  # fmt: skip
    with call.recording():
        results = _shards(_apply(call, Ends(slots), flat), scope.mesh.size)
    check_backwards(where, nodes, leaves)
    leaves.clear()  # the call, which autograd keeps, must not keep values
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


def _levels(columns: Sequence[Locals]) -> list[set[int]]:
    """Return the levels of differentiation of the tensors of each slot."""
    return [set(chain.from_iterable(map(derivative_levels, xs))) for xs in columns]


def _innermost(levels: Sequence[set[int]]) -> tuple[int | None, ...]:
    """Return the innermost level of each input, None without one."""
    return tuple([max(ats, default=None) for ats in levels])


def _rows(slots: Slots, flat: Locals, size: int) -> list[Locals]:
    """Return the tensors of each of `size` ranks."""
    columns = _columns(slots, flat, size)
    shards = [
        xs if slot is None else slot.shards(*xs) for slot, xs in zip(slots, columns, strict=True)
    ]
    return list(zip(*shards, strict=True)) if shards else [()] * size


def _shards(flat: Locals, size: int) -> list[Locals]:
    """Return the shards of each output of a recorded call."""
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def _evaluate(call: RankCall, ends: Ends, flat: Locals, *, record: bool) -> Locals:
    """Return the flat results of a call; of one that is derived, `flat` may lack the base's."""
    size, slots, graphs = call.root.scope.mesh.size, ends.inputs, call.root.graphs
    if isinstance(call, DerivedCall):  # the inputs of its base are those of the graphs
        assert graphs is not None
        slots = slots[len(graphs[0][0]) :]
        flat = flat[len(flat) - sum(size if slot is None else 1 for slot in slots) :]
        last = _rows(slots, flat, size)
        rows = [xs + others for (xs, _), others in zip(graphs, last, strict=True)]
    else:
        rows = _rows(slots, flat, size)
    columns = list(zip(*call.run(rows, record=record), strict=True))
    if ends.outputs is None:
        return tuple(chain.from_iterable(columns))
    pairs = zip(ends.outputs, columns, strict=True)
    return tuple(
        chain.from_iterable([ys if slot is None else (slot.unsharded(ys),) for slot, ys in pairs])
    )


def _dependence(
    call: RankCall, ends: Ends, flat: Sequence[torch.Tensor]
) -> Callable[[torch.Tensor], bool]:
    """Return the function that is True for results that depend on an input that requires grad.

    All last inputs of a derived call require grad in its graphs.
    """
    if not isinstance(call, DerivedCall):
        return requires_grad
    assert call.graphs is not None
    columns = _columns(ends.inputs, flat, len(call.graphs))
    needed = [any(map(requires_grad, column)) for column in columns]
    inputs = [x for xs, _ in call.graphs for x in compress(xs, needed)]
    return lambda y: depends_on(y, inputs)


def _apply(call: RankCall, ends: Ends, flat: Locals) -> Locals:
    """Return the flat results of a call on every rank, differentiably."""
    if not (is_transformed() or is_differentiated(*flat)):
        return _evaluate(call, ends, flat, record=False)
    return _apply_node(call, ends, flat)


def _apply_node(call: RankCall, ends: Ends, flat: Locals) -> Locals:
    """Return the flat results of a call, which runs now if it did not, as those of a node."""
    node = _RecordedNode if isinstance(call, RecordedCall) else _RankNode
    results: Locals = apply_function(node, call, ends, *flat)
    return results


class _RankNode(torch.autograd.Function):
    """Autograd node of a call on every rank; its tensors are those of each slot in turn."""

    @staticmethod
    def forward(call: RankCall, ends: Ends, *flat: torch.Tensor) -> Locals:
        if call.graphs is None:
            results = _evaluate(call, ends, flat, record=any([x.requires_grad for x in flat]))  # noqa: C419
        else:  # an ordinary call, which has run
            results = tuple(chain.from_iterable(zip(*(ys for _, ys in call.graphs), strict=True)))
        owned = own_memory if call.root.transformed else lambda y: y
        return tuple([owned(y).detach() for y in results])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Locals) -> None:
        call, ends, *flat = inputs
        ctx.call, ctx.ends, ctx.level = call, ends, transform_level() or 0
        ctx.handles, values = call.root.saved.references()
        ctx.save_for_backward(*flat, *values)
        ctx.save_for_forward(*flat)
        if call.graphs is not None and not is_transformed():
            recorded = list(zip(*(ys for _, ys in call.graphs), strict=True))
            columns = _columns(ends.output_slots(len(recorded)), output, len(call.graphs))
            depends = _dependence(call, ends, flat)
            pairs = zip(columns, recorded, strict=True)
            fixed = [column for column, ys in pairs if not any(map(depends, ys))]
            ctx.mark_non_differentiable(*chain.from_iterable(fixed))

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        call: RankCall = ctx.call
        if call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: "
                "the first backward() needs retain_graph=True"
            )
        root, ends, create_graph = call.root, ctx.ends, torch.is_grad_enabled()
        root.check_level(ctx.level)
        size, width = root.scope.mesh.size, len(ends.inputs)
        needs = _columns(ends.inputs, [runs_in_backward(x) for x, _ in ctx.next_functions], size)
        needed = tuple([i for i, need in enumerate(needs) if any(need)])
        if isinstance(call, DerivedCall):
            call.check_differentiable(ctx.level, needed)
        num_outputs = len(cts) // size if ends.outputs is None else len(ends.outputs)
        keep_graph = keeps_graph()
        # Ranks share the graphs behind closures; other levels and orders share those of ranks.
        retain = keep_graph or is_transformed() or call is not root or bool(root.closures)
        # The root's values are those of its graphs; arguments may have been written since.
        is_first = call is root and not (create_graph or is_transformed() or ctx.handles)
        saved = () if is_first else ctx.saved_tensors
        num_inputs = len(saved) - len(ctx.handles)
        saved, values = saved[:num_inputs], saved[num_inputs:]

        def gradients(cts: Sequence[torch.Tensor]) -> Locals:
            vjp = Vjp(call, width, needed, retain)
            return _apply(vjp, ends.transposed(needed, num_outputs), (*saved, *cts))

        is_hooked = ctx.handles or innermost_hooks()
        with root.saved.holding(ctx.handles, values) if is_hooked else nullcontext():
            grads = iter(map_batch_elements(gradients, cts) if create_graph else gradients(cts))
        if not keep_graph:  # results must not keep arguments alive
            ctx.call = None
        return None, None, *(next(grads) if any(need) else None for need in needs for _ in need)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Locals:
        call: RankCall = ctx.call
        level, saved, ends = transform_level() or 0, ctx.saved_tensors, ctx.ends
        if level == 0:
            saved = tuple(map(primal_of, saved))
        width, size = len(ends.inputs), call.root.scope.mesh.size
        duals = call.duals(level, width)
        if duals is None:
            jvp = Jvp(call, width, range(width))
            return _apply(jvp, ends.with_tangents(), (*saved, *tangents))
        columns = [*_columns(ends.inputs, saved, size), *_columns(ends.inputs, tangents, size)]
        flat = tuple(chain.from_iterable([columns[i] for i in duals.inputs]))
        results = _apply(duals.call, ends.with_tangents(duals.inputs), flat)
        return results[len(results) // 2 :]

    @staticmethod
    def needs_batch(level: int, call: RankCall, ends: Ends, *flat: torch.Tensor) -> bool:
        """Return True if the graphs are those of batches, although no input is one."""
        return call.rebased(level) is not None

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[Any], call: RankCall, ends: Ends, *flat: torch.Tensor
    ) -> Any:
        level, size = (transform_level() or 0) + 1, call.root.scope.mesh.size
        n = info.batch_size
        dims = _columns(ends.inputs, in_dims[2:], size)
        batches = call.rebased(level)
        if batches is None:
            batched = [0 if any(dim is not None for dim in column) else None for column in dims]
            batches = call.batched(level, n, batched, info.randomness)
        positions = [p for p, column in zip(batches.inputs, dims, strict=True) for _ in column]
        rows = zip(flat, in_dims[2:], positions, strict=True)
        xs = tuple([x if p is None else with_batch_at(x, dim, p, n) for x, dim, p in rows])
        ends = ends.batched(batches)
        ys = _apply_node(batches.call, ends, xs)
        outputs = ends.output_slots(len(ys) // size)
        batches.finish(len(outputs))
        pairs = zip(batches.outputs, _columns(outputs, ys, size), strict=True)
        return ys, tuple([p for p, column in pairs for _ in column])


class _RecordedNode(_RankNode):
    """Node of a recorded call, which runs in forward mode where its inputs have tangents."""

    @staticmethod
    def duals(level: int, args: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        call: RecordedCall
        ends: Ends
        call, ends, *flat = args
        size, width = call.scope.mesh.size, len(ends.inputs)
        xs, ts = (_columns(ends.inputs, each, size) for each in (flat, tangents[2:]))
        inner = [known is not None and known > level for known in call.levels]
        if level == 0:
            inner = [a or any(x.requires_grad for x in b) for a, b in zip(inner, xs, strict=True)]
        # A gradient within has a tangent for each of its inputs.
        given = [any(t is not None for t in column) for column in ts]
        columns = [i for i in range(width) if inner[i] or given[i]]
        seeds = [tuple(map(_tangent, xs[i], ts[i])) for i in columns]
        both = Ends(ends.with_tangents((*range(width), *(width + i for i in columns))).inputs)
        duals = tuple(chain(flat, *seeds))
        known_levels = [*call.levels, *[call.levels[i] for i in columns]]
        levels = [
            known if known is not None and known > level else here
            for known, here in zip(known_levels, _innermost(_levels(xs + seeds)), strict=True)
        ]
        if any(inner):  # for each element of a `vmap` outside
            levels = [max(x or 0, level) if i in columns else x for i, x in enumerate(levels)]
        dual_call = call.with_tangents(level, columns, levels, has_inner=any(inner))
        if level == 0 and any(inner):  # their gradients need the tangents of what a node saves
            dual_call.run(_rows(both.inputs, duals, size), record=True)
            ys = apply_function(_RankNode, call, ends, *make_duals(flat, tangents[2:]))
            return ys, [None] * len(ys)
        results = _apply_node(dual_call, both, duals)
        half = len(results) // 2
        return results[:half], [t if is_inexact(t) else None for t in results[half:]]


def _tangent(x: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(x) if tangent is None else tangent
