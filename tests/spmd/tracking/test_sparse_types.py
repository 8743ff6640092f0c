"""Types of sparse and quantized tensors: sparse ones share memory with their values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spmd.tracked_bodies import Body, I, V, run_body

Make = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence warnings that sparse and quantized tensors may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def pairs(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[1, 0], [0, 1]]), values, (2, 2))


def rows(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), values, (2, 2))


def columns(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csc_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), values, (2, 2))


def quantized(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)


def values_of(x: torch.Tensor) -> torch.Tensor:
    return x._values() if x.layout is torch.sparse_coo else x.values()


def states(body: Body) -> list[str]:
    return [result for result, *_ in run_body(body, grad=False)]


SPARSE = pytest.mark.parametrize("make", [pairs, rows, columns])


@SPARSE
def test_sparse_results_have_the_states_of_their_values(make: Make) -> None:
    for want, body in (
        (V, lambda x, w: make(x[0])),
        (V, lambda x, w: values_of(make(x[0]))),
        (V, lambda x, w: make(x[0]).to_dense()),
        (V, lambda x, w: make(w) @ x[0]),
        (I, lambda x, w: make(w) @ torch.eye(2)),
    ):
        assert states(lambda x, w, body=body: body(x, w).to_dense() * 1) == [want] * 2  # type: ignore[misc]


@SPARSE
def test_sparse_tensors_share_memory_with_their_values(make: Make) -> None:
    def values_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(2)
        sparse = make(y)
        y.copy_(x[0])
        return sparse.to_dense()

    def sparse_written(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(2)
        values_of(make(y)).copy_(x[0])
        return y

    for body in (values_written, sparse_written):
        assert states(body) == [V, V]


@pytest.mark.parametrize("make", [pairs, rows])  # PyTorch does not add CSC tensors
def test_written_sparse_tensors_may_have_new_values(make: Make) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sparse = make(torch.zeros(2))
        before = values_of(sparse)
        sparse.mul_(2).add_(make(torch.ones(2)))
        assert str(fs.typeof(before).states) == I
        values_of(sparse).copy_(x[0])
        return sparse.to_dense()

    assert states(body) == [V, V]


@SPARSE
def test_writes_into_outside_values_are_refused(make: Make) -> None:
    outside = make(torch.ones(2))
    body = fs.shard_map(
        lambda x: values_of(outside).copy_(x[0]), mesh=Mesh(x=2), in_specs=P("x"), out_specs=None
    )
    with pytest.raises(ShardingError, match="a write into a tensor of shape"):
        body(torch.zeros(2, 2))
    assert torch.equal(values_of(outside), torch.ones(2))


def test_quantized_and_mkldnn_tensors() -> None:
    for want, body in (
        (V, lambda x, w: quantized(x).dequantize()),
        (V, lambda x, w: quantized(torch.zeros(1, 2)).copy_(x).int_repr()),
        (I, lambda x, w: quantized(w).dequantize()),
        (V, lambda x, w: torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -8, 8)),
        (V, lambda x, w: x.to_mkldnn().to_dense()),
    ):
        assert states(body) == [want] * 2
