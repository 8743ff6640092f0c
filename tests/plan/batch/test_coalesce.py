"""Launches of batches: which leaves share them, their order, bytes and memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import Batch, Mesh, P, Program, Spec
from fshard.program.cost.rank_loads import Load, step_load, union_ranks
from fshard.program.cost.traffic import traffic
from fshard.program.exchange_boxes import receives
from fshard.run.bucketing import bucket_plans, launch_all
from tests.helpers import strategies
from tests.helpers.batches import (
    Specs,
    check_equal,
    ends,
    gathered_parameters,
    owned_matrices,
    program,
)
from tests.helpers.spec_grid import global_of, random_locals

# -- use cases ----------------------------------------------------------------------


def test_hundreds_of_owned_matrices_are_one_launch() -> None:
    batch = fs.redistribute(*ends(owned_matrices(Mesh(x=2, y=2), 300)))
    xs = [tuple(x.requires_grad_() for x in random_locals(a, i)) for i, a in enumerate(batch.src)]
    with fs.comm_log() as log:
        ys = batch(xs)
        total = sum((y * (1 + rank)).sum() for shards in ys for rank, y in enumerate(shards))
        grads = torch.autograd.grad(total, [x for shards in xs for x in shards])
    assert [launch.op for launch in batch.launches] == ["all_to_all"]
    assert log.forward.counts.total() == 1
    assert log.backward.counts.total() == 1
    for spec, x, y in zip(batch.dst, xs, ys, strict=True):
        assert torch.equal(global_of(spec, y), torch.cat(x))
    assert all(bool((g == 1 + 2 + 3 + 4).all()) for g in grads)


def rows_to_owners(mesh: Mesh, layers: int, scale: int = 1) -> tuple[Specs, Specs]:
    """Return the specs of rows on all ranks, and of each matrix on one of them in turn."""
    shapes = {"qkv": (96, 32), "out": (32, 32), "up": (128, 32), "down": (32, 128)}
    src, dst = Specs(), Specs()
    for layer in range(layers):
        owner = layer % mesh.size
        for name, shape in shapes.items():
            spec = Spec(mesh, P(mesh.axes), shape=tuple(n * scale for n in shape))
            sizes = [spec.shape[0] * (rank == owner) for rank in range(mesh.size)]
            src[f"{name}.{layer}"], dst[f"{name}.{layer}"] = spec, spec.replace(sizes={0: sizes})
    return src, dst


def lacked_bytes(src: Specs, dst: Specs) -> int:
    """Return the bytes of a tree that the rank that lacks most must receive."""
    return max(
        sum(
            math.prod(stop - start for start, stop in piece.box) * spec.dtype.itemsize
            for name, spec in src.items()
            for piece in receives(spec, dst[name], rank)
        )
        for rank in next(iter(src.values())).mesh.ranks
    )


OPTIONS = [{}, {"objective": "bytes"}, {"topology": fs.Topology.cluster()}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(32, marks=pytest.mark.slow)])
def test_owned_matrices_receive_only_what_ranks_lack(ranks: int, options: dict[str, Any]) -> None:
    """One exchange sends each rank exactly what it lacks."""
    mesh = Mesh(dp=ranks)
    src, dst = rows_to_owners(mesh, 2 * ranks)
    for a, b in ((src, dst), (dst, src)):
        batch = fs.redistribute(a, b, **options)
        assert batch.cost().bytes_received == lacked_bytes(a, b)
        assert [launch.name for launch in batch.launches] == ["exchange"]
        bound = batch.explain().summary.rows[3]
        assert (bound[0], bound[-1]) == ("lower bound", "1.00x")
    xs = {name: random_locals(spec, seed) for seed, (name, spec) in enumerate(dst.items())}
    with fs.comm_log() as log:
        ys = batch(xs)
    assert log.bytes["exchange", "dp"] == batch.cost().bytes_sent == lacked_bytes(src, dst)
    for name, spec in src.items():
        assert torch.equal(global_of(spec, ys[name]), global_of(dst[name], xs[name]))


def test_gathers_stay_gathers_beside_owned_matrices() -> None:
    mesh = Mesh(dp=4)
    src, dst = rows_to_owners(mesh, 8, 16)
    for name in [name for name in src if name.startswith("down")]:
        dst[name] = src[name].replace(partition=P(reduced={"dp"}))
    batch = fs.redistribute(src, dst)
    for name, prog in batch.programs.items():
        want = "all_gather" if name.startswith("down") else "exchange"
        assert [step.name for step in prog.steps] == [want]
    assert batch.cost().bytes_received == lacked_bytes(src, dst)
    assert {launch.name for launch in batch.launches} == {"all_gather", "exchange"}
    gathers = fs.redistribute(src, dst, exclude=fs.Exchange)
    assert not any(isinstance(step, fs.Exchange) for p in gathers.leaves if p for step in p.steps)
    assert gathers.cost().time > batch.cost().time


def test_large_leaves_of_different_owners_share_buckets() -> None:
    mesh = Mesh(dp=4)
    src, dst = rows_to_owners(mesh, 8, 4)
    limit = 2**12
    batch = fs.redistribute(src, dst, bucket_bytes=limit)
    assert max(map(len, batch.buckets)) == 4
    assert len(batch.launches) == 8
    xs = {name: random_locals(spec, seed) for seed, (name, spec) in enumerate(src.items())}
    check_equal([*batch(xs).values()], [p(xs[name]) for name, p in batch.programs.items()])


@given(st.data())
@settings(max_examples=200)
def test_step_load_agrees_with_traffic_of_the_busiest_rank(data: st.DataObject) -> None:
    """No rank has more, some rank has as much; exchanges agree with their boxes."""
    mesh = data.draw(strategies.meshes(max_axes=3, max_size=3, permuted=True))
    a, b = data.draw(strategies.spec_pairs(mesh))
    prog = program(a, b, data.draw(st.booleans()))
    ranks = union_ranks([mesh, Mesh(extra=data.draw(st.integers(1, 30)))])
    for step, before, after in zip(prog.steps, prog.specs, prog.specs[1:], strict=False):
        moved, most = step_load(step, before, after, ranks), traffic(step, before, after)
        busy = Load(*map(max, moved))
        assert busy.sent <= most.sent
        assert busy.received <= most.received
        if most.launches and not isinstance(step, fs.AllToAll):
            assert busy.received == most.received
        if isinstance(step, fs.Exchange):
            item = before.dtype.itemsize
            got = [
                sum(math.prod(stop - start for start, stop in piece.box) * item
                    for piece in receives(before, after, rank)) if rank in mesh else 0
                for rank in ranks
            ]  # fmt: skip
            assert sum(moved.sent) >= sum(moved.received)
            even = not any(before.sizes) and not any(after.sizes)
            assert (max(got) == busy.received) if even else got == list(moved.received)


def test_gathering_parameters_takes_two_launches() -> None:
    src, dst = gathered_parameters()
    batch = fs.redistribute(src, dst)
    assert (batch.src, batch.dst) == (src, dst)
    assert sum(prog.cost().launches for prog in batch.leaves if prog) == 41
    assert len(batch.launches) == len(batch.T.launches) == 2
    assert batch.programs["norm"] == fs.redistribute(src["norm"], dst["norm"])
    assert batch == fs.redistribute(*gathered_parameters())
    assert batch != fs.redistribute(*gathered_parameters(), bucket_bytes=1)


class Recorder:
    """Transport of a single rank: records launches and waits in order, and receives zeros."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.order: list[str] = []
        self.sizes: list[int] = []

    def accepts(self, device: torch.device) -> bool:
        return True

    def all_gather(self, x: torch.Tensor, group: Sequence[int]) -> Any:
        return self.go("all_gather", x, (len(group), *x.shape))

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Sequence[int], *, owned: bool = False
    ) -> Any:
        return self.go("all_reduce", x, x.shape)

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Sequence[int]) -> Any:
        return self.go("reduce_scatter", x, x.shape[1:])

    def all_to_all(self, x: torch.Tensor, send: Any, receive: Any, group: Any) -> Any:
        return self.go("all_to_all", x, (sum(receive),))

    def go(self, op: str, x: torch.Tensor, shape: Any) -> Any:
        self.order.append(op)
        moved = x.new_zeros(shape)
        self.sizes += [max(x.nbytes, moved.nbytes)]
        buffers = [x, moved]  # alive until the wait

        def wait() -> torch.Tensor:
            self.order.append("wait")
            return buffers[1]

        return wait


def launch(batch: Batch, recorder: Recorder, xs: Any = None) -> Callable[[], Any]:
    """Start a batch on a single rank, with ones unless `xs` are given."""
    xs = xs or [torch.ones(spec.local_shape(recorder.rank)) for spec in batch.src]
    plans = bucket_plans(batch.leaves, batch.bucket_bytes, recorder.rank)
    return launch_all(plans, recorder, xs)


def test_launches_of_one_round_are_in_flight_together() -> None:
    mesh = Mesh(x=2, y=2)
    batch = Batch([
        Program(Spec(mesh, P("x"), shape=(4,)), (fs.AllGather("x", 0),)),
        Program(Spec(mesh, P("y"), shape=(4,)), (fs.AllGather("y", 0),)),
        Program(Spec(mesh, P(unreduced={"x"}), shape=(4,)), (fs.AllReduce("x"),)),
    ])  # fmt: skip
    launched = ["all_gather", "all_gather", "all_reduce"]
    assert [launch.op for launch in batch.launches] == launched
    recorder = Recorder()
    finish = launch(batch, recorder)
    assert recorder.order == launched
    finish()
    assert recorder.order == [*launched, "wait", "wait", "wait"]


# -- memory ------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Most bytes that the tensors created in the block hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for y in out if isinstance(out, list | tuple) else [out]:
            self.live[id(y)] = weakref.ref(y)
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        live = [y for y in (ref() for ref in self.live.values()) if y is not None]
        return sum(
            {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in live}.values()
        )


def moves(kind: str, mesh: Mesh) -> tuple[P, P]:
    x = "x"
    return {
        "gather": (P(None, x), P()), "scatter": (P(unreduced={x}), P(None, x)),
        "reduce": (P(unreduced={x}), P()), "swap": (P(x), P(None, x)),
        "both": (P(None, x, unreduced={"y"}), P("y")),
    }[kind]  # fmt: skip


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce", "swap", "both"])
def test_memory_is_bounded_by_buckets(kind: str) -> None:
    mesh = Mesh(x=4, y=2)
    before, after = moves(kind, mesh)
    src = [Spec(mesh, before, shape=(8, 32)) for _ in range(64)]
    dst = [spec.replace(partition=after) for spec in src]
    bucket = 4096

    def extra(bucket_bytes: int | None) -> tuple[int, Recorder]:
        batch = fs.redistribute(src, dst, bucket_bytes=bucket_bytes)
        recorder = Recorder()
        xs = [torch.ones(spec.local_shape(0)) for spec in src]
        with LiveBytes() as live:
            out = launch(batch, recorder, xs)()
        return live.most - sum(y.nbytes for y in out), recorder

    extra_bytes, recorder = extra(bucket)
    assert extra_bytes <= 6 * bucket
    assert max(recorder.sizes) <= bucket
    in_flight = [
        sum(1 if op != "wait" else -1 for op in recorder.order[: i + 1])
        for i in range(len(recorder.order))
    ]
    assert max(in_flight) == 2
    unlimited, single = extra(None)
    assert unlimited > extra_bytes
    assert len(single.sizes) < len(recorder.sizes)


def test_leaf_larger_than_a_bucket_is_launched_alone() -> None:
    mesh = Mesh(x=2)
    src = [Spec(mesh, P("x"), shape=(n,)) for n in (4, 100, 4, 4)]
    batch = fs.redistribute(src, [spec.replace(partition=P()) for spec in src], bucket_bytes=32)
    assert batch.buckets == ((0, 2), (1,), (3,))
    recorder = Recorder()
    launch(batch, recorder)()
    assert recorder.sizes == [32, 400, 16]


# -- rounds ------------------------------------------------------------------------------


def test_collective_waits_for_leaves_that_reach_it_later() -> None:
    """The gather of one leaf is launched with the second step of another."""
    mesh = Mesh(x=2, y=2)
    gather, swap = fs.AllGather("x", 0), fs.AllToAll("y", 1, 0)
    a = Program(Spec(mesh, P("x"), shape=(8, 4)), [gather])
    b = Program(Spec(mesh, P(("x", "y")), shape=(8, 4)), [fs.AllToAll("y", 0, 1), gather])
    c = Program(Spec(mesh, P(None, "y"), shape=(8, 4)), [swap])
    batch = Batch({"one": a, "two": b, "three": c})
    assert [(launch.op, launch.axes, len(launch.steps)) for launch in batch.launches] == [
        ("all_to_all", ("y",), 2),
        ("all_gather", ("x",), 2),
    ]
    xs = {name: random_locals(prog.src) for name, prog in batch.programs.items()}
    with fs.comm_log() as log:
        got = batch(xs)
    check_equal([*got.values()], [batch.programs[name](xs[name]) for name in got])
    assert log.counts == {("all_to_all", "y"): 1, ("all_gather", "x"): 1}


def test_leaves_that_wait_for_each_other_are_all_launched() -> None:
    mesh = Mesh(x=2, y=2)
    ahead, behind = fs.AllToAll("x", 0, 1), fs.AllGather("y", 1)
    a = Program(Spec(mesh, P("x", "y"), shape=(4, 4)), [behind, ahead])
    b = Program(Spec(mesh, P("x", "y"), shape=(4, 4)), [fs.AllGather("y", 1), ahead])
    c = Program(Spec(mesh, P("x", None, "y"), shape=(4, 4, 2)), [ahead, fs.AllGather("y", 2)])
    batch = Batch([a, b, c])
    assert [(launch.op, len(launch.steps)) for launch in batch.launches] == [
        ("all_gather", 2), ("all_to_all", 3), ("all_gather", 1),
    ]  # fmt: skip
    xs = [random_locals(prog.src) for prog in batch.programs]
    check_equal(batch(xs), [prog(x) for prog, x in zip(batch.programs, xs, strict=True)])


# -- planning ----------------------------------------------------------------------------


def test_leaves_share_launches_if_cheaper() -> None:
    """A leaf that alone is cheapest in one launch takes two, which it shares with others."""
    mesh = Mesh(x=4, y=4)
    src = Spec(mesh, P(unreduced={"x", "y"}), shape=(256, 256))
    prog = fs.redistribute(src, src.replace(partition=P()))
    batch = fs.redistribute([src] * 50, [src.replace(partition=P())] * 50, bucket_bytes=None)
    assert batch.cost().time <= 50 * prog.cost().time
    assert batch.cost().launches <= prog.cost().launches * 2
    assert len(set(batch.leaves)) == 1
