"""Functions on real gloo processes, which stay warm from test to test.

`run_ranks(4, function, *args)` calls a module-level function on ranks 0..3 of a process group
and returns the four results. The processes see what `torchrun` sets (`RANK`, `WORLD_SIZE`,
...), warnings are errors, and each has one thread.

The processes of a world size are started once (importing torch takes seconds) and are ended
when a rank hangs or dies, when ranks wait for one that has raised, and with the session.
Should the tests themselves be killed, the ranks notice and end.
"""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

__all__ = ["Outcome", "RankDied", "RankHung", "Ranks", "close_all", "outcomes", "run_ranks"]

ROOT = Path(__file__).parent.parent.parent.parent
START_SECONDS = 90.0
GRACE_SECONDS = 3.0


class RankDied(RuntimeError):
    """A rank's process ended while it ran a function."""


class RankHung(TimeoutError):
    """A rank did not answer in time."""


@dataclass(frozen=True)
class Outcome:
    """Result or error of one rank's call."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    seconds: float = 0.0


class Ranks:
    """Warm processes, with `init=False` in torchrun's environment but without a process group."""

    def __init__(self, size: int, *, init: bool = True) -> None:
        self.size = size
        self.init = init
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.logs: list[IO[bytes]] = []
        self.store: dist.TCPStore | None = None

    # -- calls ------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Return the results of `function(*args)` by rank, or raise the first error.

        The error has the traceback of its rank as a note, and a line for every other.
        """
        done = self.outcomes(function, *args, timeout=timeout)
        failed = sorted(
            (outcome for outcome in done if outcome.error),
            # A rank that ended is the cause of others' errors, which may be seen before it.
            key=lambda outcome: (not isinstance(outcome.error, RankDied), outcome.seconds),
        )
        if failed:
            first, *rest = failed
            assert first.error is not None
            first.error.add_note(f"on rank {first.rank} of {self.size}:\n{first.traceback}")
            for each in rest:
                first.error.add_note(f"rank {each.rank}: {type(each.error).__name__}: {each.error}")
            raise first.error
        return [each.result for each in done]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60
    ) -> list[Outcome]:
        """Return the outcomes of `function(*args)` by rank, errors of ranks among them.

        A rank that does not answer in `timeout` seconds, or soon after another has raised, is
        taken to hang: all processes are ended, and the next call starts new ones.
        """
        request = pickle.dumps((function, args))
        self.start()
        try:
            for rank, connection in enumerate(self.connections):
                try:
                    connection.send_bytes(request)
                except OSError as error:
                    raise RankDied(f"rank {rank} is gone before the call") from error
            answers = self._collect(timeout)
        except BaseException:
            self.kill()
            raise
        if any(isinstance(item.error, RankDied | RankHung) for item in answers):
            self.kill()
        return answers

    def _collect(self, timeout: float) -> list[Outcome]:
        start = time.monotonic()
        deadline = start + timeout
        answers: dict[int, Outcome] = {}
        while len(answers) < self.size:
            waiting = {self.connections[r]: r for r in range(self.size) if r not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            seconds = time.monotonic() - start
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answers[rank] = outcome = self._receive(rank, seconds)
                if outcome.error:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready:
                for rank in waiting.values():
                    hung = RankHung(f"rank {rank} of {self.size} had no answer in {seconds:.1f} s")
                    answers[rank] = Outcome(
                        rank, error=hung, traceback=self._log(rank), seconds=seconds
                    )
        return [answers[rank] for rank in range(self.size)]

    def _receive(self, rank: int, seconds: float) -> Outcome:
        try:
            result, failure = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, OSError):
            code = self.processes[rank].wait()
            died = RankDied(f"rank {rank} of {self.size} ended with exit code {code}")
            return Outcome(rank, error=died, traceback=self._log(rank), seconds=seconds)
        if failure is None:
            return Outcome(rank, result=result, seconds=seconds)
        error, text = failure
        return Outcome(rank, error=error, traceback=f"{text}{self._log(rank)}", seconds=seconds)

    def _log(self, rank: int) -> str:
        """Return the end of a rank's output."""
        log = self.logs[rank]
        log.seek(0)
        return log.read()[-4000:].decode(errors="replace")

    # -- processes --------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes, unless they run."""
        if self.processes:
            return
        try:
            # A port that the system chose and this process keeps: no other can take it.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank in range(self.size):
                self._start_rank(rank, self.store.port)
            for rank, connection in enumerate(self.connections):
                if not connection.poll(START_SECONDS):
                    raise RankHung(f"rank {rank} did not start\n{self._log(rank)}")
                try:
                    connection.recv_bytes()
                except EOFError as error:
                    raise RankDied(f"rank {rank} did not start\n{self._log(rank)}") from error
        except BaseException:
            self.kill()
            raise

    def _start_rank(self, rank: int, port: int) -> None:
        ours, other_value = Pipe()
        self.connections.append(ours)
        self.logs.append(tempfile.TemporaryFile())  # noqa: SIM115
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # As under torchrun: the launcher keeps the store, the ranks are its clients.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with other_value:
            fd = other_value.fileno()
            mode = "init" if self.init else "bare"
            process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.helpers.gloo.worker", str(fd), mode],
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=self.logs[-1],
                stderr=subprocess.STDOUT,
                pass_fds=[fd],
            )
        self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes, by rank."""
        return [process.pid for process in self.processes]

    def close(self) -> None:
        """Ask the processes to end, and kill them after some seconds."""
        try:
            for connection in self.connections:
                connection.send_bytes(b"")
            for process in self.processes:
                process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self.kill()

    def kill(self) -> None:
        """End the processes at once and wait until they are gone."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for item in (*self.connections, *self.logs):
            item.close()
        self.processes, self.connections, self.logs, self.store = [], [], [], None


_POOLS: dict[tuple[int, bool], Ranks] = {}


def pool(size: int, *, init: bool = True) -> Ranks:
    """Return the warm processes of a world size."""
    return _POOLS.setdefault((size, init), Ranks(size, init=init))


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60, init: bool = True
) -> list[Any]:
    """Return the results of `function(*args)` on `size` ranks; see `Ranks.run`."""
    return pool(size, init=init).run(function, *args, timeout=timeout)


def outcomes(
    size: int, function: Callable[..., Any], *args: Any, timeout: float = 60, init: bool = True
) -> list[Outcome]:
    """Return the outcomes of `function(*args)` on `size` ranks; see `Ranks.outcomes`."""
    return pool(size, init=init).outcomes(function, *args, timeout=timeout)


@atexit.register
def close_all() -> None:
    """End every warm process."""
    while _POOLS:
        _POOLS.popitem()[1].close()
