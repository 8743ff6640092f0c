"""An exchange in which every rank sends every other its own number of rows."""

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
from fshard.run.transports.base import Label, Transport, current_rank, labelled, notify
from fshard.run.transports.shape_only import is_abstract
from fshard.spmd.axis_env import current_tracker
from fshard.spmd.collectives.axis_index_groups import Groups, resolve_groups
from fshard.spmd.collectives.compile_node import as_node
from fshard.spmd.collectives.gather_scatter import all_gather
from fshard.spmd.collectives.wire_dtypes import WireDtypes, send_in, wire_problems
from fshard.spmd.tracking.insert_casts import computed
from fshard.spmd.types import States

__all__ = ["ragged_all_to_all"]

NAME = "fs.ragged_all_to_all"
Numbers = Sequence[int] | torch.Tensor
DTYPES = sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str)


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

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
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
    j. The ranks first tell each other their offsets and sizes, in a small `all_gather`, and what
    is wrong with them. Transpose: the reverse exchange for `operand`; for `output` zeros where
    rows were written. Rows are sent in `forward_dtype`, in the transpose in `backward_dtype`; they
    have the dtype of `operand` where they arrive. Raises `ShardingError`, the same on all ranks
    along the axes, for rows that do not exist or are not alike, sizes on which two ranks do not
    agree, rows of the result that are written twice, and floating dtypes of integers. Under
    `torch.compile` the sizes and `input_offsets` are lists of numbers, and what the ranks tell each
    other is not checked.

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
    numbers = input_offsets, send_sizes, output_offsets, recv_sizes

    def exchange(operand: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return _exchange(operand, output, _Numbers(*numbers), where, axes, wires)

    tracker = current_tracker()
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
    wires: WireDtypes,
) -> torch.Tensor:
    n = where.axis_size(axes)
    # In a graph of torch.compile the offsets that are told are no numbers yet: nobody checks them.
    in_graph = torch.compiler.is_compiling()
    rows, problems = _read(numbers._replace(output_offsets=(0,) * n) if in_graph else numbers, n)
    problems += _unfit(operand, output, rows) + wire_problems(operand.dtype, wires)
    if in_graph or is_abstract(operand):
        raise_if(NAME, problems)
    starts: Numbers = (0,) * n
    if not is_abstract(operand):
        rank = current_rank(where, NAME).rank
        here = where.group(rank, axes).index(rank)
        if in_graph:
            offsets = _column(numbers.output_offsets, output.device)
            starts = all_gather(offsets, axes, mesh=where)[:, here]
        else:
            told = _tell(_mine(operand, output, rows, wires), problems, output, where, axes)
            starts = [row[here].output_offset for row in told]
    outgoing = zip(rows.input_offsets, rows.send_sizes, strict=True)
    packed = torch.cat([operand.narrow(0, at, size) for at, size in outgoing])
    op = send_in(_Ragged(where, axes, rows.send_sizes, rows.recv_sizes), wires)
    with labelled(Label(NAME, where)):
        (moved,) = apply_linear(op, (packed,), everywhere=False)
    at = [torch.arange(size, device=output.device) for size in rows.recv_sizes]
    return output.index_copy(0, torch.cat([a + s for a, s in zip(at, starts, strict=True)]), moved)


def _column(numbers: Numbers, device: torch.device) -> torch.Tensor:
    """Numbers, or tensors of one each, as a tensor."""
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.stack([torch.as_tensor(number) for number in numbers])
    return numbers.to(device, torch.int64)


def _read(given: _Numbers, n: int) -> tuple[_Numbers, list[Problem]]:
    """The numbers as Python's, one for each of the n ranks; zeros for what is something else."""
    problems: list[Problem] = []
    found: list[tuple[int, ...]] = []
    for name, each in given._asdict().items():
        if isinstance(each, torch.Tensor) and (torch.compiler.is_compiling() or is_abstract(each)):
            words, rule = (
                f"{name} without numbers, on {each.device}",
                "offsets and sizes decide who",
            )
            fix = "give them as lists, or as tensors with numbers"
            problems.append(Problem(words, f"{rule} sends what", fix))
            found.append((0,) * n)
            continue
        numbers = as_ints(each)
        if numbers is None or len(numbers) != n or min(numbers) < 0:
            rule = f"{name} has a number of at least 0 for each of the {n} ranks along the axes"
            words = f"{name}={each if numbers is None else list(numbers)}"
            problems.append(Problem(words, rule, f"{name}={[0] * n}, say"))
            numbers = (0,) * n
        found.append(numbers)
    return _Numbers(*found), problems


def _unfit(operand: torch.Tensor, output: torch.Tensor, rows: _Numbers) -> list[Problem]:
    """What of the operand is sent that it has not, or that the output does not take."""
    alike = operand.dtype == output.dtype and operand.shape[1:] == output.shape[1:]
    if not alike or not operand.ndim or not output.ndim:
        given = f"an operand {operand.dtype} of shape {tuple(operand.shape)}, an output "
        return [
            Problem(
                f"{given}{output.dtype} of shape {tuple(output.shape)}",
                "both are rows of one shape and dtype",
                "operand.new_zeros(rows, *operand.shape[1:]) as the output",
            )
        ]
    outgoing = zip(rows.input_offsets, rows.send_sizes, strict=True)
    return [
        Problem(
            f"{size} rows from row {at} on, for rank {place} along the axes",
            f"the operand has {operand.shape[0]} rows",
            "check input_offsets and send_sizes",
        )
        for place, (at, size) in enumerate(outgoing)
        if at + size > operand.shape[0]
    ]


class _Told(NamedTuple):
    """What one rank says of its exchange with another, and of itself.

    Rows, how many its output has, the elements and the dtype of a row that it sends, and how
    many bytes it has to say of what is wrong with its arguments.
    """

    output_offset: int
    send_size: int
    recv_size: int
    height: int
    width: int
    dtype: int
    said: int


def _mine(
    operand: torch.Tensor, output: torch.Tensor, rows: _Numbers, wires: WireDtypes
) -> list[_Told]:
    height = output.shape[0] if output.ndim else 0
    width, dtype = math.prod(operand.shape[1:]), DTYPES.index(wires[0] or operand.dtype)
    numbers = zip(rows.output_offsets, rows.send_sizes, rows.recv_sizes, strict=True)
    return [_Told(*each, height, width, dtype, 0) for each in numbers]


def _tell(
    mine: list[_Told],
    problems: list[Problem],
    like: torch.Tensor,
    where: Mesh,
    axes: tuple[str, ...],
) -> list[list[_Told]]:
    """What everyone told, `[from, to]`; raises the same on all of them where one has problems.

    Who has some tells how long they are, so that all go on to hear them before anyone raises.
    """
    words = json.dumps([(each.given, each.rule, each.fix) for each in problems]).encode()
    said = len(words) if problems else 0
    numbers = torch.tensor([each._replace(said=said) for each in mine], device=like.device)
    told = [
        [_Told(*each) for each in row] for row in all_gather(numbers, axes, mesh=where).tolist()
    ]
    longest = max(row[0].said for row in told)
    if longest:
        text = torch.tensor(list(words.ljust(longest)), dtype=torch.uint8, device=like.device)
        raise_if(NAME, _heard(all_gather(text, axes, mesh=where).tolist()), everywhere=True)
    raise_if(NAME, _disagreements(told), everywhere=True)
    return told


def _heard(texts: list[list[int]]) -> list[Problem]:
    """The problems that ranks told, and whose they are where they are not everyone's."""
    whose: dict[Problem, list[int]] = {}
    for place, text in enumerate(texts):
        for problem in json.loads(bytes(text)):
            whose.setdefault(Problem(*problem), []).append(place)
    return [
        problem if len(places) == len(texts) else replace(
            problem,
            given=f"on rank{'s' if len(places) > 1 else ''} {', '.join(map(str, places))} along "
            f"the axes {problem.given}",
        )
        for problem, places in whose.items()
    ]  # fmt: skip


def _disagreements(told: list[list[_Told]]) -> list[Problem]:
    """What in the words of two ranks does not fit: `told[from][to]`."""
    sent = [(row[0].width, DTYPES[row[0].dtype]) for row in told]
    problems = [
        Problem(
            f"rows of {sent[0][0]} elements of {sent[0][1]} sent by rank 0 along the axes, of "
            f"{width} elements of {dtype} by rank {place}",
            "the operands of all ranks are rows of one shape and dtype",
            "reshape or cast the operand before",
        )
        for place, (width, dtype) in enumerate(sent)
        if (width, dtype) != sent[0]
    ]
    problems += [
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
    return problems


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
