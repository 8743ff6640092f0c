"""Threads and sockets of `check="collectives"`, and the status that ranks write to the store."""

from __future__ import annotations

import threading

import torch

import fshard as fs
from fshard import P
from fshard.run.transports.base import own_transport
from fshard.run.transports.rank_status import Arrival, RankStatus
from fshard.run.transports.torch_distributed import ProcessWorld
from tests.helpers.gloo.harness import run_ranks

PAIR = fs.Mesh(x=2)


def twenty_sums(x: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        x = fs.psum(x, "x") / 2
    return x


def new_threads_and_host() -> tuple[int, str]:
    fs.init(PAIR, timeout=60)
    f = fs.shard_map(twenty_sums, mesh=PAIR, in_specs=P(), out_specs=P(), check="collectives")
    before = threading.active_count()
    f(torch.ones(2))
    world = own_transport()
    assert isinstance(world, ProcessWorld)
    return threading.active_count() - before, world.listener.socket.getsockname()[0]


def test_waits_reuse_threads_and_the_socket_is_on_the_interface_to_the_main_address() -> None:
    for count, host in run_ranks(2, new_threads_and_host):
        assert count <= 2
        assert host == "127.0.0.1"


def test_status_is_parsed_from_its_text() -> None:
    arrival = Arrival((3, 4), "fs.psum over x", " at script.py:3", None)
    status = RankStatus(
        3, "raised", True, (0, 1), "in f", "", {"(0, 1)": arrival}, {"(0,)": (3, 1)}
    )
    assert RankStatus.parse(status.text()) == status
