"""Results of collectives on simulated ranks: their values, and memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.run.transports.reduce_dtypes import REDUCE, reduced
from fshard.run.transports.simulator import results_of

MESH = fs.Mesh(x=3)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64]


@pytest.mark.parametrize("op", REDUCE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_reduced_equals_the_reduction_of_a_stack(op: str, dtype: torch.dtype, n: int) -> None:
    if dtype.is_complex and op in ("max", "min"):
        pytest.skip("complex numbers have no order")
    generator = torch.Generator().manual_seed(n)
    xs = [torch.randint(0, 4, (2, 3), generator=generator).to(dtype) for _ in range(n)]
    saved = [x.clone() for x in xs]
    results = reduced(xs, op)
    assert results.dtype == dtype
    torch.testing.assert_close(results, REDUCE[op](torch.stack(xs)))
    results.view(torch.uint8).fill_(0)
    assert all(torch.equal(x, item) for x, item in zip(xs, saved, strict=True))


def test_small_floats_are_reduced_as_float32() -> None:
    xs = [torch.tensor([1.0, 256.0], dtype=torch.bfloat16) for _ in range(2)]
    tiny = [torch.tensor([2.0**-8, 1.0], dtype=torch.bfloat16) for _ in range(2)]
    want = torch.tensor([2 + 2.0**-7, 514.0]).to(torch.bfloat16)
    assert torch.equal(reduced([*xs, *tiny], "sum"), want)


def test_extremes_of_nan_are_nan() -> None:
    xs = [torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 2.0]), torch.zeros(2)]
    assert reduced(xs, "max").isnan().all()
    assert reduced(xs, "min").isnan().all()


@pytest.mark.parametrize("kind", ["even", "permutation", "uneven", "empty"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.bool], ids=str)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_all_to_all_equals_the_concatenation_of_pieces(
    kind: str, dtype: torch.dtype, n: int
) -> None:
    sizes = {
        "even": [(3,) * n] * n,
        "permutation": [tuple(4 * int(j == (i + 1) % n) for j in range(n)) for i in range(n)],
        "uneven": [tuple((i + 2 * j) % 3 for j in range(n)) for i in range(n)],
        "empty": [(0,) * n] * n,
    }[kind]
    xs = [(torch.arange(sum(send)) + 10 * i).to(dtype) for i, send in enumerate(sizes)]
    splits = list(zip(sizes, zip(*sizes, strict=True), strict=True))
    results = results_of("all_to_all", None, tuple(range(n)), xs, splits)
    pieces = [x.to(torch.float32).split(send) for x, send in zip(xs, sizes, strict=True)]
    for rank, result in results.items():
        assert result.dtype == dtype
        want = torch.cat([piece[rank] for piece in pieces])
        assert torch.equal(result.to(torch.float32), want)
    versions = [result._version for result in results.values()]
    for result in results.values():
        result.view(torch.uint8).fill_(0)
    writes = [result._version - old for result, old in zip(results.values(), versions, strict=True)]
    assert set(writes) == {1}, "results share a version counter"


def gathered(x: torch.Tensor) -> torch.Tensor:
    return fs.all_gather(x, "x", mesh=MESH, tiled=True)


def summed(x: torch.Tensor) -> torch.Tensor:
    return fs.psum(x, "x", mesh=MESH)


def greatest(x: torch.Tensor) -> torch.Tensor:
    return fs.pmax(x, "x", mesh=MESH)


def scattered(x: torch.Tensor) -> torch.Tensor:
    return fs.psum_scatter(x, "x", mesh=MESH, tiled=True)


ALL = [gathered, summed, greatest, scattered]


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.__name__)
def test_in_place_writes_are_private_to_a_rank(op: Callable[[torch.Tensor], Any]) -> None:
    """Check results and arguments, in any order of the writing ranks."""
    x = torch.arange(3.0)
    want = fs.simulate(MESH, lambda: op(x + fs.axis_index("x", mesh=MESH)))

    def body(first: int) -> Any:
        i = int(fs.axis_index("x", mesh=MESH))
        local = x + i
        saved, y = local.clone(), op(local)
        before = y.clone()
        if i == first:
            y.untyped_storage().fill_(0)
        op(local)  # the others have their turn
        y.add_(i)
        y.untyped_storage().resize_(0)  # frees its memory, and nobody else's
        assert torch.equal(local, saved)
        return before

    for first in range(3):
        for results, item in zip(fs.simulate(MESH, body, first), want, strict=True):
            assert torch.equal(results, item)


def test_results_waited_for_in_another_order() -> None:
    def body() -> Any:
        pending = fs.start(fs.psum, torch.ones(2), "x", mesh=MESH)
        second = fs.psum(torch.ones(2), "x", mesh=MESH)
        return pending.wait().mul_(2).tolist(), second.add_(1).tolist()

    assert fs.simulate(MESH, body) == [([6.0, 6.0], [4.0, 4.0])] * 3


def test_equal_results_share_memory_until_written() -> None:
    """Reads do not copy; a write, also below PyTorch, copies."""

    def body() -> Any:
        i = int(fs.axis_index("x", mesh=MESH))
        y = summed(torch.ones(2))
        z = (y + y).view(2, 1) @ y.view(1, 2)
        summed(y)  # all have read
        if i == 1:
            y.numpy()[:] = 7
        summed(z)
        return y.tolist()

    assert fs.simulate(MESH, body) == [[3.0, 3.0], [7.0, 7.0], [3.0, 3.0]]


def test_a_program_without_steps_is_a_view_of_every_shard() -> None:
    spec = fs.Spec(MESH, fs.P("x"), shape=(6,))
    same = fs.redistribute(spec, spec)
    shards = tuple(torch.full((2,), float(rank), requires_grad=True) for rank in range(3))
    results = same(shards)
    assert [y.data_ptr() for y in results] == [x.data_ptr() for x in shards]
    assert not any(y is x for y, x in zip(results, shards, strict=True))
    results[1].square().sum().backward()
    torch.testing.assert_close(shards[1].grad, torch.full((2,), 2.0))
    assert shards[0].grad is None
    mapped = torch.vmap(lambda x: same((x, x + 1, x + 2))[2])(torch.ones(4, 2))
    torch.testing.assert_close(mapped, torch.full((4, 2), 3.0))
