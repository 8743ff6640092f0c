"""A function run on every simulated rank, as one differentiable operation.

Each rank keeps the graph of its own locals. Backward starts the ranks again, so that the
collectives of backward meet as those of forward did. For higher orders the backward is
itself such an operation: the vector-Jacobian product, recomputed.
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
from fshard.run.autograd.replicate import spread
from fshard.run.transports.base import backward_phase
from fshard.run.transports.simulator import run_ranks
from fshard.spmd.axis_env import BoundAxes, bind_for_backward
from fshard.spmd.closure_inputs import find_closure_inputs, without_hooks
from fshard.spmd.mesh_scope import Scope

__all__ = ["check_untransformed", "map_ranks", "run_body"]

Locals = tuple[torch.Tensor, ...]
Body = Callable[[Locals], Locals]
Random = tuple[torch.Tensor, list[torch.Tensor]]


def map_ranks(
    scope: Scope,
    body: Body,
    values: Sequence[Locals],
    fn: Callable[..., Any],
    agree: Callable[[], None] = lambda: None,
) -> list[Locals]:
    """`body(values[i])` as rank i of a simulated mesh, for every rank; differentiable.

    `body` maps tensors to tensors, as many on every rank: `agree` raises where they were not.
    What `fn`, which it calls, closes over is differentiated as an argument with `P()` is.
    """
    mesh = scope.mesh
    if not torch.is_grad_enabled():
        outs = run_ranks(mesh, lambda _, xs: _bound(scope, body, xs), values)
        agree()
        return outs
    settings, random = ThreadSettings.current(), _random_state()

    def run(_: object, xs: Locals) -> tuple[Locals, Locals]:
        # Without memory of their own: where a rank's graph begins.
        begin = tuple(x.detach().requires_grad_() if x.requires_grad else x for x in xs)
        return begin, _bound(scope, body, begin)

    graphs: list[tuple[Locals, Locals]] = run_ranks(mesh, run, values)
    agree()
    if not any(y.requires_grad for _, ys in graphs for y in ys):
        return [ys for _, ys in graphs]
    closures = find_closure_inputs(fn, *([x for row in graphs for x in row[at]] for at in (0, 1)))
    shared = list(zip(*(spread(each, mesh.size) for each in closures), strict=True))
    rows = [(*xs, *shared[at]) if shared else xs for at, xs in enumerate(values)]
    call = _Ran(scope, body, fn, graphs, len(values[0]), closures, settings, random)
    out = _Mapped.apply(call, *(x for row in rows for x in row))  # type: ignore[no-untyped-call]
    return _rows(out, len(out) // mesh.size)


def check_untransformed(where: str) -> None:
    """Raise `ShardingError` in a transform of `torch.func`, whose levels are of one thread."""
    if is_transformed():
        fail(
            where,
            "a call that torch.func transforms, by grad, vmap, jacrev or the like, or in a "
            "dual_level",
            "simulated ranks are threads, and what these do is done in one",
            "take the transform in the body; or outside torch.autograd.grad, or "
            "torch.autograd.functional.jacobian",
        )


def run_body(scope: Scope, body: Body, xs: Locals) -> Locals:
    """`body(xs)` as the one rank that this process, or this simulated rank, is."""
    ys = _bound(scope, body, xs)
    bind_for_backward(ys, scope.named_mesh, scope.bound_axes, scope.bound_axes - scope.axes)
    return ys


def _bound(scope: Scope, body: Body, xs: Locals) -> Locals:
    with BoundAxes(scope.named_mesh, scope.bound_axes):
        return unaliased_all(body(xs), xs)


def _rows(flat: Sequence[torch.Tensor], width: int) -> list[Locals]:
    if width == 0:
        return []
    return [tuple(flat[at : at + width]) for at in range(0, len(flat), width)]


@dataclass(slots=True)
class _Ran:
    """A call that has run: its ranks' inputs and results, and what it takes to run it again."""

    scope: Scope
    body: Body
    fn: Callable[..., Any]
    graphs: list[tuple[Locals, Locals]]
    """Per rank."""
    width: int
    """How many inputs a rank has, without what is closed over."""
    closures: Locals
    settings: ThreadSettings
    random: Random


class _Mapped(torch.autograd.Function):
    """The ranks' graphs between the locals that went in and those that came out.

    Its inputs are, for every rank, those of the body and then what the function closes over.
    """

    @staticmethod
    def forward(ctx: Any, call: _Ran, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*flat)
        outs = [y.detach() for _, ys in call.graphs for y in ys]
        rows = _rows([y for _, ys in call.graphs for y in ys], len(call.graphs[0][1]))
        wanted = [any(y.requires_grad for y in column) for column in zip(*rows, strict=True)]
        ctx.mark_non_differentiable(
            *(y for at, y in enumerate(outs) if not wanted[at % len(wanted)])
        )
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        call: _Ran | None = ctx.call
        if call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: "
                "the first backward() needs retain_graph=True"
            )
        ran, saved, width = call, ctx.saved_tensors, len(grads) // call.scope.mesh.size
        keep = keeps_graph()
        with backward_phase(), without_hooks(call.closures):
            if torch.is_grad_enabled():
                back = map_batch_elements(lambda gs: _again(ran, saved, _rows(gs, width)), grads)
            else:
                back = _once(call, _rows(grads, width), keep)
        if not keep:  # nor the arguments, which the results would hold as long as they live
            ctx.call = None
        return None, *back


def _once(call: _Ran, rows: list[Locals], keep: bool) -> tuple[torch.Tensor | None, ...]:
    """The gradients of every rank's graph, each by its own thread."""

    def run(_: object, work: tuple[tuple[Locals, Locals], Locals]) -> Any:
        (xs, ys), grads = work
        # Behind what is closed over there may be a history that other ranks share.
        retain = keep or bool(call.closures)
        with BoundAxes(call.scope.named_mesh, call.scope.bound_axes):
            return _gradients(xs + call.closures, ys, grads, retain_graph=retain)

    back = run_ranks(call.scope.mesh, run, list(zip(call.graphs, rows, strict=True)))
    return tuple(g for row in back for g in row)


def _again(
    call: _Ran, flat: tuple[torch.Tensor, ...], rows: list[Locals]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients as a mapped function of inputs and cotangents, itself differentiable."""
    width, closures, body, settings = call.width, call.closures, call.body, call.settings
    inputs = _rows(flat, width + len(closures))

    def product(values: Locals) -> Locals:
        xs, grads = values[:width], values[width:]
        # Views: a rank's own inputs may be leaves of the outer graph, or no leaves at all.
        mine = tuple(x.view_as(x) if x.requires_grad else x for x in xs)
        with settings.autocasting():
            made = body(mine)
        into = mine + closures
        found = _gradients(into, made, grads, retain_graph=True, create_graph=True)
        return tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(into, found, strict=True)
        )

    values = [xs[:width] + grads for xs, grads in zip(inputs, rows, strict=True)]
    with _random_again(call.random):
        back = map_ranks(call.scope, product, values, call.fn)
    return tuple(
        g if x.requires_grad else None
        for row, xs in zip(back, inputs, strict=True)
        for g, x in zip(row, xs, strict=True)
    )


def _random_state() -> Random:
    """The states of PyTorch's own generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


@contextmanager
def _random_again(state: Random) -> Iterator[None]:
    """Draw in the block what was drawn from `state`: a body recomputed is the same body."""
    cpu, cuda = state
    with torch.random.fork_rng(devices=range(len(cuda))):
        torch.set_rng_state(cpu)
        for device, each in enumerate(cuda):
            torch.cuda.set_rng_state(each, device)
        yield


def _gradients(
    xs: Locals, ys: Locals, grads: Locals, *, retain_graph: bool, create_graph: bool = False
) -> tuple[torch.Tensor | None, ...]:
    outs = [(y, g) for y, g in zip(ys, grads, strict=True) if y.requires_grad]
    wanted = [x for x in xs if x.requires_grad]
    if not outs or not wanted:
        return (None,) * len(xs)
    found = iter(
        torch.autograd.grad(
            [y for y, _ in outs],
            wanted,
            [g for _, g in outs],
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return tuple(next(found) if x.requires_grad else None for x in xs)
