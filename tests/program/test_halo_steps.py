"""Laws of `HaloExchange` and `HaloReduce`: types, values, adjoints, bytes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import HaloExchange, HaloReduce, Mesh, P, Program, Spec
from fshard.program.boxes import volume
from fshard.program.cost.rank_loads import step_load
from fshard.program.cost.traffic import traffic
from fshard.program.halo_boxes import shard_pieces, window_pieces
from tests.helpers.reference import pairing, shards_of, simulate

Sizes = tuple[int, ...]


def halos(sizes: Sizes, left: int, right: int, *, periodic: bool) -> tuple[tuple[int, int], ...]:
    """Return the windows of shards with so many elements before and after them."""
    ends = [*itertools.accumulate(sizes)]
    rows = [(end - size - left, end + right) for size, end in zip(sizes, ends, strict=True)]
    if periodic:
        return tuple(rows)
    return tuple((max(start, 0), min(stop, ends[-1])) for start, stop in rows)


def values(spec: Spec) -> tuple[torch.Tensor, ...]:
    """Return shards of a tensor of distinct ints."""
    numel = spec.nbytes // spec.dtype.itemsize
    return shards_of(torch.arange(1, numel + 1, dtype=spec.dtype).view(spec.shape), spec)


def check(prog: Program) -> None:
    """Assert that a program equals the reference, and its transpose is its adjoint."""
    x = values(prog.src)
    y = prog(x)
    expected = simulate(prog, x)
    for actual, reference in zip(y, expected, strict=True):
        assert torch.equal(actual, reference)
    assert prog.T.src == prog.dst.dual
    assert prog == prog.T.T
    cotangent = values(prog.T.src)
    back = prog.T(cotangent)
    for actual, reference in zip(back, simulate(prog.T, cotangent), strict=True):
        assert torch.equal(actual, reference)
    assert torch.equal(pairing(y, cotangent, prog.dst), pairing(x, back, prog.src))
    for each in (prog, prog.T):
        with fs.comm_log() as log:
            each(values(each.src))
        assert log.total_bytes == each.cost().bytes_sent
        assert log.counts.total() == each.cost().launches
        loads = step_load(each.steps[0], each.src, each.dst, each.src.mesh.ranks)
        assert max(loads.sent) == each.cost().bytes_sent
        assert max(loads.received) == each.cost().bytes_received


def spec_of(sizes: Sizes, **mesh: int) -> Spec:
    return Spec(Mesh(h=len(sizes), **mesh), P("h"), shape=(sum(sizes), 2), dtype=torch.int64,
                sizes={0: sizes})  # fmt: skip


ALL_SIZES = [(4, 4), (3, 5), (1, 0, 4), (2, 2, 2), (0, 3, 0, 2)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", ALL_SIZES, ids=str)
@pytest.mark.parametrize(("periodic", "boundary"), [
    (False, "circular"), (True, "circular"), (True, "zeros")])  # fmt: skip
def test_all_small_halos(sizes: Sizes, periodic: bool, boundary: str) -> None:
    for left, right in itertools.product(range(sum(sizes) + 3), repeat=2):
        windows = halos(sizes, left, right, periodic=periodic)
        check(Program(spec_of(sizes), (HaloExchange((windows,), boundary),)))


def layouts() -> Iterator[Spec]:
    """Yield layouts with states, replicas, several axes in a dim, and permuted devices."""
    mesh, shape = Mesh({"a": 2, "b": 2, "c": 2}, devices=(7, 3, 5, 1, 6, 2, 4, 0)), (8, 4)
    for partition in (
        P("a", "b"), P(("b", "a")), P(("a", "b", "c")), P(None, "c"), P("a", unreduced={"b"}),
        P("a", reduced={"b"}), P("a", "b", unreduced={"c"}), P(),
    ):  # fmt: skip
        yield Spec(mesh, partition, shape=shape, dtype=torch.int64)


@pytest.mark.parametrize("spec", [*layouts()], ids=str)
@pytest.mark.parametrize("periodic", [False, True])
def test_two_dims_at_once_with_corners(spec: Spec, periodic: bool) -> None:
    for widths in ((1, 1, 1, 1), (2, 0, 0, 3), (5, 1, 2, 2)):
        windows = tuple(
            halos(spec.shard_sizes(dim), *widths[2 * dim : 2 * dim + 2], periodic=periodic)
            for dim in range(2)
        )
        check(Program(spec, (HaloExchange(windows),)))


@given(st.integers(0, 2**32))
def test_any_windows(seed: int) -> None:
    """Windows need not contain their shards, nor cover the dim."""
    rng = random.Random(seed)
    mesh = Mesh(x=rng.randint(1, 4), y=rng.randint(1, 3))
    dims = rng.choice([P("x", "y"), P(("x", "y")), P("y", None), P(("y", "x"), None)])
    sizes = {
        dim: tuple(rng.randint(0, 4) for _ in range(mesh.axis_size(axes)))
        for dim, axes in enumerate((*dims.dims, ())[:2])
    }
    shape = tuple(map(sum, sizes.values()))
    spec = Spec(mesh, dims, shape=shape, dtype=torch.int64, sizes=sizes)
    windows: list[Any] = [None, None]
    for dim in rng.sample(range(2), rng.randint(1, 2)):
        starts = [rng.randint(-6, 9) for _ in sizes[dim]]
        lengths = [rng.randint(0, 7) if shape[dim] else 0 for _ in sizes[dim]]
        windows[dim] = tuple((a, a + n) for a, n in zip(starts, lengths, strict=True))
    check(Program(spec, (HaloExchange(windows),)))


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_loads_of_many_alike_shards_are_those_of_their_pieces(seed: int) -> None:
    rng = random.Random(seed)
    sizes, windows = list[int](), list[tuple[int, int]]()
    for _ in range(rng.randint(1, 4)):
        n, count = rng.randint(0, 3), rng.randint(1, 12)
        before, after = rng.randint(-6, 2), rng.randint(0, 5)
        for _ in range(count):
            start = sum(sizes)
            sizes.append(n)
            windows.append((start + before, max(start + n + after, start + before)))
    if not sum(sizes):
        return
    spec, step = spec_of(tuple(sizes)), HaloExchange((tuple(windows),))
    dst = Program(spec, (step,)).dst
    loads, moved = step_load(step, spec, dst, spec.mesh.ranks), traffic(step, spec, dst)
    lent, lacking, peers = list[int](), list[int](), list[int]()
    for rank in spec.mesh.ranks:
        out = [piece for piece in shard_pieces(step, spec, rank) if piece.reader != rank]
        lack = [piece for piece in window_pieces(step, spec, rank) if piece.owner != rank]
        lent.append(sum(volume(piece.owned) for piece in out) * 8)
        lacking.append(sum(volume(piece.window) for piece in lack) * 8)
        peers.append(len({piece.reader for piece in out} | {piece.owner for piece in lack}))
    assert (loads.sent, loads.received) == (tuple(lent), tuple(lacking))
    assert moved.messages == max(peers)


def test_gradients_cross_the_exchange() -> None:
    spec = Spec(Mesh(h=3), P("h"), shape=(9,), dtype=torch.float64)
    windows = halos((3, 3, 3), 1, 1, periodic=True)
    x = torch.arange(9.0, dtype=torch.float64, requires_grad=True)

    def smoothed(x: torch.Tensor) -> torch.Tensor:
        ext = Program(spec, (HaloExchange((windows,)),))(fs.shard(x, spec).local)
        local = tuple(e[:-2] * e[1:-1] + e[2:] ** 2 for e in ext)
        return fs.unshard((local, spec))

    expected = torch.roll(x, 1) * x + torch.roll(x, -1) ** 2
    torch.testing.assert_close(smoothed(x), expected)
    weight = torch.arange(1.0, 10.0, dtype=torch.float64)
    (first,) = torch.autograd.grad(smoothed(x) @ weight, x, create_graph=True)
    (first_expected,) = torch.autograd.grad(expected @ weight, x, create_graph=True)
    torch.testing.assert_close(first, first_expected)
    grads = [torch.autograd.grad(g.square().sum(), x) for g in (first, first_expected)]
    torch.testing.assert_close(*grads)


def test_text_and_simplification() -> None:
    step = HaloExchange((((0, 5), (3, 8)), None))
    assert str(step) == "halo_exchange(dim 0)"
    assert step == HaloExchange([[[0, 5], [3, 8]]])
    src = Spec(Mesh(h=2), P(None, "h"), shape=(8, 8))
    prog = Program(src, (fs.AllToAll("h", 1, 0), step, fs.Cast(torch.bfloat16)))
    assert "halo_exchange(dim 0)" in str(prog)
    simple = prog.simplify()
    assert [type(s) for s in simple.steps].count(HaloExchange) == 1
    x = values(src.replace(dtype=torch.float32))
    assert all(map(torch.equal, simple(x), prog(x)))


def test_windows_of_the_shards_sizes_are_not_dropped() -> None:
    """Rolled by one: source and target have the same spec, and other values."""
    spec = Spec(Mesh(h=2), P("h"), shape=(8,), dtype=torch.int64)
    roll = Program(spec, (HaloExchange((((-1, 3), (3, 7)),)),))
    assert roll.dst == spec
    x = torch.arange(8)
    for prog in (roll, roll.simplify(), roll >> roll.T):
        expected = x if prog.steps[1:] else torch.roll(x, 1)
        assert torch.equal(fs.unshard((prog(fs.shard(x, spec).local), spec)), expected)


SRC = Spec(Mesh(h=2), P("h"), shape=(8,), dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HaloExchange(3), "windows must be a tuple"),  # type: ignore[arg-type]
        (lambda: HaloExchange((((5, 3), (3, 8)),)), "start <= stop"),
        (lambda: HaloExchange((None,)), "at least one dim must have windows"),
        (lambda: HaloReduce((((0, 5), (3, 8)),), sizes=((8,),)), "one size of at least 0"),
        (
            lambda: Program(SRC, (HaloExchange((((0, 8),),)),)),
            "one window for each of its 2",
        ),
        (lambda: Program(SRC, (HaloExchange((None, ((0, 1),))),)), "the tensor has 1 dims"),
        (
            lambda: Program(SRC, (HaloReduce((((0, 5), (3, 8)),), sizes=((4, 4),)),)),
            "the shards must be the windows",
        ),
        (
            lambda: Program(
                Spec(Mesh(h=2, t=2), P("h", unreduced={"t": "max"}), shape=(10,)),
                (HaloReduce((((0, 5), (3, 8)),), sizes=((4, 4),)),),
            ),
            "a halo reduction adds",
        ),
        (
            lambda: Program(SRC.replace(shape=(0,)), (HaloExchange((((0, 1), (0, 0)),)),)),
            "windows of an empty dim must be empty",
        ),
    ],
)
def test_windows_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    with pytest.raises(fs.ShardingError, match=message):
        make()
