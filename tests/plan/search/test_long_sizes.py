"""Sizes of many uneven shards: the values of slow definitions, computed faster."""

from __future__ import annotations

import itertools

import pytest

from fshard import Mesh, P, Spec
from fshard.plan.search.search_layout import LONG, LongSizes, SearchLayout, hashed_once
from fshard.program.cost.shard_overlap import dim_pieces, tiling_pieces
from fshard.program.infer import join_sizes, split_sizes

SIZES = [(3, 5, 0, 8, 1, 1), (0, 0, 4, 4, 0, 7), (1, 2, 3, 4, 5, 6)]


@pytest.mark.parametrize("sizes", SIZES)
def test_joined_and_split_sizes_are_sums_and_chunks(sizes: tuple[int, ...]) -> None:
    for n in (1, 2, 3, 6):
        sums = tuple(sum(sizes[i : i + n]) for i in range(0, len(sizes), n))
        assert join_sizes(sizes, n) == (None if len({*sums}) == 1 else sums)
        parts = split_sizes(sum(sizes), len(sizes), sizes, n, chunk=True)
        assert parts is not None
        assert len(parts) == n * len(sizes)
        assert join_sizes(tuple(map(int, parts)), n) == sizes


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("masked", [False, True])
def test_pieces_are_the_shards_that_a_target_meets(sizes: tuple[int, ...], masked: bool) -> None:
    stops = list(itertools.accumulate(sizes, initial=0))
    mask = [i % 2 == 0 for i in range(len(sizes))] if masked else None
    for start, stop in itertools.combinations(range(stops[-1] + 1), 2):
        met = sum(
            max(a, start) < min(b, stop)
            for i, (a, b) in enumerate(itertools.pairwise(stops))
            if mask is None or mask[i]
        )
        assert dim_pieces(sizes, [(start, stop)], mask) == met
        others = [(0, stops[-1]), (start, start)]
        most = dim_pieces(sizes, others, mask)
        assert dim_pieces(sizes, [(start, stop), *others], mask) == max(met, most)
        if not masked:
            targets = start, stop - start, 0, stops[-1] - stop
            expected = dim_pieces(
                sizes, itertools.pairwise(itertools.accumulate(targets, initial=0))
            )
            assert tiling_pieces(sizes, targets) == expected


def test_long_sizes_are_equal_keys_and_stay_in_the_search() -> None:
    n = 2 * LONG
    spec = Spec(Mesh(x=n), P("x"), shape=(3 * n + 1,), uneven="chunk")
    layout = SearchLayout.of(spec)
    assert isinstance(layout.sizes[0], LongSizes)
    assert (layout.sizes, hash(layout.sizes)) == (spec.sizes, hash(spec.sizes))
    assert hashed_once(layout.sizes[0]) is layout.sizes[0]
    assert type(spec.sizes[0]) is tuple
