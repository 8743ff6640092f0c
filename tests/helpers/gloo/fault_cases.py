"""Faults of one rank among others, injected into real processes.

`python -m tests.helpers.gloo.fault_cases [default]` runs the table and prints it. Processes are
forked from a server that has imported PyTorch, so that a case that kills them takes a second.
"""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard._torch.process_groups import TCPStore
from fshard.run.transports import torch_distributed

MESH = fs.Mesh(a=2, b=2)
AXES = ("a", "b")
SIZE = MESH.size
TIMEOUT = 40.0
SHORT_TIMEOUT = 2.0
"""Timeout of cases that end by it."""
LIMIT = 5.0
"""Seconds in which every survivor must end under the check."""


# -- collectives -------------------------------------------------------------------------------

PERM = [(0, 1), (1, 2), (2, 3), (3, 0)]
OTHER_PERM = [(0, 2), (2, 0), (1, 3), (3, 1)]


def _program(x: torch.Tensor, axes: Any, _: Any) -> torch.Tensor:
    spec = fs.Spec(MESH, P(axes), shape=(4 * x.shape[0],), dtype=x.dtype)
    y: torch.Tensor = fs.redistribute(spec, spec.replace(partition=P()))(x)
    return y


def _ragged(x: torch.Tensor, axes: Any, _: Any) -> torch.Tensor:
    ones, i = [1] * SIZE, MESH.group(dist.get_rank(), axes).index(dist.get_rank())
    return fs.ragged_all_to_all(
        x, torch.zeros_like(x), range(SIZE), ones, [i] * SIZE, ones, axis_name=axes
    )


def _backward(x: torch.Tensor, axes: Any, _: Any) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = fs.all_gather(x, axes)
    return torch.autograd.grad(y.sum(), x)[0]


def _started(x: torch.Tensor, axes: Any, _: Any) -> torch.Tensor:
    first, second = fs.start(fs.psum, x, axes), fs.start(fs.all_gather, x, axes)
    return second.wait().sum(0) + first.wait()


def _step(x: torch.Tensor, axes: Any, _: Any) -> torch.Tensor:
    spec = fs.Spec(MESH, P(axes), shape=(SIZE * x.shape[0],), dtype=x.dtype)
    part = fs.partition(lambda w, x: w * x, mesh=MESH, in_specs=(P(), P(axes)), out_specs=P(axes))
    w = torch.ones(spec.shape, dtype=x.dtype, requires_grad=True)
    y = part((w, spec.replace(partition=P())), (x, spec))
    return torch.autograd.grad(y.local.sum(), w)[0]


def _large(x: torch.Tensor, axes: Any, _: Any) -> torch.Tensor:
    return fs.psum(x.repeat(2**18), axes)


COLLECTIVES: dict[str, Callable[[torch.Tensor, Any, Any], torch.Tensor]] = {
    "psum": lambda x, axes, perm: fs.psum(x, axes),
    "psum of 4 MiB": _large,
    "psum over a": lambda x, axes, perm: fs.psum(x, "a"),
    "pmax": lambda x, axes, perm: fs.pmax(x, axes),
    "all_gather": lambda x, axes, perm: fs.all_gather(x, axes, tiled=True),
    "psum_scatter": lambda x, axes, perm: fs.psum_scatter(x, axes, tiled=True),
    "all_to_all": lambda x, axes, perm: fs.all_to_all(x, axes, 0, 0, tiled=True),
    "ppermute": fs.ppermute,
    "pbroadcast": lambda x, axes, perm: fs.pbroadcast(x, axes, 1),
    "ragged_all_to_all": _ragged,
    "a program": _program,
    "a backward": _backward,
    "started": _started,
    "a partitioned step": _step,
}


# -- faults ------------------------------------------------------------------------------------

ENDS = ("killed first", "killed before", "killed inside", "killed after", "raises between calls",
        "exits between calls")  # fmt: skip
"""Faults that end the process."""
STOPS = ("raises", "returns", "sleeps")
DIFFERS = ("another shape", "another dtype", "another operation", "another order of axes",
           "another permutation")  # fmt: skip


class Case(NamedTuple):
    """One fault.

    Attributes:
        fault: its name.
        collective: where it happens.
        victim: the rank.
        check: the option of `shard_map`.
        agent: whether this process keeps the store, as torchrun does, in place of rank 0.
    """

    fault: str
    collective: str
    victim: int
    check: Any = "collectives"
    agent: bool = True

    def __str__(self) -> str:
        return ", ".join(map(str, self))

    @property
    def timeout(self) -> float:
        """The timeout of `fs.init`."""
        return TIMEOUT if self.check and self.fault != "sleeps" else SHORT_TIMEOUT


def cases(small: bool) -> Iterator[Case]:
    """Return the faults of the table, or a few of them."""
    if small:
        yield Case("killed first", "psum", 3)
        yield Case("killed inside", "psum over a", 0)
        yield Case("killed inside", "psum of 4 MiB", 0, agent=False)
        yield Case("killed after", "a backward", 0, agent=False)
        yield Case("raises between calls", "psum", 1)
        yield Case("sleeps", "ppermute", 0)
        yield Case("killed inside", "psum", 1, check=False)
        return
    for collective, victim, check in itertools.product(COLLECTIVES, (0, 3), ("collectives", False)):
        if not check and collective not in ("psum", "psum of 4 MiB", "ppermute"):
            continue
        for fault in (*ENDS, *STOPS, *DIFFERS):
            if fault == "another permutation" and collective != "ppermute":
                continue
            if fault == "another order of axes" and collective == "psum over a":
                continue
            if fault == "another shape" and collective == "ragged_all_to_all":
                continue  # its shapes may differ
            yield Case(fault, collective, victim, check)
            if (
                fault in ENDS
                and victim == 0
                and collective in ("psum", "psum of 4 MiB", "ppermute")
            ):
                yield Case(fault, collective, victim, check, agent=False)


def _kill(*_: object) -> Any:
    _note_fault()
    os.kill(os.getpid(), signal.SIGKILL)


def _note_fault() -> None:
    CHANNEL[0].send(("fault", time.monotonic()))


CHANNEL: list[Connection] = []


def run_rank(case: Case) -> None:
    """Run a case as one rank."""
    is_victim = dist.get_rank() == case.victim if dist.is_initialized() else False

    def at(fault: str) -> bool:
        return is_victim and case.fault == fault

    def body(x: torch.Tensor) -> torch.Tensor:
        first = x
        if case.fault != "killed first":
            x = fs.psum(x, AXES) / SIZE
        if at("killed before") or at("killed first"):
            _kill()
        if at("killed inside"):
            vars(torch_distributed).update(_wait=_kill, create_group=_kill)
        if is_victim and case.fault in (*STOPS, *DIFFERS):
            _note_fault()
        if at("raises"):
            raise ValueError("boom")
        if at("returns"):
            return x
        if at("sleeps"):
            time.sleep(60)
        if at("another operation"):
            y = fs.pmean(x, AXES)
        else:
            axes = AXES[::-1] if at("another order of axes") else AXES
            x = torch.cat([x, x]) if at("another shape") else x
            x = x.to(torch.float64) if at("another dtype") else x
            perm = OTHER_PERM if at("another permutation") else PERM
            y = COLLECTIVES[case.collective](x, axes, perm)
        if at("killed after"):
            _kill()
        return fs.psum(y.sum() + first.sum(), AXES)[None]

    def call() -> None:
        f = fs.shard_map(body, mesh=MESH, in_specs=P(AXES), out_specs=P(AXES), check=case.check)
        f((torch.ones(4), fs.Spec(MESH, P(AXES), shape=(4 * SIZE,))))

    call()
    if case.fault.endswith("between calls"):
        if is_victim:
            _note_fault()
            if case.fault.startswith("raises"):
                raise ValueError("boom")
            return
        call()


class Report(NamedTuple):
    """End of one rank: seconds from the fault to its error and to its end, and the error's text."""

    raised: float
    ended: float
    text: str


@dataclass(frozen=True)
class Row:
    """Result of a case."""

    case: Case
    reports: dict[int, Report]

    @property
    def seconds(self) -> float:
        """Seconds until the last survivor ended."""
        return max(report.ended for report in self.reports.values())

    @property
    def texts(self) -> list[str]:
        """The survivors' errors."""
        return sorted({report.text for report in self.reports.values()})

    @property
    def named(self) -> bool:
        """True if every survivor's error names the rank, a line, and an operation or program.

        The line of an error of an operation itself is in its traceback.
        """
        who = re.compile(rf"\branks? {self.case.victim}\b|, {self.case.victim} \(")
        return all(
            who.search(text) is not None
            and ("fault_cases.py:" in text or text.startswith("ShardingError: fs."))
            and any(name in text for name in ("fs.", "the program to", "a partitioned function"))
            for _, _, text in self.reports.values()
        )

    def __str__(self) -> str:
        case = self.case
        heads = dict.fromkeys(text.partition("\n")[0] for text in self.texts)
        return (
            f"{case.fault:22} {case.collective:18} {case.victim} "
            f"{case.check or 'none':12} {'agent' if case.agent else 'rank 0':7} "
            f"{self.seconds:5.1f} s  {'named' if self.named else '-':6} {' | '.join(heads)}"
        )


# -- processes ---------------------------------------------------------------------------------


def _main(rank: int, port: int, case: Case, channel: Connection) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the store's client prints its stack
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(case.agent),
    }  # fmt: skip
    CHANNEL[:] = [channel]
    text = "no error"
    try:
        fs.init(MESH, timeout=case.timeout)
        run_rank(case)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        sys.last_value = error  # as Python does before it ends
    channel.send(("done", time.monotonic(), text))
    atexit._run_exitfuncs()
    os._exit(0)


def run_case(case: Case) -> Row:
    """Return the ends of all ranks but the victim, or of all if the victim only differs."""
    context = multiprocessing.get_context("forkserver")
    # PyTorch imports the second as ranks start, the third in their second collective.
    modules = "fshard", "torch.distributed.nn.functional", "torch._dynamo", __name__
    context.set_forkserver_preload(list(modules))
    store = None
    if case.agent:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if store is not None else free_port()
    pairs = [context.Pipe() for _ in range(SIZE)]
    processes = [
        context.Process(target=_main, args=(rank, port, case, pairs[rank][1]), daemon=True)
        for rank in range(SIZE)
    ]
    try:
        for process in processes:
            process.start()
        return _collect(case, processes, [ours for ours, _ in pairs], [own for _, own in pairs])
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(
    case: Case, processes: list[Any], channels: list[Connection], others: list[Connection]
) -> Row:
    for other in others:
        other.close()
    waited = [r for r in range(SIZE) if r != case.victim or case.fault in DIFFERS]
    deadline = time.monotonic() + case.timeout + 30
    fault, done, ended = 0.0, dict[int, tuple[float, str]](), dict[int, float]()
    open_channels = {channel: rank for rank, channel in enumerate(channels)}
    while len(ended) < len(waited) and time.monotonic() < deadline:
        sentinels = {processes[r].sentinel: r for r in waited if r not in ended}
        for ready in wait([*open_channels, *sentinels], 1.0):
            if ready in sentinels:
                ended[sentinels[ready]] = time.monotonic()
                continue
            rank = open_channels[ready]  # type: ignore[index]
            try:
                message = channels[rank].recv()
            except EOFError:
                del open_channels[channels[rank]]
                continue
            if message[0] == "fault":
                fault = message[1]
            else:
                done[rank] = message[1:]
    now = time.monotonic()
    reports = {}
    for rank in waited:
        raised, text = done.get(rank, (now, "nothing: it hangs or was killed"))
        reports[rank] = Report(raised - fault, ended.get(rank, now) - fault, text)
    return Row(case, reports)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    """Print the table."""
    rows = []
    for case in cases("default" in sys.argv[1:]):
        rows.append(run_case(case))
        print(rows[-1], flush=True)
    checked = [row for row in rows if row.case.check]
    late = [row for row in checked if row.seconds > LIMIT]
    print(f"{len(rows)} cases; with the check {len(checked)}, {len(late)} of them later than "
          f"{LIMIT:g} s, {sum(not row.named for row in checked)} unnamed")  # fmt: skip


if __name__ == "__main__":
    main()
