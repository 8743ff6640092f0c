"""What a collective is known by, and the words for ranks that part ways.

A fingerprint is what must be the same on every rank of a group. Simulated ranks and real ones
compare the same fingerprints and say the same sentences.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import CHECKED, LABEL, Group, Label, current_transport, is_simulated

__all__ = [
    "Fingerprint", "Stand", "backward_label", "blame", "call_line", "diverged", "explain_with",
    "fingerprint", "here", "lost", "one_line", "rank_text", "raise_line", "stranded", "unsent",
    "user_frame", "user_line", "words",
]  # fmt: skip

Fingerprint = tuple[object, ...]
"""A label, the operation on the wire, and its arguments: compared as it is."""

PACKAGES = frozenset(("fshard", "torch", "threading", "optree", "contextlib", "functools"))
TYPED = ("<stdin>", "<python-input", "<ipython-input")
"""What a prompt calls the code that a user types; other code without a file is generated."""


# -- where ----------------------------------------------------------------------------


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` on, outside of this package and what is below it."""
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def _line(frame: FrameType | None) -> str:
    """`file:line` of the user's frame, or nothing."""
    found = user_frame(frame)
    return "" if found is None else _at(found, found.f_lineno)


def _at(frame: FrameType, line: int | None) -> str:
    """`file:line`; in a notebook, whose cells are files without telling names, as IPython says."""
    file, ipython = frame.f_code.co_filename, sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(file)
    return f"{file}:{line}" if cell is None else f"{' '.join(cell)}, line {line}"


def _is_users(frame: FrameType) -> bool:
    return _is_users_file(frame.f_globals.get("__name__", ""), frame.f_code.co_filename)


@lru_cache(maxsize=4096)
def _is_users_file(module: str, file: str) -> bool:
    package = module.partition(".")[0]
    return package not in PACKAGES and (not file.startswith("<") or file.startswith(TYPED))


def user_line(thread: int | None, label: object) -> str:
    """` at file:line` for where a thread, or this one, stands in the user's code.

    In backward the line of the forward call is named too: the stack may know nothing of it.
    """
    frame = sys._getframe() if thread is None else sys._current_frames().get(thread)
    line = _line(frame)
    begun = label.line if isinstance(label, Label) else ""
    at = f" at {line}" if line else ""
    return at + (f", of the call at {begun}" if begun and begun != line else "")


def call_line() -> str:
    """`file:line` of the user's call, for what is launched later; nothing where nobody asks."""
    if CHECKED.get() is None and not is_simulated():
        return ""
    return _line(sys._getframe())


def here() -> str:
    """` at file:line` for the user's call, for what is looked at later."""
    return user_line(None, None)


def backward_label() -> Label | None:
    """The label under which the backward of what is being called is launched, if anybody asks."""
    label, checked = LABEL.get(), CHECKED.get()
    if label is None or (checked is None and not is_simulated()):
        return None
    line = label.line or _line(sys._getframe())
    return Label(f"backward of {label.name}", label.mesh, line, checked)


def raise_line(traceback: TracebackType | None) -> str:
    """` at file:line` for the user's line that raised, or nothing."""
    found = ""
    while traceback is not None:
        if _is_users(traceback.tb_frame):
            found = f" at {_at(traceback.tb_frame, traceback.tb_lineno)}"
        traceback = traceback.tb_next
    return found


def one_line(error: BaseException) -> str:
    """The type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def rank_text(mesh: Mesh, rank: int) -> str:
    """`rank 3 (dp=1, tp=1)`."""
    return f"rank {_named(mesh, rank)}"


def _named(mesh: Mesh, rank: int) -> str:
    return f"{rank} ({', '.join(f'{a}={c}' for a, c in mesh.coords(rank).items())})"


def blame(error: BaseException, mesh: Mesh) -> None:
    """Note on an error of the mapped function which rank of a real mesh it is from, once."""
    transport = current_transport()
    if transport is None or is_simulated() or getattr(error, "everywhere", False):
        return
    known = getattr(error, "__notes__", ())
    if transport.rank in mesh and not any(note.startswith("on rank ") for note in known):
        error.add_note(f"on {rank_text(mesh, transport.rank)} of {mesh}")


def explain_with(remark: Callable[[], str]) -> None:
    """Have `remark()` said of this rank, such as "branched on ...", should ranks part ways.

    It holds until the end of the simulation, or of the outermost call whose collectives are
    checked; the last one counts.
    """
    transport: Any = current_transport()
    if hasattr(transport, "remark"):
        transport.remark = remark


# -- what -----------------------------------------------------------------------------


def fingerprint(op: str, x: torch.Tensor, *arguments: object) -> Fingerprint:
    """That of an operation on `x`; only an all-to-all is of other shapes on other ranks."""
    if op == "all_to_all":
        return (LABEL.get(), op, x.dtype)
    return (LABEL.get(), op, *arguments, x.dtype, tuple(x.shape))


def words(call: Fingerprint, group: Group) -> str:
    """`fs.psum over x: all_reduce(sum, torch.float32, (2,))`."""
    label, op, *arguments = call
    wire = f"{op}({', '.join(map(str, arguments))})"
    if not isinstance(label, Label):
        return wire
    return f"{label.name} over {_axes(label.mesh, group)}: {wire}"


def _axes(mesh: Mesh, group: Group) -> str:
    """The axes along which a group lies, in its order; else its ranks."""
    if all(rank in mesh for rank in group):
        coords = [mesh.coords(rank) for rank in group]
        axes = [axis for axis in mesh.axes if len({each[axis] for each in coords}) > 1]
        for names in itertools.permutations(axes):
            if mesh.group(group[0], names) == group:
                return ", ".join(names)
    return f"ranks {list(group)}"


def unsent(
    group: Group, splits: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> ShardingError | None:
    """The error where a rank of an all-to-all expects other numbers than it is sent."""
    for at, (_, receive) in enumerate(splits):
        sent = tuple(send[at] for send, _ in splits)
        if sent != tuple(receive):
            return _error(
                "all_to_all",
                [f"given: rank {group[at]} expects {tuple(receive)} elements, is sent {sent}"],
                "what is sent is what is received",
                "give every rank the same spec",
            )
    return None


# -- who ------------------------------------------------------------------------------


class Stand(NamedTuple):
    """Where a rank stands: in what, in which line, for whom it waits; and what it has to say."""

    what: str
    line: str = ""
    awaits: Group = ()
    remark: str = ""


NAMED = 4
"""Of up to so many ranks in one line the coordinates are told too."""


def _said(mesh: Mesh, stands: Mapping[int, Stand]) -> list[str]:
    """The lines of ranks, those of whom the same is to be said together.

    Ranks that stand in one line wait each for those of their own group.
    """
    alike: dict[tuple[str, str, str], list[int]] = {}
    for rank, stand in stands.items():
        alike.setdefault((stand.what, stand.line, stand.remark), []).append(rank)
    lines: list[str] = []
    for (what, line, remark), ranks in alike.items():
        awaited = sorted({each for rank in ranks for each in stands[rank].awaits})
        wait = f" for {awaited}" if awaited else ""
        lines.append(f"{_places(mesh, ranks)}: {what}{wait}{line}")
        lines += [f"  {remark}"] if remark else []
    return lines


def _places(mesh: Mesh, ranks: Sequence[int]) -> str:
    """`rank 0 (x=0)`, `ranks 1 (x=1), 2 (x=2)`, and of many `ranks 1, 2, 3, 5, 6`."""
    if len(ranks) == 1:
        return rank_text(mesh, ranks[0])
    names = [str(r) if len(ranks) > NAMED else _named(mesh, r) for r in sorted(ranks)]
    return f"ranks {', '.join(names)}"


def diverged(mesh: Mesh, group: Group, stands: Mapping[int, Stand]) -> ShardingError:
    """The error of ranks that call different collectives, and where each of them stands."""
    return _error(
        f"ranks of the group {group} call different collectives",
        _said(mesh, stands),
        "every rank of a group calls the same collective, with one shape and dtype",
        "look at what made the ranks differ before these lines",
    )


BRANCH = "move the collective out of the branch that only some ranks take"


def stranded(
    head: str, mesh: Mesh, stands: Mapping[int, Stand], fix: str = BRANCH
) -> ShardingError:
    """The error of ranks that wait for others in vain, and where each of them stands."""
    rule = "every rank of a group calls the same collectives in the same order"
    return _error(head, _said(mesh, stands), rule, fix)


def lost(error: BaseException, label: Label | None, op: str, group: Group) -> ShardingError:
    """What a backend says of a collective that did not end, in terms of the call."""
    name = op if label is None else f"{label.name} over {_axes(label.mesh, group)}: {op}"
    return ShardingError(
        f"{name} among the ranks {group} did not end{user_line(None, label)}\n"
        f"  given: {one_line(error)}\n"
        "  rule:  a collective ends when every rank of its group has come to it, in the time that "
        "fs.init(mesh, timeout=seconds) gives\n"
        '  fix:   fs.shard_map(..., check="collectives") names the ranks that do not come, and '
        "what they do instead"
    )


def _error(head: str, lines: Iterable[str], rule: str, fix: str) -> ShardingError:
    """An error that belongs to all ranks, not to the one that finds it."""
    error = ShardingError("\n  ".join([head, *lines, f"rule:  {rule}", f"fix:   {fix}"]))
    error.everywhere = True
    return error
