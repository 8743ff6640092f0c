"""Threads of simulated ranks, which later simulations reuse."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import torch


class RankThread:
    """Thread that is reused by later simulations: a new one costs more than a collective."""

    __slots__ = ("core", "gate", "job")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], bool] | None = None
        self.core: int | None = None
        threading.Thread(target=self._loop, daemon=True, name="fshard-rank").start()

    def _loop(self) -> None:
        if hasattr(os, "SCHED_BATCH"):
            with suppress(OSError):
                # A thread that wakes up must not preempt the one that holds Python's lock.
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        while True:
            self.gate.acquire()
            job, self.job = self.job, None
            assert job is not None
            if not job():
                return
            job = None  # frees the tensors that it refers to before the next job comes
            IDLE_THREADS.append(self)

    def pin(self, core: int | None) -> None:
        """Pin the thread to one core, or with None to those of the process."""
        if core != self.core:
            with suppress(OSError):  # not permitted: slower, but correct
                all_cores = os.sched_getaffinity(os.getpid())
                os.sched_setaffinity(0, all_cores if core is None else {core})
            self.core = core


IDLE_THREADS: list[RankThread] = []
os.register_at_fork(after_in_child=IDLE_THREADS.clear)


def idle_thread() -> RankThread:
    """Return an idle thread, or a new one."""
    return IDLE_THREADS.pop() if IDLE_THREADS else RankThread()


def core_for_ranks() -> int | None:
    """Return the caller's core, to which all ranks are pinned; None for any core.

    Ranks run in turn: on one core a switch costs half, and data stay in its cache. Operations with
    several threads need the other cores.
    """
    if torch.get_num_threads() > 1 or not sys.platform.startswith("linux"):
        return None
    return int(ctypes.CDLL(None).sched_getcpu())
