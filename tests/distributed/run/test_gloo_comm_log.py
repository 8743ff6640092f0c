"""`fs.comm_log` on real processes: counts of PyTorch's collectives, and logs of replayed calls.

The former are those of CommDebugMode, the latter those of calls that are not replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fshard as fs
from fshard import Mesh, P, Spec
from fshard.run import execute
from fshard.run.autograd import replay
from fshard.run.transports.base import Event, observe
from fshard.show.comm.phase import FIELDS as ALL_FIELDS
from fshard.spmd.collectives import collective_plan
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.spec_grid import one_in, random_global
from tests.helpers.spmd.collective_cases import CASES, Collective, axes_of, by_oracle, on_rank
from tests.helpers.spmd.collective_cases import arguments as collective_arguments

MESH = Mesh(x=2)


def raw_work(x: torch.Tensor) -> None:
    dist.all_reduce(x.clone())
    funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))
    dist.all_gather_single(x.new_empty(8), x)
    device_mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(x, device_mesh, [Shard(0)])
    (sharded @ sharded).full_tensor()
    sharded.redistribute(device_mesh, [Replicate()])


def fshard_work(x: torch.Tensor) -> None:
    pair = fs.shard(x, fs.Spec(MESH, P("x"), shape=(4,)))
    fs.reshard(pair, P())
    fs.unshard(pair)
    fs.psum((x, x), "x", mesh=MESH)
    fs.ppermute(x, "x", [(0, 1), (1, 0)], mesh=MESH)
    fs.scatter(x, pair.spec)
    fs.shard_map(lambda v: fs.psum(v, "x"), mesh=MESH, in_specs=P("x"), out_specs=P())(x)
    part = fs.partition(torch.dot, mesh=MESH, in_specs=(P("x"), P("x")))
    leaf = x.clone().requires_grad_()
    part(leaf, leaf).backward()


FIELDS = ("operation", "axes", "dtype", "call")


def logs() -> tuple[Any, ...]:
    fs.init(MESH)
    x = torch.arange(4.0)
    raw_work(x)  # process groups are created here
    with CommDebugMode() as mode, fs.comm_log() as silent:
        raw_work(x)
    with fs.comm_log(raw=True) as raw:
        raw_work(x)
    with fs.comm_log() as plain:
        fshard_work(x)
    with fs.comm_log(raw=True) as both:
        fshard_work(x)
    return (
        mode.get_total_counts(),
        silent.counts,
        *(log.to_dict(*FIELDS) for log in (raw, plain, both)),
        [row["line"] for row in raw.to_dict("line")["forward"]],
    )


def without_bytes(log: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [*log["forward"], *log["backward"]]
    return [{k: v for k, v in row.items() if k != "bytes"} for row in rows]


def test_raw_collectives_are_counted_on_request() -> None:
    file = raw_work.__code__.co_filename
    lines = {f"{file}:{line}" for *_, line in raw_work.__code__.co_lines()}
    for total, silent, raw, plain, both, places in run_ranks(2, logs):
        assert places
        assert lines.issuperset(places)
        assert not silent
        rows = without_bytes(raw)
        assert sum(row["count"] for row in rows) == total
        assert {"all_reduce", "all_gather"} <= {row["op"] for row in rows}
        assert {tuple(row["axes"]) for row in rows} == {("ranks 0, 1",)}
        # Collectives that fshard launches are not counted twice.
        assert without_bytes(plain) == without_bytes(both)


# -- replayed calls ---------------------------------------------------------------------------

MESHES = [Mesh(i=2), Mesh({"x": 2, "y": 2}, devices=(2, 0, 3, 1))]
F64 = torch.float64
REPLAYERS = (replay, execute, collective_plan)
Log = dict[str, Any]


@contextmanager
def no_replays() -> Iterator[None]:
    """Run calls without recordings in the block."""
    patches = [
        mock.patch.object(module, "direct_transport", return_value=None) for module in REPLAYERS
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def log_of(call: Callable[[], object], **options: Any) -> Log:
    with fs.comm_log(**options) as log:
        call()
    return log.to_dict(*ALL_FIELDS)


def logs_of(call: Callable[[], object]) -> list[Log]:
    """Return the logs of a call without replays, of the first calls, and of replays.

    A second series has its first calls, which record, without a log.
    """
    logs = []
    with no_replays():
        logs.append(log_of(call))
    for warm in (0, 3):
        for module in (execute, collective_plan):
            module._RECORDINGS.clear()
        for _ in range(warm):
            call()
        logs += [log_of(call) for _ in range(4 - warm)]
    with fs.comm_log() as outer:
        logs += [log_of(call)]
    return [*logs, outer.to_dict(*ALL_FIELDS)]


def assert_equal(by_rank: list[list[Any]], names: list[str]) -> None:
    for logs_of_rank in by_rank:
        for name, (first, *rest) in zip(names, logs_of_rank, strict=True):
            for log in rest:
                assert log == first, name


# -- collectives and programs ----------------------------------------------------------------


def collective_logs(mesh: Mesh, work: list[tuple[int, tuple[str, ...], Any, Any]]) -> list[Any]:
    fs.init(mesh)
    place = list(mesh.ranks).index(dist.get_rank())
    results = []
    for k, axes, xs, cts in work:
        case: Collective = CASES[k]
        x, ct = xs[place], cts[place]
        results.append(logs_of(lambda: on_rank(case, mesh, axes, x, ct)))  # noqa: B023
    assert len(collective_plan._RECORDINGS) > 0
    return results


@one_in(5)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logs_of_replayed_collectives(mesh: Mesh, every: int) -> None:
    work, names = [], []
    for k, case in [*enumerate(CASES)][::every]:
        for axes in axes_of(mesh)[-1:]:
            xs = collective_arguments(case, mesh, axes, F64)
            work.append((k, axes, xs, by_oracle(case, mesh, axes, xs)[1]))
            names.append(f"{case.name} along {axes}")
    assert_equal(run_ranks(mesh.size, collective_logs, mesh, work), names)


LAYOUTS = [P(), P("x"), P(None, "y"), P(("y", "x")), P(unreduced={"x"}), P(reduced={"y"}),
           P(unreduced={"x": "max"})]  # fmt: skip


def program_logs(progs: list[fs.Program]) -> list[Any]:
    fs.init(progs[0].src.mesh)
    results = []
    for prog in progs:
        x = random_global(prog.src.local_shape(dist.get_rank()), F64)
        x.requires_grad_(prog.is_linear)

        def call(prog: fs.Program = prog, x: torch.Tensor = x) -> None:
            y = prog(x)
            if x.requires_grad:
                ct = torch.ones_like(y, requires_grad=True)
                (grad,) = torch.autograd.grad(y, x, ct, create_graph=True)
                torch.autograd.grad(grad, ct, x)

        results.append(logs_of(call))
    assert len(execute._RECORDINGS) > 0
    return results


@one_in(5)
def test_logs_of_replayed_programs(every: int) -> None:
    mesh, progs = MESHES[1], []
    for shape in ((4, 8), (5, 6)):
        specs = [Spec(mesh, p, shape=shape, dtype=F64, uneven="chunk") for p in LAYOUTS]
        for src in specs:
            kinds = set(src.partition.unreduced.values())
            progs += [
                fs.redistribute(src, dst)
                for dst in specs
                if not kinds or set(dst.partition.unreduced.values()) in (set(), kinds)
            ]
    progs = progs[::every]
    assert_equal(run_ranks(mesh.size, program_logs, progs), list(map(str, progs)))


# -- bodies ----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Module whose forward gathers and sums."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = fs.psum(fs.all_gather(x, "i", tiled=True), "i")
        return y


def mapped_calls(*, check: bool) -> Callable[[], None]:
    """Return a call of a mapped function with modules, an overlapped sum and several gradients."""
    net, x, w = torch.nn.Sequential(Layer(), Layer()), torch.ones(4), torch.ones(4)

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        pending = fs.start(fs.psum, x.sum(), "i")
        y = net(x).sum() * w
        result: torch.Tensor = fs.psum(x, "i").sum() * y + pending.wait()
        return result

    mapped = fs.shard_map(body, mesh=MESHES[0], in_specs=(P("i"), P()), out_specs=P(), check=check)

    def call() -> None:
        leaves = [value.clone().requires_grad_() for value in (x, w)]
        mapped(*leaves).sum().backward()

    return call


def mapped_logs(check: bool) -> list[Any]:
    fs.init(MESHES[0])
    src = Spec(MESHES[0], P("i"), shape=(4,))
    dst = src.replace(partition=P())
    batch = fs.redistribute((src, src), (dst, dst))
    return [logs_of(mapped_calls(check=check)), logs_of(lambda: batch((torch.ones(2),) * 2))]


@pytest.mark.parametrize("check", [True, False])
def test_logs_of_mapped_functions_and_batches(check: bool) -> None:
    by_rank = run_ranks(2, mapped_logs, check)
    assert_equal(by_rank, ["a mapped function", "a batch"])
    log = by_rank[0][0][0]
    assert {row["module"] for row in log["forward"]} >= {"Sequential.0", "Sequential.1"}
    assert {row["module"] for row in log["backward"]} >= {"Sequential.0", "Sequential.1"}


# -- who observes ----------------------------------------------------------------------------


def gradient_calls() -> list[Callable[[], torch.Tensor]]:
    x = torch.ones(2, requires_grad=True)
    src = Spec(MESHES[0], P("i"), shape=(4,))
    prog = fs.redistribute(src, src.replace(partition=P()))
    return [
        lambda: fs.psum(x, "i", mesh=MESHES[0]),
        lambda: fs.all_gather(x, "i", mesh=MESHES[0]),
        lambda: prog(x),
    ]


def late_logs() -> list[Any]:
    """Return logs that are opened between a forward and its backward pass, or end there."""
    fs.init(MESHES[0])
    results = []
    for call in gradient_calls():
        logs = []
        for replays in (False, True, True, True):
            with nullcontext() if replays else no_replays():
                y = call()
                late = log_of(lambda: y.sum().backward())  # noqa: B023
                with fs.comm_log() as early:
                    y = call()
                y.sum().backward()
            logs.append((late, early.to_dict(*ALL_FIELDS)))
        results.append(logs)
    return results


def test_logs_of_one_pass() -> None:
    assert_equal(run_ranks(2, late_logs), ["psum", "all_gather", "program"])


def raw_logs() -> list[Any]:
    fs.init(MESHES[0])
    results = []
    for forward in [*gradient_calls(), mapped_calls(check=False)]:

        def call(forward: Callable[[], Any] = forward) -> None:
            y = forward()
            if y is not None:
                y.sum().backward()

        for _ in range(3):
            call()
        with fs.comm_log() as log, fs.comm_log(raw=True) as raw:
            call()
        results.append(
            [log_of(call), log_of(call, raw=True), *(x.to_dict(*ALL_FIELDS) for x in (log, raw))]
        )
    return results


def test_raw_logs_count_replays_once() -> None:
    assert_equal(run_ranks(2, raw_logs), ["psum", "all_gather", "program", "a mapped function"])


def threaded_logs() -> list[Any]:
    """Return logs of a call in this thread and in another one, and of none."""
    fs.init(MESHES[0])
    call = mapped_calls(check=False)
    for _ in range(3):
        call()

    def in_thread() -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    return [log_of(call), log_of(in_thread), log_of(call)]


def test_logs_of_other_threads() -> None:
    assert_equal([[logs] for logs in run_ranks(2, threaded_logs)], ["a mapped function"])


def lines_of(log: Log) -> set[str]:
    return {row["line"] for row in (*log["forward"], *log["backward"])}


def lines_after_threads() -> list[set[str]]:
    """Return the lines of calls whose twins ran before in threads without code of the user's.

    A gradient has the line of its call.
    """
    fs.init(MESHES[0])
    src = Spec(MESHES[0], P("i"), shape=(4,))
    prog = fs.redistribute(src, src.replace(partition=P()))
    x = torch.ones(2, requires_grad=True)
    results = []
    for _ in range(4):
        first, second = (fs.all_gather(x, "i", mesh=MESHES[0]).sum() for _ in range(2))
        with fs.comm_log() as log:
            for call in (partial(prog, x), first.backward):
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()
        results.append(lines_of(log.to_dict("line")))
        with fs.comm_log() as log:
            prog(x)
            second.backward()
        results.append(lines_of(log.to_dict("line")))
    return results


def test_lines_after_threads_without_user_code() -> None:
    code = lines_after_threads.__code__
    lines = {f"{__file__}:{line}" for *_, line in code.co_lines()}
    for results in run_ranks(2, lines_after_threads):
        for in_thread, in_main in zip(results[::2], results[1::2], strict=True):
            assert in_thread == {"", f"{__file__}:{code.co_firstlineno + 11}"}
            assert len(in_main) == 2
            assert in_main <= lines


class Started(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return fs.start(fs.all_gather, x, "i", mesh=MESHES[0])


class Waiting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.started = Started()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.started(x).wait()
        return y


def started_logs() -> list[Log]:
    fs.init(MESHES[0])
    net, x = Waiting(), torch.ones(2, requires_grad=True)
    return [log_of(lambda: net(x).sum().backward()) for _ in range(3)]


def test_gradients_of_started_collectives_have_the_origin_of_the_start() -> None:
    line = f"{__file__}:{Started.forward.__code__.co_firstlineno + 1}"
    for logs_of_rank in run_ranks(2, started_logs):
        for log in logs_of_rank:
            for row in (*log["forward"], *log["backward"]):
                assert (row["module"], row["line"]) == ("Waiting.started", line)


def logs_of_partitioned_layers() -> list[Log]:
    fs.init(MESH)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    part = fs.partition(net, mesh=MESH, params=P(None, "x"), in_specs=P(None, "x"), hold="x")
    params, x = dict(net.named_parameters()), torch.ones(2, 4)
    return [log_of(lambda: part(params, x).sum().backward()) for _ in range(4)]


def test_replays_of_partitioned_functions_have_the_modules_of_their_operations() -> None:
    for first, *others in run_ranks(2, logs_of_partitioned_layers):
        modules = {
            phase: {(row["module"], row["op"]) for row in first[phase] if row["module"]}
            for phase in ("forward", "backward")
        }
        assert modules["forward"] == {("Sequential.1", "reduce_scatter")}
        assert modules["backward"] == {("Sequential.1", "all_gather")}
        assert all(log == first for log in others)


def repeated_second_derivatives() -> list[int]:
    """Return the number of distinct calls that a log holds after each of equal steps."""
    fs.init(MESHES[0])
    sizes = []
    with fs.comm_log() as log:
        for _ in range(8):
            x = torch.ones(2, requires_grad=True)
            y = fs.all_gather(x, "i", mesh=MESHES[0])
            (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            grad.sum().backward()
            y = fs.all_gather(x, "i", mesh=MESHES[0])
            torch.autograd.grad(y.flatten(), x, torch.eye(4), is_grads_batched=True)
            sizes.append(len(log._calls))
    return sizes


def test_equal_steps_are_equal_calls() -> None:
    for sizes in run_ranks(2, repeated_second_derivatives):
        assert len(set(sizes[4:])) == 1


def observed_on_one_rank() -> list[Any]:
    """Return the gradients of calls that only rank 0 observes, and the number of its events."""
    fs.init(MESHES[0])
    ws = [torch.ones(4, requires_grad=True) for _ in range(3)]
    mapped = fs.shard_map(
        lambda x, *ws: fs.psum(x, "i").sum() * sum(w.sum() for w in ws),
        mesh=MESHES[0], in_specs=(P("i"), *[P()] * 3), out_specs=P(), check=False,
    )  # fmt: skip
    events: list[Event] = []
    grads = []
    for _ in range(4):
        x = torch.arange(4.0, requires_grad=True)
        if dist.get_rank() == 0:
            with observe(lambda call: events.extend(call.events)):
                grads.append(torch.autograd.grad(mapped(x, *ws), (x, *ws)))
        else:
            grads.append(torch.autograd.grad(mapped(x, *ws), (x, *ws)))
    return [grads, len(events)]


def test_an_observer_on_one_rank_changes_nothing() -> None:
    (grads, count), (others, none) = run_ranks(2, observed_on_one_rank)
    assert count > 0
    assert none == 0
    for first, second in zip(grads, others, strict=True):
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b)
