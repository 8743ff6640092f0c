"""`partitioned.explain(topology)`: every operation's layout, and what is sent each way for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fshard._util.text import bytes_text, plural, time_text
from fshard.layout.spec import Spec
from fshard.partition.ir import Line, Move, Operation, Whole, Write, specs_text
from fshard.partition.partitioned_call import Partitioned, explain_partitioned_hook
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.show.table import Column, Row, Table

__all__ = ["explain_partitioned"]

COLUMNS = (
    Column("", wrap=True), Column("spec", wrap=True), Column("forward", right=True),
    Column("backward", right=True),
)  # fmt: skip


@explain_partitioned_hook.set
def explain_partitioned(made: Partitioned, topology: Topology) -> Table:
    """The hook of `Partitioned.explain`: arguments, then operations, each with its spec.

    Under an argument stands what brings it to where it is used, above an operation what brings
    its operands there: `→` for a step of the forward pass, `←` for one of the gradient's way
    back, with the bytes that the busiest rank sends. What sends nothing has no row. Arguments
    that lie and are moved alike are one row.

    >>> import torch
    >>> from fshard import Mesh, P, partition
    >>> f = partition(lambda w, x: x @ w, mesh=Mesh(dp=2), in_specs=(P(), P("dp")))
    >>> w, x = torch.ones(4, 8, requires_grad=True), torch.ones(2, 4)
    >>> print(explain_partitioned(f.trace(w, x), Topology.node()))
    1 operation on Mesh(dp=2), topology node
                      spec         forward  backward
    ────────────────────────────────────────────────
    args[0]           f32[4,8]
    ← all_reduce(dp)  f32[4,8]                 128 B
    args[1]           f32[2@dp,4]
    matmul            f32[2@dp,8]
    result            f32[2@dp,8]
    ────────────────────────────────────────────────
    launches                             0         1
    sent                               0 B     128 B
    time                              0 µs   6.75 µs
    """
    rows = [*_arguments(made)]
    for line in made.lines:
        rows += _line(line, made._inputs)
    rows += [("result", str(spec), "", "") for spec in made.out_specs if spec is not None]
    ways = [made.cost(topology), made.cost(topology, backward=True)]
    footer = [
        ("launches", "", *(f"{each.launches:,}" for each in ways)),
        ("sent", "", *(bytes_text(each.bytes_sent) for each in ways)),
        ("time", "", *(time_text(each.time) for each in ways)),
    ]
    count = sum(isinstance(line, Operation | Whole) for line in made.lines)
    title = f"{plural(count, 'operation')} on {made.mesh}, topology {topology.title}"
    shown = len(COLUMNS) if made.grad else -1
    return Table(title, COLUMNS[:shown], tuple(row[:shown] for row in rows),
                 tuple(row[:shown] for row in footer))  # fmt: skip


def _line(line: Line, inputs: Sequence[int]) -> Iterator[Row]:
    match line:
        case Operation():
            yield line.name, specs_text(line.strategy.out_specs), "", ""
        case Whole():
            yield line.name, "the same on every rank", "", ""
        case Write():
            yield f"writes {line.name}", "", "", ""
        case Move() if line.source.at not in inputs:
            yield from _moved(line, 1)


def _arguments(made: Partitioned) -> Iterator[Row]:
    """Arguments with what moves them, those that do the same in one."""
    alike: dict[tuple[Spec, tuple[tuple[Program, bool], ...]], list[str]] = {}
    first: dict[object, list[Move]] = {}
    for at, spec, name in zip(made._inputs, made.in_specs, made.names, strict=True):
        moves = [line for line in made.lines if isinstance(line, Move) and line.source.at == at]
        key = spec, tuple((each.program, each.grad) for each in moves)
        alike.setdefault(key, []).append(name)
        first.setdefault(key, moves)
    for key, names in alike.items():
        more = ", ..." if names[1:] else ""
        yield names[0] + more, _times(len(names)) + str(key[0]), "", ""
        for each in first[key]:
            yield from _moved(each, len(names))


def _moved(move: Move, times: int) -> Iterator[Row]:
    """The steps of a program and of its transpose that send."""
    yield from _steps("→", move.program, times)
    if move.grad and move.program.is_linear:
        for sign, spec, sent, _ in _steps("←", move.program.T, times):
            yield sign, spec, "", sent


def _steps(sign: str, prog: Program, times: int) -> Iterator[Row]:
    for step, spec, sent in zip(prog.steps, prog.specs[1:], prog.step_bytes, strict=True):
        if sent:
            # What it comes to is in the spec after it.
            text = str(step).partition(" to ")[0]
            yield (f"{sign} {_times(times)}{text}", _times(times) + str(spec),
                   bytes_text(sent * times), "")  # fmt: skip


def _times(n: int) -> str:
    return f"{n} x " if n > 1 else ""
