"""Reports of collectives to observers, with the user's line of the call that launches them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType

import torch

from fshard._torch.autograd_state import graph_task_id
from fshard._util.cache import CACHE_SIZE, BoundedDict
from fshard.run.transports.base import (
    LABEL,
    OBSERVERS,
    RUNNING,
    Event,
    Label,
    ObservedCall,
    Observer,
)
from fshard.run.transports.divergence_report import (
    backward_label,
    position_text,
    user_frame,
)

_CALLS: BoundedDict[Hashable, LastCall] = BoundedDict()
"""Calls by launch, the user's code and instruction in it, label, module and phase.

Codes and labels are keys by their ids, since their hashes would take a microsecond; values keep
them alive.
"""


State = tuple[int, str, str]
"""Instruction of a call in its code, path of the module that runs, phase of the collective."""


@dataclass(slots=True, eq=False)
class LastCall:
    """Observed call of a launch, and what identifies it among the calls of this launch."""

    call: ObservedCall
    code: CodeType | None
    label: Label | None
    state: State


@dataclass(slots=True, eq=False)
class ObservedLaunch:
    """Collectives that are launched together; launches are equal if they are the same object.

    Attributes:
        events: the collectives, by the phase in which they run.
        label: the label of the call, if none is set while they run.
        last: the call that was observed last: a loop launches from one line.
        entry: the outermost function of fshard in the last call, the number of frames from it to
            that of `notify`, and the label of the call: calls of one label nest no others.
    """

    events: dict[str, tuple[Event, ...]]
    label: Label | None = None
    last: LastCall | None = None
    entry: tuple[CodeType | None, int, Label | None] = None, 0, None


@lru_cache(maxsize=CACHE_SIZE)
def launch_of(
    op: str, axes: tuple[str, ...], nbytes: int, rank: int, dtype: torch.dtype | None = None
) -> ObservedLaunch:
    """Return the launch of one collective."""
    phases = ("forward", "backward")
    return ObservedLaunch(
        {phase: (Event(op, axes, nbytes, rank, phase, dtype),) for phase in phases}
    )


def notify_collective(
    op: str, axes: tuple[str, ...], nbytes: int, rank: int, dtype: torch.dtype | None = None
) -> None:
    """Call all observers, if there are any, for one collective that is not a wire's."""
    if observers := OBSERVERS.get():
        notify(launch_of(op, axes, nbytes, rank, dtype), observers)


def notify(
    launch: ObservedLaunch, observers: Sequence[Observer], frame: FrameType | None = None
) -> ObservedCall:
    """Call the observers for a launch, as one of the user's call, and return that call.

    The user's frame is searched from `frame` outwards. None is the caller of fshard's outermost
    function, which is where it was in the last call: frames within it are passed over, whose
    objects cost half a microsecond each. Every observed collective comes here, and so this is one
    function: on simulated ranks another one costs as much, for its code left the processor's cache
    with the last rank.
    """
    label, (phase, module, _) = LABEL.get(), RUNNING.get()
    if graph_task_id() != -1:  # also forward collectives that a checkpoint recomputes
        phase = "backward"
    if label is not None and label.line:
        frame = None  # the label says where the call was made
    elif frame is None:
        outermost, depth, known = launch.entry
        try:
            entry = sys._getframe(depth)
        except ValueError:  # there are not so many frames
            entry = None
        if entry is not None and entry.f_code is outermost and known is label:
            frame = entry.f_back
        else:
            frame = _find_caller(launch, label)
    code, instruction = (None, 0) if frame is None else (frame.f_code, frame.f_lasti)
    last = launch.last
    state = instruction, module, phase
    # Codes in two files, and labels of two lines, can be equal.
    if last is None or last.code is not code or last.label is not label or last.state != state:
        key = launch, id(code), instruction, label and id(label), module, phase
        last = launch.last = _CALLS.get(key) or _last_call(launch, frame, label, module, phase)
    for observer in tuple(observers):
        observer(last.call)
    return last.call


def _find_caller(launch: ObservedLaunch, label: Label | None) -> FrameType | None:
    """Return the user's frame that called fshard, and record where it was found."""
    outermost, depth = sys._getframe(1), 0
    user = user_frame(outermost)
    while outermost.f_back is not user and outermost.f_back is not None:
        outermost, depth = outermost.f_back, depth + 1
    launch.entry = outermost.f_code, depth, label
    return user


def _last_call(
    launch: ObservedLaunch, frame: FrameType | None, label: Label | None, module: str, phase: str
) -> LastCall:
    """Return the call of a launch as the user's, whose frame is searched from `frame` outwards."""
    user = user_frame(frame)
    code, instruction = (None, 0) if user is None else (user.f_code, user.f_lasti)
    key = launch, id(code), instruction, label and id(label), module, phase
    last = _CALLS.get(key)
    if last is None:
        call = _new_call(launch.events[phase], label or launch.label, module, user)
        last = _CALLS[key] = LastCall(call, code, label, (instruction, module, phase))
    return last


def _new_call(
    events: tuple[Event, ...], label: Label | None, module: str, user: FrameType | None
) -> ObservedCall:
    if label is not None and label.line:
        return ObservedCall(events, label, label.line, label.module or module)
    line = "" if user is None else position_text(user.f_code.co_filename, user.f_lineno)
    return ObservedCall(events, label, line, module)


def notify_transposed(launch: ObservedLaunch, call: ObservedCall | None) -> ObservedCall:
    """Call all observers for the gradient's launch of a call, and return it as a call.

    `call` is None if it was not observed.
    """
    if call is None:
        return notify(launch, OBSERVERS.get(), sys._getframe(1))
    if call.transposed is None:
        label = transposed_label(call) or launch.label
        call.transposed = ObservedCall(launch.events["backward"], label, call.line, call.module)
    for observer in tuple(OBSERVERS.get()):
        observer(call.transposed)
    return call.transposed


def transposed_label(call: ObservedCall | None) -> Label | None:
    """Return the label for the gradient of an observed call, None without one."""
    if call is None or call.label is None:
        return None
    return backward_label(_located_label(call))


@lru_cache(maxsize=CACHE_SIZE)
def _located_label(call: ObservedCall) -> Label:
    """Return the label of a call, which it has, with the line and the module of the call."""
    assert call.label is not None
    return replace(call.label, line=call.line, module=call.module)
