"""Ragged exchanges: values and gradients on one rank and by hand, and refused arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import fshard as fs
from fshard import Mesh, ShardingError
from tests.helpers.spec_grid import random_global
from tests.helpers.spmd.collective_cases import this_rank

F64 = torch.float64
MESH = Mesh({"x": 2, "y": 3}, devices=(4, 1, 5, 0, 2, 3))
SIZES = torch.tensor([[2, 0, 3], [1, 1, 0], [0, 4, 2]])  # [from, to]


def exchange_in_reverse(
    operand: torch.Tensor, output: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Exchange rows by `SIZES` along y, written from row 1 on in reverse order of senders."""
    i = int(fs.axis_index("y", **options))
    send, receive = SIZES[i], SIZES[:, i]
    later = SIZES.flip(0).cumsum(0).flip(0) - SIZES  # rows at each receiver from later senders
    return fs.ragged_all_to_all(
        operand, output, send.cumsum(0) - send, send, 1 + later[i], receive, axis_name="y",
        **options,
    )  # fmt: skip


def by_hand(xs: list[torch.Tensor], outs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return `exchange_in_reverse` of the list of a group's tensors."""
    pieces = [x[: int(n.sum())].split(n.tolist()) for x, n in zip(xs, SIZES, strict=True)]
    outputs = []
    for place, out in enumerate(outs):
        rows = torch.cat([piece[place] for piece in pieces[::-1]])
        outputs.append(torch.cat([out[:1], rows, out[1 + len(rows) :]]))
    return outputs


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return random_global((6, 3, 7, 2), F64).requires_grad_(), random_global(
        (6, 3, 8, 2), F64, 1
    ).requires_grad_()


def ragged_on_rank(mesh: Mesh) -> list[torch.Tensor]:
    """Return result, gradients and second gradients of one rank."""
    index = list(mesh.ranks).index(this_rank(mesh))
    x, out = (t[index, 0].detach().requires_grad_() for t in leaves())
    y = exchange_in_reverse(x, out, mesh=mesh)
    first = torch.autograd.grad((y**3).sum(), (x, out), create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), (x, out))
    return [t.detach() for t in (y, *first, *second)]


def ragged_by_hand(mesh: Mesh) -> list[list[torch.Tensor]]:
    """Return the expected values of `ragged_on_rank` for all ranks."""
    n, index_of = mesh.size, {rank: i for i, rank in enumerate(mesh.ranks)}
    xs, outs = ([t[i, 0].detach().requires_grad_() for i in range(n)] for t in leaves())
    ys: dict[int, torch.Tensor] = {}
    for group in mesh.groups("y"):
        members = [index_of[rank] for rank in group]
        results = by_hand([xs[i] for i in members], [outs[i] for i in members])
        ys |= dict(zip(members, results, strict=True))
    first = torch.autograd.grad(
        sum((y**3).sum() for y in ys.values()), (*xs, *outs), create_graph=True
    )
    second = torch.autograd.grad(sum((g**2).sum() for g in first), (*xs, *outs))
    return [[ys[i], first[i], first[n + i], second[i], second[n + i]] for i in range(n)]


X = torch.zeros(3)
ROWS = "both must have rows of one shape and dtype"
SENT = "the operands of all ranks must have rows of one shape and dtype"
ONCE = "rows 0..2 of that output must be written at most once"
HOLDS = "the dtype sent must be of the same kind: floating for floating, integer for integer"


def count(name: str) -> str:
    return f"{name} must have a number >= 0 for each of the 2 ranks along the axes"


class Refused(NamedTuple):
    """Refused arguments of rank i, and (given, rule, fix) of the expected problems."""

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
    """Return this rank's error for each of `REFUSED`; a valid exchange runs after each."""
    outputs, i = [], this_rank(mesh)
    for _, make, _, wire in REFUSED:
        with pytest.raises(ShardingError) as caught:
            fs.ragged_all_to_all(*make(i), axis_name="i", mesh=mesh, forward_dtype=wire)
        assert caught.value.same_on_all_ranks
        outputs.append(str(caught.value))
        rows = torch.tensor([1.0, 2.0]) + 2 * i
        moved = fs.ragged_all_to_all(
            rows, X[:2], [0, 1], [1, 1], [i, i], [1, 1], axis_name="i", mesh=mesh
        )
        assert moved.tolist() == [1 + i, 3 + i]
    return outputs
