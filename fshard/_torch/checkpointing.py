"""`torch.utils.checkpoint` within the library: one form of it, which callers may replace.

In the block of `checkpoint_form` a checkpoint with `use_reentrant=True` runs as one with False: the
second run is then part of the recorded graph, which `torch.autograd.grad` differentiates.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch.utils import checkpoint

Form = Callable[..., Iterator[None]]
"""Generator function around the first run of a checkpointed function, which is its argument.

The arguments after it are `preserve_rng_state`, `context_fn`, `determinism_check`, `debug`,
`early_stop`, and those of the function.
"""
StopRecomputation: type[Exception] = checkpoint._StopRecomputationError
"""Raised in a second run once everything that was saved in the first is there."""
_GENERATOR: Any = checkpoint._checkpoint_without_reentrant_generator
_IMPLEMENTATION: Any = getattr(checkpoint, "_checkpoint_without_reentrant_generator_impl", None)
"""The function of PyTorch 2.14 that takes arguments and options apart, None in older versions."""
_RESPECTS_HOOKS: ContextVar[bool] = ContextVar("fshard_respects_hooks", default=False)
"""Value of `respect_saved_tensors_hooks`, by default as before PyTorch 2.14."""


def _recompute(
    fn: Callable[..., Any], preserve_rng_state: bool, context_fn: Any, determinism_check: str,
    debug: bool, early_stop: bool, /, *args: Any, **kwargs: Any,
) -> Iterator[None]:  # fmt: skip
    """Run as PyTorch 2.14 does, with the signature of older versions."""
    generator: Iterator[None] = _IMPLEMENTATION(
        fn, args, kwargs, preserve_rng_state=preserve_rng_state, context_fn=context_fn,
        determinism_check=determinism_check, debug=debug, early_stop=early_stop,
        respect_saved_tensors_hooks=_RESPECTS_HOOKS.get(),
    )  # fmt: skip
    return generator


RECOMPUTE: Form = _GENERATOR if _IMPLEMENTATION is None else _recompute
_REENTRANT: Any = checkpoint.CheckpointFunction
_FORM: ContextVar[Form | None] = ContextVar("fshard_checkpoint_form", default=None)
_PATCH_LOCK = threading.Lock()
_ACTIVE: list[Form] = []


def current_form() -> Form:
    """Return the form of checkpoints in this thread."""
    return _FORM.get() or RECOMPUTE


def _in_form(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Run by the current form; checkpoints in the second run have it too."""
    form = _FORM.get()
    if form is None:  # another thread
        return RECOMPUTE(fn, *args, **kwargs)

    def run_again(*xs: Any, **kwargs: Any) -> Any:
        with checkpoint_form(form):
            return fn(*xs, **kwargs)

    return form(run_again, *args, **kwargs)


def _in_form_by_options(
    fn: Callable[..., Any], args: Any, kwargs: Any, *, preserve_rng_state: bool, context_fn: Any,
    determinism_check: str, debug: bool, early_stop: bool,
    respect_saved_tensors_hooks: bool | None = None,
) -> Iterator[None]:  # fmt: skip
    """Run by the current form, with the signature of PyTorch 2.14."""
    options = preserve_rng_state, context_fn, determinism_check, debug, early_stop
    token = _RESPECTS_HOOKS.set(bool(respect_saved_tensors_hooks))
    try:
        generator: Any = _in_form(fn, *options, *args, **kwargs)
        next(generator)
    finally:
        _RESPECTS_HOOKS.reset(token)
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - the generator decides what becomes of it
        with suppress(StopIteration):  # a `context_fn` may suppress the error
            generator.throw(error)
        return
    yield from generator


class _CheckpointFunction:
    """Replacement of PyTorch's reentrant checkpoint."""

    @staticmethod
    def apply(fn: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if _FORM.get() is None:
            return _REENTRANT.apply(fn, preserve_rng_state, *args)
        return checkpoint.checkpoint(
            fn, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
        )


_GRAPH_IDS = itertools.count()


def contexts_in_graph(contexts: Callable[[], Any]) -> Callable[[], Any]:
    """Return a `context_fn` whose policy may tag operations of a graph of `torch.compile`.

    The tags of one checkpointed call have one number, which the compiler else gives itself.
    """

    def numbered() -> Any:
        first, second = contexts()
        if hasattr(first, "ac_graph_id"):  # of a selective policy
            first.ac_graph_id = next(_GRAPH_IDS)
        return first, second

    return numbered


@contextmanager
def checkpoint_form(form: Form | None = None) -> Iterator[None]:
    """Run the checkpoints of the block by `form`, None for the current one.

    It is that of this thread, and of threads that are started with its context.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> with checkpoint_form():
    ...     y = checkpoint.checkpoint(torch.exp, x, use_reentrant=True)
    >>> torch.autograd.grad(y.log().sum(), x)[0]
    tensor([1., 1.])
    """
    form = form or current_form()
    with _PATCH_LOCK:
        if not _ACTIVE:
            _patch(_in_form, _in_form_by_options, _CheckpointFunction)
        _ACTIVE.append(form)
    token = _FORM.set(form)
    try:
        yield
    finally:
        _FORM.reset(token)
        with _PATCH_LOCK:
            _ACTIVE.remove(form)
            if not _ACTIVE:
                _patch(_GENERATOR, _IMPLEMENTATION, _REENTRANT)


def _patch(generator: Any, implementation: Any, reentrant: Any) -> None:
    names = {"CheckpointFunction": reentrant}
    if _IMPLEMENTATION is None:
        names["_checkpoint_without_reentrant_generator"] = generator
    else:
        names["_checkpoint_without_reentrant_generator_impl"] = implementation
    checkpoint.__dict__.update(names)
