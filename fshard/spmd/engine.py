"""Gradients taken in the body, and custom functions: what PyTorch's engine runs untracked.

A graph is typed while it is made. What the engine makes of it is in the dual types, and the
casts in it have summed what is to be summed; so nothing is tracked while it runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.autograd import Function

from fshard.spmd.axes import tracking
from fshard.spmd.kinds import Kind, Word
from fshard.spmd.operands import agree, replaced, tensors_in
from fshard.spmd.tracking import Tracker
from fshard.spmd.types import INVARIANT, Rule, State, States

__all__ = ["backward", "gradients", "telling"]


def gradients(tracker: Tracker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`torch.autograd.grad`: gradients are in the dual states of what they are gradients of."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    outputs, inputs = list(tensors_in(given.arguments["outputs"])), given.arguments["inputs"]
    seeds = given.arguments["grad_outputs"]
    _check_seeds(tracker, "torch.autograd.grad", outputs, seeds)
    with tracker.pause():
        result = func(*args, **kwargs)
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for x, gradient in zip(wanted, result, strict=True):
        if gradient is not None:
            tracker.record(gradient, tracker.states(x).dual)
    return result


def _check_seeds(tracker: Tracker, op: str, outputs: Sequence[torch.Tensor], seeds: Any) -> None:
    """Raise where what backward starts from is not of the dual type of an output."""
    given = list(tensors_in(seeds)) if seeds is not None else [None] * len(outputs)
    for y, seed in zip(outputs, given, strict=False):
        wanted = tracker.states(y).dual
        have = (
            wanted.updated(wanted.axes("unreduced"), None) if seed is None else tracker.states(seed)
        )
        for axis in sorted({axis for axis, _ in (*wanted.items, *have.items)}):
            if not _fits(have.at(axis), wanted.at(axis)):
                _refuse_seed(tracker, op, y, seed, axis, wanted)


def _fits(have: State | None, wanted: State | None) -> bool:
    """Whether a cotangent may be in a state; equal values may count as varying or reduced."""
    if have == wanted or (wanted is not None and wanted[0] == "varying" and have is None):
        return True
    return have is None and wanted is not None and wanted[0] == "reduced"


def _refuse_seed(
    tracker: Tracker, op: str, y: torch.Tensor, seed: torch.Tensor | None, axis: str, wanted: States
) -> NoReturn:
    given = "ones" if seed is None else str(tracker.typeof(seed))
    state = wanted.at(axis)
    word = "invariant" if state is None else state[0]
    was = {"invariant": "invariant", "varying": "varying", "reduced": "unreduced"}.get(
        word, "reduced"
    )
    fix = {
        "invariant": f"fs.psum(g, {axis!r})",
        "unreduced": f"grad_outputs=fs.pcast(g, {axis!r}, to='unreduced') of a g that varies, or "
        f"the gradient of fs.pcast(y, {axis!r}, to='varying')",
    }.get(word, f"fs.psum(g, {axis!r}) or fs.pcast make it {word}")
    tracker.fail(op, f"a cotangent {given} for {tracker.typeof(y)}",
                 f"the cotangent of what is {was} along {axis} is {word}", fix)  # fmt: skip


def backward(tracker: Tracker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`backward()`: its leaves are tensors that the body has made."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    names = given.arguments
    outputs = list(tensors_in(names.get("self", names.get("tensors"))))
    seeds = names.get("gradient", names.get("grad_tensors"))
    _check_seeds(tracker, "backward", outputs, seeds)
    if names.get("inputs") is None:
        for leaf in _leaves(outputs):
            if tracker.is_outside(leaf):
                tracker.fail(
                    "backward",
                    f"a loss that depends on a tensor of shape {tuple(leaf.shape)} from outside of "
                    "the body",
                    "backward() adds to the .grad of leaves that the body has made; those from "
                    "outside belong to all ranks",
                    "torch.autograd.grad(loss, [x, ...]), or x = x.detach().requires_grad_() first",
                )
    with tracker.pause():
        return func(*args, **kwargs)


def _leaves(outputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves that a graph hangs on."""
    todo = [y.grad_fn for y in outputs if y.grad_fn is not None]
    yield from (y for y in outputs if y.grad_fn is None and y.requires_grad)
    seen = set(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)


# -- what PyTorch does not tell a mode of --------------------------------------------------

_APPLY = Function.__dict__["apply"].__func__
_BACKWARD = torch.autograd.backward
_PARAMETER = torch.nn.Parameter.__new__
_RUNNING: list[Tracker] = []


@contextmanager
def telling(tracker: Tracker) -> Iterator[None]:
    """Tell `tracker` in the block of what PyTorch tells no function mode of.

    While any such block runs, in any thread, `torch.autograd.Function.apply`,
    `torch.autograd.backward` and the making of an `nn.Parameter` are replaced by ones that ask
    the running body's tracker.
    """
    if not _RUNNING:
        Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
        torch.autograd.backward = _backward_of_all
        torch.nn.Parameter.__new__ = staticmethod(_parameter)  # type: ignore[assignment, method-assign]
    _RUNNING.append(tracker)
    try:
        yield
    finally:
        _RUNNING.remove(tracker)
        if not _RUNNING:
            Function.apply = classmethod(_APPLY)  # type: ignore[assignment, method-assign]
            torch.autograd.backward = _BACKWARD
            torch.nn.Parameter.__new__ = staticmethod(_PARAMETER)  # type: ignore[method-assign]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`: a custom function is linear in nothing, and takes operands that agree."""
    tracker = None if cls.__module__.startswith("fshard.") else tracking()
    if tracker is None:
        return _APPLY(cls, *args, **kwargs)
    if cls.__name__ == "CheckpointFunction":
        tracker.fail("torch.utils.checkpoint", "use_reentrant=True",
                     "what is computed again in backward is part of the graph that is typed",
                     "use_reentrant=False")  # fmt: skip
    kind = Kind(f"{cls.__name__}.apply", Word.OP, Rule.OTHER)
    states, new = agree(tracker, kind, args, kwargs)
    result = _APPLY(cls, *replaced(args, new), **replaced(kwargs, new))
    for each in tensors_in(result):
        if id(each) not in tracker.table:
            tracker.record(each, states)
    return result


@functools.wraps(_BACKWARD)
def _backward_of_all(*args: Any, **kwargs: Any) -> None:
    tracker = tracking()
    if tracker is None:
        _BACKWARD(*args, **kwargs)
    else:
        backward(tracker, _BACKWARD, args, kwargs)


def _parameter(cls: Any, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
    """`nn.Parameter(data)`: another tensor over the same memory."""
    made = _PARAMETER(cls, data, requires_grad)
    tracker = tracking()
    if tracker is not None:
        tracker.record(made, INVARIANT if data is None else tracker.states(data))
    return made
