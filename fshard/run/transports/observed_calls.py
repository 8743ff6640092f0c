"""Reports of collectives to observers, with the user's line of the call that launches them."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Protocol

import torch

from fshard._torch.autograd_state import graph_task_id
from fshard._util.cache import CACHE_SIZE, BoundedDict
from fshard.run.transports.base import (
    LABEL,
    MODULES,
    OBSERVERS,
    PHASE,
    Event,
    Label,
    ObservedCall,
)
from fshard.run.transports.divergence_report import (
    backward_label,
    position_text,
    user_frame,
)

LIBRARY_DEPTH = 6
"""Number of frames from `notify` outwards, itself included, that are fshard's in a labelled call.

Frame objects of them would cost half a microsecond each.
"""

_CALLS: BoundedDict[Hashable, tuple[ObservedCall, CodeType | None]] = BoundedDict()
"""By launch, the user's code and instruction in it, label, module and phase: the call and the code.

Codes and labels are keys by their ids, since their hashes would take a microsecond; values keep
them alive.
"""


class ObservedLaunch(Protocol):
    """Collectives that are launched together; launches are equal if they are the same object.

    Attributes:
        events: the collectives, by the phase in which they run.
        label: the label of the call, if none is set while they run.
    """

    events: dict[str, tuple[Event, ...]]
    label: Label | None


@dataclass(slots=True, eq=False)
class _SingleLaunch:
    """Launch of one collective."""

    events: dict[str, tuple[Event, ...]]
    label: Label | None = None


def notify(
    op: str, axes: tuple[str, ...], nbytes: int, rank: int, dtype: torch.dtype | None = None
) -> None:  # fmt: skip
    """Call all observers for one collective."""
    if OBSERVERS.get():
        launch, label = _single_launch(op, axes, nbytes, rank, dtype), LABEL.get()
        frame = sys._getframe() if label is None else _outer_frame()
        notify_call(launch, frame if label is not None and label.line else user_frame(frame))


@lru_cache(maxsize=CACHE_SIZE)
def _single_launch(
    op: str, axes: tuple[str, ...], nbytes: int, rank: int, dtype: torch.dtype | None
) -> _SingleLaunch:  # fmt: skip
    phases = ("forward", "backward")
    return _SingleLaunch(
        {phase: (Event(op, axes, nbytes, rank, phase, dtype),) for phase in phases}
    )


def _outer_frame() -> FrameType:
    """Return the frame at `LIBRARY_DEPTH` from the caller, or the innermost of fewer frames."""
    try:
        return sys._getframe(LIBRARY_DEPTH + 1)
    except ValueError:  # in a thread of PyTorch's
        return sys._getframe()


def notify_call(launch: ObservedLaunch, frame: FrameType | None) -> ObservedCall:
    """Call all observers for a launch, as one of the user's call, and return that call.

    The call is searched from `frame` outwards; None is no frame of the user's. Every observed
    collective comes here, so that the parts of the key are read without functions of Python.
    """
    running, modules, backward = LABEL.get(), MODULES.get(), graph_task_id() != -1
    module = modules[-1][1] if modules else ""
    if frame is None or (running is not None and running.line):  # it says where the call was made
        code, instruction = None, 0
    else:
        code, instruction = frame.f_code, frame.f_lasti
    key = (
        launch, id(code), instruction, running and id(running), module, backward or PHASE.get(),
    )  # fmt: skip
    known = _CALLS.get(key)
    if known is None:
        user = user_frame(frame)
        if user is not frame:
            return notify_call(launch, user)
        # A checkpoint recomputes forward collectives in the backward pass: they count there.
        events = launch.events["backward" if backward else PHASE.get()]
        known = _CALLS[key] = _new_call(events, running or launch.label, module, user), code
    for observer in tuple(OBSERVERS.get()):
        observer(known[0])
    return known[0]


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
        return notify_call(launch, sys._getframe(1))
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
