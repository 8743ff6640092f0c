"""The axis environment: which mesh the axis names of a running `shard_map` belong to.

The one piece of ambient state in the library. It lives exactly as long as the call of the
mapped function, per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fshard.errors import fail
from fshard.mesh import Axes, Mesh, as_axes

__all__ = ["bind_axes", "bound_mesh", "resolve"]

_MESH: ContextVar[Mesh | None] = ContextVar("fshard_axes", default=None)


@contextmanager
def bind_axes(mesh: Mesh) -> Iterator[None]:
    """Bind the axis names of `mesh` for the code in the block."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def bound_mesh() -> Mesh | None:
    """The mesh of the innermost running `shard_map`, or None."""
    return _MESH.get()


def resolve(axes: Axes, mesh: Mesh | None, where: str) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that `axes` are names of, and the axes as a tuple.

    Raises `ShardingError` for an unbound, unknown or repeated axis.
    """
    found = mesh or _MESH.get()
    names = as_axes(axes)
    if found is None:
        fail(
            where,
            f"an unbound axis name: {', '.join(map(repr, names))}",
            "axis names are bound inside shard_map",
            f"call {where} in a function under fs.shard_map, or give mesh=",
        )
    return found, found.check_axes(names, where)
