"""A function run on every simulated rank, as one differentiable operation.

Each rank keeps the graph of its own locals. Backward starts the ranks again, so that the
collectives of backward meet as those of forward did. For higher orders the backward is
itself such an operation: the vector-Jacobian product, recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fshard.errors import fail
from fshard.mesh import Mesh
from fshard.run.memory import own
from fshard.run.settings import ThreadSettings
from fshard.run.simulate import run_ranks
from fshard.run.transport import backward_phase
from fshard.spmd.axes import bind_axes

__all__ = ["map_ranks", "run_body"]

Locals = tuple[torch.Tensor, ...]
Body = Callable[[Locals], Locals]


def map_ranks(
    mesh: Mesh,
    body: Body,
    values: Sequence[Locals],
    name: str,
    agree: Callable[[], None] = lambda: None,
) -> list[Locals]:
    """`body(values[i])` as rank i of a simulated mesh, for every rank; differentiable.

    `body` maps tensors to tensors, as many on every rank: `agree` raises where they were not.
    """
    width = len(values[0])
    flat = [x for row in values for x in row]
    if torch.is_grad_enabled() and any(x.requires_grad for x in flat):
        out = _Mapped.apply(mesh, body, width, name, agree, *flat)  # type: ignore[no-untyped-call]
        return _rows(out, len(out) // mesh.size)
    outs = run_ranks(mesh, lambda _, xs: _bound(mesh, body, xs), values)
    agree()
    for xs, ys in zip(values, outs, strict=True):
        refuse_closures(xs, ys, name)
    return outs


def run_body(mesh: Mesh, body: Body, xs: Locals, name: str) -> Locals:
    """`body(xs)` as the one rank that this process, or this simulated rank, is."""
    ys = _bound(mesh, body, xs)
    refuse_closures(xs, ys, name)
    return ys


def _bound(mesh: Mesh, body: Body, xs: Locals) -> Locals:
    with bind_axes(mesh):
        return tuple(own(y, xs) for y in body(xs))


def _rows(flat: Sequence[torch.Tensor], width: int) -> list[Locals]:
    if width == 0:
        return []
    return [tuple(flat[at : at + width]) for at in range(0, len(flat), width)]


def _leaves(xs: Locals) -> Locals:
    """Copies of the inputs, without memory of their own, that begin a rank's graph."""
    return tuple(x.detach().requires_grad_(x.requires_grad) for x in xs)


class _Mapped(torch.autograd.Function):
    """The ranks' graphs between the locals that go in and those that come out."""

    @staticmethod
    def forward(
        ctx: Any,
        mesh: Mesh,
        body: Body,
        width: int,
        name: str,
        agree: Callable[[], None],
        *flat: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.settings, ctx.random = ThreadSettings.current(), _random_state()

        def run(_: object, xs: Locals) -> tuple[Locals, Locals]:
            with torch.enable_grad():
                own = _leaves(xs)
                return own, _bound(mesh, body, own)

        graphs: list[tuple[Locals, Locals]] = run_ranks(mesh, run, _rows(flat, width))
        for xs, ys in graphs:
            refuse_closures(xs, ys, name)
        agree()
        ctx.mesh, ctx.body, ctx.width, ctx.name = mesh, body, width, name
        ctx.graphs = graphs
        ctx.save_for_backward(*flat)
        outs = [y.detach() for _, ys in graphs for y in ys]
        wanted = [any(ys[at].requires_grad for _, ys in graphs) for at in range(len(graphs[0][1]))]
        ctx.mark_non_differentiable(
            *(y for at, y in enumerate(outs) if not wanted[at % len(wanted)])
        )
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        flat = ctx.saved_tensors
        rows = _rows(grads, len(grads) // ctx.mesh.size)
        with backward_phase():
            back = _again(ctx, flat, rows) if torch.is_grad_enabled() else _once(ctx, rows)
        return None, None, None, None, None, *(g for row in back for g in row)


def _once(ctx: Any, rows: list[Locals]) -> list[tuple[torch.Tensor | None, ...]]:
    """The gradients of every rank's graph, each by its own thread."""
    graphs = ctx.graphs
    if graphs is None:
        raise RuntimeError(
            "Trying to backward through the graph a second time: "
            "the first backward() needs retain_graph=True"
        )
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    if not keep:
        ctx.graphs = None

    def run(_: object, work: tuple[tuple[Locals, Locals], Locals]) -> Any:
        (xs, ys), grads = work
        with bind_axes(ctx.mesh):
            return _gradients(xs, ys, grads, retain_graph=keep, create_graph=False)

    return run_ranks(ctx.mesh, run, list(zip(graphs, rows, strict=True)))


def _again(
    ctx: Any, flat: tuple[torch.Tensor, ...], rows: list[Locals]
) -> list[tuple[torch.Tensor | None, ...]]:
    """The gradients as a mapped function of inputs and cotangents, itself differentiable."""
    body: Body = ctx.body
    settings: ThreadSettings = ctx.settings
    rows_in = _rows(flat, ctx.width)

    def product(values: Locals) -> Locals:
        xs, grads = values[: ctx.width], values[ctx.width :]
        # Views: a rank's own inputs may be leaves of the outer graph, or no leaves at all.
        own = tuple(x.view_as(x) if x.requires_grad else x for x in xs)
        with settings.casting():
            made = body(own)
        found = _gradients(own, made, grads, retain_graph=True, create_graph=True)
        return tuple(
            torch.zeros_like(x) if g is None else g for x, g in zip(own, found, strict=True)
        )

    values = [xs + grads for xs, grads in zip(rows_in, rows, strict=True)]
    with _random_again(ctx.random):
        back = map_ranks(ctx.mesh, product, values, ctx.name)
    return [
        tuple(g if x.requires_grad else None for g, x in zip(row, xs, strict=True))
        for row, xs in zip(back, rows_in, strict=True)
    ]


Random = tuple[torch.Tensor, list[torch.Tensor]]


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
    xs: Locals, ys: Locals, grads: Locals, *, retain_graph: bool, create_graph: bool
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


def refuse_closures(xs: Locals, ys: Locals, name: str) -> None:
    """Raise where a result depends on a tensor that requires grad and is no argument."""
    known = {id(x) for x in xs}
    seen = {x.grad_fn for x in xs if x.grad_fn is not None}
    todo = [y.grad_fn for y in ys if y.grad_fn is not None and y.grad_fn not in seen]
    seen.update(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor) and id(variable) not in known:
            fail(
                f"shard_map({name})",
                f"a closed-over tensor of shape {tuple(variable.shape)} that requires grad",
                "a mapped function's differentiable inputs are its arguments",
                "pass the tensor as an argument with in_specs P(), or detach() it",
            )
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
