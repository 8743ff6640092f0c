"""The harness of gloo processes: results, errors, hangs, and the end of all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard._util.errors import ShardingError
from tests.helpers.gloo.harness import ROOT, RankDied, RankHung, Ranks, outcomes, pool, run_ranks

SCRIPT = """
import torch.distributed as dist
import fshard as fs

def rank():
    return f"{dist.get_rank()} of {dist.get_world_size()}"

if __name__ == "__main__":
    print(fs.testing.run_ranks(rank, nproc=2))
"""


def add_ranks(base: torch.Tensor) -> torch.Tensor:
    total = base + dist.get_rank()
    dist.all_reduce(total)
    return total


def facts() -> tuple[int, int, int, str]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), dist.get_backend()


def draw() -> float:
    return float(torch.rand(()))


def raise_on(ranks: tuple[int, ...]) -> int:
    if dist.get_rank() in ranks:
        print("about to fail")
        raise ShardingError(f"no rank {dist.get_rank()}")
    if len(ranks) < dist.get_world_size():
        dist.barrier()
    return 0


def hang_on(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(1000)
    return dist.get_rank()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def raise_what_does_not_pickle() -> None:
    class Local(Exception):
        pass

    raise Local("odd")


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def init_as_under_torchrun() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_results_by_rank(size: int) -> None:
    want = torch.full((3,), 10.0 * size + size * (size - 1) / 2)
    assert all(
        torch.equal(actual, want) for actual in run_ranks(size, add_ranks, torch.full((3,), 10.0))
    )
    assert run_ranks(size, facts) == [(rank, size, 1, "gloo") for rank in range(size)]


def test_processes_stay_warm_and_seeds_are_fixed() -> None:
    first = run_ranks(2, draw)
    pids = pool(2).pids
    assert run_ranks(2, draw) == first == [first[0]] * 2
    assert pool(2).pids == pids


def test_ranks_run_in_the_directory_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(2, facts)
    for directory in (tmp_path, ROOT):
        monkeypatch.chdir(directory)
        assert run_ranks(2, os.getcwd) == [str(directory)] * 2


def test_calls_of_several_threads_run_in_turn() -> None:
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(run_ranks, size, facts) for size in (2, 3, 2, 3)]
        assert [len(call.result()) for call in calls] == [2, 3, 2, 3]


def test_processes_survive_an_error_on_every_rank() -> None:
    with pytest.raises(ShardingError, match="no rank") as caught:
        run_ranks(2, raise_on, (0, 1))
    notes = "\n".join(caught.value.__notes__)
    assert "in raise_on" in notes
    assert "about to fail" in notes
    assert "ShardingError: no rank" in caught.value.__notes__[1]
    pids = pool(2).pids
    assert [str(item.error) for item in outcomes(2, raise_on, (0, 1))] == ["no rank 0", "no rank 1"]
    assert pool(2).pids == pids


def test_error_on_one_rank_ends_waiting_ranks() -> None:
    run_ranks(2, facts)
    pids = pool(2).pids
    with pytest.raises(ShardingError, match="no rank 1") as caught:
        run_ranks(2, raise_on, (1,))
    assert caught.value.__notes__[0].startswith("on rank 1 of 2:\nTraceback")
    assert "rank 0: RankHung" in caught.value.__notes__[1]
    assert not any(map(is_running, pids))
    assert run_ranks(2, facts)[1][0] == 1, "the next call has new processes"


def test_hanging_rank_is_ended_and_shows_its_stack() -> None:
    run_ranks(2, facts)
    pids = pool(2).pids
    start = time.monotonic()
    with pytest.raises(RankHung, match=r"rank 1 of 2 had no answer in 1\.\d s") as caught:
        run_ranks(2, hang_on, 1, timeout=1)
    assert time.monotonic() - start < 10
    assert "in hang_on" in "\n".join(caught.value.__notes__)
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (lambda: 0, (), "the function must be at the top level"),
        (facts, (sys,), "arguments must pickle"),
    ],
)
def test_calls_that_cannot_be_sent_are_refused(
    function: Any, args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        run_ranks(2, function, *args)


@pytest.mark.parametrize("nproc", [0, -1, 2.0, "2", None])
def test_number_of_processes_is_checked(nproc: Any) -> None:
    with pytest.raises(ShardingError, match="nproc must be an int of at least 1"):
        fs.testing.run_ranks(facts, nproc=nproc)


def test_functions_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout == "['0 of 2', '1 of 2']\n", done.stderr


@fs.testing.meshes({"x": 2}, processes=True)
def test_meshes_on_processes(mesh: fs.Mesh) -> None:
    pair = fs.shard(torch.arange(4.0), mesh, fs.P("x"))
    is_process = dist.is_initialized()
    assert isinstance(pair.local, torch.Tensor) == is_process
    assert torch.equal(fs.unshard(pair), torch.arange(4.0))
    fs.testing.assert_communicates(fs.unshard, (pair,), {("all_gather", "x"): 1}, bytes=8)


@fs.testing.meshes({"x": 2}, processes=True)
@pytest.mark.xfail(strict=True, raises=AssertionError)
def test_failures_on_processes_are_failures_of_the_test(mesh: fs.Mesh) -> None:
    pair = fs.shard(torch.arange(4.0), mesh, fs.P("x"))
    fs.testing.assert_layout(pair, fs.P())


def test_dead_rank_is_named() -> None:
    with pytest.raises(RankDied, match="rank 1 of 2 ended with exit code 7"):
        run_ranks(2, die_on, 1)
    assert pool(2).pids == []


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [(raise_what_does_not_pickle, RuntimeError, "Local: odd"), (warn, UserWarning, "careful")],
)
def test_unpicklable_results_and_errors(
    function: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_ranks(2, function)


def test_environment_equals_torchrun_without_a_group() -> None:
    assert run_ranks(2, init_as_under_torchrun, init=False) == [2, 2]


def test_close_ends_all_processes() -> None:
    ranks = Ranks(2)
    ranks.run(facts)
    processes = list(ranks.processes)
    ranks.close()
    assert [process.returncode for process in processes] == [0, 0]
    assert ranks.pids == []


def test_ranks_end_when_the_tests_are_killed() -> None:
    code = (
        "from tests.helpers.gloo.harness import Ranks\n"
        "from fshard.testing.rank_server import IMPORTS\n"
        "from tests.distributed.test_harness import facts, hang_on\n"
        "IMPORTS.clear()\n"
        "ranks = Ranks(2); ranks.run(facts); print(*ranks.pids, flush=True); ranks.run(hang_on, 1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        pids = [int(pid) for pid in tests.stdout.readline().split()]
        tests.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))
