"""`run_ranks`: functions on real gloo processes, which stay warm from call to call.

The processes see what `torchrun` sets (`RANK`, `WORLD_SIZE`, ...), and each has one thread. Those
of a world size are forked once, by a server that has imported PyTorch, and end when a rank hangs or
dies, when ranks wait for one that has raised, and with this process. Should this process be killed,
the ranks notice and end.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.spawn import get_preparation_data
from typing import IO, Any

from fshard._torch.process_groups import TCPStore
from fshard._util.errors import fail
from fshard._util.text import plural
from fshard.testing.rank_server import START_SECONDS, ForkedRank, close_servers, rank_server

GRACE_SECONDS = 3.0
STACK_SECONDS = 0.3
"""Time in which a rank that hangs writes the stacks of its threads to its output."""


class RankDied(RuntimeError):
    """End of a rank's process while it ran a function.

    >>> import os
    >>> import fshard as fs
    >>> fs.testing.outcomes(os._exit, 7, nproc=1)[0].error
    RankDied('rank 0 of 1 ended with exit code 7')
    """


class RankHung(TimeoutError):
    """Silence of a rank for longer than a call's timeout; its process was ended.

    >>> import time
    >>> import fshard as fs
    >>> type(fs.testing.outcomes(time.sleep, 60, nproc=1, timeout=0.1)[0].error).__name__
    'RankHung'
    """


@dataclass(frozen=True)
class Outcome:
    """Result or error of one rank's call.

    Attributes:
        rank: the rank.
        result: returned value; None if the call raised.
        error: raised error, `RankDied` or `RankHung`; None if the call returned.
        traceback: traceback of the error and the end of the rank's output.
        seconds: time from the call to the answer.

    >>> import math
    >>> import fshard as fs
    >>> outcome = fs.testing.outcomes(math.sqrt, 4.0, nproc=1)[0]
    >>> outcome.rank, outcome.result, outcome.error
    (0, 2.0, None)
    """

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
        self.processes: list[ForkedRank] = []
        self.connections: list[Connection] = []
        self.logs: list[IO[bytes]] = []
        self.store: TCPStore | None = None
        self.lock = threading.RLock()
        """Held during a call: the processes run one at a time."""

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
            for other in rest:
                error = other.error
                first.error.add_note(f"rank {other.rank}: {type(error).__name__}: {error}")
            raise first.error
        return [outcome.result for outcome in done]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60
    ) -> list[Outcome]:
        """Return the outcomes of `function(*args)` by rank, errors of ranks among them.

        A rank that does not answer in `timeout` seconds, or soon after another has raised, is
        taken to hang: all processes are ended, and the next call starts new ones.
        """
        request = _request(function, args)
        with self.lock:
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
                    self.processes[rank].send_signal(signal.SIGUSR1)
                time.sleep(STACK_SECONDS)
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
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
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
        ours, theirs = Pipe()
        self.connections.append(ours)
        self.logs.append(tempfile.TemporaryFile())  # noqa: SIM115
        environment = {
            **os.environ,
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
        with theirs:
            log = self.logs[-1].fileno()
            self.processes.append(rank_server().fork(environment, theirs, log, self.init))

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
        for connection, log in zip(self.connections, self.logs, strict=True):
            connection.close()
            log.close()
        self.processes, self.connections, self.logs, self.store = [], [], [], None


_POOLS: dict[tuple[int, bool], Ranks] = {}


def run_ranks(
    function: Callable[..., Any],
    /,
    *args: Any,
    nproc: int,
    timeout: float = 60.0,
    init: bool = True,
) -> list[Any]:
    """Run a function on real processes, one a rank, and return the results by rank.

    The processes are on this machine, with gloo as the backend; they stay warm for the next call
    and end with this process. Each call starts with `torch.manual_seed(0)`, in the directory and
    with the filters of warnings of this process. Changes of its module and of PyTorch's state stay
    for the next call.

    Args:
        function: function at the top level of a module that the ranks can import.
        *args: its arguments, the same on every rank; they and the results are pickled.
        nproc: number of processes, at least 1.
        timeout: seconds until ranks that have not answered are taken to hang. Once a rank has
            raised, the others have 3 seconds.
        init: create the default process group. If False, the processes only have the environment
            variables of `torchrun`, for functions that call `fs.init` or `init_process_group`.

    Returns:
        The results by rank.

    Raises:
        Exception: the error of the first rank that raised, with its traceback and the errors of
            other ranks as notes.
        RankDied: a process ended.
        RankHung: a process did not answer in time; the note has the stacks of its threads.
        ShardingError: the function or an argument cannot be sent to a process.

    >>> import operator
    >>> import fshard as fs
    >>> fs.testing.run_ranks(operator.add, 1, 2, nproc=2)
    [3, 3]
    """
    return warm_ranks(nproc, init).run(function, *args, timeout=timeout)


def outcomes(
    function: Callable[..., Any],
    /,
    *args: Any,
    nproc: int,
    timeout: float = 60.0,
    init: bool = True,
) -> list[Outcome]:
    """Run a function on real processes and return each rank's result or error.

    Args:
        function: as for `run_ranks`.
        *args: as for `run_ranks`.
        nproc: as for `run_ranks`.
        timeout: as for `run_ranks`.
        init: as for `run_ranks`.

    Returns:
        The outcomes by rank; errors of ranks are not raised.

    Raises:
        ShardingError: the function or an argument cannot be sent to a process.

    >>> import operator
    >>> import fshard as fs
    >>> [type(outcome.error) for outcome in fs.testing.outcomes(operator.floordiv, 1, 0, nproc=2)]
    [<class 'ZeroDivisionError'>, <class 'ZeroDivisionError'>]
    """
    return warm_ranks(nproc, init).outcomes(function, *args, timeout=timeout)


def warm_ranks(nproc: int, init: bool) -> Ranks:
    """Return the warm processes of a world size."""
    if not isinstance(nproc, int) or nproc < 1:
        fail("fs.testing.run_ranks", f"nproc={nproc!r}", "nproc must be an int of at least 1",
             "nproc=2")  # fmt: skip
    return _POOLS.setdefault((nproc, init), Ranks(nproc, init=init))


def _request(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a call for a rank, with this process's directory, import path and warnings."""
    where, main = "fs.testing.run_ranks", {}
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) == "__main__":
        main = {key: value for key, value in get_preparation_data("rank").items()
                if key.startswith("init_main")}  # fmt: skip
        if not main:
            fail(
                where,
                f"{name}, of a notebook or an interactive session",
                "the function must be in a module that other processes can import",
                "write its cell to a file (%%writefile my_ranks.py) and import it from there",
            )
    try:
        call = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        fail(
            where,
            f"{name} with {plural(len(args), 'argument')}: {error}",
            "the function must be at the top level of a module, and arguments must pickle",
            f"a def at the top level in the place of {name}, and values that pickle",
        )
    return pickle.dumps((os.getcwd(), sys.path, main, warnings.filters, call))


@atexit.register
def close_ranks() -> None:
    """End every warm process."""
    while _POOLS:
        _POOLS.popitem()[1].close()
    close_servers()
