"""What a notebook shows of values: the hook that `_repr_mimebundle_` asks."""

from __future__ import annotations

import html

from fshard.hooks import register
from fshard.plan.batch import Batch
from fshard.program.program import Program
from fshard.program.topology import Topology
from fshard.show.batches import explain_batch
from fshard.show.explain import explain
from fshard.show.layout import visualize
from fshard.spec import Spec

__all__ = ["mimebundle"]


@register("mimebundle")
def mimebundle(value: Spec | Program | Batch) -> dict[str, str]:
    """Plain `str` and HTML: tables of a program or a batch, a spec's picture where it is small.

    >>> from fshard.mesh import Mesh
    >>> from fshard.partition_spec import PartitionSpec as P
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
