"""`partitioned.explain()`: the layout of every operation, and the communication it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fshard._util.errors import ShardingError, fail
from fshard._util.notebook_view import table_of
from fshard._util.text import bytes_text, plural, time_text
from fshard.layout.spec import Spec
from fshard.partition.ir import (
    BeginCheckpoint,
    CustomGradient,
    EndCheckpoint,
    Factory,
    LaunchBatch,
    Line,
    Operation,
    Pick,
    Redistribution,
    RegionCall,
    Write,
    backward_programs,
    flattened,
    operands_of,
    specs_text,
)
from fshard.partition.partitioned_call import PartitionedCall
from fshard.partition.step_cost.roofline import COMMUNICATION, COMPUTE, MODULES, Roofline
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.program.steps import AllGather
from fshard.run.transports.shape_only import RecordedCollective
from fshard.show.folding import repetitions, without_number
from fshard.show.table import Column, Row, Table, Tables

KINDS = (COMPUTE, COMMUNICATION, MODULES)
MAX_GATHERED = 4
"""Most gathered arguments that get a note."""
COLUMNS = (
    Column("", wrap=True), Column("spec", wrap=True), Column("forward", right=True),
    Column("backward", right=True), Column("saved", right=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class PartitionExplanation(Tables):
    """Tables of a call's layouts and of its times; prints as text, in rich and as HTML.

    Attributes:
        layouts: The layouts of arguments and operations, and the bytes that are sent and saved.
        times: FLOPs, bytes and times of a step (`Roofline.table`); None if they are unknown.
    """

    layouts: Table
    times: Table | None

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that are known."""
        return (self.layouts,) if self.times is None else (self.layouts, self.times)


@table_of.register(PartitionedCall)
def explain_partitioned(
    call: PartitionedCall, topology: Topology, only: str | None = None
) -> PartitionExplanation | Table:
    """Return the tables of a call: implements `PartitionedCall.explain`.

    Args:
        call: the call.
        topology: the machine of the times.
        only: "layouts", "compute", "communication" or "modules" for one table; None for layouts and
            times.

    >>> import torch
    >>> from fshard import Mesh, P, partition
    >>> f = partition(lambda w, x: x @ w, mesh=Mesh(dp=2), in_specs=(P(), P("dp")))
    >>> w, x = torch.ones(1024, 1024, requires_grad=True), torch.ones(4096, 1024)
    >>> print(explain_partitioned(f.trace(w, x), Topology.node(), "communication"))
    rank 0 of Mesh(dp=2), node
                      FLOPs     bytes  forward  backward  bound by
    ───────────────────────────────────────────────────────────────────
    ← all_reduce(dp)         4.00 MiB            18.4 µs  waits 18.4 µs
    ───────────────────────────────────────────────────────────────────
    communication            4.00 MiB     0 µs   18.4 µs
    step                               11.6 µs   35.1 µs
    46.8 µs a step, 46.8 µs without overlap
    bound by compute: 46 % of 46.8 µs; 171 FLOP/B, machine 200 in float32; 184
    TFLOP/s of 400 TFLOP/s
    """
    if only not in (None, "layouts", *KINDS):
        fail("explain", f"only={only!r}",
             "only must be 'layouts', 'compute', 'communication', 'modules' or None",
             "only='communication'")  # fmt: skip
    if only in KINDS:
        times: Table = call.roofline(topology).table(only)
        return times
    problem = ""
    try:
        roofline: Roofline | None = call.roofline(topology)
    except ShardingError as error:  # an operation does not run without values
        roofline, problem = None, error.problems[0].given
    layouts = layout_table(call, topology, (f"times are unknown: {problem}",) if problem else ())
    if only is not None:
        return layouts
    return PartitionExplanation(layouts, None if roofline is None else roofline.table())


def layout_table(call: PartitionedCall, topology: Topology, notes: Sequence[str] = ()) -> Table:
    """Return a table of the layouts of a call's arguments and operations.

    Rows under an argument, and above an operation, are the steps that redistribute it or its
    operands: `→` in the forward pass, `←` in the gradient's, and `↻` in the backward pass again,
    with the bytes that the busiest rank sends. Steps that send nothing have no row. Arguments with
    one layout and the same redistributions are one row. `sent` are the bytes that the busiest rank
    sends in the whole pass, as `PartitionedCall.cost` and `fs.comm_log` have it: less than the sum
    of the rows if they have different busiest ranks. `saved` are the bytes of a row's results
    that the first rank keeps for the backward pass (`PartitionedCall.saved_bytes`), or `↻` if the
    backward pass computes them again. Notes list the launches that several values share, and
    arguments that were gathered: the modelled time of the operation, and of the fastest one that
    would have kept their layout, both with the time to redistribute its operands and to reduce its
    results. The last notes name operations on sharded operands that all ranks of an axis repeat.

    >>> import torch
    >>> from fshard import Mesh, P, partition
    >>> f = partition(lambda w, x: x @ w, mesh=Mesh(dp=2), in_specs=(P(), P("dp")))
    >>> w, x = torch.ones(4, 8, requires_grad=True), torch.ones(2, 4)
    >>> print(layout_table(f.trace(w, x), Topology.node()))
    1 operation on Mesh(dp=2), topology node
                      spec         forward  backward  saved
    ───────────────────────────────────────────────────────
    args[0]           f32[4,8]
    ← all_reduce(dp)  f32[4,8]                 128 B
    args[1]           f32[2@dp,4]
    matmul            f32[2@dp,8]
    result            f32[2@dp,8]
    ───────────────────────────────────────────────────────
    launches                             0         1
    sent                               0 B     128 B
    communication                     0 µs   6.75 µs
    saved                                               0 B
    """
    kept = _KeptMemory.of(call)
    rows = [*_arguments(call, kept)]
    rows += [(name, "any value", "", "", "") for name in call.names[len(call.in_specs) :]]
    rows += _folded([[*_line(line, call._inputs, kept)] for line in call.lines])
    rows += [("result", str(spec), "", "", "") for spec in call.out_specs if spec is not None]
    costs = [call.cost(topology), call.cost(topology, backward=True)]
    footer = [
        ("launches", "", *(f"{cost.launches:,}" for cost in costs), ""),
        ("sent", "", *(bytes_text(cost.bytes_sent) for cost in costs), ""),
        ("communication", "", *(time_text(cost.time) for cost in costs), ""),
    ]
    if call.grad:
        total = bytes_text(sum(kept.nbytes.values()))
        footer.append(("saved", "", "", "", "unknown" if kept.problem else total))
    count = sum(isinstance(line, Operation | Factory | RegionCall) for line in call.lines)
    title = f"{plural(count, 'operation')} on {call.mesh}, topology {topology.title}"
    shown = len(COLUMNS) if call.grad else -2
    again = ("↻ runs again in the backward pass",) if kept.recomputed else ()
    unknown = (f"saved bytes are unknown: {kept.problem}",) if kept.problem else ()
    notes = (
        *notes,
        *_memory(call),
        *unknown,
        *again,
        *_coalesced(call),
        *_gathered(call),
        *_repeated(call),
    )
    return Table(title, COLUMNS[:shown], tuple(row[:shown] for row in rows),
                 tuple(row[:shown] for row in footer), notes)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _KeptMemory:
    """Bytes kept for the backward pass by value, and the values that it computes again."""

    nbytes: dict[int, int]
    recomputed: frozenset[int]
    problem: str = ""

    @classmethod
    def of(cls, call: PartitionedCall) -> _KeptMemory:
        """Return the memory of a call, by the values that have a row."""
        sources = {x.out: x.source.value for x in call.lines if isinstance(x, Pick)}
        nbytes: Counter[int] = Counter()
        try:
            values = call.saved_bytes().values
        except ShardingError as error:  # an operation does not run without values
            return cls(nbytes, frozenset(), error.problems[0].given)
        for value, n in values.items():
            nbytes[sources.get(value, value)] += n
        units = call.remat_plan.units
        again = {value for unit in units for value in unit.outputs}
        again |= {unit.lines[0].out for unit in units if isinstance(unit.lines[0], Operation)}
        return cls(nbytes, frozenset(sources.get(value, value) for value in again))

    def cell(self, *values: int) -> str:
        """Return the bytes of values as text."""
        nbytes = sum(self.nbytes.get(value, 0) for value in values)
        if nbytes or self.recomputed.isdisjoint(values):
            return bytes_text(nbytes) if nbytes else ""
        return "↻"


def _memory(call: PartitionedCall) -> Iterator[str]:
    """Yield notes on the plan that was chosen for a limit of memory, and on the others."""
    choice = call.memory_choice
    if choice is not None:
        yield f"memory={choice.limit}, {choice}"
        yield from (f"  else {other}" for other in choice.others)


def _coalesced(call: PartitionedCall) -> Iterator[str]:
    """Yield a note for every different launch of several values."""
    texts: Counter[str] = Counter()
    for line in flattened(call.schedule):
        if isinstance(line, LaunchBatch):
            passes = ("→", line.batch), *((("←", line.batch.T),) if line.grad else ())
            texts.update(
                f"{sign} {launch.name} of {len(launch.steps)} {launch.scope()}"
                for sign, batch in passes for launch in batch.launches if len(launch.steps) > 1
            )  # fmt: skip
    texts.update(
        f"↻ {launch.name} of {len(launch.steps)} {launch.scope()}"
        for unit in call.remat_plan.units if unit.launch is not None
        for launch in unit.launch.batch.launches if len(launch.steps) > 1
    )  # fmt: skip
    for text, n in texts.items():
        yield f"in {'one launch' if n == 1 else f'each of {n} launches'}: {text}"


def _gathered(call: PartitionedCall) -> Iterator[str]:
    """Yield notes on arguments that were gathered though an operation could use their layout."""
    names = dict(zip(call._inputs, call.names, strict=True))
    moves = {
        line.out: line for line in call.lines
        if isinstance(line, Redistribution) and line.source.value in names
        and any(isinstance(step, AllGather) for step in line.program.steps)
    }  # fmt: skip
    count = 0
    for line in call.lines:
        if not isinstance(line, Operation):
            continue
        strategy = line.strategy
        for value, index in zip(operands_of(line), range(len(strategy.in_specs)), strict=False):
            if (move := moves.pop(value, None)) is None:
                continue
            dims = move.program.src.partition.dims
            keeps = (x for x in strategy.alternatives if x.in_specs[index].partition.dims == dims)
            other = next(keeps, None)
            count += other is not None
            if other is not None and count <= MAX_GATHERED:
                times = f"{time_text(strategy.time)}, else {time_text(other.time)}"
                yield f"{names[move.source.value]} gathered: {line.name} {times}"
    if count:
        yield "fs.partition(hold=axes) keeps params sharded" + (
            f"; {count - MAX_GATHERED} more gathered" if count > MAX_GATHERED else ""
        )


def _repeated(call: PartitionedCall) -> Iterator[str]:
    """Yield a note for every axis along which operations repeat work on gathered operands."""
    names: dict[str, list[str]] = {}
    for line in flattened(call.lines):
        if isinstance(line, Operation):
            sharded = {
                a for src in line.strategy.sources for dim in src.partition.dims for a in dim
            }
            for axis, role in line.strategy.roles:
                if axis in sharded and role.label in ("invariant", "reduced"):
                    names.setdefault(axis, []).append(line.name)
    for axis, lines in names.items():
        shown = ", ".join(lines[:MAX_GATHERED])
        more = f" and {len(lines) - MAX_GATHERED} more" if len(lines) > MAX_GATHERED else ""
        yield f"gathered along {axis}, computed on all its ranks: {shown}{more}"


def _line(line: Line, inputs: Sequence[int], kept: _KeptMemory) -> Iterator[Row]:
    match line:
        case Operation():
            yield line.name, specs_text(line.strategy.out_specs), "", "", kept.cell(line.out)
        case Factory():
            sharded = any(line.spec.partition.dims)
            text = str(line.spec) if sharded else "replicated"
            yield line.name, text, "", "", kept.cell(line.out)
        case Write():
            yield f"writes {line.name}", "", "", "", ""
        case CustomGradient():
            yield "custom backward", "", "", "", kept.cell(line.out)
            yield from _backward_rows(line, 1)
        case RegionCall():
            specs = specs_text(line.region.out_specs)
            yield line.region.__name__, specs, "", "", kept.cell(line.out)
            for (op, axes, nbytes), n in _sent(line.forward).items():
                yield (f"→ {_times(n)}{op}({axes})", "in the body", bytes_text(n * nbytes), "",
                       "")  # fmt: skip
            for (op, axes, nbytes), n in _sent(line.backward).items():
                yield (f"← {_times(n)}{op}({axes})", "in the body", "", bytes_text(n * nbytes),
                       "")  # fmt: skip
        case BeginCheckpoint():
            yield "begin checkpoint", "", "", "", ""
        case EndCheckpoint():
            yield "end checkpoint", "", "", "", ""
        case Redistribution() if line.source.value not in inputs:
            yield from _move_rows([line], kept)


def _folded(blocks: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """Yield the rows of lines; equal layers are one block, indented."""
    blocks = [rows for rows in blocks if rows]
    keys = [tuple((without_number(row[0]), *row[1:]) for row in rows) for rows in blocks]
    for start, size, count in repetitions(keys):
        folds = size > 1
        if folds:
            yield f"each of {count} layers:", "", "", "", ""
        for rows in blocks[start : start + (size if folds else count)]:
            for row in rows:
                yield (f"  {row[0]}", *row[1:]) if folds else row


def _sent(collectives: Sequence[RecordedCollective]) -> Counter[tuple[str, str, int]]:
    """Return how often a body has a collective over axes that sends some number of bytes."""
    return Counter((x.op, ", ".join(x.axes), x.traffic.sent) for x in collectives)


def _arguments(call: PartitionedCall, kept: _KeptMemory) -> Iterator[Row]:
    """Yield rows of the arguments and their redistributions, one for arguments that agree."""
    names_of: dict[tuple[Spec, tuple[tuple[Program, bool], ...]], list[str]] = {}
    moves_of: dict[object, list[list[Redistribution]]] = {}
    for index, spec, name in zip(call._inputs, call.in_specs, call.names, strict=False):
        moves = [
            line
            for line in call.lines
            if isinstance(line, Redistribution) and line.source.value == index
        ]
        key = spec, tuple((move.program, move.grad) for move in moves)
        names_of.setdefault(key, []).append(name)
        moves_of.setdefault(key, []).append(moves)
    for key, names in names_of.items():
        more = ", ..." if names[1:] else ""
        yield names[0] + more, _times(len(names)) + str(key[0]), "", "", ""
        for equal in zip(*moves_of[key], strict=True):
            yield from _move_rows(equal, kept)


def _move_rows(moves: Sequence[Redistribution], kept: _KeptMemory) -> Iterator[Row]:
    """Yield rows of the steps that send of a program, which several values have.

    Its steps of the forward pass come first, then those that run again, then the transpose's. One
    that sends nothing has a row if its result is kept.
    """
    prog, values = moves[0].program, [move.out for move in moves]
    rows = [*_steps("→", prog, len(moves))]
    saved = kept.cell(*values)
    if not rows and saved:
        rows = [(f"→ {_times(len(moves))}{prog.steps[-1].name}", str(prog.dst), "", "", "")]
    yield from rows[:-1]
    yield from ((*row[:-1], saved) for row in rows[-1:])
    again = len(kept.recomputed.intersection(values))
    for sign, spec, sent, *_ in _steps("↻", prog, again) if again else ():
        yield sign, spec, "", sent, ""
    yield from _backward_rows(moves[0], len(moves))


def _backward_rows(line: Line, times: int) -> Iterator[Row]:
    """Yield rows of the steps that send backward for a line."""
    for prog in backward_programs(line):
        for sign, spec, sent, *_ in _steps("←", prog, times):
            yield sign, spec, "", sent, ""


def _steps(sign: str, prog: Program, times: int) -> Iterator[Row]:
    """Yield one row for each step of a program that sends."""
    for step, spec, sent in zip(prog.steps, prog.specs[1:], prog.step_bytes, strict=True):
        if sent:
            # The state after the step is in its spec.
            text = str(step).partition(" to ")[0]
            yield (f"{sign} {_times(times)}{text}", _times(times) + str(spec),
                   bytes_text(sent * times), "", "")  # fmt: skip


def _times(n: int) -> str:
    return f"{n} x " if n > 1 else ""
