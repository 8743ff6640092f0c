"""The closed set of typed steps: over mesh axes, one or several at once, or to a whole layout.

A step is a frozen value. What it does to a spec is `infer`, to a cotangent `transpose`, to
bytes `traffic`, to tensors the interpreter in `run/`. Names are Shardy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Mesh, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import DTYPE_NAMES
from fshard.layout.validation import as_ints

__all__ = [
    "AllGather",
    "AllReduce",
    "AllSlice",
    "AllToAll",
    "Cast",
    "CollectivePermute",
    "Exchange",
    "InvariantToReduced",
    "ReduceScatter",
    "ReducedToInvariant",
    "Remesh",
    "ReplicatedToUnreduced",
    "ShardedToUnreduced",
    "Step",
]

Sizes = tuple[int, ...] | None
To = Literal["invariant", "reduced"]


def _canonical(step: Any, *dims: str) -> None:
    """Axes as a tuple, dims and sizes as whole numbers; refuses what is nothing of the kind."""
    set_, problems = object.__setattr__, []
    set_(step, "axes", as_axes(step.axes))
    for name in dims:
        dim = getattr(step, name)
        if type(dim) is not int:
            numbers = as_ints((dim,))
            set_(step, name, numbers and numbers[0])
            if numbers is None:
                problems.append(
                    Problem(f"{name}={dim!r}", "dim must be an integer", f"{name}=0, say")
                )
    sizes = getattr(step, "sizes", None)
    if sizes is not None:
        set_(step, "sizes", as_ints(sizes))
        if step.sizes is None:
            rule = "sizes must be ints, one per shard of the result"
            problems.append(Problem(f"sizes={sizes!r}", rule, "sizes=(3, 5), say"))
    kind = getattr(step, "kind", "sum")
    if not isinstance(kind, str):
        rule = "a reduction must be one of sum, avg, max, min and product"
        problems.append(Problem(f"kind={kind!r}", rule, "kind='sum', say"))
    if problems:
        raise_if(f"fs.{type(step).__name__}", problems)


def _names(axes: tuple[str, ...]) -> str:
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def _partition(step: object, partition: PartitionSpec) -> None:
    """Without the unsharded dims at the end: a step is then one value on any number of them."""
    if not isinstance(partition, PartitionSpec):
        fail(f"fs.{type(step).__name__}", f"partition {partition!r}", "partition must be a P",
             "P('x', None), say: one entry per dim")  # fmt: skip
    kept = len(partition) - next(
        (at for at, axes in enumerate(reversed(partition.dims)) if axes), len(partition)
    )
    short = PartitionSpec._of(
        partition.dims[:kept], partition.unreduced_kinds, partition.reduced_kinds
    )
    object.__setattr__(step, "partition", short)


def _mesh(step: object, mesh: object) -> None:
    if not isinstance(mesh, Mesh):
        fail(f"fs.{type(step).__name__}", f"mesh {mesh!r}", "mesh must be a Mesh",
             "fs.Mesh(dp=2, tp=4), say")  # fmt: skip


def _some_sizes(step: object, sizes: object) -> None:
    """Sizes by dim: None for equal ones, and nothing where no dim has others."""
    if sizes is None:
        return
    if not isinstance(sizes, list | tuple) or not all(
        each is None
        or (isinstance(each, list | tuple) and all(isinstance(size, int) for size in each))
        for each in sizes
    ):
        fail(f"fs.{type(step).__name__}", f"sizes={sizes!r}",
             "sizes must be None or a tuple of one integer per shard, for every dim",
             "sizes=((3, 5), None), say, or None where all are equal")  # fmt: skip
    kept = [None if each is None or len(set(each)) <= 1 else tuple(each) for each in sizes]
    while kept and kept[-1] is None:
        kept.pop()
    object.__setattr__(step, "sizes", tuple(kept) or None)


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
        _canonical(self, "dim")

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
        _canonical(self, "dim")

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
        _canonical(self)

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
        _canonical(self, "dim")

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}, dim {self.dim})"


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Sharded to sharded: `axes` leave the minor end of `src_dim` for that of `dst_dim`.

    `sizes` are those of all shards of `dst_dim` afterwards. `also` are further ones, done in the
    same launch: all axes are first taken from their dims, the last listed ones first, and then
    put where they go, the first listed ones first; some may come back to the dim that others
    leave. Transpose: itself, dims swapped.

    >>> print(AllToAll("x", 0, 1, also=(AllToAll("y", 2, 1),)))
    all_to_all(x, dim 0 -> 1; y, dim 2 -> 1)
    """

    axes: tuple[str, ...]
    src_dim: int
    dst_dim: int
    sizes: Sizes = None
    also: tuple[AllToAll, ...] = ()
    name: ClassVar[str] = "all_to_all"

    def __post_init__(self) -> None:
        _canonical(self, "src_dim", "dst_dim")
        also = tuple(self.also) if isinstance(self.also, list | tuple) else (self.also,)
        if not all(isinstance(each, AllToAll) and not each.also for each in also):
            fail("fs.AllToAll", f"also={self.also!r}", "also must be AllToAll steps without `also`",
                 "also=(fs.AllToAll('y', 0, 1), fs.AllToAll('z', 0, 1)), side by side")  # fmt: skip
        object.__setattr__(self, "also", also)

    @property
    def pairs(self) -> tuple[AllToAll, ...]:
        """Each by itself, in the order of the listing."""
        first = AllToAll(self.axes, self.src_dim, self.dst_dim, self.sizes) if self.also else self
        return (first, *self.also)

    def __str__(self) -> str:
        moves = (f"{_names(p.axes)}, dim {p.src_dim} -> {p.dst_dim}" for p in self.pairs)
        return f"{self.name}({'; '.join(moves)})"


@dataclass(frozen=True, slots=True)
class CollectivePermute:
    """Sharded to sharded of the same local shapes: shards move between devices whole.

    `partition` is the result's; dims at its end that are left out are not sharded. Covers
    reordered axes, exchanged dims and shards that move from one axis to another of the same
    size, unreduced ones too. Transpose: the inverse.
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

    def __post_init__(self) -> None:
        _partition(self, self.partition)

    def __str__(self) -> str:
        return f"{self.name}({self.partition!r})"


@dataclass(frozen=True, slots=True)
class Exchange:
    """From any layout to any other: each rank receives what it lacks, and no more.

    One all-to-all-v, in which each piece is sent once, by one of its holders: Zhuang et al.,
    "On optimizing the communication of model parallelism" (arXiv 2211.05322).

    `partition` is the result's (dims left out at its end are not sharded), `sizes` the shard
    sizes of its dims that are not cut equally, by dim, and `mesh` its mesh where that is another
    one: with the same devices, some of them, or none.

    Axes that the source alone is unreduced on are reduced where pieces arrive. Axes that it is
    reduced on stay so or become sharded, and others may become reduced. Axes that become
    unreduced are sharded before: each element goes to the ranks at the place along them that it
    comes from, the others have the neutral element there. Along these, and along reduced axes
    that become sharded, nothing moves: copies are taken from those at one's own place. To another
    mesh all addends are reduced on arrival, and a reduced source is refused: `ReducedToInvariant`
    goes first. Transpose: the exchange back, on the duals.

    >>> print(Exchange(PartitionSpec(None, "x")))
    exchange(P(None, 'x'))
    >>> print(Exchange(PartitionSpec(None, "x", unreduced={"y"})))
    exchange(P(None, 'x', unreduced={'y'}))
    >>> print(Exchange(PartitionSpec("y"), mesh=Mesh(y=3)))
    exchange(P('y'), Mesh(y=3))
    """

    partition: PartitionSpec
    sizes: tuple[Sizes, ...] | None = None
    mesh: Mesh | None = None
    name: ClassVar[str] = "exchange"

    def __post_init__(self) -> None:
        _partition(self, self.partition)
        _some_sizes(self, self.sizes)
        if self.mesh is not None:
            _mesh(self, self.mesh)

    def __str__(self) -> str:
        to = "" if self.mesh is None else f", {self.mesh}"
        return f"{self.name}({self.partition!r}{to})"


@dataclass(frozen=True, slots=True)
class Remesh:
    """The same shards on the same devices, read on another mesh; no traffic, no copy.

    An axis becomes several or several one, or axes have other names; `partition` is the
    result's (dims left out at its end are not sharded). Planned on a cluster, `x_0` and `x_1`
    are the parts of an axis `x`, the first one major. Transpose: the way back.

    >>> print(Remesh(Mesh(a=2, b=2), PartitionSpec(("a", "b"))))
    remesh(Mesh(a=2, b=2))
    """

    mesh: Mesh
    partition: PartitionSpec
    name: ClassVar[str] = "remesh"

    def __post_init__(self) -> None:
        _mesh(self, self.mesh)
        _partition(self, self.partition)

    def __str__(self) -> str:
        return f"{self.name}({self.mesh})"


@dataclass(frozen=True, slots=True)
class InvariantToReduced:
    """Invariant to reduced: the same values, from here on used for different work.

    With `kind="avg"` each rank keeps its share, the value over n. Transpose: `AllReduce`.
    """

    axes: tuple[str, ...]
    kind: str = "sum"
    name: ClassVar[str] = "invariant_to_reduced"

    def __post_init__(self) -> None:
        _canonical(self)

    def __str__(self) -> str:
        return f"{self.name}({_names(self.axes)}{'' if self.kind == 'sum' else ', ' + self.kind})"


@dataclass(frozen=True, slots=True)
class ReducedToInvariant:
    """Reduced to invariant; no traffic. Transpose: `ReplicatedToUnreduced`."""

    axes: tuple[str, ...]
    name: ClassVar[str] = "reduced_to_invariant"

    def __post_init__(self) -> None:
        _canonical(self)

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
        _canonical(self)

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
        _canonical(self, "dim")
        object.__setattr__(self, "by", as_axes(self.by))

    def __str__(self) -> str:
        kind = "" if self.kind == "sum" else f", {self.kind}"
        by = f" by {_names(self.by)}" if self.by else ""
        return f"{self.name}({_names(self.axes)}, dim {self.dim}{by}{kind})"


@dataclass(frozen=True, slots=True)
class Cast:
    """A change of dtype, of complex numbers to real ones their real part. Transpose: back."""

    dtype: torch.dtype
    name: ClassVar[str] = "cast"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            fail("fs.Cast", f"dtype={self.dtype!r}", "a dtype must be a torch.dtype",
                 "fs.Cast(torch.float32), say")  # fmt: skip

    def __str__(self) -> str:
        return f"{self.name}({DTYPE_NAMES.get(self.dtype, str(self.dtype))})"


Step = (
    AllGather
    | AllSlice
    | AllReduce
    | ReduceScatter
    | AllToAll
    | CollectivePermute
    | Exchange
    | Remesh
    | InvariantToReduced
    | ReducedToInvariant
    | ReplicatedToUnreduced
    | ShardedToUnreduced
    | Cast
)
"""Any one step."""
