"""`Mesh`: devices in a grid with named axes, as a value that needs no processes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from fshard._torch.dynamo import graph_constant
from fshard._util.errors import Problem, did_you_mean, fail, raise_if
from fshard._util.hooks import Hook
from fshard._util.notebook_view import NotebookView
from fshard.layout.axis_sizes import AxisSizes
from fshard.layout.mesh_groups import mesh_groups, rank_group, rank_positions, sorted_ranks

Axes = str | Sequence[str]
"""One axis name or several, major to minor."""


def as_axes(axes: Axes, where: str = "axes") -> tuple[str, ...]:
    """Return one axis name or several as a tuple.

    Raises `ShardingError` for anything but a name or a tuple or list of names.
    """
    if isinstance(axes, str):
        return (axes,)
    if isinstance(axes, tuple | list) and all(isinstance(name, str) for name in axes):
        return tuple(axes)
    if isinstance(axes, Set) and axes:
        # A set of strings has another order in every process.
        names = sorted(map(str, axes))
        fail(where, f"the set {{{', '.join(map(repr, names))}}} as axes",
             "axes must be a name or a tuple or list of names, major to minor",
             f"{repr(tuple(names)) if names[1:] else repr(names[0])}, say")  # fmt: skip
    fail(where, f"{axes!r} as axes", "axes must be a name or a tuple or list of names",
         "'x' or ('x', 'y'), with names of the mesh's axes")  # fmt: skip


@graph_constant
@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False, weakref_slot=True)
class Mesh(NotebookView):
    """Devices in a row-major grid with named axes; immutable and hashable.

    `Mesh(dp=2, tp=4)` and `Mesh({"dp": 2, "tp": 4})` are equal. After `jax.sharding.Mesh`, but
    without processes or device objects.

    Args:
        shape: axis sizes by name, major to minor; more axes may follow as keywords.
        devices: rank ids in row-major order, by default `0..n-1`.

    Raises:
        ShardingError: a size is under 1, or `devices` are repeated, negative or not as many as the
            product of the sizes.

    >>> import fshard as fs
    >>> mesh = fs.Mesh(dp=2, tp=4)
    >>> mesh.size, mesh.axes, mesh.shape["tp"]
    (8, ('dp', 'tp'), 4)
    >>> mesh.coords(6), mesh.rank(dp=1, tp=2)
    ({'dp': 1, 'tp': 2}, 6)
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
            fail("fs.Mesh", f"a shape of {shape!r}", "a shape must map axis names to sizes",
                 "Mesh(dp=2, tp=4) or Mesh({'dp': 2, 'tp': 4})")  # fmt: skip
        grid = {**(shape or {}), **axes}
        problems = [
            Problem(f"axis {name!r} of size {size!r}",
                    "the size of an axis must be an int of at least 1",
                    f"Mesh({name}=1) or leave the axis out")
            for name, size in grid.items()
            if not isinstance(size, int) or isinstance(size, bool) or size < 1
        ]  # fmt: skip
        problems += [
            Problem(
                f"axis name {name!r}", "an axis name must be a Python identifier", "rename the axis"
            )
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
        # Hashes of strings differ between processes, so a pickle calls the constructor.
        return rebuild_mesh, (self.axes, self.sizes, self.devices)

    def __repr__(self) -> str:
        grid = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.sizes, strict=True))
        if self.devices == range(self.size):
            return f"Mesh({grid})"
        shown = self.devices if isinstance(self.devices, range) else list(self.devices)
        return f"Mesh({grid}{', ' if grid else ''}devices={shown})"

    # -- attributes -------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def shape(self) -> Mapping[str, int]:
        """Axis sizes by name, in order; read-only."""
        return _shape(self)

    @property
    def ranks(self) -> range | tuple[int, ...]:
        """Rank ids in increasing order, the order of the shards in a simulation."""
        return self.devices if isinstance(self.devices, range) else sorted_ranks(self)

    def __contains__(self, rank: object) -> bool:
        return rank in (self.devices if isinstance(self.devices, range) else rank_positions(self))

    def axis_size(self, axes: Axes) -> int:
        """Return the number of devices along `axes`, the product of their sizes.

        Raises `ShardingError` for unknown or repeated axes.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=4).axis_size(("dp", "tp"))
        8
        """
        return math.prod(map(_shape(self).__getitem__, self.check_axes(axes, "Mesh.axis_size")))

    def check_axes(self, axes: Axes, where: str) -> tuple[str, ...]:
        """Return `axes` as a tuple.

        Args:
            axes: one axis name or several.
            where: first line of the error, such as `"fs.psum"`.

        Raises:
            ShardingError: an axis is unknown or repeated.
        """
        names = as_axes(axes, where)
        if len(set(names)) == len(names) and all(name in self.axes for name in names):
            return names
        problems = [
            Problem(f"axis {name!r} on {self}", f"an axis must be one of {', '.join(self.axes)}",
                    did_you_mean(str(name), self.axes, f"use one of {', '.join(self.axes)}"))
            for name in dict.fromkeys(names) if name not in self.axes
        ]  # fmt: skip
        problems += [
            Problem(f"axis {name!r} {names.count(name)} times in {names}",
                    "an axis must be named at most once", f"name {name!r} once")
            for name in dict.fromkeys(names) if names.count(name) > 1
        ]  # fmt: skip
        raise_if(where, problems)
        raise AssertionError("unreachable")

    def check_rank(self, rank: int, where: str) -> int:
        """Return `rank`.

        Args:
            rank: a rank id.
            where: first line of the error, such as `"fs.scatter"`.

        Raises:
            ShardingError: the mesh does not have the rank.
        """
        if rank not in self:
            fail(where, f"rank {rank!r} on {self}", f"a rank must be one of {_brief(self.ranks)}",
                 "check `rank in mesh` first")  # fmt: skip
        return rank

    # -- ranks and coordinates --------------------------------------------------------

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank, one per axis in mesh order.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=4).coordinate(6)
        (1, 2)
        """
        position = self._position(self.check_rank(rank, "Mesh.coordinate"))
        coordinate = []
        for size in reversed(self.sizes):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank by axis name.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=4).coords(6)
        {'dp': 1, 'tp': 2}
        """
        coordinate = self.coordinate(self.check_rank(rank, "Mesh.coords"))
        return dict(zip(self.axes, coordinate, strict=True))

    def index(self, rank: int, axes: Axes) -> int:
        """Return the linear index of a rank along some axes.

        Args:
            rank: a rank id of the mesh.
            axes: axis names, major to minor.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=4).index(6, ("tp", "dp"))
        5
        """
        coordinate = self.coordinate(self.check_rank(rank, "Mesh.index"))
        index = 0
        for axis in self.check_axes(axes, "Mesh.index"):
            dim = self.axes.index(axis)
            index = index * self.sizes[dim] + coordinate[dim]
        return index

    def rank(self, **coords: int) -> int:
        """Return the rank at the given coordinates, one for every axis.

        Raises `ShardingError` for a coordinate that is missing or out of range.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=4).rank(dp=1, tp=2)
        6
        """
        problems = [
            Problem(f"coordinate {axis}={coords.get(axis)!r}",
                    f"a coordinate of axis {axis!r} must be in 0..{size - 1}",
                    f"pass {axis}=0, say")
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
        """Return the groups of ranks that communicate along `axes`.

        Args:
            axes: axis names; ranks in a group are ordered by them, major to minor.

        Returns:
            One tuple of ranks per combination of the other axes' coordinates.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=2).groups("dp")
        ((0, 2), (1, 3))
        """
        return mesh_groups(self, self.check_axes(axes, "Mesh.groups"))

    def group(self, rank: int, axes: Axes) -> tuple[int, ...]:
        """Return the group of `groups(axes)` that contains a rank.

        Args:
            rank: a rank id of the mesh.
            axes: axis names, major to minor.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=2).group(3, "dp")
        (1, 3)
        """
        return rank_group(self, self.check_rank(rank, "Mesh.group"), as_axes(axes))

    # -- derived meshes -----------------------------------------------------------------

    def submesh(self, *axes: str, **coords: int) -> Mesh:
        """Return the mesh of some axes, all others fixed at one coordinate.

        Args:
            axes: the axes of the new mesh, in its order.
            coords: coordinates of the other axes, 0 by default.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=4).submesh("tp", dp=1)
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
        """Return the mesh with one axis `name` in place of `axes`.

        Args:
            axes: the axes to merge, major to minor.
            name: the new axis; it takes the position of the first of them.

        Raises:
            ShardingError: `axes` is empty, or another axis has the name.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=2).flatten(("tp", "dp"), "all").devices
        (0, 2, 1, 3)
        """
        names = self.check_axes(axes, "Mesh.flatten")
        if not names:
            fail("Mesh.flatten", f"no axes into {name!r}", "axes must be at least one",
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
        """Return the mesh with one axis replaced by several, major to minor.

        Args:
            axis: the axis to replace.
            parts: names and sizes of the new axes.

        Raises:
            ShardingError: the sizes do not multiply to that of `axis`, or a name is taken.

        >>> import fshard as fs
        >>> fs.Mesh(dp=2, tp=4).split("tp", a=2, b=2)
        Mesh(dp=2, a=2, b=2)
        """
        (name,) = self.check_axes(axis, "Mesh.split")
        size = self.shape[name]
        if math.prod(parts.values()) != size:
            fail("Mesh.split", f"{name!r} of size {size} into {parts}",
                 f"the sizes must multiply to {size}, not {math.prod(parts.values())}",
                 f"split({name!r}, a={size}, b=1), say")  # fmt: skip
        self._check_new("Mesh.split", parts, (name,))
        grid: dict[str, int] = {}
        for existing, n in self.shape.items():
            grid |= parts if existing == name else {existing: n}
        return Mesh(grid, devices=self.devices)

    # -- DeviceMesh -----------------------------------------------------------------------

    @staticmethod
    def from_device_mesh(device_mesh: Any, /) -> Mesh:
        """Return the mesh of a `torch.distributed.DeviceMesh`.

        Functions that take a mesh also take a `DeviceMesh`, and convert it so. After `fs.init`,
        collectives along one axis of it use its process groups.

        Args:
            device_mesh: the `DeviceMesh`. Dims without names become axes `dim_0`, `dim_1`, ...

        Raises:
            ShardingError: the argument is not a `DeviceMesh`.

        >>> import fshard as fs
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> ranks = [[0, 1], [2, 3]]
        >>> fs.Mesh.from_device_mesh(DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"),
        ...                                     _init_backend=False, _rank=0))
        Mesh(dp=2, tp=2)
        """
        return from_device_mesh_hook.call(device_mesh)

    def to_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the `torch.distributed.DeviceMesh` of these ranks, with fshard's process groups.

        Every rank of the mesh must call it, after `fs.init`.

        Args:
            device_type: type of the devices, "cpu" or "cuda"; by default that of `fs.init`.

        Raises:
            ShardingError: this process is not a rank under `torchrun`.

        >>> import fshard as fs
        >>> def main():  # torchrun --nproc-per-node 4 script.py
        ...     mesh = fs.Mesh(dp=2, tp=2)
        ...     fs.init(mesh)
        ...     device_mesh = mesh.to_device_mesh()
        """
        return to_device_mesh_hook.call(self, device_type)

    def _check_new(self, where: str, new: Iterable[str], replaced: tuple[str, ...]) -> None:
        """Raise `ShardingError` if a new axis has the name of one that is not replaced."""
        raise_if(where, [
            Problem(f"new axis {name!r} on {self}", "the axes of a mesh must have distinct names",
                    "choose another name")
            for name in new if name in self.axes and name not in replaced
        ])  # fmt: skip

    def _position(self, rank: int) -> int:
        if isinstance(self.devices, range):
            return self.devices.index(rank)
        return rank_positions(self)[rank]


def _brief(ranks: range | tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"{ranks[0]}..{ranks[-1]} ({len(ranks)})"


def _canonical_devices(
    devices: Iterable[int] | None, size: int, grid: Mapping[str, int]
) -> range | tuple[int, ...]:
    """Return devices as a `range` where possible, so that a mesh of a million stays small."""
    if devices is None:
        return range(size)
    first = devices.start if isinstance(devices, range) else -1
    if first >= 0 and devices == range(first, first + size):
        return range(first, first + size)
    try:
        ids = tuple(operator.index(device) for device in devices)
    except TypeError:
        fail("fs.Mesh", f"devices={devices!r}", "devices must be rank ids, ints",
             f"pass {size} rank ids, row-major")  # fmt: skip
    problems = []
    if len(ids) != size:
        problems.append(Problem(f"{len(ids)} devices for {dict(grid)}",
                                f"the number of devices must be {size}, the product of the axes",
                                f"pass {size} rank ids, row-major"))  # fmt: skip
    if len(set(ids)) != len(ids) or any(device < 0 for device in ids):
        problems.append(Problem(f"devices {_brief(ids)}",
                                "rank ids must be distinct and at least 0",
                                "name each rank once"))  # fmt: skip
    raise_if("fs.Mesh", problems)
    if ids and ids == tuple(range(ids[0], ids[0] + size)):
        return range(ids[0], ids[0] + size)
    return ids


def rebuild_mesh(*parts: Any) -> Mesh:
    """Return the mesh of the parts of a pickle."""
    axes, sizes, devices = parts
    return Mesh(dict(zip(axes, sizes, strict=True)), devices=devices)


@lru_cache(maxsize=256)
def _shape(mesh: Mesh) -> Mapping[str, int]:
    return MappingProxyType(AxisSizes(zip(mesh.axes, mesh.sizes, strict=True)))


def as_mesh(mesh: object, where: str) -> Mesh:
    """Return a mesh, or that of a `DeviceMesh`; raise `ShardingError` for anything else."""
    if isinstance(own := read_device_mesh(mesh), Mesh):
        return own
    fail(where, f"a mesh of type {type(mesh).__name__}", "a mesh must be a fs.Mesh",
         "fs.Mesh(dp=2, tp=4)")  # fmt: skip


def read_device_mesh(value: Any) -> Any:
    """Return the mesh of a `DeviceMesh`; other values as they are."""
    return Mesh.from_device_mesh(value) if hasattr(type(value), "mesh_dim_names") else value


@Hook
def from_device_mesh_hook(device_mesh: Any) -> Mesh:
    """`Mesh.from_device_mesh`; set by `interop/dtensor.py`."""
    raise NotImplementedError


@Hook
def to_device_mesh_hook(mesh: Mesh, device_type: str | None) -> Any:
    """`Mesh.to_device_mesh`; set by `interop/dtensor.py`."""
    raise NotImplementedError
