"""`visualize`: pictures of layouts, tensors, meshes and programs."""

from __future__ import annotations

import torch

from fshard._util.errors import fail
from fshard.layout.sharded import Pair
from fshard.layout.spec import Spec
from fshard.layout.tree import is_pair
from fshard.run.execute import check_local, check_shards
from fshard.run.transports.base import current_rank
from fshard.show.pictures.layout_picture import Picture


def visualize(value: Spec | Pair, /, *, header: str = "", values: bool = False) -> Picture:
    """Draw the layout of a spec or of a pair on its mesh.

    Two dims are drawn in proportion, the last ones that are sharded, with a picture for each shard
    of the other dims. A cell is a shard with the ranks that hold it: a comma between invariant
    replicas, `&` between reduced ones, a plus between unreduced values. Every mesh axis has a
    colour and a mark. Of many shards only the first and the last are shown.

    Args:
        value: A `Spec`, or a (local, spec) pair, which also shows how its locals make up the global
            tensor.
        header: Line above the picture, as in DTensor's `visualize_sharding`.
        values: True to show the values of a pair in its cells, for small tensors. Replicas that
            differ are shown one by one.

    Returns:
        A `Picture`, which prints as text, in `rich` and as HTML in a notebook.

    Raises:
        ShardingError: If a local does not fit its spec, `value` is neither a spec nor a pair, or a
            spec has no `values`.

    >>> import fshard as fs
    >>> print(fs.visualize(fs.Spec(fs.Mesh(dp=2, tp=2), fs.P("tp"), shape=(4,))))
    f32[4@tp] on Mesh(dp=2, tp=2)
    ● dp=2 invariant   ▲ tp=2 shards dim 0
                     tp=0                     tp=1
    dim 0            0:2                      2:4
          ┌────────────────────────┬────────────────────────┐
          │          0, 2          │          1, 3          │
          └────────────────────────┴────────────────────────┘
    each rank holds f32[2], 8 B of 16 B
    invariant over dp: ranks such as 0, 2 hold the same
    """
    if isinstance(value, Spec):
        if values:
            fail("fs.visualize", f"values=True for the layout {value}", "values must be those of a "
                 "pair", "fs.visualize((local, spec), values=True)")  # fmt: skip
        return Picture(value, header=header)
    if not is_pair(value):
        fail("fs.visualize", f"a {type(value).__name__}", "the value must be a Spec or a "
             "(local, spec) pair", "fs.visualize(spec) or fs.visualize((local, spec))")  # fmt: skip
    local, spec = value
    if not isinstance(local, torch.Tensor):
        check_shards(local, spec, "fs.visualize")
        ranks = tuple(spec.mesh.ranks)
        return Picture(
            spec, ranks, header, dict(zip(ranks, local, strict=True)) if values else None
        )
    transport = current_rank(spec.mesh, "fs.visualize")
    check_local(local, spec, transport, "fs.visualize")
    if transport.rank not in spec.mesh:
        return Picture(spec, header=header)
    return Picture(spec, (transport.rank,), header, {transport.rank: local} if values else None)
