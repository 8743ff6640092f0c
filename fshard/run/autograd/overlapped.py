"""Linear programs that are launched in one place and waited for in another, forward and backward.

The launch and the wait are two nodes of autograd. Backward, the node of the wait launches the
transposes once it has all cotangents, and the node of the launch waits for their results. Autograd
runs the node that was created last first. So a program that is launched early in the forward pass
is waited for late in the backward pass; operations between the two are differentiated meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import compress
from typing import Any, cast

import torch

from fshard._torch.functorch import apply_function, is_transformed
from fshard._torch.legacy_vmap import is_legacy_batched
from fshard._torch.memory import temporaries
from fshard._util.tracebacks import hiding_frames
from fshard.layout.spec import Spec
from fshard.plan.batch.coalesce import ALONE_BYTES
from fshard.run.autograd.linear_function import (
    FinishAll,
    ProgramGroup,
    Tensors,
    apply_linear,
    is_differentiated,
    launch_linear,
)
from fshard.run.transports.base import backward_phase
from fshard.run.transports.divergence_report import backward_label
from fshard.run.transports.running_modules import as_in_module, current_module

WHERE = "a partitioned function"
Gradients = tuple[torch.Tensor | None, ...]


def launch_programs(
    op: ProgramGroup, xs: Tensors, on_shards: bool, *, waits: bool = False,
    owned: Collection[int] = (),
) -> FinishAll:  # fmt: skip
    """Launch linear programs differentiably; return the call that waits for their results.

    Backward, the transposes for the leaves that have a cotangent are launched as one operation. The
    other leaves get no gradient.

    Args:
        op: the programs, one for each leaf.
        xs: the locals, or the shards in rank order for each leaf in turn.
        on_shards: whether `xs` are the shards of all ranks.
        waits: wait at once, forward and backward: one node in the place of two.
        owned: indices of locals without gradient that may be written.
    """
    if is_transformed() or any(map(is_legacy_batched, xs)):
        return lambda: apply_linear(op, xs, on_shards)
    if not is_differentiated(*xs):
        return _launch(op, xs, on_shards, owned)
    flight = _Flight(op, on_shards)
    with torch.no_grad():
        flight.finish = _launch(op, xs, on_shards)
    if waits:
        ys: Tensors = apply_function(_WholeNode, flight, *xs)
        return lambda: ys
    token = apply_function(_LaunchNode, flight, *xs)

    def finish() -> Tensors:
        with torch.enable_grad():
            outputs: Tensors = apply_function(_WaitNode, flight, token)
        return outputs

    return finish


def _launch(
    op: ProgramGroup, xs: Tensors, on_shards: bool, owned: Collection[int] = ()
) -> FinishAll:
    """Launch programs without a gradient; a simulation runs them at once."""
    if on_shards:
        ys = op.run_on_shards(xs)
        return lambda: ys
    return launch_linear(op, xs, WHERE, partial(op.launch, owned=owned) if owned else None)


class _Flight:
    """Programs under way, forward and later backward: the common state of two nodes."""

    __slots__ = ("finish", "finish_backward", "label", "module", "on_shards", "op")

    finish: FinishAll
    finish_backward: Callable[[], Gradients]

    def __init__(self, op: ProgramGroup, on_shards: bool) -> None:
        self.op, self.on_shards, self.label = op, on_shards, backward_label()
        self.module = current_module()

    def wait_forward(self) -> Tensors:
        """Return the results of the programs."""
        finish = self.finish
        del self.finish  # it holds the results, which autograd may not need
        # A local program returns its argument, which must not become an output as it is.
        return tuple([y.detach() for y in finish()])

    def launch_backward(self, grads: Gradients, owned: tuple[int, ...]) -> None:
        """Launch the transposes for the leaves that have a cotangent on some rank.

        The cotangents of the indices `owned` may be written.
        """
        n = self.op.mesh.size if self.on_shards else 1
        present = tuple([g is not None for g in grads])
        if n > 1:
            present = tuple([any(present[i : i + n]) for i in range(0, len(grads), n)])
        op = self.op.transposed(present)
        if all([g is not None for g in grads]):  # noqa: C419
            self.finish_backward = self._launch_transposes(op, cast("Tensors", grads), owned)
            return
        rows = [grads[i : i + n] for i in range(0, len(grads), n)]
        cotangents = tuple(
            g for row, prog in zip(compress(rows, present), op.progs, strict=True)
            for g in _filled(row, prog.src)
        )  # fmt: skip
        finish = self._launch_transposes(op, cotangents) if cotangents else tuple

        def finish_backward() -> Gradients:
            results = iter(finish())
            return tuple(
                next(results) if has_grad else None for has_grad in present for _ in range(n)
            )

        self.finish_backward = finish_backward

    def wait_backward(self) -> Gradients:
        """Return the results of the transposes."""
        finish = self.finish_backward
        del self.finish_backward  # else autograd would copy gradients that others may hold
        with backward_phase(self.label):
            return finish()

    def _launch_transposes(
        self, op: ProgramGroup, grads: Tensors, owned: tuple[int, ...] = ()
    ) -> FinishAll:
        """Launch the transposes; where a gradient of them is recorded, they run at once."""
        with backward_phase(self.label):
            if is_transformed() or is_differentiated(*grads) or any(map(is_legacy_batched, grads)):
                results = apply_linear(op, grads, self.on_shards)
                return lambda: results
            return as_in_module(self.module, _launch, op, grads, self.on_shards, owned)


def _filled(shards: Gradients, spec: Spec) -> Tensors:
    """Return cotangents of ranks with zeros for those that have none."""
    device = next(g.device for g in shards if g is not None)
    return tuple(
        torch.zeros(spec.local_shape(rank), dtype=spec.dtype, device=device) if g is None else g
        for rank, g in zip(spec.mesh.ranks, shards, strict=False)
    )


class _LaunchNode(torch.autograd.Function):
    """Node of the launch, whose result stands for programs under way."""

    @staticmethod
    def forward(flight: _Flight, *xs: torch.Tensor) -> torch.Tensor:
        return xs[0].new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.flight = inputs[0]

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        flight: _Flight = ctx.flight
        return None, *flight.wait_backward()


class _WaitNode(torch.autograd.Function):
    """Node of the wait, from the result of the launch to those of the programs."""

    @staticmethod
    def forward(flight: _Flight, token: torch.Tensor) -> Tensors:
        return flight.wait_forward()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        ctx.flight, token = inputs
        ctx.token = token.detach()
        ctx.set_materialize_grads(False)

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        flight: _Flight = ctx.flight
        flight.launch_backward(grads, temporaries(grads, ALONE_BYTES))
        return None, ctx.token


class _WholeNode(torch.autograd.Function):
    """Node of programs that are waited for where they are launched."""

    @staticmethod
    def forward(flight: _Flight, *xs: torch.Tensor) -> Tensors:
        return flight.wait_forward()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensors) -> None:
        ctx.flight = inputs[0]
        ctx.set_materialize_grads(False)

    @staticmethod
    @hiding_frames
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        flight: _Flight = ctx.flight
        flight.launch_backward(grads, temporaries(grads, ALONE_BYTES))
        del grads  # their memory is freed once it is sent
        return None, *flight.wait_backward()
