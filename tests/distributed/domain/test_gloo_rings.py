"""Rings on four gloo processes equal one device: attention, neighbours, folds, partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as dtensor

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


def against_dtensor() -> None:
    """Compare outputs and gradients with the ring that DTensor's `context_parallel` runs.

    DTensor has no layouts of the CPU's attention, so that its ring is called itself.
    """
    fs.init(MESH, timeout=60)
    flash, n = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, MESH.size
    spec = Spec(MESH, P(None, None, "cp"), shape=(1, 2, 16, 4), dtype=F64)
    tensors = [fs.unshard(pair) for pair in pairs_of(*[spec] * 3)]

    def flash_backward(**args: Any) -> tuple[torch.Tensor, ...]:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp")
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        result: tuple[torch.Tensor, ...] = backward(*map(args.get, names), 0.0, args["is_causal"])
        return result

    for order in ("contiguous", "zigzag"):
        dtensor._cp_options.enable_load_balance = order == "zigzag"
        positions = fs.domain.zigzag_order(16, n) if order == "zigzag" else torch.arange(16)
        locals_ = [x[:, :, positions][spec.index(dist.get_rank())].clone() for x in tensors]
        out, lse, *_ = dtensor._templated_ring_attention(
            dist.group.WORLD, 2, flash, *locals_, is_causal=True
        )
        named = dict(zip(("query", "key", "value"), locals_, strict=True))
        grads = dtensor._templated_ring_attention_backward(
            dist.group.WORLD, 2, flash_backward, grad_out=out.cos(), grad_out_name="grad_out",
            **named, out=out, logsumexp=lse, is_causal=True,
        )  # fmt: skip
        body = fs.domain.context_parallel(
            lambda *xs: attention(*xs, is_causal=True), "cp", order=order
        )
        mapped = fs.shard_map(body, mesh=MESH, in_specs=spec.partition, out_specs=spec.partition)
        leaves = [x.requires_grad_() for x in locals_]
        y = mapped(*(fs.Sharded(x, spec) for x in leaves)).local
        torch.testing.assert_close(y, out, rtol=1e-5, atol=1e-5)  # DTensor's merges in float32
        torch.testing.assert_close(
            torch.autograd.grad(y.sin().sum(), leaves), tuple(grads[:3]), rtol=1e-5, atol=1e-5
        )


def compiled_on_rank() -> None:
    """Compile rings in bodies and halos of pairs; a graph ends before attention on pairs."""
    fs.init(MESH, timeout=60)
    spec = Spec(MESH, P(None, None, "cp"), shape=(1, 2, 16, 4), dtype=F64)

    def distances(x: torch.Tensor) -> torch.Tensor:
        step = lambda y, index, x: (x[:, :, :, None] - y[:, :, None]).cos().sum(3)  # noqa: E731
        result: torch.Tensor = fs.domain.ring_fold(
            torch.zeros_like(x), step, torch.add, x, "cp", operands=(x,), dim=2
        )
        return result

    fold = fs.shard_map(distances, mesh=MESH, in_specs=spec.partition, out_specs=spec.partition)
    ring: Callable[..., Any] = fs.domain.scaled_dot_product_attention
    causal = fs.shard_map(
        lambda *xs: ring(*xs, is_causal=True, axis_name="cp"), mesh=MESH,
        in_specs=spec.partition, out_specs=spec.partition,
    )  # fmt: skip
    functions: list[Callable[..., Any]] = [
        lambda *xs: ring(*xs, is_causal=True),
        causal,
        lambda q, k, v: fold(q),
        lambda q, k, v: fs.domain.halo_exchange(v, {2: (2, 1)}, boundary="circular"),
    ]
    for function in functions:
        leaves = [pair.local.clone().requires_grad_() for pair in pairs_of(*[spec] * 3)]

        def loss(*xs: torch.Tensor, function: Any = function) -> torch.Tensor:
            value: torch.Tensor = function(*(fs.Sharded(x, spec) for x in xs)).local
            return value.sin().sum()

        values = [f(*leaves) for f in (loss, torch.compile(loss, backend="aot_eager"))]
        torch.testing.assert_close(*values, rtol=1e-10, atol=1e-10)
        grads = [torch.autograd.grad(y, leaves, allow_unused=True) for y in values]
        torch.testing.assert_close(
            *[[g for g in row if g is not None] for row in grads], rtol=1e-10, atol=1e-10
        )


def test_ring_equals_that_of_dtensor() -> None:
    run_ranks(4, against_dtensor)


@pytest.mark.slow
def test_rings_and_halos_compile() -> None:
    run_ranks(4, compiled_on_rank)


def test_bodies_over_uneven_shards_exchange_sizes() -> None:
    run_ranks(4, bodies_on_rank)


def test_rings_on_processes() -> None:
    share = 2 * 2 * 32 * 4 * 8 * 3 // 4
    for sent in run_ranks(4, all_on_rank):
        assert sent == {("ppermute", "cp"): share}


def test_rings_on_a_grid_of_processes() -> None:
    run_ranks(4, on_grid)
