"""`Exchange` and `Remesh`: laws, pieces sent, several meshes."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.refinement import prime_refinement
from fshard.layout.spec import Spec
from fshard.program.exchange_boxes import (
    Box,
    converted_axes,
    exchange_axes,
    exchange_group,
    kept_box,
    receives,
    reduction_axes,
    sends,
)
from fshard.program.program import Program
from fshard.program.steps import (
    CollectivePermute,
    Exchange,
    Remesh,
    Step,
)
from fshard.run.autograd.linear_function import wider
from tests.helpers import spec_grid, strategies
from tests.helpers.reference import check, simulate
from tests.helpers.spec_grid import exchange, may_exchange

STATES = ("sharded", "invariant", "reduced", "unreduced")
MESHES = [Mesh(x=2, y=2), Mesh(x=2, y=3), Mesh(x=3, y=2)]

# Pairs of meshes: the same devices in other grids and orders, some devices in common, or none.
TWO_MESHES = [
    (Mesh(x=2, y=2), Mesh(x=4)),
    (Mesh(x=2, y=3), Mesh(y=3, x=2)),
    (Mesh(x=2, y=3), Mesh({"y": 2, "x": 3}, devices=(5, 0, 3, 1, 4, 2))),
    (Mesh(x=2, y=2), Mesh({"x": 3}, devices=(2, 3, 4))),
    (Mesh(x=4), Mesh({"a": 2, "x": 3}, devices=(3, 9, 2, 8, 7, 4))),
    (Mesh(x=2), Mesh(a=2, b=2)),
    (Mesh(x=2, y=2), Mesh({"x": 3}, devices=range(4, 7))),
    (Mesh(), Mesh({"x": 2, "y": 2}, devices=range(1, 5))),
]


def pairs_on(mesh: Mesh, shape: Sequence[int], uneven: str | None = None) -> Iterator[
    tuple[Spec, Spec]
]:  # fmt: skip
    every = spec_grid.all_specs(mesh, shape, uneven=uneven)
    return itertools.product(every, every)


# -- laws ---------------------------------------------------------------------------------


def assert_laws(src: Spec, dst: Spec) -> None:
    """Assert that an exchange results in `dst`, keeps the value, and transposes to its reverse."""
    prog = Program(src, (exchange(src, dst),))
    assert prog.dst == dst
    x = spec_grid.random_locals(src)
    outputs = simulate(prog, x)
    assert torch.equal(spec_grid.global_of(dst, outputs), spec_grid.global_of(src, x))
    y = spec_grid.random_locals(dst.dual, seed=1)
    gradients = simulate(prog.T, y)
    assert spec_grid.pairing(dst, outputs, y) == spec_grid.pairing(src, x, gradients)
    assert prog == prog.T.T
    assert [type(step) for step in prog.T.steps] == [Exchange]
    assert pickle.loads(pickle.dumps(prog)) == prog
    assert hash(pickle.loads(pickle.dumps(prog))) == hash(prog)
    check(prog)
    assert_pieces(src, dst, x, outputs)


def assert_pieces(
    src: Spec, dst: Spec, x: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> None:
    """Assert that the pieces sent and received agree, are not held already, and give the result."""
    ranks = sorted({*src.mesh.ranks, *dst.mesh.ranks})
    summed = reduction_axes(src, dst)
    shards = dict(zip(src.mesh.ranks, x, strict=True))
    result = dict(zip(dst.mesh.ranks, outputs, strict=True))
    sent = {(rank, peer): box for rank in ranks for peer, box in sends(src, dst, rank)}
    received = {(peer, rank): box for rank in ranks for peer, box in receives(src, dst, rank)}
    assert sent == received
    assert len(received) == sum(len(receives(src, dst, rank)) for rank in ranks)
    for a, b in sent:
        assert a != b
        assert b in exchange_group(src, dst, a)
        assert exchange_group(src, dst, a) == exchange_group(src, dst, b)
        if src.mesh == dst.mesh:
            stay = [axis for axis in src.mesh.axes if axis not in exchange_axes(src, dst)]
            assert src.mesh.index(a, stay) == src.mesh.index(b, stay)
    if src.mesh != dst.mesh:
        busy = {rank for pair in sent for rank in pair}
        for rank in ranks:
            assert set(exchange_group(src, dst, rank)) == (busy if rank in busy else set())
    for rank in dst.mesh.ranks:
        saved = kept_box(src, dst, rank)
        sources = [(peer, box) for peer, box in receives(src, dst, rank)]
        sources += [] if saved is None else [(rank, saved)]
        partials = torch.zeros((src.mesh.axis_size(summed), *dst.shape), dtype=dst.dtype)
        counts = torch.zeros(partials.shape, dtype=torch.int64)
        for peer, box in sources:
            assert all(start < stop for start, stop in box)
            part = tuple(slice(*ends) for ends in box)
            index = (src.mesh.index(peer, summed), *part)
            partials[index] += shards[peer][local(src, peer, box)]
            counts[index] += 1
            if rank in src.mesh and peer != rank:
                assert holds(src, rank, summed) != holds(src, peer, summed)
        index_of_rank = (slice(None), *dst.index(rank))
        assert bool((counts[index_of_rank] == at_own_coordinate(src, dst, rank)).all())
        assert counts.sum() == counts[index_of_rank].sum()
        assert torch.equal(partials[index_of_rank].sum(0), result[rank])
    assert_balanced(src, dst)


def at_own_coordinate(src: Spec, dst: Spec, rank: int) -> torch.Tensor:
    """Return 1 for target elements from the rank's own coordinate along axes that get unreduced."""
    axes = [axis for axis in converted_axes(src, dst) if axis in dst.partition.unreduced]
    coordinates = torch.zeros(src.shape, dtype=torch.int64)
    for other in src.mesh.ranks:
        coordinates[src.index(other)] = src.mesh.index(other, axes)
    return (coordinates[dst.index(rank)] == dst.mesh.index(rank, axes)).long()


def local(spec: Spec, rank: int, box: Box) -> tuple[slice, ...]:
    """Return the slices of a global box in a rank's local, which must contain it."""
    within = []
    for (start, stop), part in zip(box, spec.index(rank), strict=True):
        assert part.start <= start <= stop <= part.stop
        within.append(slice(start - part.start, stop - part.start))
    return tuple(within)


def holds(spec: Spec, rank: int, summed: tuple[str, ...]) -> object:
    """Identify the shard of a rank and its partial sum."""
    box = tuple((part.start, part.stop) for part in spec.index(rank))
    return box, spec.mesh.index(rank, summed)


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def assert_balanced(src: Spec, dst: Spec) -> None:
    """Assert that all holders of a shard send the same, up to one piece."""
    summed = reduction_axes(src, dst)
    stay = exchange_axes(src, dst) if src.mesh == dst.mesh else src.mesh.axes
    stay = tuple(axis for axis in src.mesh.axes if axis not in stay)
    holders: dict[object, list[int]] = {}
    for rank in src.mesh.ranks:
        holders.setdefault((holds(src, rank, summed), src.mesh.index(rank, stay)), []).append(rank)
    for group in holders.values():
        sizes = [[volume(box) for _, box in sends(src, dst, rank)] for rank in group]
        total = sum(map(sum, sizes))
        largest = max((size for pieces in sizes for size in pieces), default=0)
        assert all(
            abs(sum(pieces) * len(group) - total) <= len(group) * largest for pieces in sizes
        )


@spec_grid.one_in(11)
@pytest.mark.parametrize(
    "mesh", [*MESHES[:2], pytest.param(MESHES[2], marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("shape", [(12,), (12, 12)], ids=str)
def test_laws_of_all_pairs(mesh: Mesh, shape: tuple[int, ...], every: int) -> None:
    pairs = [pair for pair in pairs_on(mesh, shape) if may_exchange(*pair)]
    for src, dst in pairs[::every]:
        assert_laws(src, dst)


@spec_grid.one_in(11)
@pytest.mark.parametrize(
    ("mesh", "shape"), [*((mesh, (5,)) for mesh in MESHES), (MESHES[1], (1, 7))], ids=str
)
def test_laws_of_all_uneven_pairs(mesh: Mesh, shape: tuple[int, ...], every: int) -> None:
    pairs = [pair for pair in pairs_on(mesh, shape, "chunk") if may_exchange(*pair)]
    for src, dst in pairs[::every]:
        assert_laws(src, dst)


@pytest.mark.parametrize(("one", "other"), TWO_MESHES, ids=str)
@pytest.mark.parametrize(
    ("shape", "every"),
    [((12,), 13), ((5,), 13), ((1, 7), 61),
     *(pytest.param(shape, 1, marks=pytest.mark.slow) for shape in ((12,), (5,), (1, 7)))],
    ids=str,
)  # fmt: skip
def test_laws_between_two_meshes(
    one: Mesh, other: Mesh, shape: tuple[int, ...], every: int
) -> None:
    for a, b in [(one, other), (other, one)]:
        before = spec_grid.all_specs(a, shape, ("invariant", "unreduced"), uneven="chunk")
        after = spec_grid.all_specs(b, shape, ("invariant", "reduced"), uneven="chunk")
        for src, dst in [*itertools.product(before, after)][::every]:
            assert_laws(src, dst)


@st.composite
def exchanges(draw: st.DrawFn, kinds: Sequence[str] = ("sum",)) -> tuple[Spec, Spec]:
    """Draw two specs between which an exchange applies, of one mesh or of two."""
    one = draw(strategies.meshes(permuted=True))
    shape = draw(strategies.shapes())
    first = draw(strategies.specs(one, shape, dtype=torch.int64, kinds=kinds))
    if draw(st.booleans()):
        other = shifted(draw, one)
        last = draw(
            strategies.specs(other, shape, dtype=torch.int64, states=STATES[:3], kinds=kinds)
        )
        plain = P(*first.partition.partitions, unreduced=first.partition.unreduced)
        return first.replace(partition=plain), last
    last = draw(strategies.specs(one, shape, dtype=torch.int64, states=STATES[:2]))
    return first, reachable_from(draw, first, last, kinds)


def shifted(draw: st.DrawFn, mesh: Mesh) -> Mesh:
    """Draw another mesh, which shares any number of devices with `mesh`."""
    other = draw(strategies.meshes(permuted=True))
    first = draw(st.integers(0, mesh.size))
    return Mesh(dict(other.shape), devices=[first + device for device in other.devices])


def reachable_from(draw: st.DrawFn, first: Spec, last: Spec, kinds: Sequence[str]) -> Spec:
    """Draw `last` with the states that an exchange from `first` keeps, and some that it allows."""
    before, p = first.partition, last.partition
    unreduced = {axis: kind for axis, kind in before.unreduced_kinds if draw(st.booleans())}
    kind = next(iter(unreduced.values()), None) or draw(st.sampled_from(kinds))
    shards = [axis for axes in before.dims for axis in axes]
    unreduced |= {axis: kind for axis in shards if draw(st.booleans())}
    sharded = {axis for axes in p.dims for axis in axes}
    reduced = {
        axis: kind
        for axis, kind in before.reduced_kinds
        if axis not in sharded or draw(st.booleans())
    }
    keep = {*unreduced, *reduced}
    dims = [[axis for axis in dim if axis not in keep] for dim in p.dims]
    free = [a for a in last.mesh.axes if a not in keep and not any(a in dim for dim in dims)]
    reduced |= {axis: "sum" for axis in free if draw(st.booleans())}
    partition = P(*map(tuple, dims), unreduced=unreduced, reduced=reduced)
    sizes = {}
    for dim, axes in enumerate(dims):
        count = last.mesh.axis_size(tuple(axes))
        sizes[dim] = draw(strategies.shard_sizes(last.shape[dim], count))
        if last.shape[dim] % count == 0 and draw(st.booleans()):
            del sizes[dim]
    return Spec(last.mesh, partition, shape=last.shape, dtype=last.dtype, sizes=sizes)


@given(exchanges())
@settings(max_examples=50)
def test_laws_of_any_pair(pair: tuple[Spec, Spec]) -> None:
    assert_laws(*pair)


@given(exchanges(kinds=("max",)) | exchanges(kinds=("min",)) | exchanges(kinds=("product",)))
def test_laws_of_other_reductions(pair: tuple[Spec, Spec]) -> None:
    src, dst = pair
    prog = Program(src, (exchange(src, dst),))
    x = spec_grid.random_locals(src)
    assert torch.equal(spec_grid.global_of(dst, simulate(prog, x)), spec_grid.global_of(src, x))
    assert prog.is_linear == (not src.partition.unreduced and not dst.partition.unreduced)


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "product"])
@pytest.mark.parametrize("shape", [(6, 2), (5, 3)], ids=str)
def test_shards_become_unreduced_and_copies_shards(shape: tuple[int, ...], kind: str) -> None:
    """Shards become unreduced, and reduced copies shards, as in the reference interpreter."""
    mesh, dtype = Mesh(x=2, y=3), torch.float64 if kind == "avg" else torch.int64
    shares = "avg" if kind == "avg" else "sum"

    def typed(spec: Spec) -> Spec:
        p = spec.partition
        states = dict.fromkeys(p.unreduced, kind), dict.fromkeys(p.reduced, shares)
        partition = P(*p.partitions, unreduced=states[0], reduced=states[1])
        return Spec(mesh, partition, shape=shape, dtype=dtype, uneven="chunk")

    pairs = [pair for pair in pairs_on(mesh, shape, "chunk") if may_exchange(*pair)]
    for src, dst in [pair for pair in pairs if converted_axes(*pair)][::7]:
        prog = Program(typed(src), (exchange(typed(src), typed(dst)),))
        x = spec_grid.random_locals(prog.src)
        outputs = prog(tuple(x))
        assert all(map(torch.equal, outputs, simulate(prog, x)))
        if kind in ("sum", "avg"):
            y = spec_grid.random_locals(prog.dst.dual, seed=1)
            assert all(map(torch.equal, prog.T(tuple(y)), simulate(prog.T, y)))


AVERAGES = [
    ("f64[12]{unreduced: x=avg}", "f64[12@x]"),
    ("f64[12]{unreduced: x=avg, y}", "f64[12@y]{reduced: x}"),
    ("f64[12@x]", "f64[12@y]{reduced: x=avg}"),
    ("f64[12]{unreduced: x}", "f64[12]{reduced: x=avg}"),
    ("f64[12]{unreduced: x=avg, y=avg}", "f64[12@y]{unreduced: x=avg}"),
    ("f64[12@y]{unreduced: x=avg}", "f64[12]{reduced: x=avg, y}"),
    ("f64[12@y]{reduced: x=avg}", "f64[12]{reduced: x=avg, y=avg}"),
    ("f64[16@y]{reduced: x=avg}", "f64[16@(x,y)]"),
    ("f64[16@(y,x)]", "f64[16]{unreduced: x=avg, y}"),
    ("f64[16@(x,y)]", "f64[16]{unreduced: x=avg; reduced: y=avg}"),
    ("f64[16@y]{unreduced: x=avg}", "f64[16@x]{unreduced: y=avg}"),
    ("f64[16]{unreduced: y=avg; reduced: x=avg}", "f64[16@(x,y)]"),
]


@pytest.mark.parametrize(("src", "dst"), AVERAGES)
def test_exchange_of_averages(src: str, dst: str) -> None:
    mesh = Mesh(x=2, y=4)
    one, other = parse(src, mesh), parse(dst, mesh)
    prog = Program(one, (exchange(one, other),))
    x, y = spec_grid.random_locals(one), spec_grid.random_locals(other.dual)
    outputs, gradients = simulate(prog, x), simulate(prog.T, y)
    assert torch.equal(spec_grid.global_of(other, outputs), spec_grid.global_of(one, x))
    assert spec_grid.pairing(other, outputs, y) == spec_grid.pairing(one, x, gradients)
    assert prog == prog.T.T


def test_change_to_reduced_sends_nothing() -> None:
    """An exchange that only changes the state of replicas sends nothing."""
    mesh = Mesh(x=2, y=2, z=2)
    src = parse("i64[8@x]", mesh)
    for dst in ("i64[8@x]{reduced: y}", "i64[8@(x,z)]{reduced: y}"):
        prog = Program(src, (exchange(src, parse(dst, mesh)),))
        assert all(not sends(src, prog.dst, rank) for rank in mesh.ranks)
        assert "y" not in exchange_axes(src, prog.dst)


def test_exchange_axes_and_groups() -> None:
    mesh = Mesh(x=2, y=2, z=2)

    def moving(src: str, dst: str) -> tuple[str, ...]:
        return exchange_axes(parse(src, mesh), parse(dst, mesh))

    assert moving("i64[8@x]", "i64[8@y]") == ("x", "y")
    assert moving("i64[8@(x,y)]", "i64[8@(x,z)]") == ("y", "z")
    assert moving("i64[8@(y,x)]", "i64[8@(z,x)]") == ("y", "z")
    # Minor to another number of shards, an axis shards at other positions.
    assert moving("i64[8@x]", "i64[8@(y,x)]") == ("x", "y")
    assert moving("i64[8@(x,y)]", "i64[8@x]") == ("y",)
    assert moving("i64[8@x:3+5,8@y]", "i64[8@x:3+5,8@z]") == ("y", "z")
    assert moving("i64[8@x:3+5,8@y]", "i64[8@x,8@z]") == ("x", "y", "z")
    assert moving("i64[8@(x,y):1+3+2+2]", "i64[8@(x,z)]") == ("y", "z")
    assert moving("i64[8]{unreduced: x, y}", "i64[8]{unreduced: x}") == ("y",)
    assert moving("i64[8]{unreduced: x}", "i64[8@y]{unreduced: x}") == ("y",)
    assert moving("i64[8]", "i64[8]{reduced: x}") == ()


def test_pieces_of_one_rank_of_many() -> None:
    """The pieces of one rank on 65,536 devices are computed without a look at the others."""
    mesh = Mesh(a=256, b=16, c=16)
    src = Spec(mesh, P("a", "b"), shape=(4096, 4096))
    dst = src.replace(partition=P("b", ("a", "c")))
    with spec_grid.peak_memory_below(1 << 22):
        received = receives(src, dst, 54321)
        out = sends(src, dst, 54321)
    assert sum(map(volume, (box for _, box in received))) == 256
    assert len(received) == 16
    assert all((54321, box) in sends(src, dst, peer) for peer, box in receives(src, dst, 54321))
    assert all((54321, box) in receives(src, dst, peer) for peer, box in out)


def test_replicas_send_equal_parts() -> None:
    """Eight ranks that hold two shards four times each send to four other ranks, one each."""
    src = Spec(Mesh(fsdp=2, dp=4), P("fsdp"), shape=(8,))
    new = Mesh({"tp": 4}, devices=range(8, 12))
    served = {rank: sends(src, Spec(new, P("tp"), shape=(8,)), rank) for rank in range(8)}
    assert sorted(len(pieces) for pieces in served.values()) == [0, 0, 0, 0, 1, 1, 1, 1]
    everything = {rank: sends(src, Spec(new, P(), shape=(8,)), rank) for rank in range(8)}
    assert [[peer for peer, _ in pieces] for pieces in everything.values()] == [
        [8],
        [9],
        [10],
        [11],
    ] * 2


# -- remesh -------------------------------------------------------------------------------


@given(strategies.meshes(permuted=True, max_size=6), st.data())
def test_remesh_and_back(mesh: Mesh, data: st.DataObject) -> None:
    spec = data.draw(strategies.specs(mesh, dtype=torch.float64, kinds=("sum", "avg")))
    fine = prime_refinement(mesh)
    prog = Program(spec, (Remesh(fine.mesh, fine.refine(spec.partition)),))
    assert prog.dst.is_equivalent(spec)
    assert prog.is_local
    x = spec_grid.random_locals(spec)
    assert all(map(torch.equal, simulate(prog, x), x))
    assert prog.T.steps == (Remesh(mesh, spec.dual.partition),)
    assert prog == prog.T.T
    assert pickle.loads(pickle.dumps(prog)) == prog
    y = spec_grid.random_locals(prog.dst.dual, seed=1)
    assert all(map(torch.equal, simulate(prog.T, y), y))


def test_remesh_reorders_devices_and_axes() -> None:
    """Devices and axes in another order describe the same shards."""
    src = parse("f32[6@(x,y)]{reduced: z}", Mesh(x=2, y=3, z=1))
    turned = Mesh({"y": 3, "x": 2}, devices=(0, 3, 1, 4, 2, 5))
    prog = Program(src, (Remesh(turned, P(("x", "y"))),))
    assert str(prog.dst) == "f32[6@(x,y)]"
    assert prog.dst.mesh == turned


# -- tensors with one more dim ------------------------------------------------------------

ELSEWHERE = Mesh({"a": 3}, devices=range(1, 4))
APPLIED = [
    ("i64[8@x,4@y]", CollectivePermute(P("y", "x"))),
    ("i64[8@(x,y),4]", CollectivePermute(P(("y", "x")))),
    ("i64[8,4]{unreduced: x}", CollectivePermute(P(unreduced={"y"}))),
    ("i64[8@x,4]", Exchange(P("y"))),
    ("i64[8@x,4]", Exchange(P("y"), ((3, 5), None))),
    ("i64[8@x,4]", Exchange(P())),
    ("i64[8@x,4]", Exchange(P("a"), ((3, 3, 2),), ELSEWHERE)),
    ("i64[8@x,4]{unreduced: y}", Exchange(P(reduced={"a"}), mesh=ELSEWHERE)),
    ("i64[8@(x,y),4]", Remesh(Mesh(all=4), P("all"))),
    ("i64[8@x:3+5,4]", Remesh(Mesh(b=2, c=2), P("b"))),
]


@pytest.mark.parametrize(("text", "step"), APPLIED, ids=str)
def test_batched_tensor_has_the_same_program(text: str, step: Step) -> None:
    """A batch of tensors, along a new last dim, runs through the program of one."""
    prog = Program(parse(text, Mesh(x=2, y=2)), (step,))
    wide = wider(prog, 3)
    assert wide.src.shape == (8, 4, 3)
    xs = [spec_grid.random_locals(prog.src, seed) for seed in range(3)]
    outputs = simulate(wide, [torch.stack(parts, -1) for parts in zip(*xs, strict=True)])
    singly = zip(*(simulate(prog, x) for x in xs), strict=True)
    assert all(map(torch.equal, outputs, [torch.stack(parts, -1) for parts in singly]))
    assert wider(prog.T, 3) == wide.T
    assert wide.steps == prog.steps
