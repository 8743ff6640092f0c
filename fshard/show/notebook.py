"""`_repr_mimebundle_` of specs, programs and batches: their view in a notebook."""

from __future__ import annotations

import html

from fshard.layout.spec import Spec, mimebundle_hook
from fshard.plan.batch.batch import Batch
from fshard.program.program import Program
from fshard.show import batch_table as batch_table
from fshard.show import program_table as program_table
from fshard.show.pictures.visualize import visualize


@mimebundle_hook.set
def mimebundle(value: Spec | Program | Batch) -> dict[str, str]:
    """Return plain `str` and HTML: tables of a program or batch, a picture of a small spec.

    >>> import fshard as fs
    >>> sorted(mimebundle(fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(4,))))
    ['text/html', 'text/plain']
    """
    if isinstance(value, Program | Batch):
        page = value.explain().html()
    elif value.ndim <= 2 and value.num_shards <= 64:
        page = visualize(value).html()
    else:
        page = f"<code>{html.escape(f'{value} on {value.mesh}')}</code>"
    return {"text/plain": str(value), "text/html": page}
