"""Text of `fs.state.zero_table`: bytes of parameters, gradients and state, stage by stage."""

from __future__ import annotations

from fshard._util.notebook_view import table_of
from fshard._util.text import bytes_text
from fshard.show.table import Column, Table
from fshard.state.optimizers.zero import ZeroTable

COLUMNS = (
    Column(""), Column("parameters", right=True), Column("gradients", right=True),
    Column("state", right=True), Column("sum", right=True),
)  # fmt: skip


@table_of.register(ZeroTable)
def stages_table(table: ZeroTable) -> Table:
    """Return a row per stage: bytes of the busiest rank.

    >>> import fshard as fs
    >>> specs = [fs.Spec(fs.Mesh(dp=2), fs.P(), shape=(8,))]
    >>> stages_table(fs.state.zero_table(specs, "dp", fs.state.sgd(0.1))).rows[3]
    ('ZeRO-3, FSDP', '16 B', '16 B', '0 B', '32 B')
    """
    rows = []
    for stage in table:
        counts = (stage.params_nbytes, stage.grads_nbytes, stage.state_nbytes)
        rows.append((stage.name, *map(bytes_text, (*counts, sum(counts)))))
    title = f"bytes of the busiest rank, sharded over {', '.join(table.axes)}"
    return Table(title, COLUMNS, tuple(rows))
