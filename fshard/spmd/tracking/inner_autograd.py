"""Gradients taken in the body, and custom functions: what PyTorch's engine runs untracked.

A graph is typed while it is made. What the engine makes of it is in the dual types, and the
casts in it have summed what is to be summed; so nothing is tracked while it runs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.autograd import Function

from fshard._torch.operators import ScriptMethod, TensorBase
from fshard.layout.tree import tensors_in
from fshard.spmd.axis_env import current_tracker
from fshard.spmd.closure_inputs import graph_leaves
from fshard.spmd.tracking.insert_casts import join_operands, replace_tensors
from fshard.spmd.tracking.torch_effects import Action, OpEffect
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import (
    INVARIANT,
    State,
    States,
    TypeConflict,
    TypeRule,
    join_states,
    state_word,
)

__all__ = ["patched_entry_points", "run_autograd_grad", "run_backward"]


def run_autograd_grad(
    tracker: Tracker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """`torch.autograd.grad`: gradients are in the dual states of what they are gradients of."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    inputs, seeds = given.arguments["inputs"], given.arguments["grad_outputs"]
    _check_seeds(tracker, "torch.autograd.grad", given.arguments["outputs"], seeds)
    with tracker.pause():
        result = func(*args, **kwargs)
        # A cotangent may come out as it went in, and one tensor as the gradient of two: every
        # gradient has a type of its own.
        seen, own = set(map(id, _each(seeds))), []
        for g in result:
            own.append(g.view_as(g) if g is not None and id(g) in seen else g)
            seen.add(id(g))
        result = tuple(own)
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for x, gradient in zip(wanted, result, strict=True):
        if gradient is not None:
            tracker.record(gradient, tracker.states(x).dual)
    return result


def _each(given: Any) -> list[Any]:
    """One tensor, or a sequence of them with None for some, as a list; None as an empty one."""
    return [] if given is None else [given] if isinstance(given, torch.Tensor) else list(given)


def _check_seeds(tracker: Tracker, op: str, outputs: Any, seeds: Any) -> None:
    """Raise where what backward starts from is not of the dual type of an output."""
    for y, seed in itertools.zip_longest(_each(outputs), _each(seeds)):
        if not isinstance(y, torch.Tensor):
            continue  # an edge of a graph, or a seed too many, which PyTorch refuses
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
    word, was = state_word(wanted.at(axis)), state_word(tracker.states(y).at(axis))
    fix = {
        "invariant": f"fs.psum(g, {axis!r})",
        "unreduced": f"grad_outputs=fs.pcast(g, {axis!r}, to='unreduced') of a g that varies, or "
        f"the gradient of fs.pcast(y, {axis!r}, to='varying')",
    }.get(word, f"fs.psum(g, {axis!r}) or fs.pcast make it {word}")
    tracker.fail(op, f"a cotangent {given} for {tracker.typeof(y)}",
                 f"the cotangent of what is {was} along {axis} is {word}", fix)  # fmt: skip


def run_backward(
    tracker: Tracker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """`backward()`: its leaves are tensors that the body has made."""
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    names = given.arguments
    given_outputs = names.get("self", names.get("tensors"))
    outputs = list(tensors_in(given_outputs))
    seeds = names.get("gradient", names.get("grad_tensors"))
    _check_seeds(tracker, "run_backward", given_outputs, seeds)
    inputs = names.get("inputs")
    leaves = list(graph_leaves(outputs) if inputs is None else tensors_in(inputs))
    if inputs is None:
        for leaf in leaves:
            if tracker.is_outside(leaf):
                tracker.fail(
                    "run_backward",
                    f"a loss that depends on a tensor of shape {tuple(leaf.shape)} from outside of "
                    "the body",
                    "backward() adds to the .grad of leaves that the body has made; those from "
                    "outside belong to all ranks",
                    "torch.autograd.grad(loss, [x, ...]), or x = x.detach().requires_grad_() first",
                )
    with tracker.pause():
        gathered = [(x, x.grad) for x in leaves if x.is_leaf or x.retains_grad]
        before = [
            tracker.states(g) if g is not None and id(g) in tracker.table else None
            for _, g in gathered
        ]
        func(*args, **kwargs)
        for (x, _), was in zip(gathered, before, strict=True):
            if was is not None:
                _add_up(tracker, x, was)


def _add_up(tracker: Tracker, x: torch.Tensor, was: States) -> None:
    """Write down the states of a gradient that was added to one in the states `was`."""
    assert x.grad is not None
    made = tracker.states(x).dual
    joined = join_states((was, made), TypeRule.LINEAR)
    if isinstance(joined, TypeConflict):
        given = f"a gradient{made} of a tensor whose .grad is {tracker.typeof(x.grad)}"
        tracker.fail("run_backward", given, joined.rule, "x.grad = None before")
    tracker.record(x.grad, joined.result)


# -- what PyTorch does not tell a mode of --------------------------------------------------

_APPLY = Function.__dict__["apply"].__func__
_BACKWARD = torch.autograd.backward
_PARAMETER = torch.nn.Parameter.__new__
_AS_SUBCLASS, _SET = torch.Tensor.as_subclass, torch.Tensor.set_
_RUNNING: list[Tracker] = []
_REPLACING = threading.Lock()


@contextmanager
def patched_entry_points(tracker: Tracker) -> Iterator[None]:
    """Tell `tracker` in the block of what PyTorch tells no function mode of.

    While any such block runs, in any thread, what `_INSTEAD` lists is replaced by what asks the
    running body's tracker.
    """
    with _REPLACING:
        if not _RUNNING:
            for owner, name, _, instead in _INSTEAD:
                setattr(owner, name, instead)
        _RUNNING.append(tracker)
    try:
        yield
    finally:
        with _REPLACING:
            _RUNNING.remove(tracker)
            if not _RUNNING:
                for owner, name, before, _ in _INSTEAD:
                    if before is None:  # inherited
                        delattr(owner, name)
                    else:
                        setattr(owner, name, before)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply`: a custom function is linear in nothing, and takes operands that agree."""
    tracker = None if cls.__module__.startswith("fshard.") else current_tracker()
    if tracker is None:
        return _APPLY(cls, *args, **kwargs)
    if cls.__name__ == "CheckpointFunction":
        tracker.fail("torch.utils.checkpoint", "use_reentrant=True",
                     "what is computed again in backward is part of the graph that is typed",
                     "use_reentrant=False")  # fmt: skip
    effect = OpEffect(f"{cls.__name__}.apply", Action.OP, TypeRule.OTHER)
    states, new = join_operands(tracker, effect, args, kwargs)
    result = _APPLY(cls, *replace_tensors(args, new), **replace_tensors(kwargs, new))
    for each in tensors_in(result):
        # What no call was seen to write, a kernel that is no function of PyTorch has written.
        if id(each) not in tracker.table or id(each) in tracker.blank:
            tracker.record(each, states)
    return result


def _as_subclass(x: torch.Tensor, cls: type[torch.Tensor]) -> Any:
    """`Tensor.as_subclass`: another tensor over the same memory."""
    result = _AS_SUBCLASS(x, cls)
    tracker = current_tracker()
    if tracker is not None:
        tracker.record(result, tracker.states(x))
    return result


def _set(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.set_`: the same tensor over other memory, which tells its states."""
    tracker = current_tracker()
    if tracker is None or id(x) not in tracker.table:
        return _SET(x, *args, **kwargs)
    tracker.check_write(x, "set_")
    for each in tensors_in((args, kwargs)):
        tracker.states(each)
    result = _SET(x, *args, **kwargs)
    tracker.forget(x)
    tracker.states(x)
    return result


@functools.wraps(_BACKWARD)
def _backward_of_all(*args: Any, **kwargs: Any) -> None:
    tracker = current_tracker()
    if tracker is None:
        _BACKWARD(*args, **kwargs)
    else:
        run_backward(tracker, _BACKWARD, args, kwargs)


def _parameter(cls: Any, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
    """`nn.Parameter(data)`: another tensor over the same memory."""
    made = _PARAMETER(cls, data, requires_grad)
    tracker = current_tracker()
    if tracker is not None:
        tracker.record(made, INVARIANT if data is None else tracker.states(data))
    return made


def _part(name: str) -> property:
    """`Tensor.real` or `Tensor.imag`: to set it is to write it."""
    part = getattr(TensorBase, name)

    def written(x: torch.Tensor, value: torch.Tensor) -> None:
        if current_tracker() is None:
            part.__set__(x, value)
        else:
            part.__get__(x).copy_(value)

    return property(part.__get__, written)


def _refusing(call: Any) -> Any:
    """The call of a function that TorchScript runs, which is told to nobody."""

    def refuse(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = current_tracker()
        if tracker is None:
            return call(scripted, *args, **kwargs)
        tracker.fail(scripted.name, "a function that TorchScript runs",
                     "what runs in Python is typed; what a script computes is not seen",
                     "the Python function that was scripted, or check=False")  # fmt: skip

    return refuse


def _before(owner: Any, name: str, instead: Any) -> tuple[Any, str, Any, Any]:
    return owner, name, vars(owner).get(name), instead


_INSTEAD = (
    _before(Function, "apply", classmethod(_apply)),
    _before(torch.autograd, "run_backward", _backward_of_all),
    _before(torch.nn.Parameter, "__new__", staticmethod(_parameter)),
    _before(torch.Tensor, "as_subclass", _as_subclass),
    _before(torch.Tensor, "set_", _set),
    *(_before(torch.Tensor, each, _part(each)) for each in ("real", "imag")),
    *(
        _before(each, "__call__", _refusing(each.__call__))
        for each in (torch.jit.ScriptFunction, ScriptMethod)
    ),
)
"""What is replaced: whose it is, its name, what it was, and what it is in a body."""
