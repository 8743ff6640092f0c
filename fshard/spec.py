"""`Spec`: how a global tensor lies on a mesh, as an immutable value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fshard import hooks
from fshard.errors import Problem, did_you_mean, fail, raise_if
from fshard.mesh import Mesh
from fshard.partition import LINEAR, Kinds, PartitionSpec, chunk_sizes

__all__ = ["DTYPE_NAMES", "Shard", "Sharded", "Spec", "mixed_kinds", "state_problems"]

Sizes = tuple[tuple[int, ...] | None, ...]

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
        shape = tuple(int(size) for size in shape)
        problems = _type_problems(mesh, partition, shape, dtype, uneven)
        if any(size < 0 for size in shape) or not isinstance(partition, PartitionSpec):
            raise_if("fs.Spec", problems)
        dims = (partition.dims + ((),) * len(shape))[: len(shape)]
        padded = PartitionSpec._of(dims, partition.unreduced_kinds, partition.reduced_kinds)
        given = _by_dim(sizes, len(shape))
        resolved = _resolve_sizes(mesh, dims, shape, given, uneven, problems)
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
        bundle: dict[str, str] = hooks.call("mimebundle", self)
        return bundle

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
        return math.prod(self.mesh.shape[axis] for axis in self.partition.dims[dim])

    def shard_sizes(self, dim: int) -> tuple[int, ...]:
        """The size of every shard along `dim`, major to minor; they sum to `shape[dim]`."""
        sizes = self.sizes[dim]
        shards = self.dim_shards(dim)
        return sizes if sizes is not None else (self.shape[dim] // shards,) * shards

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor that `rank` holds."""
        return _place(self, rank)[1]

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Where the rank's local begins in the global tensor, one offset per dim."""
        return _place(self, rank)[0]

    def index(self, rank: int) -> tuple[slice, ...]:
        """The rank's part of the global tensor, as slices: `global_tensor[spec.index(rank)]`."""
        offsets, shape = _place(self, rank)
        return tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))

    def local_nbytes(self, rank: int) -> int:
        """Bytes of the local tensor that `rank` holds."""
        return math.prod(self.local_shape(rank)) * self.dtype.itemsize

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

        Raises `ShardingError` where a reduction is not linear (`max`, `min`, `product`).

        >>> Spec(Mesh(x=2), PartitionSpec(unreduced={"x"}), shape=(3,)).dual
        f32[3]{reduced: x}
        """
        p = self.partition
        bad = [f"{axis}={kind}" for axis, kind in p.unreduced_kinds if kind not in ("sum", "avg")]
        if bad:
            fail("Spec.dual", f"{self}", f"only sum and avg are linear, {', '.join(bad)} is not",
                 "reduce it first: a program that does has a gradient")  # fmt: skip
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
        shape = self.shape if shape is None else tuple(shape)
        sizes = sizes or {}
        kept: dict[int, Sequence[int] | None] = {
            dim: self.sizes[dim]
            for dim in range(min(len(shape), self.ndim, len(partition.dims)))
            if partition.dims[dim] == self.partition.dims[dim] and shape[dim] == self.shape[dim]
            and dim not in sizes and dim - len(shape) not in sizes
        }  # fmt: skip
        return Spec(mesh or self.mesh, partition, shape=shape, dtype=dtype or self.dtype,
                    sizes={**kept, **sizes}, uneven=uneven)  # fmt: skip

    def is_equivalent(self, other: Spec) -> bool:
        """Whether both lay the same numbers on the same ranks: axes of size 1 do not count."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        if self.mesh == other.mesh and _essence(self) == _essence(other):
            return True
        return self.mesh.ranks == other.mesh.ranks and all(
            self.index(rank) == other.index(rank) and _states(self, rank) == _states(other, rank)
            for rank in self.mesh.ranks
        )

    @property
    def placements(self) -> tuple[Any, ...]:
        """DTensor's placements, one per mesh axis; a shard order becomes `_StridedShard`."""
        result: tuple[Any, ...] = hooks.call("to_placements", self)
        return result

    @staticmethod
    def from_placements(
        mesh: Mesh,
        placements: Sequence[Any],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> Spec:
        """The spec of DTensor's `placements` on `mesh`, uneven dims chunked as DTensor does."""
        spec: Spec = hooks.call("from_placements", mesh, placements, shape, dtype)
        return spec

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


def _by_dim(
    sizes: Mapping[int, Sequence[int] | None] | None, ndim: int
) -> dict[int, tuple[int, ...]]:
    """The caller's sizes by non-negative dim."""
    items = (sizes or {}).items()
    given = {dim: tuple(int(n) for n in each) for dim, each in items if each is not None}
    problems = [
        Problem(f"sizes={{{dim}: ...}}", f"a dim is in {-ndim}..{ndim - 1}", "name a dim it has")
        for dim in given
        if not -ndim <= dim < ndim
    ]
    problems += [
        Problem(f"sizes of dims {dim} and {dim - ndim}", f"dim {dim} is given twice",
                "give its sizes once")
        for dim in given if dim >= 0 and dim - ndim in given
    ]  # fmt: skip
    raise_if("fs.Spec", problems)
    return {dim % ndim: each for dim, each in given.items()}


def _type_problems(
    mesh: Mesh,
    partition: PartitionSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    uneven: str | None,
) -> list[Problem]:
    """Everything wrong with a spec that needs no sizes to see."""
    if not isinstance(mesh, Mesh) or not isinstance(partition, PartitionSpec):
        return [Problem(f"Spec({type(mesh).__name__}, {type(partition).__name__})",
                        "a spec is made from a Mesh and a PartitionSpec",
                        "fs.Spec(mesh, P('x', None), shape=(8, 16))")]  # fmt: skip
    known = ", ".join(mesh.axes)
    problems = [
        Problem(f"axis {axis!r} on {mesh}", f"the mesh's axes are {known or 'none'}",
                did_you_mean(axis, mesh.axes, f"use one of {known}"))
        for axis in dict.fromkeys(partition.axes) if axis not in mesh.axes
    ]  # fmt: skip
    if len(partition) > len(shape):
        problems.append(Problem(
            f"{partition!r} with {len(partition)} entries for shape {shape}",
            f"a tensor of {len(shape)} dims has at most {len(shape)} entries",
            f"drop {len(partition) - len(shape)} of them, trailing None too"))  # fmt: skip
    if any(size < 0 for size in shape):
        problems.append(Problem(f"shape {shape}", "sizes are at least 0", "check the shape"))
    if uneven not in (None, "chunk"):
        problems.append(Problem(f"uneven={uneven!r}", "uneven is None or 'chunk'",
                                "uneven='chunk', or sizes={dim: (...)}"))  # fmt: skip
    problems += state_problems(partition.unreduced_kinds, partition.reduced_kinds, dtype)
    return problems


def mixed_kinds(unreduced: Kinds, reduced: Kinds) -> bool:
    """Whether reductions stand side by side whose order would matter.

    A tensor that is reduced by a sum holds its values and mixes with all; one that holds
    shares of an average is half way through a linear reduction.
    """
    kinds = {kind for _, kind in unreduced} | {kind for _, kind in reduced if kind != "sum"}
    return len(kinds) > 1 and not kinds <= set(LINEAR)


def state_problems(unreduced: Kinds, reduced: Kinds, dtype: torch.dtype) -> list[Problem]:
    """What forbids these states for a tensor of `dtype`, if anything."""
    inexact = dtype.is_floating_point or dtype.is_complex
    problems = []
    if mixed_kinds(unreduced, reduced):
        given = ", ".join(f"{axis}={kind}" for axis, kind in (*unreduced, *reduced))
        problems.append(Problem(f"several reductions at once: {given}",
            "reductions other than sum and avg do not mix: their order would matter",
            "reduce over one axis first"))  # fmt: skip
    for axis, kind in (*unreduced, *reduced):
        if kind == "avg" and not inexact:
            problems.append(Problem(
                f"{axis!r} averaged, dtype {dtype}", "an average of integers is not an integer",
                "use sum, or a floating dtype"))  # fmt: skip
        if kind in ("max", "min") and dtype.is_complex:
            problems.append(Problem(f"{axis!r} unreduced by {kind}, dtype {dtype}",
                "complex numbers have no order", "use sum"))  # fmt: skip
        if kind == "sum" and dtype == torch.bool and (axis, kind) in unreduced:
            problems.append(Problem(
                f"{axis!r} summed, dtype torch.bool", "booleans have no sum",
                "use max (any), min (all), or an integer dtype"))  # fmt: skip
    return problems


def _resolve_sizes(
    mesh: Mesh,
    dims: tuple[tuple[str, ...], ...],
    shape: tuple[int, ...],
    given: dict[int, tuple[int, ...]],
    uneven: str | None,
    problems: list[Problem],
) -> Sizes:
    """Per dim: None where the shards are equal, else their sizes; adds to `problems`."""
    resolved: list[tuple[int, ...] | None] = []
    for dim, (size, axes) in enumerate(zip(shape, dims, strict=True)):
        if not all(axis in mesh.axes for axis in axes):
            continue  # a problem already: how many shards there would be is not known
        parts = [mesh.shape[axis] for axis in axes]
        shards = math.prod(parts)
        sizes = given.get(dim)
        if sizes is not None:
            if len(sizes) != shards or sum(sizes) != size or any(n < 0 for n in sizes):
                problems.append(Problem(
                    f"sizes={{{dim}: {sizes}}}",
                    f"dim {dim} of size {size} has {shards} shards over {axes or 'no axes'}: "
                    f"{shards} sizes of at least 0 that sum to {size}, not "
                    f"{len(sizes)} that sum to {sum(sizes)}",
                    f"sizes={{{dim}: {chunk_sizes(size, parts)}}}, say"))  # fmt: skip
            resolved.append(None if len(set(sizes)) <= 1 else sizes)
        elif size % shards == 0:
            resolved.append(None)
        elif uneven == "chunk":
            resolved.append(chunk_sizes(size, parts))
        else:
            chunked = chunk_sizes(size, parts)
            brief = str(chunked) if shards <= 16 else f"({', '.join(map(str, chunked[:4]))}, ...)"
            problems.append(Problem(
                f"dim {dim} of size {size} over {' x '.join(f'{a}={mesh.shape[a]}' for a in axes)}",
                f"{shards} shards divide a dim evenly; {size} % {shards} = {size % shards}",
                f"uneven='chunk' (shards of {brief}), sizes={{{dim}: (...)}}, "
                f"or pad the dim to {-(-size // shards) * shards}"))  # fmt: skip
            resolved.append(None)
    return tuple(resolved)


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


def _essence(spec: Spec) -> tuple[object, ...]:
    """The partition without the axes of size 1."""
    mesh = spec.mesh.shape
    p = spec.partition
    return (
        tuple(tuple(axis for axis in dim if mesh[axis] > 1) for dim in p.dims),
        tuple(each for each in p.unreduced_kinds if mesh[each[0]] > 1),
        tuple(each for each in p.reduced_kinds if mesh[each[0]] > 1),
        spec.sizes,
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
