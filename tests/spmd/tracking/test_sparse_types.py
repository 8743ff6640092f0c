"""Types of tensors that are not dense: sparse ones share memory with their parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.spmd.tracking.test_tracking import Body, I, V, run

Make = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """PyTorch warns, once, that sparse and quantised tensors may change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def pairs(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[1, 0], [0, 1]]), values, (2, 2))


def rows(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), values, (2, 2))


def columns(values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_csc_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), values, (2, 2))


def quantised(x: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x, 0.5, 0, torch.qint8)


def held(x: torch.Tensor) -> torch.Tensor:
    return x._values() if x.layout is torch.sparse_coo else x.values()


def states(body: Body) -> list[str]:
    return [each[0] for each in run(body, grad=False)]


SPARSE = pytest.mark.parametrize("make", [pairs, rows, columns])


@SPARSE
def test_what_is_made_of_values_has_their_states(make: Make) -> None:
    for want, body in (
        (V, lambda x, w: make(x[0])),
        (V, lambda x, w: held(make(x[0]))),
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
        held(make(y)).copy_(x[0])
        return y

    for body in (values_written, sparse_written):
        assert states(body) == [V, V]


@pytest.mark.parametrize("make", [pairs, rows])  # PyTorch adds no columns
def test_sparse_tensors_that_are_written_may_hold_other_values(make: Make) -> None:
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        sparse = make(torch.zeros(2))
        before = held(sparse)
        sparse.mul_(2).add_(make(torch.ones(2)))
        assert str(fs.typeof(before).states) == I
        held(sparse).copy_(x[0])
        return sparse.to_dense()

    assert states(body) == [V, V]


@SPARSE
def test_values_from_outside_are_not_written(make: Make) -> None:
    outside = make(torch.ones(2))
    body = fs.shard_map(
        lambda x: held(outside).copy_(x[0]), mesh=Mesh(x=2), in_specs=P("x"), out_specs=None
    )
    with pytest.raises(ShardingError, match="a write into a tensor of shape"):
        body(torch.zeros(2, 2))
    assert torch.equal(held(outside), torch.ones(2))


def test_other_layouts() -> None:
    for want, body in (
        (V, lambda x, w: quantised(x).dequantize()),
        (V, lambda x, w: quantised(torch.zeros(1, 2)).copy_(x).int_repr()),
        (I, lambda x, w: quantised(w).dequantize()),
        (V, lambda x, w: torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -8, 8)),
        (V, lambda x, w: x.to_mkldnn().to_dense()),
    ):
        assert states(body) == [want] * 2
