"""The axis environment: which mesh the axis names of a running `shard_map` belong to.

The one piece of ambient state in the library. It lives exactly as long as the call of the
mapped function, per rank; what was started in it has to be waited for in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from fshard.errors import fail
from fshard.mesh import Axes, Mesh, as_axes
from fshard.run.execute import Pending

__all__ = ["bind_axes", "bound_mesh", "resolve", "started"]


@dataclass(frozen=True, slots=True)
class _Bound:
    """The mesh of one call, and what the call has started."""

    mesh: Mesh
    pendings: list[Pending] = field(default_factory=list)


_BOUND: ContextVar[_Bound | None] = ContextVar("fshard_axes", default=None)


@contextmanager
def bind_axes(mesh: Mesh) -> Iterator[None]:
    """Bind the axis names of `mesh` for the code in the block.

    Raises `ShardingError` at its end for what was started in it and never waited for.
    """
    bound = _Bound(mesh)
    token = _BOUND.set(bound)
    try:
        yield
        names = [each.name for each in bound.pendings if not each.waited]
        if names:
            fail(
                names[0],
                f"{len(names)} pending {'result' if len(names) == 1 else 'results'} never waited "
                f"for: {', '.join(names)}",
                "what a mapped function starts it waits for, once, before it returns",
                "pending.wait()",
            )
    finally:
        _BOUND.reset(token)
        for each in bound.pendings:
            each.abandon()


def started(pending: Pending) -> Pending:
    """`pending`, which the running mapped function has to wait for, if there is one."""
    bound = _BOUND.get()
    if bound is not None:
        bound.pendings.append(pending)
    return pending


def bound_mesh() -> Mesh | None:
    """The mesh of the innermost running `shard_map`, or None."""
    bound = _BOUND.get()
    return None if bound is None else bound.mesh


def resolve(axes: Axes, mesh: Mesh | None, where: str) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that `axes` are names of, and the axes as a tuple.

    Raises `ShardingError` for an unbound, unknown or repeated axis.
    """
    found = mesh or bound_mesh()
    names = as_axes(axes)
    if found is None:
        fail(
            where,
            f"an unbound axis name: {', '.join(map(repr, names))}",
            "axis names are bound inside shard_map",
            f"call {where} in a function under fs.shard_map, or give mesh=",
        )
    if not names:
        fail(
            where,
            "no axis",
            "a collective runs over at least one axis",
            "name an axis, or leave the call out: over no axis it is the identity",
        )
    return found, found.check_axes(names, where)
