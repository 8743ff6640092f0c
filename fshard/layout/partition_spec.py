"""`PartitionSpec`, the mapping of tensor dims to mesh axes, and chunk sizes of uneven dims.

States along an axis: sharded, invariant, reduced and unreduced are data of a `PartitionSpec`;
varying exists only in `spmd/types`. The changes of state are the steps of `program/steps`; which
role of an operation requires which state is in `ops/strategy/axis_roles`. A new state would be
added to, in this order:

- `layout`: `partition_spec`, `validation`, `spec` (dual, text), `parsing`, `equivalence`,
  `refinement`; `interop`;
- `program`: `steps`, `infer`, `transpose`, `single_step`, `exchange_boxes`, `cost`; `plan/search`;
- `run`: `interpreter`, `collective`;
- `ops`: `strategy/axis_roles`, the `Mode` of `core/rule`;
- `spmd`: `types`, `tracking`, `collectives/pcast`; and `show`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fshard._torch.dynamo import graph_constant
from fshard._util.errors import Problem, did_you_mean, raise_if

REDUCTIONS = ("sum", "avg", "max", "min", "product")
LINEAR = ("sum", "avg")
"""Reductions that have a transpose, and so a gradient."""
BITWISE = {"band": "min", "bor": "max"}
"""DTensor's bitwise reductions that have an equal one of booleans; `"bxor"` has none."""

Entry = str | None | Sequence[str]
Kinds = tuple[tuple[str, str], ...]
"""Axes and their reductions, sorted by axis."""


@graph_constant
@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False, weakref_slot=True)
class PartitionSpec:
    """Mapping of tensor dims to the mesh axes that shard them, with unreduced and reduced axes.

    Equal meanings are equal values: `P(("x",)) == P("x")`. After `jax.sharding.PartitionSpec`.

    Args:
        partitions: one entry per dim: `None`, an axis name, or axis names major to minor:
            `P(("dp", "tp"))` splits over `dp` first, so that neighbours along `dp` are furthest
            apart. Missing trailing entries are `None`.
        unreduced: axes along which ranks hold partial sums, or a mapping from such axes to `"sum"`,
            `"avg"`, `"max"`, `"min"` or `"product"`. DTensor's bitwise reductions, which NCCL
            lacks, are refused: of booleans `"min"` is "and", `"max"` is "or".
        reduced: axes along which the gradient is unreduced, or a mapping from such axes to `"sum"`
            or `"avg"`; with `"avg"` each of the n ranks holds the value over n.

    Raises:
        ShardingError: an axis is repeated, an entry nested, or a reduction unknown; lists all.

    >>> import fshard as fs
    >>> fs.P("dp", None, unreduced={"tp": "max"})
    P('dp', None, unreduced={'tp': 'max'})
    >>> fs.P(["x", "y"]) == fs.P(("x", "y")), fs.P(()) == fs.P(None)
    (True, True)
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced_kinds: Kinds
    reduced_kinds: Kinds
    _hash: int = field(repr=False)

    def __init__(
        self,
        *partitions: Entry,
        unreduced: Iterable[str] | Mapping[str, str] = (),
        reduced: Iterable[str] | Mapping[str, str] = (),
    ) -> None:
        problems: list[Problem] = []
        dims = tuple(_entry(dim, entry, problems) for dim, entry in enumerate(partitions))
        unreduced_kinds = _kinds("unreduced", unreduced, REDUCTIONS, problems)
        reduced_kinds = _kinds("reduced", reduced, LINEAR, problems)
        named = [axis for dim in dims for axis in dim]
        named += [axis for axis, _ in (*unreduced_kinds, *reduced_kinds)]
        problems += [
            Problem(f"axis {axis!r} {named.count(axis)} times in {_text(partitions)}"
                    f"{', unreduced=' + str(dict(unreduced_kinds)) if unreduced_kinds else ''}"
                    f"{', reduced=' + str(dict(reduced_kinds)) if reduced_kinds else ''}",
                    "an axis must be named at most once in a spec",
                    f"name {axis!r} for one dim, or in one of unreduced= and reduced=")
            for axis in dict.fromkeys(named) if named.count(axis) > 1
        ]  # fmt: skip
        raise_if("fs.PartitionSpec", problems)
        _fill(self, dims, unreduced_kinds, reduced_kinds)

    @staticmethod
    def _of(
        dims: tuple[tuple[str, ...], ...], unreduced: Kinds = (), reduced: Kinds = ()
    ) -> PartitionSpec:
        """Build from canonical parts without checks, for steps that preserve the invariants."""
        self = object.__new__(PartitionSpec)
        _fill(self, dims, tuple(sorted(unreduced)), tuple(sorted(reduced)))
        return self

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, PartitionSpec):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.dims == other.dims
            and self.unreduced_kinds == other.unreduced_kinds
            and self.reduced_kinds == other.reduced_kinds
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_partition, self._parts

    @property
    def _parts(self) -> tuple[tuple[tuple[str, ...], ...], Kinds, Kinds]:
        """Arguments of `_of`: axes of each dim, unreduced kinds, reduced kinds."""
        return self.dims, self.unreduced_kinds, self.reduced_kinds

    def __len__(self) -> int:
        return len(self.dims)

    def __iter__(self) -> Iterator[str | None | tuple[str, ...]]:
        return iter(self.partitions)

    def __getitem__(self, dim: int) -> str | None | tuple[str, ...]:
        return self.partitions[dim]

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.partitions]
        for word, kinds in (("unreduced", self.unreduced_kinds), ("reduced", self.reduced_kinds)):
            if kinds and all(kind == "sum" for _, kind in kinds):
                parts.append(f"{word}={{{', '.join(repr(axis) for axis, _ in kinds)}}}")
            elif kinds:
                parts.append(f"{word}={dict(kinds)}")
        return f"P({', '.join(parts)})"

    @property
    def partitions(self) -> tuple[str | None | tuple[str, ...], ...]:
        """One entry per dim: `None`, an axis name, or several names major to minor."""
        return tuple(None if not d else d[0] if len(d) == 1 else d for d in self.dims)

    @property
    def unreduced(self) -> Mapping[str, str]:
        """Reduction of each unreduced axis; read-only."""
        return MappingProxyType(dict(self.unreduced_kinds))

    @property
    def reduced(self) -> Mapping[str, str]:
        """Reduction of each reduced axis, `sum` or `avg`; read-only."""
        return MappingProxyType(dict(self.reduced_kinds))

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes: of the dims in order, then unreduced and reduced ones."""
        named = [axis for dim in self.dims for axis in dim]
        return (*named, *dict(self.unreduced_kinds), *dict(self.reduced_kinds))


def _fill(
    spec: PartitionSpec, dims: tuple[tuple[str, ...], ...], unreduced: Kinds, reduced: Kinds
) -> None:
    set_ = object.__setattr__
    set_(spec, "dims", dims)
    set_(spec, "unreduced_kinds", unreduced)
    set_(spec, "reduced_kinds", reduced)
    set_(spec, "_hash", hash((dims, unreduced, reduced)))


def _text(partitions: Sequence[object]) -> str:
    return f"P({', '.join(map(repr, partitions))})"


def _entry(dim: int, entry: object, problems: list[Problem]) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, list | tuple) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    problems.append(Problem(f"partition entry {dim} is {entry!r}",
                            "an entry must be None, an axis name, or a flat tuple of axis names",
                            "P('x'), P(None) or P(('x', 'y'))"))  # fmt: skip
    return ()


def _kinds(
    word: str,
    axes: Iterable[str] | Mapping[str, str],
    allowed: Sequence[str],
    problems: list[Problem],
) -> Kinds:
    if isinstance(axes, str):
        axes = (axes,)
    kinds = dict(axes) if isinstance(axes, Mapping) else dict.fromkeys(axes, "sum")
    for axis, kind in kinds.items():
        if not isinstance(axis, str):
            problems.append(Problem(f"{word} axis {axis!r}", "an axis name must be a string",
                                    f"{word}={{'x'}}"))  # fmt: skip
        if kind not in allowed:
            fix = did_you_mean(str(kind), allowed, f"use one of {', '.join(allowed)}")
            if kind in BITWISE and BITWISE[kind] in allowed:
                fix = f"{BITWISE[kind]!r} is the same reduction of booleans"
            problems.append(Problem(
                f"{word}={{{axis!r}: {kind!r}}}",
                f"a reduction must be one of {', '.join(allowed)}", fix))  # fmt: skip
    return tuple(sorted(kinds.items(), key=lambda item: str(item[0])))


def rebuild_partition(*parts: Any) -> PartitionSpec:
    """Return the partition of the parts of a pickle."""
    return PartitionSpec._of(*parts)


def chunk_sizes(size: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shard sizes of `torch.chunk` nested per axis, major to minor.

    Empty shards are included. DTensor's `(Shard(0), Shard(0))` has these sizes.

    Args:
        size: size of the tensor dim.
        axis_sizes: sizes of the mesh axes of the dim, major to minor.

    >>> chunk_sizes(5, (2, 2))
    (2, 1, 1, 1)
    >>> chunk_sizes(5, (4,))
    (2, 2, 1, 0)
    """
    sizes = [size]
    for shards in axis_sizes:
        chunks = {n: _chunk(n, shards) for n in {*sizes}}
        sizes = [part for n in sizes for part in chunks[n]]
    return tuple(sizes)


def remove_kinds(kinds: Kinds, axes: Collection[str]) -> Kinds:
    """Return `kinds` without the axes of `axes`."""
    return tuple([item for item in kinds if item[0] not in axes])


def _chunk(size: int, shards: int) -> list[int]:
    width = -(-size // shards)
    full, rest = divmod(size, max(width, 1))
    return [*[width] * full, rest, *[0] * (shards - full)][:shards]
