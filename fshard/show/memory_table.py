"""`call.memory()` as a table: the peak by category, and the lines that make it."""

from __future__ import annotations

import os
from collections import Counter

from fshard._util.notebook_view import table_of
from fshard._util.text import bytes_text, percent_text, time_text
from fshard.partition.step_cost.memory_timeline import CATEGORIES, StepMemory
from fshard.show.table import Column, Row, Table

COLUMNS = (
    Column("", wrap=True), Column("begin", right=True), Column("peak", right=True),
    Column("share", right=True), Column("end", right=True),
)  # fmt: skip
MAX_VALUES = 8
"""Most lines that are listed below the categories."""


@table_of.register(StepMemory)
def memory_table(memory: StepMemory) -> Table:
    """Return the table of a step's memory: implements `StepMemory.table`.

    Categories that hold nothing have no row. Below them are the lines whose memory is the largest
    at the peak, arguments aside.

    >>> import torch
    >>> from fshard import Mesh, P, partition
    >>> f = partition(lambda w, x: (x @ w).tanh(), mesh=Mesh(dp=2), in_specs=(P(), P("dp")))
    >>> w, x = torch.empty(1024, 1024, requires_grad=True), torch.empty(4096, 1024)
    >>> print(f.trace(w, x).memory(optimizer=2))
    rank 0 of Mesh(dp=2)
                    begin      peak  share       end
    ────────────────────────────────────────────────
    parameters   4.00 MiB  4.00 MiB    8 %  4.00 MiB
    arguments    8.00 MiB  8.00 MiB   17 %  8.00 MiB
    optimizer    8.00 MiB  8.00 MiB   17 %  8.00 MiB
    gradients         0 B       0 B    0 %  4.00 MiB
    activations       0 B  8.00 MiB   17 %  8.00 MiB
    temporary         0 B  20.0 MiB   42 %       0 B
    ────────────────────────────────────────────────
    total        20.0 MiB  48.0 MiB         32.0 MiB
    peak in the backward pass, at matmul, 39.5 µs
      8.00 MiB activations: tanh
      8.00 MiB temporary: gradient of results
      8.00 MiB temporary: tanh
      4.00 MiB temporary: matmul
    """
    first, peak, last = memory.timeline[0].held, memory.peak_point.held, memory.timeline[-1].held
    rows: list[Row] = []
    for index, name in enumerate(CATEGORIES):
        if peak[index] or first[index] or last[index]:
            rows.append(
                (
                    name,
                    bytes_text(first[index]),
                    bytes_text(peak[index]),
                    percent_text(peak[index], memory.peak),
                    bytes_text(last[index]),
                )
            )
    totals = ("total", bytes_text(sum(first)), bytes_text(memory.peak), "", bytes_text(sum(last)))
    return Table(memory.title, COLUMNS, tuple(rows), (totals,), (*_notes(memory),))


def _notes(memory: StepMemory) -> list[str]:
    """Return where the peak is, and the largest lines then."""
    point = memory.peak_point
    notes = [f"peak in the {PASSES[point.phase]}, at {memory.peak_name}, {time_text(point.time)}"]
    sizes: Counter[tuple[str, str]] = Counter()
    for value in memory.values:
        if value.category not in ("parameters", "arguments"):
            place = os.path.basename(value.place)
            sizes[f"{value.name} {place}".strip(), value.category] += value.nbytes
    shown = sizes.most_common(MAX_VALUES)
    notes += [f"  {bytes_text(nbytes)} {category}: {name}" for (name, category), nbytes in shown]
    rest = len(sizes) - len(shown)
    return notes + ([f"  and {rest} more"] if rest else [])


PASSES = {"forward": "forward pass", "backward": "backward pass", "recompute": "recomputation"}
