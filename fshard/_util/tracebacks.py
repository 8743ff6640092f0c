"""Tracebacks without the library's frames: an error ends at the user's line.

A public function catches what it raises, calls `hide_frames` and raises again with a bare `raise`,
which adds no entry of its own. Functions that are called often have this in their body, and
`publish` wraps the others. With `FSHARD_TRACEBACK=full` in the environment nothing is hidden.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar, cast

from fshard._util.errors import ShardingError
from fshard._util.signatures import SignatureError, explain_binding

LIBRARY = "fshard"
PACKAGES = frozenset(
    (LIBRARY, "torch", "threading", "optree", "contextlib", "functools", "inspect")
)
"""Packages whose frames are not the user's."""
TYPED = ("<stdin>", "<python-input", "<ipython-input")
"""File names of code typed at a prompt; other code without a file is generated."""


_FOR_USER: set[CodeType] = set()

F = TypeVar("F", bound=Callable[..., Any])


def runs_users_operation(fn: F) -> F:
    """Mark a function whose calls take the user's arguments: errors there are the user's."""
    _FOR_USER.add(fn.__code__)
    return fn


def is_users(frame: FrameType) -> bool:
    """Return True for a frame of a file that is in none of `PACKAGES`."""
    file = frame.f_code.co_filename
    return _package(frame) not in PACKAGES and (not file.startswith("<") or file.startswith(TYPED))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def hide_frames(error: BaseException) -> None:
    """Remove the library's frames from the tracebacks of an error, its causes and its contexts.

    Frames of PyTorch that the library called are removed too. An error that the library's code
    raises without being a `ShardingError` is a bug of the library, and keeps all frames.
    """
    if os.environ.get("FSHARD_TRACEBACK") == "full":
        return
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        todo += (link.__cause__, link.__context__)
        link.__traceback__ = _without_library(link.__traceback__, isinstance(link, ShardingError))
        context = link.__context__
        if isinstance(link, ShardingError) and context is not None:
            # An error that the library translated has no line of the user.
            users = (is_users(entry.tb_frame) for entry in _entries(context.__traceback__))
            link.__suppress_context__ |= not any(users)


def _is_bug(frame: FrameType) -> bool:
    """Return True if an error that a frame raised, not a `ShardingError`, is the library's bug."""
    return _package(frame) == LIBRARY and frame.f_code not in _FOR_USER


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _without_library(traceback: TracebackType | None, ours: bool) -> TracebackType | None:
    entries = list(_entries(traceback))
    if not ours and entries and _is_bug(entries[-1].tb_frame):
        return traceback
    kept: list[TracebackType] = []
    below_library = False
    for entry in entries:
        if is_users(entry.tb_frame):
            below_library = False
        elif _package(entry.tb_frame) == LIBRARY:
            below_library = True
        if not below_library:
            kept.append(entry)
    while ours and kept and not is_users(kept[-1].tb_frame):
        kept.pop()
    first = None
    for entry in reversed(kept):
        entry.tb_next, first = first, entry
    return first


def boundary(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a public function whose errors have no frames of the library.

    Calls that do not match its signature raise a `SignatureError`. A function of any arguments that
    calls `hide_frames` itself is returned unchanged.
    """
    any_arguments = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    takes_any = fn.__code__.co_flags & any_arguments == any_arguments
    if takes_any and "hide_frames" in fn.__code__.co_names:
        return fn

    return _explaining(fn, Exception)


def hiding_frames(backward: F) -> F:
    """Return a backward pass whose errors have no frames of the library: PyTorch calls it."""

    @functools.wraps(backward)
    def call(*args: Any) -> Any:
        try:
            return backward(*args)
        except Exception as error:
            hide_frames(error)
            raise

    return cast("F", call)


def explained(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that explains calls that do not match its signature.

    One without options is returned unchanged unless it is a constructor, and so is one that is
    called often: it calls `hide_frames` itself.
    """
    kinds = {p.kind for p in inspect.signature(method).parameters.values()}
    explains = inspect.Parameter.KEYWORD_ONLY in kinds or method.__name__ == "__init__"
    if not explains or "hide_frames" in method.__code__.co_names:
        return method

    return _explaining(method, SignatureError)


def _explaining(fn: Callable[..., Any], hidden: type[Exception]) -> Callable[..., Any]:
    """Return a function that explains calls that do not match its signature.

    Errors of the type `hidden` have no frames of the library.
    """

    @functools.wraps(fn)
    @runs_users_operation
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return fn(*args, **kwargs)
            except TypeError as error:
                explain_binding(error, call, args, kwargs)
                raise
        except hidden as error:
            hide_frames(error)
            raise

    return call
