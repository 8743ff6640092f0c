"""Places in the user's source of the operations that are traced, on the nodes of the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

from torch import fx
from torch.fx import traceback

from fshard.run.transports.divergence_report import place_of, position_text

recorded_places: Callable[[], AbstractContextManager[None]] = traceback.preserve_node_meta
"""Context in which nodes get the place that `note_place` has set last."""
BOUNDARY = "fshard.ops.trace.trace"
"""Module whose frames call the traced function: frames further out are not of it."""


def note_place() -> None:
    """Set the place of the nodes that follow: the innermost line of the traced function."""
    start: FrameType = sys._getframe(1)
    end: FrameType | None = start
    while end is not None and end.f_globals.get("__name__") != BOUNDARY:
        end = end.f_back
    place = place_of(start, end)
    traceback.set_stack_trace([] if place is None else [position_text(*place)])


def place_of_node(node: fx.Node) -> str:
    """Return `file:line` of a node, "" if it is unknown."""
    return node.stack_trace or ""
