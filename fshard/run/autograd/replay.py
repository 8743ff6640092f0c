"""Replays of recordings, with their gradients and what observers see of them."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from types import FrameType
from typing import Any

import torch

from fshard._torch.legacy_vmap import is_legacy_batched
from fshard._torch.memory import materialized
from fshard._torch.modes import has_dispatch_modes
from fshard.run.capture import Recording
from fshard.run.transports.base import (
    LABEL,
    Label,
    backward_phase,
    direct_transport,
    is_observed,
    labelled,
    notify_again,
)
from fshard.run.transports.divergence_report import backward_label, call_label

Labels = Sequence[Label | None] | None
"""Labels of calls that are observed, or None."""


def replay(recordings: Sequence[Recording], xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Replay recordings, as one node of autograd if a tensor requires grad; these are linear.

    Collectives of all are under way together, forward and backward. They are launched in the order
    in which those of single functions are, backward in the reverse one.
    """
    # The caller is fshard's; a frame object of it would cost a microsecond.
    labels = _observed(recordings, sys._getframe(2)) if is_observed() else None
    if torch.is_grad_enabled() and any([x.requires_grad for x in xs]):  # noqa: C419 - one frame
        results: Sequence[torch.Tensor] = _Replay.apply(recordings, labels, *xs)  # type: ignore[no-untyped-call]
        return results
    return _run_together(recordings, labels, xs)


def _observed(recordings: Sequence[Recording], frame: FrameType) -> Sequence[Label | None]:
    """Report recordings to observers; return the label of each, by default that of the call.

    The user's line is searched from `frame` outwards.
    """
    running = LABEL.get()
    labels: list[Label | None] = []
    for recording in recordings:  # a comprehension over `frame` costs three microseconds
        label = running or recording.label
        if label is not None:
            label = call_label(label, frame)
        notify_again(recording.events, label)
        labels.append(label)
    return labels


def _run_together(
    recordings: Sequence[Recording], labels: Labels, xs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    is_labelled = labels is not None and has_dispatch_modes()
    if len(xs) == 1 and not is_labelled:
        return (recordings[0].run(xs[0]),)
    running = [r.start(x) for r, x in zip(recordings, xs, strict=True)]
    if labels is not None and is_labelled:
        running = list(map(_labelled, labels, running))
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
        ctx: Any, recordings: Sequence[Recording], labels: Labels, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.recordings = recordings
        ctx.labels = labels and [label and backward_label(label) for label in labels]
        ctx.set_materialize_grads(False)
        ys = _run_together(recordings, labels, xs)
        ctx.mark_non_differentiable(
            *[y for x, y in zip(xs, ys, strict=True) if not x.requires_grad]
        )
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        labels = ctx.labels or [None] * len(grads)
        running = [
            None if grad is None else _transposed(recording, grad, label)
            for recording, grad, label in zip(
                reversed(ctx.recordings), reversed(grads), reversed(labels), strict=True
            )
        ]
        results = [None if start is None else _finished(start) for start in running]
        return None, None, *reversed(results)


def _transposed(
    recording: Recording, grad: torch.Tensor, label: Label | None
) -> torch.Tensor | Generator[None, None, torch.Tensor]:
    """Return the transpose of a cotangent, or a generator that has it under way."""
    transposed = recording.T
    plain = type(grad) is torch.Tensor and not is_legacy_batched(grad)
    if direct_transport() is None or not plain:
        with backward_phase(label):
            return transposed.function(grad)
    if not transposed.is_identity:
        grad = materialized(grad)  # as when it was recorded
    if torch.is_grad_enabled() and grad.requires_grad:
        with backward_phase(label):
            return replay((transposed,), (grad,))[0]
    running = transposed.start(grad)
    if is_observed():
        notify_again(transposed.events, label or transposed.label)
        if has_dispatch_modes():
            running = _labelled(label or transposed.label, running)
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
