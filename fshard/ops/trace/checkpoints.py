"""Checkpointed calls in traced functions: marks in the graph around the operations of the call.

The operations between two marks run under `torch.utils.checkpoint`, on locals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from fshard._torch.checkpointing import RECOMPUTE, contexts_in_graph
from fshard._torch.functorch import is_transformed
from fshard.ops.trace.grad_modes import within_mode


@torch.library.custom_op("fshard::checkpoint_mark", mutates_args=())
def _checkpoint_mark(index: int, begins: bool) -> None:
    return None


@_checkpoint_mark.register_fake
def _(index: int, begins: bool) -> None:
    return None


CHECKPOINT_MARK = torch.ops.fshard.checkpoint_mark.default


@dataclass(frozen=True, eq=False)
class CheckpointedCall:
    """Options of one call of `torch.utils.checkpoint`."""

    preserve_rng_state: bool
    context_fn: Callable[[], Any]
    determinism_check: str
    debug: bool
    early_stop: bool

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return `fn(*args)`, checkpointed; transforms of `torch.func` keep what they save."""
        if is_transformed():
            return fn(*args)
        options = {**vars(self)}
        if torch.compiler.is_compiling():
            options["context_fn"] = contexts_in_graph(self.context_fn)
        return checkpoint(fn, *args, use_reentrant=False, **options)


@dataclass(frozen=True, eq=False)
class CheckpointMark:
    """Target of a graph node: `call` begins, or with None the innermost one ends."""

    call: CheckpointedCall | None

    @property
    def __name__(self) -> str:
        return "end_checkpoint" if self.call is None else "begin_checkpoint"

    def __call__(self) -> NoReturn:
        """Raise: the node is planned, it does not run."""
        raise AssertionError("a mark is planned, it does not run")


# -- while a function is traced -------------------------------------------------------------

_CALLS: ContextVar[list[CheckpointedCall]] = ContextVar("fshard_checkpointed_calls")
"""Checkpointed calls of the function that is being traced, by the number in their marks."""


@contextmanager
def recorded_checkpoints() -> Iterator[list[CheckpointedCall]]:
    """Collect the checkpointed calls that forms of checkpoints record in the block."""
    calls: list[CheckpointedCall] = []
    token = _CALLS.set(calls)
    try:
        yield calls
    finally:
        _CALLS.reset(token)


def record_checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Form of checkpoints in a function traced above autograd, which saves nothing."""
    with _marks(*args[:5]):
        yield


def record_and_recompute(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Form of checkpoints in a function whose own gradients are traced: a second run is too."""
    with _marks(*args[:5]):
        yield from RECOMPUTE(within_mode(fn), *args, **kwargs)


@contextmanager
def _marks(*options: Any) -> Iterator[None]:
    """Record marks around the operations of the block, where gradients are tracked."""
    if not torch.is_grad_enabled():
        yield
        return
    calls = _CALLS.get()
    index = len(calls)
    calls.append(CheckpointedCall(*options))
    CHECKPOINT_MARK(index, True)
    try:
        yield
    finally:
        CHECKPOINT_MARK(index, False)


def name_checkpoints(graph: fx.GraphModule, calls: Sequence[CheckpointedCall]) -> None:
    """Replace the operations that mark checkpointed calls by nodes with their options."""
    for node in graph.graph.find_nodes(op="call_function", target=CHECKPOINT_MARK):
        index, begins = node.args
        node.target, node.args = CheckpointMark(calls[index] if begins else None), ()
