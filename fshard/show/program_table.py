"""`prog.explain()`: each step of a program and its cost, beside the lower bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fshard._util.text import WIDTH, bytes_text, ratio_text, time_text
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import lower_bound
from fshard.program.program import Program, explain_program_hook
from fshard.show.table import Column, Table

STEPS = (
    Column("step", wrap=True), Column("spec after", wrap=True), Column("sent", right=True),
    Column("time", right=True), Column("memory", right=True),
)  # fmt: skip
SUMMARY = (
    Column("busiest rank"), Column("this program", right=True),
    Column("lower bound", right=True), Column("ratio", right=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """Tables of a program's steps and totals on a topology; prints as text, in rich and as HTML.

    Bytes are the busiest rank's, times are estimates of an alpha-beta model, memory is the larger
    of a step's input and output. The lower bounds hold for every program between the two specs.

    Attributes:
        prog: The program.
        topology: The machine that it is costed on.
    """

    prog: Program
    topology: Topology

    @property
    def steps(self) -> Table:
        """One row per step: the spec after it, bytes sent, time and memory."""
        prog = self.prog
        rows = [("(start)", str(prog.src), "", "", bytes_text(_source_memory(prog)))]
        for i, step in enumerate(prog.steps):
            single = Program(prog.specs[i], (step,), forward_dtype=prog.forward_dtype)
            cost = single.cost(self.topology)
            rows.append((str(step), str(prog.specs[i + 1]), bytes_text(cost.bytes_sent),
                         time_text(cost.time), bytes_text(cost.peak_memory)))  # fmt: skip
        title = f"{prog.ends}, topology {self.topology.title}"
        return Table(title, STEPS, tuple(rows), notes=() if prog.steps else ("nothing to do",))

    @property
    def summary(self) -> Table:
        """Totals of the busiest rank beside the lower bounds."""
        cost = self.prog.cost(self.topology)
        prog = self.prog
        bound = lower_bound(prog.src, prog.dst, forward_dtype=prog.forward_dtype)
        rows = (
            ("bytes received", bytes_text(cost.bytes_received), bytes_text(bound.bytes_received),
             ratio_text(cost.bytes_received, bound.bytes_received)),
            ("peak memory", bytes_text(cost.peak_memory), bytes_text(bound.peak_memory),
             ratio_text(cost.peak_memory, bound.peak_memory)),
            ("bytes sent", bytes_text(cost.bytes_sent), "", ""),
            ("launches", f"{cost.launches:,}", "", ""),
            ("time", time_text(cost.time), "", ""),
        )  # fmt: skip
        return Table("", SUMMARY, rows)

    def text(self, width: int = WIDTH) -> str:
        """Return plain text of at most `width` columns."""
        return f"{self.steps.text(width)}\n\n{self.summary.text(width)}"

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(self.steps, "", self.summary)

    def html(self) -> str:
        """Return two self-contained HTML tables."""
        return f'{self.steps.html()}<div style="height:10px"></div>{self.summary.html()}'

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


@explain_program_hook.set
def explain(prog: Program, topology: Topology) -> Explanation:
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
    busiest rank    this program  lower bound  ratio
    ────────────────────────────────────────────────
    bytes received          24 B         24 B  1.00x
    peak memory             32 B         32 B  1.00x
    bytes sent              24 B
    launches                   1
    time                 7.45 µs
    """
    return Explanation(prog, topology)


def _source_memory(prog: Program) -> int:
    return Program(prog.src, ()).cost().peak_memory
