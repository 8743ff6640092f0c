"""Batches: trees of specs planned and run together, against each leaf alone; and refusals."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import Batch, Mesh, P, Program, ShardingError, Spec
from fshard.run.buckets import launch_batch
from tests import strategies
from tests.helpers import global_of, random_locals

F64 = torch.float64
MESH = Mesh(x=2, y=3)
Leaf = tuple[Spec, Spec]


def program(a: Spec, b: Spec, exchange: bool) -> Program:
    """From one spec to another in one exchange, where there is one; else as it is planned."""
    if exchange:
        with suppress(ShardingError):
            return Program(a, (fs.Exchange(b.partition, b.sizes, b.mesh),), b)
    return fs.redistribute(a, b)


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype = torch.int64, **options: Any) -> Batch:
    """Leaves on one mesh, a few of them alike, some in one exchange."""
    mesh = draw(strategies.meshes(max_axes=2, max_size=3, permuted=True))
    kinds = strategies.spec_pairs(mesh, dtype=dtype, **options)
    different = draw(st.lists(st.tuples(kinds, st.booleans()), min_size=1, max_size=4))
    leaves = draw(st.permutations([*different, *different[:2]]))
    bucket = draw(st.sampled_from([None, 1, 64, 2**25]))
    return Batch([program(*pair, how) for pair, how in leaves], bucket_bytes=bucket)


def ends(leaves: Sequence[Leaf]) -> tuple[list[Spec], list[Spec]]:
    return [a for a, _ in leaves], [b for _, b in leaves]


def check_equal(got: Sequence[Any], want: Sequence[Any]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


# -- laws ------------------------------------------------------------------------------


@given(batches())
@settings(max_examples=150)
def test_a_batch_is_each_leaf_alone_in_the_launches_it_says(batch: Batch) -> None:
    xs = [random_locals(spec, seed) for seed, spec in enumerate(batch.src)]
    with fs.comm_log() as log:
        got = batch(xs)
    check_equal(got, [prog(x) for prog, x in zip(batch.programs, xs, strict=True)])
    for a, b, x, y in zip(batch.src, batch.dst, xs, got, strict=True):
        assert torch.equal(global_of(b, y), global_of(a, x))
    assert log.counts.total() == len(batch.launches) == batch.cost().launches
    assert len(batch.launches) <= sum(prog.cost().launches for prog in batch.programs)
    check_value(batch)
    planned = fs.redistribute(batch.src, batch.dst, bucket_bytes=batch.bucket_bytes)
    assert (planned.src, planned.dst) == (batch.src, batch.dst)
    check_equal(planned(xs), got)


def check_value(batch: Batch) -> None:
    """Values are equal by meaning, and cost no more than their leaves."""
    again = pickle.loads(pickle.dumps(batch))
    assert (again, hash(again)) == (batch, hash(batch))
    assert batch == batch.T.T
    assert (batch.T.src, batch.T.dst) == (
        [spec.dual for spec in batch.dst],
        [spec.dual for spec in batch.src],
    )
    alone = [prog.cost() for prog in batch.programs]
    cost = batch.cost()
    assert cost.time <= sum(each.time for each in alone) * (1 + 1e-9)
    assert cost.bytes_received == sum(each.bytes_received for each in alone)
    assert batch.is_local == all(prog.is_local for prog in batch.programs)
    assert sorted(at for bucket in batch.buckets for at in bucket) == list(range(len(alone)))


@given(batches(F64), st.data())
@settings(max_examples=60)
def test_gradients_are_those_of_each_leaf_in_the_launches_of_the_transpose(
    batch: Batch, data: st.DataObject
) -> None:
    wanted = [data.draw(st.booleans()) for _ in batch.leaves]

    def run(move: Callable[[list[Any]], list[Any]]) -> Any:
        xs = [
            tuple(x.requires_grad_(need) for x in random_locals(spec, seed))
            for seed, (spec, need) in enumerate(zip(batch.src, wanted, strict=True))
        ]
        inputs = [x for shards, need in zip(xs, wanted, strict=True) if need for x in shards]
        with fs.comm_log() as log:
            ys = move(xs)
            total = sum(((y + 1) ** 2).sum() for shards in ys for y in shards)
            if not inputs:
                return ys, [], log
            grads = torch.autograd.grad(total, inputs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in grads), inputs)
        return ys, [grads, second], log

    one, want, _ = run(lambda xs: [p(x) for p, x in zip(batch.programs, xs, strict=True)])
    all_, got, log = run(batch)
    check_equal(all_, one)
    check_equal(got, want)
    for ys, need in zip(all_, wanted, strict=True):
        assert all(y.requires_grad == need for y in ys)
    assert log.forward.counts.total() == len(batch.launches)
    assert log.backward.counts.total() == len(batch.only(wanted).T.launches)


def test_leaves_of_several_meshes_and_between_meshes() -> None:
    small, large = Mesh(a=2), Mesh({"b": 3, "c": 2}, devices=(5, 3, 4, 1, 2, 0))
    leaves = [
        (small, P("a"), large, P("b")), (small, P(None, "a"), large, P(None, "c")),
        (large, P("c"), large, P(None, "c")), (large, P(("b", "c")), small, P("a")),
        (small, P("a"), small, P()), (large, P("b"), large, P("c")),
    ]  # fmt: skip
    batch = Batch([
        program(Spec(m, p, shape=(6, 6), dtype=F64), Spec(n, q, shape=(6, 6), dtype=F64), m != n)
        for m, p, n, q in leaves
    ])  # fmt: skip
    xs = [
        tuple(x.requires_grad_() for x in random_locals(spec, seed))
        for seed, spec in enumerate(batch.src)
    ]
    flat = [x for shards in xs for x in shards]

    def gradients(ys: list[Any]) -> Any:
        return torch.autograd.grad(sum(((y + 1) ** 2).sum() for s in ys for y in s), flat)

    with fs.comm_log() as log:
        got = batch(xs)
        grads = gradients(got)
    want = [prog(x) for prog, x in zip(batch.programs, xs, strict=True)]
    check_equal(got, want)
    check_equal([grads], [gradients(want)])
    assert log.forward.counts.total() <= len(batch.launches)
    assert log.backward.counts.total() <= len(batch.T.launches)


# -- what it is for ----------------------------------------------------------------------


def owners(mesh: Mesh, count: int) -> list[Leaf]:
    """Muon's: each matrix whole on one rank in turn, then on every rank."""
    axes, n = mesh.axes, mesh.size
    return [
        (
            Spec(
                mesh, P(axes), shape=(rows, 2), sizes={0: [rows * (at % n == r) for r in range(n)]}
            ),
            Spec(mesh, P(), shape=(rows, 2)),
        )
        for at in range(count)
        for rows in [1 + at % 7]
    ]


@pytest.mark.parametrize("back", [False, True])
def test_hundreds_of_matrices_with_owners_take_one_launch(back: bool) -> None:
    leaves = owners(Mesh(x=2, y=2), 300)
    batch = fs.redistribute(*ends(leaves))
    batch = fs.redistribute(batch.dst, batch.src) if back else batch
    assert [each.op for each in batch.launches] == ([] if back else ["all_to_all"])
    xs = [random_locals(spec, seed) for seed, spec in enumerate(batch.src)]
    with fs.comm_log() as log:
        ys = batch(xs)
    assert log.counts.total() == len(batch.launches)
    for spec, x, y in zip(batch.dst, xs, ys, strict=True):
        assert torch.equal(global_of(spec, y), x[0] if back else torch.cat(x))


def fsdp(dims: int = 20) -> tuple[dict[str, Any], dict[str, Any]]:
    """Matrices and uneven vectors, sharded over dp and over both axes; whole along dp."""
    mesh = Mesh(dp=2, tp=2)
    src: dict[str, Any] = {"layers": [], "norm": Spec(mesh, P("dp"), shape=(7,), uneven="chunk")}
    dst: dict[str, Any] = {"layers": [], "norm": Spec(mesh, P(), shape=(7,))}
    for at in range(dims):
        shape = (8, 4 * (1 + at % 3))
        bias = Spec(mesh, P(("dp", "tp")), shape=(5 + at,), uneven="chunk")
        src["layers"].append({"w": Spec(mesh, P("dp", "tp"), shape=shape), "b": bias})
        dst["layers"].append(
            {"w": Spec(mesh, P(None, "tp"), shape=shape), "b": bias.replace(partition=P())}
        )
    return src, dst


def test_gathering_parameters() -> None:
    batch = fs.redistribute(*fsdp())
    assert len(batch.launches) == 4
    assert {each.op for each in batch.launches} == {"all_gather", "all_to_all"}
    assert batch.dst["layers"][3]["w"] == fsdp()[1]["layers"][3]["w"]
    alone = fs.redistribute(fsdp(1)[0]["norm"], fsdp(1)[1]["norm"])
    assert batch.programs["norm"] == alone


class Recorder:
    """A rank alone: what it launches and waits for, in order; what comes are zeros."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.order: list[str] = []
        self.sizes: list[int] = []

    def moves(self, device: torch.device) -> bool:
        return True

    def all_gather(self, x: torch.Tensor, group: Sequence[int]) -> Any:
        return self.go("all_gather", x, (len(group), *x.shape))

    def all_reduce(self, x: torch.Tensor, op: str, group: Sequence[int]) -> Any:
        return self.go("all_reduce", x, x.shape)

    def reduce_scatter(self, x: torch.Tensor, op: str, group: Sequence[int]) -> Any:
        return self.go("reduce_scatter", x, x.shape[1:])

    def all_to_all(self, x: torch.Tensor, send: Any, receive: Any, group: Any) -> Any:
        return self.go("all_to_all", x, (sum(receive),))

    def go(self, op: str, x: torch.Tensor, shape: Any) -> Any:
        self.order.append(op)
        moved = x.new_zeros(shape)
        self.sizes += [max(x.nbytes, moved.nbytes)]
        held = [x, moved]  # until it is waited for

        def wait() -> torch.Tensor:
            self.order.append("wait")
            return held[1]

        return wait


def test_different_kinds_of_one_round_are_under_way_together() -> None:
    mesh = Mesh(x=2, y=2)
    src = [Spec(mesh, P("x"), shape=(4,)), Spec(mesh, P("y"), shape=(4,)),
           Spec(mesh, P(unreduced={"x"}), shape=(4,))]  # fmt: skip
    batch = fs.redistribute(src, [spec.replace(partition=P()) for spec in src])
    launched = ["all_gather", "all_gather", "all_reduce"]
    assert [each.op for each in batch.launches] == launched
    recorder = Recorder()
    finish = launch_batch(batch, recorder, [torch.ones(spec.local_shape(0)) for spec in src])
    assert recorder.order == launched
    finish()
    assert recorder.order == [*launched, "wait", "wait", "wait"]


# -- memory ------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """The most bytes that the tensors made in the block hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for y in out if isinstance(out, list | tuple) else [out]:
            self.made[id(y)] = weakref.ref(y)
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        live = [y for y in (ref() for ref in self.made.values()) if y is not None]
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
        with Live() as live:
            out = launch_batch(batch, recorder, xs)()
        return live.most - sum(y.nbytes for y in out), recorder

    held, recorder = extra(bucket)
    assert held <= 6 * bucket
    assert max(recorder.sizes) <= bucket
    under_way = [
        sum(1 if op != "wait" else -1 for op in recorder.order[: at + 1])
        for at in range(len(recorder.order))
    ]
    assert max(under_way) == 2
    at_once, all_ = extra(None)
    assert at_once > held
    assert len(all_.sizes) < len(recorder.sizes)


def test_a_larger_leaf_goes_alone() -> None:
    mesh = Mesh(x=2)
    src = [Spec(mesh, P("x"), shape=(n,)) for n in (4, 100, 4, 4)]
    batch = fs.redistribute(src, [spec.replace(partition=P()) for spec in src], bucket_bytes=32)
    assert batch.buckets == ((0,), (1,), (2, 3))
    recorder = Recorder()
    launch_batch(batch, recorder, [torch.ones(spec.local_shape(0)) for spec in src])()
    assert recorder.sizes == [16, 400, 32]


# -- rounds ------------------------------------------------------------------------------


def test_who_comes_first_waits_for_the_others() -> None:
    """The gather of one leaf goes with the second step of another."""
    mesh = Mesh(x=2, y=2)
    gather, swap = fs.AllGather("x", 0), fs.AllToAll("y", 1, 0)
    one = Program(Spec(mesh, P("x"), shape=(8, 4)), [gather])
    two = Program(Spec(mesh, P(("x", "y")), shape=(8, 4)), [fs.AllToAll("y", 0, 1), gather])
    three = Program(Spec(mesh, P(None, "y"), shape=(8, 4)), [swap])
    batch = Batch({"one": one, "two": two, "three": three})
    assert [(each.op, each.axes, len(each.steps)) for each in batch.launches] == [
        ("all_to_all", ("y",), 2),
        ("all_gather", ("x",), 2),
    ]
    xs = {name: random_locals(prog.src) for name, prog in batch.programs.items()}
    with fs.comm_log() as log:
        got = batch(xs)
    check_equal([*got.values()], [batch.programs[name](xs[name]) for name in got])
    assert log.counts == {("all_to_all", "y"): 1, ("all_gather", "x"): 1}


def test_leaves_that_wait_for_each_other() -> None:
    mesh = Mesh(x=2, y=2)
    ahead, behind = fs.AllToAll("x", 0, 1), fs.AllGather("y", 1)
    one = Program(Spec(mesh, P("x", "y"), shape=(4, 4)), [behind, ahead])
    two = Program(Spec(mesh, P("x", "y"), shape=(4, 4)), [fs.AllGather("y", 1), ahead])
    three = Program(Spec(mesh, P("x", None, "y"), shape=(4, 4, 2)), [ahead, fs.AllGather("y", 2)])
    batch = Batch([one, two, three])
    assert [(each.op, len(each.steps)) for each in batch.launches] == [
        ("all_gather", 2), ("all_to_all", 3), ("all_gather", 1),
    ]  # fmt: skip
    xs = [random_locals(prog.src) for prog in batch.programs]
    check_equal(batch(xs), [prog(x) for prog, x in zip(batch.programs, xs, strict=True)])
