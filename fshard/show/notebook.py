"""`_repr_mimebundle_` of values: their view in a notebook, beside their plain `str`."""

from __future__ import annotations

import html
from typing import Any

from fshard._util.notebook_view import mimebundle_hook
from fshard._util.text import bytes_text, time_text
from fshard.layout.mesh import Mesh
from fshard.layout.spec import Spec
from fshard.layout.tree import flatten, paths
from fshard.ops.core.call import name_of
from fshard.ops.strategy.strategy import Strategy
from fshard.partition.auto import Auto
from fshard.plan.batch.batch import Batch
from fshard.program.cost.model import Cost
from fshard.program.cost.topology import Topology
from fshard.program.lower_bound import Bound
from fshard.program.program import Program
from fshard.show import batch_table as batch_table
from fshard.show import program_table as program_table
from fshard.show.pictures.visualize import visualize
from fshard.show.table import Column, Row, Table

MAX_ALTERNATIVES = 12
GAP = '<div style="height:10px"></div>'
STRATEGIES = (
    Column("axes", wrap=True), Column("operands", wrap=True), Column("results", wrap=True),
    Column("received", right=True), Column("time", right=True),
)  # fmt: skip
LAYOUTS = (
    Column("argument", wrap=True), Column("layout", wrap=True), Column("time", right=True),
    Column("on a rank", right=True),
)  # fmt: skip


@mimebundle_hook.set
def mimebundle(value: Any) -> dict[str, str]:
    """Return plain `str` and HTML: tables of figures and plans, pictures of layouts and meshes.

    >>> import fshard as fs
    >>> sorted(mimebundle(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))))
    ['text/html', 'text/plain']
    """
    match value:
        case Program() | Batch():
            page = value.explain().html()
        case Spec() | Mesh():
            page = visualize(value).html()
        case Auto():
            page = GAP.join((auto_table(value).html(), value.partitioned.explain().html()))
        case Strategy():
            page = strategy_table(value).html()
        case Topology() | Cost() | Bound():
            page = figures_table(value).html()
        case _:
            page = f"<pre>{html.escape(str(value))}</pre>"
    return {"text/plain": str(value), "text/html": page}


def figures_table(value: Topology | Cost | Bound) -> Table:
    """Return the figures of a machine, a cost or a bound, a row for each.

    >>> print(figures_table(Bound(48, 32)))
    lower bound of any program
    ────────────────────────────────
    received, at least          48 B
    peak memory, at least       32 B
    """
    rows: tuple[Row, ...]
    match value:
        case Topology():
            title, *lines = str(value).splitlines()
            pairs = (line.split(maxsplit=1) for line in lines)
            rows = tuple((name, text) for name, text in pairs)
            return Table(title, (Column(""), Column("")), rows)
        case Cost():
            rows = (
                ("time", time_text(value.time)),
                ("sent by the busiest rank", bytes_text(value.bytes_sent)),
                ("received by the busiest rank", bytes_text(value.bytes_received)),
                ("peak memory", bytes_text(value.peak_memory)),
                ("launches", f"{value.launches:,}"),
                ("messages", f"{value.messages:,}"),
            )
            return Table("", (Column("cost"), Column("", right=True)), rows)
        case Bound():
            rows = (("received, at least", bytes_text(value.bytes_received)),
                    ("peak memory, at least", bytes_text(value.peak_memory)))  # fmt: skip
            return Table("", (Column("lower bound of any program"), Column("", right=True)), rows)


def strategy_table(strategy: Strategy) -> Table:
    """Return the strategy of an operation above its alternatives, the fastest first."""
    strategies = (strategy, *strategy.alternatives)
    shown = strategies[: 1 + MAX_ALTERNATIVES]
    rows = []
    for each in shown:
        cost = each.cost
        roles = ", ".join(f"{axis}: {role.name}" for axis, role in each.roles)
        results = ", ".join("none" if spec is None else str(spec) for spec in each.out_specs)
        rows.append((roles, ", ".join(map(str, each.in_specs)), results,
                     bytes_text(cost.bytes_received), time_text(cost.time)))  # fmt: skip
    more = len(strategies) - len(shown)
    notes = ("the first row is the strategy, the others are its alternatives",) if rows[1:] else ()
    return Table(f"{name_of(strategy.op)}, rule {strategy.rule}", STRATEGIES, tuple(rows),
                 notes=(*notes, *((f"{more:,} more alternatives",) if more else ())))  # fmt: skip


def auto_table(choice: Auto) -> Table:
    """Return the layout of every argument, above other layouts with the time and memory of each."""
    leaves, _ = flatten(choice.in_specs)
    rows = [(name, str(p), "", "") for name, p in zip(paths(choice.in_specs, "args"), leaves,
                                                      strict=True)]  # fmt: skip
    rows.append(("chosen", "", time_text(choice.time), bytes_text(choice.memory)))
    rows += [(f"or {name}", str(p), time_text(seconds), bytes_text(memory))
             for name, p, seconds, memory in choice.alternatives[:MAX_ALTERNATIVES]]  # fmt: skip
    return Table("layouts of the fastest step", LAYOUTS, tuple(rows))
