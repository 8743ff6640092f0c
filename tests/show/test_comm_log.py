"""`fs.comm_log`: launches and bytes, forward and backward, compared with the programs that ran."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard.program.cost.traffic import step_axes, traffic
from fshard.run.transports import observed_calls
from fshard.run.transports.base import Event, ObservedCall, observe, unobserved
from fshard.run.transports.observed_calls import notify_collective
from fshard.show.comm import comm_log
from fshard.show.comm.phase import FIELDS
from fshard.show.table import Table
from tests.helpers.spec_grid import random_global
from tests.helpers.strategies import meshes, spec_pairs

P = fs.PartitionSpec
MESH = fs.Mesh(dp=2, tp=4)
TWO = fs.Mesh(tp=2)


def rows_of(table: Table) -> list[tuple[str, ...]]:
    return list(table.rows)


def spec(partition: fs.PartitionSpec, *shape: int) -> fs.Spec:
    return fs.Spec(MESH, partition, shape=shape)


def expected_counts(prog: fs.Program) -> tuple[Counter[object], Counter[object]]:
    """Return launches and bytes per operation and axes, from the traffic of the steps."""
    counts: Counter[object] = Counter()
    sent: Counter[object] = Counter()
    for step, src, dst in zip(prog.steps, prog.specs, prog.specs[1:], strict=False):
        moved = traffic(step, src, dst)
        if moved.launches:
            axes = step_axes(step, src, dst)
            key = (step.name, axes[0] if len(axes) == 1 else axes)
            counts[key] += 1
            sent[key] += moved.sent
    return counts, sent


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (P("dp", "tp"), P(("dp", "tp"))),
        (P("dp", "tp"), P()),
        (P(None, "tp", unreduced={"dp"}), P("dp", "tp")),
        (P(unreduced={"dp", "tp"}), P()),
        (P(unreduced={"dp", "tp"}), P("tp", "dp")),
        (P(("dp", "tp")), P(("tp", "dp"))),
        (P("dp", reduced={"tp"}), P(None, "dp")),
    ],
)
def test_forward_and_backward_count_the_steps_of_the_programs(
    src: fs.PartitionSpec, dst: fs.PartitionSpec
) -> None:
    prog = fs.redistribute(spec(src, 16, 8), spec(dst, 16, 8))
    local = fs.shard(random_global((16, 8), torch.float32), prog.src).local
    shards = tuple(x.detach().requires_grad_() for x in local)
    with fs.comm_log() as log:
        out = prog(shards)
        assert log.backward.counts == Counter()
        torch.autograd.grad(out, shards, [torch.ones_like(y) for y in out])
    for phase, ran in ((log.forward, prog), (log.backward, prog.T)):
        counts, sent = expected_counts(ran)
        assert phase.counts == counts
        assert phase.bytes == sent
        assert phase.total_bytes == sum(ran.step_bytes)
    assert log.counts == expected_counts(prog)[0] + expected_counts(prog.T)[0]
    assert log.total_bytes == prog.cost().bytes_sent + prog.T.cost().bytes_sent


@settings(max_examples=60)
@given(meshes(min_axes=1).flatmap(spec_pairs))
def test_any_program_is_counted(pair: tuple[fs.Spec, fs.Spec]) -> None:
    """With uneven shards too no rank sends more than its step, and some rank as the program."""
    prog = fs.redistribute(*pair)
    with fs.comm_log() as log:
        prog(fs.shard(random_global(prog.src.shape), prog.src).local)
    counts, sent = expected_counts(prog)
    assert log.counts == counts
    assert log.total_bytes == prog.cost().bytes_sent
    assert all(log.bytes[key] <= sent[key] for key in sent)  # type: ignore[index]
    for key in (key for key, count in counts.items() if count == 1):
        assert log.bytes[key] == sent[key]  # type: ignore[index]


def test_keys_hold_one_axis_or_several() -> None:
    pair = fs.shard(torch.ones(8), spec(P(unreduced={"tp"}), 8))
    with fs.comm_log() as log:
        fs.reshard(pair, P())
        fs.reshard(fs.shard(torch.ones(8), spec(P(unreduced={"dp", "tp"}), 8)), P())
    assert log.counts["all_reduce", "tp"] == 1
    assert log.counts["all_reduce", ("dp", "tp")] == 1
    assert log.counts["all_reduce", "dp"] == 0, "operations that did not run count 0"
    assert log.bytes["all_reduce", "tp"] == 2 * 32 * 3 // 4


def test_rank_local_code_is_counted_once() -> None:
    def body(pair: fs.Sharded) -> fs.Sharded:
        return fs.reshard(fs.reshard(pair, P()), P("tp"))

    with fs.comm_log() as log:
        fs.simulate(MESH, body, fs.shard(torch.ones(8), spec(P("dp"), 8)))
    assert log.counts == {("all_gather", "dp"): 1}


def test_mapped_functions_are_counted_forward_and_backward() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    w = torch.ones(8, 4, requires_grad=True)

    @fs.shard_map(mesh=MESH, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
    def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fs.psum(x @ w, "tp")

    with fs.comm_log() as log:
        y = matmul(x, w)
    assert log.counts == {("all_reduce", "tp"): 1}
    assert log.bytes == {("all_reduce", "tp"): 2 * 4 * 4 * 4 * 3 // 4}
    with fs.comm_log() as log:
        y.sum().backward()
    assert log.forward.counts == Counter(), "the sum's transpose needs no communication"
    # The arguments are global values, and so are their gradients.
    assert log.backward.counts == {("all_gather", "tp"): 2}


def test_recomputation_in_backward_counts_as_backward() -> None:
    """In rank-local code no boundary of a mapped function separates the phases."""

    def body() -> None:
        x = torch.ones(2, requires_grad=True)
        gather = lambda x: fs.all_gather(x, "tp", mesh=MESH).sin()  # noqa: E731
        checkpoint(gather, x, use_reentrant=False).sum().backward()

    with fs.comm_log() as log:
        fs.simulate(MESH, body)
    assert log.forward.counts == {("all_gather", "tp"): 1}
    assert log.backward.counts == {("all_gather", "tp"): 1, ("reduce_scatter", "tp"): 1}


def test_counts_are_of_the_busiest_rank() -> None:
    with fs.comm_log() as log:
        for rank, nbytes in ((0, 10), (0, 20), (1, 5), (1, 5), (1, 5)):
            notify_collective("all_gather", ("tp",), nbytes, rank)
        notify_collective("all_to_all", ("dp",), 7, 1)
    assert log.counts == {("all_gather", "tp"): 3, ("all_to_all", "dp"): 1}
    assert log.bytes == {("all_gather", "tp"): 30, ("all_to_all", "dp"): 7}
    assert log.total_bytes == 30


def test_logs_nest_and_stay_readable() -> None:
    with fs.comm_log() as outer:
        notify_collective("a", ("x",), 1, 0)
        with fs.comm_log() as inner:
            notify_collective("b", ("x",), 2, 0)
        notify_collective("c", ("x",), 4, 0)
    notify_collective("d", ("x",), 8, 0)
    assert inner.counts == {("b", "x"): 1}
    assert list(outer.counts) == [("a", "x"), ("b", "x"), ("c", "x")]
    assert (inner.total_bytes, outer.total_bytes) == (2, 7)


def test_log_ends_with_its_block_on_errors() -> None:
    with pytest.raises(RuntimeError), fs.comm_log() as log:  # noqa: PT012
        notify_collective("a", ("x",), 1, 0)
        raise RuntimeError
    notify_collective("b", ("x",), 1, 0)
    assert log.counts == {("a", "x"): 1}


def test_unobserved_affects_its_own_thread_only() -> None:
    """Observers belong to the process, `unobserved` to the thread."""
    started, resume = threading.Event(), threading.Event()

    def run_unobserved() -> None:
        with unobserved():
            notify_collective("a", ("x",), 1, 0)
            started.set()
            assert resume.wait(60)

    thread = threading.Thread(target=run_unobserved)
    late: list[Event] = []
    with fs.comm_log() as log:
        with observe(lambda call: late.extend(call.events)):
            thread.start()
            assert started.wait(60)
            notify_collective("b", ("x",), 2, 0)
        resume.set()
        thread.join()
        notify_collective("c", ("x",), 4, 0)
    assert log.counts == {("b", "x"): 1, ("c", "x"): 1}
    assert [event.op for event in late] == ["b"], "its block is over"


def example() -> fs.CommLog:
    with fs.comm_log() as log:
        for axes, nbytes, phase in (
            (("tp",), 1234, "forward"), (("tp",), 1234, "backward"), (("dp", "tp"), 0, "backward"),
        ):  # fmt: skip
            log._record(ObservedCall((Event("all_reduce", axes, nbytes, 0, phase, torch.float32),)))
    return log


def test_log_prints_as_a_table() -> None:
    assert str(example()) == "\n".join(
        [
            "3 collectives, 2,468 B sent by the busiest rank",
            "operation   axes    forward    bytes  backward    bytes",
            "───────────────────────────────────────────────────────",
            "all_reduce  tp            1  1,234 B         1  1,234 B",
            "all_reduce  dp, tp                           1      0 B",
            "───────────────────────────────────────────────────────",
            "total                     1  1,234 B         2  1,234 B",
        ]
    )
    with fs.comm_log() as log:
        pass
    assert str(log) == repr(log) == "no collective ran"


def test_table_notes_if_rows_do_not_add_up() -> None:
    with fs.comm_log() as log:
        for rank, (forward, backward) in enumerate([(48, 0), (0, 72)]):
            log._record(ObservedCall((Event("exchange", (), forward, rank, "forward"),)))
            log._record(ObservedCall((Event("exchange", (), backward, rank, "backward"),)))
    assert str(log) == "\n".join(
        [
            "2 collectives, 72 B sent by the busiest rank",
            "operation  axes              forward  bytes  backward  bytes",
            "────────────────────────────────────────────────────────────",
            "exchange   (between meshes)        1   48 B         1   72 B",
            "────────────────────────────────────────────────────────────",
            "total                              1   48 B         1   72 B",
            "each figure is the busiest rank's, so rows need not add up to the total",
        ]
    )


def test_dict_is_json() -> None:
    logged = example().to_dict()
    assert json.loads(json.dumps(logged)) == logged
    assert logged == {
        "total_bytes": 2468,
        "forward": [{"op": "all_reduce", "axes": ["tp"], "count": 1, "bytes": 1234}],
        "backward": [
            {"op": "all_reduce", "axes": ["tp"], "count": 1, "bytes": 1234},
            {"op": "all_reduce", "axes": ["dp", "tp"], "count": 1, "bytes": 0},
        ],
    }
    by_dtype = example().to_dict("dtype")
    assert by_dtype["backward"] == [{"dtype": "float32", "count": 2, "bytes": 1234}]


def test_saved_files(tmp_path: Path) -> None:
    log = example()
    everything = log.to_dict(*FIELDS)
    for name, text in {
        "log.json": json.dumps(everything, indent=2), "log.html": log.html(), "log": str(log),
    }.items():  # fmt: skip
        log.save(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == text + "\n"


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fs.psum(x, "tp") + fs.psum(x.double(), "dp").float()  # the line of both


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)) + fs.psum(x, "tp")


def test_origins_of_collectives() -> None:
    mapped = fs.shard_map(Model(), mesh=MESH, in_specs=P(), out_specs=P())
    x = torch.ones(4, requires_grad=True)
    with fs.comm_log() as log:
        mapped(x).sum().backward()
    assert [(row[0], row[1]) for row in rows_of(log.by("module")) if row[1]] == [
        ("Model.layers.0", "2"), ("Model.layers.1", "2"), ("Model", "1")
    ]  # fmt: skip
    backward = {row[0]: row[3] for row in rows_of(log.by("module")) if row[3]}
    assert backward["Model.layers.0"] == "2"  # the forward call's module
    assert [row[:2] for row in rows_of(log.by("dtype", "axes"))][:2] == [
        ("float32", "tp"), ("float64", "dp")
    ]  # fmt: skip
    lines = {row[0]: row[1] for row in rows_of(log.by("line")) if row[1]}
    first = Layer.forward.__code__.co_firstlineno + 1
    assert lines[f"{__file__}:{first}"] == "4"
    calls = {row[0] for row in rows_of(log.by("call"))}
    assert "fs.psum" in calls
    assert any(call.startswith("backward of fs.pcast") for call in calls)
    assert log.by("line").footer[0][1:] == log.table.footer[0][2:]


def test_equal_calls_are_merged_before_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_log, "CACHE_SIZE", 4)
    with fs.comm_log() as log:
        for _ in range(20):
            observed_calls.launch_of.cache_clear()  # as when it is full
            notify_collective("all_gather", ("tp",), 4, 0)
    assert len(log._calls) < 20
    assert log.counts == {("all_gather", "tp"): 20}


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda log: pickle.loads(pickle.dumps(log))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_equal(copied: Any) -> None:
    x = torch.ones(4, requires_grad=True)
    with fs.comm_log() as log:
        fs.shard_map(Model(), mesh=MESH, in_specs=P(), out_specs=P())(x).sum().backward()
        fs.reshard(fs.shard(torch.ones(8), TWO, P("tp")), P())
    again = copied(log)
    assert again.to_dict(*FIELDS) == log.to_dict(*FIELDS)
    assert again.backward.counts == log.backward.counts != {}


def test_rows_of_forward_passes_come_first() -> None:
    with fs.comm_log() as log:
        for op, phase in (("a", "forward"), ("b", "backward"), ("c", "forward"), ("a", "backward")):
            log._record(ObservedCall((Event(op, ("x",), 1, 0, phase),)))
    assert [row[0] for row in log.table.rows] == ["a", "c", "b"]


def test_boundary_is_apart_from_the_body() -> None:
    mapped = fs.shard_map(
        lambda x: fs.psum(x, "tp"), mesh=MESH, in_specs=P("dp"), out_specs=P("dp")
    )
    with fs.comm_log() as log:
        mapped(torch.ones(4))
    rows = {row[0]: row[1] for row in rows_of(log.by("call"))}
    boundary = next(call for call in rows if call.startswith("the boundary of"))
    assert rows == {"fs.psum": "1", boundary: "1"}


def test_programs_are_named_by_their_layouts() -> None:
    pair = fs.shard(torch.ones(8), spec(P("tp"), 8))
    with fs.comm_log() as log:
        fs.reshard(pair, P("dp"))
    ((call, *_),) = rows_of(log.by("call"))
    assert call.startswith("the program to f32[8@dp] (f32[8@tp]")


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(fs.ShardingError, match="fields must be among operation, axes, dtype"):
        example().by("lines")
    with pytest.raises(fs.ShardingError, match="did you mean 'line'"):
        example().by("lines")
    for fields in ((), (None,)):
        with pytest.raises(fs.ShardingError, match="fields must be among"):
            example().by(*fields)


def test_a_log_without_a_block_is_refused() -> None:
    log = fs.comm_log()
    for read in (lambda: log.counts, lambda: log.total_bytes, lambda: log.forward):
        with pytest.raises(fs.ShardingError, match=r"with fs.comm_log\(\) as log: \.\.\."):
            read()
    assert not hasattr(log, "count")


def test_assert_only() -> None:
    pair = fs.shard(torch.ones(8), spec(P("tp"), 8))
    with fs.comm_log() as log:
        fs.reshard(pair, P())
    log.assert_only({("all_gather", "tp"): 1}, backward={})
    log.assert_only({"all_gather": 1})
    with pytest.raises(AssertionError, match=r"all_gather +tp +0 +1 +\d+ B +differs"):
        log.assert_only({})
    with pytest.raises(AssertionError, match=r"backward +all_reduce +1 +0"):
        log.assert_only({"all_gather": 1}, backward={"all_reduce": 1})


def test_backward_has_the_module_and_the_layouts_of_the_forward_call() -> None:
    class Gather(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fs.psum_scatter(fs.all_gather(x, "tp", tiled=True), "tp", tiled=True)

    net = torch.nn.Sequential(Gather(), Gather())
    mapped = fs.shard_map(net, mesh=fs.Mesh(tp=2), in_specs=P("tp"), out_specs=P("tp"))
    src = fs.Spec(fs.Mesh(tp=2), P("tp", None), shape=(4, 4))
    shards = tuple(torch.ones(2, 4, requires_grad=True) for _ in range(2))
    with fs.comm_log() as log:
        mapped(torch.ones(4, requires_grad=True)).sum().backward()
        moved = fs.reshard((shards, src), P(None, "tp")).local
        torch.autograd.grad(sum(y.sum() for y in moved), shards)  # type: ignore[arg-type]
    counts = {row[0]: (row[1], row[3]) for row in rows_of(log.by("module"))}
    assert counts["Sequential.0"] == counts["Sequential.1"] == ("2", "2")
    counts = {row[0]: (row[1], row[3]) for row in rows_of(log.by("redistribution"))}
    assert counts["f32[4@tp,4] -> f32[4,4@tp]"] == ("1", "")
    assert counts["f32[4,4@tp] -> f32[4@tp,4]"] == ("", "1")


class Gradients(torch.nn.Module):
    """Module whose forward takes second derivatives of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = self.second(self.first(x).sin()).sin()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]


def test_gradients_in_a_forward_have_the_module_of_the_differentiated_call() -> None:
    mapped = fs.shard_map(Gradients(), mesh=MESH, in_specs=P(), out_specs=P(), check=False)
    with fs.comm_log() as log:
        mapped(torch.ones(4))
    modules = {row[0]: row[3] for row in rows_of(log.by("module")) if row[3]}
    assert set(modules) == {"Gradients.first", "Gradients.second"}


def test_calls_of_modules_are_recorded_until_the_last_block_ends() -> None:
    before = torch.nn.Module._call_impl
    outer, inner = fs.comm_log(), fs.comm_log()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__()
    assert torch.nn.Module._call_impl is not before, "the other block is still running"
    inner.__exit__()
    assert torch.nn.Module._call_impl is before


def test_blocks_share_the_traces_of_partitioned_functions() -> None:
    layer, traces = torch.nn.Linear(4, 4), list[None]()

    def fn(x: torch.Tensor) -> torch.Tensor:
        traces.append(None)
        return layer(x)

    part = fs.partition(fn, mesh=fs.Mesh(x=2), in_specs=P("x"))
    part(torch.ones(4, 4))
    count = len(traces)
    for _ in range(2):
        with fs.comm_log():
            part(torch.ones(4, 4))
    assert len(traces) == count


def test_a_profiler_shows_calls() -> None:
    pair = fs.shard(torch.ones(8), spec(P("tp"), 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fs.reshard(pair, P())
    assert "the program to f32[8]" in {event.name for event in profile.events()}


def test_a_profiler_of_all_threads_shows_calls_in_simulated_bodies() -> None:
    mapped = fs.shard_map(
        lambda x: fs.psum(x, "x"), mesh=fs.Mesh(x=2), in_specs=P("x"), out_specs=P()
    )
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=config) as profile:
        mapped(torch.ones(8))
    assert "fs.psum" in {event.name for event in profile.events()}


def test_log_as_html() -> None:
    log = example()
    bundle = log._repr_mimebundle_()
    assert bundle["text/plain"] == str(log)
    assert "<table" in bundle["text/html"]
    assert "1,234 B" in bundle["text/html"]
    assert "\x1b" not in str(log)
