"""Reused threads: of simulated ranks, and of calls that wait for other ranks."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import lru_cache
from typing import Any

import torch

from fshard._torch.thread_state import cuda_stream


class RankThread:
    """Thread that runs job after job: a new one costs more than a collective."""

    __slots__ = ("gate", "job", "schedule")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], bool] | None = None
        self.schedule: tuple[int | None, bool] = (None, False)
        threading.Thread(target=self._loop, daemon=True, name="fshard-rank").start()

    def _loop(self) -> None:
        while True:
            self.gate.acquire()
            job, self.job = self.job, None
            assert job is not None
            if not job():
                return
            job = None  # frees the tensors that it refers to before the next job comes
            IDLE_THREADS.append(self)

    def set_schedule(self, core: int | None, takes_turns: bool) -> None:
        """Set how the system schedules this thread, the caller's.

        Args:
            core: the only core, or None for those of the process.
            takes_turns: whether the thread must not preempt, as it wakes up, the one that woke it,
                which still holds Python's lock.
        """
        old, self.schedule = self.schedule, (core, takes_turns)
        with suppress(OSError):  # not permitted: slower, but correct
            if takes_turns != old[1] and hasattr(os, "SCHED_BATCH"):
                policy = os.SCHED_BATCH if takes_turns else os.SCHED_OTHER
                os.sched_setscheduler(0, policy, os.sched_param(0))
            if core != old[0]:
                all_cores = os.sched_getaffinity(os.getpid())
                os.sched_setaffinity(0, all_cores if core is None else {core})


IDLE_THREADS: list[RankThread] = []
WAITING: set[threading.Lock] = set()
"""Locks of the calls that wait for other ranks, released at their ends."""
os.register_at_fork(after_in_child=IDLE_THREADS.clear)
os.register_at_fork(after_in_child=WAITING.clear)


def idle_thread() -> RankThread:
    """Return an idle thread, or a new one."""
    return IDLE_THREADS.pop() if IDLE_THREADS else RankThread()


def start_waiting(function: Callable[..., None], *args: Any) -> threading.Lock:
    """Start a call that waits for other ranks, which may never come, in an idle thread.

    Args:
        function: a function that does not raise.
        args: its arguments.

    Returns:
        A lock that is released when the call ends.
    """
    run, thread, done = copy_context().run, idle_thread(), threading.Lock()
    # NCCL's wait orders the thread's current stream, which must be the caller's.
    stream = cuda_stream()
    done.acquire()
    WAITING.add(done)

    def job() -> bool:
        thread.set_schedule(None, False)
        with torch.cuda.stream(stream):
            run(function, *args)
        WAITING.discard(done)
        done.release()
        return True

    thread.job = job
    thread.gate.release()
    return done


def core_for_ranks() -> int | None:
    """Return the caller's core, to which all ranks are pinned; None for any core.

    Ranks run in turn: on one core a switch costs half, and data stay in its cache. Operations with
    several threads need the other cores.
    """
    if torch.get_num_threads() > 1 or not sys.platform.startswith("linux"):
        return None
    return _core_query()()


@lru_cache(maxsize=1)
def _core_query() -> Callable[[], int]:
    """Return the C library's function that returns the caller's core."""
    query: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    return query
