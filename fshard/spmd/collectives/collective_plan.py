"""How a collective goes over a pytree: every tensor one move, all alike in one launch.

A collective is written once, as a plan for one leaf. From it follow the call on a tree, one
launch per dtype forward and backward, and what `fs.start` launches ahead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from fshard._torch.functorch import is_transformed
from fshard._util.errors import fail
from fshard.layout.tree import flatten, unflatten
from fshard.plan.batch.coalesce import launch_keys
from fshard.program.program import Program
from fshard.run.autograd.linear_function import (
    FinishAll,
    Linear,
    Run,
    apply_linear,
    apply_run,
    start_linear,
)
from fshard.run.capture import MOST, Function, Launcher, Launchers, plain_key, record, replay
from fshard.run.transports.base import (
    Label,
    Transport,
    direct_transport,
    label_of,
    labelled,
    under,
    unobserved,
)
from fshard.run.transports.divergence_report import call_line
from fshard.run.transports.shape_only import Shapes, standing_in
from fshard.spmd.axis_env import BoundAxes, current_axes, current_tracker
from fshard.spmd.collectives.compile_node import tree_node
from fshard.spmd.types import TypeSignature

__all__ = [
    "COLLECTIVE_PLANS", "CollectivePlan", "Transfer", "check_dim", "collective",
    "launch_collective", "require_number", "require_tensor",
]  # fmt: skip

Tree = TypeVar("Tree")
Options = ParamSpec("Options")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor's part in a collective: what is sent, by what, and how the result is read."""

    op: Program | Linear
    x: torch.Tensor
    read: Callable[[torch.Tensor], torch.Tensor] = lambda y: y

    @property
    def kind(self) -> Hashable:
        """What is equal for the moves that go in one launch."""
        kind = launch_keys(self.op) if isinstance(self.op, Program) else self.op
        return kind, self.x.dtype, self.x.device


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """What a collective does with every leaf of a tree: a `Transfer`, or the result at once.

    `signature` says which types of leaves it takes, and what it makes of them.
    """

    name: str
    leaf: Callable[[Any], Any]
    signature: TypeSignature


COLLECTIVE_PLANS: dict[Any, Callable[..., CollectivePlan]] = {}
"""The plan behind every collective that is one."""


def collective(
    plan: Callable[Options, CollectivePlan],
) -> Callable[Concatenate[Tree, Options], Tree]:
    """The collective of a plan: a tree in front of the plan's own arguments; `None` stays."""

    def general(x: Tree, /, *args: Options.args, **kwargs: Options.kwargs) -> Tree:
        return launch_collective(
            _planned(_key(plan, args, kwargs, current_axes()), plan, args, kwargs), x
        )()

    general.__name__ = plan.__name__
    node = tree_node(general)

    @functools.wraps(plan)
    def run(x: Tree, /, *args: Options.args, **kwargs: Options.kwargs) -> Tree:
        if torch.compiler.is_compiling():
            return node(x, *args, **kwargs)
        value: Any = x
        if type(value) is torch.Tensor or type(value) is torch.nn.Parameter:
            launcher = _launcher(plan, value, args, kwargs)
            if launcher is not None:
                wanted = value.requires_grad and torch.is_grad_enabled()
                done: Any = replay(launcher, value) if wanted else launcher.run(value)
                return done  # type: ignore[no-any-return]
        return general(x, *args, **kwargs)

    tree = inspect.Parameter("x", inspect.Parameter.POSITIONAL_ONLY, annotation="Tree")
    rest = inspect.signature(plan).parameters.values()
    first = [
        p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.POSITIONAL_ONLY else p for p in rest
    ]
    run.__signature__ = inspect.Signature([tree, *first], return_annotation="Tree")  # type: ignore[attr-defined]
    COLLECTIVE_PLANS[run] = plan
    return run


_PLANNED: dict[Hashable, CollectivePlan] = {}


def _key(
    plan: Callable[..., CollectivePlan],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: BoundAxes | None,
) -> Hashable | None:
    """What a plan depends on; None for arguments that a key cannot hold."""
    arguments = plain_key(args, kwargs)
    if arguments is None:
        return None
    return (plan, arguments) if bound is None else (plan, arguments, bound.mesh, bound.axes)


def _planned(
    key: Hashable,
    plan: Callable[..., CollectivePlan],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CollectivePlan:
    """The plan of a collective with its arguments, where the names are bound that are now."""
    if key is None:
        return plan(*args, **kwargs)
    found = _PLANNED.get(key)
    if found is None:
        if len(_PLANNED) >= MOST:
            _PLANNED.clear()
        # The caller's lists may change.
        kept = {name: _copied(value) for name, value in kwargs.items()}
        found = _PLANNED[key] = plan(*map(_copied, args), **kept)
    return found


def _copied(value: Any) -> Any:
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def launch_collective(plan: CollectivePlan, x: Tree, *, ahead: bool = False) -> Callable[[], Tree]:
    """Launch a collective on a tree; the call that finishes it, differentiably.

    With `ahead` everything that is sent is launched now; raises `ShardingError` for what
    cannot be, a maximum or minimum with a gradient.
    """
    tracker = current_tracker()
    return _begin(plan, x, ahead) if tracker is None else tracker.begin(plan, x, ahead, _begin)


def _begin(plan: CollectivePlan, x: Tree, ahead: bool) -> Callable[[], Tree]:
    if isinstance(x, torch.Tensor):
        move = plan.leaf(x)
        if not isinstance(move, Transfer):
            return lambda: move
        launched = _launch(plan.name, (move,), ahead)
        return lambda: move.read(launched()[0])
    leaves, treedef = flatten(x)
    results: list[Any] = [None if leaf is None else plan.leaf(leaf) for leaf in leaves]
    kinds: dict[Hashable, list[int]] = {}
    for place, move in enumerate(results):
        if isinstance(move, Transfer):
            kinds.setdefault(move.kind, []).append(place)
    launches = [
        (places, _launch(plan.name, [results[place] for place in places], ahead))
        for places in kinds.values()
    ]

    def finish() -> Tree:
        for places, each in launches:
            for place, y in zip(places, each(), strict=True):
                results[place] = results[place].read(y)
        done: Tree = unflatten(treedef, results)
        return done

    return finish


def _launch(name: str, moves: Sequence[Transfer], ahead: bool) -> FinishAll:
    """Launch moves of one kind."""
    xs = tuple([move.x for move in moves])
    op = _together(tuple([move.op for move in moves]))
    label = Label(name, op.mesh, call_line()) if ahead else label_of(name, op.mesh)
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in xs)
    if not wanted and not is_transformed():
        with labelled(label):
            return start_linear(op, xs, name)
    if not isinstance(op, Run) or op.progs[0].is_linear:
        # What was launched now would be the wrappers of `torch.func`, not what they hold.
        if is_transformed():
            return under(label, lambda: apply_linear(op, xs, False))
        with labelled(label), torch.no_grad():
            launched = start_linear(op, xs, name)
        return under(label, lambda: apply_linear(op, xs, False, launched))
    if ahead:
        fail(
            f"fs.start({name})",
            "a tensor that requires grad",
            "sums and movements run ahead with gradients, maxima and minima without",
            f"{name}(x, ...) at once, or x.detach()",
        )
    run = op
    return under(label, lambda: apply_run(run, xs, False))


@lru_cache(maxsize=4096)
def _together(ops: tuple[Program | Linear, ...]) -> Linear:
    """What moves of one kind run, as one operation."""
    if not isinstance(ops[0], Program):
        return ops[0]
    return Run(tuple(op for op in ops if isinstance(op, Program)))


# -- recorded ---------------------------------------------------------------------------------

_LAUNCHERS = Launchers()


def _launcher(
    plan: Callable[..., CollectivePlan],
    x: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Launcher | None:
    """What a collective does to a tensor like `x` on this rank; None where it is not recorded.

    That is under `torchrun` alone, for what communicates over this process's own transport.
    """
    transport, bound = direct_transport(), current_axes()
    if transport is None or is_transformed() or (bound is not None and bound.tracker is not None):
        return None
    of_plan = _key(plan, args, kwargs, bound)
    if of_plan is None:
        return None
    wanted = x.requires_grad and torch.is_grad_enabled()
    key = (
        of_plan, transport, x.shape, x.stride(), x.dtype, x.device, wanted,
        torch.get_default_dtype(),
    )  # fmt: skip
    found = _LAUNCHERS.get(key)
    if type(found) is Launcher:
        return found
    return _LAUNCHERS.of(key, _record, of_plan, plan, args, kwargs, x, transport, wanted)


def _record(
    key: Hashable,
    planned: Callable[..., CollectivePlan],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    x: torch.Tensor,
    transport: Transport,
    wanted: bool,
) -> Launcher | None:
    plan = _planned(key, planned, args, kwargs)
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    like.requires_grad_(wanted)
    with standing_in():
        move = plan.leaf(like)
    if not isinstance(move, Transfer) or transport.rank not in _together((move.op,)).mesh:
        return None
    forward: Function = lambda x: launch_collective(plan, x)()  # noqa: E731
    launcher = record(forward, _adjoint(plan, like, transport), like.detach())
    return None if launcher is None or (wanted and not launcher.is_linear) else launcher


def _adjoint(plan: CollectivePlan, like: torch.Tensor, transport: Transport) -> Function:
    """The transpose of what a plan does to a tensor like `like`, a linear map.

    That of what is moved, between those of how it is laid out and read.
    """

    def run(g: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=g.device)
            move = plan.leaf(x.requires_grad_())
            op, sent = _together((move.op,)), move.x.detach().to("meta")
            with torch.no_grad(), unobserved():
                (moved,) = op.launch(Shapes(transport.rank), (sent,))()
            y = torch.empty_like(moved, device=g.device).requires_grad_()
            read = move.read(y)
        again = torch.is_grad_enabled()
        (back,) = torch.autograd.grad(read, y, g, create_graph=again)
        (back,) = apply_linear(op.T, (back,), everywhere=False)
        (back,) = torch.autograd.grad(move.x, x, back, create_graph=again)
        return back

    return run


# -- what plans check -----------------------------------------------------------------------


def require_tensor(value: Any, where: str) -> torch.Tensor:
    """`value`, which is a tensor; raises `ShardingError` if it is not."""
    if not isinstance(value, torch.Tensor):
        fail(
            where,
            f"a leaf of type {type(value).__name__}",
            "the leaves of the tree are tensors, or None",
            "torch.as_tensor(x)",
        )
    return value


def require_number(value: Any, where: str) -> Any:
    """`value`, a leaf that is a number of Python's; raises `ShardingError` if it is none."""
    if not isinstance(value, complex | Real | torch.SymInt | torch.SymFloat):
        fail(
            where,
            f"a leaf of type {type(value).__name__}",
            "the leaves of the tree are tensors, numbers, or None",
            "torch.as_tensor(x) of an array; leave other things out of the tree",
        )
    return value


def check_dim(dim: int, ndim: int, where: str, word: str, of: str = "a tensor") -> int:
    """`dim` counted from 0; raises `ShardingError` for one that `of`, with `ndim`, has not."""
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        fail(
            where,
            f"{word}={dim!r} of {of} of {ndim} dims",
            f"a dim is in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims",
            "name a dim it has" if ndim else "x[None] has one",
        )
    return dim % ndim
