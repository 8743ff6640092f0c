"""Places in the user's source and modules of operations that are traced, on nodes of the graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from torch import fx
from torch.fx import traceback

from fshard._torch.autograd_state import graph_task_id
from fshard._torch.module_state import without_module_trackers
from fshard.layout.tree import tensors_in
from fshard.run.transports.base import RUNNING, Running
from fshard.run.transports.divergence_report import place_of, position_text
from fshard.run.transports.running_modules import current_module, recorded_modules

MODULE = "nn_module_stack"
"""Key of the modules whose forward runs in the metadata of a node, as PyTorch has it."""
BOUNDARY = "fshard.ops.trace.trace"
"""Module whose frames call the traced function: frames further out are not of it."""


@contextmanager
def recorded_places() -> Iterator[None]:
    """Give the nodes of the block the place and the module that `note_place` has set last.

    Modules do not run for PyTorch's own trackers then.
    """
    token = RUNNING.set(Running(RUNNING.get().phase))
    try:
        with traceback.preserve_node_meta(), without_module_trackers(), recorded_modules():
            yield
    finally:
        RUNNING.reset(token)


def note_place() -> None:
    """Set place and module of the nodes that follow: the innermost line of the traced function."""
    start: FrameType = sys._getframe(1)
    end: FrameType | None = start
    while end is not None and end.f_globals.get("__name__") != BOUNDARY:
        end = end.f_back
    place = place_of(start, end)
    traceback.set_stack_trace([] if place is None else [position_text(*place)])
    _note_running_module()


def _note_running_module() -> None:
    path = current_module()
    if path or graph_task_id() == -1:  # gradients have the module of their operation
        _note_module(path)


def _note_module(path: str, *_: object) -> None:
    """Set the module of the nodes that follow."""
    meta: Any = traceback.get_current_meta()
    meta[MODULE] = {path: (path, "")} if path else {}


def note_gradients(outputs: Any) -> None:
    """Let the gradients of an operation have its module, and what follows the running one."""
    _note_running_module()
    for x in tensors_in(outputs):
        node: Any = x.grad_fn
        if node is not None and MODULE not in node.metadata:
            node.metadata[MODULE] = path = current_module()
            node.register_prehook(partial(_note_module, path))


def place_of_node(node: fx.Node) -> str:
    """Return `file:line` of a node, "" if it is unknown."""
    return node.stack_trace or ""


def module_of_node(node: fx.Node) -> str:
    """Return the path of the module whose forward ran a node, "" if none did."""
    return next(iter(node.meta.get(MODULE, ())), "")
