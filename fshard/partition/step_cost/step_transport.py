"""Transports of a step's record: they send nothing, and record launches, waits and buffers.

A collective holds its operand and its result from the launch until it is awaited, as PyTorch's
functional collectives do. Over gloo, which tensors on the CPU are sent by, `ProcessWorld` runs some
collectives as others, with other buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard.partition.step_cost.step_record import AwaitedCollective, StepRecorder
from fshard.run.transports.base import Finish, Group
from fshard.run.transports.shape_only import RecordedCollective, RecordingTransport
from fshard.run.transports.torch_distributed import GATHER_BYTES, REDUCE_BYTES

Complete = Callable[[torch.Tensor], Any]
"""Function from what a rank has received to the result of its collective."""


@dataclass(frozen=True, eq=False)
class StepTransport(RecordingTransport):
    """Transport that records launches, waits and buffers of its rank."""

    recorder: StepRecorder | None = None

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        """Record the collective."""
        return self.in_flight(super().all_gather(x, group), x)

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Record the collective, which writes into an operand that is `owned`."""
        finish = super().all_reduce(x, reduction, group)
        return self.in_flight((lambda: x) if owned else finish, x)

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Record the collective."""
        return self.in_flight(super().reduce_scatter(x, reduction, group), x)

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """Record the collective."""
        return self.in_flight(super().all_to_all(x, send, receive, group), x)

    def add(self, collective: RecordedCollective) -> None:
        """Record a launch."""
        self.steps.launch(collective)

    @property
    def steps(self) -> StepRecorder:
        """The recorder."""
        assert self.recorder is not None
        return self.recorder

    def in_flight(
        self, receive: Finish, operand: torch.Tensor, complete: Complete | None = None
    ) -> Finish:
        """Return the wait for a collective, whose buffers are held from now on.

        Args:
            receive: a function that returns the memory that is received into.
            operand: the tensor that is sent.
            complete: a function from what is received to the result; None returns it.
        """
        recorder, index = self.steps, self.steps.launched
        with recorder.without_operations():
            held = [operand, receive()]
        recorder.set_category(held[1], "communication")

        def wait() -> Any:
            recorder.record.entries.append(AwaitedCollective(index))
            received = held.pop()
            with recorder.without_operations():
                result = received if complete is None else complete(received)
            held.clear()
            return result

        return wait


class GlooStepTransport(StepTransport):
    """Transport with the buffers of `ProcessWorld` over gloo."""

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        """Record the collective: between two ranks a swap, of few bytes an all-to-all."""
        n = len(group)
        if n == 2:
            RecordingTransport.all_gather(self, x, group)
            first = group[0] == self.rank
            parts = lambda other: [x, other] if first else [other, x]  # noqa: E731
            return self.in_flight(lambda: x.new_empty(x.shape), x, parts)
        if n * x.nbytes <= GATHER_BYTES:
            finish = RecordingTransport.all_gather(self, x, group)
            return self.in_flight(finish, self._repeated(x, n))
        return super().all_gather(x, group)

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Record the collective: of few bytes a swap or an all-to-all, and a sum."""
        n = len(group)
        swaps = n == 2 and x.nbytes <= (REDUCE_BYTES if owned else GATHER_BYTES)
        if not swaps and n * x.nbytes > REDUCE_BYTES:
            return super().all_reduce(x, reduction, group, owned=owned)
        finish = RecordingTransport.all_reduce(self, x, reduction, group)
        if swaps:
            return self.in_flight(finish, x, (lambda _: x) if owned else None)
        received = lambda: x.new_empty((n, *x.shape))  # noqa: E731
        return self.in_flight(received, self._repeated(x, n), lambda moved: moved.sum(0))

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Record the collective: among more than two ranks an all-to-all and a sum."""
        if len(group) == 2:
            return super().reduce_scatter(x, reduction, group)
        RecordingTransport.reduce_scatter(self, x, reduction, group)
        return self.in_flight(lambda: x.new_empty(x.shape), x, lambda moved: moved.sum(0))

    def _repeated(self, x: torch.Tensor, n: int) -> torch.Tensor:
        with self.steps.without_operations():
            repeated = x.reshape(-1).repeat(n)
        self.steps.set_category(repeated, "communication")
        return repeated
