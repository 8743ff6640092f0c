"""Batches: trees of specs planned and run together, against each leaf alone; and refusals."""

from __future__ import annotations

import math
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
from fshard.program.cost.rank_loads import Load, step_load, union_ranks
from fshard.program.cost.traffic import traffic
from fshard.program.exchange_boxes import receives
from fshard.program.lower_bound import lower_bound_together
from fshard.run.bucketing import launch_all
from tests.helpers import strategies
from tests.helpers.spec_grid import global_of, message, random_locals

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


def only(batch: Batch, wanted: Sequence[bool]) -> Batch:
    """The batch of some of the leaves."""
    leaves = [leaf for leaf, keep in zip(batch.leaves, wanted, strict=True) if keep]
    return Batch(leaves, bucket_bytes=batch.bucket_bytes)


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
    assert cost.bytes_received <= sum(each.bytes_received for each in alone)
    assert cost.bytes_sent <= sum(each.bytes_sent for each in alone)
    assert cost.peak_memory <= sum(each.peak_memory for each in alone)
    ends = [(prog.src, prog.dst, prog.forward_dtype) for prog in batch.programs]
    bound = lower_bound_together(ends)
    assert bound.bytes_received <= cost.bytes_received
    assert bound.peak_memory <= cost.peak_memory
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
    assert log.backward.counts.total() == len(only(batch, wanted).T.launches)


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


@given(st.data())
@settings(max_examples=40)
def test_any_two_meshes(data: st.DataObject) -> None:
    """Values and gradients; launches only as many as said, for a rank may take part in few."""
    one, two = Mesh(x=2, y=2), Mesh({"x": 3, "z": 2}, devices=data.draw(st.permutations(range(6))))
    shapes = [data.draw(strategies.shapes(0, 2)) for _ in range(data.draw(st.integers(1, 4)))]
    free, whole = ("sharded", "invariant", "unreduced"), ("sharded", "invariant", "reduced")
    ends_of = [
        (strategies.specs(a, shape, dtype=F64, states=free),
         strategies.specs(b, shape, dtype=F64, states=whole))
        for shape in shapes
        for a, b in [data.draw(st.sampled_from([(one, two), (two, one), (two, two)]))]
    ]  # fmt: skip
    leaves = [(data.draw(a), data.draw(b)) for a, b in ends_of]
    batch = fs.redistribute(*ends(leaves), bucket_bytes=data.draw(st.sampled_from([None, 64])))
    xs = [tuple(x.requires_grad_() for x in random_locals(a, i)) for i, a in enumerate(batch.src)]
    flat = [x for shards in xs for x in shards]

    def gradients(ys: list[Any]) -> Any:
        return torch.autograd.grad(sum(((y + 1) ** 2).sum() for s in ys for y in s), flat)

    with fs.comm_log() as log:
        got = batch(xs)
        grads = gradients(got)
    want = [prog(x) for prog, x in zip(batch.programs, xs, strict=True)]
    check_equal(got, want)
    check_equal([grads], [gradients(want)])
    for a, b, x, y in zip(batch.src, batch.dst, xs, got, strict=True):
        assert torch.equal(global_of(b, y), global_of(a, x))
    assert log.forward.counts.total() <= len(batch.launches)
    assert log.backward.counts.total() <= len(batch.T.launches)


def test_an_uneven_all_to_all_goes_with_an_exchange_between_meshes() -> None:
    """Over the same ranks, in any order; where only some ranks have both, they do not."""
    four, two, back = Mesh(x=4), Mesh(y=2), Mesh({"x": 4}, devices=(3, 1, 0, 2))
    halves = Mesh(x=2, z=2)
    uneven = {0: (1, 2, 3, 4)}

    def swapped(mesh: Mesh, axes: Any) -> Program:
        sizes = uneven if mesh.axis_size(axes) == 4 else {0: (4, 6)}
        src = Spec(mesh, P(axes), shape=(10, 8), sizes=sizes)
        return Program(src, (fs.AllToAll(axes, 0, 1),))

    def between(one: Mesh, other: Mesh) -> Program:
        ends = (Spec(mesh, P(mesh.axes), shape=(8,)) for mesh in (one, other))
        return fs.redistribute(*ends)

    rows = [
        ([swapped(four, "x"), between(four, two)], 1),
        ([between(two, back), swapped(four, "x"), swapped(back, "x")], 1),
        ([swapped(halves, ("x", "z")), between(four, two)], 1),
        ([between(Mesh(y=1), two), swapped(halves, "z")], 2),
        ([between(four, two), swapped(halves, "z")], 2),
    ]
    for programs, launches in rows:
        batch = Batch(programs)
        xs = [random_locals(spec, seed) for seed, spec in enumerate(batch.src)]
        with fs.comm_log() as log:
            ys = batch(xs)
        check_equal(ys, [prog(x) for prog, x in zip(programs, xs, strict=True)])
        assert log.counts.total() == len(batch.launches) == launches
    assert batch.launches[0].scope() == "from Mesh(x=4) to Mesh(y=2)"
    assert Batch(rows[1][0]).launches[0].scope() == "between several meshes"
    assert Batch(rows[0][0]).launches[0].scope() == "between several meshes"


def test_shards_that_are_even_in_some_groups_go_with_others() -> None:
    mesh = Mesh(x=2, y=2)
    specs = [
        Spec(mesh, P(("x", "y")), shape=(7,), sizes={0: sizes})
        for sizes in ((1, 1, 2, 3), (2, 3, 1, 1))
    ]
    batch = Batch([Program(spec, (fs.AllGather("y", 0),)) for spec in specs])
    xs = [random_locals(spec, seed) for seed, spec in enumerate(specs)]
    with fs.comm_log() as log:
        ys = batch(xs)
    for spec, x, y in zip(batch.dst, xs, ys, strict=True):
        assert torch.equal(global_of(spec, y), torch.cat(x))
    assert log.counts.total() == len(batch.launches) == 1


# -- what it is for ----------------------------------------------------------------------


def owners(mesh: Mesh, count: int) -> list[Leaf]:
    """Muon's: each matrix whole on one rank in turn, then on every rank for different work."""
    axes, n = mesh.axes, mesh.size
    leaves = []
    for at in range(count):
        shape = (1 + at % 7, 2)
        sizes = [shape[0] if at % n == place else 0 for place in range(n)]
        owned = Spec(mesh, P(axes), shape=shape, sizes={0: sizes})
        leaves.append((owned, Spec(mesh, P(reduced=set(axes)), shape=shape)))
    return leaves


def test_hundreds_of_matrices_with_owners_take_one_launch() -> None:
    batch = fs.redistribute(*ends(owners(Mesh(x=2, y=2), 300)))
    xs = [tuple(x.requires_grad_() for x in random_locals(a, i)) for i, a in enumerate(batch.src)]
    with fs.comm_log() as log:
        ys = batch(xs)
        total = sum((y * (1 + rank)).sum() for shards in ys for rank, y in enumerate(shards))
        grads = torch.autograd.grad(total, [x for shards in xs for x in shards])
    assert [each.op for each in batch.launches] == ["all_to_all"]
    assert log.forward.counts.total() == 1
    assert log.backward.counts.total() == 1
    for spec, x, y in zip(batch.dst, xs, ys, strict=True):
        assert torch.equal(global_of(spec, y), torch.cat(x))
    assert all(bool((g == 1 + 2 + 3 + 4).all()) for g in grads)


def muon(mesh: Mesh, layers: int, scale: int = 1) -> tuple[dict[str, Spec], dict[str, Spec]]:
    """From rows on all ranks to each matrix whole on one of them, in turn."""
    shapes = {"qkv": (96, 32), "out": (32, 32), "up": (128, 32), "down": (32, 128)}
    src, own = dict[str, Spec](), dict[str, Spec]()
    for layer in range(layers):
        owner = layer % mesh.size
        for name, shape in shapes.items():
            spec = Spec(mesh, P(mesh.axes), shape=tuple(n * scale for n in shape))
            sizes = [spec.shape[0] * (place == owner) for place in range(mesh.size)]
            src[f"{name}.{layer}"], own[f"{name}.{layer}"] = spec, spec.replace(sizes={0: sizes})
    return src, own


def lacked(src: dict[str, Spec], dst: dict[str, Spec]) -> int:
    """Bytes that the rank that lacks most lacks of a tree."""
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
@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_owners_take_turns(ranks: int, options: dict[str, Any]) -> None:
    """Nobody receives but what it lacks, and it is no more launches than gathers to all take."""
    mesh = Mesh(dp=ranks)
    src, own = muon(mesh, 2 * ranks)
    for a, b in ((src, own), (own, src)):
        batch = fs.redistribute(a, b, **options)
        assert batch.cost().bytes_received == lacked(a, b)
        assert [each.name for each in batch.launches] == ["exchange"]
        bound = batch.explain().summary.rows[3]
        assert (bound[0], bound[-1]) == ("lower bound", "1.00x")
    xs = {name: random_locals(spec, seed) for seed, (name, spec) in enumerate(own.items())}
    with fs.comm_log() as log:
        ys = batch(xs)
    assert log.bytes["exchange", "dp"] == batch.cost().bytes_sent == lacked(src, own)
    for name, spec in src.items():
        assert torch.equal(global_of(spec, ys[name]), global_of(own[name], xs[name]))


def test_gathers_stay_gathers_beside_owners() -> None:
    mesh = Mesh(dp=4)
    src, own = muon(mesh, 8, 16)
    for name in [name for name in src if name.startswith("down")]:
        own[name] = src[name].replace(partition=P(reduced={"dp"}))
    batch = fs.redistribute(src, own)
    for name, prog in batch.programs.items():
        want = "all_gather" if name.startswith("down") else "exchange"
        assert [step.name for step in prog.steps] == [want]
    assert batch.cost().bytes_received == lacked(src, own)
    assert {each.name for each in batch.launches} == {"all_gather", "exchange"}
    freely = fs.redistribute(src, own, exclude=fs.Exchange)
    assert not any(isinstance(step, fs.Exchange) for p in freely.leaves if p for step in p.steps)
    assert freely.cost().time > batch.cost().time


def test_large_leaves_of_owners_go_together() -> None:
    mesh = Mesh(dp=4)
    src, own = muon(mesh, 8, 4)
    limit = 2**12
    batch = fs.redistribute(src, own, bucket_bytes=limit)
    assert max(map(len, batch.buckets)) == 4
    assert len(batch.launches) == 8
    xs = {name: random_locals(spec, seed) for seed, (name, spec) in enumerate(src.items())}
    check_equal([*batch(xs).values()], [p(xs[name]) for name, p in batch.programs.items()])


@given(st.data())
@settings(max_examples=200)
def test_what_every_rank_moves(data: st.DataObject) -> None:
    """No rank more than the busiest, one as much; exchanges by the tables of what is sent."""
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


def fsdp(dims: int = 20) -> tuple[dict[str, Any], dict[str, Any]]:
    """Matrices cut along dp and tp, uneven vectors along one or both; then whole along dp."""
    mesh = Mesh(dp=2, tp=2)

    def leaf(shape: Sequence[int], before: P, *after: Any) -> tuple[Spec, Spec]:
        src = Spec(mesh, before, shape=shape, uneven="chunk")
        return src, src.replace(partition=P(*after, reduced={"dp"}))

    pairs = [
        {"w": leaf((8, 4 * (1 + at % 3)), P("dp", "tp"), None, "tp"), "b": leaf((5 + at,), P("dp"))}
        for at in range(dims)
    ]
    src, dst = (
        {"layers": [{name: pair[end] for name, pair in each.items()} for each in pairs],
         "norm": leaf((7,), P("dp"))[end], "none": None}
        for end in (0, 1)
    )  # fmt: skip
    return src, dst


def test_gathering_parameters() -> None:
    src, dst = fsdp()
    batch = fs.redistribute(src, dst)
    assert (batch.src, batch.dst) == (src, dst)
    assert sum(prog.cost().launches for prog in batch.leaves if prog) == 41
    assert len(batch.launches) == len(batch.T.launches) == 2
    assert batch.programs["norm"] == fs.redistribute(src["norm"], dst["norm"])
    assert batch == fs.redistribute(*fsdp())
    assert batch != fs.redistribute(*fsdp(), bucket_bytes=1)


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


def launch(batch: Batch, recorder: Recorder, xs: Any = None) -> Callable[[], Any]:
    """Start on a rank alone, on ones unless there is something else."""
    xs = xs or [torch.ones(spec.local_shape(recorder.rank)) for spec in batch.src]
    return launch_all(batch.leaves, batch.bucket_bytes, recorder, xs)


def test_different_kinds_of_one_round_are_under_way_together() -> None:
    mesh = Mesh(x=2, y=2)
    batch = Batch([
        Program(Spec(mesh, P("x"), shape=(4,)), (fs.AllGather("x", 0),)),
        Program(Spec(mesh, P("y"), shape=(4,)), (fs.AllGather("y", 0),)),
        Program(Spec(mesh, P(unreduced={"x"}), shape=(4,)), (fs.AllReduce("x"),)),
    ])  # fmt: skip
    launched = ["all_gather", "all_gather", "all_reduce"]
    assert [each.op for each in batch.launches] == launched
    recorder = Recorder()
    finish = launch(batch, recorder)
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
            out = launch(batch, recorder, xs)()
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
    assert batch.buckets == ((0, 2), (1,), (3,))
    recorder = Recorder()
    launch(batch, recorder)()
    assert recorder.sizes == [32, 400, 16]


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


# -- running -----------------------------------------------------------------------------


def tree() -> tuple[Batch, dict[str, Any]]:
    """A batch of three leaves, one of them None, and locals for it."""
    w, b = Spec(MESH, P("x"), shape=(4, 3)), Spec(MESH, P(unreduced={"y"}), shape=(6,))
    programs = {"w": Program(w, (fs.AllGather("x", 0),)), "n": None,
                "b": [Program(b, (fs.ReduceScatter("y", 0),))]}  # fmt: skip
    xs = {"w": random_locals(w), "n": "passed on", "b": [random_locals(b)]}
    return Batch(programs), xs


def test_trees_in_trees_out() -> None:
    batch, xs = tree()
    ys = batch({"b": xs["b"], "n": None, "w": xs["w"]})
    assert list(ys) == list(xs)
    assert ys["n"] is None
    assert batch(xs)["n"] == "passed on"
    check_equal([ys["w"], *ys["b"]],
                [batch.programs["w"](xs["w"]), batch.programs["b"][0](xs["b"][0])])  # fmt: skip
    pending = batch(xs, async_op=True)
    check_equal([pending.wait()["w"]], [ys["w"]])
    with pytest.raises(ShardingError, match="a second wait"):
        pending.wait()
    assert fs.redistribute([None, []], [None, []])([1, []]) == [1, []]
    one = (Spec(MESH, P("x"), shape=(4,)), Spec(MESH, P("y"), shape=(6,)))
    two = fs.redistribute(one, (one[0].replace(partition=P()), one[1]))
    check_equal(two((random_locals(one[0]), random_locals(one[1])))[1:], [random_locals(one[1])])


def test_on_a_rank() -> None:
    batch, xs = tree()

    def body() -> Any:
        at = int(fs.axis_index(("x", "y"), mesh=MESH))
        own = {"w": xs["w"][at].clone().requires_grad_(), "n": None, "b": [xs["b"][0][at]]}
        pending = batch(own, async_op=True)
        ys = pending.wait()
        (grad,) = torch.autograd.grad((ys["w"] * (1 + at)).sum(), own["w"])
        also = torch.func.grad(lambda w: (batch({**own, "w": w})["w"] * (1 + at)).sum())(own["w"])
        assert torch.equal(grad, also)
        assert not ys["b"][0].requires_grad
        ys["b"][0].zero_()  # of its own for autograd
        return ys["w"].detach(), grad

    with fs.comm_log() as log:
        found = fs.simulate(MESH, body)
    check_equal([[y for y, _ in found]], [batch(xs)["w"]])
    want = [1.0 + at for at in range(MESH.size)]
    assert [g.unique().tolist() for _, g in found] == [[each] for each in want]
    assert log.forward.counts["reduce_scatter", "y"] == 2


def test_in_a_mapped_function_types_are_checked_and_known() -> None:
    mesh = Mesh(x=2, y=2)
    src = [Spec(mesh, P("x"), shape=(4,)), Spec(mesh, P("x", None), shape=(4, 2))]
    batch = fs.redistribute(src, [spec.replace(partition=P()) for spec in src])
    seen: list[str] = []

    def body(a: torch.Tensor, b: torch.Tensor) -> Any:
        ys = batch([a, b])
        seen.append(str(fs.typeof(ys[1])))
        pending = batch([a, b], async_op=True)
        return tuple(y + z for y, z in zip(ys, pending.wait(), strict=True))

    mapped = fs.shard_map(body, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P())
    a, b = torch.arange(4.0), torch.ones(4, 2)
    check_equal([mapped(a, b)], [(2 * a, 2 * b)])
    assert seen[0] == "f32[4,2]"
    cut = fs.redistribute(batch.dst, batch.src)
    wrong = fs.shard_map(
        lambda a, b: cut([a, b])[0], mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")
    )
    with pytest.raises(ShardingError, match=r"the batch at \[0\]"):
        wrong(torch.arange(8.0), b)


def test_maxima_have_their_rule() -> None:
    mesh = Mesh(x=2)
    top = Spec(mesh, P(unreduced={"x": "max"}), shape=(3,))
    total = Spec(mesh, P(unreduced={"x"}), shape=(3,))
    src = [top, total, top]
    batch = fs.redistribute(src, [spec.replace(partition=P()) for spec in src])
    assert not batch.is_linear
    assert len(batch.launches) <= 2
    needs = (True, True, False)
    xs = [
        tuple(x.requires_grad_(need) for x in random_locals(spec, seed))
        for seed, (spec, need) in enumerate(zip(src, needs, strict=True))
    ]
    flat = [x for shards in xs[:2] for x in shards]

    def gradients(ys: Any) -> Any:
        return torch.autograd.grad(sum((y * (2 + y)).sum() for s in ys[:2] for y in s), flat)

    ys = batch(xs)
    alone = [prog(x) for prog, x in zip(batch.programs, xs, strict=True)]
    check_equal(ys, alone)
    check_equal([gradients(ys)], [gradients(alone)])
    with pytest.raises(ShardingError) as error:
        batch(xs, async_op=True)
    assert str(error.value) == message(
        "batch(locals, async_op=True)",
        f"at [0]: a program with a maximum or minimum, {top} -> f32[3], of a local that "
        "requires grad",
        "only linear programs run ahead with gradients",
        "run it without async_op, or detach() the local",
    )
    check_equal(batch([tuple(x.detach() for x in s) for s in xs], async_op=True).wait(),
                [[y.detach() for y in s] for s in ys])  # fmt: skip


def test_gradients_of_maxima_go_together() -> None:
    mesh = Mesh(x=2, y=2)
    tops = [
        Spec(mesh, P(unreduced={"x": kind}), shape=(4, n), dtype=F64)
        for n in (1, 2, 3)
        for kind in ("max", "min")
    ]
    batch = fs.redistribute(tops, [spec.replace(partition=P("y")) for spec in tops])
    alone = [prog.cost().launches for prog in batch.programs]

    def gradients(move: Callable[[Any], Any]) -> Any:
        xs = [tuple(x.requires_grad_() for x in random_locals(spec, 3)) for spec in tops]
        with fs.comm_log() as log:
            ys = move(xs)
            total = sum(((1 + rank) * (y * (2 + y))).sum() for s in ys for rank, y in enumerate(s))
            grads = torch.autograd.grad(total, [x for s in xs for x in s], create_graph=True)
            second = torch.autograd.grad(
                sum((g**2).sum() for g in grads), [x for s in xs for x in s]
            )
        return log.counts.total(), ys, [grads, second]

    many, *want = gradients(lambda xs: [p(x) for p, x in zip(batch.programs, xs, strict=True)])
    few, *got = gradients(batch)
    for ours, theirs in zip(got, want, strict=True):
        check_equal(ours, theirs)
    assert len(set(alone)) == 1
    assert few <= many / 3


def test_what_is_sent_in_another_dtype() -> None:
    mesh = Mesh(x=2)
    src = [Spec(mesh, P("x"), shape=(n,)) for n in (4, 8)]
    steps = (fs.AllGather("x", 0, "reduced"),)
    batch = Batch([
        Program(spec, steps, forward_dtype=torch.bfloat16, backward_dtype=F64) for spec in src
    ])  # fmt: skip
    dst = batch.dst
    planned = fs.redistribute(src, dst, forward_dtype=torch.bfloat16, backward_dtype=F64)
    assert {(p.forward_dtype, p.backward_dtype) for p in planned.leaves} == {(torch.bfloat16, F64)}
    xs = [tuple(x.requires_grad_() for x in random_locals(spec)) for spec in src]
    with fs.comm_log() as log:
        ys = batch(xs)
        grads = torch.autograd.grad(sum(y.sum() for s in ys for y in s), [x for s in xs for x in s])
    assert {y.dtype for s in ys for y in s} | {g.dtype for g in grads} == {torch.float32}
    assert log.forward.bytes["all_gather", "x"] == (2 + 4) * 2
    assert log.backward.bytes["reduce_scatter", "x"] == (2 + 4) * 8


# -- planning ----------------------------------------------------------------------------


def test_launches_are_shared_where_that_is_cheaper() -> None:
    """A leaf that alone is best moved in one launch takes two, which go with those of others."""
    mesh = Mesh(x=4, y=4)
    src = Spec(mesh, P(unreduced={"x", "y"}), shape=(256, 256))
    one = fs.redistribute(src, src.replace(partition=P()))
    many = fs.redistribute([src] * 50, [src.replace(partition=P())] * 50, bucket_bytes=None)
    assert many.cost().time <= 50 * one.cost().time
    assert many.cost().launches <= one.cost().launches * 2
    assert len(set(many.leaves)) == 1


def test_text() -> None:
    batch, _ = tree()
    assert str(batch) == repr(batch)
    assert str(batch).splitlines() == [
        "2 leaves on Mesh(x=2, y=3), 2 launches, 40 B sent",
        "  ['b'][0]  f32[6]{unreduced: y} -> f32[6@y]  reduce_scatter(y, dim 0)",
        "  ['w']     f32[4@x,3] -> f32[4,3]            all_gather(x, dim 0)",
    ]
    assert batch.explain().summary.rows[0] == ("launches", "2", "2", "1.00x")
    bundle = batch._repr_mimebundle_()
    assert bundle["text/plain"] == str(batch)
    assert bundle["text/html"].count("<table") == 3
    assert str(fs.redistribute({}, {})) == "0 leaves, 0 launches, 0 B sent"
    far = Spec(Mesh({"z": 2}, devices=(1, 2)), P("z"), shape=(4,))
    near = Spec(Mesh(x=2), P("x"), shape=(4,))
    back = Program(far, (fs.Exchange(near.partition, mesh=near.mesh),))
    there = Program(near, (fs.Exchange(far.partition, mesh=far.mesh),))
    inside = Program(near, (fs.AllGather("x", 0),))
    between = Batch([there, there, inside, inside])
    meshes = str(near.mesh), str(far.mesh)
    assert str(between).splitlines() == [
        "4 leaves, 2 launches, 32 B sent",
        "  [0] and 1 more",
        f"    f32[4@x] on {meshes[0]} -> f32[4@z] on {meshes[1]}",
        f"    exchange(P('z'), {meshes[1]})",
        "  [2] and 1 more",
        f"    f32[4@x] -> f32[4] on {meshes[0]}",
        "    all_gather(x, dim 0)",
        f"  in one launch: exchange of 2 from {meshes[0]} to {meshes[1]}",
        f"  in one launch: all_gather of 2 over x of {meshes[0]}",
    ]
    assert between.explain().launches.rows[0][:2] == (
        "exchange", f"from {meshes[0]} to {meshes[1]}",
    )  # fmt: skip
    assert str(Batch([there, back])).endswith("in one launch: exchange of 2 between several meshes")
    many = Batch([inside] * 6, bucket_bytes=32)
    assert str(many).splitlines()[-1] == "  in each of 3 launches: all_gather of 2 over x"


# -- refusals ----------------------------------------------------------------------------

FEW = {"w": Spec(MESH, P("x"), shape=(4,)), "b": [Spec(MESH, P("y"), shape=(6,))]}


def refused(text: str, function: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises(ShardingError) as error:
        function(*args, **options)
    assert str(error.value) == text


def test_trees_of_other_structures_are_refused_with_the_path() -> None:
    rule = "dst must be a tree like src: the same containers, keys and lengths"
    spec = FEW["w"]
    refused(
        message("fs.redistribute", "dst has the keys ['a', 'b'], src ['b', 'w']", rule,
                "add dst['w'], drop dst['a']"),
        fs.redistribute, FEW, {"a": spec, "b": [spec]},
    )  # fmt: skip
    refused(
        message("fs.redistribute", "dst['b'] is a tuple where src['b'] is a list", rule,
                "a list there"),
        fs.redistribute, FEW, {"w": spec, "b": (spec,)},
    )  # fmt: skip
    refused(
        message("fs.redistribute", "dst['b'] has length 2, src['b'] 1", rule,
                "drop dst['b'][1]"),
        fs.redistribute, FEW, {"w": spec, "b": [spec, spec]},
    )  # fmt: skip
    refused(
        message("fs.redistribute", "dst['b'] is a Spec where src['b'] is a list", rule,
                "a list there"),
        fs.redistribute, FEW, {"w": spec, "b": spec},
    )  # fmt: skip
    batch = fs.redistribute(FEW, FEW)
    refused(
        message("the batch", "locals['b'] is a Tensor where batch.src['b'] is a list",
                "locals must be a tree like batch.src: the same containers, keys and lengths",
                "a list there"),
        batch, {"w": torch.ones(4), "b": torch.ones(2)},
    )  # fmt: skip


def test_leaves_that_cannot_be_planned_are_all_named() -> None:
    other = Spec(MESH, P("y"), shape=(9,))
    fix = "reshape first; dst.replace(shape=src.shape) keeps it"
    first = message("fs.redistribute", "at ['b'][0]: f32[6@y] -> f32[9@y]",
                    "source and target must have the same global shape: (6,) is not (9,)", fix)  # fmt: skip
    second = message("", "at ['w'] and 1 more: f32[4@x] -> f32[9@y]",
                     "source and target must have the same global shape: (4,) is not (9,)",
                     "reshape first; src.replace(...) keeps it")  # fmt: skip
    src = FEW | {"z": FEW["w"]}
    refused(f"{first}\n{second}", fs.redistribute, src, {"w": other, "b": [other], "z": other})
    refused(
        message("fs.redistribute", "topology='bytes'", "topology must be a Topology",
                'objective="bytes"'),
        fs.redistribute, FEW, FEW, topology="bytes",
    )  # fmt: skip
    refused(
        message("fs.redistribute", "at ['w']: redistribute(Spec, NoneType)", "both must be Specs",
                "spec.replace(partition=P(...)) makes the target"),
        fs.redistribute, FEW, FEW | {"w": None},
    )  # fmt: skip
    refused(
        message("fs.Batch", "programs['w'] is a Spec",
                "every leaf must be a Program or None",
                "fs.redistribute(tree_of_specs, tree_of_specs) plans them"),
        Batch, FEW | {"b": None},
    )  # fmt: skip


@pytest.mark.parametrize("given", [0, -1, 64.0, "64", True])
def test_a_bucket_has_bytes(given: object) -> None:
    """Also where there is one leaf, whose program has no buckets."""
    text = message("fs.redistribute", f"bucket_bytes={given!r}",
                   "bucket_bytes must be an int of at least 1, or None",
                   "bucket_bytes=2**23, or None")  # fmt: skip
    for tree in (FEW, FEW["w"]):
        refused(text, fs.redistribute, tree, tree, bucket_bytes=given)


def test_locals_that_do_not_fit_are_all_named() -> None:
    batch = fs.redistribute(FEW, {"w": FEW["w"].replace(partition=P()), "b": FEW["b"]})
    good = {"w": random_locals(FEW["w"]), "b": [random_locals(FEW["b"][0])]}
    fix = "fs.from_local makes a spec from locals, fs.reshard changes one"
    wide = tuple(torch.ones(3) for _ in MESH.ranks)
    first = message(
        "the batch",
        "at ['b'][0]: on ranks 0, 1, 2, 3, 4, 5 a local of shape (3,) and torch.float32",
        f"f32[6@y] on {MESH} has there shape (2,) and torch.float32", fix,
    )  # fmt: skip
    second = message(
        "", "at ['w']: on ranks 0, 1, 2, 3, 4, 5 a local of shape (3,) and torch.float32",
        f"f32[4@x] on {MESH} has there shape (2,) and torch.float32", fix,
    )  # fmt: skip
    refused(f"{first}\n{second}", batch, {"w": wide, "b": [wide]})
    refused(
        message("the batch", "at ['w']: a local of type int",
                "a local is a tensor, or in a simulation the tuple of all shards",
                "fs.shard(global_tensor, spec).local"),
        batch, good | {"w": 3},
    )  # fmt: skip
    refused(
        message("the batch", f"one tensor for {MESH}, in a process that is no rank of it",
                "a local is one tensor inside shard_map, fs.simulate or after fs.init under "
                f"torchrun, and a tuple of {MESH.size} shards outside",
                "call it inside fs.shard_map, or after fs.init(mesh); a program also takes the "
                "tuple of all shards, as fs.shard makes it"),
        batch, good | {"w": good["w"][0]},
    )  # fmt: skip
    one = {"w": good["w"][0], "b": [good["b"][0]]}
    with pytest.raises(ShardingError) as error:
        fs.simulate(MESH, batch, one)
    assert str(error.value) == message(
        "the batch", "at ['b'][0]: a local of type tuple",
        "on a rank of the source's mesh a local is a tensor", "give this rank's own",
    )  # fmt: skip
