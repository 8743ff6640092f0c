"""`Spec`: how a global tensor lies on a mesh, as an immutable value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from fshard._util.errors import fail, raise_if
from fshard._util.hooks import Hook
from fshard.layout.mesh import Mesh
from fshard.layout.partition_spec import PartitionSpec, chunk_sizes
from fshard.layout.validation import (
    Sizes,
    by_dim,
    mixed_kinds,
    resolve_sizes,
    state_problems,
    type_problems,
    value_problems,
    whole_numbers,
)

__all__ = ["DTYPE_NAMES", "Shard", "Sharded", "Spec", "mixed_kinds"]

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
    torch.complex32: "c32", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64",
    torch.float8_e4m3fn: "f8_e4m3fn", torch.float8_e5m2: "f8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shard:
    """One row of a spec's shard table: where one rank's local lies in the global tensor."""

    rank: int
    coords: dict[str, int]
    index: tuple[slice, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Spec:
    """A global tensor's mesh, partition, shape and dtype: everything but its numbers.

    Dims that their shards do not divide need `sizes={dim: (n0, n1, ...)}`, one size per shard
    major to minor, or `uneven="chunk"` (`torch.chunk`, nested per axis, as DTensor).

    Canonical at construction: the partition has one entry per dim, and sizes that are even
    are dropped, so that equal layouts are equal values. Raises `ShardingError`, listing every
    failure at once.

    >>> P = PartitionSpec
    >>> spec = Spec(Mesh(dp=2, tp=4), P("dp"), shape=(8, 16))
    >>> spec
    f32[8@dp,16]
    >>> spec == Spec(Mesh(dp=2, tp=4), P("dp", None), shape=(8, 16))
    True
    >>> spec.local_shape(rank=5), spec.index(rank=5)
    ((4, 16), (slice(4, 8, None), slice(0, 16, None)))
    >>> Spec(Mesh(x=4), P("x"), shape=(5,), uneven="chunk").shard_sizes(0)
    (2, 2, 1, 0)
    """

    mesh: Mesh
    partition: PartitionSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    sizes: Sizes
    _hash: int = field(repr=False)

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
        raise_if("fs.Spec", type_problems(mesh, partition, shape, dtype))
        shape = whole_numbers(shape) or ()
        problems = value_problems(mesh, partition, shape, dtype, uneven)
        if any(size < 0 for size in shape):
            raise_if("fs.Spec", problems)
        dims = (partition.dims + ((),) * len(shape))[: len(shape)]
        padded = PartitionSpec._of(dims, partition.unreduced_kinds, partition.reduced_kinds)
        given = by_dim(sizes, len(shape), problems)
        resolved = resolve_sizes(mesh, dims, shape, given, uneven, problems)
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
        """Build from canonical parts, unchecked: for steps that preserve the invariants."""
        self = object.__new__(Spec)
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
        return Spec._of, (self.mesh, self.partition, self.shape, self.dtype, self.sizes)

    # -- text -------------------------------------------------------------------------

    def __str__(self) -> str:
        dims = ",".join(self._dim_text(dim) for dim in range(self.ndim))
        states = [
            f"{word}: {', '.join(axis if kind == 'sum' else f'{axis}={kind}' for axis, kind in k)}"
            for word, k in (
                ("unreduced", self.partition.unreduced_kinds),
                ("reduced", self.partition.reduced_kinds),
            )
            if k
        ]
        dtype = DTYPE_NAMES.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{dtype}[{dims}]{'{' + '; '.join(states) + '}' if states else ''}"

    __repr__ = __str__

    def _dim_text(self, dim: int) -> str:
        axes, sizes = self.partition.dims[dim], self.sizes[dim]
        if not axes:
            return str(self.shape[dim])
        name = axes[0] if len(axes) == 1 else f"({','.join(axes)})"
        text = f"{self.shape[dim]}@{name}"
        if sizes is None:
            return text
        chunked = chunk_sizes(self.shape[dim], [self.mesh.shape[axis] for axis in axes])
        return f"{text}:{'chunk' if sizes == chunked else '+'.join(map(str, sizes))}"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return mimebundle_hook.call(self)

    # -- what it is -------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of tensor dims."""
        return len(self.shape)

    @property
    def is_even(self) -> bool:
        """Whether every rank's local has the same shape."""
        return all(sizes is None for sizes in self.sizes)

    @property
    def num_shards(self) -> int:
        """Number of distinct shards: the product over the dims."""
        return math.prod(self.dim_shards(dim) for dim in range(self.ndim))

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def dim_shards(self, dim: int) -> int:
        """How many shards one dim is cut into."""
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            self._no_dim("Spec.dim_shards", dim)
        return math.prod(self.mesh.shape[axis] for axis in self.partition.dims[dim])

    def shard_sizes(self, dim: int) -> tuple[int, ...]:
        """The size of every shard along `dim`, major to minor; they sum to `shape[dim]`."""
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            self._no_dim("Spec.shard_sizes", dim)
        sizes = self.sizes[dim]
        shards = self.dim_shards(dim)
        return sizes if sizes is not None else (self.shape[dim] // shards,) * shards

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor that `rank` holds."""
        return _place(self, self.mesh.check_rank(rank, "Spec.local_shape"))[1]

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Where the rank's local begins in the global tensor, one offset per dim."""
        return _place(self, self.mesh.check_rank(rank, "Spec.offsets"))[0]

    def index(self, rank: int) -> tuple[slice, ...]:
        """The rank's part of the global tensor, as slices: `global_tensor[spec.index(rank)]`."""
        offsets, shape = _place(self, self.mesh.check_rank(rank, "Spec.index"))
        return tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))

    def local_nbytes(self, rank: int) -> int:
        """Bytes of the local tensor that `rank` holds."""
        _, shape = _place(self, self.mesh.check_rank(rank, "Spec.local_nbytes"))
        return math.prod(shape) * self.dtype.itemsize

    def _no_dim(self, where: str, dim: object) -> NoReturn:
        rule = f"a dim is in {-self.ndim}..{self.ndim - 1}" if self.ndim else "it has no dims"
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
        """The spec of this tensor's gradient: reduced and unreduced swap, the rest stays.

        Raises `ShardingError` where a reduction is not linear (`max`, `min`, `product`), and
        for reduced booleans, which have no sum.

        >>> Spec(Mesh(x=2), PartitionSpec(unreduced={"x"}), shape=(3,)).dual
        f32[3]{reduced: x}
        """
        p = self.partition
        bad = [f"{axis}={kind}" for axis, kind in p.unreduced_kinds if kind not in ("sum", "avg")]
        if bad:
            fail("Spec.dual", f"{self}", f"only sum and avg are linear, {', '.join(bad)} is not",
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
        """A spec with the given parts changed and checked anew.

        Sizes of a dim whose axes and length stay the same are kept.
        """
        partition = self.partition if partition is None else partition
        shape = self.shape if shape is None else shape
        mesh, dtype = mesh or self.mesh, dtype or self.dtype
        raise_if("Spec.replace", type_problems(mesh, partition, shape, dtype))
        shape, sizes = whole_numbers(shape) or (), {} if sizes is None else sizes
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
        """Whether both lay the same numbers on the same ranks: axes of size 1 do not count."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if self.mesh.devices == other.mesh.devices:
            if _grid(self) == _grid(other):
                return True
            if not (_has_twins(self) and _has_twins(other)):
                return False
        return self.mesh.ranks == other.mesh.ranks and all(
            self.index(rank) == other.index(rank) and _states(self, rank) == _states(other, rank)
            for rank in self.mesh.ranks
        )

    @property
    def placements(self) -> tuple[Any, ...]:
        """DTensor's placements, one per mesh axis; a shard order becomes `_StridedShard`."""
        return to_placements_hook.call(self)

    @staticmethod
    def from_placements(
        mesh: Mesh,
        placements: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> Spec:
        """The spec of DTensor's `placements` on `mesh`, uneven dims chunked as DTensor does."""
        return from_placements_hook.call(mesh, placements, shape, dtype)

    def _with(
        self,
        *,
        partition: PartitionSpec | None = None,
        sizes: Sizes | None = None,
        dtype: torch.dtype | None = None,
    ) -> Spec:
        """A spec with canonical parts changed, unchecked: for steps."""
        return Spec._of(self.mesh, self.partition if partition is None else partition,
                        self.shape, self.dtype if dtype is None else dtype,
                        self.sizes if sizes is None else sizes)  # fmt: skip


class Sharded(NamedTuple):
    """A pair: what this process holds of a global tensor, and the global tensor's spec.

    `local` is one tensor under `torchrun`, and in a simulation the tuple of all shards in
    rank order. Any 2-tuple of the same two things is accepted wherever a pair is.
    """

    local: Any
    spec: Spec


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
def _place(spec: Spec, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and shape of one rank's local."""
    offsets, shape = [], []
    for dim, (size, axes) in enumerate(zip(spec.shape, spec.partition.dims, strict=True)):
        place, sizes = spec.mesh.index(rank, axes), spec.sizes[dim]
        if sizes is None:
            width = size // spec.dim_shards(dim)
            offsets.append(place * width)
            shape.append(width)
        else:
            offsets.append(sum(sizes[:place]))
            shape.append(sizes[place])
    return tuple(offsets), tuple(shape)


def _grid(spec: Spec) -> tuple[object, ...]:
    """The coarsest grid of the devices that tells what the axes do, and the sizes.

    Axes that stand side by side in the mesh and in a dim are one axis, as are neighbours of one
    state; axes of size 1, and those of a dim without elements, do nothing. Two layouts of one
    sequence of devices are the same exactly where this is, but for twins: `_has_twins`.
    """
    p, counts = spec.partition, spec.mesh.shape
    roles: dict[str, tuple[object, ...]] = {}
    for dim, axes in enumerate(p.dims):
        major = 1
        for axis in axes if spec.shape[dim] else ():
            roles[axis] = dim, major
            major *= counts[axis]
    roles |= {axis: ("unreduced", kind) for axis, kind in p.unreduced_kinds}
    roles |= {axis: ("reduced", kind) for axis, kind in p.reduced_kinds}
    grid: list[tuple[int, tuple[object, ...]]] = []
    for axis, size in counts.items():
        if size == 1:
            continue
        role = roles.get(axis, ())
        if grid and role == _next_role(*grid[-1]):
            grid[-1] = grid[-1][0] * size, grid[-1][1]
        else:
            grid.append((size, role))
    return (*grid, spec.sizes)


def _next_role(size: int, role: tuple[object, ...]) -> tuple[object, ...]:
    """What the next axis does if it is one with an axis of `size` and `role`."""
    match role:
        case (int(dim), int(major)):
            return dim, major * size
        case _:
            return role


def _has_twins(spec: Spec) -> bool:
    """Whether shards lie at one place: empty ones that follow each other in a dim."""
    return any(
        not one and not other
        for sizes in spec.sizes
        if sizes is not None
        for one, other in itertools.pairwise(sizes)
    )


def _states(spec: Spec, rank: int) -> frozenset[tuple[str, str, tuple[int, ...]]]:
    """Which ranks this one is unreduced and reduced with, by reduction."""
    states = set()
    for word, kinds in (
        ("unreduced", spec.partition.unreduced_kinds),
        ("reduced", spec.partition.reduced_kinds),
    ):
        for kind in {kind for axis, kind in kinds if spec.mesh.shape[axis] > 1}:
            axes = [axis for axis, each in kinds if each == kind]
            states.add((word, kind, tuple(sorted(spec.mesh.group(rank, axes)))))
    return frozenset(states)


@Hook
def mimebundle_hook(value: Any) -> dict[str, str]:
    """`_repr_mimebundle_` of specs, programs and batches; set by `show/notebook.py`."""
    raise NotImplementedError


@Hook
def to_placements_hook(spec: Spec) -> tuple[Any, ...]:
    """`Spec.placements`; set by `interop.py`."""
    raise NotImplementedError


@Hook
def from_placements_hook(
    mesh: Mesh, placements: Sequence[Any], shape: Sequence[int], dtype: torch.dtype
) -> Spec:
    """`Spec.from_placements`; set by `interop.py`."""
    raise NotImplementedError
