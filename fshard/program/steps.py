"""The closed set of typed steps, each over one mesh axis or several at once.

A step is a frozen value. What it does to a spec is `infer`, to a cotangent `transpose`, to
bytes `traffic`, to tensors the interpreter in `run/`. Names are Shardy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fshard.mesh import as_axes
from fshard.partition import PartitionSpec
from fshard.spec import DTYPE_NAMES

__all__ = [
    "AllGather",
    "AllReduce",
    "AllSlice",
    "AllToAll",
    "Cast",
    "CollectivePermute",
    "InvariantToReduced",
    "ReduceScatter",
    "ReducedToInvariant",
    "ReplicatedToUnreduced",
    "ShardedToUnreduced",
    "Step",
]

Sizes = tuple[int, ...] | None
To = Literal["invariant", "reduced"]


def _axes(step: object, axes: str | Sequence[str]) -> None:
    object.__setattr__(step, "axes", as_axes(axes))


def _names(axes: tuple[str, ...]) -> str:
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def _to(to: str, kind: str) -> str:
    return "" if to == "invariant" else f" to reduced{'' if kind == 'sum' else '=' + kind}"


@dataclass(frozen=True, slots=True)
class AllGather:
    """Sharded to invariant or reduced: every rank of a group receives the others' shards.

    `axes` are the most minor ones of `dim`. Transpose: `AllSlice`, or `ReduceScatter`.

    >>> print(AllGather("tp", 0))
    all_gather(tp, dim 0)
    """

    axes: tuple[str, ...]
    dim: int
    to: To = "invariant"
    kind: str = "sum"
    name: ClassVar[str] = "all_gather"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}, dim {self.dim}){_to(self.to, self.kind)}"


@dataclass(frozen=True, slots=True)
class AllSlice:
    """Invariant or reduced to sharded: every rank keeps its slice; no traffic.

    `sizes` are those of all shards of `dim` afterwards, `None` where they are equal.
    Transpose: `AllGather`, or from reduced `ShardedToUnreduced`.
    """

    axes: tuple[str, ...]
    dim: int
    sizes: Sizes = None
    name: ClassVar[str] = "all_slice"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}, dim {self.dim})"


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Unreduced to invariant or reduced. Transpose: `InvariantToReduced`, or itself."""

    axes: tuple[str, ...]
    to: To = "invariant"
    kind: str = "sum"
    name: ClassVar[str] = "all_reduce"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}){_to(self.to, self.kind)}"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Unreduced to sharded: reduce, each rank keeping its slice. Transpose: `AllGather`."""

    axes: tuple[str, ...]
    dim: int
    sizes: Sizes = None
    name: ClassVar[str] = "reduce_scatter"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}, dim {self.dim})"


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Sharded to sharded: `axes` leave the minor end of `src_dim` for that of `dst_dim`.

    `sizes` are those of all shards of `dst_dim` afterwards. Transpose: itself, dims swapped.
    """

    axes: tuple[str, ...]
    src_dim: int
    dst_dim: int
    sizes: Sizes = None
    name: ClassVar[str] = "all_to_all"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}, dim {self.src_dim} -> {self.dst_dim})"


@dataclass(frozen=True, slots=True)
class CollectivePermute:
    """Sharded to sharded of the same local shapes: shards move between devices whole.

    `partition` is the result's. Covers reordered axes, exchanged dims and shards that move
    from one axis to another of the same size, unreduced ones too. Transpose: the inverse.
    After AllPermute of Rink et al., arXiv 2112.01075.

    Which rank sends to which: an axis that keeps its role (the dim it cuts and the stride, or
    its state) keeps its coordinate, so shards move within groups along the other axes. What a
    rank holds there, and what it needs, is the index of its shard in every dim, and for each
    reduction its row-major index along the moving unreduced axes, in the order of their names.
    A rank that holds what it needs keeps it; of each shard the other holders send, in mesh
    order, to the other ranks that need it, in mesh order.
    """

    partition: PartitionSpec
    name: ClassVar[str] = "collective_permute"

    def __str__(self) -> str:
        return f"{self.name}({self.partition!r})"


@dataclass(frozen=True, slots=True)
class InvariantToReduced:
    """Invariant to reduced: the same values, from here on used for different work.

    With `kind="avg"` each rank keeps its share, the value over n. Transpose: `AllReduce`.
    """

    axes: tuple[str, ...]
    kind: str = "sum"
    name: ClassVar[str] = "invariant_to_reduced"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}{'' if self.kind == 'sum' else ', ' + self.kind})"


@dataclass(frozen=True, slots=True)
class ReducedToInvariant:
    """Reduced to invariant; no traffic. Transpose: `ReplicatedToUnreduced`."""

    axes: tuple[str, ...]
    name: ClassVar[str] = "reduced_to_invariant"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)})"


@dataclass(frozen=True, slots=True)
class ReplicatedToUnreduced:
    """Invariant or reduced to unreduced: the value on coordinate 0, the neutral element elsewhere.

    The neutral element is the reduction's own (0, 1, the lowest or the highest number); an
    average needs none, every rank keeps the value. Transpose: `ReducedToInvariant`, or itself.
    """

    axes: tuple[str, ...]
    kind: str = "sum"
    name: ClassVar[str] = "replicated_to_unreduced"

    def __post_init__(self) -> None:
        _axes(self, self.axes)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}{'' if self.kind == 'sum' else ', ' + self.kind})"


@dataclass(frozen=True, slots=True)
class ShardedToUnreduced:
    """Sharded to unreduced: the own block among neutral elements. Transpose: `AllSlice`.

    With `by`, reduced axes of as many ranks take the place of `axes`, anywhere in the dim: a
    rank whose places along both agree keeps its block, the others hold neutral elements.
    Transpose: itself, the two exchanged.
    """

    axes: tuple[str, ...]
    dim: int
    kind: str = "sum"
    by: tuple[str, ...] = ()
    name: ClassVar[str] = "sharded_to_unreduced"

    def __post_init__(self) -> None:
        _axes(self, self.axes)
        object.__setattr__(self, "by", as_axes(self.by))

    def __str__(self) -> str:
        kind = "" if self.kind == "sum" else f", {self.kind}"
        by = f" by {_names(self.by)}" if self.by else ""
        return f"{self.name}({_names(self.axes)}, dim {self.dim}{by}{kind})"


@dataclass(frozen=True, slots=True)
class Cast:
    """A change of dtype. Transpose: the cast back."""

    dtype: torch.dtype
    name: ClassVar[str] = "cast"

    def __str__(self) -> str:
        return f"{self.name}({DTYPE_NAMES.get(self.dtype, str(self.dtype))})"


Step = (
    AllGather
    | AllSlice
    | AllReduce
    | ReduceScatter
    | AllToAll
    | CollectivePermute
    | InvariantToReduced
    | ReducedToInvariant
    | ReplicatedToUnreduced
    | ShardedToUnreduced
    | Cast
)
"""Any one step."""
