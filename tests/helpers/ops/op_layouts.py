"""Layouts on which the cases of the operator database are tried."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard._util.dtypes import is_inexact
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import Spec
from fshard.layout.validation import state_problems
from tests.helpers.ops.op_database import Case

__all__ = ["COLUMNS", "Column", "layouts"]

EXACT = {"hash_tensor", "eq", "equal"}
"""Operations sensitive to the last bit of a sum: not tried on unreduced values."""


@dataclass(frozen=True)
class Column:
    """Kind of layouts: a mesh and the number of layouts tried per case.

    `states` are a tensor's states beside replicated; `foreign` layouts have no DTensor form.
    """

    name: str
    mesh: Mesh
    limit: int
    states: tuple[str, ...]
    foreign: bool = False


COLUMNS = (
    Column("replicate, 4 ranks", Mesh(x=4), 1, ()),
    Column("even, 4 ranks", Mesh(x=4), 12, ("even",)),
    Column("uneven, 3 ranks", Mesh(x=3), 12, ("chunks",)),
    Column("empty and one, 3 ranks", Mesh(x=3), 6, ("skewed",), foreign=True),
    Column("unreduced, 4 ranks", Mesh(x=4), 6, ("unreduced",)),
    Column("reduced, 4 ranks", Mesh(x=4), 3, ("reduced", "even"), foreign=True),
    Column("two axes, 2x2 ranks", Mesh(x=2, y=2), 8, ("chunks", "sum")),
)
WHOLE = PartitionSpec()
KINDS = ("sum", "max", "avg", "min")


def layouts(case: Case, column: Column) -> list[tuple[Spec, ...]]:
    """Return the layouts of a column on which a case is tried."""
    if not column.states:
        return [tuple(_whole(column, x) for x in case.tensors)]
    if case.name in EXACT and {"unreduced", "sum"} & {*column.states}:
        return []
    draw = random.Random(f"{case.name} {case.number} {column.name}")
    axes, n = column.mesh.axes, len(case.tensors)
    options = [_options(item, column, axis) for axis in axes for item in case.tensors]
    choices = list(_choices(options, column.limit * len(axes), draw))
    if len(axes) > 1:
        draw.shuffle(choices)
        choices = [_joined(item[:n], item[n:], case.tensors) for item in choices]
    return choices[: column.limit]


def _whole(column: Column, x: torch.Tensor, p: PartitionSpec = WHOLE, **extra: Any) -> Spec:
    return Spec(column.mesh, p, shape=x.shape, dtype=x.dtype, **extra)


def _options(x: torch.Tensor, column: Column, axis: str = "x") -> list[Spec]:
    """Return one tensor's layouts on an axis: replicated first, then the states of the column."""
    n, result = column.mesh.shape[axis], [_whole(column, x)]
    for dim, size in enumerate(x.shape):
        partition = PartitionSpec(*[None] * dim, axis)
        if "skewed" in column.states:
            last = max(size - 1, 0)
            sizes = {dim: (0,) * (n - 2) + (size - last, last)}
            result.append(_whole(column, x, partition, sizes=sizes))
        elif "chunks" in column.states or ("even" in column.states and size and size % n == 0):
            result.append(_whole(column, x, partition, uneven="chunk"))
    kinds = {"unreduced": KINDS, "sum": KINDS[:1]}
    result += [
        _whole(column, x, PartitionSpec(unreduced={axis: kind}))
        for state in column.states
        for kind in kinds.get(state, ())
        if _reduces(kind, x.dtype)
    ]
    if "reduced" in column.states and is_inexact(x):
        result.append(_whole(column, x, PartitionSpec(reduced={axis})))
    return result


def _reduces(kind: str, dtype: torch.dtype) -> bool:
    """Return True if unreduced values of a dtype exist and PyTorch adds them on a CPU.

    Averages of 16-bit floats are left out: rounding hides errors.
    """
    small = dtype.is_floating_point and (
        dtype.itemsize == 1 or (kind, dtype.itemsize) == ("avg", 2)
    )
    return not small and not state_problems((("x", kind),), (), dtype)


def _choices(
    options: Sequence[Sequence[Spec]], limit: int, draw: random.Random
) -> Iterator[tuple[Spec, ...]]:
    """Yield choices of one option per tensor, not all replicated: all, or some of them."""
    full = tuple(x[0] for x in options)
    if math.prod(map(len, options)) <= limit + 1:
        yield from itertools.islice(itertools.product(*options), 1, None)
        return
    seen = {full}
    maximum = max(map(len, options))
    together = [tuple(x[min(i, len(x) - 1)] for x in options) for i in range(1, maximum)]
    from_last = [tuple(x[-i] if i < len(x) else x[0] for x in options)
                 for i in range(1, maximum)]  # fmt: skip
    alone = [(*full[:i], option, *full[i + 1 :])
             for i, x in enumerate(options) for option in x[1:]]  # fmt: skip
    rest = (tuple(draw.choice(x) for x in options) for _ in range(4 * limit))
    for choice in itertools.chain(together, from_last, alone, rest):
        if choice not in seen:
            seen.add(choice)
            yield choice


def _joined(
    actual: Sequence[Spec], expected: Sequence[Spec], tensors: Sequence[torch.Tensor]
) -> tuple[Spec, ...]:
    """Return layouts on two axes from layouts on each."""
    specs = []
    for a, b, x in zip(actual, expected, tensors, strict=True):
        dims = [(*a.partition.dims[d], *b.partition.dims[d]) for d in range(x.ndim)]
        unreduced = {**a.partition.unreduced, **b.partition.unreduced}
        p = PartitionSpec(*dims, unreduced=unreduced)
        specs.append(Spec(a.mesh, p, shape=x.shape, dtype=x.dtype, uneven="chunk"))
    return tuple(specs)
