"""What a notebook shows of values: the hook that `_repr_mimebundle_` asks."""

from __future__ import annotations

import html

from fshard.layout.spec import Spec, mimebundle_hook
from fshard.plan.batch.batch import Batch
from fshard.program.cost.topology import Topology
from fshard.program.program import Program
from fshard.show.batch_table import explain_batch
from fshard.show.layout_picture import visualize
from fshard.show.program_table import explain

__all__ = ["mimebundle"]


@mimebundle_hook.set
def mimebundle(value: Spec | Program | Batch) -> dict[str, str]:
    """Plain `str` and HTML: tables of a program or a batch, a spec's picture where it is small.

    >>> from fshard.layout.mesh import Mesh
    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> sorted(mimebundle(Spec(Mesh(x=2), P("x"), shape=(4,))))
    ['text/html', 'text/plain']
    """
    if isinstance(value, Program):
        page = explain(value, Topology.node()).html()
    elif isinstance(value, Batch):
        page = explain_batch(value, Topology.node()).html()
    elif value.ndim <= 2 and value.num_shards <= 64:
        page = visualize(value).html()
    else:
        page = f"<code>{html.escape(f'{value} on {value.mesh}')}</code>"
    return {"text/plain": str(value), "text/html": page}
