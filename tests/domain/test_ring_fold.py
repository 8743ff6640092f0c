"""`ring_fold`: the fold on every rank, its gradients, its traffic, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec

F64 = torch.float64


def potential(y: torch.Tensor, index: int, x: torch.Tensor) -> Any:
    """Return sums over a block of y: of a function of the distances, and of their exponentials."""
    if not len(y):
        return None
    distances = (x[:, None] - y).square().sum(-1)
    return distances.sin().sum(1), distances.neg().logsumexp(1)


def add(a: Any, b: Any) -> Any:
    return a[0] + b[0], torch.logaddexp(a[1], b[1])


def pull(grads: Any, result: Any, y: torch.Tensor, index: int, x: torch.Tensor) -> Any:
    """Return the gradients of one block by hand, from the result over all blocks."""
    offsets = x[:, None] - y
    distances = offsets.square().sum(-1)
    by_distance = grads[0][:, None] * distances.cos()
    by_distance = by_distance - grads[1][:, None] * (-distances - result[1][:, None]).exp()
    by_offset = 2 * by_distance[..., None] * offsets
    return -by_offset.sum(0), (by_offset.sum(1),)


def body(sizes: tuple[int, ...] | None, **options: Any) -> Any:
    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        init = x.new_zeros(len(x)), x.new_full((len(x),), -1e4)
        return fs.domain.ring_fold(
            init, potential, add, y, "i", operands=(x,), sizes=sizes, **options
        )

    return run


def on_ring(sizes: tuple[int, ...], rows: int, **options: Any) -> Any:
    """Return the fold on pairs, and the specs of its arguments."""
    mesh = Mesh(i=len(sizes))
    specs = [
        Spec(mesh, P("i"), shape=(rows, 2), dtype=F64, uneven="chunk"),
        Spec(mesh, P("i"), shape=(sum(sizes), 2), dtype=F64, sizes={0: sizes}),
    ]
    out = Spec(mesh, P("i"), shape=(rows,), dtype=F64, uneven="chunk")
    mapped = fs.shard_map(body(sizes, **options), mesh=mesh, in_specs=tuple(specs), out_specs=out)
    return mapped, specs


@pytest.mark.parametrize("pulled", [False, True])
@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4), rows=st.integers(1, 5))
def test_fold_equals_one_device(sizes: list[int], rows: int, pulled: bool) -> None:
    """Blocks of all sizes, empty ones included; values and two orders of gradients."""
    sizes = [*sizes, 1]
    mapped, specs = on_ring(tuple(sizes), rows, pull=pull if pulled else None)
    key = fs.random.key(sum(sizes))
    pairs = [fs.shard(fs.random.normal(key, spec.shape, dtype=F64), spec) for spec in specs]
    fs.testing.assert_like_one_device(
        mapped, lambda x, y: potential(y, 0, x), pairs, second_order=True, rtol=1e-10, atol=1e-10
    )


def test_ring_sends_all_blocks_but_one() -> None:
    """Forward (p - 1) blocks a rank; backward the blocks again, and as many gradients."""
    sizes = (4, 0, 3, 5)
    mapped, specs = on_ring(sizes, 8, pull=pull)
    x, y = (fs.random.normal(fs.random.key(1), s.shape, dtype=F64).requires_grad_() for s in specs)
    pairs = [fs.shard(x, specs[0]), fs.shard(y, specs[1])]
    with fs.comm_log() as log:
        first, second = mapped(*pairs)
        total = fs.unshard(first).sum() + fs.unshard(second).sum()
        torch.autograd.grad(total, [x, y])
    # The busiest rank forwards all blocks but that of the rank after it.
    busiest = max(sum(sizes) - sizes[(i + 1) % 4] for i in range(4)) * 2 * 8
    assert log.forward.counts["ppermute", "i"] == 3
    assert log.forward.bytes["ppermute", "i"] == busiest
    assert log.backward.counts["ppermute", "i"] == 6


def test_steps_that_add_nothing_are_skipped() -> None:
    """A step that returns None merges nothing, and its block has no gradient from it."""
    mesh = Mesh(i=3)

    def run(x: torch.Tensor) -> torch.Tensor:
        me = int(fs.axis_index("i"))

        def step(y: torch.Tensor, index: int, x: torch.Tensor) -> torch.Tensor | None:
            return None if index > me else x * y

        return fs.domain.ring_fold(torch.zeros_like(x), step, torch.add, x, "i", operands=(x,))

    mapped = fs.shard_map(run, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check=False)
    x = fs.shard(torch.randn(3, dtype=F64), mesh, P("i"))
    fs.testing.assert_like_one_device(
        mapped, lambda x: x * x.cumsum(0), (x,), second_order=True, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("n", [2, 4])
def test_cotangents_are_not_written(n: int) -> None:
    """The gradient of a block is the cotangent itself, and gradients that arrive are added up."""
    mesh = Mesh(i=n)

    def run(x: torch.Tensor) -> torch.Tensor:
        step = lambda y, index: y  # noqa: E731
        return fs.domain.ring_fold(torch.zeros_like(x), step, torch.add, x, "i")

    mapped = fs.shard_map(run, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    x = torch.randn(2 * n, dtype=F64, requires_grad=True)
    pair = mapped(fs.shard(x, mesh, P("i")))
    cotangents = [torch.randn(2, dtype=F64) for _ in range(n)]
    before = [c.clone() for c in cotangents]
    (grad,) = torch.autograd.grad(list(pair.local), x, cotangents)
    assert all(map(torch.equal, cotangents, before))
    torch.testing.assert_close(grad, torch.stack(before).sum(0).repeat(n))


def test_transforms_go_around() -> None:
    mapped, specs = on_ring((3, 1), 4)
    x, y = (torch.randn(spec.shape, dtype=F64) for spec in specs)
    tangents = torch.randn_like(x), torch.randn_like(y)
    dense = lambda x, y: potential(y, 0, x)[1]  # noqa: E731
    first = lambda x, y: mapped(x, y)[1]  # noqa: E731
    actual = torch.func.jvp(first, (x, y), tangents)[1]
    torch.testing.assert_close(actual, torch.func.jvp(dense, (x, y), tangents)[1])
    rows = torch.randn(3, 4, 2, dtype=F64)
    actual = torch.func.vmap(first, (0, None))(rows, y)
    torch.testing.assert_close(actual, torch.func.vmap(dense, (0, None))(rows, y))


def error(run: Any, *xs: torch.Tensor) -> str:
    mapped = fs.shard_map(run, mesh=Mesh(i=2), in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ShardingError) as raised:
        mapped(*xs)
    return str(raised.value)


def test_errors_name_sizes_and_closures() -> None:
    x = torch.randn(4, 2, dtype=F64)
    assert "sizes must be 2 numbers of at least 0" in error(body((2, 1, 1)), x, x)
    assert "its dim 0 must have the size 3 that sizes=(3, 1) says" in error(body((3, 1)), x, x)

    def closure(x: torch.Tensor) -> torch.Tensor:
        step = lambda y, index: x * y  # noqa: E731
        return fs.domain.ring_fold(torch.zeros_like(x), step, torch.add, x, "i")

    text = error(closure, x.requires_grad_())
    assert "that requires grad in the closure of step" in text

    def other_tree(x: torch.Tensor) -> Any:
        merge = lambda a, b: (a, b)  # noqa: E731
        return fs.domain.ring_fold(torch.zeros_like(x), lambda y, index: y, merge, x, "i")

    assert "it must return a tree like init" in error(other_tree, x)
