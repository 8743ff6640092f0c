"""Fingerprints of collectives, and the errors for ranks that call different ones.

A fingerprint must be equal on all ranks of a group. Simulated ranks and processes compare the same
fingerprints and raise the same errors.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from fshard._util.cache import CACHE_SIZE, BoundedDict
from fshard._util.errors import ShardingError
from fshard._util.text import one_line
from fshard._util.tracebacks import is_users
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.run.transports.base import (
    CHECKED,
    LABEL,
    Group,
    Label,
    Transport,
    current_transport,
    is_simulated,
)
from fshard.run.transports.running_modules import current_module

Fingerprint = tuple[object, ...]
"""A label, the transport's method, and its arguments."""


# -- source lines ----------------------------------------------------------------------------


BACKWARD = "backward of "
"""Start of the name of a label in a backward pass."""
Place = tuple[str, int]
"""A file and a line in it."""
_OVERRIDES = ("__torch_function__", "__torch_dispatch__")
"""Methods of modes and of tensors that run operations for the code that calls them."""
_IS_USERS: dict[str, bool] = {}
"""By file, whether its frames are the user's: logs look it up for each collective."""
_CALL_LABELS: BoundedDict[Hashable, tuple[Label, CodeType, Label]] = BoundedDict()
"""By the ids of a label and a code, the instruction and the module: these two and the result."""
_BACKWARD_LABELS: BoundedDict[Hashable, tuple[Label, Transport | None, Label]] = BoundedDict()
"""By the ids of a label and a transport, and the module: these two and the result."""


def user_frame(frame: FrameType | None, end: FrameType | None = None) -> FrameType | None:
    """Return the innermost frame, from `frame` outwards up to `end`, that is the user's.

    A user's `__torch_function__` or `__torch_dispatch__` is passed over for the call it overrides.
    """
    while frame is not end and frame is not None:
        known = _IS_USERS.get(frame.f_code.co_filename)
        if known is None:
            known = _IS_USERS[frame.f_code.co_filename] = is_users(frame)
        if known and frame.f_code.co_name not in _OVERRIDES:
            return frame
        frame = frame.f_back
    return None


def place_of(frame: FrameType | None, end: FrameType | None = None) -> Place | None:
    """Return the place of the innermost frame before `end` that is the user's."""
    user = user_frame(frame, end)
    return None if user is None else (user.f_code.co_filename, user.f_lineno)


def line_of(frame: FrameType | None) -> str:
    """Return `file:line` of the user's frame, or ""."""
    place = place_of(frame)
    return "" if place is None else position_text(*place)


def position_text(file: str, line: int | None) -> str:
    """Return `file:line`, or IPython's name of a notebook's cell and the line."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(file)
    return f"{file}:{line}" if cell is None else f"{' '.join(cell)}, line {line}"


def user_line(thread: int | None, label: object) -> str:
    """Return ` at file:line` for the user's code that a thread, by default this one, runs.

    In backward the line of the forward call is added, which the stack may not have.
    """
    frame = sys._getframe() if thread is None else sys._current_frames().get(thread)
    line = line_of(frame)
    call = label.line if isinstance(label, Label) else ""
    position = f" at {line}" if line else ""
    return position + (f", of the call at {call}" if call and call != line else "")


def call_line() -> str:
    """Return `file:line` of the user's call for a later launch; "" if nothing checks it."""
    if CHECKED.get() is None and not is_simulated():
        return ""
    return line_of(sys._getframe())


def call_label(label: Label, frame: FrameType) -> Label:
    """Return a label with the user's line, found from `frame` outwards, and the running module."""
    if label.line:
        return label
    # Logs call this for each collective: the first frame is read without a call.
    code = frame.f_code
    if not _IS_USERS.get(code.co_filename):
        user = user_frame(frame)
        if user is None:
            return label
        frame, code = user, user.f_code
    module = current_module()
    key = id(label), id(code), frame.f_lasti, module  # the code's hash takes a microsecond
    cached = _CALL_LABELS.get(key)
    if cached is None:
        line = position_text(code.co_filename, frame.f_lineno)
        called = replace(label, line=line, module=module or label.module)
        cached = _CALL_LABELS[key] = label, code, called
    return cached[2]


def deferred_label(label: Label) -> Label:
    """Return the label for a later launch, with line and module of the call that runs."""
    return call_label(label, sys._getframe(1))


def backward_label(label: Label | None = None, frame: FrameType | None = None) -> Label | None:
    """Return the label for the backward of a launch; `label` is the launch's, else the running one.

    It has the user's line, found from `frame` outwards, else from the caller, and is cached by it.
    """
    label, checked = label or LABEL.get(), CHECKED.get()
    if label is None:
        return None
    label = call_label(label, frame or sys._getframe(1))
    module = label.module or current_module()
    key = id(label), id(checked), module
    cached = _BACKWARD_LABELS.get(key)
    if cached is None:
        backward = Label(
            f"{BACKWARD}{label.name}", label.mesh, label.line, checked, label.arguments,
            label.shapes, _gradient_ends(label.ends), module,
        )  # fmt: skip
        cached = _BACKWARD_LABELS[key] = label, checked, backward
    return cached[2]


@lru_cache(maxsize=CACHE_SIZE)
def _gradient_ends(ends: tuple[Spec, ...]) -> tuple[Spec, ...]:
    """Return the source and target of a program's gradient; () if a spec has no dual."""
    try:
        return tuple(spec.dual for spec in reversed(ends))
    except ShardingError:
        return ()


def raise_line(traceback: TracebackType | None) -> str:
    """Return ` at file:line` of the user's line that raised, or ""."""
    position = ""
    while traceback is not None:
        code, inner = traceback.tb_frame.f_code, traceback.tb_next
        overrides = position and inner is not None and code.co_name in _OVERRIDES
        if is_users(traceback.tb_frame) and not overrides:
            position = f" at {position_text(code.co_filename, traceback.tb_lineno)}"
        traceback = inner
    return position


def rank_text(mesh: Mesh, rank: int) -> str:
    """Return a rank and its coordinates, `rank 3 (dp=1, tp=1)`."""
    return f"rank {_named(mesh, rank)}"


def _named(mesh: Mesh, rank: int) -> str:
    if rank not in mesh:
        return str(rank)
    return f"{rank} ({', '.join(f'{a}={c}' for a, c in mesh.coords(rank).items())})"


def blame(error: BaseException, mesh: Mesh) -> None:
    """Add a note to an error of a mapped function that names the process's rank, once."""
    transport = current_transport()
    if transport is None or is_simulated() or getattr(error, "same_on_all_ranks", False):
        return
    notes = getattr(error, "__notes__", ())
    if transport.rank in mesh and not any(note.startswith("on rank ") for note in notes):
        error.add_note(f"on {rank_text(mesh, transport.rank)} of {mesh}")


def explain_with(remark: Callable[[], str]) -> None:
    """Add `remark()`, such as "branched on ...", to this rank's line in later errors.

    It is valid until the end of the simulation, or on processes until the next mapped body, and
    replaces an earlier remark.
    """
    transport: Any = current_transport()
    if hasattr(transport, "remark"):
        transport.remark = remark


# -- collectives -----------------------------------------------------------------------------


def fingerprint(op: str, x: torch.Tensor, *arguments: object) -> Fingerprint:
    """Return the fingerprint of an operation on `x`; payloads of an all-to-all may differ."""
    if op == "all_to_all":
        return (LABEL.get(), op, x.dtype)
    return (LABEL.get(), op, *arguments, x.dtype, tuple(x.shape))


def words(call: Fingerprint, group: Group) -> str:
    """Return a call as text, `fs.psum over x: all_reduce(sum, torch.float32, (2,))`.

    Texts of calls with different fingerprints or orders of the group differ.
    """
    label, op, *arguments = call
    wire = f"{op}({', '.join(map(str, arguments))})"
    if not isinstance(label, Label):
        return wire if is_sorted(group) else f"{wire} over ranks {list(group)}"
    shapes = ""
    if len(label.shapes) > 1 or (label.shapes and op == "all_to_all"):
        shapes = f" of {', '.join(str(tuple(shape)) for shape in label.shapes)}"
    return f"{label.name}{label.arguments} over {_axes(label.mesh, group)}: {wire}{shapes}"


@lru_cache(maxsize=CACHE_SIZE)
def ascending(group: Group) -> Group:
    """Return the ranks of a group in ascending order."""
    return tuple(sorted(group))


def is_sorted(group: Sequence[int]) -> bool:
    """Return True if the ranks of a group are in ascending order."""
    return all(map(operator.lt, group, group[1:]))


def _axes(mesh: Mesh, group: Group) -> str:
    """Return the mesh axes that a group communicates along, in its order; else its ranks.

    The order of ranks is added where the axes do not imply it: devices of a mesh in any order.
    """
    ranks = f"ranks {list(group)}"
    if all(rank in mesh for rank in group):
        coords = [mesh.coords(rank) for rank in group]
        axes = [axis for axis in mesh.axes if len({c[axis] for c in coords}) > 1]
        for names in itertools.permutations(axes):
            if mesh.group(group[0], names) == group:
                order = "" if is_sorted(mesh.devices) else f", {ranks}"
                return ", ".join(names) + order
    return ranks


def unsent(
    group: Group, splits: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> ShardingError | None:
    """Return the error of an all-to-all in which a rank expects other sizes than are sent to it."""
    columns = zip(*(send for send, _ in splits), strict=True)
    for i, (sent, (_, receive)) in enumerate(zip(columns, splits, strict=True)):
        if sent != tuple(receive):
            return _error(
                "all_to_all",
                [f"given: rank {group[i]} expects {tuple(receive)} elements, is sent {sent}"],
                "a rank must receive as many elements as are sent to it",
                "use the same spec on every rank",
            )
    return None


# -- errors ------------------------------------------------------------------------------


class Position(NamedTuple):
    """Position of one rank in an error.

    Attributes:
        action: text such as "waiting in fs.psum over x: ...", or "returned".
        line: ` at file:line`.
        awaits: the ranks that it waits for.
        remark: an additional line.
    """

    action: str
    line: str = ""
    awaits: Group = ()
    remark: str = ""


COORDS_LIMIT = 4
"""Coordinates are shown for at most this many ranks in one line."""


def _lines(mesh: Mesh, positions: Mapping[int, Position]) -> list[str]:
    """Return the lines of an error, one for all ranks in the same position.

    Each of these ranks waits for ranks of its own group.
    """
    by_position: dict[tuple[str, str, str], list[int]] = {}
    for rank, position in positions.items():
        by_position.setdefault((position.action, position.line, position.remark), []).append(rank)
    lines: list[str] = []
    for (what, line, remark), ranks in by_position.items():
        awaited = sorted({other for rank in ranks for other in positions[rank].awaits})
        wait = f" for {awaited}" if awaited else ""
        lines.append(f"{_ranks_text(mesh, ranks)}: {what}{wait}{line}")
        lines += [f"  {remark}"] if remark else []
    return lines


def _ranks_text(mesh: Mesh, ranks: Sequence[int]) -> str:
    """Return ranks as text, `ranks 1 (x=1), 2 (x=2)`, or for many `ranks 1, 2, 3, 5, 6`."""
    if len(ranks) == 1:
        return rank_text(mesh, ranks[0])
    names = [str(r) if len(ranks) > COORDS_LIMIT else _named(mesh, r) for r in sorted(ranks)]
    return f"ranks {', '.join(names)}"


def diverged(mesh: Mesh, group: Group, positions: Mapping[int, Position]) -> ShardingError:
    """Return the error of ranks that call different collectives."""
    return _error(
        f"ranks of the group {group} call different collectives",
        _lines(mesh, positions),
        "every rank of a group must call the same collective, with one shape, dtype and arguments",
        "look at what made the ranks differ before these lines",
    )


def stranded(
    head: str, mesh: Mesh, positions: Mapping[int, Position], fix: str = ""
) -> ShardingError:
    """Return the error of ranks that wait for others that never come."""
    rule = "every rank of a group must call the same collectives in the same order"
    if _are_in_backward(positions):
        rule += "; backward a rank calls the transposes of those whose results it has used"
    return _error(head, _lines(mesh, positions), rule, fix or branch_fix(positions))


def branch_fix(positions: Mapping[int, Position]) -> str:
    """Return the fix for ranks that have taken different branches."""
    if _are_in_backward(positions):
        return "torch.where(condition, a, b) in the place of a branch that only some ranks take"
    return "move the collective out of the branch that only some ranks take"


def _are_in_backward(positions: Mapping[int, Position]) -> bool:
    """Return True if a rank waits in the backward pass of a collective."""
    waiting = (position.action for position in positions.values() if position.awaits)
    return any(action.startswith(f"waiting in {BACKWARD}") for action in waiting)


def ended(mesh: Mesh, gone: Mapping[int, str], positions: Mapping[int, Position]) -> ShardingError:
    """Return the error of ranks that wait for processes that have ended.

    Args:
        mesh: the mesh.
        gone: the last known positions of the ended ranks.
        positions: the other ranks.
    """
    last = {rank: Position(f"its process ended ({what})") for rank, what in gone.items()}
    return _error(
        f"{_ranks_text(mesh, tuple(gone))} ended while others wait",
        _lines(mesh, {**positions, **last}),
        "every process of a group must run until its last collective has ended",
        f"look at the output of rank {next(iter(gone))}; SIGKILL, which the out-of-memory killer "
        "sends, leaves none",
    )


def lost(error: BaseException, label: Label | None, op: str, group: Group) -> ShardingError:
    """Return the error of a collective that did not end, from the backend's error."""
    name = op if label is None else f"{label.name} over {_axes(label.mesh, group)}: {op}"
    remark = getattr(current_transport(), "remark", str)()
    return ShardingError(
        f"{name} among the ranks {group} did not end{user_line(None, label)}\n"
        f"  given: {one_line(error)}{remark and f'; {remark}, where ranks may have diverged'}\n"
        "  rule:  every rank of its group must call a collective, within the timeout of "
        "fs.init(mesh, timeout=seconds)\n"
        '  fix:   fs.shard_map(..., check="collectives") names the ranks that do not call it, '
        "and what they do instead"
    )


def _error(head: str, lines: Iterable[str], rule: str, fix: str) -> ShardingError:
    """Return an error that is raised for all ranks, not for the one that finds it."""
    error = ShardingError("\n  ".join([head, *lines, f"rule:  {rule}", f"fix:   {fix}"]))
    error.same_on_all_ranks = True
    return error
