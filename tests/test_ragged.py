"""`ragged_all_to_all`: JAX's values, the reverse exchange as gradient, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers import random_global
from tests.test_collectives import here

F64 = torch.float64


def test_values_of_jax() -> None:
    """The example in the documentation of `jax.lax.ragged_all_to_all`."""
    mesh = Mesh(i=2)
    given = [
        ([1, 2, 2], [0, 1], [1, 2], [0, 0], [1, 1]),
        ([3, 4, 0], [0, 1], [1, 1], [1, 2], [2, 1]),
    ]

    def body() -> Any:
        operand, *numbers = given[here(mesh)]
        output = torch.zeros(4, dtype=torch.int64)
        tensors = [torch.tensor(each) for each in numbers]
        return fs.ragged_all_to_all(
            torch.tensor(operand), output, *tensors, axis_name="i", mesh=mesh
        ).tolist()

    with fs.comm_log() as log:
        assert fs.simulate(mesh, body) == [[1, 3, 0, 0], [2, 2, 4, 0]]
    assert dict(log.counts) == {("all_gather", "i"): 1, ("ragged_all_to_all", "i"): 1}
    assert log.bytes["ragged_all_to_all", "i"] == 2 * 8


MESH = Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3))
SIZES = torch.tensor([[2, 0, 3], [1, 1, 0], [0, 4, 2]])  # [from, to]


def shuffled(operand: torch.Tensor, output: torch.Tensor, **options: Any) -> torch.Tensor:
    """Rows by `SIZES` along y, written from row 1 on, in reverse order of their senders."""
    i = int(fs.axis_index("y", **options))
    send, receive = SIZES[i], SIZES[:, i]
    later = SIZES.flip(0).cumsum(0).flip(0) - SIZES  # rows at each receiver from later senders
    return fs.ragged_all_to_all(
        operand, output, send.cumsum(0) - send, send, 1 + later[i], receive, axis_name="y",
        **options,
    )  # fmt: skip


def by_hand(xs: list[torch.Tensor], outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same on the list of a group's tensors."""
    pieces = [x[: int(n.sum())].split(n.tolist()) for x, n in zip(xs, SIZES, strict=True)]
    found = []
    for place, out in enumerate(outs):
        rows = torch.cat([piece[place] for piece in pieces[::-1]])
        found.append(torch.cat([out[:1], rows, out[1 + len(rows) :]]))
    return found


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return random_global((6, 3, 7, 2), F64).requires_grad_(), random_global(
        (6, 3, 8, 2), F64, 1
    ).requires_grad_()


def ragged_on_rank(mesh: Mesh) -> list[torch.Tensor]:
    """Result, gradients and second gradients of one rank."""
    place = list(mesh.ranks).index(here(mesh))
    x, out = (t[place, 0].detach().requires_grad_() for t in leaves())
    y = shuffled(x, out, mesh=mesh)
    first = torch.autograd.grad((y**3).sum(), (x, out), create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), (x, out))
    return [t.detach() for t in (y, *first, *second)]


def ragged_by_hand(mesh: Mesh) -> list[list[torch.Tensor]]:
    places = {rank: at for at, rank in enumerate(mesh.ranks)}
    xs, outs = ([t[at, 0].detach().requires_grad_() for at in range(6)] for t in leaves())
    ys: dict[int, torch.Tensor] = {}
    for group in mesh.groups("y"):
        at = [places[rank] for rank in group]
        ys |= dict(zip(at, by_hand([xs[i] for i in at], [outs[i] for i in at]), strict=True))
    first = torch.autograd.grad(
        sum((y**3).sum() for y in ys.values()), (*xs, *outs), create_graph=True
    )
    second = torch.autograd.grad(sum((g**2).sum() for g in first), (*xs, *outs))
    return [[ys[i], first[i], first[6 + i], second[i], second[6 + i]] for i in range(6)]


def test_gradients() -> None:
    found = fs.simulate(MESH, ragged_on_rank, MESH)
    for got, want in zip(found, ragged_by_hand(MESH), strict=True):
        torch.testing.assert_close(got, [t.detach() for t in want])


def test_of_global_tensors_and_in_groups() -> None:
    mesh = Mesh(y=3)
    x, out = (t[:3, 0].flatten(0, 1) for t in leaves())
    f = fs.shard_map(shuffled, mesh=mesh, in_specs=P("y"), out_specs=P("y"))
    y = f(x, out)
    torch.testing.assert_close(y, torch.cat(by_hand(list(x.chunk(3)), list(out.chunk(3)))))

    def alone() -> Any:
        v = torch.arange(3.0)
        return fs.ragged_all_to_all(
            v, 0 * v, [1], [2], [0], [2], axis_name="y", axis_index_groups=[[0], [2], [1]],
            mesh=mesh,
        ).tolist()  # fmt: skip

    assert fs.simulate(mesh, alone) == [[1, 2, 0]] * 3


def test_meta_tensors() -> None:
    x, out = torch.empty(3, 2, device="meta"), torch.empty(7, 2, device="meta")
    numbers = ([0, 1], [1, 2], [0, 0], [4, 1])
    y = fs.ragged_all_to_all(x, out, *numbers, axis_name="i", mesh=Mesh(i=2))
    assert (tuple(y.shape), y.device.type) == ((7, 2), "meta")
    lost = torch.empty(2, device="meta", dtype=torch.int64)
    with pytest.raises(ShardingError, match="send_sizes without numbers"):
        fs.ragged_all_to_all(x, out, [0, 1], lost, *numbers[2:], axis_name="i", mesh=Mesh(i=2))


X = torch.zeros(3)
REFUSED: list[tuple[Callable[[int], Any], str]] = [
    (lambda i: (X, X, [0], [1, 1], [0, 0], [1, -1]), "input_offsets=[0]"),
    (lambda i: (X, X, [0, 0], [1, 1], [0, 0], [1, -1]), "recv_sizes has a number of at least 0"),
    (lambda i: (X, X.long(), [0, 0], [1, 1], [0, 0], [1, 1]), "both are rows of one shape"),
    (lambda i: (X, X, [0, 2], [1, 2], [0, 0], [1, 2]), "2 rows from row 2 on, for rank 1"),
    (
        lambda i: (X, X, [0, 1], [1, 1], [i, i], [1, 2]),
        "recv_sizes[1]=2 on rank 0 along the axes",
    ),
    (lambda i: (X, X, [0, 1], [1, 1], [0, 0], [1, 1]), "rank 0 along the axes rows 0..0 for"),
    (lambda i: (X, X, [0, 1], [1, 1], [i, 3 + i], [1, 1]), "rows 0..2 of that output are written"),
]


@pytest.mark.parametrize(("make", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_is_refused(make: Callable[[int], Any], text: str) -> None:
    mesh = Mesh(i=2)

    def body() -> Any:
        return fs.ragged_all_to_all(*make(here(mesh)), axis_name="i", mesh=mesh)

    with pytest.raises(ShardingError) as caught:
        fs.simulate(mesh, body)
    assert text in str(caught.value)
