"""Programs between meshes and exchanges on simulated ranks, compared with slices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.program.program import Program
from fshard.program.steps import Cast, Exchange, Remesh
from fshard.run.interpreter import ranks_of
from fshard.run.transports.base import Event, observe
from tests.helpers.plans import exchange
from tests.helpers.spec_grid import global_of, message, random_global, random_locals
from tests.helpers.strategies import specs

SOURCE = ("sharded", "invariant", "unreduced")
TARGET = ("sharded", "invariant", "reduced")
Shards = tuple[torch.Tensor, ...]


def as_spec(unsharded: torch.Tensor, spec: Spec) -> Shards:
    """Return the locals of a global tensor in a spec that is not unreduced."""
    kinds = spec.partition.reduced_kinds
    n = math.prod(spec.mesh.shape[axis] for axis, kind in kinds if kind == "avg")
    return tuple(unsharded[spec.index(rank)] / n for rank in spec.mesh.ranks)


def assert_moves(prog: Program) -> None:
    """Compare forward, backward and backward of backward with slices of the global tensor."""
    src, dst = prog.src, prog.dst
    xs = tuple(x.requires_grad_() for x in random_locals(src, 1))
    ys = prog(xs)
    assert len(ys) == dst.mesh.size
    assert global_of(dst, [y.detach() for y in ys]).equal(global_of(src, [x.detach() for x in xs]))
    gs = tuple(g.requires_grad_() for g in random_locals(dst.dual, 2))
    back = torch.autograd.grad(ys, xs, gs, create_graph=True)
    cotangent = global_of(dst.dual, [g.detach() for g in gs])
    assert all(map(torch.equal, back, as_spec(cotangent, src.dual))), prog
    hs = random_locals(src, 3)
    twice = torch.autograd.grad(back, gs, hs)
    assert global_of(dst, twice).equal(global_of(src, hs))


@st.composite
def meshes(draw: st.DrawFn, names: str) -> Mesh:
    """Draw a mesh of some of eight devices in any order; two may share devices."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (3, 2), (1, 3), (2, 2, 2)]))
    devices = draw(st.permutations(range(8)))[: math.prod(sizes)]
    return Mesh(dict(zip(names, sizes, strict=False)), devices=devices)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """Draw any layout that is not reduced on one mesh, and any that is not unreduced on another."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    dtype, kinds = torch.float64, ("sum", "avg")
    src = draw(specs(draw(meshes("xyz")), shape, dtype=dtype, states=SOURCE, kinds=kinds))
    dst = draw(specs(draw(meshes("abx")), shape, dtype=dtype, states=TARGET, kinds=kinds))
    return src, dst


@given(pairs())
def test_exchanges_between_meshes(pair: tuple[Spec, Spec]) -> None:
    assert_moves(exchange(*pair))


@given(st.data())
def test_exchanges_on_one_mesh(data: st.DataObject) -> None:
    mesh = data.draw(meshes("xyz"))
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))
    both = data.draw(st.sets(st.sampled_from(mesh.axes)))
    kinds = ("sum", "avg")
    src = data.draw(specs(mesh, shape, dtype=torch.float64, states=SOURCE, kinds=kinds))
    dst = data.draw(specs(mesh, shape, dtype=torch.float64, states=TARGET, kinds=kinds))
    # What stays: addends of both, where the target has nothing else on the axis.
    free = set(mesh.axes).difference(dst.partition.axes)
    stay = {a: k for a, k in src.partition.unreduced_kinds if a in both and a in free}
    dst = dst.replace(partition=P(*dst.partition.partitions, unreduced=stay,
                                  reduced=dict(dst.partition.reduced)))  # fmt: skip
    assert_moves(exchange(src, dst))


@pytest.mark.parametrize("kind", ["max", "min", "product"])
def test_maximum_onto_another_mesh(kind: str) -> None:
    src = Spec(Mesh(x=2, y=2), P("x", unreduced={"y": kind}), shape=(6, 4), dtype=torch.float64)
    dst = Spec(Mesh({"a": 3}, devices=(3, 5, 1)), P(None, "a"), shape=(6, 4), dtype=src.dtype,
               uneven="chunk")  # fmt: skip
    xs = random_locals(src, 4)
    assert global_of(dst, exchange(src, dst)(xs)).equal(global_of(src, xs))


def test_steps_before_and_after_a_change_of_mesh() -> None:
    old, new = Mesh(x=2, y=2), Mesh({"a": 3}, devices=(3, 4, 5))
    src = Spec(old, P("x", unreduced={"y"}), shape=(6, 4), dtype=torch.float64)
    prog = Program(
        src,
        (
            fs.ReduceScatter("y", 1),
            Exchange(P("a"), mesh=new),
            fs.AllToAll("a", 0, 1, sizes=(2, 1, 1)),
            Exchange(P(None, "x"), mesh=old),
            fs.AllGather("x", 1),
        ),
    )
    assert ranks_of(prog).ranks == range(6)
    assert_moves(prog)


def test_cast_applies_to_empty_locals() -> None:
    src = Spec(Mesh(x=2), P("x"), shape=(6,), dtype=torch.float32)
    to = Exchange(P("a"), mesh=Mesh({"a": 3}, devices=(2, 3, 4)))
    prog = Program(src, (Cast(torch.float64), to, Cast(torch.bfloat16)))
    out = prog((torch.arange(3.0), torch.arange(3.0, 6)))
    assert [(x.dtype, x.tolist()) for x in out] == [
        (torch.bfloat16, [0.0, 1.0]),
        (torch.bfloat16, [2.0, 3.0]),
        (torch.bfloat16, [4.0, 5.0]),
    ]


def test_forward_dtype_between_meshes() -> None:
    src = Spec(Mesh(x=2), P("x"), shape=(6,), dtype=torch.float32)
    step = Exchange(P("a"), mesh=Mesh({"a": 3}, devices=(2, 3, 4)))
    prog = Program(src, (step,), forward_dtype=torch.bfloat16)
    events: list[Event] = []
    with observe(lambda call: events.extend(call.events)):
        out = prog((torch.arange(3.0), torch.arange(3.0, 6)))
    assert [x.tolist() for x in out] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert sum(event.nbytes for event in events) == 6 * 2


def test_only_senders_and_receivers_take_part() -> None:
    src = Spec(Mesh(x=4), P(), shape=(6, 2))
    dst = Spec(Mesh({"a": 2}, devices=(3, 7)), P("a"), shape=(6, 2))
    events: list[Event] = []
    with observe(lambda call: events.extend(call.events)):
        exchange(src, dst)(tuple(torch.ones(6, 2) for _ in range(4)))
    sender, receiver = sorted(events, key=lambda event: event.rank)
    assert (sender.op, sender.axes, sender.nbytes) == ("exchange", (), 24)
    assert sender.rank in src.mesh
    assert (receiver.rank, receiver.nbytes) == (7, 0)


def test_remesh_shares_memory() -> None:
    src = Spec(Mesh(x=4), P("x"), shape=(8,), dtype=torch.float64)
    fine = Mesh(a=2, b=2)
    prog = Program(src, (Remesh(fine, P(("a", "b"))),))
    xs = random_locals(src)
    assert [x.data_ptr() for x in xs] == [y.data_ptr() for y in prog(xs)]
    assert_moves(Program(src, (*prog.steps, fs.AllGather("b", 0), fs.AllGather("a", 0))))


def test_nothing_is_launched_if_every_rank_has_its_elements() -> None:
    mesh = Mesh(x=2, y=2)
    src = Spec(mesh, P("x"), shape=(4, 6), dtype=torch.float64)
    events: list[Event] = []
    with observe(lambda call: events.extend(call.events)):
        assert_moves(Program(src, (Exchange(P("x", "y")),)))
    assert all(event.phase == "backward" for event in events)


# -- rank-local code -------------------------------------------------------------------


def locals_of(prog: Program, given: object = None) -> list[torch.Tensor]:
    """Return each rank's local of a program; ranks outside of the source's mesh pass `given`."""
    xs = dict(zip(prog.src.mesh.ranks, random_locals(prog.src), strict=True))
    ranks = iter(ranks_of(prog).ranks)
    return fs.simulate(ranks_of(prog), lambda: prog(xs.get(next(ranks), given)))


@pytest.mark.parametrize("given", [None, torch.empty(0)])
def test_ranks_outside_of_the_source(given: object) -> None:
    src = Spec(Mesh(x=2), P("x"), shape=(6,))
    prog = exchange(src, Spec(Mesh({"a": 3}, devices=(1, 2, 3)), P("a"), shape=(6,)))
    unsharded = global_of(src, random_locals(src))
    assert [x.tolist() for x in locals_of(prog, given)] == [
        [], unsharded[:2].tolist(), unsharded[2:4].tolist(), unsharded[4:].tolist(),
    ]  # fmt: skip


def test_wrong_empty_locals() -> None:
    src = Spec(Mesh(x=2), P("x"), shape=(6,))
    prog = exchange(src, Spec(Mesh({"a": 2}, devices=(2, 3)), P("a"), shape=(6,)))
    with pytest.raises(ShardingError) as error:
        locals_of(prog, torch.zeros(3))
    assert str(error.value) == message(
        "the program to f32[6@a]",
        "on rank 2, which is not of Mesh(x=2), a local of shape (3,) and torch.float32",
        "a rank outside of the source's mesh must pass None or an empty tensor of its dtype",
        "None, or torch.empty(0, dtype=torch.float32)",
    )


def test_reshard_to_another_mesh() -> None:
    src = Spec(Mesh(x=2, y=2), P("x", "y"), shape=(6, 5), dtype=torch.float64, uneven="chunk")
    dst = Spec(Mesh({"a": 3}, devices=(2, 4, 5)), P(None, "a"), shape=(6, 5), dtype=src.dtype,
               uneven="chunk")  # fmt: skip
    unsharded = random_global((6, 5), torch.float64).requires_grad_()
    moved = fs.reshard(fs.shard(unsharded, src), dst)
    assert moved.spec == dst
    assert fs.unshard(moved).equal(unsharded)
    (fs.unshard(moved) ** 2).sum().backward()
    assert unsharded.grad is not None
    assert unsharded.grad.equal(2 * unsharded.detach())


# -- transforms --------------------------------------------------------------------------

BATCH = 3
WORLD = Mesh(w=7)
ENDS = [
    ("f64[4@x,6]", Mesh(x=4), "f64[4@y,6]", Mesh(y=2)),
    ("f64[5@x:2+3,6]", Mesh(x=2), "f64[5,6@y]", Mesh({"y": 3}, devices=(5, 2, 4))),
    ("f64[4,6]{unreduced: x}", Mesh(x=2), "f64[4@y:1+0+3,6]{reduced: z}", Mesh(y=3, z=2)),
    ("f64[4@x,6]{unreduced: y=max}", Mesh(x=2, y=2), "f64[4,6@z]", Mesh(z=3)),
]


def batch_of(spec: Spec) -> list[Shards]:
    return [random_locals(spec, seed) for seed in range(BATCH)]


def stack(locals_: list[Shards]) -> Shards:
    return tuple(torch.stack(item) for item in zip(*locals_, strict=True))


def square(prog: Program, local: Any) -> torch.Tensor:
    ys = prog(local)
    return sum(((y**2).sum() for y in ([ys] if isinstance(ys, torch.Tensor) else ys)),
               torch.zeros((), dtype=torch.float64))  # fmt: skip


def gradient(prog: Program, local: Shards) -> Shards:
    leaves = tuple(x.clone().requires_grad_() for x in local)
    return torch.autograd.grad(square(prog, leaves), leaves)


@pytest.mark.parametrize(("src", "one", "dst", "other"), ENDS)
def test_vmap_over_programs_between_meshes(src: str, one: Mesh, dst: str, other: Mesh) -> None:
    """Check programs, trees of them, their gradients, and nested vmap."""
    ends = fs.parse(src, one), fs.parse(dst, other)
    prog, shards = fs.redistribute(*ends), batch_of(ends[0])
    want, batched = stack([prog(x) for x in shards]), stack(shards)
    assert all(map(torch.equal, vmap(prog)(batched), want))
    twice = vmap(vmap(prog))(tuple(torch.stack([x, x]) for x in batched))
    assert all(torch.equal(y, torch.stack([x, x])) for y, x in zip(twice, want, strict=True))
    tree = fs.redistribute([ends[0]] * 2, [ends[1]] * 2)
    for item in vmap(tree)([batched] * 2):
        assert all(map(torch.equal, item, want))
    expected = stack([gradient(prog, x) for x in shards])
    assert all(map(torch.equal, vmap(grad(lambda x: square(prog, x)))(batched), expected))
    leaves = tuple(x.requires_grad_() for x in batched)
    results = torch.autograd.grad(sum((y**2).sum() for y in vmap(prog)(leaves)), leaves)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(("src", "one", "dst", "other"), ENDS)
def test_vmap_on_ranks_of_one_mesh_or_neither(src: str, one: Mesh, dst: str, other: Mesh) -> None:
    ends = fs.parse(src, one), fs.parse(dst, other)
    prog, shards = fs.redistribute(*ends), batch_of(ends[0])

    def body() -> bool:
        rank = int(fs.axis_index("w", mesh=WORLD))
        place = list(one.ranks).index(rank) if rank in one else None
        local = [torch.empty(0, dtype=torch.float64) if place is None else x[place] for x in shards]
        batched = torch.stack(local).requires_grad_()
        y = vmap(prog)(batched)
        assert torch.equal(y, torch.stack([prog(x) for x in local]))
        (results,) = torch.autograd.grad((y**2).sum(), batched)
        leaves = [x.clone().requires_grad_() for x in local]
        expected = [torch.autograd.grad(square(prog, x), x)[0] for x in leaves]
        assert torch.equal(results, torch.stack(expected))
        item = vmap(grad(lambda x: square(prog, x)))(batched.detach())
        assert torch.equal(item, results)
        z = prog(leaves[0])
        (rows,) = torch.autograd.grad(
            z, leaves[0], torch.stack([2 * z.detach(), z.detach()]), is_grads_batched=True
        )
        assert torch.equal(rows, torch.stack([expected[0], expected[0] / 2]))
        return True

    assert fs.simulate(WORLD, body) == [True] * WORLD.size
