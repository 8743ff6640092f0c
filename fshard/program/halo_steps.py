"""Steps that extend shards by parts of their neighbours, and that add such parts back.

A *window* is the interval of a dim that one rank holds after a halo exchange; windows of neighbours
overlap. The windows, concatenated in the order of the shards, are a global tensor like any other:
`f32[16@h]` with windows of 5 to 6 elements becomes `f32[22@h:5+6+6+5]`. So programs with halo
exchanges type-check, print, cost, simulate and transpose like all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fshard._util.errors import fail
from fshard.layout.validation import as_ints

Window = tuple[int, int]
"""Start and stop in a dim; positions outside of it are as the boundary of the step says."""
Windows = tuple[Window, ...]
"""One window for every shard of a dim, in major-to-minor order."""


def _checked(step: object, windows: Any) -> tuple[Windows | None, ...]:
    """Return windows per dim without trailing dims that have none; raise for other values."""
    name = f"fs.{type(step).__name__}"
    fix = "windows=(None, ((0, 5), (3, 8))), say, for dim 1 of two shards"
    rule = "windows must be a tuple of None or one (start, stop) for each shard, for every dim"
    if not isinstance(windows, tuple | list):
        fail(name, f"windows={windows!r}", rule, fix)
    dims: list[Windows | None] = []
    for dim in windows:
        pairs = None if dim is None else tuple(as_ints(pair) for pair in dim)
        if pairs is not None and any(
            pair is None or len(pair) != 2 or pair[0] > pair[1] for pair in pairs
        ):
            fail(name, f"windows={windows!r}", f"{rule}, with start <= stop", fix)
        dims.append(pairs)  # type: ignore[arg-type]
    while dims and dims[-1] is None:
        dims.pop()
    if not dims:
        fail(name, f"windows={windows!r}", "at least one dim must have windows", fix)
    return tuple(dims)


def _check_boundary(step: object, boundary: Any) -> None:
    """Raise if a step has an unknown boundary."""
    if boundary not in ("circular", "zeros"):
        fail(f"fs.{type(step).__name__}", f"boundary={boundary!r}",
             "boundary must be 'circular' or 'zeros'", 'boundary="zeros"')  # fmt: skip


def _text(windows: tuple[Windows | None, ...]) -> str:
    """Return the dims that have windows, for the text of a step."""
    dims = [str(dim) for dim, rows in enumerate(windows) if rows is not None]
    return f"{'dim' if len(dims) == 1 else 'dims'} {', '.join(dims)}"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class HaloExchange:
    """Sharded to sharded: every rank gets the elements of its window, which overlap with others'.

    Each rank receives what it lacks and no more, of several dims at once with their corners, from
    as many neighbours as its window reaches. Transpose: `HaloReduce`.

    Args:
        windows: For every dim None, or the start and stop of the window of every shard.
        boundary: Elements beyond the ends of a dim: "circular" for those at its other end, or
            "zeros".

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(h=2), fs.P("h"), shape=(8,))
    >>> prog = fs.Program(src, (fs.HaloExchange((((0, 5), (3, 8)),)),))
    >>> print(prog.dst, prog.cost().bytes_sent)
    f32[10@h] 4
    """

    windows: tuple[Windows | None, ...]
    boundary: str = "circular"
    name: ClassVar[str] = "halo_exchange"

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", _checked(self, self.windows))
        _check_boundary(self, self.boundary)

    def __str__(self) -> str:
        return f"{self.name}({_text(self.windows)})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class HaloReduce:
    """Sharded to sharded: every rank sends its halo to the owners, which add it to their shards.

    Elements of the result that are in no window are zero. Transpose: `HaloExchange`.

    Args:
        windows: For every dim None, or the start and stop of the window of every shard.
        sizes: For every dim None, or the sizes of the shards of the result, in the dims that have
            windows.
        boundary: Owners of elements beyond the ends of a dim: "circular" for those at its other
            end, or "zeros" for none.

    >>> import fshard as fs
    >>> src = fs.Spec(fs.Mesh(h=2), fs.P("h"), shape=(10,))
    >>> prog = fs.Program(src, (fs.HaloReduce((((0, 5), (3, 8)),), sizes=((4, 4),)),))
    >>> print(prog.dst)
    f32[8@h]
    """

    windows: tuple[Windows | None, ...]
    sizes: tuple[tuple[int, ...] | None, ...]
    boundary: str = "circular"
    name: ClassVar[str] = "halo_reduce"

    def __post_init__(self) -> None:
        windows = _checked(self, self.windows)
        _check_boundary(self, self.boundary)
        object.__setattr__(self, "windows", windows)
        sizes = self.sizes if isinstance(self.sizes, tuple | list) else ()
        stored = tuple(None if dim is None else as_ints(dim) for dim in sizes)
        fits = len(stored) == len(windows) and all(
            (rows is None and dim is None)
            or (rows is not None and dim is not None and len(rows) == len(dim) and min(dim) >= 0)
            for rows, dim in zip(windows, stored, strict=True)
        )
        if not fits:
            fail("fs.HaloReduce", f"windows={windows!r}, sizes={self.sizes!r}",
                 "sizes must have one size of at least 0 for each shard, in the dims with windows",
                 "sizes=((4, 4),) for windows=(((0, 5), (3, 8)),), say")  # fmt: skip
        object.__setattr__(self, "sizes", stored)

    def __str__(self) -> str:
        return f"{self.name}({_text(self.windows)})"


HaloStep = HaloExchange | HaloReduce
"""Step between shards and overlapping windows of them."""
