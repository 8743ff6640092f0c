"""An exchange in which every rank sends every other its own number of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fshard.errors import Problem, fail, raise_if
from fshard.mesh import Axes, Mesh, as_axes
from fshard.run.abstract import is_abstract
from fshard.run.autograd import FinishAll, Shards, apply_linear
from fshard.run.transport import Label, Transport, current_rank, labelled, notify
from fshard.spmd.axes import tracking
from fshard.spmd.graphs import as_node
from fshard.spmd.groups import Groups, resolve_groups
from fshard.spmd.movements import all_gather
from fshard.spmd.operands import computed
from fshard.spmd.types import States
from fshard.spmd.wires import Wires, check_wires, sent_in
from fshard.tree import flatten

__all__ = ["ragged_all_to_all"]

NAME = "fs.ragged_all_to_all"
Numbers = Sequence[int] | torch.Tensor


@dataclass(frozen=True, slots=True)
class _Ragged:
    """Rows for every rank of the group, packed in its order, against theirs."""

    mesh: Mesh
    axes: tuple[str, ...]
    send: tuple[int, ...]
    receive: tuple[int, ...]

    @property
    def T(self) -> _Ragged:  # noqa: N802 - the mathematical name
        return _Ragged(self.mesh, self.axes, self.receive, self.send)

    def wider(self, n: int) -> _Ragged:
        return self

    def launch(self, transport: Transport, xs: Shards) -> FinishAll:
        (x,) = xs
        group = self.mesh.group(transport.rank, self.axes)
        width = math.prod(x.shape[1:])
        away = sum(self.send) - self.send[group.index(transport.rank)]
        notify("ragged_all_to_all", self.axes, away * width * x.element_size(), transport.rank)
        send, receive = [n * width for n in self.send], [n * width for n in self.receive]
        moved = transport.all_to_all(x.reshape(-1), send, receive, group)
        shape = (sum(self.receive), *x.shape[1:])
        return lambda: (moved().reshape(shape),)


class _Numbers(NamedTuple):
    """The four rows of numbers, one number per rank in each."""

    input_offsets: Any
    send_sizes: Any
    output_offsets: Any
    recv_sizes: Any


@as_node
def ragged_all_to_all(
    operand: torch.Tensor,
    output: torch.Tensor,
    input_offsets: Numbers,
    send_sizes: Numbers,
    output_offsets: Numbers,
    recv_sizes: Numbers,
    *,
    axis_name: Axes,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """`output` with rows of everyone's `operand` written into it: a new tensor.

    `jax.lax.ragged_all_to_all`, PyTorch's `all_to_all_single` with split sizes. Rank j gets
    `send_sizes[j]` rows of `operand` from `input_offsets[j]` on, and has them in its result from
    `output_offsets[j]` on: that is a row of the receiver's. `recv_sizes[j]` rows come from rank
    j. The ranks first tell each other their offsets and sizes, in a small `all_gather`.
    Transpose: the reverse exchange for `operand`; for `output` zeros where rows were written.
    Rows are sent in `forward_dtype`, in the transpose in `backward_dtype`; they have the dtype
    of `operand` where they arrive. Raises `ShardingError` for rows that do not exist, sizes on
    which two ranks do not agree, rows of the result that are written twice, and floating dtypes
    of integers. Under `torch.compile` the sizes and `input_offsets` are lists of numbers, and what
    the ranks tell each other is not checked.

    >>> import fshard as fs
    >>> def keep_one_send_one(x):
    ...     i = fs.axis_index("i")
    ...     return ragged_all_to_all(x, torch.zeros(2), [0, 1], [1, 1], [i, i], [1, 1],
    ...                              axis_name="i")
    >>> f = fs.shard_map(keep_one_send_one, mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([1., 3., 2., 4.])
    """
    where, axes = resolve_groups(axis_name, mesh, axis_index_groups, NAME)
    wires = forward_dtype, backward_dtype
    check_wires(NAME, operand.dtype, wires)
    numbers = input_offsets, send_sizes, output_offsets, recv_sizes

    def exchange(operand: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return _exchange(operand, output, _Numbers(*numbers), where, axes, wires)

    tracker = tracking()
    if tracker is None:
        return exchange(operand, output)
    varying = States.varying(as_axes(axis_name))
    told = [each for each in flatten(numbers)[0] if isinstance(each, torch.Tensor)]
    return computed(tracker, NAME, (operand, output), told, varying, exchange)


def _exchange(
    operand: torch.Tensor,
    output: torch.Tensor,
    numbers: _Numbers,
    where: Mesh,
    axes: tuple[str, ...],
    wires: Wires,
) -> torch.Tensor:
    input_offsets, send_sizes, output_offsets, recv_sizes = numbers
    n = where.axis_size(axes)
    # In a graph of torch.compile the offsets that are told are no numbers yet: nobody checks them.
    in_graph = torch.compiler.is_compiling()
    offsets: Numbers = (0,) * n if in_graph else output_offsets
    rows = _read((input_offsets, send_sizes, offsets, recv_sizes), n)
    _check_rows(operand, output, rows)
    if is_abstract(operand):
        starts = torch.zeros(n, dtype=torch.int64, device=operand.device)
    else:
        given = output_offsets if in_graph else rows.output_offsets
        heights = (output.shape[0],) * n
        columns = given, rows.send_sizes, rows.recv_sizes, heights
        mine = torch.stack([_column(each, output) for each in columns], 1)
        told = all_gather(mine, axes, mesh=where)  # [from, to]
        if not in_graph:
            _agree([[_Told(*each) for each in row] for row in told.tolist()])
        rank = current_rank(where, NAME).rank
        starts = told[:, where.group(rank, axes).index(rank), 0]
    outgoing = zip(rows.input_offsets, rows.send_sizes, strict=True)
    packed = torch.cat([operand.narrow(0, at, size) for at, size in outgoing])
    op = sent_in(_Ragged(where, axes, rows.send_sizes, rows.recv_sizes), wires)
    with labelled(Label(NAME, where)):
        (moved,) = apply_linear(op, (packed,), everywhere=False)
    at = [torch.arange(size, device=output.device) for size in rows.recv_sizes]
    return output.index_copy(0, torch.cat([a + s for a, s in zip(at, starts, strict=True)]), moved)


def _column(numbers: Numbers, like: torch.Tensor) -> torch.Tensor:
    """Numbers, or tensors of one each, as a tensor."""
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.stack([torch.as_tensor(number) for number in numbers])
    return numbers.to(like.device, torch.int64)


def _read(given: tuple[Numbers, ...], n: int) -> _Numbers:
    """The numbers as Python's; raises unless there is one for each of the n ranks."""
    problems = []
    found: list[tuple[int, ...]] = []
    for name, each in zip(_Numbers._fields, given, strict=True):
        if isinstance(each, torch.Tensor) and (torch.compiler.is_compiling() or is_abstract(each)):
            fail(
                NAME,
                f"{name} without numbers, on {each.device}",
                "offsets and sizes decide who sends what",
                "give them as lists, or as tensors with numbers",
            )
        numbers = tuple(int(number) for number in each)
        found.append(numbers)
        if len(numbers) != n or min(numbers) < 0:
            rule = f"{name} has a number of at least 0 for each of the {n} ranks along the axes"
            problems.append(Problem(f"{name}={list(numbers)}", rule, f"{name}={[0] * n}, say"))
    raise_if(NAME, problems)
    return _Numbers(*found)


def _check_rows(operand: torch.Tensor, output: torch.Tensor, rows: _Numbers) -> None:
    problems = []
    if operand.dtype != output.dtype or operand.shape[1:] != output.shape[1:] or not operand.ndim:
        problems.append(
            Problem(
                f"an operand {operand.dtype} of shape {tuple(operand.shape)}, an output "
                f"{output.dtype} of shape {tuple(output.shape)}",
                "both are rows of one shape and dtype",
                "operand.new_zeros(rows, *operand.shape[1:]) as the output",
            )
        )
    else:
        outgoing = zip(rows.input_offsets, rows.send_sizes, strict=True)
        problems += [
            Problem(
                f"{size} rows from row {at} on, for rank {place} along the axes",
                f"the operand has {operand.shape[0]} rows",
                "check input_offsets and send_sizes",
            )
            for place, (at, size) in enumerate(outgoing)
            if at + size > operand.shape[0]
        ]
    raise_if(NAME, problems)


class _Told(NamedTuple):
    """What one rank says of its exchange with another: rows, and how many its output has."""

    output_offset: int
    send_size: int
    recv_size: int
    height: int


def _agree(told: list[list[_Told]]) -> None:
    """Raise where what the ranks told does not fit, on all of them: `told[from][to]`."""
    problems = [
        Problem(
            f"recv_sizes[{sender}]={row[sender].recv_size} on rank {place} along the axes, to "
            f"which rank {sender} sends {told[sender][place].send_size} rows",
            "recv_sizes[j] on rank i along the axes is send_sizes[i] on rank j",
            "recv_sizes = fs.all_to_all(send_sizes, axis, 0, 0)",
        )
        for place, row in enumerate(told)
        for sender in range(len(told))
        if row[sender].recv_size != told[sender][place].send_size
    ]
    for place, row in enumerate(told):
        problems += _overlaps(place, row[place].height, [each[place] for each in told])
    raise_if(NAME, problems)


def _overlaps(place: int, height: int, incoming: list[_Told]) -> list[Problem]:
    """The rows that one rank is sent which its output does not have, or has from another."""
    problems = []
    end, last = 0, ""
    for sender in sorted(range(len(incoming)), key=lambda each: incoming[each]):
        at, size = incoming[sender][:2]
        who = f"those of rank {sender} along the axes"
        if size and (at < end or at + size > height):
            rule = f"rows 0..{height - 1} of that output are written at most once"
            also = f", after {last} up to row {end - 1}" if at < end else ""
            given = f"on rank {place} along the axes rows {at}..{at + size - 1} for {who}{also}"
            problems.append(Problem(given, rule, "output_offsets count in the receiver's output"))
        if size:
            end, last = max(end, at + size), who
    return problems
