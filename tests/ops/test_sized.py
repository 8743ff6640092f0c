"""Operations with a stated size equal PyTorch's, padded or truncated, in every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.ops.core.call import SIZED_CALLS
from tests.helpers.spec_grid import message

MESH = fs.Mesh(dp=2, tp=2)
Values = tuple[torch.Tensor, ...]


def padded(x: torch.Tensor, size: int, fill: Any) -> torch.Tensor:
    return torch.cat([x[:size], x.new_full((max(size - len(x), 0),), fill)])


def matrix(rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-2, 4, (rows, 4), generator=generator).double()


def outputs(x: torch.Tensor, size: int) -> Values:
    """Return the results of all functions."""
    index = x.flatten().long()
    return (
        *fs.nonzero(x, size=size, fill_value=(9, -1)),
        fs.masked_select(x, x > 1, size=size, fill_value=-5),
        *fs.unique(
            x, size=size, fill_value=7, return_index=True, return_inverse=True, return_counts=True
        ),
        fs.bincount(index, length=size),
        fs.bincount(index, x.flatten(), length=size),
    )


def expected_outputs(x: torch.Tensor, size: int) -> Values:
    """Return the results of PyTorch's functions, truncated and padded."""
    rows, columns = x.nonzero(as_tuple=True)
    values, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    firsts = torch.stack([(x.flatten() == value).nonzero()[0, 0] for value in values])
    index, flat = x.flatten().long().clamp(min=0), x.flatten()
    return (
        padded(rows, size, 9),
        padded(columns, size, -1),
        padded(x[x > 1], size, -5),
        padded(values, size, 7),
        padded(firsts, size, int(firsts[0])),
        inverse,
        padded(counts, size, 0),
        padded(torch.bincount(index), size, 0),
        padded(torch.bincount(index, flat), size, 0),
    )


@pytest.mark.parametrize("size", [0, 1, 3, 40])
def test_results_are_those_of_torch_truncated_and_padded(size: int) -> None:
    x = matrix()
    torch.testing.assert_close(outputs(x, size), expected_outputs(x, size))


@pytest.mark.parametrize("partition", [P(), P("dp"), P(None, "tp"), P(("dp", "tp")), P("dp", "tp")])
def test_partitioned_results_equal_one_device(partition: P) -> None:
    x = matrix()
    part = fs.partition(lambda x: outputs(x + 0, 5), mesh=MESH, in_specs=partition)
    torch.testing.assert_close(part(x), expected_outputs(x, 5))


def test_partitioned_operations_send_less_than_a_gather_of_the_mask() -> None:
    x = torch.arange(1024.0)
    run = fs.partition(lambda x: fs.bincount(x.long(), x, length=9), mesh=MESH, in_specs=P("dp"))
    assert run.trace(x).cost().bytes_sent == 0
    run = fs.partition(lambda x: fs.masked_select(x, x > 3, size=9), mesh=MESH, in_specs=P("dp"))
    assert run.trace(x).cost().bytes_sent < 512
    assert [str(spec) for spec in run.trace(x).out_specs] == ["f32[9]{unreduced: dp}"]


def test_gradients_of_selected_values_and_weights() -> None:
    def loss(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        x = matrix().requires_grad_()
        return torch.autograd.grad((run(x) * torch.arange(1, 9)).sum(), x)[0]

    def sized(x: torch.Tensor) -> torch.Tensor:
        weights = fs.bincount(x.detach().flatten().long(), x.sin().flatten(), length=4)
        return torch.cat([fs.masked_select(x, x > 1, size=4), weights])

    def dynamic(x: torch.Tensor) -> torch.Tensor:
        index = x.detach().flatten().long().clamp(min=0)
        return torch.cat(
            [x[x > 1][:4], torch.zeros(4).double().index_add(0, index, x.sin().flatten())]
        )

    wanted = loss(dynamic)
    assert wanted.count_nonzero() == wanted.numel()
    torch.testing.assert_close(loss(sized), wanted)
    torch.testing.assert_close(loss(fs.partition(sized, mesh=MESH, in_specs=P("dp"))), wanted)
    jacobian = torch.func.jacrev(lambda x: fs.masked_select(x, x > 1, size=3))(matrix())
    assert jacobian.sum() == 3


def test_pairs_by_apply() -> None:
    x = matrix()
    pair = fs.shard(x, fs.Spec(MESH, P("dp"), shape=x.shape, dtype=x.dtype))
    results = fs.apply(outputs, pair, 5, mode="auto")
    torch.testing.assert_close(tuple(map(fs.unshard, results)), expected_outputs(x, 5))


@pytest.mark.parametrize("check", [True, False])
def test_mapped_bodies_select_from_their_shards(check: bool) -> None:
    x = matrix(8)
    specs: Any = {"in_specs": P("dp"), "out_specs": P("dp")}
    run = fs.shard_map(lambda x: outputs(x, 5), mesh=MESH, check=check, **specs)
    shards = zip(*(expected_outputs(shard, 5) for shard in x.chunk(2)), strict=True)
    torch.testing.assert_close(run(x), tuple(torch.cat(shard) for shard in shards))


@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_vmap() -> None:
    x = matrix(8).reshape(2, 4, 4)
    rows = zip(*(expected_outputs(row, 5) for row in x), strict=True)
    results = torch.func.vmap(lambda x: outputs(x, 5))(x)
    torch.testing.assert_close(results, tuple(map(torch.stack, rows)))


def test_compiled_without_graph_breaks() -> None:
    x = matrix()
    run = torch.compile(lambda x: outputs(x, 5), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(x), expected_outputs(x, 5))


def test_unique_counts_nans_as_equal() -> None:
    x = torch.tensor([torch.nan, 1.0, torch.nan, -1.0])
    values, counts = fs.unique(x, size=4, return_counts=True)
    expected = torch.tensor([-1.0, 1.0, torch.nan, -1.0])
    torch.testing.assert_close(values, expected, equal_nan=True)
    assert counts.tolist() == [1, 1, 2, 0]
    assert fs.unique(torch.tensor([True, False, True]), size=2).tolist() == [False, True]


def test_tensors_without_elements() -> None:
    x = torch.zeros(0, 3)
    assert [index.tolist() for index in fs.nonzero(x, size=2)] == [[0, 0], [0, 0]]
    assert fs.masked_select(x, x > 0, size=2, fill_value=4).tolist() == [4.0, 4.0]
    assert fs.bincount(torch.zeros(0).long(), length=2).tolist() == [0, 0]
    with pytest.raises(ShardingError, match="x must have an element"):
        fs.unique(x, size=2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x: fs.nonzero(x, size=-1),
            message(
                "fs.nonzero",
                "size=-1",
                "size must be an int of 0 or more, known before the run",
                "size=8; further elements are left out",
            ),
        ),
        (
            lambda x: fs.nonzero(x, size=3, fill_value=(1, 2)),
            message(
                "fs.nonzero",
                "fill_value of 2 items for a tensor of 1 dims",
                "fill_value must be an int, or have an item for every dim",
                "fill_value=0",
            ),
        ),
        (
            lambda x: fs.nonzero(x[0], size=1),
            message(
                "fs.nonzero", "a tensor of 0 dims", "x must have one dim or more", "x.reshape(1)"
            ),
        ),
        (
            lambda x: fs.masked_select(x, x, size=3),
            message(
                "fs.masked_select", "a mask of torch.float32", "mask must be of bools", "mask != 0"
            ),
        ),
        (
            lambda x: fs.bincount(x, length=3),
            message(
                "fs.bincount",
                "a tensor of torch.float32 of shape (3,)",
                "x must be of ints and have one dim",
                "x.long().flatten()",
            ),
        ),
        (
            lambda x: fs.unique(x, size=x.max()),
            message(
                "fs.unique",
                "size=tensor(1.)",
                "size must be an int of 0 or more, known before the run",
                "size=8; further elements are left out",
            ),
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[torch.Tensor], Any], text: str) -> None:
    with pytest.raises(ShardingError) as error:
        call(torch.ones(3))
    assert str(error.value) == text


DYNAMIC: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "nonzero": (lambda x: x.nonzero(as_tuple=True), lambda x, n: fs.nonzero(x, size=n)),
    "masked_select": (
        lambda x: x.masked_select(x > 0),
        lambda x, n: fs.masked_select(x, x > 0, size=n),
    ),
    "_unique2": (torch.unique, lambda x, n: fs.unique(x, size=n)),
    "bincount": (
        lambda x: torch.bincount(x.flatten().long() + 2),
        lambda x, n: fs.bincount(x.flatten().long() + 2, length=n),
    ),
    "repeat_interleave": (
        lambda x: torch.repeat_interleave(x.flatten(), x.flatten().long() + 2),
        lambda x, n: torch.repeat_interleave(x.flatten(), x.flatten().long() + 2, output_size=n),
    ),
    "linalg_lstsq": (
        lambda x: torch.linalg.lstsq(x, x[:, :1]).solution,
        lambda x, n: torch.linalg.pinv(x) @ x[:, :1],
    ),
}


@pytest.mark.parametrize("name", SIZED_CALLS)
def test_refused_operations_name_another_form(name: str) -> None:
    """A partitioned function with the other form returns what the operation does."""
    dynamic, sized = DYNAMIC[name]
    x = matrix()
    with pytest.raises(ShardingError) as error:
        fs.partition(dynamic, mesh=MESH, in_specs=P("dp"))(x)
    assert f"fix:   {SIZED_CALLS[name]};" in str(error.value)
    expected = dynamic(x)
    size = len(expected[0] if isinstance(expected, tuple) else expected)
    part = fs.partition(lambda x: sized(x, size), mesh=MESH, in_specs=P("dp"))
    torch.testing.assert_close(part(x), expected)
