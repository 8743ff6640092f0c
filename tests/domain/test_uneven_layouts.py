"""Sizes that balance weights, redistributions between uneven layouts, weighted moments."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.domain.load_balance import balanced_sizes

F64 = torch.float64


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.one_of(st.integers(0, 9), st.floats(0, 5)), max_size=7),
    parts=st.integers(1, 4),
)
def test_no_contiguous_sizes_have_a_smaller_largest_sum(weights: list[float], parts: int) -> None:
    def largest(ends: Any) -> float:
        return max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *ends, len(weights))))

    sizes = balanced_sizes(weights, parts)
    assert len(sizes) == parts
    assert sum(sizes) == len(weights)
    assert min(sizes) >= 0
    every = itertools.combinations_with_replacement(range(len(weights) + 1), parts - 1)
    best = min(largest(ends) for ends in every)
    assert largest(tuple(itertools.accumulate(sizes[:-1]))) == pytest.approx(best, rel=1e-12)


def test_balance_takes_a_long_list() -> None:
    weights = fs.random.uniform(fs.random.key(0), (100_000,), dtype=F64)
    spec = Spec(Mesh(x=8), P("x"), shape=(100_000,))
    sizes = fs.domain.balance(spec, weights).shard_sizes(0)
    loads = [part.sum() for part in weights.split(sizes)]
    assert max(loads) - weights.sum() / 8 <= weights.max()


def test_balance_refuses_other_weights() -> None:
    spec = Spec(Mesh(x=2, y=2), P("x", "y"), shape=(4, 4))
    for weights, text in (([1, 2], "4 finite numbers"), ([1, 2, -1, 0], "of at least 0")):
        with pytest.raises(ShardingError, match=text):
            fs.domain.balance(spec, weights, dim=0)
    with pytest.raises(ShardingError, match="dim must be given unless one dim is sharded"):
        fs.domain.balance(spec, [1, 1, 1, 1])


LAYOUTS: dict[str, tuple[Mesh, P, Any, P, Any]] = {
    "rebalance": (Mesh(x=2), P("x"), (3, 5), P("x"), (4, 4)),
    "ragged batches": (Mesh(x=4), P("x"), (7, 0, 1, 4), P("x"), (2, 5, 5, 0)),
    "to an owner": (Mesh(x=4), P("x"), (3, 3, 3, 3), P("x"), (0, 12, 0, 0)),
    "from an owner": (Mesh(x=4), P("x"), (0, 12, 0, 0), P("x"), (3, 3, 3, 3)),
    "nested": (Mesh(x=2, y=2), P(("x", "y")), (5, 0, 4, 3), P(("y", "x")), (1, 6, 2, 3)),
    "to another axis": (Mesh(x=2, y=2), P("x"), (5, 7), P("y"), (2, 10)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_redistribution_between_two_uneven_layouts_sends_the_bound(name: str) -> None:
    """ShardTensor cannot express an uneven target; each rank receives what it lacks, no more."""
    mesh, p, sizes, q, targets = LAYOUTS[name]
    shape = (sum(sizes), 2)
    src = Spec(mesh, p, shape=shape, dtype=F64, sizes={0: sizes})
    dst = Spec(mesh, q, shape=shape, dtype=F64, sizes={0: targets})
    pair = fs.shard(fs.random.normal(fs.random.key(0), shape, dtype=F64), src)
    bound = fs.lower_bound(src, dst).bytes_received
    cost = fs.redistribute(src, dst, objective="bytes").cost()
    assert cost.bytes_received == bound
    with fs.comm_log() as log:
        moved = fs.reshard(pair, dst, objective="bytes")
    assert moved.spec == dst
    assert sum(log.bytes.values()) == cost.bytes_sent
    fs.testing.assert_like_one_device(
        lambda x: fs.reshard(fs.reshard(x, dst), src), lambda x: x, (pair,), second_order=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("dim", [None, 0, (1, 2), -1])
def test_weighted_moments_take_one_reduction(dtype: torch.dtype, dim: Any) -> None:
    mesh = Mesh(x=2, y=2)
    spec = Spec(mesh, P("x", None, "y"), shape=(5, 3, 6), dtype=dtype, sizes={0: (1, 4), 2: (6, 0)})
    keys = fs.random.split(fs.random.key(0))
    x = fs.shard(fs.random.normal(keys[0], spec.shape, dtype=dtype), spec)
    weights = fs.shard(fs.random.uniform(keys[1], spec.shape, dtype=dtype), spec)

    def dense(x: torch.Tensor, w: torch.Tensor) -> Any:
        dims = tuple(range(3)) if dim is None else dim
        mean = (w * x).sum(dims, True) / w.sum(dims, True)
        variance = (w * (x - mean).square()).sum(dims) / w.sum(dims)
        return variance, mean.reshape(variance.shape)

    tolerance: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10} if dtype == F64 else {}
    fs.testing.assert_like_one_device(
        lambda x, w: fs.domain.weighted_var_mean(x, w, dim), dense, (x, weights), **tolerance
    )
    fs.testing.assert_like_one_device(
        lambda x, w: fs.domain.weighted_mean(x, w, dim), lambda x, w: dense(x, w)[1], (x, weights),
        **tolerance,
    )  # fmt: skip
    with fs.comm_log() as log:
        fs.domain.weighted_mean(x, weights, dim)
    assert log.forward.counts.total() == 1
    large = Spec(mesh, P("x"), shape=(4096, 512), dtype=torch.float32)
    part = fs.partition(fs.domain.weighted_var_mean, mesh=mesh, in_specs=(large, large, None))
    text = str(part.explain(*[torch.empty(large.shape, device="meta")] * 2, 0))
    assert len(re.findall(r"→ all_reduce\(x\) +f64\[", text)) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fs.domain.weighted_mean(x, torch.ones(4, 2), dim=2),
        lambda x: fs.domain.weighted_var_mean(x, torch.ones(4, 2), dim=(0, -3)),
        lambda x: fs.domain.balance(x.spec, torch.ones(4), dim=2),
        lambda x: fs.domain.balance(x.spec, torch.ones(2), dim=1),
    ],
)
def test_dims_out_of_range_or_unsharded_are_refused(call: Any) -> None:
    x = fs.shard(torch.ones(4, 2), Spec(Mesh(x=2), P("x"), shape=(4, 2)))
    with pytest.raises(ShardingError, match="dim"):
        call(x)
