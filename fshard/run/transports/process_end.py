"""Detection of ended processes: the system closes the sockets of a process, and others notice.

Every rank listens on a socket, whose address is in the store since `fs.init`, and accepts nothing.
A rank that waits for others connects to them. The system completes these connections, and resets
them when the listening process ends: by SIGKILL, by an error or with the script. It needs neither
thread nor heartbeat, and a process that is busy or stopped is not taken for an ended one. The loss
of a machine or of its network is not noticed here; the timeout ends that wait.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any

BACKLOG = 4096
"""Connections that are never accepted: one of every other rank."""


def _route_address() -> str:
    """Return the address from which this machine reaches the others; the local one if unknown."""
    main = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "1"))
    try:
        family, kind, *_, address = socket.getaddrinfo(*main, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def _closer(owner: object, descriptors: dict[int, int]) -> Callable[[], None]:
    """Return a function that closes sockets by their descriptors; it is called as `owner` is freed.

    At the end of the process the system closes them, last of all; Python's sockets would warn.
    """

    def close() -> None:
        for descriptor in descriptors.values():
            os.close(descriptor)

    finalizer = weakref.finalize(owner, close)
    finalizer.atexit = False
    return finalizer  # which is called once


class Listener:
    """Socket of this process, which the system closes with it.

    Args:
        store: a connection to the store of `torch.distributed`, where its address is written.
        key: the key of a rank's address, with `{}` for the rank.
        rank: this process's rank.
        keeper: the process that keeps the store, for errors.
    """

    def __init__(self, store: Any, key: str, rank: int, keeper: str = "a process") -> None:
        self.store, self.key, self.keeper = store, key, keeper
        host = _route_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.host, self.port = server.getsockname()[:2]
        self.close = _closer(self, {rank: server.detach()})
        _LISTENERS.add(self)
        address = json.dumps([socket.gethostname(), self.host, self.port])
        with suppress(RuntimeError):  # the store of the fake backend keeps nothing
            store.set(key.format(rank), address)

    @cached_property
    def watch(self) -> ProcessWatch:
        """The connections of this process to the other ranks, one to each."""
        return ProcessWatch(self.store, self.key)


_LISTENERS: weakref.WeakSet[Listener] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a forked process, such as a loader's, which may outlive this one."""
    for listener in _LISTENERS:
        listener.close()


os.register_at_fork(after_in_child=_close_in_child)


class ProcessWatch:
    """Connections to the listeners of other ranks.

    Args:
        store: the store that has their addresses.
        key: the key of a rank's address, with `{}` for the rank.
    """

    def __init__(self, store: Any, key: str) -> None:
        self.store, self.key = store, key
        self.connections: dict[int, int] = {}
        """Descriptor of the connection to each rank."""
        self.is_local: dict[int, bool] = {}
        """True for a rank of this machine, once its address is known."""
        self.gone: set[int] = set()
        self.lock = threading.Lock()  # a save waits for ranks in a thread of its own
        _closer(self, self.connections)

    def ended(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of `ranks` whose processes have ended, and watch all from now on."""
        with self.lock:
            return self._ended(tuple(ranks))

    def _ended(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        for rank in ranks:
            if rank not in self.is_local:
                with suppress(RuntimeError):  # the store does not answer
                    self._connect(rank)
        poll, by_descriptor = select.poll(), {}
        for rank, descriptor in self.connections.items():
            by_descriptor[descriptor] = rank
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(0):
            rank = by_descriptor[descriptor]
            del self.connections[rank]
            with socket.socket(fileno=descriptor) as connection:
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._note_end(rank, code or errno.ECONNRESET)
        return tuple(rank for rank in ranks if rank in self.gone)

    def _connect(self, rank: int) -> None:
        """Begin a connection to a rank that has written its address."""
        key = self.key.format(rank)
        if not self.store.check([key]):
            return
        name, host, port = json.loads(self.store.get(key))
        self.is_local[rank] = is_local = name == socket.gethostname()
        if ipaddress.ip_address(host).is_loopback and not is_local:
            return  # it names another machine there
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as connection:
            connection.setblocking(False)
            code = connection.connect_ex((host, port))
            if code in (0, errno.EINPROGRESS):
                self.connections[rank] = connection.detach()
            else:
                self._note_end(rank, code)

    def _note_end(self, rank: int, code: int) -> None:
        """Record that a rank has ended, if the error of the connection to it proves that.

        Of another machine a refusal may be a firewall's: it proves nothing, nor does a lost route.
        """
        if code == errno.ECONNRESET or (code == errno.ECONNREFUSED and self.is_local[rank]):
            self.gone.add(rank)
