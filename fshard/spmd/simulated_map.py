"""A function run on every simulated rank, as one differentiable operation.

Each rank has its own autograd graph. The backward pass starts the ranks again, so that collectives
in backward meet as those in forward did. For higher orders the backward pass is itself such an
operation: the vector-Jacobian product, recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fshard._torch.autograd_state import keeps_graph
from fshard._torch.functorch import is_transformed
from fshard._torch.legacy_vmap import map_batch_elements
from fshard._torch.memory import unaliased_all
from fshard._torch.thread_state import ThreadSettings
from fshard._util.errors import fail
from fshard.run.autograd.replicate import replicate_shards
from fshard.run.transports.base import backward_phase
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.axis_env import BoundAxes, bind_for_backward
from fshard.spmd.closure_inputs import find_closure_inputs, without_hooks
from fshard.spmd.mesh_scope import Scope

Locals = tuple[torch.Tensor, ...]
Body = Callable[[int, Locals], Locals]
"""A rank and its locals to its results."""
GeneratorStates = tuple[torch.Tensor, list[torch.Tensor]]
"""States of PyTorch's generators: of the CPU, and of every CUDA device."""


def map_ranks(
    scope: Scope,
    body: Body,
    values: Sequence[Locals],
    fn: Callable[..., Any],
    check_agreement: Callable[[], None] = lambda: None,
    share: Callable[[torch.Tensor, int], Locals] = replicate_shards,
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
    if not torch.is_grad_enabled():
        outs = run_ranks(mesh, lambda rank, xs: _run_bound(scope, body, rank.rank, xs), values)
        check_agreement()
        return outs
    settings, generators = ThreadSettings.current(), _generator_states()

    def run(rank: Any, xs: Locals) -> tuple[Locals, Locals]:
        # A rank's graph begins at its inputs, which share memory with the caller's.
        inputs = tuple([x.detach().requires_grad_() if x.requires_grad else x for x in xs])
        return inputs, _run_bound(scope, body, rank.rank, inputs)

    graphs: list[tuple[Locals, Locals]] = run_ranks(mesh, run, values)
    check_agreement()
    results = [ys for _, ys in graphs]
    if not any(y.requires_grad for ys in results for y in ys):
        return results
    inputs, outputs = ([x for graph in graphs for x in graph[side]] for side in (0, 1))
    closures = find_closure_inputs(fn, inputs, outputs)
    shared = list(zip(*(share(x, mesh.size) for x in closures), strict=True))
    rows = [(*xs, *shared[index]) if shared else xs for index, xs in enumerate(values)]
    call = CompletedCall(scope, body, fn, graphs, len(values[0]), closures, settings, generators)
    flat = _RankGraphs.apply(call, *(x for row in rows for x in row))  # type: ignore[no-untyped-call]
    return _split_rows(flat, len(flat) // mesh.size)


def check_untransformed(where: str) -> None:
    """Raise `ShardingError` in a transform of `torch.func`, whose levels belong to one thread."""
    if is_transformed():
        fail(where, "a call that torch.func transforms, by grad, vmap, jacrev or the like, or in a "
             "dual_level",
             "simulated ranks are threads, and transforms belong to the thread that takes them",
             "take the transform in the body; or outside torch.autograd.grad, or "
             "torch.autograd.functional.jacobian")  # fmt: skip


def run_body(scope: Scope, body: Body, rank: int, xs: Locals) -> Locals:
    """Return `body(rank, xs)` of the one rank that this process, or simulated rank, is."""
    ys = _run_bound(scope, body, rank, xs)
    bind_for_backward(ys, scope.named_mesh, scope.bound_axes, scope.bound_axes - scope.axes)
    return ys


def _run_bound(scope: Scope, body: Body, rank: int, xs: Locals) -> Locals:
    with BoundAxes(scope.named_mesh, scope.bound_axes):
        return unaliased_all(body(rank, xs), xs)


def _split_rows(flat: Sequence[torch.Tensor], width: int) -> list[Locals]:
    if width == 0:
        return []
    return [tuple(flat[start : start + width]) for start in range(0, len(flat), width)]


@dataclass(slots=True)
class CompletedCall:
    """A call that has run: its ranks' graphs, and the settings to run it again.

    Attributes:
        graphs: inputs and results of every rank.
        width: number of a rank's inputs, without `closures`.
        closures: tensors that `fn` closes over.
    """

    scope: Scope
    body: Body
    fn: Callable[..., Any]
    graphs: list[tuple[Locals, Locals]]
    width: int
    closures: Locals
    settings: ThreadSettings
    generators: GeneratorStates


class _RankGraphs(torch.autograd.Function):
    """Autograd node of the ranks' graphs; inputs are each rank's inputs and the closures."""

    @staticmethod
    def forward(ctx: Any, call: CompletedCall, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*flat)
        rows = [ys for _, ys in call.graphs]
        outs = [y.detach() for ys in rows for y in ys]
        differentiable = [
            any(y.requires_grad for y in column) for column in zip(*rows, strict=True)
        ]
        ctx.mark_non_differentiable(
            *(y for i, y in enumerate(outs) if not differentiable[i % len(differentiable)])
        )
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: "
                "the first backward() needs retain_graph=True"
            )
        call: CompletedCall = ctx.call
        saved, width = ctx.saved_tensors, len(grads) // call.scope.mesh.size
        keep_graph = keeps_graph()
        with backward_phase(), without_hooks(call.closures):
            if torch.is_grad_enabled():
                back = map_batch_elements(
                    lambda gs: _differentiable_gradients(call, saved, _split_rows(gs, width)), grads
                )
            else:
                back = _gradients(call, _split_rows(grads, width), keep_graph)
        if not keep_graph:  # results must not keep arguments alive
            ctx.call = None
        return None, *back


def _gradients(
    call: CompletedCall, rows: list[Locals], keep_graph: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of every rank's graph, each computed in its own thread."""

    def run(_: object, work: tuple[tuple[Locals, Locals], Locals]) -> Any:
        (xs, ys), grads = work
        # The graphs behind closures may be shared by the ranks.
        retain = keep_graph or bool(call.closures)
        with BoundAxes(call.scope.named_mesh, call.scope.bound_axes):
            return _autograd(xs + call.closures, ys, grads, retain_graph=retain)

    back = run_ranks(call.scope.mesh, run, list(zip(call.graphs, rows, strict=True)))
    return tuple([grad for row in back for grad in row])


def _differentiable_gradients(
    call: CompletedCall, flat: tuple[torch.Tensor, ...], rows: list[Locals]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients as a mapped function of inputs and cotangents, itself differentiable."""
    width, closures, body, settings = call.width, call.closures, call.body, call.settings
    inputs = _split_rows(flat, width + len(closures))

    def vjp(rank: int, values: Locals) -> Locals:
        args, grads = values[:width], values[width:]
        # Views: a rank's inputs may be leaves of the outer graph, or not be leaves at all.
        xs = tuple(x.view_as(x) if x.requires_grad else x for x in args)
        with settings.autocasting():
            ys = body(rank, xs)
        xs += closures
        found = _autograd(xs, ys, grads, retain_graph=True, create_graph=True)
        return tuple(
            torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, found, strict=True)
        )

    values = [xs[:width] + grads for xs, grads in zip(inputs, rows, strict=True)]
    with _restored_generators(call.generators):
        back = map_ranks(call.scope, vjp, values, call.fn)
    return tuple(
        grad if x.requires_grad else None
        for row, xs in zip(back, inputs, strict=True)
        for grad, x in zip(row, xs, strict=True)
    )


def _generator_states() -> GeneratorStates:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


@contextmanager
def _restored_generators(states: GeneratorStates) -> Iterator[None]:
    """Restore generator states in the block: a recomputed body draws the same values."""
    cpu, cuda = states
    with torch.random.fork_rng(devices=range(len(cuda))):
        torch.set_rng_state(cpu)
        for device, state in enumerate(cuda):
            torch.cuda.set_rng_state(state, device)
        yield


def _autograd(
    xs: Locals, ys: Locals, grads: Locals, *, retain_graph: bool, create_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of `ys` for all `xs`, None for those without one."""
    outs = [(y, grad) for y, grad in zip(ys, grads, strict=True) if y.requires_grad]
    inputs = [x for x in xs if x.requires_grad]
    if not outs or not inputs:
        return (None,) * len(xs)
    found = iter(
        torch.autograd.grad(
            [y for y, _ in outs],
            inputs,
            [grad for _, grad in outs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return tuple([next(found) if x.requires_grad else None for x in xs])
