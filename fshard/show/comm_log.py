"""`comm_log`: what really ran, counted per operation and axes, forward and backward apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fshard._util.text import WIDTH, bytes_text, plural
from fshard.run.transports.base import Event, observe
from fshard.show.table import Column, Table

__all__ = ["CommLog", "Phase", "comm_log"]

Key = tuple[str, str | tuple[str, ...]]
"""An operation and its axis, or its axes where there are several: `("all_reduce", "tp")`."""

COLUMNS = (
    Column("operation"), Column("axes", wrap=True), Column("forward", right=True),
    Column("bytes", right=True), Column("backward", right=True), Column("bytes", right=True),
)  # fmt: skip


APART = "each number is of its own busiest rank, so they need not add up"


class Phase:
    """Launches and bytes of one phase, per operation and axes, as the busiest rank ran them.

    What did not run counts 0.
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
        """How often each operation ran: a program that all ranks run counts once."""
        return self._busiest(0)

    @property
    def bytes(self) -> Counter[Key]:
        """Bytes that the busiest rank sent in each operation."""
        return self._busiest(1)

    def _busiest(self, which: int) -> Counter[Key]:
        most: Counter[Key] = Counter()
        for rank in sorted(self._ranks):
            most |= self._ranks[rank][which]
        # A counter's union leaves out zeros; a launch that sends nothing still is a launch.
        return Counter({key: most[key] for key in self._keys()})

    def _keys(self) -> list[Key]:
        return list(dict.fromkeys(key for each in self._ranks.values() for key in each[0]))

    @property
    def total_bytes(self) -> int:
        """Bytes that the busiest rank sent."""
        return max((sent.total() for _, sent in self._ranks.values()), default=0)


class CommLog:
    """The collectives that ran in a `with fs.comm_log()` block; stays readable after it.

    `counts` and `bytes` are of both phases; `forward` and `backward` have the same of one.
    """

    __slots__ = ("_all", "backward", "forward")

    def __init__(self) -> None:
        self.forward, self.backward, self._all = Phase(), Phase(), Phase()

    def _record(self, event: Event) -> None:
        axes = event.axes[0] if len(event.axes) == 1 else event.axes
        phase = self.backward if event.phase == "backward" else self.forward
        for each in (phase, self._all):
            each._record((event.op, axes), event)

    @property
    def counts(self) -> Counter[Key]:
        """How often each operation ran: `log.counts["all_reduce", "tp"]`."""
        return self._all.counts

    @property
    def bytes(self) -> Counter[Key]:
        """Bytes that the busiest rank sent in each operation."""
        return self._all.bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that the busiest rank sent in all."""
        return self._all.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """Lists, strings and numbers alone, ready for JSON."""
        found: dict[str, Any] = {"total_bytes": self.total_bytes}
        for name, phase in (("forward", self.forward), ("backward", self.backward)):
            counts, sent = phase.counts, phase.bytes
            found[name] = [
                {"op": op, "axes": list(_axes(axes)), "count": counts[op, axes],
                 "bytes": sent[op, axes]}
                for op, axes in counts
            ]  # fmt: skip
        return found

    @property
    def table(self) -> Table:
        """One row per operation and axes; the last one is of all, also by its busiest rank."""
        phases = (self.forward, self.backward)
        rows = []
        for key in self.counts:
            cells = [key[0], ", ".join(_axes(key[1])) or "(two meshes)"]
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
        notes = () if sum(most) == self.total_bytes else (APART,)
        return Table(title, COLUMNS, tuple(rows), (tuple(total),), notes)

    def text(self, width: int = WIDTH) -> str:
        """Plain text of at most `width` columns."""
        return self.table.text(width) if self.counts else "no collective ran"

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def __rich__(self) -> Any:
        return self.table if self.counts else "no collective ran"

    def html(self) -> str:
        """A self-contained HTML table."""
        return self.table.html() if self.counts else "<div>no collective ran</div>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


def _axes(axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes


@contextmanager
def comm_log() -> Iterator[CommLog]:
    """Count the collectives that run in the block, on every simulated rank or on this one.

    Blocks may nest: both logs see everything that runs in the inner one.

    >>> import torch
    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> from fshard.run.global_tensors import reshard, shard
    >>> from fshard.layout.spec import Spec
    >>> x = shard(torch.arange(4.0), Spec(Mesh(tp=2), P("tp"), shape=(4,)))
    >>> with comm_log() as log:
    ...     _ = reshard(x, P())
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
