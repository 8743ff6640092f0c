"""`all_gather_matmul` and `matmul_reduce_scatter`: values, gradients, traffic, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.spec_grid import message

F64 = torch.float64
SIZES = st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)


def pairs_of(specs: list[Spec]) -> list[fs.Sharded]:
    """Return random tensors in these layouts."""
    key = fs.random.key(7)
    values = [
        fs.random.normal(fs.random.fold_in(key, i), spec.shape, dtype=F64)
        for i, spec in enumerate(specs)
    ]
    return [fs.shard(x, spec) for x, spec in zip(values, specs, strict=True)]


def check(body: Any, dense: Any, ins: list[Spec], out: Any, check: Any = "strict") -> None:
    """Compare a body and its first and second derivatives with one device, to 1e-10."""
    mapped = fs.shard_map(body, mesh=ins[0].mesh, in_specs=tuple(ins), out_specs=out, check=check)
    fs.testing.assert_like_one_device(
        mapped, dense, pairs_of(ins), second_order=True, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("dim", [0, 1, 2])
@settings(max_examples=8, deadline=None)
@given(sizes=SIZES, given_sizes=st.booleans(), keep=st.booleans())
def test_gathered_products_equal_one_device(
    dim: int, sizes: list[int], given_sizes: bool, keep: bool
) -> None:
    """Gathered batches, rows, and the dim that is contracted; uneven and empty blocks."""
    n = len(sizes)
    mesh, shape = Mesh(i=n), [2, 3, 4]
    shape[dim] = sum(sizes)
    x = Spec(mesh, P(*[None] * dim, "i"), shape=shape, dtype=F64, sizes={dim: sizes})
    v, w = (Spec(mesh, P(None, "i"), shape=(shape[2], m * n), dtype=F64) for m in (1, 2))
    out = tuple(
        Spec(mesh, P(None, None, "i"), shape=(*shape[:2], m * n), dtype=F64) for m in (1, 2)
    )

    def body(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> Any:
        return fs.all_gather_matmul(
            x, (v, w), "i", axis=dim, sizes=sizes if given_sizes else None, keep_gathered=keep
        )

    check(body, lambda x, v, w: (x @ v, x @ w), [x, v, w], out)


@pytest.mark.parametrize("dim", [0, 1, 2])
@settings(max_examples=8, deadline=None)
@given(sizes=SIZES)
def test_scattered_products_equal_one_device(dim: int, sizes: list[int]) -> None:
    """Scattered batches, rows and columns, of sums over an uneven dim."""
    mesh, shape = Mesh(i=len(sizes)), [2, 3, 4]
    shape[dim] = sum(sizes)
    inner = [size + 1 for size in sizes]
    rows = (*shape[:2], sum(inner))
    x = Spec(mesh, P(None, None, "i"), shape=rows, dtype=F64, sizes={2: inner})
    w = Spec(mesh, P("i"), shape=(sum(inner), shape[2]), dtype=F64, sizes={0: inner})
    out = Spec(mesh, P(*[None] * dim, "i"), shape=shape, dtype=F64, sizes={dim: sizes})

    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fs.matmul_reduce_scatter(x, w, "i", scatter_dimension=dim, sizes=sizes)

    check(body, torch.matmul, [x, w], out)


def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Return Megatron-LM's MLP with a sharded sequence, on two axes and with complex numbers."""
    h = fs.all_gather_matmul(x, up, ("a", "b"))
    return fs.matmul_reduce_scatter(h * h, down, ("a", "b"))


@pytest.mark.parametrize("dtype", [torch.complex128, F64])
def test_products_over_two_axes_and_of_complex_numbers(dtype: torch.dtype) -> None:
    mesh, axes = Mesh(a=2, b=2), ("a", "b")
    xs = [torch.randn(shape, dtype=dtype) for shape in ((8, 3), (3, 8), (8, 5))]
    for x in xs:
        x.requires_grad_()
    specs = P(axes), P(None, axes), P(axes)
    y = fs.shard_map(mlp, mesh=mesh, in_specs=specs, out_specs=P(axes))(*xs)
    expected = (xs[0] @ xs[1]).square() @ xs[2]
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    cotangent = torch.randn_like(y)
    grads = [torch.autograd.grad(z, xs, cotangent) for z in (y, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_blocks_that_move_are_those_of_gathers_and_reductions() -> None:
    """Forward and backward n - 1 blocks; again as many if what is gathered is not kept."""
    mesh, n = Mesh(i=4), 4
    x, w = torch.randn(8, 3, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    gather, sending = (fs.shard_map(
        lambda x, w, keep=keep: fs.all_gather_matmul(x, w, "i", keep_gathered=keep), mesh=mesh,
        in_specs=(P("i"), P(None, "i")), out_specs=P(None, "i"),
    ) for keep in (True, False))  # fmt: skip
    scatter = fs.shard_map(
        lambda y, w: fs.matmul_reduce_scatter(y, w.t(), "i"), mesh=mesh,
        in_specs=(P(None, "i"), P(None, "i")), out_specs=P("i"),
    )  # fmt: skip
    y = torch.randn(8, 8)
    for run, args, backward in ((gather, (x, w), 1), (sending, (x, w), 2), (scatter, (y, w), 1)):
        with fs.comm_log() as log:
            run(*args).sum().backward()
        block = 2 * 3 * 4
        assert log.forward.bytes["ppermute", "i"] == (n - 1) * block
        assert log.backward.bytes["ppermute", "i"] == backward * (n - 1) * block


def test_each_is_the_transpose_of_the_other() -> None:
    """<gather(x) w, y> = <x, scatter(y w^T)> in integers."""
    mesh = Mesh(i=3)
    x, w, y = (torch.randint(-9, 9, shape) for shape in ((6, 4), (4, 9), (6, 9)))
    forward = fs.shard_map(
        lambda x, w: fs.all_gather_matmul(x, w, "i"), mesh=mesh,
        in_specs=(P("i"), P(None, "i")), out_specs=P(None, "i"),
    )(x, w)  # fmt: skip
    back = fs.shard_map(
        lambda y, w: fs.matmul_reduce_scatter(y, w.t(), "i"), mesh=mesh,
        in_specs=(P(None, "i"), P(None, "i")), out_specs=P("i"),
    )(y, w)  # fmt: skip
    assert (forward * y).sum() == (x * back).sum()


def test_transforms_go_around() -> None:
    mesh = Mesh(a=2, b=2)
    mapped = fs.shard_map(
        mlp, mesh=mesh, in_specs=(P(("a", "b")), P(None, ("a", "b")), P(("a", "b"))),
        out_specs=P(("a", "b")),
    )  # fmt: skip
    dense = lambda x, up, down: (x @ up).square() @ down  # noqa: E731
    xs = tuple(torch.randn(shape, dtype=F64) for shape in ((4, 3), (3, 4), (4, 2)))
    tangents = tuple(map(torch.randn_like, xs))
    actual, expected = (torch.func.jvp(f, xs, tangents)[1] for f in (mapped, dense))
    torch.testing.assert_close(actual, expected)
    actual, expected = (torch.func.grad(lambda *x, f=f: f(*x).sum(), (0, 1, 2))(*xs)
                        for f in (mapped, dense))  # fmt: skip
    torch.testing.assert_close(actual, expected)
    batch = torch.randn(3, *xs[0].shape, dtype=F64)
    actual, expected = (torch.func.vmap(f, (0, None, None))(batch, *xs[1:])
                        for f in (mapped, dense))  # fmt: skip
    torch.testing.assert_close(actual, expected)
    actual, expected = (torch.autograd.functional.jacobian(f, xs, vectorize=True)
                        for f in (mapped, dense))  # fmt: skip
    torch.testing.assert_close(actual, expected)


def refused(body: Any, *xs: torch.Tensor) -> str:
    with pytest.raises(fs.ShardingError) as error:
        fs.shard_map(body, mesh=Mesh(i=2), in_specs=P(), out_specs=P("i"))(*xs)
    return str(error.value)


def test_shapes_that_cannot_be_multiplied_are_refused() -> None:
    x, w = torch.randn(4, 3), torch.randn(3, 4)
    gather = lambda x, w: fs.all_gather_matmul(x, w, "i", axis=1)  # noqa: E731
    assert refused(gather, x, w) == message(
        "fs.all_gather_matmul",
        "x of shape (4, 3), torch.float32, and a weight of shape (3, 4), torch.float32",
        "the weight must have 6 rows, the dtype of x",
        "w.t() for the weight of a linear layer, and w.to(x.dtype)",
    )
    scatter = lambda x, w: fs.matmul_reduce_scatter(x, w, "i")  # noqa: E731
    assert "dim 0 of size 3, sizes=None" in refused(scatter, x[:3], w)
    assert "a weight of shape (2, 3, 4)" in refused(scatter, x, w.expand(2, 3, 4))
    assert "no weights" in refused(lambda x: fs.all_gather_matmul(x, (), "i"), x)
