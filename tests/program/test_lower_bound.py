"""Lower bounds and overlaps of shards: closed forms against counts on every rank."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fshard._util.errors import ShardingError
from fshard.layout.mesh import Mesh
from fshard.layout.parsing import parse
from fshard.layout.spec import Spec
from fshard.program.cost.shard_overlap import (
    even_overlap,
    even_pieces,
    overlaps,
    pieces,
    shared_elements,
)
from fshard.program.cost.traffic import on_one_mesh
from fshard.program.lower_bound import Bound, lower_bound
from fshard.program.program import Program
from fshard.program.single_step import single_steps
from fshard.program.steps import AllGather, ReduceScatter, ShardedToUnreduced
from tests.helpers import spec_grid, strategies

MESH = Mesh(x=2, y=3, z=2)
Pair = tuple[int, int]
Dims = Sequence[tuple[str, ...]]


def spec_of(text: str) -> Spec:
    return parse(text, MESH)


@pytest.mark.parametrize(
    ("src", "dst", "received", "peak"),
    [
        ("f32[12@x]", "f32[12]", 24, 48),
        ("f32[12@(x,y)]", "f32[12@x]", 16, 24),
        ("f32[12]", "f32[12@x]", 0, 48),
        ("f32[12@x]", "f32[12@z]", 24, 24),
        # Each partial sum is on 4 ranks: 2 messages reduce, 3 distribute, of 12 elements on 12.
        ("f32[12]{unreduced: y}", "f32[12@y]", 20, 48),
        ("f32[12@(x,z)]{unreduced: y}", "f32[12@(x,z,y)]", 8, 12),
        ("f32[12@(x,z)]{unreduced: y}", "f32[12@(x,z)]", 16, 12),
        ("f32[12]{unreduced: x}", "f32[12]{unreduced: x}", 0, 48),
        ("f32[12@x]", "f32[12]{unreduced: x}", 0, 48),
        ("f32[12]{reduced: x}", "f32[12]", 0, 48),
        ("f32[12@(x,y)]", "f32[12@(y,x)]", 8, 8),
        ("f32[12@x,6]", "f32[12,6@x]", 72, 144),
        ("f32[8@x:8+0]", "f32[8@x:0+8]", 32, 32),
        ("f32[0@x]", "f32[0]", 0, 0),
        ("f32[]", "f32[]{reduced: x}", 0, 4),
        ("f32[]{unreduced: x}", "f32[]", 4, 4),
    ],
)
def test_lower_bound_by_hand(src: str, dst: str, received: int, peak: int) -> None:
    assert lower_bound(spec_of(src), spec_of(dst)) == Bound(received, peak)


def count_overlaps(src: Spec, dst: Spec, group: Sequence[str]) -> list[Pair]:
    """Count the elements of every rank's target box, and those that its group holds."""
    pairs = []
    for rank in dst.mesh.ranks:
        mask = torch.zeros(src.shape, dtype=torch.bool)
        for other in dst.mesh.group(rank, tuple(group)):
            if other in src.mesh:
                mask[src.index(other)] = True
        shard = mask[dst.index(rank)]
        pairs.append((shard.numel(), int(shard.sum())))
    return pairs


def count_lack(src: Spec, dst: Spec) -> int:
    """Return the most elements of its target box that any rank's group lacks."""
    group = tuple(dst.partition.unreduced)
    most = max(needs - holds for needs, holds in count_overlaps(src, dst, group))
    return -(-most // dst.mesh.axis_size(group))


EVEN = spec_grid.all_specs(MESH, (12, 12), ("invariant",))


@pytest.mark.parametrize("src", EVEN[::2], ids=str)
def test_lower_bound_of_every_even_pair(src: Spec) -> None:
    def lack(have: Dims, need: Dims) -> int:
        needs, holds = even_overlap(src.shape, MESH.shape, have, need) or (0, 0)
        return needs - holds

    for dst in EVEN:
        missing = count_lack(src, dst)
        assert lower_bound(src, dst) == Bound(
            8 * missing, 8 * max(math.prod(spec.local_shape(0)) for spec in (src, dst))
        )
        dims = src.partition.dims, dst.partition.dims
        assert lack(*dims) == missing
        assert lack(*dims) == lack(*dims[::-1]) + math.prod(dst.local_shape(0)) - math.prod(
            src.local_shape(0)
        )


@pytest.mark.parametrize("axes", [("x",), ("y", "z"), ("z", "x"), MESH.axes])
def test_overlaps_of_every_group(axes: tuple[str, ...]) -> None:
    closed = 0
    targets = [dst for dst in EVEN if not {*axes} & {*dst.partition.axes}]
    for src, dst in itertools.product(EVEN[::3], targets):
        by_hand = count_overlaps(src, dst, axes)
        worst = max(needs - holds for needs, holds in by_hand)
        assert max(needs - holds for needs, holds in overlaps(src, dst, axes)) == worst
        boxes = even_overlap(src.shape, MESH.shape, src.partition.dims, dst.partition.dims, axes)
        if boxes is not None:
            closed += 1
            assert boxes == (by_hand[0][0], min(holds for _, holds in by_hand))
    assert closed > len(targets)


def largest(pairs: Sequence[Pair], a: int, b: int) -> int:
    return max(a * needs - b * holds for needs, holds in pairs)


MESHES = strategies.meshes(max_axes=3, max_devices=12, permuted=True)


@st.composite
def two_meshes(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """Draw specs of two meshes, which share all, some or no devices."""
    shape = draw(strategies.shapes(max_dims=3, max_size=7))
    specs = []
    for _ in range(2):
        mesh = draw(MESHES)
        shift = draw(st.integers(0, 4))
        devices = [shift + device for device in mesh.devices]
        mesh = Mesh(dict(mesh.shape), devices=devices)
        specs.append(draw(strategies.specs(mesh, shape, dtype=torch.int64)))
    return specs[0], specs[1]


@st.composite
def same_devices(draw: st.DrawFn) -> tuple[Spec, Spec]:
    """Draw specs of two meshes of the same devices."""
    grids = [
        {"x": 12},
        {"x": 3, "y": 4},
        {"a": 6, "x": 2},
        {"y": 3, "x": 2, "b": 2},
        {"a": 4, "b": 3},
    ]
    shape = draw(st.sampled_from([(12, 24), (24,), (5, 3)]))
    ends = (Mesh(draw(st.sampled_from(grids))) for _ in range(2))
    one, other = (draw(strategies.specs(mesh, shape, dtype=torch.int64)) for mesh in ends)
    return one, other


@given(
    st.one_of(two_meshes(), same_devices(), strategies.spec_pairs()),
    st.integers(1, 5),
    st.integers(0, 5),
)
def test_overlaps_of_two_specs(pair: tuple[Spec, Spec], a: int, b: int) -> None:
    src, dst = pair
    group = tuple(dst.partition.unreduced)
    by_hand = count_overlaps(src, dst, group)
    if 0 not in src.shape:
        assert largest(list(overlaps(src, dst, group)), a, b) == largest(by_hand, a, b)
    one, other = on_one_mesh(src, dst)
    for spec, fine in ((src, one), (dst, other)):
        assert spec.mesh == fine.mesh or spec.is_equivalent(fine)


@given(st.one_of(two_meshes(), same_devices()))
def test_lower_bound_between_meshes(pair: tuple[Spec, Spec]) -> None:
    src, dst = pair
    bound = lower_bound(src, dst)
    if not src.partition.unreduced:
        assert bound.bytes_received == 8 * count_lack(src, dst)
    sizes = [spec.local_nbytes(rank) for spec in pair for rank in spec.mesh.ranks]
    assert bound.peak_memory >= max(sizes)
    if src.is_equivalent(dst):
        assert bound.bytes_received == 0


def test_lower_bound_between_other_devices() -> None:
    mesh, far = Mesh(x=2), Mesh(y=4, devices=range(2, 6))
    src, dst = parse("f32[12]{unreduced: x}", mesh), parse("f32[12]", far)
    # 2 messages to the first copy and 3 to the rest, of 12 elements on 6 ranks; each needs all.
    assert lower_bound(src, dst).bytes_received == 48
    # 7 messages for each of 12 elements, on the 10 ranks of both.
    wide = parse("f32[12]{unreduced: a}", Mesh(a=8, devices=range(4, 12)))
    assert lower_bound(wide, parse("f32[12@y]", far)).bytes_received == 4 * 9
    assert lower_bound(src, parse("f32[12]{unreduced: y}", far)).bytes_received == 0


def test_lower_bound_without_common_refinement() -> None:
    one, other = Mesh(x=4), Mesh(a=2, b=2)
    src = parse("f32[8]{unreduced: x}", one)
    assert lower_bound(src, parse("f32[8]{unreduced: a, b}", other)).bytes_received == 0
    assert lower_bound(src, parse("f32[8]{unreduced: b}", other)).bytes_received > 0


@given(st.data(), st.sampled_from([(2, 3), (3, 4), (1, 5), (6, 4), (12, 1), (5, 5)]))
def test_pieces_bound_the_shards_met(data: st.DataObject, counts: tuple[int, int]) -> None:
    a, b = counts
    mesh = Mesh(x=a, y=b)
    src = data.draw(
        strategies.specs(mesh, (60,), dtype=torch.int8, states=("sharded", "invariant"))
    )
    dst = data.draw(
        strategies.specs(mesh, (60,), dtype=torch.int8, states=("sharded", "invariant"))
    )
    most = 0
    for box in {(part.start, part.stop) for (part,) in map(dst.index, mesh.ranks)}:
        intervals = {(part.start, part.stop) for (part,) in map(src.index, mesh.ranks)}
        most = max(most, sum(max(low, box[0]) < min(high, box[1]) for low, high in intervals))
    assert pieces(src, dst) == most


def test_pieces_of_equal_shards() -> None:
    for a, b in itertools.product(range(1, 13), repeat=2):
        size = a * b
        edges = [
            [(index * size // n, (index + 1) * size // n) for index in range(n)] for n in (a, b)
        ]
        most = max(
            sum(max(low, start) < min(high, stop) for low, high in edges[0])
            for start, stop in edges[1]
        )
        assert even_pieces(a, b) == most


@given(strategies.spec_pairs(states=("sharded", "invariant", "reduced")))
def test_lower_bound_is_exact(pair: tuple[Spec, Spec]) -> None:
    src, dst = pair
    assert lower_bound(src, dst).bytes_received == 8 * count_lack(src, dst)


@given(
    st.data(),
    st.sampled_from([(Mesh(x=2, y=3, z=2), (12, 12)), (Mesh(a=2, b=2, c=2, d=2), (16,))]),
)
def test_lower_bound_of_groups_is_exact(data: st.DataObject, at: tuple[Mesh, tuple[int]]) -> None:
    mesh, shape = at
    states = ("sharded", "invariant")
    src = data.draw(strategies.specs(mesh, shape, dtype=torch.int64, states=states))
    dst = data.draw(
        strategies.specs(mesh, shape, dtype=torch.int64, states=("sharded", "unreduced"))
    )
    assert lower_bound(src, dst).bytes_received == 8 * count_lack(src, dst)


@pytest.mark.parametrize(
    ("src", "dst", "missing"),
    [
        ("[1048576@a,1048576@b]", "[1048576,1048576]{unreduced: a, b}", 0),
        ("[1048576@a,1048576@b]", "[1048576@b,1048576@a]", 1024 * 1024),
        ("[1048576@(a,b),4]", "[1048576@(b,a),4]", 4),
        ("[1048576@(a,b),4]", "[1048576@a,4]", 4 * 1023),
        ("[1048576@(a,b),4]", "[1048576@b,4]{unreduced: a}", 4 * (1024 - 1) // 1024 + 1),
        ("[1048576@(a,b),4]", "[1048576@(a,b),4]", 0),
        ("[1048576,1048576]", "[1048576@(a,b),1048576]", 0),
        ("[9999@a:chunk,9999@b:chunk]", "[9999@b:chunk,9999@a:chunk]", 100),
        # Nearly no element has a partial sum where it is needed: too many coordinates to count.
        ("[1048576@b,4]{unreduced: a}", "[1048576@(a,b),4]", 4 * 1023),
        ("[1048576@b,1048576]{unreduced: a}", "[1048576@a,1048576@b]", 1024 * 1024 * 1024 - 1024),
    ],
)
def test_lower_bounds_of_a_million_devices(src: str, dst: str, missing: int) -> None:
    mesh = Mesh(a=1024, b=1024)
    ends = parse(f"u8{src}", mesh), parse(f"u8{dst}", mesh)
    with spec_grid.peak_memory_below(4 << 20):  # a table of the devices takes 8 MiB and more
        assert lower_bound(*ends).bytes_received == missing


def test_lower_bound_if_partial_sums_stay() -> None:
    mesh = Mesh(x=4, y=4)
    src, dst = (parse(f"f32[{dim},16]{{unreduced: y}}", mesh) for dim in ("64@x", "64"))
    # For each element 3 messages merge 4 partial sums, and 3 send the sum to the other groups.
    bound = lower_bound(src, dst)
    assert bound.bytes_received == 4 * 64 * 16 * 6 // 16
    steps = (ReduceScatter("y", 1), AllGather("x", 0), ShardedToUnreduced("y", 1))
    assert Program(src, steps, dst).cost().bytes_received == bound.bytes_received
    assert Program(src, (AllGather("x", 0),), dst).cost().bytes_received == 2 * bound.bytes_received
    # All 4 partial sums are merged into one, on 8 of 16 ranks: 3 messages, and 8 - 1 to copy it.
    mesh = Mesh(x=2, y=2, z=4)
    src = parse("f32[16]{unreduced: x, y}", mesh)
    dst = parse("f32[16]{unreduced: y}", mesh)
    assert lower_bound(src, dst).bytes_received == 4 * 16 * (3 + 7) // 16


# -- messages, element by element ----------------------------------------------------------

Ranks = frozenset[int]


def common_bits(masks: Iterable[int]) -> int:
    return functools.reduce(operator.and_, masks)


@functools.cache
def fewest_messages(partials: frozenset[Ranks], groups: frozenset[Ranks]) -> int:
    """Search for the fewest messages after which all ranks of some group have each partial sum.

    `partials` are the holders of each partial sum, `groups` the ranks that need one value.
    """
    size = 1 + max(max(ranks) for ranks in (*partials, *groups))
    start = tuple(
        sum(1 << i for i, ranks in enumerate(partials) if rank in ranks) for rank in range(size)
    )
    seen, level = {start}, [start]
    for count in itertools.count():
        for masks in level:
            complete = (common_bits(masks[rank] for rank in ranks) for ranks in groups)
            if functools.reduce(operator.or_, complete) == (1 << len(partials)) - 1:
                return count
        next_level = set()
        for masks in level:
            for i, to in itertools.permutations(range(size), 2):
                if masks[i] & ~masks[to]:
                    next_level.add((*masks[:to], masks[to] | masks[i], *masks[to + 1 :]))
        level = list(next_level - seen)
        seen |= next_level
    raise AssertionError


def holders(spec: Spec, element: Sequence[int]) -> frozenset[Ranks]:
    """Return the ranks that hold an element, one set for each partial sum."""
    ranks_by_partial: dict[tuple[int, ...], set[int]] = {}
    for rank in spec.mesh.ranks:
        box = zip(element, spec.index(rank), strict=True)
        if all(part.start <= i < part.stop for i, part in box):
            coords = spec.mesh.coords(rank)
            which = tuple(coords[axis] for axis in spec.partition.unreduced)
            ranks_by_partial.setdefault(which, set()).add(rank)
    return frozenset(map(frozenset, ranks_by_partial.values()))


def assert_fewest(src: Spec, dst: Spec) -> None:
    elements = itertools.product(*map(range, src.shape))
    sent = sum(fewest_messages(holders(src, i), holders(dst, i)) for i in elements)
    group = tuple(dst.partition.unreduced)
    missing = max(needs - holds for needs, holds in count_overlaps(src, dst, group))
    if {*src.partition.unreduced} - {*group}:
        missing = math.prod(dst.local_shape(0))
    least = max(-(-sent // src.mesh.size), -(-missing // dst.mesh.axis_size(group)))
    assert lower_bound(src, dst).bytes_received == 4 * least, (src, dst)


SQUARE = spec_grid.all_specs(Mesh(x=2, y=2), (4, 4), dtype=torch.float32)


@pytest.mark.parametrize("src", SQUARE, ids=str)
def test_fewest_messages_of_every_pair(src: Spec) -> None:
    for dst in SQUARE:
        assert_fewest(src, dst)


CUBE = Mesh(x=2, y=2, z=2)


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("f32[4@y]{unreduced: x}", "f32[4]{unreduced: x}"),
        ("f32[4@y]{unreduced: x}", "f32[4@z]{unreduced: x}"),
        ("f32[4@y,2]{unreduced: x}", "f32[4,2@y]{unreduced: x}"),
        ("f32[4]{unreduced: x}", "f32[4]{unreduced: y}"),
        ("f32[4@y]{unreduced: x, z}", "f32[4@y]{unreduced: z}"),
        ("f32[4@y]{unreduced: x}", "f32[4@x]{unreduced: z}"),
        ("f32[4@(x,y)]", "f32[4]{unreduced: y}"),
        ("f32[4@z,2@y]{unreduced: x}", "f32[4@y,2@z]"),
        ("f32[8@(x,y)]{unreduced: z}", "f32[8@(y,x)]"),
    ],
)
def test_fewest_messages_on_three_axes(src: str, dst: str) -> None:
    assert_fewest(parse(src, CUBE), parse(dst, CUBE))


@given(strategies.spec_pairs())
def test_shared_elements(pair: tuple[Spec, Spec]) -> None:
    src, dst = pair
    cuts = [{axis for axes in spec.partition.dims for axis in axes} for spec in pair]
    shared = [axis for axis in src.mesh.axes if axis in cuts[0] & cuts[1]]
    met = 0
    for element in itertools.product(*map(range, src.shape)):
        ends = []
        for spec in pair:
            rank = min(map(min, holders(spec, element)))
            ends.append([spec.mesh.coords(rank)[axis] for axis in shared])
        met += ends[0] == ends[1]
    assert shared_elements(src, dst) == met


SMALL = Mesh(x=2, y=3)
SMALL_SPECS = spec_grid.all_specs(SMALL, (6, 12))


@pytest.mark.parametrize("src", SMALL_SPECS, ids=str)
def test_single_steps_receive_at_least_the_bound(src: Spec) -> None:
    for dst in SMALL_SPECS:
        for step in single_steps(src, dst):
            received = Program(src, (step,)).cost().bytes_received
            assert received >= lower_bound(src, dst).bytes_received, step


def test_lower_bound_of_trees_is_refused() -> None:
    with pytest.raises(ShardingError) as caught:
        lower_bound([spec_of("i16[60@x]")], [spec_of("i16[60]")])  # type: ignore[arg-type]
    assert str(caught.value) == spec_grid.message(
        "fs.lower_bound", "lower_bound(list, list)", "both must be Specs",
        "one pair at a time; of trees fs.redistribute(src, dst).explain() has the bounds",
    )  # fmt: skip


def test_lower_bound_of_a_huge_mesh() -> None:
    with torch.device("meta"):
        assert lower_bound(spec_of("i16[60@x]"), spec_of("i16[60]")).bytes_received == 60


def test_lower_bound_with_forward_dtype() -> None:
    src, dst = spec_of("f32[12@x]"), spec_of("f32[12]")
    assert lower_bound(src, dst, forward_dtype=torch.bfloat16) == Bound(12, 24)
    prog = Program(src, (AllGather("x", 0),), forward_dtype=torch.bfloat16)
    assert prog.cost().bytes_received == 12
    assert "0.50x" not in str(prog.explain())
