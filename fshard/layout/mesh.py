"""A mesh of devices with named axes, as a pure value: no process is needed to ask it anything."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from fshard._util.errors import Problem, did_you_mean, fail, raise_if

__all__ = ["Axes", "Mesh", "as_axes"]

Axes = str | Sequence[str]
"""One axis name or several, major to minor."""


def as_axes(axes: Axes, where: str = "axes") -> tuple[str, ...]:
    """Canonical form of one axis or several: always a tuple.

    Raises `ShardingError` for what is neither a name nor a tuple or list of names.
    """
    if isinstance(axes, str):
        return (axes,)
    if isinstance(axes, tuple | list) and all(isinstance(name, str) for name in axes):
        return tuple(axes)
    if isinstance(axes, Set) and axes:
        # The order in which a set of strings comes is another in every process.
        names = sorted(map(str, axes))
        fail(where, f"the set {{{', '.join(map(repr, names))}}} as axes",
             "axes are a name, or a tuple or a list of names, the first one major",
             f"{repr(tuple(names)) if names[1:] else repr(names[0])}, say")  # fmt: skip
    fail(where, f"{axes!r} as axes", "axes are a name, or a tuple or a list of names",
         "'x' or ('x', 'y'), with names of the mesh's axes")  # fmt: skip


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Mesh:
    """Devices in a row-major grid with named axes; immutable and hashable.

    `Mesh(dp=2, tp=4)` or `Mesh({"dp": 2, "tp": 4}, devices=...)`, where `devices` are rank
    ids in row-major order (default `0..n-1`).

    Raises `ShardingError` for a size under 1, or for devices that are repeated, negative or
    not as many as the grid has places.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size, mesh.axes, mesh.shape["tp"]
    (8, ('dp', 'tp'), 4)
    >>> mesh.coords(6)
    {'dp': 1, 'tp': 2}
    >>> mesh.rank(dp=1, tp=2)
    6
    >>> mesh.groups("tp")
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: range | tuple[int, ...]
    _hash: int = field(repr=False)

    def __init__(
        self,
        shape: Mapping[str, int] | None = None,
        /,
        devices: Iterable[int] | None = None,
        **axes: int,
    ) -> None:
        if shape is not None and not isinstance(shape, Mapping):
            fail("fs.Mesh", f"a shape of {shape!r}", "a shape maps axis names to sizes",
                 "Mesh(dp=2, tp=4) or Mesh({'dp': 2, 'tp': 4})")  # fmt: skip
        grid = {**(shape or {}), **axes}
        problems = [
            Problem(f"axis {name!r} of size {size!r}",
                    "an axis has at least 1 device" if type(size) is int
                    else "an axis has a whole number of devices, an int",
                    f"Mesh({name}=1) or leave the axis out")
            for name, size in grid.items()
            if not isinstance(size, int) or isinstance(size, bool) or size < 1
        ]  # fmt: skip
        problems += [
            Problem(f"axis name {name!r}", "an axis name is a Python identifier", "rename the axis")
            for name in grid
            if not isinstance(name, str) or not name.isidentifier()
        ]
        raise_if("fs.Mesh", problems)
        ids = _canonical_devices(devices, math.prod(grid.values()), grid)
        set_ = object.__setattr__
        set_(self, "axes", tuple(grid))
        set_(self, "sizes", tuple(grid.values()))
        set_(self, "devices", ids)
        set_(self, "_hash", hash((self.axes, self.sizes, self.devices)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self._hash, self.axes, self.sizes, self.devices) == (
            other._hash, other.axes, other.sizes, other.devices)  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        # The hash depends on the process (strings), so a pickle is rebuilt, not restored.
        return _rebuild_mesh, (self.axes, self.sizes, self.devices)

    def __repr__(self) -> str:
        grid = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))
        if self.devices == range(self.size):
            return f"Mesh({grid})"
        shown = self.devices if isinstance(self.devices, range) else list(self.devices)
        return f"Mesh({grid}{', ' if grid else ''}devices={shown})"

    # -- what it is -------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @property
    def shape(self) -> Mapping[str, int]:
        """Axis name to size, in order; read-only."""
        return _shape(self)

    @property
    def ranks(self) -> range | tuple[int, ...]:
        """The rank ids in increasing order: the order of the shards in a simulated local."""
        return self.devices if isinstance(self.devices, range) else _ranks(self)

    def __contains__(self, rank: object) -> bool:
        return rank in (self.devices if isinstance(self.devices, range) else _positions(self))

    def axis_size(self, axes: Axes) -> int:
        """The product of the sizes of one axis or several."""
        shape = _shape(self)
        return math.prod(shape[axis] for axis in self.check_axes(axes, "Mesh.axis_size"))

    def check_axes(self, axes: Axes, where: str) -> tuple[str, ...]:
        """`axes` as a tuple; raises `ShardingError` for unknown or repeated names."""
        names = as_axes(axes, where)
        if len(set(names)) == len(names) and all(name in self.axes for name in names):
            return names
        problems = [
            Problem(f"axis {name!r} on {self}", f"the mesh's axes are {', '.join(self.axes)}",
                    did_you_mean(str(name), self.axes, f"use one of {', '.join(self.axes)}"))
            for name in dict.fromkeys(names) if name not in self.axes
        ]  # fmt: skip
        problems += [
            Problem(f"axis {name!r} {names.count(name)} times in {names}",
                    "an axis is named at most once", f"name {name!r} once")
            for name in dict.fromkeys(names) if names.count(name) > 1
        ]  # fmt: skip
        raise_if(where, problems)
        raise AssertionError("unreachable")

    def check_rank(self, rank: int, where: str) -> int:
        """`rank`; raises `ShardingError` where the mesh has no such rank."""
        if rank not in self:
            fail(where, f"rank {rank!r} on {self}", f"its ranks are {_brief(self.ranks)}",
                 "ask `rank in mesh` first")  # fmt: skip
        return rank

    # -- ranks and coordinates --------------------------------------------------------

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a rank, one per axis in mesh order."""
        position = self._position(self.check_rank(rank, "Mesh.coordinate"))
        coordinate = []
        for size in reversed(self.sizes):
            position, here = divmod(position, size)
            coordinate.append(here)
        return tuple(reversed(coordinate))

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank by axis name."""
        coordinate = self.coordinate(self.check_rank(rank, "Mesh.coords"))
        return dict(zip(self.axes, coordinate, strict=True))

    def index(self, rank: int, axes: Axes) -> int:
        """The rank's linear index along `axes`, row-major in the order given."""
        coordinate = self.coordinate(self.check_rank(rank, "Mesh.index"))
        index = 0
        for axis in self.check_axes(axes, "Mesh.index"):
            place = self.axes.index(axis)
            index = index * self.sizes[place] + coordinate[place]
        return index

    def rank(self, **coords: int) -> int:
        """The rank at the given coordinates, one for every axis."""
        problems = [
            Problem(f"coordinate {axis}={coords.get(axis)!r}",
                    f"axis {axis!r} has coordinates 0..{size - 1}",
                    f"give {axis}= one of them")
            for axis, size in _shape(self).items()
            if axis not in coords or not 0 <= coords[axis] < size
        ]  # fmt: skip
        raise_if("Mesh.rank", problems)
        self.check_axes(tuple(coords), "Mesh.rank")
        position = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            position = position * size + coords[axis]
        return self.devices[position]

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that communicate along `axes`, each major to minor in that order."""
        return _groups(self, self.check_axes(axes, "Mesh.groups"))

    def group(self, rank: int, axes: Axes) -> tuple[int, ...]:
        """The one group of `groups(axes)` that holds `rank`."""
        return _group(self, self.check_rank(rank, "Mesh.group"), as_axes(axes))

    # -- other meshes -----------------------------------------------------------------

    def submesh(self, *axes: str, **coords: int) -> Mesh:
        """The mesh of `axes` alone, the others fixed at `coords` (default 0).

        >>> Mesh(dp=2, tp=4).submesh("tp", dp=1)
        Mesh(tp=4, devices=range(4, 8))
        """
        names = self.check_axes(axes, "Mesh.submesh")
        self.check_axes((*names, *coords), "Mesh.submesh")
        fixed = {axis: coords.get(axis, 0) for axis in self.axes if axis not in names}
        grids = [range(self.shape[axis]) for axis in names]
        devices = [
            self.rank(**fixed, **dict(zip(names, point, strict=True)))
            for point in itertools.product(*grids)
        ]
        return Mesh({axis: self.shape[axis] for axis in names}, devices=devices)

    def flatten(self, axes: Axes, name: str) -> Mesh:
        """One axis `name` in place of `axes`, which it walks major to minor.

        >>> Mesh(dp=2, tp=2).flatten(("tp", "dp"), "all").devices
        (0, 2, 1, 3)
        """
        names = self.check_axes(axes, "Mesh.flatten")
        if not names:
            fail("Mesh.flatten", f"no axes into {name!r}", "there is at least one axis to flatten",
                 "name the axes")  # fmt: skip
        self._check_new("Mesh.flatten", [name], names)
        order: list[str] = []
        grid: dict[str, int] = {}
        for axis in self.axes:
            if axis not in names:
                order.append(axis)
                grid[axis] = self.shape[axis]
            elif name not in grid:
                order.extend(names)
                grid[name] = self.axis_size(names)
        devices = self.submesh(*order).devices
        return Mesh(grid, devices=devices)

    def split(self, axis: str, **parts: int) -> Mesh:
        """The axis replaced by several whose sizes multiply to its own, major to minor.

        >>> Mesh(dp=2, tp=4).split("tp", a=2, b=2)
        Mesh(dp=2, a=2, b=2)
        """
        (name,) = self.check_axes(axis, "Mesh.split")
        size = self.shape[name]
        if math.prod(parts.values()) != size:
            fail("Mesh.split", f"{name!r} of size {size} into {parts}",
                 f"the parts multiply to {size}, not {math.prod(parts.values())}",
                 f"split({name!r}, a={size}, b=1), say")  # fmt: skip
        self._check_new("Mesh.split", parts, (name,))
        grid: dict[str, int] = {}
        for each, n in self.shape.items():
            grid |= parts if each == name else {each: n}
        return Mesh(grid, devices=self.devices)

    def _check_new(self, where: str, new: Iterable[str], replaced: tuple[str, ...]) -> None:
        """Raise where a new axis has the name of one that stays."""
        raise_if(where, [
            Problem(f"new axis {name!r} on {self}", f"{name!r} is another axis of the mesh",
                    "choose another name")
            for name in new if name in self.axes and name not in replaced
        ])  # fmt: skip

    def _position(self, rank: int) -> int:
        if isinstance(self.devices, range):
            return self.devices.index(rank)
        return _positions(self)[rank]


def _brief(ranks: range | tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"


def _canonical_devices(
    devices: Iterable[int] | None, size: int, grid: Mapping[str, int]
) -> range | tuple[int, ...]:
    """Devices as a `range` where they are one, so that a mesh of a million stays small."""
    if devices is None:
        return range(size)
    first = devices.start if isinstance(devices, range) else -1
    if first >= 0 and devices == range(first, first + size):
        return range(first, first + size)
    try:
        ids = tuple(operator.index(device) for device in devices)
    except TypeError:
        fail("fs.Mesh", f"devices={devices!r}", "devices are rank ids, whole numbers",
             f"give {size} rank ids, row-major")  # fmt: skip
    problems = []
    if len(ids) != size:
        problems.append(Problem(f"{len(ids)} devices for {dict(grid)}",
                                f"the axes multiply to {size} devices",
                                f"give {size} rank ids, row-major"))  # fmt: skip
    if len(set(ids)) != len(ids) or any(device < 0 for device in ids):
        problems.append(Problem(f"devices {_brief(ids)}", "rank ids are distinct and at least 0",
                                "name each rank once"))  # fmt: skip
    raise_if("fs.Mesh", problems)
    if ids and ids == tuple(range(ids[0], ids[0] + size)):
        return range(ids[0], ids[0] + size)
    return ids


def _rebuild_mesh(
    axes: tuple[str, ...], sizes: tuple[int, ...], devices: range | tuple[int, ...]
) -> Mesh:
    return Mesh(dict(zip(axes, sizes, strict=True)), devices=devices)


@lru_cache(maxsize=256)
def _shape(mesh: Mesh) -> Mapping[str, int]:
    return MappingProxyType(dict(zip(mesh.axes, mesh.sizes, strict=True)))


@lru_cache(maxsize=64)
def _ranks(mesh: Mesh) -> range | tuple[int, ...]:
    first, last = min(mesh.devices), max(mesh.devices)
    dense = last - first + 1 == len(mesh.devices)
    return range(first, last + 1) if dense else tuple(sorted(mesh.devices))


@lru_cache(maxsize=64)
def _positions(mesh: Mesh) -> dict[int, int]:
    return {rank: position for position, rank in enumerate(mesh.devices)}


@lru_cache(maxsize=1024)
def _groups(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    others = [axis for axis in mesh.axes if axis not in axes]
    strides = dict(zip(mesh.axes, _strides(mesh.sizes), strict=True))

    def offsets(names: Sequence[str]) -> list[int]:
        points = itertools.product(*(range(mesh.shape[name]) for name in names))
        return [
            sum(strides[name] * c for name, c in zip(names, point, strict=True)) for point in points
        ]

    inner = offsets(axes)
    return tuple(tuple(mesh.devices[base + step] for step in inner) for base in offsets(others))


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]


@lru_cache(maxsize=4096)
def _group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
    mesh.check_axes(axes, "Mesh.group")
    strides = dict(zip(mesh.axes, _strides(mesh.sizes), strict=True))
    coords = mesh.coords(rank)
    base = mesh._position(rank) - sum(strides[axis] * coords[axis] for axis in axes)
    points = itertools.product(*(range(mesh.shape[axis]) for axis in axes))
    return tuple(
        mesh.devices[base + sum(strides[a] * c for a, c in zip(axes, point, strict=True))]
        for point in points
    )
