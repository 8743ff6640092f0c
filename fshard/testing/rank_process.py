"""One rank of `run_ranks`: a process that answers calls until it is ended; see `ranks`."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from multiprocessing.spawn import prepare
from typing import Any, NoReturn

import torch

from fshard._torch.process_groups import init_default_group


def exit_with_parent() -> None:
    """End this process soon after the one that started it, even in the middle of a collective."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer(request: bytes) -> bytes:
    """Run one pickled call: a pickle of `(result, None)` or of `(None, (error, traceback))`."""
    try:
        return pickle.dumps((_call(request), None))
    except Exception as error:  # noqa: BLE001 - the caller raises it
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - an error of any class
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((None, (error, text)))


def _call(request: bytes) -> Any:
    """Return the result of one call, with the caller's directory, imports and warnings."""
    directory, path, main, filters, call = pickle.loads(request)
    os.chdir(directory)
    sys.path[:] = path
    prepare(main)  # runs a script under another name, once
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filters[:] = filters  # type: ignore[index]
        function, args = pickle.loads(call)
        return function(*args)


def main(fd: int, *, init: bool) -> NoReturn:
    """Answer calls over the connection of a file descriptor until one is empty."""
    exit_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    connection = Connection(fd)
    if init:
        init_default_group("gloo")
    connection.send_bytes(b"ready")
    while request := connection.recv_bytes():
        connection.send_bytes(answer(request))
    os._exit(0)  # the end of Python and of process groups takes seconds
