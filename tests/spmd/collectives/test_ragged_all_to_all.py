"""`ragged_all_to_all`: JAX's values, the reverse exchange as gradient, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError
from tests.helpers.spec_grid import random_global
from tests.spmd.collectives.test_collectives import here

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
ROWS = "both must have rows of one shape and dtype"
SENT = "the operands of all ranks must have rows of one shape and dtype"
ONCE = "rows 0..2 of that output must be written at most once"
HOLDS = "the dtype sent must be of the same kind: floating for floating, integer for integer"


def count(name: str) -> str:
    return f"{name} must have a number >= 0 for each of the 2 ranks along the axes"


class Refused(NamedTuple):
    """Arguments of rank i that are refused: lines of what is given, the rule and the fix."""

    name: str
    make: Callable[[int], tuple[Any, ...]]
    lines: list[tuple[str, str, str]]
    wire: torch.dtype | None = None


REFUSED = [
    Refused(
        "one number for two ranks", lambda i: (X, X, [0], [1, 1], [i, i], [1, 1]),
        [("input_offsets=[0]", count("input_offsets"), "input_offsets=[0, 0], say")],
    ),
    Refused(
        "a negative number on one rank",
        lambda i: (X, X, [0, 1], [1, 1], [i, i], [1, 1 - 2 * i]),
        [("on rank 1 along the axes recv_sizes=[1, -1]", count("recv_sizes"),
          "recv_sizes=[0, 0], say")],
    ),
    Refused(
        "no numbers on one rank", lambda i: (X, X, [0, 1], None if i else [1, 1], [i, i], [1, 1]),
        [("on rank 1 along the axes send_sizes=None", count("send_sizes"),
          "send_sizes=[0, 0], say")],
    ),
    Refused(
        "another thing on every rank",
        lambda i: (X, X, [0, 1], [1, 1], [i, i], [[1, 2.5], [1]][i]),
        [("on rank 0 along the axes recv_sizes=[1, 2.5]", count("recv_sizes"),
          "recv_sizes=[0, 0], say"),
         ("on rank 1 along the axes recv_sizes=[1]", count("recv_sizes"),
          "recv_sizes=[0, 0], say")],
    ),
    Refused(
        "sizes without numbers on one rank",
        lambda i: (X, X, [0, 1], torch.ones(2, device="cpu" if i else "meta").long(), [i, i],
                   [1, 1]),
        [("on rank 0 along the axes send_sizes without values, on meta",
          "offsets and sizes must have values: they decide who sends what",
          "give them as lists, or as tensors with values")],
    ),
    Refused(
        "another dtype", lambda i: (X, X.long(), [0, 1], [1, 1], [i, i], [1, 1]),
        [("an operand torch.float32 of shape (3,), an output torch.int64 of shape (3,)", ROWS,
          "operand.new_zeros(rows, *operand.shape[1:]) as the output")],
    ),
    Refused(
        "another shape on one rank, and more rows than there are on the other",
        lambda i: (X, torch.zeros(()) if i else X, [0, 2], [1, 2], [i, i], [1, 1]),
        [("on rank 0 along the axes 2 rows from row 2 on, for rank 1 along the axes",
          "the operand has 3 rows", "check input_offsets and send_sizes"),
         (("on rank 1 along the axes an operand torch.float32 of shape (3,), an output "
          "torch.float32 of shape ()"), ROWS,
          "operand.new_zeros(rows, *operand.shape[1:]) as the output")],
    ),
    Refused(
        "integers on one rank, sent as floating numbers",
        lambda i: (X.long(), X.long(), [0, 1], [1, 1], [i, i], [1, 1]) if i else
        (X, X, [0, 1], [1, 1], [i, i], [1, 1]),
        [("on rank 1 along the axes forward_dtype=torch.bfloat16 of a tensor of torch.int64",
          HOLDS, "leave forward_dtype out, or cast the tensor first")],
        torch.bfloat16,
    ),
    Refused(
        "rows of another dtype on one rank",
        lambda i: (X.to([torch.int32, torch.float32][i]),) * 2 + ([0, 1], [1, 1], [i, i], [1, 1]),
        [(("rows of 1 elements of torch.int32 sent by rank 0 along the axes, of 1 elements of "
          "torch.float32 by rank 1"), SENT, "reshape or cast the operand before")],
    ),
    Refused(
        "wider rows on one rank",
        lambda i: (torch.zeros(3, 2 + i),) * 2 + ([0, 1], [1, 1], [i, i], [1, 1]),
        [(("rows of 2 elements of torch.float32 sent by rank 0 along the axes, of 3 elements of "
          "torch.float32 by rank 1"), SENT, "reshape or cast the operand before")],
    ),
    Refused(
        "more rows awaited than are sent", lambda i: (X, X, [0, 1], [1, 1], [i, i], [1, 2 - i]),
        [("recv_sizes[1]=2 on rank 0 along the axes, to which rank 1 sends 1 rows",
          "recv_sizes[j] on rank i along the axes must be send_sizes[i] on rank j",
          "recv_sizes = fs.all_to_all(send_sizes, axis, 0, 0)")],
    ),
    Refused(
        "rows written twice on one rank", lambda i: (X, X, [0, 1], [1, 1], [0, i], [1, 1]),
        [(("on rank 0 along the axes rows 0..0 for those of rank 1 along the axes, after those of "
          "rank 0 along the axes up to row 0"), ONCE,
          "output_offsets count in the receiver's output")],
    ),
    Refused(
        "rows after the last on one rank",
        lambda i: (X, X, [0, 1], [1, 1], [i, 3 * i], [1, 1]),
        [("on rank 1 along the axes rows 3..3 for those of rank 1 along the axes", ONCE,
          "output_offsets count in the receiver's output")],
    ),
]  # fmt: skip


def text(lines: list[tuple[str, str, str]]) -> str:
    problems = [f"  given: {given}\n  rule:  {rule}\n  fix:   {fix}" for given, rule, fix in lines]
    return "fs.ragged_all_to_all\n" + "\n\n".join(problems)


def refusals(mesh: Mesh) -> list[str]:
    """What this rank of two is told of all that is refused; after each error an exchange runs."""
    found, i = [], here(mesh)
    for _, make, _, wire in REFUSED:
        with pytest.raises(ShardingError) as caught:
            fs.ragged_all_to_all(*make(i), axis_name="i", mesh=mesh, forward_dtype=wire)
        assert caught.value.everywhere
        found.append(str(caught.value))
        rows = torch.tensor([1.0, 2.0]) + 2 * i
        moved = fs.ragged_all_to_all(
            rows, X[:2], [0, 1], [1, 1], [i, i], [1, 1], axis_name="i", mesh=mesh
        )
        assert moved.tolist() == [1 + i, 3 + i]
    return found


def test_all_ranks_are_told_what_is_refused() -> None:
    mesh = Mesh(i=2)
    for found in fs.simulate(mesh, refusals, mesh):
        for each, got in zip(REFUSED, found, strict=True):
            assert got == text(each.lines), each.name


def test_what_is_refused_is_of_no_rank_in_particular() -> None:
    mesh = Mesh(i=2)

    def body(x: torch.Tensor) -> torch.Tensor:
        i = int(fs.axis_index("i"))
        return fs.ragged_all_to_all(x, x, [0, 1], [1, 1 + i], [i, i], [1, 1], axis_name="i")

    f = fs.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    with pytest.raises(ShardingError) as caught:
        f(torch.zeros(4))
    line = "on rank 1 along the axes 2 rows from row 1 on, for rank 1 along the axes"
    rows = (line, "the operand has 2 rows", "check input_offsets and send_sizes")
    assert str(caught.value) == text([rows])
    assert not getattr(caught.value, "__notes__", [])


def test_refused_in_one_group_of_the_mesh() -> None:
    """The ranks of the other groups go on."""
    mesh = Mesh(j=2, i=2)

    def body() -> str:
        i, j = int(fs.axis_index("i", mesh=mesh)), int(fs.axis_index("j", mesh=mesh))
        numbers = [0, 1 + i * j], [1, 1], [i, i], [1, 1]
        try:
            return str(fs.ragged_all_to_all(X[:2], X, *numbers, axis_name="i", mesh=mesh).tolist())
        except ShardingError as error:
            return str(error)

    line = "on rank 1 along the axes 1 rows from row 2 on, for rank 1 along the axes"
    rows = text([(line, "the operand has 2 rows", "check input_offsets and send_sizes")])
    assert fs.simulate(mesh, body) == ["[0.0, 0.0, 0.0]"] * 2 + [rows] * 2
