"""`Spec`, the layout of a global tensor on a mesh as an immutable value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import torch

from fshard._torch.dynamo import graph_constant, skip_frames_below
from fshard._util.errors import fail, raise_if
from fshard._util.hooks import Hook
from fshard._util.notebook_view import NotebookView
from fshard._util.text import axes_text
from fshard.layout.equivalence import canonical_grid, has_coincident_shards, states_of_rank
from fshard.layout.mesh import Mesh, as_mesh
from fshard.layout.partition_spec import LINEAR, PartitionSpec, chunk_sizes
from fshard.layout.validation import (
    Sizes,
    as_ints,
    resolve_sizes,
    sizes_by_dim,
    state_problems,
    type_problems,
    value_problems,
)

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
    torch.complex32: "c32", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64",
    torch.float8_e4m3fn: "f8_e4m3fn", torch.float8_e5m2: "f8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """Position of one rank's local in the global tensor, a row of `Spec.table`.

    Attributes:
        rank: rank id.
        coords: coordinates of the rank by axis.
        index: slices of the global tensor, one per dim.
        shape: shape of the local.
    """

    rank: int
    coords: dict[str, int]
    index: tuple[slice, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False, weakref_slot=True)
class Spec(NotebookView):
    """Layout of a global tensor: its mesh, partition, shape and dtype.

    Equal layouts are equal values: the partition has one entry per dim, even sizes are dropped.

    Args:
        mesh: the devices.
        partition: the mesh axes of each dim, unreduced and reduced axes; or DTensor's placements.
        shape: global shape.
        dtype: dtype of the tensor.
        sizes: shard sizes of each dim whose size the number of shards does not divide;
            `chunk_sizes` in `partition_spec.py` gives those of `uneven="chunk"`.
        uneven: `"chunk"` gives all other such dims the sizes of `torch.chunk`, nested per axis, as
            in DTensor.

    Raises:
        ShardingError: an axis is not in the mesh, a dim is not divisible and has no sizes, or
            reductions do not fit the dtype or each other; lists every failure.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=4)
    >>> spec = fs.Spec(mesh, fs.P("dp"), shape=(8, 16))
    >>> spec, spec == fs.Spec(mesh, fs.P("dp", None), shape=(8, 16))
    (f32[8@dp,16], True)
    >>> spec.local_shape(5), spec.index(5)
    ((4, 16), (slice(4, 8, None), slice(0, 16, None)))
    >>> fs.Spec(fs.Mesh(x=4), fs.P("x"), shape=(5,), uneven="chunk").shard_sizes(0)
    (2, 2, 1, 0)
    """

    mesh: Mesh
    partition: PartitionSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: Sizes
    _hash: int = field(repr=False)

    # The constructor of a constant would refuse symbols as sizes: a graph ends before this one.
    @skip_frames_below("a spec has integer sizes: it is made outside of graphs")
    def __new__(cls, *_: Any, **options: Any) -> Spec:
        """Return an instance of the class that is a constant of graphs."""
        return object.__new__(GraphSpec)

    def __init__(
        self,
        mesh: Mesh,
        partition: PartitionSpec,
        /,
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        sizes: Mapping[int, Sequence[int] | None] | None = None,
        uneven: str | None = None,
    ) -> None:
        mesh = as_mesh(mesh, "fs.Spec")
        if not isinstance(partition, PartitionSpec):
            partition = partition_of(mesh, partition, len(as_ints(shape) or ()))
        raise_if("fs.Spec", type_problems(mesh, partition, shape, dtype))
        shape = as_ints(shape) or ()
        problems = value_problems(mesh, partition, shape, dtype, uneven)
        if any(size < 0 for size in shape):
            raise_if("fs.Spec", problems)
        dims = (partition.dims + ((),) * len(shape))[: len(shape)]
        padded = PartitionSpec._of(dims, partition.unreduced_kinds, partition.reduced_kinds)
        dim_sizes = sizes_by_dim(sizes, len(shape), problems)
        resolved = resolve_sizes(mesh, dims, shape, dim_sizes, uneven, problems)
        raise_if(f"fs.Spec({partition!r}, shape={shape})", problems)
        _fill(self, mesh, padded, shape, dtype, resolved)

    @staticmethod
    def _of(
        mesh: Mesh,
        partition: PartitionSpec,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        sizes: Sizes,
    ) -> Spec:
        """Build from canonical parts without checks, for steps that preserve the invariants."""
        self = object.__new__(GraphSpec)
        _fill(self, mesh, partition, shape, dtype, sizes)
        return self

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Spec):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.shape == other.shape
            and self.dtype == other.dtype
            and self.partition == other.partition
            and self.sizes == other.sizes
            and self.mesh == other.mesh
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_spec, (self.mesh, self.partition, self.shape, self.dtype, self.sizes)

    # -- text -------------------------------------------------------------------------

    def __str__(self) -> str:
        dims = ",".join(self._dim_text(dim) for dim in range(self.ndim))
        states = [
            f"{word}: {', '.join(axis if k == 'sum' else f'{axis}={k}' for axis, k in kinds)}"
            for word, kinds in (
                ("unreduced", self.partition.unreduced_kinds),
                ("reduced", self.partition.reduced_kinds),
            )
            if kinds
        ]
        dtype = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{dtype}[{dims}]{'{' + '; '.join(states) + '}' if states else ''}"

    __repr__ = __str__

    def _dim_text(self, dim: int) -> str:
        axes, sizes = self.partition.dims[dim], self.sizes[dim]
        if not axes:
            return str(self.shape[dim])
        text = f"{self.shape[dim]}@{axes_text(axes)}"
        if sizes is None:
            return text
        chunked = chunk_sizes(self.shape[dim], [self.mesh.shape[axis] for axis in axes])
        return f"{text}:{'chunk' if sizes == chunked else '+'.join(map(str, sizes))}"

    # -- attributes -------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def is_even(self) -> bool:
        """True if all locals have the same shape."""
        return all(sizes is None for sizes in self.sizes)

    @property
    def num_shards(self) -> int:
        """Number of distinct shards, the product of those of the dims."""
        return math.prod(self.dim_shards(dim) for dim in range(self.ndim))

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def dim_shards(self, dim: int) -> int:
        """Return the number of shards of one dim."""
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            self._no_dim("Spec.dim_shards", dim)
        return math.prod(self.mesh.shape[axis] for axis in self.partition.dims[dim])

    def shard_sizes(self, dim: int) -> tuple[int, ...]:
        """Return the sizes of all shards along a dim, major to minor; their sum is `shape[dim]`.

        >>> import fshard as fs
        >>> fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(8,)).shard_sizes(0)
        (4, 4)
        """
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            self._no_dim("Spec.shard_sizes", dim)
        sizes = self.sizes[dim]
        shards = self.dim_shards(dim)
        return sizes if sizes is not None else (self.shape[dim] // shards,) * shards

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the local of a rank."""
        return _offsets_and_shape(self, self.mesh.check_rank(rank, "Spec.local_shape"))[1]

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Return the offsets of a rank's local in the global tensor, one per dim."""
        return _offsets_and_shape(self, self.mesh.check_rank(rank, "Spec.offsets"))[0]

    def index(self, rank: int) -> tuple[slice, ...]:
        """Return the slices of a rank's local: it is `global_tensor[spec.index(rank)]`."""
        offsets, shape = _offsets_and_shape(self, self.mesh.check_rank(rank, "Spec.index"))
        return tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))

    def local_nbytes(self, rank: int) -> int:
        """Return the bytes of the local of a rank."""
        _, shape = _offsets_and_shape(self, self.mesh.check_rank(rank, "Spec.local_nbytes"))
        return math.prod(shape) * self.dtype.itemsize

    def _no_dim(self, where: str, dim: object) -> NoReturn:
        rule = f"a dim must be in {-self.ndim}..{self.ndim - 1}" if self.ndim else "it has no dims"
        fail(where, f"dim {dim!r} of {self}", rule, "name a dim it has")

    @property
    def table(self) -> tuple[Shard, ...]:
        """One `Shard(rank, coords, index, shape)` per rank, in rank order."""
        return tuple(
            Shard(rank, self.mesh.coords(rank), self.index(rank), self.local_shape(rank))
            for rank in self.mesh.ranks
        )

    # -- related specs ----------------------------------------------------------------

    @property
    def dual(self) -> Spec:
        """Spec of the tensor's gradient: reduced and unreduced axes swap.

        Raises `ShardingError` for the reductions max, min and product, which are not linear, and
        for reduced booleans, which have no sum.

        >>> import fshard as fs
        >>> fs.Spec(fs.Mesh(x=2), fs.P(unreduced={"x"}), shape=(3,)).dual
        f32[3]{reduced: x}
        """
        p = self.partition
        bad = [f"{axis}={kind}" for axis, kind in p.unreduced_kinds if kind not in LINEAR]
        if bad:
            fail("Spec.dual", f"{self}", f"a reduction must be sum or avg, not {', '.join(bad)}",
                 "reduce it first: a program that does has a gradient")  # fmt: skip
        raise_if(f"Spec.dual of {self}",
                 state_problems(p.reduced_kinds, p.unreduced_kinds, self.dtype))  # fmt: skip
        return self._with(partition=PartitionSpec._of(p.dims, p.reduced_kinds, p.unreduced_kinds))

    def replace(
        self,
        *,
        partition: PartitionSpec | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        sizes: Mapping[int, Sequence[int] | None] | None = None,
        uneven: str | None = None,
        mesh: Mesh | None = None,
    ) -> Spec:
        """Return a spec with some parts changed, checked as by the constructor.

        Args:
            partition: new partition, or DTensor's placements.
            shape: new global shape.
            dtype: new dtype.
            sizes: new shard sizes by dim. A dim whose axes and size stay the same keeps its own.
            uneven: see `Spec`.
            mesh: new mesh.

        Raises:
            ShardingError: the parts do not fit each other.

        >>> import fshard as fs
        >>> fs.Spec(fs.Mesh(x=2), fs.P("x"), shape=(8, 4)).replace(partition=fs.P(None, "x"))
        f32[8,4@x]
        """
        partition = self.partition if partition is None else partition
        shape = self.shape if shape is None else shape
        mesh = self.mesh if mesh is None else as_mesh(mesh, "Spec.replace")
        dtype = dtype or self.dtype
        partition = partition_of(mesh, partition, len(as_ints(shape) or ()))
        raise_if("Spec.replace", type_problems(mesh, partition, shape, dtype))
        shape, sizes = as_ints(shape) or (), {} if sizes is None else sizes
        if not isinstance(sizes, Mapping):
            return Spec(mesh, partition, shape=shape, dtype=dtype, sizes=sizes)  # which refuses
        kept: dict[int, Sequence[int] | None] = {
            dim: self.sizes[dim]
            for dim in range(min(len(shape), self.ndim, len(partition.dims)))
            if partition.dims[dim] == self.partition.dims[dim] and shape[dim] == self.shape[dim]
            and dim not in sizes and dim - len(shape) not in sizes
        }  # fmt: skip
        return Spec(mesh, partition, shape=shape, dtype=dtype, sizes={**kept, **sizes},
                    uneven=uneven)  # fmt: skip

    def is_equivalent(self, other: Spec) -> bool:
        """Return True if every rank has the same shard in both layouts.

        Names of axes do not matter, nor do axes of size 1.

        >>> import fshard as fs
        >>> spec = fs.Spec(fs.Mesh(x=4), fs.P("x"), shape=(8,))
        >>> spec.is_equivalent(fs.Spec(fs.Mesh(a=2, b=2), fs.P(("a", "b")), shape=(8,)))
        True
        """
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if self.mesh.devices == other.mesh.devices:
            if _canonical_grid(self) == _canonical_grid(other):
                return True
            if not (has_coincident_shards(self.sizes) and has_coincident_shards(other.sizes)):
                return False
        return self.mesh.ranks == other.mesh.ranks and all(
            self.index(rank) == other.index(rank)
            and states_of_rank(self.mesh, self.partition, rank)
            == states_of_rank(other.mesh, other.partition, rank)
            for rank in self.mesh.ranks
        )

    @property
    def placements(self) -> tuple[Any, ...]:
        """DTensor's placements, one per mesh axis.

        An order of axes other than that of the mesh becomes a `_StridedShard`. Raises
        `ShardingError` if DTensor has no such layout.

        >>> import fshard as fs
        >>> fs.Spec(fs.Mesh(x=2, y=4), fs.P(None, "y", unreduced={"x"}), shape=(8, 16)).placements
        (Partial(sum), Shard(dim=1))
        """
        return to_placements_hook.call(self)

    @staticmethod
    def from_placements(
        mesh: Mesh,
        placements: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> Spec:
        """Return the spec of DTensor's placements; uneven dims have DTensor's shard sizes.

        Args:
            mesh: mesh of the spec.
            placements: one placement per mesh axis, in mesh order.
            shape: global shape.
            dtype: dtype of the tensor.

        Raises:
            ShardingError: a placement is unknown or does not fit the mesh or the shape; lists all.

        >>> import fshard as fs
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> fs.Spec.from_placements(fs.Mesh(dp=2, tp=4), (Shard(0), Replicate()), (8, 16))
        f32[8@dp,16]
        """
        return from_placements_hook.call(mesh, placements, shape, dtype)

    def _with(
        self,
        *,
        partition: PartitionSpec | None = None,
        sizes: Sizes | None = None,
        dtype: torch.dtype | None = None,
    ) -> Spec:
        """Return a spec with canonical parts changed, without checks, for steps."""
        return Spec._of(self.mesh, self.partition if partition is None else partition,
                        self.shape, self.dtype if dtype is None else dtype,
                        self.sizes if sizes is None else sizes)  # fmt: skip


@graph_constant
class GraphSpec(Spec):
    """Class of all specs."""

    __slots__ = ()


GraphSpec.__name__ = Spec.__name__  # as errors show it


def _fill(
    spec: Spec,
    mesh: Mesh,
    partition: PartitionSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    sizes: Sizes,
) -> None:
    set_ = object.__setattr__
    set_(spec, "mesh", mesh)
    set_(spec, "partition", partition)
    set_(spec, "shape", shape)
    set_(spec, "dtype", dtype)
    set_(spec, "sizes", sizes)
    set_(spec, "_hash", hash((mesh._hash, partition._hash, shape, dtype, sizes)))


@lru_cache(maxsize=65536)
def _offsets_and_shape(spec: Spec, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and shape of one rank's local."""
    offsets, shape = [], []
    for dim, (size, axes) in enumerate(zip(spec.shape, spec.partition.dims, strict=True)):
        index, sizes = spec.mesh.index(rank, axes), spec.sizes[dim]
        if sizes is None:
            width = size // spec.dim_shards(dim)
            offsets.append(index * width)
            shape.append(width)
        else:
            offsets.append(sum(sizes[:index]))
            shape.append(sizes[index])
    return tuple(offsets), tuple(shape)


def _canonical_grid(spec: Spec) -> tuple[object, ...]:
    return canonical_grid(spec.mesh, spec.partition, spec.shape, spec.sizes)


def is_placements(value: object) -> bool:
    """Return True for a tuple or list of DTensor's placements."""
    return (
        isinstance(value, tuple | list)
        and len(value) > 0
        and all(hasattr(item, "is_shard") and hasattr(item, "is_replicate") for item in value)
    )


def partition_of(mesh: Mesh, layout: Any, ndim: int | None = None) -> Any:
    """Return the partition that DTensor's placements on a mesh mean; other values as they are.

    Without the number of dims, the dims of `Shard` must not be negative.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> partition_of(Mesh(dp=2, tp=4), (Replicate(), Shard(1)))
    P(None, 'tp')
    """
    if not is_placements(layout):
        return layout
    dims = [placement.dim for placement in layout if hasattr(placement, "dim")]
    size = max([0, *(dim + 1 for dim in dims)]) if ndim is None else ndim
    return from_placements_hook.call(mesh, layout, (mesh.size,) * size, torch.float32).partition


def rebuild_spec(*parts: Any) -> Spec:
    """Return the spec of the parts of a pickle."""
    return Spec._of(*parts)


@Hook
def to_placements_hook(spec: Spec) -> tuple[Any, ...]:
    """`Spec.placements`; set by `interop/placements.py`."""
    raise NotImplementedError


@Hook
def from_placements_hook(
    mesh: Mesh, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> Spec:
    """`Spec.from_placements`; set by `interop/placements.py`."""
    raise NotImplementedError
