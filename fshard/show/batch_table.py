"""`batch.explain()`: the steps of each leaf of a tree, and the collectives that are one launch."""

from __future__ import annotations

from dataclasses import dataclass

from fshard._util.notebook_view import table_of
from fshard._util.text import bytes_text, plural, ratio_text, time_text
from fshard.plan.batch.batch import Batch
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import lower_bound_together
from fshard.show.table import Column, Table, Tables

LEAVES = (
    Column("leaf", wrap=True), Column("from", wrap=True), Column("to", wrap=True),
    Column("sent", right=True), Column("time", right=True),
)  # fmt: skip
LAUNCHES = (
    Column("launch"), Column("group", wrap=True), Column("leaves", right=True),
    Column("sent", right=True),
)  # fmt: skip
SUMMARY = (
    Column("total"), Column("this batch", right=True), Column("leaf by leaf", right=True),
    Column("ratio", right=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class BatchExplanation(Tables):
    """Tables of a batch's leaves and launches on a topology; prints as text, in rich and as HTML.

    Leaves that do the same are one row. Bytes are the busiest rank's, of each leaf, of each launch
    and in total; times are estimates of an alpha-beta model.

    Attributes:
        batch: The batch.
        topology: The machine that it is costed on.
    """

    batch: Batch
    topology: Topology

    @property
    def leaves(self) -> Table:
        """One row per program: path, source, target, bytes sent, and time if it ran alone."""
        rows = []
        for name, prog in self.batch.distinct_programs():
            cost = prog.cost(self.topology)
            ends = (
                f"{spec} on {spec.mesh}" if self.batch.meshes[1:] else str(spec)
                for spec in (prog.src, prog.dst)
            )
            rows.append((name, *ends, bytes_text(cost.bytes_sent), time_text(cost.time)))
        count = sum(leaf is not None for leaf in self.batch.leaves)
        on = f" on {self.batch.meshes[0]}" if len(self.batch.meshes) == 1 else ""
        title = f"a tree of {plural(count, 'program')}{on}, topology {self.topology.title}"
        return Table(title, LEAVES, tuple(rows))

    @property
    def launches(self) -> Table:
        """One row per launch: operation, group of ranks, number of leaves, bytes sent."""
        rows = []
        several = len(self.batch.meshes) > 1
        for launch in self.batch.launches:
            group, count = launch.scope(with_mesh=several), str(len(launch.steps))
            rows.append((launch.name, group, count, bytes_text(self.batch.bytes_sent_in(launch))))
        return Table("", LAUNCHES, tuple(rows), notes=() if rows else ("no communication",))

    @property
    def summary(self) -> Table:
        """Launches, time, bytes and memory of the batch, and of its leaves one by one."""
        cost, progs = self.batch.cost(self.topology), [leaf for leaf in self.batch.leaves if leaf]
        separate = [prog.cost(self.topology) for prog in progs]
        ends = ((p.src, p.dst, p.forward_dtype) for p in progs if p.src.shape == p.dst.shape)
        least = lower_bound_together(ends).bytes_received
        counts = cost.launches, sum(c.launches for c in separate)
        times = cost.time, sum(c.time for c in separate)
        rows = (
            ("launches", f"{counts[0]:,}", f"{counts[1]:,}", ratio_text(*counts)),
            ("time", time_text(times[0]), time_text(times[1]), ratio_text(*times)),
            ("bytes received", bytes_text(cost.bytes_received), "", ""),
            ("lower bound", bytes_text(least), "", ratio_text(cost.bytes_received, least)),
            ("peak memory", bytes_text(cost.peak_memory), "", ""),
        )  # fmt: skip
        return Table("", SUMMARY, rows)

    @property
    def tables(self) -> tuple[Table, Table, Table]:
        """The tables of leaves, of launches and of totals."""
        return self.leaves, self.launches, self.summary


@table_of.register(Batch)
def explain_batch(batch: Batch, topology: Topology) -> BatchExplanation:
    """Return the explanation of a batch: the implementation of `Batch.explain`.

    >>> import fshard as fs
    >>> src = [fs.Spec(fs.Mesh(x=4), fs.P("x"), shape=(n,)) for n in (8, 8, 4)]
    >>> wires = fs.Topology.of({"x": fs.Link(latency=0.0, bandwidth=24e6)})
    >>> batch = fs.redistribute(src, [spec.replace(partition=fs.P()) for spec in src])
    >>> print(batch.explain(wires))
    a tree of 3 programs on Mesh(x=4), topology custom
    leaf            from      to      sent     time
    ───────────────────────────────────────────────
    [0] and 1 more  f32[8@x]  f32[8]  24 B  7.45 µs
    [2]             f32[4@x]  f32[4]  12 B  6.95 µs
    <BLANKLINE>
    launch      group   leaves  sent
    ────────────────────────────────
    all_gather  over x       3  60 B
    <BLANKLINE>
    total           this batch  leaf by leaf  ratio
    ───────────────────────────────────────────────
    launches                 1             3  0.33x
    time               8.95 µs       21.8 µs  0.41x
    bytes received        60 B
    lower bound           60 B                1.00x
    peak memory           80 B
    """
    return BatchExplanation(batch, topology)
