"""Layouts in which a redistribution may change the dtype.

A cast to a smaller dtype costs least before what is sent and after what is sliced, a cast to a
larger one the other way round. The layouts are those of the plans without the cast, in each of the
two dtypes, and those between a reduction to shards and a gather of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from fshard.program.cast_rules import represents


def cast_layouts(src: Spec, dst: Spec, paths: Iterable[Spec]) -> list[Spec]:
    """Return layouts in which a tensor of `src.dtype` may be cast to `dst.dtype`.

    Their states must allow both dtypes, and the cast must commute with their reductions. The first
    one is of the end that sends fewer bytes, if it may be; `dst` without reductions always may.
    """
    narrows = dst.dtype.itemsize < src.dtype.itemsize
    ends = [src, dst] if narrows else [dst, src]
    invariant = [end._with(partition=PartitionSpec._of(end.partition.dims)) for end in (dst, src)]
    layouts = [*ends, *invariant, *paths]
    layouts += [spread for end in ends for spread in _spread(end)]
    dtypes = src.dtype, dst.dtype
    unique = dict.fromkeys(layout._with(dtype=src.dtype) for layout in layouts)
    return [layout for layout in unique if _may_cast(layout, *dtypes)]


def _spread(spec: Spec) -> list[Spec]:
    """Return a spec with its axes that shard nothing appended to each dim they divide in turn.

    Unreduced axes are minor, so that a slice comes before their reduction.
    """
    p, mesh = spec.partition, spec.mesh
    used, unreduced = {axis for dim in p.dims for axis in dim}, (*p.unreduced,)
    free = tuple(axis for axis in mesh.axes if axis not in {*used, *unreduced})
    groups = {(*free, *unreduced), unreduced} - {()}
    return [
        Spec._of(mesh, PartitionSpec._of((*p.dims[:i], (*p.dims[i], *axes), *p.dims[i + 1 :])),
                 spec.shape, spec.dtype, spec.sizes)
        for axes in sorted(groups)
        for i, size in enumerate(spec.shape)
        if spec.sizes[i] is None and size % mesh.axis_size((*p.dims[i], *axes)) == 0
    ]  # fmt: skip


def _may_cast(layout: Spec, old: torch.dtype, new: torch.dtype) -> bool:
    p = layout.partition
    if p.unreduced_kinds and not represents(new, old):
        return False
    kinds = p.unreduced_kinds, p.reduced_kinds
    return not any(state_problems(*kinds, dtype) for dtype in (old, new))
