"""Ctrl-C ends simulated ranks, and later calls start anew."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.run.transports.rank_threads import IDLE_THREADS

MESH = fs.Mesh(x=2)


@pytest.fixture(autouse=True)
def sigint_raises() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGINT, which shells make background commands ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    """Send SIGINT to the thread that waits for the ranks, as Ctrl-C does."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def mapped(body: Callable[[torch.Tensor], Any]) -> Any:
    return fs.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check=False)


def running_ranks() -> int:
    """Return the number of ranks' threads that are not idle."""
    return sum(t.name == "fshard-rank" for t in threading.enumerate()) - len(IDLE_THREADS)


def run_interrupted(body: Callable[[torch.Tensor], Any]) -> None:
    """Run a body that is interrupted; assert that its threads end and that a later call works."""
    with pytest.raises(KeyboardInterrupt):
        mapped(body)(torch.ones(2))
    deadline = time.monotonic() + 5
    while running_ranks() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running_ranks()
    assert mapped(lambda x: fs.psum(x, "x"))(torch.ones(2)).tolist() == [2, 2]


def test_ranks_end_at_their_next_collective() -> None:
    steps: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        for i in range(10_000):
            steps.append(i)
            if len(steps) == 20:
                interrupt()
            x = fs.psum(x, "x") / 2
            time.sleep(0.001)
        return x

    run_interrupted(body)
    count = len(steps)
    time.sleep(0.05)
    assert len(steps) == count < 10_000


def test_rank_that_simulates_others_ends() -> None:
    def inner() -> torch.Tensor:
        x = torch.ones(1)
        interrupt()
        for _ in range(10_000):
            x = fs.psum(x, "x", mesh=MESH) / 2
            time.sleep(0.001)
        return x

    run_interrupted(lambda x: x + fs.simulate(MESH, inner)[0])


ENDLESS = """
import os, signal, threading, time
import torch
import fshard as fs
from fshard.run.transports.rank_threads import IDLE_THREADS

MESH = fs.Mesh(x=2)
signal.signal(signal.SIGINT, signal.default_int_handler)

def loop(x):
    while True:
        try:
            x = x * 1
        except Exception:
            pass

def nested(x):
    return fs.simulate(MESH, loop, x)

def mapped(x):
    return fs.shard_map(loop, mesh=MESH, in_specs=fs.P(), out_specs=fs.P(), check=False)(x)

class Endless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        return loop(grad)

def backward(x):
    Endless.apply(x.clone().requires_grad_()).sum().backward()

for body in (loop, nested, mapped, backward):
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        fs.simulate(MESH, body, torch.ones(2))
    except KeyboardInterrupt:
        took = time.monotonic() - start
    time.sleep(0.05)
    ranks = sum(t.name == "fshard-rank" for t in threading.enumerate())
    print(body.__name__, took < 0.9, ranks - len(IDLE_THREADS))
"""


def test_ranks_without_collectives_end_at_once() -> None:
    """A process of its own: ranks that do not end would slow all later tests."""
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=200, check=False
    )
    names = "loop", "nested", "mapped", "backward"
    assert done.stdout.splitlines() == [f"{name} True 0" for name in names], done.stderr
