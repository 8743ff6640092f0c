"""Replays of recordings, with their gradients and what observers see of them."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from typing import Any

import torch

from fshard._torch.legacy_vmap import is_legacy_batched
from fshard._torch.memory import materialized
from fshard._torch.modes import num_dispatch_modes
from fshard.run.capture import Recording
from fshard.run.transports.base import (
    LABEL,
    OBSERVERS,
    Label,
    ObservedCall,
    backward_phase,
    direct_transport,
    labelled,
)
from fshard.run.transports.divergence_report import backward_label
from fshard.run.transports.observed_calls import (
    notify,
    notify_transposed,
    transposed_label,
)

Calls = list[ObservedCall] | None
"""The observed call of each recording, None if there is no observer."""


def replay(recordings: Sequence[Recording], xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Replay recordings, as one node of autograd if a tensor requires grad; these are linear.

    Collectives of all are under way together, forward and backward. They are launched in the order
    in which those of single functions are, backward in the reverse one.
    """
    calls: Calls = None
    # The caller is fshard's, and its frame object costs a microsecond. Comprehensions over `frame`
    # would cost three.
    if observers := OBSERVERS.get():
        frame, calls = sys._getframe(2), []
        for recording in recordings:
            calls.append(notify(recording.launch, observers, frame))
    if torch.is_grad_enabled() and any([x.requires_grad for x in xs]):  # noqa: C419 - one frame
        frame, labels = sys._getframe(2), []
        for recording in recordings:
            labels.append(backward_label(recording.launch.label, frame))  # noqa: PERF401
        results: Sequence[torch.Tensor] = _Replay.apply(recordings, calls, labels, *xs)  # type: ignore[no-untyped-call]
        return results
    return _run_together(recordings, calls, xs)


def _run_together(
    recordings: Sequence[Recording], calls: Calls, xs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    is_labelled = calls is not None and num_dispatch_modes() > 0
    if len(xs) == 1 and not is_labelled:
        return (recordings[0].run(xs[0]),)
    running = [r.start(x) for r, x in zip(recordings, xs, strict=True)]
    if calls is not None and is_labelled:
        running = [_labelled(call.label, start) for call, start in zip(calls, running, strict=True)]
    for start in running:
        next(start)
    return tuple(map(_finished, running))


def _labelled(
    label: Label | None, running: Generator[None, None, torch.Tensor]
) -> Generator[None, None, torch.Tensor]:
    """Run both parts with a label: raw logs leave out the collectives of labelled calls."""
    with labelled(label):
        next(running)
    yield
    with labelled(label):
        return (yield from running)


class _Replay(torch.autograd.Function):
    """Forward replays recordings, backward their transposes."""

    @staticmethod
    def forward(
        ctx: Any,
        recordings: Sequence[Recording],
        calls: Calls,
        labels: Sequence[Label | None],
        *xs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.recordings, ctx.calls, ctx.labels = recordings, calls, labels
        ctx.set_materialize_grads(False)
        ys = _run_together(recordings, calls, xs)
        ctx.mark_non_differentiable(
            *[y for x, y in zip(xs, ys, strict=True) if not x.requires_grad]
        )
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        calls = ctx.calls or [None] * len(grads)
        launches = zip(ctx.recordings, grads, calls, ctx.labels, strict=True)
        running, results = [], []
        for recording, grad, call, label in reversed([*launches]):
            with labelled(label):
                running.append(None if grad is None else _transposed(recording, grad, call))
        for start, label in zip(running, reversed(ctx.labels), strict=True):
            with labelled(label):
                results.append(None if start is None else _finished(start))
        return None, None, None, *reversed(results)


def _transposed(
    recording: Recording, grad: torch.Tensor, call: ObservedCall | None
) -> torch.Tensor | Generator[None, None, torch.Tensor]:
    """Return the transpose of a cotangent, or a generator that has it under way.

    `call` is the observed call of the recording.
    """
    transposed = recording.T
    plain = type(grad) is torch.Tensor and not is_legacy_batched(grad)
    if direct_transport() is None or not plain:
        with backward_phase(transposed_label(call) or LABEL.get()):
            return transposed.function(grad)
    if not transposed.is_identity:
        grad = materialized(grad)  # as when it was recorded
    if torch.is_grad_enabled() and grad.requires_grad:
        with backward_phase(transposed_label(call) or LABEL.get()):
            return replay((transposed,), (grad,))[0]
    running = transposed.start(grad)
    if OBSERVERS.get():
        observed = notify_transposed(transposed.launch, call)
        if num_dispatch_modes():
            running = _labelled(observed.label, running)
    next(running)
    return running


def _finished(running: torch.Tensor | Generator[None, None, torch.Tensor]) -> torch.Tensor:
    """Return the result of what `_transposed` returns."""
    if isinstance(running, torch.Tensor):
        return running
    try:
        next(running)
    except StopIteration as end:
        result: torch.Tensor = end.value
        return result
    raise AssertionError
