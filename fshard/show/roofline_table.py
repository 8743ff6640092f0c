"""`call.roofline()` as a table: operations and collectives of a step, with equal layers folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fshard._util.errors import fail
from fshard._util.text import bytes_text, count_text, time_text
from fshard.partition.step_cost.roofline import (
    COMMUNICATION,
    COMPUTE,
    FORWARD,
    RECOMPUTE,
    Roofline,
    StepEvent,
    roofline_table_hook,
)
from fshard.show.table import Column, Row, Table

COLUMNS = (
    Column("", wrap=True), Column("FLOPs", right=True), Column("bytes", right=True),
    Column("forward", right=True), Column("backward", right=True), Column("bound by", wrap=True),
)  # fmt: skip


@dataclass(slots=True)
class RooflineRow:
    """Events of one line: of its operation in both passes, or of one collective."""

    name: str
    events: list[StepEvent] = field(default_factory=list)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the rows of equal layers."""
        first = self.events[0]
        return re.sub(r"_\d+$", "", self.name), first.kind, first.place, self.flops, self.nbytes

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


@roofline_table_hook.set
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
    if only not in (None, COMPUTE, COMMUNICATION):
        fail("explain", f"only={only!r}", "only must be 'compute', 'communication' or None",
             "only='communication'")  # fmt: skip
    rows: list[Row] = []
    place, count = "", 0
    for indent, n, row in folded(_rows(roofline, only)):
        if indent and not count:
            rows.append((f"each of {n} layers:", "", "", "", "", ""))
        count = n if indent else 0
        here = row.events[0].place
        if here and here != place:
            rows.append((f"{indent}{here}", "", "", "", "", ""))
        place = here
        rows.append(_cells(roofline, row, n, indent))
    title = f"{roofline.title}, {roofline.topology.title}"
    return Table(title, COLUMNS, tuple(rows), (*_footer(roofline, only),), (*_notes(roofline),))


def _rows(roofline: Roofline, only: str | None) -> list[RooflineRow]:
    """Return the rows in the order in which their first events run."""
    rows: dict[object, RooflineRow] = {}
    for event in roofline.events:
        if only not in (None, event.kind):
            continue
        if event.kind == COMMUNICATION:
            sign = "→" if event.phase == FORWARD else "↻" if event.phase == RECOMPUTE else "←"
            key: object = (event.value, event.phase, event.name)
            row = RooflineRow(f"{sign} {event.name}")
        else:
            key, row = (event.value, event.name), RooflineRow(event.name)
        rows.setdefault(key, row).events.append(event)
    return [*rows.values()]


def folded(rows: Sequence[RooflineRow]) -> Iterator[tuple[str, int, RooflineRow]]:
    """Yield rows with those of equal layers as one, as `(indent, number of layers, row)`.

    At every row the repetition that covers most rows is folded. Rows of layers are indented.
    """
    keys, start = [row.key for row in rows], 0
    while start < len(rows):
        count, size = _repetition(keys, start)
        for i in range(start, start + size):
            layers = [rows[i + size * layer] for layer in range(count)]
            merged = RooflineRow(layers[0].name, [event for x in layers for event in x.events])
            yield "  " if size > 1 else "", count, merged
        start += count * size


def _repetition(keys: Sequence[object], start: int) -> tuple[int, int]:
    """Return how often rows from `start` on repeat, and how many repeat."""
    best = 1, 1
    for size in range(1, (len(keys) - start) // 2 + 1):
        if keys[start + size] != keys[start]:
            continue
        unit, count = keys[start : start + size], 1
        while keys[start + count * size : start + (count + 1) * size] == unit:
            count += 1
        if count > 1 and count * size > best[0] * best[1]:
            best = count, size
    return best


def _cells(roofline: Roofline, row: RooflineRow, count: int, indent: str) -> Row:
    """Return the cells of a row, per layer if it is indented."""
    layers = count if indent else 1
    name = row.name if indent or count == 1 else f"{count} x {row.name}"
    flops, nbytes = row.flops // layers, row.nbytes // layers
    times = [row.time(forward=forward) / layers for forward in (True, False)]
    return (
        f"{indent}{name}", count_text(flops) if flops else "", bytes_text(nbytes),
        *(time_text(time) if time else "" for time in times), _bound(roofline, row, layers),
    )  # fmt: skip


def _bound(roofline: Roofline, row: RooflineRow, layers: int) -> str:
    """Return the limit of an operation; of a collective the wait, or operations that hide it."""
    longest = max(row.events, key=lambda event: event.time)
    if longest.kind == COMPUTE:
        return longest.bound
    waited = sum(event.waited for event in row.events) / layers
    if waited:
        return f"waits {time_text(waited)}"
    first, *more = dict.fromkeys(event.name for event in roofline.overlapped(longest)) or [""]
    return f"behind {first}" + (", ..." if more else "") if first else "not awaited"


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
