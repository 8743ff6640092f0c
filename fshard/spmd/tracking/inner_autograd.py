"""Gradients taken in the body, and entry points of PyTorch that bypass function modes.

A graph gets its types while it is recorded, and its casts contain all sums of gradients. Gradients
therefore have the dual types, and nothing is tracked while PyTorch's engine runs. A host read does
not change them: ends of a gradient that are control-dependent are compared by value.
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
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.tree import tensors_in
from fshard.spmd.axis_env import current_tracker
from fshard.spmd.closure_inputs import graph_leaves
from fshard.spmd.tracking.gradient_sums import inner_gradient_sums
from fshard.spmd.tracking.insert_casts import join_operands, replace_tensors
from fshard.spmd.tracking.out_spec_check import GRADIENTS, Promise, check_values, sums_problem
from fshard.spmd.tracking.read_agreement import all_have_read
from fshard.spmd.tracking.torch_effects import Action, OpEffect
from fshard.spmd.tracking.tracker import Tracker
from fshard.spmd.types import (
    CONTROL_DEPENDENT,
    INVARIANT,
    VARYING,
    State,
    States,
    TypeConflict,
    TypeRule,
    join_states,
    state_word,
)


def run_autograd_grad(
    tracker: Tracker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run `torch.autograd.grad`; each gradient has the dual states of its input."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    inputs, seeds = bound.arguments["inputs"], bound.arguments["grad_outputs"]
    input_list, outputs = _as_list(inputs), bound.arguments["outputs"]
    _check_seeds(tracker, "torch.autograd.grad", outputs, seeds)
    agreed = _agree(tracker, outputs, seeds, input_list)
    with tracker.pause(), tracker.agreed.extended(agreed):
        result = func(*args, **kwargs)
        # The engine may return a cotangent itself, or one tensor twice: each gradient needs a
        # record of its own.
        seen, gradients = set(map(id, _as_list(seeds))), []
        for g in result:
            gradients.append(g.view_as(g) if g is not None and id(g) in seen else g)
            seen.add(id(g))
        result = tuple(gradients)
    for x, gradient in zip(input_list, result, strict=True):
        if gradient is not None:
            tracker.record(gradient, tracker.states(x).dual)
    return result


def _agree(
    tracker: Tracker, outputs: Any, seeds: Any, inputs: Sequence[torch.Tensor]
) -> frozenset[str]:
    """Return the axes along which ends of a gradient are control-dependent, and equal by value.

    Along these the gradient is the one without the host's read. Raises `ShardingError` for values
    that differ, and for graphs with other collectives on other ranks. An output or cotangent counts
    as varying where the other one varies.
    """
    if not all_have_read(tracker, "gradient"):
        return frozenset(tracker.read_states.axes("varying"))

    def axes_in(x: torch.Tensor | None, state: State) -> set[str]:
        items = () if x is None else tracker.states(x).items
        return {axis for axis, other in items if other == state}

    ends: list[tuple[str, torch.Tensor, set[str]]] = []
    for y, seed in itertools.zip_longest(_as_list(outputs), _as_list(seeds)):
        if isinstance(y, torch.Tensor):
            varying = axes_in(y, VARYING) | axes_in(seed, VARYING)
            ends.append(("an output", y, axes_in(y, CONTROL_DEPENDENT) - varying))
            if seed is not None:
                ends.append(("a cotangent", seed, axes_in(seed, CONTROL_DEPENDENT) - varying))
    ends += [
        ("an input", x, axes_in(x, CONTROL_DEPENDENT))
        for x in inputs
        if isinstance(x, torch.Tensor)
    ]
    agreed = frozenset(axis for *_, axes in ends for axis in axes)
    with tracker.agreed.extended(agreed):
        ys = [y for y in _as_list(outputs) if isinstance(y, torch.Tensor)]
        sums = inner_gradient_sums(tracker, ys, inputs)
    problem = sums_problem(tracker, sums)
    if problem is not None:
        tracker.raise_all([problem])
    promises = [
        Promise(f"{name} of a gradient", x, PartitionSpec(unreduced=agreed - axes))
        for name, x, axes in ends
        if axes
    ]
    if promises:
        axes = [axis for axis in tracker.mesh.axes if axis in agreed]
        with tracker.pause():
            sites = tracker.read_sites
            check_values(tracker.mesh, axes, promises, tracker.name, sites, subject=GRADIENTS)
    return agreed


def _as_list(tensors: Any) -> list[Any]:
    """Return a tensor, a sequence of tensors and None, or None as a list."""
    if tensors is None or isinstance(tensors, torch.Tensor):
        return [] if tensors is None else [tensors]
    return list(tensors)


def _check_seeds(tracker: Tracker, op: str, outputs: Any, seeds: Any) -> None:
    """Raise if a cotangent does not have the dual type of its output."""
    for y, seed in itertools.zip_longest(_as_list(outputs), _as_list(seeds)):
        if not isinstance(y, torch.Tensor):
            continue  # a graph edge, or a superfluous seed, which PyTorch refuses
        dual = tracker.states(y).dual
        states = (
            dual.updated(dual.axes("unreduced"), None) if seed is None else tracker.states(seed)
        )
        for axis in sorted({axis for axis, _ in (*dual.items, *states.items)}):
            if not _fits(states.at(axis), dual.at(axis)):
                _refuse_seed(tracker, op, y, seed, axis, dual)


def _fits(state: State | None, dual: State | None) -> bool:
    """Return True if a cotangent may have a state; equal values may count as varying or reduced."""
    if state == dual or (dual is not None and dual[0] == "varying" and state is None):
        return True
    if state == CONTROL_DEPENDENT or dual == CONTROL_DEPENDENT:
        return state_word(state) in ("varying", "invariant") and state_word(dual) != "unreduced"
    return state is None and dual is not None and dual[0] == "reduced"


def _refuse_seed(
    tracker: Tracker, op: str, y: torch.Tensor, seed: torch.Tensor | None, axis: str, dual: States
) -> NoReturn:
    cotangent = "ones" if seed is None else str(tracker.typeof(seed))
    word, state_name = state_word(dual.at(axis)), state_word(tracker.states(y).at(axis))
    fix = {
        "invariant": f"fs.psum(g, {axis!r})",
        "unreduced": f"grad_outputs=fs.pcast(g, {axis!r}, to='unreduced') for a varying g, or "
        f"the gradient of fs.pcast(y, {axis!r}, to='varying')",
    }.get(word, f"fs.psum(g, {axis!r}), or fs.pcast to {word}")
    tracker.fail(op, f"a cotangent {cotangent} for {tracker.typeof(y)}",
                 f"the cotangent of a value that is {state_name} along {axis} must be {word}",
                 fix)  # fmt: skip


def run_backward(
    tracker: Tracker, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run `backward()`, whose leaves must be tensors that the body has computed."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    output_arg = arguments.get("self", arguments.get("tensors"))
    outputs = list(tensors_in(output_arg))
    seeds = arguments.get("gradient", arguments.get("grad_tensors"))
    _check_seeds(tracker, "backward", output_arg, seeds)
    inputs = arguments.get("inputs")
    leaves = list(graph_leaves(outputs) if inputs is None else tensors_in(inputs))
    if inputs is None:
        for leaf in leaves:
            if tracker.is_outside(leaf):
                tracker.fail(
                    "backward",
                    f"a loss that depends on a tensor of shape {tuple(leaf.shape)} from outside of "
                    "the body",
                    "the leaves of backward() must be computed in the body: all ranks share those "
                    "from outside, and their .grad",
                    "torch.autograd.grad(loss, [x, ...]), or x = x.detach().requires_grad_() first",
                )
    agreed = _agree(tracker, output_arg, seeds, leaves)
    with tracker.pause(), tracker.agreed.extended(agreed):
        leaf_grads = [(x, x.grad) for x in leaves if x.is_leaf or x.retains_grad]
        before = [
            tracker.states(g) if g is not None and id(g) in tracker.table else None
            for _, g in leaf_grads
        ]
        func(*args, **kwargs)
        for (x, _), states in zip(leaf_grads, before, strict=True):
            if states is not None:
                _record_accumulated(tracker, x, states)


def _record_accumulated(tracker: Tracker, x: torch.Tensor, before: States) -> None:
    """Record the states of a gradient that was added to one in the states `before`."""
    assert x.grad is not None
    added = tracker.states(x).dual
    joined = join_states((before, added), TypeRule.LINEAR)
    if isinstance(joined, TypeConflict):
        gradient = f"a gradient{added} of a tensor whose .grad is {tracker.typeof(x.grad)}"
        tracker.fail("backward", gradient, joined.rule, "x.grad = None before")
    tracker.record(x.grad, joined.result)


# -- entry points that bypass function modes -----------------------------------------------

_APPLY = Function.__dict__["apply"]
_BACKWARD = torch.autograd.backward
_PARAMETER = torch.nn.Parameter.__new__
_AS_SUBCLASS, _SET = torch.Tensor.as_subclass, torch.Tensor.set_
_ACTIVE: list[Tracker] = []
_PATCH_LOCK = threading.Lock()


@contextmanager
def patched_entry_points(tracker: Tracker) -> Iterator[None]:
    """Patch entry points that bypass function modes, so that they report to `tracker`.

    The patches of `_PATCHES` are in place while any such block runs in any thread, and use the
    tracker of the running body.
    """
    with _PATCH_LOCK:
        if not _ACTIVE:
            for owner, name, _, replacement in _PATCHES:
                setattr(owner, name, replacement)
        _ACTIVE.append(tracker)
    try:
        yield
    finally:
        with _PATCH_LOCK:
            _ACTIVE.remove(tracker)
            if not _ACTIVE:
                for owner, name, before, _ in _PATCHES:
                    if before is None:  # inherited
                        delattr(owner, name)
                    else:
                        setattr(owner, name, before)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `Function.apply`: operands must agree, and the result is linear in none of them."""
    tracker = None if cls.__module__.startswith("fshard.") else current_tracker()
    if tracker is None:
        return _APPLY.__get__(None, cls)(*args, **kwargs)
    effect = OpEffect(f"{cls.__name__}.apply", Action.OP, TypeRule.OTHER)
    states, casts = join_operands(tracker, effect, args, kwargs)
    run = _APPLY.__get__(None, cls)
    result = run(*replace_tensors(args, casts), **replace_tensors(kwargs, casts))
    for output in tensors_in(result):
        # A tensor without a recorded write was written by a kernel outside of PyTorch.
        if id(output) not in tracker.table or id(output) in tracker.blank:
            tracker.record(output, states)
    return result


def _as_subclass(x: torch.Tensor, cls: type[torch.Tensor]) -> Any:
    """Run `Tensor.as_subclass`, which returns another tensor over the same memory."""
    result = _AS_SUBCLASS(x, cls)
    tracker = current_tracker()
    if tracker is not None:
        tracker.record(result, tracker.states(x))
    return result


def _set(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run `Tensor.set_`, which gives the tensor other memory, whose states it takes."""
    tracker = current_tracker()
    if tracker is None or id(x) not in tracker.table:
        return _SET(x, *args, **kwargs)
    tracker.check_write(x, "set_")
    for arg in tensors_in((args, kwargs)):
        tracker.states(arg)
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
    """Run `nn.Parameter(data)`, which returns another tensor over the same memory."""
    parameter = _PARAMETER(cls, data, requires_grad)
    tracker = current_tracker()
    if tracker is not None:
        tracker.record(parameter, INVARIANT if data is None else tracker.states(data))
    return parameter


def _complex_part(name: str) -> property:
    """Return the property `Tensor.real` or `Tensor.imag` with a setter that reports the write."""
    descriptor = getattr(TensorBase, name)

    def write(x: torch.Tensor, value: torch.Tensor) -> None:
        if current_tracker() is None:
            descriptor.__set__(x, value)
        else:
            descriptor.__get__(x).copy_(value)

    return property(descriptor.__get__, write)


def _refuse_script(call: Any) -> Any:
    """Return a call of a TorchScript function that refuses to run in a tracked body."""

    def refuse(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        tracker = current_tracker()
        if tracker is None:
            return call(scripted, *args, **kwargs)
        tracker.fail(scripted.name, "a TorchScript function",
                     "a body must call Python functions, whose types can be tracked",
                     "the Python function that was scripted, or check=False")  # fmt: skip

    return refuse


def _patch(owner: Any, name: str, replacement: Any) -> tuple[Any, str, Any, Any]:
    return owner, name, vars(owner).get(name), replacement


_PATCHES = (
    _patch(Function, "apply", classmethod(_apply)),
    _patch(torch.autograd, "backward", _backward_of_all),
    _patch(torch.nn.Parameter, "__new__", staticmethod(_parameter)),
    _patch(torch.Tensor, "as_subclass", _as_subclass),
    _patch(torch.Tensor, "set_", _set),
    *(_patch(torch.Tensor, name, _complex_part(name)) for name in ("real", "imag")),
    *(
        _patch(scripted, "__call__", _refuse_script(scripted.__call__))
        for scripted in (torch.jit.ScriptFunction, ScriptMethod)
    ),
)
"""Owner, name, original (None if inherited) and replacement of each patched entry point."""
