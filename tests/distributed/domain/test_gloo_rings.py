"""Rings on four gloo processes equal one device: attention, neighbours, folds, partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.gloo import uneven_bodies
from tests.helpers.gloo.dense_neighbours import dense_knn, dense_radius
from tests.helpers.gloo.harness import run_ranks

F64 = torch.float64
attention: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
MESH = Mesh(cp=4)
GRID = Mesh({"dp": 2, "cp": 2}, devices=(2, 0, 3, 1))
FREE_LAUNCHES = fs.Topology(
    inner=fs.Link(latency=0.0, bandwidth=1e18), launch=0.0, memory=1e15, message=0.0
)


def pairs_of(*specs: Spec) -> list[Any]:
    keys = fs.random.split(fs.random.key(0), len(specs))
    return [
        fs.shard(fs.random.normal(key, spec.shape, dtype=F64), spec)
        for key, spec in zip(keys, specs, strict=True)
    ]


def check(run: Callable[..., Any], dense: Callable[..., Any], *specs: Spec, second: bool) -> None:
    fs.testing.assert_like_one_device(
        run, dense, pairs_of(*specs), second_order=second, rtol=1e-10, atol=1e-10
    )


def all_on_rank() -> dict[Any, int]:
    """Run every kind of ring on this rank; return the bytes that attention sends."""
    fs.init(MESH, timeout=60)
    ring: Callable[..., Any] = fs.domain.scaled_dot_product_attention
    uneven = Spec(MESH, P(None, None, "cp"), shape=(1, 2, 9, 4), dtype=F64, sizes={2: (4, 0, 2, 3)})
    causal = {"is_causal": True}
    check(lambda *xs: ring(*xs, **causal), lambda *xs: attention(*xs, **causal),
          *[uneven] * 3, second=False)  # fmt: skip
    even = uneven.replace(shape=(1, 2, 8, 4))
    order = fs.domain.zigzag_order(8, 4)

    def zigzag(*xs: torch.Tensor) -> torch.Tensor:
        return attention(*(x[:, :, order.argsort()] for x in xs), **causal)[:, :, order]

    check(lambda *xs: ring(*xs, order="zigzag", **causal), zigzag, *[even] * 3, second=False)
    points = Spec(MESH, P("cp"), shape=(7, 2), dtype=F64, sizes={0: (3, 0, 2, 2)})
    knn: Callable[..., Any] = fs.domain.knn
    radius_search: Callable[..., Any] = fs.domain.radius_search
    check(lambda *xs: knn(*xs, 3), lambda x, y: dense_knn(x, y, 3), *[points] * 2, second=True)
    check(lambda *xs: radius_search(*xs, 1.5), lambda x, y: dense_radius(x, y, 1.5), *[points] * 2,
          second=True)  # fmt: skip
    block = Spec(MESH, P(None, None, "cp"), shape=(1, 2, 32, 4), dtype=F64)
    part = fs.partition(attention, mesh=MESH, in_specs=block.partition, topology=FREE_LAUNCHES)
    check(part, attention, *[block] * 3, second=False)
    check_products()
    with fs.comm_log() as log:
        ring(*pairs_of(*[block] * 3))
    return dict(log.bytes)


def check_products() -> None:
    """Check products beside a gather and a reduction of uneven shards: Megatron-LM's MLP."""
    rows = Spec(MESH, P("cp"), shape=(9, 3), dtype=F64, sizes={0: (4, 0, 2, 3)})
    sizes = (2, 1, 0, 3)
    up = Spec(MESH, P(None, "cp"), shape=(3, 6), dtype=F64, sizes={1: sizes})
    down = Spec(MESH, P("cp"), shape=(6, 3), dtype=F64, sizes={0: sizes})

    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        hidden = fs.all_gather_matmul(x, up, "cp").square()
        return fs.matmul_reduce_scatter(hidden, down, "cp", sizes=rows.shard_sizes(0))

    mapped = fs.shard_map(mlp, mesh=MESH, in_specs=(rows, up, down), out_specs=rows)
    check(mapped, lambda x, up, down: (x @ up).square() @ down, rows, up, down, second=True)


def on_grid() -> None:
    """Keys along one axis of a mesh with permuted devices, batch along the other."""
    fs.init(GRID, timeout=60)
    ring: Callable[..., Any] = fs.domain.scaled_dot_product_attention
    spec = Spec(GRID, P("dp", None, "cp"), shape=(2, 2, 5, 4), dtype=F64, uneven="chunk")
    check(ring, attention, *[spec] * 3, second=False)


def bodies_on_rank() -> None:
    fs.init(uneven_bodies.MESH, timeout=60)
    for check in (True, "collectives"):
        uneven_bodies.check_bodies(check)


def test_bodies_over_uneven_shards_exchange_sizes() -> None:
    run_ranks(4, bodies_on_rank)


def test_rings_on_processes() -> None:
    share = 2 * 2 * 32 * 4 * 8 * 3 // 4
    for sent in run_ranks(4, all_on_rank):
        assert sent == {("ppermute", "cp"): share}


def test_rings_on_a_grid_of_processes() -> None:
    run_ranks(4, on_grid)
