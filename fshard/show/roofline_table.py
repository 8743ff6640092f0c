"""`call.roofline()` as a table: operations and collectives of a step, with equal layers folded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fshard._util.errors import fail
from fshard._util.notebook_view import table_of
from fshard._util.text import bytes_text, count_text, time_text
from fshard.partition.step_cost.roofline import (
    BACKWARD,
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    MODULES,
    RECOMPUTE,
    Roofline,
    StepEvent,
)
from fshard.show.folding import of_any_layer, repetitions, without_number
from fshard.show.table import Column, Row, Table

COLUMNS = (
    Column("", wrap=True), Column("FLOPs", right=True), Column("bytes", right=True),
    Column("forward", right=True), Column("backward", right=True), Column("bound by"),
)  # fmt: skip
SIGNS = {FORWARD: "→", BACKWARD: "←", RECOMPUTE: "↻"}
MAX_BESIDE = 4
"""Most operations that are named beside a collective."""


@dataclass(slots=True)
class RooflineRow:
    """Events of one line: of its operation in both passes, or of one collective."""

    name: str
    events: list[StepEvent] = field(default_factory=list)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the rows of equal layers."""
        first = self.events[0]
        events = [event for event in self.events if event.phase == first.phase]
        flops, nbytes = sum(x.flops for x in events), sum(x.nbytes for x in events)
        return without_number(self.name), first.kind, first.phase, first.place, flops, nbytes

    @property
    def value(self) -> int:
        """The value id of an operation's line, -1 for other rows."""
        first = self.events[0]
        return -1 if first.value is None or first.kind == COMMUNICATION else first.value

    @property
    def flops(self) -> int:
        """FLOPs of both passes."""
        return sum(event.flops for event in self.events)

    @property
    def nbytes(self) -> int:
        """Bytes of both passes."""
        return sum(event.nbytes for event in self.events)

    def time(self, *, forward: bool) -> float:
        """Return the seconds in one of the passes."""
        return sum(event.time for event in self.events if (event.phase == FORWARD) == forward)


@table_of.register(Roofline)
def roofline_table(roofline: Roofline, only: str | None) -> Table:
    """Return the table of a roofline: implements `Roofline.table`.

    Rows are in the order of the run. An operation's row has both passes, and what the backward pass
    computes again; collectives have a row each, `→` in the forward pass, `←` in the backward pass
    and `↻` where they run again. Bytes of operations are read and written in memory, of collectives
    sent. Rows that repeat are one block with the mean times of its repetitions.

    Raises:
        ShardingError: for another `only`.

    >>> import torch
    >>> from fshard import Mesh, P, Topology, partition
    >>> f = partition(lambda w, x: x @ w, mesh=Mesh(dp=2), in_specs=(P(), P("dp")))
    >>> w, x = torch.empty(4096, 4096, requires_grad=True), torch.empty(8192, 4096)
    >>> print(f.trace(w, x).roofline(Topology.dgx_h100()))
    rank 0 of Mesh(dp=2), DGX H100, nodes of 8
                         FLOPs     bytes  forward  backward  bound by
    ─────────────────────────────────────────────────────────────────────
    matmul               275 G   384 MiB   398 µs    398 µs  compute
    gradient of results         64.0 MiB            25.9 µs  memory
    ← all_reduce(dp)            64.0 MiB             194 µs  waits 194 µs
    ─────────────────────────────────────────────────────────────────────
    compute              275 G   448 MiB   398 µs    424 µs
    communication               64.0 MiB     0 µs    194 µs
    step                                   398 µs    618 µs
    1.02 ms a step, 1.02 ms without overlap
    bound by compute: 78 % of 1.02 ms; 585 FLOP/B, machine 129 in float32; 270
    TFLOP/s of 346 TFLOP/s
    """
    if only not in (None, COMPUTE, COMMUNICATION, MODULES):
        fail("explain", f"only={only!r}",
             "only must be 'compute', 'communication', 'modules' or None",
             "only='communication'")  # fmt: skip
    rows: list[Row] = []
    by_module, only = only == MODULES, None if only == MODULES else only
    members = _rows_by_module(roofline) if by_module else _rows(roofline, only)
    place = ""
    for start, size, count in repetitions([row.key for row in members]):
        indent = "  " if size > 1 else ""
        if indent:
            rows.append((f"each of {count} layers:", "", "", "", "", ""))
        for first in range(start, start + size):
            layers = members[first : first + size * count : size]
            here = "" if by_module else layers[0].events[0].place
            if here and here != place:
                rows.append((f"{indent}{os.path.basename(here)}", "", "", "", "", ""))
            place = here or place
            rows.append(_cells(layers, indent))
    title = f"{roofline.title}, {roofline.topology.title}"
    return Table(title, COLUMNS, tuple(rows), (*_footer(roofline, only),), (*_notes(roofline),))


def _rows(roofline: Roofline, only: str | None) -> list[RooflineRow]:
    """Return the rows in the order in which their first events run."""
    rows: dict[object, RooflineRow] = {}
    for event in roofline.events:
        if only not in (None, event.kind):
            continue
        if event.kind == COMMUNICATION:
            key: object = (event.value, event.phase, event.name)
            row = RooflineRow(f"{SIGNS[event.phase]} {event.name}")
        else:
            key, row = (event.value, event.name), RooflineRow(event.name)
        rows.setdefault(key, row).events.append(event)
    return _in_order([*rows.values()])


def _rows_by_module(roofline: Roofline) -> list[RooflineRow]:
    """Return a row for the computation and one for the communication of every module."""
    rows: dict[object, RooflineRow] = {}
    for event in roofline.events:
        name = event.module or "(no module)"
        name += f" {COMMUNICATION}" if event.kind == COMMUNICATION else ""
        rows.setdefault(name, RooflineRow(name)).events.append(event)
    return [*rows.values()]


def _in_order(rows: list[RooflineRow]) -> list[RooflineRow]:
    """Return rows with operations that only run backward after the ones before them forward.

    Views are such operations: they are free in the forward pass.
    """
    forward = [row for row in rows if row.events[0].phase == FORWARD]
    values = [row.value for row in forward]
    later: list[RooflineRow] = []
    inserted: dict[int, list[RooflineRow]] = {}
    for row in rows:
        if row.events[0].phase == FORWARD:
            continue
        before = [i for i, value in enumerate(values) if 0 <= value < row.value]
        if before and row.value < max(values):
            inserted.setdefault(before[-1], []).append(row)
        else:
            later.append(row)
    result = []
    for index, row in enumerate(forward):
        result += [row, *sorted(inserted.get(index, ()), key=lambda row: row.value)]
    return result + later


def _cells(layers: Sequence[RooflineRow], indent: str) -> Row:
    """Return the cells of a row: the mean of equal layers, or the sum of equal rows in a row."""
    n, name = len(layers), layers[0].name
    name = name if n == 1 else of_any_layer(name)
    row = RooflineRow(name, [x for row in layers for x in row.events])
    if not indent and n > 1:
        row.name, n = f"{n} x {row.name}", 1
    flops = count_text(row.flops // n) if row.flops else ""
    times = (row.time(forward=forward) / n for forward in (True, False))
    return (f"{indent}{row.name}", flops, bytes_text(row.nbytes // n),
            *(time_text(time) if time else "" for time in times), _bound(row, n)
            )  # fmt: skip


def _bound(row: RooflineRow, layers: int) -> str:
    """Return the limit of an operation; of a collective the wait."""
    longest = max(row.events, key=lambda event: event.time)
    if longest.kind == COMPUTE:
        return longest.bound
    waited = sum(event.waited for event in row.events) / layers
    return f"waits {time_text(waited)}" if waited else "hidden"


def _footer(roofline: Roofline, only: str | None) -> Iterator[Row]:
    for kind in (COMPUTE, COMMUNICATION):
        events = roofline.of(kind)
        if only in (None, kind) and events:
            flops, nbytes = (sum(getattr(x, name) for x in events) for name in ("flops", "nbytes"))
            times = [sum(x.time for x in events if (x.phase == FORWARD) == forward)
                     for forward in (True, False)]  # fmt: skip
            yield (kind, count_text(flops) if kind == COMPUTE else "", bytes_text(nbytes),
                   *map(time_text, times), "")  # fmt: skip
    yield "step", "", "", *map(time_text, roofline.passes), ""


def _notes(roofline: Roofline) -> Iterator[str]:
    total, in_turn = time_text(roofline.time), time_text(roofline.time_in_turn)
    yield f"{total} a step, {in_turn} without overlap"
    yield roofline.bound_text
    beside: dict[str, dict[str, None]] = {}
    for event in roofline.of(COMMUNICATION):
        names = dict.fromkeys(x.name for x in roofline.overlapped(event))
        if names:
            beside.setdefault(f"{SIGNS[event.phase]} {event.name}", {}).update(names)
    for name, others in beside.items():
        shown = ", ".join([*others][:MAX_BESIDE])
        more = f" and {len(others) - MAX_BESIDE} more" if len(others) > MAX_BESIDE else ""
        yield f"{name} beside {shown}{more}"
