"""Traffic and time of steps: exchanges counted rank by rank, closed forms, local copies."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.partition_spec import PartitionSpec as P
from fshard.layout.spec import Spec
from fshard.program.cost.links import Link
from fshard.program.cost.model import collective_time, copied_bytes, step_time
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import (
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    all_to_all_traffic,
    even_exchange_traffic,
    max_local_nbytes,
    step_axes,
    traffic,
)
from fshard.program.exchange_boxes import receives, sends
from fshard.program.infer import infer
from fshard.program.program import Program
from fshard.program.steps import (
    AllGather,
    AllReduce,
    AllSlice,
    AllToAll,
    Cast,
    CollectivePermute,
    Exchange,
    InvariantToReduced,
    ReducedToInvariant,
    ReduceScatter,
    Remesh,
    ReplicatedToUnreduced,
    ShardedToUnreduced,
    Step,
)
from tests.helpers import spec_grid, strategies

MESH = Mesh(x=2, y=3, z=2)
XY = ("x", "y")


def spec_of(text: str) -> Spec:
    return parse(text, MESH)


def numel(box: tuple[tuple[int, int], ...]) -> int:
    return math.prod(stop - start for start, stop in box)


# -- exchanges -----------------------------------------------------------------------------


def count_exchange(src: Spec, dst: Spec) -> tuple[int, int, int]:
    """Count the elements that the busiest rank sends and receives, and the most pieces received."""
    ranks = sorted({*src.mesh.ranks, *dst.mesh.ranks})
    incoming = [receives(src, dst, rank) for rank in ranks]
    outgoing = [sends(src, dst, rank) for rank in ranks]
    sent, received = (
        max(sum(numel(piece.box) for piece in pieces) for pieces in side)
        for side in (outgoing, incoming)
    )
    return sent, received, max(map(len, incoming))


def assert_exchange(src: Spec, dst: Spec) -> None:
    """Assert exact bytes received, and bytes sent up to one piece, since pieces are not divided."""
    step = Exchange(dst.partition, dst.sizes, None if src.mesh == dst.mesh else dst.mesh)
    assert infer(step, src) == dst
    item = src.dtype.itemsize
    sent, received, pieces = count_exchange(src, dst)
    moved = traffic(step, src, dst)
    assert moved.received == received * item
    assert bool(moved.sent) == bool(received) == bool(moved.launches)
    largest = max(
        (numel(piece.box) for rank in dst.mesh.ranks for piece in receives(src, dst, rank)),
        default=0,
    )
    assert moved.sent / item > sent - largest or sent == 0
    assert moved.messages >= pieces


EVEN = spec_grid.all_specs(MESH, (12, 24), ("invariant",))


@pytest.mark.parametrize("src", EVEN[::4], ids=str)
def test_exchanges_of_every_even_pair(src: Spec) -> None:
    for dst in EVEN:
        assert_exchange(src, dst)
        moved = traffic(Exchange(dst.partition), src, dst)
        pieces = count_exchange(src, dst)[2]
        assert moved.messages - pieces in (0, 1)


def exchangeable(src: Spec, dst: Spec) -> Spec:
    """Return `dst` with the states that one exchange from `src` can result in."""
    p, q = src.partition, dst.partition
    may = {*p.unreduced, *itertools.chain(*p.dims)} if src.mesh == dst.mesh else set()
    stay = {axis: kind for axis, kind in q.unreduced_kinds if axis in may}
    return dst._with(partition=P(*q.partitions, unreduced=stay, reduced=q.reduced))


@given(st.data(), st.sampled_from([MESH, Mesh(x=4, y=2), Mesh(x=2, y=2, z=2)]), st.booleans())
def test_exchanges_of_uneven_pairs(data: st.DataObject, mesh: Mesh, same: bool) -> None:
    shape = data.draw(st.sampled_from([(5, 7), (12,), (0, 3), ()]))
    other = (
        mesh
        if same
        else data.draw(
            st.sampled_from(
                [Mesh(a=4), Mesh(a=2, x=3, devices=[9, 3, 1, 0, 20, 4]), Mesh(a=2, b=4)]
            )
        )
    )
    states = ("sharded", "invariant", "unreduced")
    src = data.draw(strategies.specs(mesh, shape, dtype=torch.int32, states=states))
    dst = data.draw(strategies.specs(other, shape, dtype=torch.int32))
    assert_exchange(src, exchangeable(src, dst))


@pytest.mark.parametrize(
    ("src", "dst", "moved"),
    [
        ("f32[12@x,6]", "f32[12,6@x]", (72, 72, 1)),
        ("f32[12@(x,y),6]", "f32[12@(y,x),6]", (48, 48, 1)),
        ("f32[12@y,6]", "f32[12@x,6]", (144, 144, 2)),
        ("f32[12@x,6]", "f32[12,6]{reduced: x}", (144, 144, 1)),
        ("f32[12,6]{unreduced: x}", "f32[12@x,6]", (144, 144, 1)),
        ("f32[12,6]{unreduced: x, y}", "f32[12,6]{unreduced: x}", (576, 576, 2)),
        ("f32[12,6]{unreduced: y}", "f32[12@z,6@x]", (144, 144, 2)),
        ("f32[12@x,6]", "f32[12@(x,y),6]", (0, 0, 0)),
        ("f32[5@x:3+2]", "f32[5@x:4+1]", (4, 4, 1)),
        ("f32[5@x:3+2]", "f32[5@z:3+2]", (12, 12, 1)),
        ("f32[8@x:8+0]", "f32[8@x:0+8]", (32, 32, 1)),
        ("f32[6@y:6+0+0]", "f32[6@y]", (16, 8, 2)),
        ("f32[6@y]", "f32[6@y:6+0+0]", (8, 16, 2)),
        ("f32[6@y:6+0+0]", "f32[6]", (48, 24, 2)),
        ("f32[0@x]", "f32[0]", (0, 0, 0)),
    ],
)
def test_exchange_traffic(src: str, dst: str, moved: tuple[int, int, int]) -> None:
    before, after = spec_of(src), spec_of(dst)
    step = Exchange(after.partition, after.sizes)
    assert traffic(step, before, after) == Traffic(*moved, rounds=int(max(moved) > 0))
    assert Program(before, (step,)).cost().messages == moved[2]
    if max(moved) == 0:
        assert copied_bytes(step, before, after) == (2 * max_local_nbytes(after),)


def test_exchange_traffic_of_a_million_devices() -> None:
    mesh = Mesh(a=1024, b=1024)
    src = parse("u8[1048576@(a,b),1024]", mesh)
    with spec_grid.peak_memory_below(4 << 20):  # a table of the devices takes 8 MiB and more
        for text in ("[1048576@(b,a),1024]", "[1048576@b,1024@a]", "[1048576,1024@a]"):
            dst = parse(f"u8{text}", mesh)
            received = traffic(Exchange(dst.partition), src, dst).received
            size = dict(mesh.shape)
            dims = src.partition.dims, dst.partition.dims
            assert received == even_exchange_traffic(src.shape, 1, size, *dims).received
        fine = Mesh(a=32, b=32, c=1024)
        dst = parse("u8[1048576@(c,b,a),1024]", fine)
        step = Exchange(dst.partition, mesh=fine)
        assert traffic(step, src, dst) == Traffic(1024, 1024, 1, 1)


# -- closed forms --------------------------------------------------------------------------


def test_closed_forms_equal_traffic_of_steps() -> None:
    for step, text, want in [
        (AllGather(XY, 1), "f32[4,12@(x,y)]", all_gather_traffic(6, 32)),
        (ReduceScatter(XY, 1), "f32[4,12]{unreduced: x, y}", all_gather_traffic(6, 32)),
        (AllReduce(XY), "f32[4,11]{unreduced: x, y}", all_reduce_traffic(6, 176, 4)),
        (AllToAll(XY, 1, 0), "f32[24@z,12@(x,y)]", all_to_all_traffic(6, 96)),
        (
            AllToAll("x", 1, 0, also=(AllToAll("y", 2, 0),)),
            "f32[12,2@x,3@y]",
            all_to_all_traffic(6, 48),
        ),
        (CollectivePermute(P(("y", "x"))), "f32[12@(x,y)]", Traffic(8, 8, 1, 1)),
    ]:
        src = spec_of(text)
        assert traffic(step, src, infer(step, src)) == want, step


def test_all_to_all_of_dependent_dims() -> None:
    # y shards dim 1 where x gathers it, so that some rank keeps nothing.
    src = spec_of("f32[6,6@x,6@y]")
    step = AllToAll("x", 1, 0, also=(AllToAll("y", 2, 1),))
    dst = infer(step, src)
    assert str(dst) == "f32[6@x,6@y,6]"
    assert traffic(step, src, dst) == Traffic(4 * 36, 4 * 36, 5, 1)
    assert count_exchange(src, dst)[1] == 36


def test_messages_of_uneven_gathers() -> None:
    # Few ranks send directly, many along trees; uneven shards are always sent directly.
    for n, even, odd in [(6, (5, 1), (5, 1)), (16, (15, 1), (15, 1)), (32, (5, 5), (31, 1))]:
        mesh = Mesh(x=n, y=2)
        for sizes, want in [((2,) * n, even), ((3, 1, *(2,) * (n - 2)), odd)]:
            src = Spec(mesh, P("x"), shape=(2 * n,), sizes={0: sizes})
            moved = traffic(AllGather("x", 0), src, src.replace(partition=P()))
            assert moved[2:] == want
            back = ReduceScatter("x", 0, src.sizes[0])
            addends = src.replace(partition=P(unreduced={"x"}))
            assert traffic(back, addends, src)[2:] == want
        reduced = traffic(AllReduce("x"), addends, addends.replace(partition=P()))
        assert reduced[2:] == (even if n <= 16 else (10, 10))
    # Each group has even shards: it runs as an even gather.
    src = spec_of("f32[9@(x,y):2+2+2+1+1+1]")
    assert traffic(AllGather("y", 0), src, spec_of("f32[9@x:6+3]")) == Traffic(16, 16, 2, 1)
    back = ReduceScatter("y", 0, (2, 2, 2, 1, 1, 1))
    assert traffic(back, spec_of("f32[9@x:6+3]{unreduced: y}"), src) == Traffic(16, 16, 2, 1)


# -- time ----------------------------------------------------------------------------------

OWN = Topology.of({"x": Link(1e-6, 1e9), "y": Link(2e-6, 2e9)}, launch=5e-6, memory=1e12)
S, D = 96, 48
"""Bytes of a source's and of a target's local."""


@pytest.mark.parametrize(
    ("step", "src", "copied"),
    [
        (AllGather("x", 0), "f32[4@x,6]", 0),
        (AllGather("x", 1), "f32[4,6@x]", 2 * 96),
        (AllGather("x", 1, "reduced"), "f32[4,6@x]", 2 * 96),
        (ReduceScatter("x", 0), "f32[4,6]{unreduced: x}", 0),
        (ReduceScatter("x", 1), "f32[4,6]{unreduced: x}", 2 * 96),
        (AllReduce("x"), "f32[4,6]{unreduced: x}", 0),
        (AllSlice("x", 0), "f32[4,6]", 2 * 48),
        (AllSlice("x", 1), "f32[4,6]{reduced: x}", 2 * 48),
        (AllToAll("x", 1, 0), "f32[4,6@x]", 2 * 48),
        (AllToAll("x", 0, 1), "f32[4@x,6]", 2 * 48),
        (AllToAll("x", 1, 2), "f32[4,6@x,2]", (2 * 96, 2 * 96)),
        (AllToAll("x", 1, 0, also=(AllToAll("y", 2, 0),)), "f32[6,4@x,3@y]", (2 * 48, 2 * 48)),
        (CollectivePermute(P("z")), "f32[4@x,6]", 0),
        (Exchange(P("z")), "f32[4@x,6]", 4 * 48),
        (Exchange(P()), "f32[4@x,6]", 2 * 48 + 2 * 96),
        (Exchange(P("x")), "f32[4,6]", 2 * 48),
        (Exchange(P("x")), "f32[4,6]{unreduced: y}", 2 * 96 + 4 * 48),
        (Exchange(P(None, "x")), "f32[4,6]{unreduced: y}", (2 * 96, 4 * 48)),
        (Remesh(MESH.split("y", y=3), P("x")), "f32[4@x,6]", 0),
        (InvariantToReduced("x"), "f32[4,6]", 0),
        (InvariantToReduced("x", "avg"), "f32[4,6]", 2 * 96),
        (ReducedToInvariant("x"), "f32[4,6]{reduced: x, y=avg}", 0),
        (ReducedToInvariant("x"), "f32[4,6]{reduced: x=avg}", 2 * 96),
        (ReplicatedToUnreduced("x"), "f32[4,6]", 2 * 96),
        (ShardedToUnreduced("x", 0), "f32[4@x,6]", 2 * 96),
        (Cast(torch.float64), "f32[4,6]", 96 + 192),
        (Cast(torch.float32), "f32[4,6]", 0),
        (AllGather("x", 0), "f32[0@x]", 0),
    ],
    ids=str,
)  # fmt: skip
def test_copied_bytes(step: Step, src: str, copied: int | tuple[int, int]) -> None:
    before = spec_of(src)
    after = infer(step, before)
    moved = traffic(step, before, after)
    copies = (copied,) if isinstance(copied, int) else copied
    assert [n for n in copied_bytes(step, before, after) if n] == [n for n in copies if n]
    link = OWN.link(MESH, step_axes(step, before, after))
    alone = sum(copies) / OWN.memory + OWN.kernel * (sum(copies) > 0)
    assert step_time(OWN, step, before, after) == pytest.approx(
        collective_time(OWN, link, moved, *copies) if moved.launches else alone
    )


def test_collective_of_one_rank_copies() -> None:
    mesh = Mesh(a=1, x=2)
    for step, text in [
        (AllGather("a", 0), "f32[4@(x,a)]"),
        (AllReduce("a"), "f32[2]{unreduced: a}"),
    ]:
        src = parse(text, mesh)
        assert Program(src, (step,)).cost(OWN).time == OWN.kernel + 2 * 8 / OWN.memory


def test_cost_sums_over_steps() -> None:
    src = spec_of("f32[1200@x,6@y]{unreduced: z}")
    steps = (ReduceScatter("z", 0), AllToAll("y", 1, 0), AllGather(("x", "z", "y"), 0))
    prog = Program(src, steps)
    cost = prog.cost()
    assert (cost.bytes_sent, cost.bytes_received, cost.launches) == (30400, 30400, 3)
    assert cost.messages == 1 + 2 + 11
    triples = list(zip(prog.steps, prog.specs, prog.specs[1:], strict=False))
    assert cost.time == sum(step_time(Topology.node(), *triple) for triple in triples)


def test_peak_memory_is_the_largest_local() -> None:
    src = spec_of("f32[12@x,6]")
    steps = (AllGather("x", 0), AllSlice("x", 1))
    assert Program(src, steps).cost().peak_memory == 12 * 6 * 4
    assert Program(src, ()).cost().peak_memory == 6 * 6 * 4
    # The tensor that is sent is wider or narrower than source and target.
    narrow = Program(src, steps, forward_dtype=torch.bfloat16)
    assert narrow.cost().peak_memory == 12 * 6 * 2
    assert Program(src, steps[:1], forward_dtype=torch.bfloat16).cost().peak_memory == 12 * 6 * 4
    assert Program(src, steps, forward_dtype=torch.float64).cost().peak_memory == 12 * 6 * 8


def test_collective_time() -> None:
    prog = Program(spec_of("f32[1200]{unreduced: x, y}"), (AllReduce(XY),))
    sent = 2 * 5 / 6 * 4800
    assert prog.cost(OWN).time == pytest.approx(5e-6 + 2e-6 + 5 * 0.15e-6 + sent / 1e9)
    swap = Program(spec_of("f32[1200@y,3]"), (AllToAll("y", 0, 1),))
    sent = 2 / 3 * 4800
    alone = 5e-6 + 2e-6 + 2 * 0.15e-6  # one round of two messages
    assert swap.cost(OWN).time == pytest.approx(alone + sent / 2e9 + OWN.kernel + 2 * 4800 / 1e12)


def test_step_time_between_meshes() -> None:
    cluster = Topology.cluster(4)
    src = parse("f32[1024@x]", Mesh(x=4))
    for first, link in [(0, cluster.inner), (4, cluster.outer)]:
        far = Mesh(y=2, devices=range(first, first + 2))
        step = Exchange(P("y"), mesh=far)
        dst = infer(step, src)
        assert step_axes(step, src, dst) == ()
        moved = traffic(step, src, dst)
        want = collective_time(cluster, link, moved, 2 * 1024 + 2 * 2048)
        assert step_time(cluster, step, src, dst) == want
