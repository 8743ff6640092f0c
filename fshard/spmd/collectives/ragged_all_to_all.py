"""Exchange in which every rank sends every other rank its own number of rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fshard._util.errors import Problem, raise_if
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.layout.tree import flatten
from fshard.layout.validation import as_ints
from fshard.run.autograd.linear_function import FinishAll, Tensors, apply_linear
from fshard.run.transports.base import Label, Transport, current_rank, labelled
from fshard.run.transports.observed_calls import notify_collective
from fshard.run.transports.shape_only import in_graph, is_abstract
from fshard.spmd.axis_env import current_tracker
from fshard.spmd.collectives.axis_index_groups import Groups, resolve_groups
from fshard.spmd.collectives.compile_node import as_node
from fshard.spmd.collectives.gather_scatter import all_gather
from fshard.spmd.collectives.wire_dtypes import WireDtypes, send_in, wire_dtype_problems
from fshard.spmd.tracking.insert_casts import run_with_casts
from fshard.spmd.types import States

NAME = "fs.ragged_all_to_all"
Counts = Sequence[int] | torch.Tensor
"""One number per rank along the axes."""
DTYPES = sorted(
    (value for value in vars(torch).values() if isinstance(value, torch.dtype)), key=str
)


@dataclass(frozen=True, slots=True)
class RaggedOp:
    """Rows for every rank of the group, concatenated in its order, against the rows from them."""

    mesh: Mesh
    axes: tuple[str, ...]
    send: tuple[int, ...]
    receive: tuple[int, ...]

    @property
    def T(self) -> RaggedOp:  # noqa: N802 - the mathematical name
        """Return the transpose."""
        return RaggedOp(self.mesh, self.axes, self.receive, self.send)

    def wider(self, n: int) -> RaggedOp:
        """Return the operation on tensors with a last dim of size `n` more."""
        return self

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Start the operation on locals of this rank."""
        (x,) = xs
        group = self.mesh.group(transport.rank, self.axes)
        width = math.prod(x.shape[1:])
        num_sent = sum(self.send) - self.send[group.index(transport.rank)]
        nbytes = num_sent * width * x.element_size()
        notify_collective("ragged_all_to_all", self.axes, nbytes, transport.rank, x.dtype)
        send, receive = [n * width for n in self.send], [n * width for n in self.receive]
        finish = transport.all_to_all(x.reshape(-1), send, receive, group)
        shape = (sum(self.receive), *x.shape[1:])
        return lambda: (finish().reshape(shape),)


class RowCounts(NamedTuple):
    """The four offset and size arguments, one number per rank in each."""

    input_offsets: Any
    send_sizes: Any
    output_offsets: Any
    recv_sizes: Any


@as_node
def ragged_all_to_all(
    operand: torch.Tensor,
    output: torch.Tensor,
    input_offsets: Counts,
    send_sizes: Counts,
    output_offsets: Counts,
    recv_sizes: Counts,
    *,
    axis_name: Axes,
    axis_index_groups: Groups = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> torch.Tensor:
    """Exchange rows, a different number for each pair of ranks; return `output` with them.

    Args:
        operand: shape (rows, ...); the rows to send.
        output: shape (rows, ...); the rows that nobody writes stay.
        input_offsets: row j of these n numbers is the first row of `operand` for rank j.
        send_sizes: number of rows for rank j.
        output_offsets: first row for this rank's rows in the result of rank j (the receiver).
        recv_sizes: number of rows from rank j.
        axis_name: the axis, or a tuple of axes, the first one major.
        axis_index_groups: lists of indices along the axes; ranks exchange within their group.
        forward_dtype: dtype in which rows are sent; they arrive in the dtype of `operand`.
        backward_dtype: dtype in which the transpose sends.
        mesh: the mesh of the axes, outside of a `shard_map`.

    Returns:
        A new tensor of the shape of `output`.

    Raises:
        ShardingError: on all ranks along the axes: rows that do not exist or differ in shape or
            dtype, sizes on which two ranks disagree, rows written twice, a floating dtype for
            integers. The ranks exchange offsets, sizes and problems in a small `all_gather` first.
            Under `torch.compile` sizes and `input_offsets` must be lists of ints; offsets of other
            ranks are not checked.

    Transpose: for `operand` the reverse exchange; for `output` zeros where rows were written. After
    `jax.lax.ragged_all_to_all`; PyTorch's `all_to_all_single` with split sizes.

    >>> import torch
    >>> import fshard as fs
    >>> def keep_one_send_one(x):
    ...     i = fs.axis_index("i")
    ...     return fs.ragged_all_to_all(x, torch.zeros(2), [0, 1], [1, 1], [i, i], [1, 1],
    ...                                 axis_name="i")
    >>> f = fs.shard_map(keep_one_send_one, mesh=fs.Mesh(i=2), in_specs=fs.P("i"),
    ...                  out_specs=fs.P("i"))
    >>> f(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([1., 3., 2., 4.])
    """
    owner, axes = resolve_groups(axis_name, mesh, axis_index_groups, NAME)
    wires = forward_dtype, backward_dtype
    counts = RowCounts(input_offsets, send_sizes, output_offsets, recv_sizes)

    def exchange(operand: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return _exchange(operand, output, counts, owner, axes, wires)

    tracker = current_tracker()
    if tracker is None:
        return exchange(operand, output)
    varying = States.varying(as_axes(axis_name))
    tensors = [leaf for leaf in flatten(tuple(counts))[0] if isinstance(leaf, torch.Tensor)]
    return run_with_casts(tracker, NAME, (operand, output), tensors, varying, exchange)


def _exchange(
    operand: torch.Tensor,
    output: torch.Tensor,
    counts: RowCounts,
    mesh: Mesh,
    axes: tuple[str, ...],
    wires: WireDtypes,
) -> torch.Tensor:
    n = mesh.axis_size(axes)
    # In a graph the gathered offsets have no values yet: they are not checked.
    is_recorded = in_graph()
    rows, problems = _read_counts(
        counts._replace(output_offsets=(0,) * n) if is_recorded else counts, n
    )
    problems += _row_problems(operand, output, rows) + wire_dtype_problems(operand.dtype, wires)
    if is_recorded or is_abstract(operand):
        raise_if(NAME, problems)
    starts: Counts = (0,) * n
    if not is_abstract(operand):
        rank = current_rank(mesh, NAME).rank
        index = mesh.index(rank, axes)
        if is_recorded:
            offsets = _as_tensor(counts.output_offsets, output.device)
            starts = all_gather(offsets, axes, mesh=mesh)[:, index]
        else:
            messages = _own_messages(operand, output, rows, wires)
            gathered = _gather_messages(messages, problems, output, mesh, axes)
            starts = [row[index].output_offset for row in gathered]
    outgoing = zip(rows.input_offsets, rows.send_sizes, strict=True)
    payload = torch.cat([operand.narrow(0, start, size) for start, size in outgoing])
    op = send_in(RaggedOp(mesh, axes, rows.send_sizes, rows.recv_sizes), wires)
    with labelled(Label(NAME, mesh)):
        (received,) = apply_linear(op, (payload,), False)
    ranges = [torch.arange(size, device=output.device) for size in rows.recv_sizes]
    indices = torch.cat([r + start for r, start in zip(ranges, starts, strict=True)])
    return output.index_copy(0, indices, received)


def _as_tensor(counts: Counts, device: torch.device) -> torch.Tensor:
    """Return numbers, or 0-dim tensors, as one tensor."""
    if not isinstance(counts, torch.Tensor):
        counts = torch.stack([torch.as_tensor(count) for count in counts])
    return counts.to(device, torch.int64)


def _read_counts(counts: RowCounts, n: int) -> tuple[RowCounts, list[Problem]]:
    """Return the counts as ints, one for each of the n ranks; zeros in the place of others."""
    problems: list[Problem] = []
    rows: list[tuple[int, ...]] = []
    for name, value in counts._asdict().items():
        if isinstance(value, torch.Tensor) and (in_graph() or is_abstract(value)):
            given = f"{name} without values, on {value.device}"
            rule = "offsets and sizes must have values: they decide who sends what"
            fix = "give them as lists, or as tensors with values"
            problems.append(Problem(given, rule, fix))
            rows.append((0,) * n)
            continue
        numbers = as_ints(value)
        if numbers is None or len(numbers) != n or min(numbers) < 0:
            rule = f"{name} must have a number >= 0 for each of the {n} ranks along the axes"
            given = f"{name}={value if numbers is None else list(numbers)}"
            problems.append(Problem(given, rule, f"{name}={[0] * n}, say"))
            numbers = (0,) * n
        rows.append(numbers)
    return RowCounts(*rows), problems


def _row_problems(operand: torch.Tensor, output: torch.Tensor, rows: RowCounts) -> list[Problem]:
    """Return problems of rows that the operand does not have, or the output cannot hold."""
    alike = operand.dtype == output.dtype and operand.shape[1:] == output.shape[1:]
    if not alike or not operand.ndim or not output.ndim:
        given = f"an operand {operand.dtype} of shape {tuple(operand.shape)}, an output "
        return [
            Problem(
                f"{given}{output.dtype} of shape {tuple(output.shape)}",
                "both must have rows of one shape and dtype",
                "operand.new_zeros(rows, *operand.shape[1:]) as the output",
            )
        ]
    outgoing = zip(rows.input_offsets, rows.send_sizes, strict=True)
    return [
        Problem(
            f"{size} rows from row {start} on, for rank {target} along the axes",
            f"the operand has {operand.shape[0]} rows",
            "check input_offsets and send_sizes",
        )
        for target, (start, size) in enumerate(outgoing)
        if start + size > operand.shape[0]
    ]


class RowMessage(NamedTuple):
    """Message of one rank about its exchange with another, gathered before the rows are sent.

    Attributes:
        output_offset: first row in the receiver's output.
        send_size: number of rows that it sends to the other.
        recv_size: number of rows that it expects from the other.
        height: number of rows of its output.
        width: number of elements of a row that it sends.
        dtype: index of the rows' dtype in `DTYPES`.
        problem_bytes: length of the text of its problems.
    """

    output_offset: int
    send_size: int
    recv_size: int
    height: int
    width: int
    dtype: int
    problem_bytes: int


def _own_messages(
    operand: torch.Tensor, output: torch.Tensor, rows: RowCounts, wires: WireDtypes
) -> list[RowMessage]:
    """Return this rank's messages, one for each rank."""
    height = output.shape[0] if output.ndim else 0
    width, dtype = math.prod(operand.shape[1:]), DTYPES.index(wires[0] or operand.dtype)
    columns = zip(rows.output_offsets, rows.send_sizes, rows.recv_sizes, strict=True)
    return [RowMessage(*column, height, width, dtype, 0) for column in columns]


def _gather_messages(
    messages: list[RowMessage],
    problems: list[Problem],
    like: torch.Tensor,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> list[list[RowMessage]]:
    """Return all messages, `[from, to]`; raise the same error on all ranks if one has problems.

    The length of the texts is gathered first, so that all ranks take part in gathering them.
    """
    text = json.dumps([(p.given, p.rule, p.fix) for p in problems]).encode()
    length = len(text) if problems else 0
    rows = [message._replace(problem_bytes=length) for message in messages]
    table = all_gather(torch.tensor(rows, device=like.device), axes, mesh=mesh).tolist()
    gathered = [[RowMessage(*message) for message in row] for row in table]
    longest = max(row[0].problem_bytes for row in gathered)
    if longest:
        padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=like.device)
        texts = all_gather(padded, axes, mesh=mesh).tolist()
        raise_if(NAME, _merge_problems(texts), same_on_all_ranks=True)
    raise_if(NAME, _disagreements(gathered), same_on_all_ranks=True)
    return gathered


def _merge_problems(texts: list[list[int]]) -> list[Problem]:
    """Return the ranks' problems; a problem that not all ranks have names its ranks."""
    ranks_of: dict[Problem, list[int]] = {}
    for rank, text in enumerate(texts):
        for problem in json.loads(bytes(text)):
            ranks_of.setdefault(Problem(*problem), []).append(rank)
    return [
        problem if len(ranks) == len(texts) else replace(
            problem,
            given=f"on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} along "
            f"the axes {problem.given}",
        )
        for problem, ranks in ranks_of.items()
    ]  # fmt: skip


def _disagreements(gathered: list[list[RowMessage]]) -> list[Problem]:
    """Return problems of messages of two ranks that contradict each other."""
    sent = [(row[0].width, DTYPES[row[0].dtype]) for row in gathered]
    problems = [
        Problem(
            f"rows of {sent[0][0]} elements of {sent[0][1]} sent by rank 0 along the axes, of "
            f"{width} elements of {dtype} by rank {rank}",
            "the operands of all ranks must have rows of one shape and dtype",
            "reshape or cast the operand before",
        )
        for rank, (width, dtype) in enumerate(sent)
        if (width, dtype) != sent[0]
    ]
    problems += [
        Problem(
            f"recv_sizes[{sender}]={row[sender].recv_size} on rank {rank} along the axes, to "
            f"which rank {sender} sends {gathered[sender][rank].send_size} rows",
            "recv_sizes[j] on rank i along the axes must be send_sizes[i] on rank j",
            "recv_sizes = fs.all_to_all(send_sizes, axis, 0, 0)",
        )
        for rank, row in enumerate(gathered)
        for sender in range(len(gathered))
        if row[sender].recv_size != gathered[sender][rank].send_size
    ]
    for rank, row in enumerate(gathered):
        problems += _overlaps(rank, row[rank].height, [column[rank] for column in gathered])
    return problems


def _overlaps(rank: int, height: int, incoming: list[RowMessage]) -> list[Problem]:
    """Return problems of rows for one rank that its output lacks, or gets from two ranks."""
    problems = []
    end, previous = 0, ""
    for sender in sorted(range(len(incoming)), key=lambda i: incoming[i]):
        start, size = incoming[sender][:2]
        name = f"those of rank {sender} along the axes"
        if size and (start < end or start + size > height):
            rule = f"rows 0..{height - 1} of that output must be written at most once"
            also = f", after {previous} up to row {end - 1}" if start < end else ""
            last = start + size - 1
            given = f"on rank {rank} along the axes rows {start}..{last} for {name}{also}"
            problems.append(Problem(given, rule, "output_offsets count in the receiver's output"))
        if size:
            end, previous = max(end, start + size), name
    return problems
