"""`print(distributed)`: the layout of every parameter and buffer of a module."""

from __future__ import annotations

from fshard._util.notebook_view import table_of
from fshard._util.text import bytes_text
from fshard.layout.spec import Spec
from fshard.program.cost.traffic import max_local_nbytes
from fshard.show.table import Column, Row, Table
from fshard.state.modules.distributed_module import DistributedModule

COLUMNS = (
    Column("", wrap=True), Column("layout", wrap=True), Column("bytes", right=True),
    Column("of a rank", right=True),
)  # fmt: skip


@table_of.register(DistributedModule)
def module_table(distributed: DistributedModule) -> Table:
    """Return a table of the tensors of a module with their layouts, and their bytes in all.

    Bytes of a rank are those of the rank that holds most. Other names of a tied tensor follow the
    first one.

    >>> import torch
    >>> import fshard as fs
    >>> print(module_table(fs.state.distribute_module(torch.nn.Linear(4, 8), fs.Mesh(x=2),
    ...                                               fsdp="x")))
    Linear on Mesh(x=2): 2 parameters, 0 buffers
            layout      bytes  of a rank
    ────────────────────────────────────
    weight  f32[8@x,4]  128 B       64 B
    bias    f32[8@x]     32 B       16 B
    ────────────────────────────────────
                        160 B       80 B
    """
    names = _all_names(distributed)
    specs = {name: spec for group in distributed.specs.values() for name, spec in group.items()}
    rows = [_row(" = ".join(names[name]), spec) for name, spec in specs.items()]
    nbytes = [spec.nbytes for spec in specs.values()], [*map(max_local_nbytes, specs.values())]
    footer: Row = ("", "", *(bytes_text(sum(counts)) for counts in nbytes))
    return Table(repr(distributed), COLUMNS, tuple(rows), (footer,))


def _row(name: str, spec: Spec) -> Row:
    return name, str(spec), bytes_text(spec.nbytes), bytes_text(max_local_nbytes(spec))


def _all_names(distributed: DistributedModule) -> dict[str, list[str]]:
    """Return all names of every tensor, by the first one."""
    module, firsts = distributed.module, dict[int, str]()
    names: dict[str, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, x in named(remove_duplicate=False):
            names.setdefault(firsts.setdefault(id(x), name), []).append(name)
    return names
