"""One rank of the harness: `python -m tests.helpers.gloo.worker FD`; see `harness.py`."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist


def exit_with_parent() -> None:
    """End this process soon after the one that started it, even in the middle of a collective."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer(request: bytes) -> bytes:
    """Run one pickled `(function, args)`: a pickle of `(result, None)` or of `(None, failure)`."""
    try:
        torch.manual_seed(0)
        function, args = pickle.loads(request)
        return pickle.dumps((function(*args), None))
    except Exception as error:
        text = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return pickle.dumps((None, (error, text)))


def main() -> None:
    exit_with_parent()
    torch.set_num_threads(1)
    connection = Connection(int(sys.argv[1]))
    if sys.argv[2] == "init":
        dist.init_process_group("gloo")
    connection.send_bytes(b"ready")
    while request := connection.recv_bytes():
        connection.send_bytes(answer(request))
    os._exit(0)  # the end of Python and of process groups takes seconds


if __name__ == "__main__":
    main()
