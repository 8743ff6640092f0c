"""Laws of batches: values and gradients equal those of each leaf alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Batch, Mesh, P, Program, Spec
from fshard.program.lower_bound import lower_bound_together
from tests.helpers import strategies
from tests.helpers.batches import check_equal, ends, only, program
from tests.helpers.spec_grid import global_of, random_locals

F64 = torch.float64


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype = torch.int64, **options: Any) -> Batch:
    """Leaves on one mesh, a few of them equal, some of one exchange."""
    mesh = draw(strategies.meshes(max_axes=2, max_size=3, permuted=True))
    kinds = strategies.spec_pairs(mesh, dtype=dtype, **options)
    different = draw(st.lists(st.tuples(kinds, st.booleans()), min_size=1, max_size=4))
    leaves = draw(st.permutations([*different, *different[:2]]))
    bucket = draw(st.sampled_from([None, 1, 64, 2**25]))
    return Batch([program(*pair, how) for pair, how in leaves], bucket_bytes=bucket)


# -- laws ------------------------------------------------------------------------------


@given(batches())
@settings(max_examples=150)
def test_batch_equals_each_leaf_alone_in_its_launches(batch: Batch) -> None:
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
    """Check that equal batches are equal values, and cost no more than their leaves."""
    again = pickle.loads(pickle.dumps(batch))
    assert (again, hash(again)) == (batch, hash(batch))
    assert batch == batch.T.T
    assert (batch.T.src, batch.T.dst) == (
        [spec.dual for spec in batch.dst],
        [spec.dual for spec in batch.src],
    )
    alone = [prog.cost() for prog in batch.programs]
    cost = batch.cost()
    assert cost.time <= sum(c.time for c in alone) * (1 + 1e-9)
    assert cost.bytes_received <= sum(c.bytes_received for c in alone)
    assert cost.bytes_sent <= sum(c.bytes_sent for c in alone)
    assert cost.peak_memory <= sum(c.peak_memory for c in alone)
    ends = [(prog.src, prog.dst, prog.forward_dtype) for prog in batch.programs]
    bound = lower_bound_together(ends)
    assert bound.bytes_received <= cost.bytes_received
    assert bound.peak_memory <= cost.peak_memory
    assert batch.is_local == all(prog.is_local for prog in batch.programs)
    assert sorted(i for bucket in batch.buckets for i in bucket) == list(range(len(alone)))


@given(batches(F64), st.data())
@settings(max_examples=60)
def test_gradients_equal_each_leaf_alone_in_launches_of_the_transpose(
    batch: Batch, data: st.DataObject
) -> None:
    needs = [data.draw(st.booleans()) for _ in batch.leaves]

    def run(move: Callable[[list[Any]], list[Any]]) -> Any:
        xs = [
            tuple(x.requires_grad_(need) for x in random_locals(spec, seed))
            for seed, (spec, need) in enumerate(zip(batch.src, needs, strict=True))
        ]
        inputs = [x for shards, need in zip(xs, needs, strict=True) if need for x in shards]
        with fs.comm_log() as log:
            ys = move(xs)
            total = sum(((y + 1) ** 2).sum() for shards in ys for y in shards)
            if not inputs:
                return ys, [], log
            grads = torch.autograd.grad(total, inputs, create_graph=True)
        second = torch.autograd.grad(sum((g**2).sum() for g in grads), inputs)
        return ys, [grads, second], log

    expected, want, _ = run(lambda xs: [p(x) for p, x in zip(batch.programs, xs, strict=True)])
    ys, got, log = run(batch)
    check_equal(ys, expected)
    check_equal(got, want)
    for shards, need in zip(ys, needs, strict=True):
        assert all(y.requires_grad == need for y in shards)
    assert log.forward.counts.total() == len(batch.launches)
    assert log.backward.counts.total() == len(only(batch, needs).T.launches)


def test_leaves_on_several_meshes() -> None:
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
    check_like_programs(batch, xs)


def check_like_programs(batch: Any, xs: list[Any]) -> None:
    """Check values and gradients against those of each leaf's program, and count launches."""
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
def test_leaves_between_any_two_meshes(data: st.DataObject) -> None:
    """Values and gradients are right; a rank may take part in fewer launches than the batch has."""
    one, two = Mesh(x=2, y=2), Mesh({"x": 3, "z": 2}, devices=data.draw(st.permutations(range(6))))
    shapes = [data.draw(strategies.shapes(0, 2)) for _ in range(data.draw(st.integers(1, 4)))]
    free, reduced = ("sharded", "invariant", "unreduced"), ("sharded", "invariant", "reduced")
    ends_of = [
        (strategies.specs(a, shape, dtype=F64, states=free),
         strategies.specs(b, shape, dtype=F64, states=reduced))
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


def test_uneven_all_to_all_and_exchange_between_meshes_coalesce() -> None:
    """They coalesce over the same ranks in any order, but not if only some ranks have both."""
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


def test_shards_even_in_some_groups_coalesce_with_uneven_ones() -> None:
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
