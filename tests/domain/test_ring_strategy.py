"""Ring attention as a strategy: chosen by cost, in partitioned functions and `fs.apply`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Spec

F64 = torch.float64
MESH = Mesh(dp=2, cp=4)
attention: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
# Computation hides what a ring sends over such links; a gather waits for it.
FREE_LAUNCHES = fs.Topology(
    inner=fs.Link(latency=0.0, bandwidth=1e18), launch=0.0, memory=1e15, message=0.0
)


def steps(part: Any, *args: Any) -> str:
    return str(part.explain(*args))


def test_long_sequences_take_the_ring_and_short_ones_do_not() -> None:
    """A ring has more launches, which its computation hides if the sequence is long."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, is_causal=True)

    part = fs.partition(layer, mesh=MESH, in_specs=P("dp", None, "cp"))
    texts = {
        n: steps(
            part, *(torch.empty(2, 2, n, 64, device="meta").requires_grad_() for _ in range(3))
        )
        for n in (64, 65536)
    }
    assert "all_gather" in texts[64]
    assert "ring_attention" not in texts[64]
    assert "ring_attention" in texts[65536]
    assert "→ 3 x ppermute(cp)  in the body" in texts[65536]
    assert "all_gather" not in texts[65536]


def test_short_sequences_take_the_ring_if_all_keys_do_not_fit() -> None:
    """Operands and result of a rank are 80 KiB with all keys, and 32 KiB sharded."""
    small = replace(fs.Topology.node(), capacity=64 * 1024)
    part = fs.partition(attention, mesh=MESH, in_specs=P("dp", None, "cp"), topology=small)
    args = [torch.empty(2, 2, 64, 64, device="meta") for _ in range(3)]
    assert "ring_attention" in steps(part, *args)
    roomy = fs.partition(attention, mesh=MESH, in_specs=P("dp", None, "cp"))
    assert "ring_attention" not in steps(roomy, *args)


def block(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the attention block of a language model: grouped heads, causal."""
    n, width = x.shape[1], x.shape[2]
    q, k, v = (
        (x @ weights[name]).unflatten(-1, (-1, 4)).transpose(1, 2) for name in ("q", "k", "v")
    )
    y = attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + y.transpose(1, 2).reshape(-1, n, width) @ weights["o"]


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (5, 0, 1, 6)])
def test_partitioned_block_equals_one_device(sizes: tuple[int, ...]) -> None:
    shapes = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)}
    key = fs.random.key(0)
    weights = {
        name: fs.random.normal(fs.random.fold_in(key, i), shape, dtype=F64).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }
    x = fs.random.normal(key, (2, 12, 8), dtype=F64).requires_grad_()
    spec = Spec(MESH, P("dp", "cp"), shape=x.shape, dtype=F64, sizes={1: sizes})
    part = fs.partition(
        block, mesh=MESH, in_specs=({name: P() for name in shapes}, spec), topology=FREE_LAUNCHES
    )
    assert "ring_attention" in steps(part, weights, x)
    inputs = [x, *weights.values()]
    y, expected = part(weights, x), block(weights, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    cotangent = fs.random.normal(fs.random.key(5), y.shape, dtype=F64)
    grads = [torch.autograd.grad(out, inputs, cotangent) for out in (y, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_apply_runs_the_ring() -> None:
    spec = Spec(MESH, P("dp", None, "cp"), shape=(2, 2, 8, 4), dtype=F64)
    pairs = [
        fs.shard(fs.random.normal(fs.random.key(i), spec.shape, dtype=F64), spec) for i in range(3)
    ]
    run = fs.on_pairs(attention, mode="auto", topology=FREE_LAUNCHES)
    with fs.comm_log() as log:
        run(*pairs)
    assert dict(log.counts) == {("ppermute", "cp"): 3}
    fs.testing.assert_like_one_device(run, attention, pairs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("partition", [P("dp", "cp"), P("dp"), P("cp")])
def test_local_attention_stays_local(partition: Any) -> None:
    part = fs.partition(attention, mesh=MESH, in_specs=partition, topology=FREE_LAUNCHES)
    text = steps(part, *(torch.empty(4, 4, 8, 4, device="meta") for _ in range(3)))
    assert "ring_attention" not in text
    assert "→" not in text


def test_masks_of_a_strategy_that_is_not_taken_leave_no_values() -> None:
    """Sources of a mask are created while strategies are compared; those of others are undone."""

    def masked(q: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(q.shape[2])
        mask = (rows <= rows[:, None]).expand(q.shape[0], 1, -1, -1)
        return attention(q, q, q, attn_mask=mask).tanh()

    q = torch.randn(4, 2, 8, 4, dtype=F64)
    part = fs.partition(masked, mesh=Mesh(dp=2, cp=2), in_specs=P("dp", None, "cp"),
                        topology=FREE_LAUNCHES)  # fmt: skip
    assert "ring_attention" in steps(part, q)
    torch.testing.assert_close(part(q), masked(q))
