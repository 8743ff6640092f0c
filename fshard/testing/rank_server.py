"""Server that forks the ranks of `run_ranks`: PyTorch is imported once, not by every rank."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

SERVE = "import sys; sys.path[:] = {path!r}; from fshard.testing.rank_server import serve; serve()"
START_SECONDS = 90.0
POLL_SECONDS = 0.01
IMPORTS: list[str] = []
"""Names of modules that a server imports before it forks ranks, which would import them each."""


class ForkedRank:
    """A forked process, with the methods of `subprocess.Popen` that a rank needs."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raise `subprocess.TimeoutExpired` after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            self.returncode = self._server.ask("poll", self.pid)
            if self.returncode is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("rank", timeout or 0.0)
                time.sleep(POLL_SECONDS)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:  # not waited for: its id is not another's
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)


class RankServer:
    """Process that has imported PyTorch and forks ranks; it ends with this process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.lock = threading.Lock()
        """Held from a request to its answer."""
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.connection, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE.format(path=sys.path), str(fd), *IMPORTS],
                env=environment, stdin=subprocess.DEVNULL, stdout=self.log,
                stderr=subprocess.STDOUT, pass_fds=[fd],
            )  # fmt: skip

    def ask(self, *request: Any) -> Any:
        """Return the server's answer; an ended server's ranks have ended with exit code -9."""
        try:
            with self.lock:
                self.connection.send(request)
                return self.connection.recv()
        except (EOFError, OSError):
            return -signal.SIGKILL

    def fork(self, environment: dict[str, str], connection: Connection, log: int,
             init: bool) -> ForkedRank:  # fmt: skip
        """Start a rank that answers on `connection` and writes its output to `log`."""
        try:
            with self.lock:
                self.connection.send(("fork", environment, init))
                for fd in (connection.fileno(), log):
                    send_handle(self.connection, fd, self.process.pid)
                if not self.connection.poll(START_SECONDS):
                    raise EOFError
                return ForkedRank(self, self.connection.recv())
        except (EOFError, OSError) as error:
            self.log.seek(0)
            raise RuntimeError(f"ranks did not start\n{self.log.read().decode()}") from error

    def close(self) -> None:
        """End the server."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


_SERVERS: list[RankServer] = []


def rank_server() -> RankServer:
    """Return the server of this environment, whose variables count at the import of PyTorch."""
    environment = {key: x for key, x in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # macOS ends forked processes that load a framework, as PyTorch's do, by default.
    environment |= {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}
    for server in _SERVERS:
        if server.environment == environment and server.process.poll() is None:
            return server
    _SERVERS.append(RankServer(environment))
    return _SERVERS[-1]


def close_servers() -> None:
    """End all servers."""
    while _SERVERS:
        _SERVERS.pop().close()


def serve() -> None:
    """Fork a rank, or report the exit code of one, at each request; end with the caller."""
    from fshard.testing import rank_process

    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # ranks collect their own objects alone
    connection = Connection(int(sys.argv[1]))
    while True:
        try:
            kind, *args = connection.recv()
        except EOFError:
            os._exit(0)
        if kind == "poll":
            pid, status = os.waitpid(args[0], os.WNOHANG)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
            continue
        environment, init = args
        fd, log = recv_handle(connection), recv_handle(connection)
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.environ.clear()
            os.environ.update(environment)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.close(log)
            rank_process.main(fd, init=init)
        for received in (fd, log):
            os.close(received)
        connection.send(pid)
