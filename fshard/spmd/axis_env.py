"""Axis environment: the mesh to which the axis names of a running `shard_map` belong.

It is the one piece of ambient state in the library, and lives exactly as long as a call of the
mapped function, per rank. A collective that is started within the call, or by a simulated rank
outside of one, must be waited for within it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any, NoReturn

import torch

from fshard._torch.autograd_state import at_end_of_backward, current_node, graph_task_id
from fshard._util.errors import Problem, fail, raise_if
from fshard.layout.mesh import Axes, Mesh, as_axes, as_mesh
from fshard.run.execute import Pending, current_tracker_hook
from fshard.run.transports.base import is_simulated
from fshard.run.transports.simulator import run_rank_code_hook


class BoundAxes:
    """Axis names of one mesh, bound for the code of a `with` block.

    Raises `ShardingError` at the end of the block for collectives that were started in it and
    never waited for.

    Attributes:
        uneven: the axes along which shards of an argument have different sizes.
        tracker: the `Tracker` of the types of the call's tensors, if any.
        backward_task: id of the backward pass for which the names are bound again, if any.
        is_over: True once that backward pass has ended.
        outer: the binding that the backward pass was started in.
        outer_axes: the axes bound around the forward call whose backward pass it is.
    """

    __slots__ = (
        "axes", "backward_task", "is_over", "mesh", "outer", "outer_axes", "pendings",
        "previous_axes", "token", "tracker", "uneven",
    )  # fmt: skip

    def __init__(
        self, mesh: Mesh, axes: frozenset[str], uneven: frozenset[str] = frozenset()
    ) -> None:
        self.mesh, self.axes, self.uneven = mesh, axes, uneven
        self.tracker: Any = None
        self.pendings: list[Pending] = []
        self.backward_task: int | None = None
        self.is_over = False
        self.outer: BoundAxes | None = None
        self.outer_axes: frozenset[str] = frozenset()

    def end_backward(self) -> None:
        """Unbind the names: the backward pass has ended."""
        self.is_over = True

    def __enter__(self) -> BoundAxes:
        self.token: Token[BoundAxes | None] = _BOUND.set(self)
        if not is_simulated():
            self.previous_axes = GRAPH_AXES[0]
            GRAPH_AXES[0] = self.mesh, self.axes
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _BOUND.reset(self.token)
        if not is_simulated():
            GRAPH_AXES[0] = self.previous_axes
        if self.pendings:
            _abandon(self.pendings, None if kind else "a mapped function")


def _abandon(pendings: Sequence[Pending], owner: str | None) -> None:
    """Abandon pending results; raise for those never waited for, if `owner` is their code."""
    lost = [pending for pending in pendings if not pending.waited]
    for pending in pendings:
        pending.abandon()
    if lost and owner is not None:
        names = [f"{p.name} at {p.line}" if p.line else p.name for p in lost]
        fail(lost[0].name,
             f"{len(names)} pending {'result' if len(names) == 1 else 'results'} never waited "
             f"for: {', '.join(names)}",
             f"a collective that {owner} starts must be waited for, once, before it returns",
             "pending.wait()")  # fmt: skip


_RANK_PENDINGS: ContextVar[list[Pending] | None] = ContextVar("fshard_started", default=None)
"""Collectives that a simulated rank has started outside of mapped functions."""


@run_rank_code_hook.set
def run_rank_code(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return `fn(*args)` of a simulated rank; raise for collectives that it never waited for."""
    pendings: list[Pending] = []
    token, owner = _RANK_PENDINGS.set(pendings), None
    try:
        result = fn(*args)
        owner = "a simulated rank"
    finally:
        _RANK_PENDINGS.reset(token)
        _abandon(pendings, owner)
    return result


_BOUND: ContextVar[BoundAxes | None] = ContextVar("fshard_axes", default=None)

GRAPH_AXES: list[tuple[Mesh, frozenset[str]] | None] = [None]
"""Mesh and axes bound in this process as a rank, in a place where `torch.compile` guards on it."""


_AXES = "fshard_axes"
"""Key, in the metadata of a node of autograd, of the axes that its backward has used."""


def current_axes() -> BoundAxes | None:
    """Return the axes that the innermost running `shard_map` has bound, or None.

    A second backward pass, which may enter a call at any node, finds those of the first one there.
    """
    bound = _BOUND.get()
    if bound is not None and bound.backward_task is None:
        return bound
    node = current_node() if graph_task_id() != -1 else None
    if node is None:
        return _bound_axes()
    known: BoundAxes | None = node.metadata.get(_AXES)
    if known is None and (known := _bound_axes()) is not None:
        node.metadata[_AXES] = known
    return known


def _bound_axes() -> BoundAxes | None:
    """Return the axes that are bound last; those of a backward pass only until it is over.

    A backward pass may run others in it, whose ids are larger: reentrant checkpoints do.
    """
    bound = _BOUND.get()
    while bound is not None and bound.backward_task is not None:
        task = graph_task_id()
        bound.is_over |= task == -1  # none runs in this thread: that pass has ended, or failed
        if not bound.is_over and bound.backward_task <= task:
            return bound
        bound = bound.outer  # its backward pass is over, or failed
    return bound


def bind_for_backward(
    ys: Sequence[torch.Tensor], mesh: Mesh, axes: frozenset[str], outer_axes: frozenset[str],
    uneven: frozenset[str],
) -> None:  # fmt: skip
    """Bind axes again for the backward pass of `ys`, which may recompute parts of the function.

    `torch.utils.checkpoint` does so long after the call is over. Autograd runs nodes in the
    reverse order of their creation, so that after the nodes of `ys` all others down to the inputs
    belong to this call, or to one that it was made in.
    """

    def bind(_: object) -> None:
        again = BoundAxes(mesh, axes, uneven)
        again.outer_axes = outer_axes
        again.outer, again.backward_task = _bound_axes(), graph_task_id()
        while again.outer is not None and again.outer.backward_task == again.backward_task:
            again.outer = again.outer.outer
        at_end_of_backward(again.end_backward)
        _BOUND.set(again)
        node = current_node()  # None in compiled autograd
        if node is not None:
            node.metadata[_AXES] = again

    for node in {y.grad_fn for y in ys if y.grad_fn is not None}:
        node.register_prehook(bind)


def register_pending(pending: Pending) -> Pending:
    """Return `pending`; the running mapped function or simulated rank must wait for it."""
    bound = current_axes()
    pendings = _RANK_PENDINGS.get() if bound is None else bound.pendings
    if pendings is not None:
        pendings.append(pending)
    return pending


@current_tracker_hook.set
def current_tracker() -> Any:
    """Return the `Tracker` of the running body's types, or None if there is none or it pauses."""
    bound = current_axes()
    tracker = None if bound is None else bound.tracker
    return None if tracker is None or tracker.paused else tracker


def resolve_axes(axes: Axes, mesh: Mesh | None, where: str) -> tuple[Mesh, tuple[str, ...]]:
    """Return the mesh of `axes` (`mesh`, or the one that is bound) and the axes as a tuple.

    Raises `ShardingError` for an unbound, unknown or repeated axis, and for sets of names.
    """
    names = as_axes(axes, where)
    bound = current_axes() if mesh is None else None
    owner = mesh if bound is None else bound.mesh
    if owner is None:
        fail(
            where,
            f"an unbound axis name: {', '.join(map(repr, names))}" if names else "no axis, no mesh",
            "axis names are bound inside shard_map",
            f"call {where} in a function under fs.shard_map, or give mesh=",
        )
    owner = as_mesh(owner, where)
    names = owner.check_axes(names, where)
    if bound is not None and not bound.axes.issuperset(names):
        _refuse_unmapped(names, bound, where)
    return owner, names


def _refuse_unmapped(names: tuple[str, ...], bound: BoundAxes, where: str) -> NoReturn:
    """Raise for axes of the mesh that the running `shard_map` does not map."""
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
