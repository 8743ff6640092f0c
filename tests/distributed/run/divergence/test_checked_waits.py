"""Threads, sockets and statuses of `check="collectives"`, and roll calls of late ranks."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from unittest import mock

import torch

import fshard as fs
from fshard import Mesh, P
from fshard.run.transports.base import own_transport
from fshard.run.transports.rank_status import Arrival, RankStatus
from fshard.run.transports.roll_call import RollCalls
from fshard.run.transports.torch_distributed import ProcessWorld
from tests.helpers.gloo.harness import run_ranks

PAIR = Mesh(x=2)


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
    return threading.active_count() - before, world.listener.host


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


def answers_of_roll_calls(mesh: Mesh) -> tuple[list[tuple[bool, bool]], int]:
    """Return, for each roll call in which this rank takes part, the answer and the right one.

    The last value is the number of connections to this rank's socket, which accepts none.
    """
    fs.init(mesh, timeout=100)
    rank = int(os.environ["RANK"])
    common, own, pairs = random.Random(0), random.Random(rank), []
    for _ in range(60):
        calls = RollCalls(mesh, "f")
        places = common.randrange(4)
        for place in range(places):
            takes_part = [common.random() < 0.9 for _ in range(mesh.size)]
            kinds = [common.choice("aaaaaaab") for _ in range(mesh.size)]
            right, last = all(takes_part) and len({*kinds}) == 1, place == places - 1
            if own.random() < 0.1:
                time.sleep(own.random() * 0.02)
            if takes_part[rank]:
                pairs.append((calls.have_all_come(kinds[rank], last=last), right))
            elif last:
                calls.pass_by(last=True)
            if not last:  # of a rank that is there already, the others do not wait to come
                calls.join_collective(write=True)
        calls.end()
    world = own_transport()
    assert isinstance(world, ProcessWorld)
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return pairs, sum(row[1].endswith(f":{world.listener.port:04X}") for row in table)


def test_answers_of_roll_calls_do_not_depend_on_time() -> None:
    for pairs, connections in run_ranks(4, answers_of_roll_calls, Mesh(x=4)):
        assert connections <= 1 + 4  # it listens, and each rank connects to it once
        assert {right for _, right in pairs} == {True, False}
        assert all(answer == right for answer, right in pairs)


def answer_after_a_trace(mesh: Mesh) -> bool:
    """Return the answer of a roll call in a function that the last rank traces meanwhile."""
    fs.init(mesh, timeout=100)
    calls = [RollCalls(mesh, "f")]
    if int(os.environ["RANK"]) == mesh.size - 1:
        time.sleep(0.05)  # others wait for this rank
        with mock.patch("torch.compiler.is_compiling", return_value=True):
            RollCalls(mesh, "f")
    else:
        calls.append(RollCalls(mesh, "f"))  # it is in the graph of the rank that traces
    return calls[-1].have_all_come("gradient")


def test_ranks_that_trace_alone_are_not_waited_for() -> None:
    assert run_ranks(4, answer_after_a_trace, Mesh(x=4)) == [False] * 4
