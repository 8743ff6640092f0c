"""The axis environment: which mesh the axis names of a running `shard_map` belong to.

The one piece of ambient state in the library. It lives exactly as long as the call of the
mapped function, per rank; what was register_pending in it, or by a simulated rank outside of one, has to
be waited for in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, NoReturn

import torch

from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Axes, Mesh, as_axes
from fshard.run.execute import Pending
from fshard.run.transports.base import is_simulated
from fshard.run.transports.simulator import run_rank_code_hook

__all__ = [
    "COMPILE_MESH",
    "BoundAxes",
    "bind_for_backward",
    "current_axes",
    "current_tracker",
    "register_pending",
    "resolve_axes",
]  # fmt: skip


class BoundAxes:
    """The axis names of one call, of one mesh, bound for the code of a `with` block.

    Raises `ShardingError` at the end of the block for what was register_pending in it and never
    waited for.
    """

    __slots__ = ("around", "axes", "before", "mesh", "outer", "pendings", "task", "token", "types")

    def __init__(self, mesh: Mesh, axes: frozenset[str], types: Any = None) -> None:
        self.mesh, self.axes = mesh, axes
        # What tracks the types of the call's tensors, if anything does.
        self.types = types
        self.pendings: list[Pending] = []
        # Of a backward pass that these names are bound for again: its id, and what was bound.
        self.task: int | None = None
        self.outer: BoundAxes | None = None
        # And which were bound around the call whose backward it is.
        self.around: frozenset[str] = frozenset()

    def __enter__(self) -> BoundAxes:
        self.token: Token[BoundAxes | None] = _BOUND.set(self)
        if not is_simulated():
            self.before, COMPILE_MESH[0] = COMPILE_MESH[0], self.mesh
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _BOUND.reset(self.token)
        if not is_simulated():
            COMPILE_MESH[0] = self.before
        _give_up(self.pendings, None if kind else "a mapped function")


def _give_up(pendings: Sequence[Pending], who: str | None) -> None:
    """Abandon what was never waited for; raise for it where it is known who register_pending it."""
    lost = [each for each in pendings if not each.waited]
    for each in pendings:
        each.abandon()
    if lost and who is not None:
        names = [f"{each.name} at {each.line}" if each.line else each.name for each in lost]
        fail(
            lost[0].name,
            f"{len(names)} pending {'result' if len(names) == 1 else 'results'} never waited "
            f"for: {', '.join(names)}",
            f"what {who} starts it waits for, once, before it returns",
            "pending.wait()",
        )


_STARTED: ContextVar[list[Pending] | None] = ContextVar("fshard_started", default=None)
"""What a simulated rank has register_pending outside of mapped functions."""


@run_rank_code_hook.set
def run_rank_code(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`fn(*args)` as a simulated rank, which waits for what it starts."""
    pendings: list[Pending] = []
    token, who = _STARTED.set(pendings), None
    try:
        result = fn(*args)
        who = "a simulated rank"
    finally:
        _STARTED.reset(token)
        _give_up(pendings, who)
    return result


_BOUND: ContextVar[BoundAxes | None] = ContextVar("fshard_axes", default=None)

COMPILE_MESH: list[Mesh | None] = [None]
"""The mesh bound in this process as a rank, where `torch.compile` sees that it is another one."""


def current_axes() -> BoundAxes | None:
    """What the current_axes running `shard_map` has bound, or None."""
    bound = _BOUND.get()
    while bound is not None and bound.task is not None:
        if bound.task == torch._C._current_graph_task_id():
            return bound
        bound = bound.outer  # of a backward pass that is over
    return bound


def bind_for_backward(
    ys: Sequence[torch.Tensor], mesh: Mesh, axes: frozenset[str], around: frozenset[str]
) -> None:
    """Bind the names again for the backward pass of `ys`: what it recomputes, calls collectives.

    `torch.utils.checkpoint` runs parts of a mapped function when the call is long over. The
    engine takes nodes in the reverse order of their making, so that from here down to the
    inputs it is in this call, or in one that it was made in.
    """

    def bind(_: object) -> None:
        again = BoundAxes(mesh, axes)
        again.around = around
        again.outer, again.task = current_axes(), torch._C._current_graph_task_id()
        while again.outer is not None and again.outer.task == again.task:
            again.outer = again.outer.outer
        _BOUND.set(again)

    for node in {y.grad_fn for y in ys if y.grad_fn is not None}:
        node.register_prehook(bind)


def register_pending(pending: Pending) -> Pending:
    """`pending`, which the running mapped function or simulated rank has to wait for."""
    bound = current_axes()
    pendings = _STARTED.get() if bound is None else bound.pendings
    if pendings is not None:
        pendings.append(pending)
    return pending


def current_tracker() -> Any:
    """What tracks the types of the running body's tensors, or None."""
    bound = current_axes()
    types = None if bound is None else bound.types
    return None if types is None or types.paused else types


def resolve_axes(axes: Axes, mesh: Mesh | None, where: str) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh that `axes` are names of, and the axes as a tuple.

    Raises `ShardingError` for an unbound, unknown or repeated axis, and for sets of names.
    """
    names = as_axes(axes, where)
    bound = current_axes() if mesh is None else None
    found = mesh if bound is None else bound.mesh
    if found is None:
        fail(
            where,
            f"an unbound axis name: {', '.join(map(repr, names))}" if names else "no axis, no mesh",
            "axis names are bound inside shard_map",
            f"call {where} in a function under fs.shard_map, or give mesh=",
        )
    names = found.check_axes(names, where)
    if bound is not None and not bound.axes.issuperset(names):
        _not_mapped(names, bound, where)
    return found, names


def _not_mapped(names: tuple[str, ...], bound: BoundAxes, where: str) -> NoReturn:
    """Raise for axes of the mesh that the running `shard_map` leaves alone."""
    mapped = [axis for axis in bound.mesh.axes if axis in bound.axes]
    raise_if(
        where,
        [
            Problem(
                f"an unbound axis name: {axis!r} of {bound.mesh}",
                f"the axes that the running shard_map maps are {', '.join(mapped)}",
                f"name it in axis_names=, or map over it in the body: "
                f"fs.shard_map(..., axis_names={{{axis!r}}})",
            )
            for axis in names
            if axis not in bound.axes
        ],
    )
    raise AssertionError("unreachable")
