"""`comm_log`: collectives that ran, counted per operation and axes, forward and backward apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fshard._util.text import WIDTH, bytes_text, plural
from fshard.run.transports.base import Event, observe
from fshard.show.table import Column, Table

Key = tuple[str, str | tuple[str, ...]]
"""An operation and its axis, or a tuple of several axes: `("all_reduce", "tp")`."""

COLUMNS = (
    Column("operation"), Column("axes", wrap=True), Column("forward", right=True),
    Column("bytes", right=True), Column("backward", right=True), Column("bytes", right=True),
)  # fmt: skip


TOTAL_NOTE = "each figure is the busiest rank's, so rows need not add up to the total"


class Phase:
    """Launches and bytes of one phase, per operation and axes, of the busiest rank.

    Operations that did not run count 0.
    """

    __slots__ = ("_ranks",)

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[Counter[Key], Counter[Key]]] = {}

    def _record(self, key: Key, event: Event) -> None:
        launches, sent = self._ranks.setdefault(event.rank, (Counter(), Counter()))
        launches[key] += 1
        sent[key] += event.nbytes

    @property
    def counts(self) -> Counter[Key]:
        """Number of launches of each operation: a program that all ranks run counts once."""
        return self._busiest(0)

    @property
    def bytes(self) -> Counter[Key]:
        """Bytes that the busiest rank sent in each operation."""
        return self._busiest(1)

    def _busiest(self, which: int) -> Counter[Key]:
        most: Counter[Key] = Counter()
        for rank in sorted(self._ranks):
            most |= self._ranks[rank][which]
        # The union of counters drops zeros, but a launch that sends nothing is a launch.
        keys = dict.fromkeys(key for launches, _ in self._ranks.values() for key in launches)
        return Counter({key: most[key] for key in keys})

    @property
    def total_bytes(self) -> int:
        """Bytes that the busiest rank sent."""
        return max((sent.total() for _, sent in self._ranks.values()), default=0)


class CommLog:
    """Collectives that ran in a `with fs.comm_log()` block; it stays readable after the block.

    It prints as a table, in rich and in a notebook.

    Attributes:
        forward: Counts and bytes of forward passes, with the same properties.
        backward: Counts and bytes of backward passes, with the same properties.

    >>> import torch
    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))
    >>> with fs.comm_log() as log:
    ...     y = fs.redistribute(src, src.replace(partition=fs.P()))((torch.ones(2),) * 2)
    >>> log.counts["all_gather", "x"], log.total_bytes
    (1, 8)
    """

    __slots__ = ("_all", "backward", "forward")

    def __init__(self) -> None:
        self.forward, self.backward, self._all = Phase(), Phase(), Phase()

    def _record(self, event: Event) -> None:
        axes = event.axes[0] if len(event.axes) == 1 else event.axes
        phase = self.backward if event.phase == "backward" else self.forward
        for log in (phase, self._all):
            log._record((event.op, axes), event)

    @property
    def counts(self) -> Counter[Key]:
        """Number of launches of each operation: `log.counts["all_reduce", "tp"]`."""
        return self._all.counts

    @property
    def bytes(self) -> Counter[Key]:
        """Bytes that the busiest rank sent in each operation, as for `counts`."""
        return self._all.bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that the busiest rank sent in all operations."""
        return self._all.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the log as lists, strings and ints only, ready for JSON."""
        result: dict[str, Any] = {"total_bytes": self.total_bytes}
        for name, phase in (("forward", self.forward), ("backward", self.backward)):
            counts, sent = phase.counts, phase.bytes
            result[name] = [
                {"op": op, "axes": list(_axes(axes)), "count": counts[op, axes],
                 "bytes": sent[op, axes]}
                for op, axes in counts
            ]  # fmt: skip
        return result

    @property
    def table(self) -> Table:
        """One row per operation and axes, and the total of the busiest rank."""
        phases = (self.forward, self.backward)
        rows = []
        for key in self.counts:
            cells = [key[0], ", ".join(_axes(key[1])) or "(between meshes)"]
            for phase in phases:
                launches = phase.counts[key]
                cells += [f"{launches:,}", bytes_text(phase.bytes[key])] if launches else ["", ""]
            rows.append(tuple(cells))
        total = ["total", ""]
        for phase in phases:
            launches = phase.counts.total()
            total += [f"{launches:,}", bytes_text(phase.total_bytes)] if launches else ["", ""]
        title = (f"{plural(self.counts.total(), 'collective')}, "
                 f"{bytes_text(self.total_bytes)} sent by the busiest rank")  # fmt: skip
        most = [sum(phase.bytes.values()) for phase in phases]
        notes = () if sum(most) == self.total_bytes else (TOTAL_NOTE,)
        return Table(title, COLUMNS, tuple(rows), (tuple(total),), notes)

    def text(self, width: int = WIDTH) -> str:
        """Return plain text of at most `width` columns."""
        return self.table.text(width) if self.counts else "no collective ran"

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def __rich__(self) -> Any:
        return self.table if self.counts else "no collective ran"

    def html(self) -> str:
        """Return a self-contained HTML table."""
        return self.table.html() if self.counts else "<div>no collective ran</div>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


def _axes(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


@contextmanager
def comm_log() -> Iterator[CommLog]:
    """Count the collectives that run in a `with` block, on every simulated rank or on this one.

    Blocks may nest: the outer log counts everything that runs in the inner block too. Collectives
    of backward passes are counted apart.

    Returns:
        A context manager that gives the `CommLog`.

    >>> import torch
    >>> import fshard as fs
    >>> x = fs.shard(torch.arange(4.0), fs.Spec(fs.Mesh(tp=2), fs.P("tp"), shape=(4,)))
    >>> with fs.comm_log() as log:
    ...     _ = fs.reshard(x, fs.P())
    >>> log.counts["all_gather", "tp"], log.bytes["all_gather", "tp"]
    (1, 8)
    >>> print(log)
    1 collective, 8 B sent by the busiest rank
    operation   axes  forward  bytes  backward  bytes
    ─────────────────────────────────────────────────
    all_gather  tp          1    8 B
    ─────────────────────────────────────────────────
    total                   1    8 B
    """
    log = CommLog()
    with observe(log._record):
        yield log
