"""Collectives on pytrees: one transfer per tensor, one launch for transfers of equal kind.

A collective is written once, as a plan for one leaf. The call on a tree, coalesced launches by
dtype in forward and backward, and the asynchronous `fs.start` follow from it.

A program has no varying state: a varying operand is its unreduced source for a sum and its sharded
source for a gather; the cotangent, reduced there, is varying here.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from numbers import Real
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from fshard._torch.functorch import is_transformed
from fshard._util.cache import CACHE_SIZE, BoundedDict
from fshard._util.errors import fail
from fshard._util.signatures import MISSING, explain_binding
from fshard._util.tracebacks import hide_frames, runs_users_operation
from fshard.layout.tree import flatten, unflatten
from fshard.plan.batch.coalesce import launch_keys
from fshard.program.program import Program
from fshard.run.autograd.linear_function import (
    FinishAll,
    LinearOp,
    ProgramGroup,
    apply_linear,
    apply_programs,
    are_linear,
    launch_linear,
)
from fshard.run.autograd.replay import replay
from fshard.run.capture import Recording, Recordings, record
from fshard.run.graphs.blocks import block_shape
from fshard.run.transports.agreement import compare_shapes
from fshard.run.transports.base import (
    Label,
    Transport,
    direct_transport,
    label_of,
    labelled,
    unobserved,
    with_label,
)
from fshard.run.transports.divergence_report import deferred_label
from fshard.run.transports.reduce_dtypes import TensorFunction
from fshard.run.transports.shape_only import ShapeTransport, is_abstract, meta_as_real
from fshard.spmd.axis_env import BoundAxes, current_axes, current_tracker
from fshard.spmd.closure_inputs import replaced_closures, unreplaced
from fshard.spmd.collectives.argument_key import plain_key
from fshard.spmd.collectives.compile_node import bound_node
from fshard.spmd.types import TypeSignature

Tree = TypeVar("Tree")
Options = ParamSpec("Options")

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
payload_of = operator.attrgetter("x")
requires_grad = operator.attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor's part in a collective.

    Attributes:
        op: the operation that moves it.
        x: the tensor that `op` takes.
        read: function from what `op` returns to the result; None if they are the same.
    """

    op: Program | LinearOp
    x: torch.Tensor
    read: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def kind(self) -> Hashable:
        """Key that is equal for transfers of one launch."""
        kind = launch_keys(self.op) if isinstance(self.op, Program) else self.op
        return kind, self.x.dtype, self.x.device

    def result(self, y: torch.Tensor) -> torch.Tensor:
        """Return the result of what `op` returned."""
        return y if self.read is None else self.read(y)


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """Plan of a collective with its options.

    Attributes:
        name: the public name.
        leaf: function from a leaf to its `Transfer`, or to its result at once.
        signature: types of the operands and results.
        axes: axes of its mesh along which ranks must call it on equal shapes; () if it sends
            nothing.
        arguments: the options that are not defaults, as text for errors.
    """

    name: str
    leaf: Callable[[Any], Any]
    signature: TypeSignature
    axes: tuple[str, ...] = ()
    arguments: str = ""


COLLECTIVE_PLANS: dict[Any, Callable[..., CollectivePlan]] = {}
"""Public collectives, and the functions that plan them."""


def collective(
    make_plan: Callable[Options, CollectivePlan],
) -> Callable[Concatenate[Tree, Options], Tree]:
    """Return the collective of a planning function; it takes a tree before the plan's arguments."""

    def run_plan(x: Tree, /, *args: Options.args, **kwargs: Options.kwargs) -> Tree:
        key = _plan_key(make_plan, args, kwargs, current_axes())
        return launch_collective(_cached_plan(key, make_plan, args, kwargs), x)()

    run_plan.__name__ = make_plan.__name__
    node = bound_node(run_plan)

    @functools.wraps(make_plan)
    def run(x: Tree = MISSING, *args: Options.args, **kwargs: Options.kwargs) -> Tree:  # type: ignore[assignment]
        if torch.compiler.is_dynamo_compiling():
            return node(x, *args, **kwargs)
        try:
            if x is MISSING:
                explain_binding(TypeError(), run, args, kwargs)
            try:
                bound = current_axes()
                key = _plan_key(make_plan, args, kwargs, bound)
                value: Any = x
                if key is not None and type(value) in TENSOR_TYPES:
                    recorded = _recording(key, make_plan, value, args, kwargs, bound)
                    if recorded is not None:
                        return replay((recorded,), (value,))[0]  # type: ignore[return-value]
                return launch_collective(_cached_plan(key, make_plan, args, kwargs), x)()
            except TypeError as error:
                explain_binding(error, run, (x, *args), kwargs)
                raise
        except Exception as error:
            hide_frames(error)
            raise

    tree = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tree)  # type: ignore[misc]
    parameters = [
        p.replace(kind=p.POSITIONAL_OR_KEYWORD) if p.kind is p.POSITIONAL_ONLY else p
        for p in inspect.signature(make_plan).parameters.values()
    ]
    run.__signature__ = inspect.Signature([tree, *parameters], return_annotation=Tree)  # type: ignore[attr-defined, misc]
    COLLECTIVE_PLANS[run] = make_plan
    return run  # type: ignore[return-value]


_PLANS: BoundedDict[Hashable, CollectivePlan] = BoundedDict()


def _plan_key(
    make_plan: Callable[..., CollectivePlan],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: BoundAxes | None,
) -> Hashable | None:
    """Return the cache key of a plan, or None for arguments that a key cannot hold."""
    arguments = plain_key(args, kwargs)
    if arguments is None:
        return None
    if bound is None:
        return make_plan, arguments
    return make_plan, arguments, bound.mesh, bound.axes


def _cached_plan(
    key: Hashable,
    make_plan: Callable[..., CollectivePlan],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> CollectivePlan:
    """Return the plan of a collective with these arguments and the axes bound now."""
    if key is None:
        return _make_plan(make_plan, args, kwargs)
    plan = _PLANS.get(key)
    if plan is None:
        # The caller may change its lists later.
        options = {name: _copied(value) for name, value in kwargs.items()}
        plan = _PLANS[key] = _make_plan(make_plan, tuple(map(_copied, args)), options)
    return plan


@runs_users_operation
def _make_plan(
    make_plan: Callable[..., CollectivePlan], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CollectivePlan:
    """Return the plan of a collective, with its options as text."""
    plan = make_plan(*args, **kwargs)
    signature = inspect.signature(make_plan)
    options = [
        f"{name}={_as_lists(value)!r}"
        for name, value in signature.bind(*args, **kwargs).arguments.items()
        if name not in ("axis_name", "mesh")
        and _as_lists(value) != signature.parameters[name].default
    ]
    return replace(plan, arguments=f"({', '.join(options)})") if options else plan


def _as_lists(value: Any) -> Any:
    """Return an option with lists in place of tuples, tensors and arrays."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(map(_as_lists, value)) if isinstance(value, list | tuple) else value


def _copied(value: Any) -> Any:
    return type(value)(map(_copied, value)) if type(value) in (list, tuple) else value


def launch_collective(plan: CollectivePlan, x: Tree, *, ahead: bool = False) -> Callable[[], Tree]:
    """Launch a collective on a tree; return the function that finishes it, differentiably.

    With `ahead` all communication is launched now. Raises `ShardingError` where that is not
    possible: a maximum or minimum with a gradient.
    """
    tracker, x = current_tracker(), replaced_closures(x)
    if tracker is None:
        return unreplaced(unreplaced(_launch_tree)(plan, x, ahead))
    finish: Callable[[], Tree] = tracker.launch_collective(plan, x, ahead, _launch_tree)
    return finish


def _launch_tree(plan: CollectivePlan, x: Tree, ahead: bool) -> Callable[[], Tree]:
    if isinstance(x, torch.Tensor):
        transfer = plan.leaf(x)
        if not isinstance(transfer, Transfer):
            return lambda: transfer
        finish_one = _launch_transfers(plan, (transfer,), ahead)
        finish_tensor: Callable[[], Any] = lambda: transfer.result(finish_one()[0])  # noqa: E731
        return finish_tensor
    leaves, treedef = flatten(x)
    results: list[Any] = [None if leaf is None else plan.leaf(leaf) for leaf in leaves]
    groups: dict[Hashable, list[int]] = {}
    for index, transfer in enumerate(results):
        if isinstance(transfer, Transfer):
            groups.setdefault(transfer.kind, []).append(index)
    launches = [
        (indices, _launch_transfers(plan, [results[i] for i in indices], ahead))
        for indices in groups.values()
    ]

    def finish() -> Tree:
        for indices, finish_group in launches:
            for index, y in zip(indices, finish_group(), strict=True):
                results[index] = results[index].result(y)
        tree: Tree = unflatten(treedef, results)
        return tree

    return finish


def _launch_transfers(
    plan: CollectivePlan, transfers: Sequence[Transfer], ahead: bool
) -> FinishAll:
    """Launch transfers of one kind; return the function that finishes them."""
    xs = tuple(map(payload_of, transfers))
    op = _combine(tuple([transfer.op for transfer in transfers]))
    name = plan.name
    label = _label(plan, op, xs)
    label = deferred_label(label) if ahead else label
    if not any(map(is_abstract, xs)):
        compare_shapes(label, plan.axes, xs[0].dtype)
    needs_grad = torch.is_grad_enabled() and any(map(requires_grad, xs))
    if not needs_grad and not is_transformed():
        with labelled(label):
            return launch_linear(op, xs, name)
    if not isinstance(op, ProgramGroup) or op.progs[0].is_linear:
        # Launched now, it would take the wrappers of `torch.func` instead of their values.
        if is_transformed():
            return with_label(label, lambda: apply_linear(op, xs, False))
        with labelled(label), torch.no_grad():
            launched = launch_linear(op, xs, name)
        return with_label(label, lambda: apply_linear(op, xs, False, launched))
    if ahead:
        fail(f"fs.start({name})", "a tensor that requires grad",
             "sums and movements can be started with gradients, maxima and minima only without",
             f"{name}(x, ...) at once, or x.detach()")  # fmt: skip
    group = op
    return with_label(label, lambda: apply_programs(group, xs, False))


def _label(plan: CollectivePlan, op: LinearOp, xs: Iterable[torch.Tensor]) -> Label:
    return label_of(plan.name, op.mesh, plan.arguments, tuple(map(block_shape, xs)))


@lru_cache(maxsize=CACHE_SIZE)
def _combine(ops: tuple[Program | LinearOp, ...]) -> LinearOp:
    """Return one operation for transfers of one kind."""
    if not isinstance(ops[0], Program):
        return ops[0]
    return ProgramGroup(tuple(op for op in ops if isinstance(op, Program)))


# -- capture ----------------------------------------------------------------------------------

_RECORDINGS = Recordings()


def _recording(
    plan_key: Hashable,
    make_plan: Callable[..., CollectivePlan],
    x: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    bound: BoundAxes | None,
) -> Recording | None:
    """Return the captured collective for tensors like `x` on this rank, or None.

    Collectives are captured only under `torchrun`, over this process's own transport.
    """
    transport = direct_transport()
    if transport is None or is_transformed():
        return None
    if bound is not None and (bound.tracker is not None or bound.uneven):
        return None
    if x.layout is not torch.strided or x.is_conj() or x.is_neg():
        return None
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    key = (
        plan_key, transport, x.shape, x.stride(), x.dtype, x.device, needs_grad,
        torch.get_default_dtype(),
    )  # fmt: skip
    recorded = _RECORDINGS.get(key)
    if type(recorded) is Recording:
        return recorded
    return _RECORDINGS.get_or_record(
        key, _capture, plan_key, make_plan, args, kwargs, x, transport, needs_grad
    )


def _capture(
    key: Hashable,
    make_plan: Callable[..., CollectivePlan],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    x: torch.Tensor,
    transport: Transport,
    needs_grad: bool,
) -> Recording | None:
    plan = _cached_plan(key, make_plan, args, kwargs)
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    like.requires_grad_(needs_grad)
    with meta_as_real():
        transfer = plan.leaf(like)
    if not isinstance(transfer, Transfer):
        return None
    op = _combine((transfer.op,))
    # The operations of a maximum over one rank are linear, and it has no transpose.
    has_transpose = not isinstance(op, ProgramGroup) or are_linear(op.progs)
    if transport.rank not in op.mesh or (needs_grad and not has_transpose):
        return None
    forward: TensorFunction = lambda x: launch_collective(plan, x)()  # noqa: E731
    label, transpose = _label(plan, op, (transfer.x,)), _transposed(plan, like, transport)
    compare_shapes(label, plan.axes, transfer.x.dtype)
    recorded = record(forward, transpose, like.detach(), label)
    return None if recorded is None or (needs_grad and not recorded.is_linear) else recorded


def _transposed(plan: CollectivePlan, like: torch.Tensor, transport: Transport) -> TensorFunction:
    """Return the transpose of a linear collective on tensors like `like`.

    It composes the vjp of reading the result, the transposed operation, and the vjp of packing.
    """

    def run(g: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=g.device)
            transfer = plan.leaf(x.requires_grad_())
            op, payload = _combine((transfer.op,)), transfer.x.detach().to("meta")
            with torch.no_grad(), unobserved():
                (moved,) = op.launch(ShapeTransport(transport.rank), (payload,))()
            y = torch.empty_like(moved, device=g.device).requires_grad_()
            result = transfer.result(y)
        create_graph = torch.is_grad_enabled()
        (back,) = torch.autograd.grad(result, y, g, create_graph=create_graph)
        (back,) = apply_linear(op.T, (back,), False)
        (back,) = torch.autograd.grad(transfer.x, x, back, create_graph=create_graph)
        return back

    return run


# -- checks of operands -----------------------------------------------------------------------


def require_tensor(value: Any, where: str) -> torch.Tensor:
    """Return `value`; raise `ShardingError` if it is not a tensor."""
    if not isinstance(value, torch.Tensor):
        fail(where, f"a leaf of type {type(value).__name__}",
             "the leaves of the tree must be tensors, or None", "torch.as_tensor(x)")  # fmt: skip
    return value


def require_number(value: Any, where: str) -> Any:
    """Return `value`; raise `ShardingError` if it is not a Python number."""
    if not isinstance(value, complex | Real | torch.SymInt | torch.SymFloat):
        fail(where, f"a leaf of type {type(value).__name__}",
             "the leaves of the tree must be tensors, numbers, or None",
             "torch.as_tensor(x) of an array; leave other objects out of the tree")  # fmt: skip
    return value


def check_real(x: torch.Tensor, where: str) -> None:
    """Raise `ShardingError` for a complex tensor."""
    if x.dtype.is_complex:
        rule, fix = "complex numbers have no order", "x.abs(), or x.real and x.imag one by one"
        fail(where, f"a tensor of {x.dtype}", rule, fix)


def check_dim(dim: int, ndim: int, where: str, option: str, owner: str = "a tensor") -> int:
    """Return `dim` counted from 0; raise `ShardingError` if `owner`, of `ndim` dims, lacks it."""
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        fail(where, f"{option}={dim!r} of {owner} of {ndim} dims",
             f"a dim must be in {-ndim}..{ndim - 1}" if ndim else "a 0-dim tensor has no dims",
             "name a dim it has" if ndim else "x[None] has one")  # fmt: skip
    return dim % ndim
