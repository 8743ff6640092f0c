"""Ranks that hold each shard, as symbols and as sentences, in time independent of the mesh size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from fshard._util.text import listing, plural
from fshard.layout.mesh import Mesh
from fshard.layout.mesh_groups import mesh_points, shard_coords
from fshard.layout.spec import Spec

MAX_HOLDERS = 16

NOUNS = {"sum": "sum", "avg": "average", "max": "maximum", "min": "minimum", "product": "product"}


def members(mesh: Mesh, fixed: Mapping[str, int]) -> Iterator[int]:
    """Yield the ranks at the `fixed` coordinates, the other axes walked row-major."""
    grids = [
        (fixed[axis],) if axis in fixed else range(size)
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True)
    ]
    for point in itertools.product(*grids):
        yield mesh.devices[_position(mesh, point)]


def _position(mesh: Mesh, point: Sequence[int]) -> int:
    position = 0
    for coordinate, size in zip(point, mesh.sizes, strict=True):
        position = position * size + coordinate
    return position


def _last(mesh: Mesh, fixed: Mapping[str, int]) -> int:
    point = [fixed.get(a, n - 1) for a, n in zip(mesh.axes, mesh.sizes, strict=True)]
    return mesh.devices[_position(mesh, point)]


def coords_text(coords: Mapping[str, int]) -> str:
    """Return coordinates as the keyword arguments of `mesh.rank`.

    >>> coords_text({"dp": 1, "tp": 3})
    'dp=1,tp=3'
    """
    return ",".join(coords_texts(coords))


def coords_texts(coords: Mapping[str, int]) -> tuple[str, ...]:
    """Return the coordinates, one text an axis."""
    return tuple(f"{axis}={coordinate}" for axis, coordinate in coords.items())


def holders_text(spec: Spec, shard: Sequence[int], brief: bool = False) -> str:
    """Return the ranks that hold one shard.

    There is a comma between invariant replicas, `&` between reduced ones, and a plus between
    partial sums. `brief` leaves out blanks, and names only the first and the last of many.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(dp=2, tp=2), P(None, unreduced={"tp"}), shape=(4,))
    >>> holders_text(spec, (0,)), holders_text(spec, (0,), brief=True)
    ('0 + 1, 2 + 3', '0+1,2+3')
    """
    mesh, fixed = spec.mesh, shard_coords(spec, shard)
    count = mesh.size // math.prod(mesh.shape[axis] for axis in fixed)
    if count > MAX_HOLDERS or (brief and count > 4):
        first = next(members(mesh, fixed))
        return f"{first}…{_last(mesh, fixed)}" if brief else (
            f"{first} … {_last(mesh, fixed)} ({count:,})")  # fmt: skip
    text = ", ".join(" & ".join(group) for group in replicas(spec, fixed, str))
    return text.replace(" ", "") if brief else text


def equations(spec: Spec, shard: Sequence[int]) -> str:
    """Return one shard of the global tensor in terms of a simulation's locals.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(dp=2, tp=2), P("dp", unreduced={"tp"}), shape=(4,))
    >>> equations(spec, (1,))
    'global[2:4] = local[2] + local[3]'
    """
    mesh, fixed = spec.mesh, shard_coords(spec, shard)
    index = index_text(spec, next(members(mesh, fixed)))
    count = mesh.size // math.prod(mesh.shape[axis] for axis in fixed)
    if count > MAX_HOLDERS:
        return f"global[{index}]: on {plural(count, 'rank')}"
    groups = replicas(spec, fixed, lambda rank: f"local[{mesh.ranks.index(rank)}]")
    return " = ".join([f"global[{index}]", *itertools.chain(*groups)])


def index_text(spec: Spec, rank: int) -> str:
    """Return the slices of a rank's part of the global tensor, in Python syntax."""
    return ", ".join(f"{s.start}:{s.stop}" for s in spec.index(rank)) or "..."


def replicas(spec: Spec, fixed: Mapping[str, int], name: Callable[[int], str]) -> list[list[str]]:
    """Return the expression of one shard for each set of ranks that hold all of it.

    Sets that differ along reduced axes alone are in one list.
    """
    mesh, kinds, p = spec.mesh, spec.partition.unreduced_kinds, spec.partition
    free = [axis for axis in mesh.axes if axis not in fixed and axis not in dict(kinds)]
    reduced = [axis for axis in free if axis in p.reduced]
    invariant = [axis for axis in free if axis not in p.reduced]
    return [
        [_expression(mesh, {**fixed, **outer, **inner}, kinds, name)
         for inner in mesh_points(mesh, reduced)]
        for outer in mesh_points(mesh, invariant)
    ]  # fmt: skip


def _expression(
    mesh: Mesh,
    fixed: Mapping[str, int],
    kinds: Sequence[tuple[str, str]],
    name: Callable[[int], str],
) -> str:
    """Return the value as an expression of the ranks that hold its parts; axes reduce in order."""
    if not kinds:
        return name(next(members(mesh, fixed)))
    kind = kinds[-1][1]
    same = list(itertools.takewhile(lambda item: item[1] == kind, reversed(kinds)))[::-1]
    parts = [
        _expression(mesh, {**fixed, **point}, kinds[: -len(same)], name)
        for point in mesh_points(mesh, [axis for axis, _ in same])
    ]
    if len(parts) == 1:
        return parts[0]
    return " + ".join(parts) if kind == "sum" else f"{kind}({', '.join(parts)})"


def states_in_words(spec: Spec) -> list[str]:
    """Return one sentence for each state that the cells of a picture do not show.

    >>> from fshard.layout.partition_spec import PartitionSpec as P
    >>> spec = Spec(Mesh(dp=2, tp=4), P("tp", unreduced={"dp"}), shape=(8,))
    >>> states_in_words(spec)
    ['unreduced over dp: each value is the sum of 2 ranks, such as 0, 4']
    """
    p = spec.partition
    sentences = []
    for kind in dict.fromkeys(kind for _, kind in p.unreduced_kinds):
        axes = [axis for axis, other in p.unreduced_kinds if other == kind]
        ranks, count = _first_group(spec.mesh, axes)
        noun = NOUNS[kind]
        over = f"unreduced over {', '.join(axes)}"
        if count == 1:
            sentences.append(f"{over}, of one device: there is nothing to reduce")
        elif count == spec.mesh.size:
            sentences.append(f"{over}: the value is the {noun} of ranks {ranks}")
        else:
            sentences.append(f"{over}: each value is the {noun} of {plural(count, 'rank')}, "
                             f"such as {ranks}")  # fmt: skip
    for kind in dict.fromkeys(kind for _, kind in p.reduced_kinds):
        axes = [axis for axis, other in p.reduced_kinds if other == kind]
        what = "the same value" if kind == "sum" else "equal shares of the value"
        ranks = _some_ranks(spec.mesh, axes, " & ")
        sentences.append(f"reduced over {', '.join(axes)}: {ranks} hold {what}, each for its own "
                         "work; the gradient is unreduced")  # fmt: skip
    named = set(p.axes)
    free = [axis for axis in spec.mesh.axes if axis not in named and spec.mesh.shape[axis] > 1]
    if free:
        sentences.append(f"invariant over {', '.join(free)}: "
                         f"{_some_ranks(spec.mesh, free)} hold the same")  # fmt: skip
    return sentences


def _some_ranks(mesh: Mesh, axes: Sequence[str], between: str = ", ") -> str:
    ranks, count = _first_group(mesh, axes)
    ranks = ranks.replace(", ", between)
    return f"ranks {ranks}" if count == mesh.size else f"ranks such as {ranks}"


def _first_group(mesh: Mesh, axes: Sequence[str]) -> tuple[str, int]:
    """Return the ranks that differ from the first only along `axes`, as text, and their number."""
    fixed = {axis: 0 for axis in mesh.axes if axis not in axes}
    count = math.prod(mesh.shape[axis] for axis in axes)
    return listing(members(mesh, fixed), count, _last(mesh, fixed)), count
