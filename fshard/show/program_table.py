"""`prog.explain()`: each step of a program and its cost, beside the lower bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fshard._util.notebook_view import table_of
from fshard._util.text import bytes_text, percent_text, ratio_text, time_text
from fshard.program.cost.model import TimeParts, step_link, step_parts
from fshard.program.cost.topology import Topology
from fshard.program.cost.traffic import step_axes
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program, wire_specs
from fshard.program.steps import Step
from fshard.show.table import Column, Table, Tables

STEPS = (
    Column("step", wrap=True), Column("spec after", wrap=True), Column("sent", right=True),
    Column("time", right=True), Column("memory", right=True),
)  # fmt: skip
TIMES = (
    Column("time of", wrap=True), Column("startup", right=True), Column("wire", right=True),
    Column("copies", right=True), Column("link", wrap=True),
)  # fmt: skip
SUMMARY = (
    Column("busiest rank"), Column("this program", right=True),
    Column("lower bound", right=True), Column("ratio", right=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Tables):
    """Tables of a program's steps, times and totals on a topology; prints as text, rich and HTML.

    Bytes are the busiest rank's, times are estimates of the LogGP model: startup (launch, rounds
    and messages), bytes on the wire, and copies. Memory is the larger of a step's input and output.
    The lower bounds hold for every program between the two specs.

    Attributes:
        prog: The program.
        topology: The machine that it is costed on.
        only: "communication" or "compute" to show these steps alone, None for all.
    """

    prog: Program
    topology: Topology
    only: str | None = None

    @property
    def steps(self) -> Table:
        """One row per step: the spec after it, bytes sent, time and memory."""
        prog = self.prog
        rows = [("(start)", str(prog.src), "", "", bytes_text(_source_memory(prog)))]
        for i, step in enumerate(prog.steps):
            single = Program(prog.specs[i], (step,), forward_dtype=prog.forward_dtype)
            cost = single.cost(self.topology)
            if not self._shows(communicates=cost.launches > 0):
                continue
            rows.append((str(step), str(prog.specs[i + 1]), bytes_text(cost.bytes_sent),
                         time_text(cost.time), bytes_text(cost.peak_memory)))  # fmt: skip
        title = f"{prog.ends}, topology {self.topology.title}"
        return Table(title, STEPS, tuple(rows), notes=() if prog.steps else ("nothing to do",))

    @property
    def times(self) -> Table:
        """One row per step that takes time: its startup, its wire and its copies, and its link."""
        legs = [leg for leg in self._legs() if leg[1].total]
        rows = [
            (str(step), *map(time_text, time), name)
            for step, time, name in legs
            if self._shows(communicates=bool(name))
        ]
        return Table("", TIMES, tuple(rows), notes=(self.bound_text,) if rows else ())

    @property
    def bound_text(self) -> str:
        """The part of the time that is the longest, with the link that it is spent on."""
        shares: dict[str, float] = {}
        for _, time, link in self._legs():
            parts = f"startup on {link}", f"bandwidth of {link}", "copies in memory"
            for name, seconds in zip(parts, time, strict=True):
                shares[name] = shares.get(name, 0.0) + seconds
        total = sum(shares.values())
        if not total:
            return "takes no time"
        longest = max(shares, key=lambda name: shares[name])
        share = percent_text(shares[longest], total)
        return f"bound by {longest}: {share} of {time_text(total)}"

    def _shows(self, *, communicates: bool) -> bool:
        """Return True if a step is among those that are shown."""
        return self.only in (None, "communication" if communicates else "compute")

    def _legs(self) -> Iterator[tuple[Step, TimeParts, str]]:
        """Yield every step, the parts of its time, and the name and figures of its link."""
        wire = wire_specs(self.prog)
        for step, src, dst in zip(self.prog.steps, wire, wire[1:], strict=False):
            time, name = step_parts(self.topology, step, src, dst), ""
            if time.startup or time.wire:
                several = src.mesh != dst.mesh
                axes = ", ".join(step_axes(step, src, dst))
                link = step_link(self.topology, step, src, dst)
                name = f"{'two meshes' if several else axes} ({link})"
            yield step, time, name

    @property
    def summary(self) -> Table:
        """Totals of the busiest rank beside the lower bounds, which halos have none of."""
        cost = self.prog.cost(self.topology)
        prog = self.prog
        bounds = [("", "")] * 2
        if prog.src.shape == prog.dst.shape:
            bound = lower_bound(prog.src, prog.dst, forward_dtype=prog.forward_dtype)
            bounds = [(bytes_text(least), ratio_text(most, least)) for most, least in (
                (cost.bytes_received, bound.bytes_received), (cost.peak_memory, bound.peak_memory)
            )]  # fmt: skip
        rows = (
            ("bytes received", bytes_text(cost.bytes_received), *bounds[0]),
            ("peak memory", bytes_text(cost.peak_memory), *bounds[1]),
            ("bytes sent", bytes_text(cost.bytes_sent), "", ""),
            ("launches", f"{cost.launches:,}", "", ""),
            ("time", time_text(cost.time), "", ""),
        )  # fmt: skip
        return Table("", SUMMARY, rows)

    @property
    def tables(self) -> list[Table]:
        """All tables that have rows."""
        return [table for table in (self.steps, self.times, self.summary) if table.rows]


@table_of.register(Program)
def explain(prog: Program, topology: Topology, only: str | None = None) -> Explanation:
    """Return the explanation of a program: the implementation of `Program.explain`.

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(x=4), fs.P("x"), shape=(8,))
    >>> wires = fs.Topology.of({"x": fs.Link(latency=0.0, bandwidth=24e6)})
    >>> print(fs.redistribute(src, src.replace(partition=fs.P())).explain(wires))
    f32[8@x] -> f32[8] on Mesh(x=4), topology custom
    step                  spec after  sent     time  memory
    ───────────────────────────────────────────────────────
    (start)               f32[8@x]                      8 B
    all_gather(x, dim 0)  f32[8]      24 B  7.45 µs    32 B
    <BLANKLINE>
    time of               startup     wire  copies  link
    ───────────────────────────────────────────────────────────────────
    all_gather(x, dim 0)  6.45 µs  1.00 µs    0 µs  x (0 µs, 24.0 MB/s)
    bound by startup on x (0 µs, 24.0 MB/s): 87 % of 7.45 µs
    <BLANKLINE>
    busiest rank    this program  lower bound  ratio
    ────────────────────────────────────────────────
    bytes received          24 B         24 B  1.00x
    peak memory             32 B         32 B  1.00x
    bytes sent              24 B
    launches                   1
    time                 7.45 µs
    """
    return Explanation(prog, topology, only)


def _source_memory(prog: Program) -> int:
    return Program(prog.src, ()).cost().peak_memory
