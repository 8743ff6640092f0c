"""Traffic of steps, compared with bytes counted box by box over all ranks."""

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
from fshard.program.cost.traffic import step_axes, traffic
from fshard.program.exchange_boxes import Piece, converted_axes, reduction_axes, sends
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
    ReduceScatter,
    Remesh,
    ShardedToUnreduced,
    Step,
)
from tests.helpers import spec_grid
from tests.helpers.reference import simulate, simulate_step
from tests.helpers.step_table import IDS, TABLE, spec_of


def numel(index: tuple[slice, ...]) -> int:
    return math.prod(part.stop - part.start for part in index)


def common(one: tuple[slice, ...], two: tuple[slice, ...]) -> int:
    """Count the elements in both of two boxes."""
    both = zip(one, two, strict=True)
    return math.prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in both)


def volume(piece: Piece) -> int:
    return math.prod(stop - start for start, stop in piece.box)


def count_bytes(step: Step, src: Spec, dst: Spec) -> tuple[int, int]:
    """Count the bytes that the busiest rank sends and receives, box by box over all ranks."""
    mesh, item = src.mesh, src.dtype.itemsize
    if isinstance(step, CollectivePermute):
        shards = [torch.full(src.local_shape(rank), rank) for rank in mesh.ranks]
        outputs = simulate_step(step, src._with(dtype=torch.int64), shards)
        moved = [shard.numel() for shard, rank in zip(outputs, mesh.ranks, strict=True)
                 if shard.numel() and int(shard.flatten()[0]) != rank]  # fmt: skip
        return (max(moved, default=0) * item,) * 2
    if isinstance(step, Cast | Remesh):
        return 0, 0
    if isinstance(step, Exchange):
        parts, least = mesh.axis_size(reduction_axes(src, dst)), [0]
        embedded = [axis for axis in converted_axes(src, dst) if axis in dst.partition.unreduced]
        coordinates = torch.empty(src.shape, dtype=torch.int64)
        for rank in mesh.ranks:
            coordinates[src.index(rank)] = mesh.index(rank, embedded)
        for rank in mesh.ranks:
            needed = int((coordinates[dst.index(rank)] == mesh.index(rank, embedded)).sum())
            least.append(parts * needed - common(src.index(rank), dst.index(rank)))
        most = max(sum(map(volume, sends(src, dst, rank))) for rank in mesh.ranks)
        return most * item, max(least) * item
    sent, received = [0], [0]
    pairs = step.pairs if isinstance(step, AllToAll) else (step,)
    for group in mesh.groups(tuple(axis for pair in pairs for axis in pair.axes)):
        n = len(group)
        for rank in group:
            before, after = src.index(rank), dst.index(rank)
            match step:
                case AllGather():
                    rest = [src.index(other) for other in group if other != rank]
                    sent.append(sum(numel(before) for _ in rest))
                    received.append(sum(numel(other) for other in rest))
                case ReduceScatter():
                    rest = [dst.index(other) for other in group if other != rank]
                    sent.append(sum(common(before, other) for other in rest))
                    received.append(sum(numel(after) for _ in rest))
                case AllToAll():
                    sent.append(sum(common(before, dst.index(o)) for o in group if o != rank))
                    received.append(sum(common(src.index(o), after) for o in group if o != rank))
                case AllReduce():
                    # n - 1 of n parts to reduce, n - 1 to gather, rounded up to elements.
                    sent.append(math.ceil(2 * (n - 1) * numel(before) / n))
                    received.append(sent[-1])
    return max(sent) * item, max(received) * item


def assert_bytes(step: Step, src: Spec) -> None:
    dst = infer(step, src)
    moved, promised = count_bytes(step, src, dst), traffic(step, src, dst)
    if isinstance(step, CollectivePermute):
        # Its traffic is a full shard, though the largest shard may stay on its rank.
        assert max(moved) <= promised.sent == promised.received
    elif isinstance(step, Exchange) and not (src.is_even and dst.is_even):
        # Its traffic is an equal part for each holder, though holders send undivided pieces.
        assert promised.sent <= moved[0]
        assert promised.received == moved[1]
    else:
        assert (promised.sent, promised.received) == moved
    assert promised.launches or moved == (0, 0)


@pytest.mark.parametrize(("step", "src"), [row[:2] for row in TABLE], ids=IDS)
def test_traffic_matches_counted_bytes(step: Step, src: str) -> None:
    assert_bytes(step, spec_of(src))


@st.composite
def uneven_steps(draw: st.DrawFn) -> tuple[Step, Spec]:
    """Draw a collective on a 2-dim tensor with shards of any sizes."""

    def cut(size: int, shards: int) -> tuple[int, ...]:
        inner = st.lists(st.integers(0, size), min_size=shards - 1, max_size=shards - 1)
        edges = [0, *sorted(draw(inner)), size]
        return tuple(b - a for a, b in itertools.pairwise(edges))

    def refine(sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
        return tuple(part for size in sizes for part in cut(size, n))

    mesh = draw(st.sampled_from([Mesh(x=2, y=3), Mesh(x=3, y=2), Mesh(y=2, x=4)]))
    n, m = mesh.shape["x"], mesh.shape["y"]
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    outer, fine = cut(rows, m), refine(cut(rows, m), n)
    if draw(st.booleans()):
        src = Spec(mesh, P(("y", "x")), shape=(rows, columns), sizes={0: fine})
        to = draw(st.sampled_from(["invariant", "reduced"]))
        return draw(st.sampled_from([
            AllGather("x", 0, to), AllToAll("x", 0, 1, cut(columns, n)),  # type: ignore[arg-type]
            ShardedToUnreduced("x", 0),
        ])), src  # fmt: skip
    src = Spec(mesh, P("y", unreduced={"x"}), shape=(rows, columns), sizes={0: outer})
    return draw(st.sampled_from([
        AllReduce("x"), ReduceScatter("x", 0, refine(outer, n)),
        ReduceScatter("x", 1, cut(columns, n)),
    ])), src  # fmt: skip


@given(uneven_steps())
def test_traffic_of_uneven_shards_matches_counted_bytes(drawn: tuple[Step, Spec]) -> None:
    step, src = drawn
    assert_bytes(step, src)
    prog = Program(src._with(dtype=torch.int64), (step,))
    x, y = spec_grid.random_locals(prog.src, 1), spec_grid.random_locals(prog.dst.dual, 2)
    outputs, gradients = simulate(prog, x), simulate(prog.T, y)
    assert all(map(torch.equal, prog(x), outputs))
    assert all(map(torch.equal, prog.T(y), gradients))
    assert torch.equal(spec_grid.global_of(prog.dst, outputs), spec_grid.global_of(prog.src, x))
    assert spec_grid.pairing(prog.dst, outputs, y) == spec_grid.pairing(prog.src, x, gradients)
    assert prog == prog.T.T


@pytest.mark.parametrize("src", ["f32[0@x,6]{unreduced: y}", "f32[4@x,0]{unreduced: y}"])
def test_empty_tensors_have_no_traffic(src: str) -> None:
    prog = Program(spec_of(src), (AllReduce("y"), AllToAll("x", 0, 1), AllGather("x", 1)))
    cost = prog.cost()
    assert (cost.bytes_sent, cost.bytes_received, cost.launches) == (0, 0, 0)
    assert prog.is_local


def test_axes_of_size_one_launch_nothing() -> None:
    mesh = Mesh(a=1, x=2)
    prog = Program(parse("f32[4@(x,a)]", mesh), (AllGather("a", 0), AllSlice("a", 0)))
    assert prog.cost().launches == 0
    assert prog.is_local
    both = Program(prog.src, (AllGather(("x", "a"), 0),))
    assert step_axes(both.steps[0], both.src, both.dst) == ("x",)
    assert both.cost().launches == 1
    assert both.step_bytes == (8,)
