"""The typed steps of which programs consist: a closed set of frozen values.

Names are Shardy's. `infer`, `transpose`, `traffic` and the interpreter in `run/` apply to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard._util.text import axes_text
from fshard.layout.mesh import Mesh, as_axes
from fshard.layout.partition_spec import PartitionSpec
from fshard.layout.spec import DTYPE_NAMES
from fshard.layout.validation import as_ints
from fshard.program.halo_steps import HaloExchange, HaloReduce, HaloStep

__all__ = [
    "AllGather", "AllReduce", "AllSlice", "AllToAll", "Cast", "Collective", "CollectivePermute",
    "Exchange", "HaloExchange", "HaloReduce", "InvariantToReduced", "LocalStep", "ReduceScatter",
    "ReducedToInvariant", "Remesh", "ReplicatedToUnreduced", "ShardedToUnreduced", "Step",
]  # fmt: skip

Sizes = tuple[int, ...] | None
To = Literal["invariant", "reduced"]


def _store_partition(step: object, partition: PartitionSpec) -> None:
    """Store the partition without its trailing unsharded dims, so that equal steps are equal."""
    if not isinstance(partition, PartitionSpec):
        fail(f"fs.{type(step).__name__}", f"partition {partition!r}", "partition must be a P",
             "P('x', None), say: one entry per dim")  # fmt: skip
    count = max((dim + 1 for dim, axes in enumerate(partition.dims) if axes), default=0)
    states = partition.unreduced_kinds, partition.reduced_kinds
    object.__setattr__(step, "partition", PartitionSpec._of(partition.dims[:count], *states))


def _check_mesh(step: object, mesh: object) -> None:
    if not isinstance(mesh, Mesh):
        fail(f"fs.{type(step).__name__}", f"mesh {mesh!r}", "mesh must be a Mesh",
             "fs.Mesh(dp=2, tp=4), say")  # fmt: skip


def _store_sizes(step: object, sizes: object) -> None:
    """Store the shard sizes of every dim: None for even dims, and None if all dims are even."""
    if sizes is None:
        return
    if not isinstance(sizes, list | tuple) or not all(
        dim is None
        or (isinstance(dim, list | tuple) and all(issubclass(t, int) for t in {*map(type, dim)}))
        for dim in sizes
    ):
        fail(f"fs.{type(step).__name__}", f"sizes={sizes!r}",
             "sizes must be None or a tuple of one integer per shard, for every dim",
             "sizes=((3, 5), None), say, or None where all are equal")  # fmt: skip
    uneven = [None if dim is None or len(set(dim)) <= 1 else tuple(dim) for dim in sizes]
    while uneven and uneven[-1] is None:
        uneven.pop()
    object.__setattr__(step, "sizes", tuple(uneven) or None)


class _AlongAxes:
    """Base of steps that name the axes that change."""

    __slots__ = ()
    name: ClassVar[str]
    axes: tuple[str, ...]

    def __post_init__(self) -> None:
        """Store axes as a tuple, dims and sizes as integers; raise for values of other types."""
        set_, problems = object.__setattr__, []
        set_(self, "axes", as_axes(self.axes))
        for name in ("dim", "src_dim", "dst_dim"):
            dim = getattr(self, name, 0)
            if type(dim) is not int:
                numbers = as_ints((dim,))
                set_(self, name, numbers and numbers[0])
                if numbers is None:
                    rule = "dim must be an integer"
                    problems.append(Problem(f"{name}={dim!r}", rule, f"{name}=0"))
        sizes = getattr(self, "sizes", None)
        if sizes is not None:
            set_(self, "sizes", as_ints(sizes))
            if as_ints(sizes) is None:
                rule = "sizes must be ints, one per shard of the result"
                problems.append(Problem(f"sizes={sizes!r}", rule, "sizes=(3, 5), say"))
        kind = getattr(self, "kind", "sum")
        if not isinstance(kind, str):
            rule = "a reduction must be one of sum, avg, max, min and product"
            problems.append(Problem(f"kind={kind!r}", rule, "kind='sum', say"))
        if problems:
            raise_if(f"fs.{type(self).__name__}", problems)

    def __str__(self) -> str:
        dim = f", dim {self.dim}" if hasattr(self, "dim") else ""
        by = getattr(self, "by", ())
        by = f" by {axes_text(by)}" if by else ""
        kind, to = getattr(self, "kind", "sum"), getattr(self, "to", None)
        kind = "" if kind == "sum" else kind
        if to is None:
            return f"{self.name}({axes_text(self.axes)}{dim}{by}{kind and f', {kind}'})"
        state = "" if to == "invariant" else f" to reduced{kind and f'={kind}'}"
        return f"{self.name}({axes_text(self.axes)}{dim}){state}"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AllGather(_AlongAxes):
    """Sharded to invariant or reduced: every rank receives the shards of its group.

    Transpose: `AllSlice`, or with `to="reduced"` `ReduceScatter`.

    Args:
        axes: Mesh axis or axes, the most minor ones of `dim`.
        dim: The tensor dim that is gathered.
        to: The state that `axes` get, "invariant" or "reduced".
        kind: The reduction of the transpose, "sum" or "avg", if `to` is "reduced".

    >>> import fshard as fs
    >>> print(fs.AllGather("tp", 0))
    all_gather(tp, dim 0)
    """

    axes: tuple[str, ...]
    dim: int
    to: To = "invariant"
    kind: str = "sum"
    name: ClassVar[str] = "all_gather"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AllSlice(_AlongAxes):
    """Invariant or reduced to sharded: every rank keeps its slice; nothing is sent.

    Transpose: `AllGather`, or for reduced axes `ShardedToUnreduced`.

    Args:
        axes: Mesh axis or axes; they become the most minor ones of `dim`.
        dim: The tensor dim that is sliced.
        sizes: Sizes of all shards of `dim` afterwards, None if they are equal.

    >>> import fshard as fs
    >>> print(fs.AllSlice("tp", 0))
    all_slice(tp, dim 0)
    """

    axes: tuple[str, ...]
    dim: int
    sizes: Sizes = None
    name: ClassVar[str] = "all_slice"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AllReduce(_AlongAxes):
    """Unreduced to invariant or reduced: the ranks of each group add up their partial sums.

    Transpose: `InvariantToReduced`, or with `to="reduced"` itself.

    Args:
        axes: Mesh axis or axes that the source is unreduced along, by one reduction.
        to: The state that `axes` get, "invariant" or "reduced".
        kind: The reduction of the transpose, "sum" or "avg", if `to` is "reduced".

    >>> import fshard as fs
    >>> print(fs.AllReduce(("dp", "tp")))
    all_reduce((dp,tp))
    """

    axes: tuple[str, ...]
    to: To = "invariant"
    kind: str = "sum"
    name: ClassVar[str] = "all_reduce"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReduceScatter(_AlongAxes):
    """Unreduced to sharded: partial sums are added up, and every rank keeps its slice.

    Transpose: `AllGather` to reduced.

    Args:
        axes: Mesh axis or axes that the source is unreduced along; the most minor of `dim` then.
        dim: The tensor dim that is sliced.
        sizes: Sizes of all shards of `dim` afterwards, None if they are equal.

    >>> import fshard as fs
    >>> print(fs.ReduceScatter("tp", 1))
    reduce_scatter(tp, dim 1)
    """

    axes: tuple[str, ...]
    dim: int
    sizes: Sizes = None
    name: ClassVar[str] = "reduce_scatter"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class AllToAll(_AlongAxes):
    """Sharded to sharded: axes leave the minor end of one dim for the minor end of another.

    Several such moves can share one launch: first all axes leave their dims, in reverse order of
    the list, then they join their new dims, in its order. Transpose: the reverse moves.

    Args:
        axes: Mesh axis or axes, the most minor ones of `src_dim`.
        src_dim: The tensor dim that is gathered.
        dst_dim: The tensor dim that is sliced.
        sizes: Sizes of all shards of `dst_dim` afterwards, None if they are equal.
        also: Further moves in the same launch, all-to-alls without `also`.

    >>> import fshard as fs
    >>> print(fs.AllToAll("x", 0, 1, also=(fs.AllToAll("y", 2, 1),)))
    all_to_all(x, dim 0 -> 1; y, dim 2 -> 1)
    """

    axes: tuple[str, ...]
    src_dim: int
    dst_dim: int
    sizes: Sizes = None
    also: tuple[AllToAll, ...] = ()
    name: ClassVar[str] = "all_to_all"

    def __post_init__(self) -> None:
        _AlongAxes.__post_init__(self)
        also = tuple(self.also) if isinstance(self.also, list | tuple) else (self.also,)
        if not all(isinstance(move, AllToAll) and not move.also for move in also):
            fail("fs.AllToAll", f"also={self.also!r}", "also must be AllToAll steps without `also`",
                 "also=(fs.AllToAll('y', 0, 1), fs.AllToAll('z', 0, 1)), side by side")  # fmt: skip
        object.__setattr__(self, "also", also)

    @property
    def pairs(self) -> tuple[AllToAll, ...]:
        """All moves as all-to-alls without `also`, this one first."""
        first = AllToAll(self.axes, self.src_dim, self.dst_dim, self.sizes) if self.also else self
        return (first, *self.also)

    def __str__(self) -> str:
        moves = (f"{axes_text(p.axes)}, dim {p.src_dim} -> {p.dst_dim}" for p in self.pairs)
        return f"{self.name}({'; '.join(moves)})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CollectivePermute:
    """Sharded to sharded with the same local shapes: devices trade complete shards.

    This covers reordered axes, dims that trade axes, and shards that go from one axis to another of
    the same size. Transpose: the inverse. After AllPermute of Rink et al., arXiv 2112.01075.

    An axis that keeps its role (its dim and stride there, or its state) keeps its coordinate, so
    that shards move in groups along the other axes. A shard is identified by its index in each dim,
    and by its row-major index along the moving unreduced axes of each reduction, sorted by name. A
    rank that holds the shard it needs keeps it; other holders send to other needers in mesh order.

    Args:
        partition: The partition of the result; dims that it leaves out are not sharded.

    >>> import fshard as fs
    >>> print(fs.CollectivePermute(fs.P("y", "x")))
    collective_permute(P('y', 'x'))
    """

    partition: PartitionSpec
    name: ClassVar[str] = "collective_permute"

    def __post_init__(self) -> None:
        _store_partition(self, self.partition)

    def __str__(self) -> str:
        return f"{self.name}({self.partition!r})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Exchange:
    """Any layout to any other: each rank receives the elements that it lacks, and no more.

    One all-to-all-v sends every piece once, from one of its holders (Zhuang et al., "On optimizing
    the communication of model parallelism", arXiv 2211.05322). Transpose: the reverse exchange.

    An unreduced axis may be reduced, where the pieces arrive, or stay. A reduced one stays so or
    becomes sharded; an invariant one may become reduced. A sharded one may become unreduced: an
    element goes to ranks at its own coordinate along the axis, and others have the neutral element.
    Between two meshes all partial sums are reduced, and the source must not be reduced.

    Args:
        partition: The partition of the result; dims that it leaves out are not sharded.
        sizes: For every dim the sizes of its shards, None where they are equal.
        mesh: The mesh of the result, if it is another one; devices may differ.

    >>> import fshard as fs
    >>> print(fs.Exchange(fs.P(None, "x", unreduced={"y"})))
    exchange(P(None, 'x', unreduced={'y'}))
    >>> print(fs.Exchange(fs.P("y"), mesh=fs.Mesh(y=3)))
    exchange(P('y'), Mesh(y=3))
    """

    partition: PartitionSpec
    sizes: tuple[Sizes, ...] | None = None
    mesh: Mesh | None = None
    name: ClassVar[str] = "exchange"

    def __post_init__(self) -> None:
        _store_partition(self, self.partition)
        _store_sizes(self, self.sizes)
        if self.mesh is not None:
            _check_mesh(self, self.mesh)

    def __str__(self) -> str:
        to = "" if self.mesh is None else f", {self.mesh}"
        return f"{self.name}({self.partition!r}{to})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Remesh:
    """The same shards on the same devices, described on another mesh; nothing is sent or copied.

    Axes are split (on a cluster `x` into `x_0`, `x_1`), merged or renamed. Transpose: the reverse.

    Args:
        mesh: The mesh of the result, of the same devices.
        partition: The partition of the result; dims that it leaves out are not sharded.

    >>> import fshard as fs
    >>> print(fs.Remesh(fs.Mesh(a=2, b=2), fs.P(("a", "b"))))
    remesh(Mesh(a=2, b=2))
    """

    mesh: Mesh
    partition: PartitionSpec
    name: ClassVar[str] = "remesh"

    def __post_init__(self) -> None:
        _check_mesh(self, self.mesh)
        _store_partition(self, self.partition)

    def __str__(self) -> str:
        return f"{self.name}({self.mesh})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class InvariantToReduced(_AlongAxes):
    """Invariant to reduced: each rank uses the same value for different work from then on.

    Transpose: `AllReduce`.

    Args:
        axes: Mesh axis or axes that are invariant.
        kind: "sum", or "avg": then each rank keeps the value divided by the number of ranks.

    >>> import fshard as fs
    >>> print(fs.InvariantToReduced("dp"))
    invariant_to_reduced(dp)
    """

    axes: tuple[str, ...]
    kind: str = "sum"
    name: ClassVar[str] = "invariant_to_reduced"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReducedToInvariant(_AlongAxes):
    """Reduced to invariant; nothing is sent. Transpose: `ReplicatedToUnreduced`.

    Args:
        axes: Mesh axis or axes that are reduced.

    >>> import fshard as fs
    >>> print(fs.ReducedToInvariant("dp"))
    reduced_to_invariant(dp)
    """

    axes: tuple[str, ...]
    name: ClassVar[str] = "reduced_to_invariant"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ReplicatedToUnreduced(_AlongAxes):
    """Invariant or reduced to unreduced: the value on coordinate 0, the neutral element elsewhere.

    For an average all ranks keep it. Transpose: `ReducedToInvariant`, or for reduced axes itself.

    Args:
        axes: Mesh axis or axes that are all invariant, or all reduced.
        kind: The reduction: "sum", "avg", "max", "min" or "product".

    >>> import fshard as fs
    >>> print(fs.ReplicatedToUnreduced("dp", "max"))
    replicated_to_unreduced(dp, max)
    """

    axes: tuple[str, ...]
    kind: str = "sum"
    name: ClassVar[str] = "replicated_to_unreduced"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ShardedToUnreduced(_AlongAxes):
    """Sharded to unreduced: each rank embeds its shard in neutral elements; nothing is sent.

    Transpose: `AllSlice` of reduced axes, or itself with `axes` and `by` exchanged.

    Args:
        axes: Mesh axis or axes, the most minor ones of `dim`; with `by`, anywhere in it.
        dim: The tensor dim that is sharded over them.
        kind: The reduction: "sum", "avg", "max", "min" or "product".
        by: Reduced axes, of as many ranks, that replace `axes`; ranks with the same index along
            both keep their shards, the others hold neutral elements.

    >>> import fshard as fs
    >>> print(fs.ShardedToUnreduced("tp", 0))
    sharded_to_unreduced(tp, dim 0)
    """

    axes: tuple[str, ...]
    dim: int
    kind: str = "sum"
    by: tuple[str, ...] = ()
    name: ClassVar[str] = "sharded_to_unreduced"

    def __post_init__(self) -> None:
        _AlongAxes.__post_init__(self)
        object.__setattr__(self, "by", as_axes(self.by))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Cast:
    """A change of dtype, from complex to real the real part. Transpose: the cast back.

    Args:
        dtype: The dtype of the result.

    >>> import torch
    >>> import fshard as fs
    >>> print(fs.Cast(torch.bfloat16))
    cast(bf16)
    """

    dtype: torch.dtype
    name: ClassVar[str] = "cast"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            fail("fs.Cast", f"dtype={self.dtype!r}", "a dtype must be a torch.dtype",
                 "fs.Cast(torch.float32), say")  # fmt: skip

    def __str__(self) -> str:
        return f"{self.name}({DTYPE_NAMES.get(self.dtype, str(self.dtype))})"


StateChange = InvariantToReduced | ReducedToInvariant | ReplicatedToUnreduced | ShardedToUnreduced
LocalStep = AllSlice | Remesh | Cast | StateChange
"""Any step that sends nothing."""

Exchanges = CollectivePermute | Exchange | HaloStep
Collective = AllGather | AllReduce | ReduceScatter | AllToAll | Exchanges
"""Any step that communicates along axes of several ranks."""

Step = Collective | LocalStep
"""Any step."""
