"""Nearest neighbours and radius search: exact, on every layout, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from tests.helpers.gloo.dense_neighbours import dense_knn, dense_radius

F64 = torch.float64
TOLERANCE: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
knn: Any = fs.domain.knn
radius_search: Any = fs.domain.radius_search


@st.composite
def clouds(draw: Any) -> list[Any]:
    """Draw points and queries, some of them equal, on one or two axes, uneven and empty shards."""
    n = draw(st.integers(1, 4))
    mesh = Mesh(j=draw(st.sampled_from([1, 2])), i=n)
    sizes = draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    sizes = [*sizes[:-1], sizes[-1] + 2]
    rows = draw(st.integers(0, 6))
    split = draw(st.sampled_from([P("i"), P("j"), P(), P(("j", "i"))]))
    specs = [
        Spec(mesh, P("i"), shape=(sum(sizes), 2), dtype=F64, sizes={0: sizes}),
        Spec(mesh, split, shape=(rows, 2), dtype=F64, uneven="chunk"),
    ]
    key = fs.random.key(draw(st.integers(0, 99)))
    values = [
        fs.random.randint(k, s.shape, 0, 4).to(F64)
        for k, s in zip(fs.random.split(key), specs, strict=True)
    ]
    return [fs.shard(x, spec) for x, spec in zip(values, specs, strict=True)]


@settings(max_examples=25, deadline=None)
@given(case=clouds(), k=st.integers(1, 4))
def test_knn_equals_a_stable_sort(case: list[Any], k: int) -> None:
    """Integer coordinates have many equal distances, zeros among them."""
    k = min(k, case[0].spec.shape[0])
    fs.testing.assert_like_one_device(
        lambda *xs: knn(*xs, k), lambda x, y: dense_knn(x, y, k), case, **TOLERANCE
    )


@settings(max_examples=25, deadline=None)
@given(case=clouds(), radius=st.sampled_from([0, 1, 1.5, 4]), size=st.integers(0, 3))
def test_radius_search_equals_a_mask_of_all_distances(
    case: list[Any], radius: float, size: int
) -> None:
    fs.testing.assert_like_one_device(
        lambda *xs: radius_search(*xs, radius), lambda x, y: dense_radius(x, y, radius), case,
        **TOLERANCE,
    )  # fmt: skip

    def nearest(points: torch.Tensor, queries: torch.Tensor) -> Any:
        order, distances = dense_knn(points, queries, size)
        missing = size - order.shape[1]
        order = torch.nn.functional.pad(order, (0, missing), value=-1)
        distances = torch.nn.functional.pad(distances, (0, missing), value=torch.inf)
        outside = distances.detach() ** 2 > radius**2 + 1e-9
        counts = dense_radius(points, queries, radius)[2]
        return order.masked_fill(outside, -1), distances.masked_fill(outside, torch.inf), counts

    points, queries = (fs.unshard(pair) for pair in case)
    results = radius_search(*case, radius, size=size)
    for actual, expected in zip(results, nearest(points, queries), strict=True):
        torch.testing.assert_close(fs.unshard(actual), expected, **TOLERANCE)


def test_radius_search_backward() -> None:
    """ShardTensor raises in the backward pass of a ring; second order too, and traffic."""
    mesh = Mesh(i=4)
    specs = [
        Spec(mesh, P("i"), shape=(13, 3), dtype=F64, sizes={0: (5, 0, 6, 2)}),
        Spec(mesh, P("i"), shape=(7, 3), dtype=F64, uneven="chunk"),
    ]
    keys = fs.random.split(fs.random.key(1))
    pairs = [
        fs.shard(fs.random.normal(key, s.shape, dtype=F64), s)
        for key, s in zip(keys, specs, strict=True)
    ]

    def energy(search: Any, *xs: Any) -> Any:
        return search(*xs, 1.5)[1]

    fs.testing.assert_like_one_device(
        lambda *xs: energy(radius_search, *xs), lambda *xs: energy(dense_radius, *xs), pairs,
        second_order=True, **TOLERANCE,
    )  # fmt: skip
    fs.testing.assert_like_one_device(
        lambda *xs: radius_search(*xs, 1.5, size=3)[2],
        lambda x, y: dense_radius(x, y, 1.5)[2],
        pairs,
    )
    with fs.comm_log() as log:
        knn(*pairs, 2)
    # The busiest rank forwards all blocks but that of the rank after it.
    assert dict(log.forward.bytes) == {("ppermute", "i"): (13 - 0) * 3 * 8}


def test_bodies_take_sizes() -> None:
    mesh, sizes = Mesh(i=3), (1, 0, 4)
    spec = Spec(mesh, P("i"), shape=(5, 2), dtype=F64, sizes={0: sizes})
    out = Spec(mesh, P("i"), shape=(5, 3), dtype=F64, sizes={0: sizes})

    def body(points: torch.Tensor) -> Any:
        indices, distances = knn(points, points, 3, axis_name="i", point_sizes=sizes)
        counts = radius_search(points, points, 1.0, axis_name="i", point_sizes=sizes)[2]
        return indices, distances, counts

    out_specs = (
        out.replace(dtype=torch.int64),
        out,
        out.replace(dtype=torch.int64, shape=(5,), partition=P("i"), sizes={0: sizes}),
    )
    mapped = fs.shard_map(body, mesh=mesh, in_specs=spec, out_specs=out_specs)
    pair = fs.shard(fs.random.normal(fs.random.key(1), spec.shape, dtype=F64), spec)

    def plain(x: torch.Tensor) -> Any:
        return (*dense_knn(x, x, 3), dense_radius(x, x, 1.0)[2])

    fs.testing.assert_like_one_device(mapped, plain, (pair,), **TOLERANCE)


def text_of(search: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ShardingError) as error:
        search(*args, **options)
    return str(error.value)


def test_errors_come_before_communication() -> None:
    mesh = Mesh(i=2)
    points, wide = (fs.shard(torch.zeros(4, n), mesh, P("i")) for n in (2, 3))
    with fs.comm_log() as log:
        assert "k must be at most 4" in text_of(knn, points, points, 5)
        assert "k must be an int of at least 1" in text_of(knn, points, points, 0)
        assert "with the same width" in text_of(knn, points, wide, 1)
        assert "the same floating dtype" in text_of(knn, points, torch.zeros(4, 2, dtype=F64), 1)
        columns = fs.shard(torch.zeros(4, 2), mesh, P(None, "i"))
        assert "the width must be unsharded" in text_of(radius_search, points, columns, 1.0)
        assert "the radius must be a number" in text_of(radius_search, points, points, -1.0)
        assert "size must be an int" in text_of(radius_search, points, points, 1.0, size=-1)
        assert "must be pairs" in text_of(knn, torch.zeros(4, 2), torch.zeros(4, 2), 1)
    assert not log.counts
