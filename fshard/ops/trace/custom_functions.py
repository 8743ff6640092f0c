"""Custom `autograd.Function`s in traced functions: their backward is traced beside their forward.

While a function is traced, `apply` of a custom function records the operations of its forward, the
operations of its backward on placeholders of the cotangents, and one operation that ties both.
`extract_backwards` makes a graph of its own of every backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard._torch.checkpointing import StopRecomputation
from fshard._torch.fake_tensors import DataDependentOutputException, DynamicOutputShapeException
from fshard._torch.functorch import has_setup_context, new_context
from fshard._torch.modes import DisableTorchFunction
from fshard._util.dtypes import is_inexact
from fshard._util.errors import ShardingError, fail
from fshard._util.text import one_line
from fshard.ops.trace.checkpoints import CHECKPOINT_MARK
from fshard.ops.trace.grad_modes import RUNNING_BACKWARDS
from fshard.ops.trace.source_places import note_place
from fshard.run.transports.divergence_report import raise_line


@torch.library.custom_op("fshard::cotangent", mutates_args=())
def _cotangent(x: Tensor) -> Tensor:
    raise AssertionError("fshard::cotangent is for graphs alone")


@_cotangent.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fshard::custom_gradient", mutates_args=())
def _custom_gradient(
    inputs: list[Tensor],
    outputs: list[Tensor],
    cotangents: list[Tensor],
    gradients: list[Tensor],
    used: list[int],
    materialized: bool,
    once: bool,
    name: str,
) -> list[Tensor]:
    raise AssertionError("fshard::custom_gradient is for graphs alone")


@_custom_gradient.register_fake
def _(
    inputs: list[Tensor],
    outputs: list[Tensor],
    cotangents: list[Tensor],
    gradients: list[Tensor],
    used: list[int],
    materialized: bool,
    once: bool,
    name: str,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in outputs]


COTANGENT = torch.ops.fshard.cotangent.default
CUSTOM_GRADIENT = torch.ops.fshard.custom_gradient.default
MAX_UNMATERIALIZED = 4
"""Most differentiable outputs of a function that gets None for those that are not used."""
Used = tuple[bool, ...]
"""For every output of a function, True if it has a cotangent."""


@dataclass(frozen=True, eq=False)
class TracedBackward:
    """Target of a graph node `(inputs, outputs, saved) -> outputs` with a gradient of its own.

    Attributes:
        backward: graph of the gradients of `inputs`, a function of the cotangents of `outputs` and
            of `saved`; the gradients of each item of `used`, one after the other.
        used: sets of outputs that have a cotangent, as a bool for each output; first that of all.
        materialized: True if outputs that are not used have cotangents of zeros, False if they have
            none: the other items of `used` are then the sets that the backward accepts.
        once: True if the backward is not differentiable.
        name: name of the custom function, for errors.
    """

    backward: fx.GraphModule
    used: tuple[Used, ...]
    materialized: bool
    once: bool
    name: str
    __name__ = "custom_gradient"

    def __call__(self, inputs: Any, outputs: Any, saved: Any) -> NoReturn:
        """Raise: the node is planned, it does not run."""
        raise AssertionError("a custom gradient is planned, it does not run")

    def backwards_of(
        self, indices: Sequence[int]
    ) -> tuple[dict[Used, fx.GraphModule], tuple[int, ...]]:
        """Return graphs of the gradients of some inputs, and the indices of `saved` they read.

        Each is a function of the cotangents of the outputs of its key, and of these saved tensors.
        """
        graphs = {used: self._graph(i, indices) for i, used in enumerate(self.used)}
        inputs = {used: graph.find_nodes(op="placeholder") for used, graph in graphs.items()}
        nodes = [node for nodes in inputs.values() for node in nodes]
        read = {node.meta["saved"] for node in nodes if node.users} - {None}
        for used, placeholders in inputs.items():
            for node, has in zip_longest(placeholders, used):
                if not (node.meta["saved"] in read if has is None else has):
                    graphs[used].erase_node(node)
        modules = {used: fx.GraphModule(self.backward, graph) for used, graph in graphs.items()}
        return modules, tuple(sorted(read))

    def _graph(self, place: int, indices: Sequence[int]) -> fx.Graph:
        """Return the graph of the gradients of some inputs for an item of `used`."""
        graph = fx.Graph()
        gradients = graph.graph_copy(self.backward.graph, {})
        assert isinstance(gradients, tuple)
        first = place * (len(gradients) // len(self.used))
        graph.output(tuple(gradients[first + index] for index in indices))
        graph.eliminate_dead_code(is_impure_node=has_effects)
        return graph


def extract_backwards(graph: fx.GraphModule, where: str) -> None:
    """Move the operations of every custom backward into the `TracedBackward` of its node."""
    for node in list(graph.graph.nodes):
        if node.target is CUSTOM_GRADIENT:
            _extract(graph, node)
    graph.graph.eliminate_dead_code(is_impure_node=has_effects)
    if any(node.target is COTANGENT for node in graph.graph.nodes):
        fail(
            where,
            "a gradient that the backward of a custom autograd.Function keeps",
            "a traced backward must only return its gradients",
            "torch.autograd.grad(loss, x), which returns the gradient",
        )


def has_effects(node: fx.Node) -> bool:
    """Return True for a node that dead-code elimination keeps."""
    return node.op in ("placeholder", "output") or node.target in (
        SET_GRAD_ENABLED,
        CHECKPOINT_MARK,
    )


def _extract(graph: fx.GraphModule, node: fx.Node) -> None:
    """Replace the tying operation by a node of a `TracedBackward`."""
    inputs, outputs, cotangents, gradients, masks, *flags = cast(tuple[Any, ...], node.args)
    copies: dict[fx.Node, fx.Node] = {}
    backward = fx.Graph()
    for cotangent in cotangents:
        copies[cotangent] = _placeholder(backward, cotangent, None)
    inside = _between(cotangents[0], node)
    saved: list[fx.Node] = []
    for member in _members(inside, gradients):
        for operand in member.all_input_nodes if member in inside else [member]:
            if operand not in inside and operand not in copies:
                copies[operand] = _placeholder(backward, operand, len(saved))
                saved.append(operand)
        if member in inside and member not in copies:
            copies[member] = backward.node_copy(member, copies.__getitem__)
    backward.output(tuple(copies[gradient] for gradient in gradients))
    used = tuple(tuple(bool(mask >> i & 1) for i in range(len(outputs))) for mask in masks)
    target = TracedBackward(fx.GraphModule(graph, backward), used, *flags)
    with graph.graph.inserting_before(node):
        tied = graph.graph.call_function(target, (inputs, outputs, saved))
    tied.meta.update(node.meta)
    node.replace_all_uses_with(tied)
    graph.graph.erase_node(node)
    for member in inside:
        if member.target is SET_GRAD_ENABLED:
            graph.graph.erase_node(member)


def _placeholder(graph: fx.Graph, node: fx.Node, saved: int | None) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.meta = {"val": node.meta.get("val"), "saved": saved}
    return placeholder


def _between(first: fx.Node, last: fx.Node) -> dict[fx.Node, None]:
    """Return the nodes from `first` to `last`, without `last`, in order."""
    nodes: dict[fx.Node, None] = {}
    node = first
    while node is not last:
        nodes[node] = None
        node = node.next
    return nodes


def _members(inside: dict[fx.Node, None], gradients: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that gradients depend on, and switches of the grad mode, in order."""
    needed = set(gradients)
    for node in reversed(inside):
        if node in needed:
            needed.update(node.all_input_nodes)
    members = [x for x in inside if x in needed or x.target is SET_GRAD_ENABLED]
    return [*members, *(x for x in gradients if x not in inside)]


# -- while a function is traced -------------------------------------------------------------


def has_own_backward(cls: Any) -> bool:
    """Return True for a custom function, False for one of PyTorch around an operation."""
    is_torch = cls.__module__.startswith("torch.") and not cls.__name__.startswith("Vmapped")
    return not is_torch


class ForwardLookups:
    """Look-ups of the forward of custom functions by `apply`, which returns a traced one to it.

    C++ looks up the forward of a function in each call, of an alias of its `apply` too. It has
    disabled gradients by then, and has looked up `_backward_cls` before. A `setup_context` is
    looked up after the forward, which has run it already.

    Args:
        is_traced: returns True if calls of a custom function are traced in this thread.
        requires_grad: returns True if a gradient may be requested of a call with these arguments.
        all_require_grad: True if every argument of a call may need a gradient.
        where: name of the traced function in errors.
    """

    def __init__(
        self, is_traced: Callable[[Any], bool], requires_grad: Callable[[Any], bool],
        all_require_grad: bool, where: str,
    ) -> None:  # fmt: skip
        self.is_traced, self.requires_grad = is_traced, requires_grad
        self.all_require_grad, self.where = all_require_grad, where
        self.thread = threading.local()

    def attribute(self, cls: Any, name: str, value: Any) -> Any:
        """Return an attribute of a custom function, whose value is given."""
        thread = self.thread
        if name == "_backward_cls":
            thread.applied = cls if torch.is_grad_enabled() else None
        elif name == "setup_context" and getattr(thread, "context", None) is not None:
            context, thread.context = thread.context, None
            return functools.partial(_copy_context, context)  # it ran with the forward
        elif name == "forward" and getattr(thread, "applied", None) is cls:
            thread.applied = None  # other look-ups of the forward are not those of `apply`
            return self._traced(cls, value) if self.is_traced(cls) else value
        return value

    def _traced(self, cls: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a function, which records its backward too."""
        has_context = not has_setup_context(cls)

        @functools.wraps(original)  # `apply` reads the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            xs = args[1:] if has_context else args
            if not self.requires_grad(xs):
                return original(*args, **kwargs)
            ctx = args[0] if has_context else new_context(cls)
            if not has_context:
                ctx.needs_input_grad = tuple(getattr(x, "requires_grad", False) for x in xs)
            outputs = _forward_and_backward(cls, ctx, xs, self.all_require_grad, self.where)
            if not has_context:
                self.thread.context = ctx
            return outputs

        return forward


def _copy_context(context: Any, ctx: Any, inputs: Any, output: Any) -> None:
    """Copy to `ctx` what a `setup_context` has set in another context."""
    vars(ctx).update(vars(context))
    if context.to_save is not None:
        ctx.save_for_backward(*context.to_save)
    if context.saved_for_forward is not None:
        ctx.save_for_forward(*context.saved_for_forward)
    if context.non_differentiable is not None:
        ctx.mark_non_differentiable(*context.non_differentiable)
    ctx.set_materialize_grads(context._fshard_materialized)
    ctx.needs_input_grad = context.needs_input_grad


def apply_in_transform(cls: Any, args: Sequence[Any], where: str) -> Any:
    """Return `cls.apply(*args)` where a transform of `torch.func` is around the traced function.

    The transform differentiates the graph, so that autograd need not record the call.
    """
    context = new_context(cls)
    context.needs_input_grad = (False,) * len(args)
    if torch.is_grad_enabled():
        return _forward_and_backward(cls, context, args, True, where)
    return _forward(cls, context, args, where)


def _forward(cls: Any, ctx: Any, args: Sequence[Any], where: str) -> Any:
    """Run the forward of a custom function in either style."""
    name = f"{cls.__name__}.forward"
    if not has_setup_context(cls):
        return _run(name, where, cls.forward, ctx, *args)
    result = _run(name, where, cls.forward, *args)
    cls.setup_context(ctx, args, result)
    return result


def _forward_and_backward(
    cls: Any, ctx: Any, args: Sequence[Any], requires_grad: bool, where: str
) -> Any:
    """Record a forward and its backward; with `requires_grad` every input may need a gradient."""
    ctx.needs_input_grad = tuple(
        isinstance(x, Tensor) and is_inexact(x) and (requires_grad or needs)
        for x, needs in zip(args, ctx.needs_input_grad, strict=True)
    )
    # PyTorch's context has the setting, and no attribute that shows it.
    settings = [True]
    ctx.set_materialize_grads = settings.append
    # Recorded in the graph: autograd has disabled gradients already, which no graph shows.
    torch.set_grad_enabled(False)
    try:
        result = _forward(cls, ctx, args, where)
    finally:
        torch.set_grad_enabled(True)
        del ctx.set_materialize_grads
    ctx.set_materialize_grads(settings[-1])
    ctx._fshard_materialized = settings[-1]
    return _with_backward(cls, ctx, args, result, settings[-1], where)


def _check_traceable(cls: Any, ctx: Any, count: int, materialized: bool, where: str) -> None:
    """Refuse a function whose backward cannot be recorded; `count` outputs are differentiable."""
    if ctx.dirty_tensors:
        fail(
            where,
            f"{cls.__name__}.forward, which calls ctx.mark_dirty",
            "a custom function that is traced must not write its inputs",
            "y = x.clone(), write y, and return it",
        )
    if not materialized and count > MAX_UNMATERIALIZED and any(ctx.needs_input_grad):
        fail(
            where,
            f"{cls.__name__}, which calls ctx.set_materialize_grads(False) and has {count} "
            "differentiable outputs",
            f"such a function must have at most {MAX_UNMATERIALIZED} of them: its backward is "
            "traced for each set of outputs that may be used",
            "leave the call out, and test no cotangent for None",
        )


def _with_backward(
    cls: Any, ctx: Any, args: Sequence[Any], result: Any, materialized: bool, where: str
) -> Any:
    """Return the result of a forward, tied to the backward that is recorded here."""
    outputs = result if isinstance(result, tuple) else (result,)
    unmarked = {id(x) for x in ctx.non_differentiable or ()}
    # The gradient of a tensor that is returned twice is that of its last place, as in autograd.
    last = {id(x): index for index, x in enumerate(outputs)}
    tied = [
        x
        for index, x in enumerate(outputs)
        if isinstance(x, Tensor)
        and is_inexact(x)
        and id(x) not in unmarked
        and last[id(x)] == index
    ]
    _check_traceable(cls, ctx, len(tied), materialized, where)
    if not tied or not any(ctx.needs_input_grad):
        return result
    cotangents = {last[id(x)]: COTANGENT(x) for x in tied}
    saved = tuple(ctx.to_save or ())
    gradients = _gradients_by_use(cls, ctx, saved, args, outputs, cotangents, materialized, where)
    columns = enumerate(zip(*gradients.values(), strict=True))
    indices = [i for i, column in columns if any(x is not None for x in column)]
    if not indices:
        return result
    once = getattr(type.__getattribute__(cls, "backward"), "__code__", None) is _ONCE
    with DisableTorchFunction(), torch.no_grad():
        flat = [
            torch.zeros_like(args[i]) if (gradient := row[i]) is None else gradient
            for row in gradients.values()
            for i in indices
        ]
        cts, inputs = [*cotangents.values()], [args[i] for i in indices]
        flags = materialized, once, cls.__name__
        note_place()  # the operations before are those of the backward
        results = CUSTOM_GRADIENT(inputs, tied, cts, flat, [*gradients], *flags)
    replaced = {id(x): y for x, y in zip(tied, results, strict=True)}
    if saved:  # autograd knows an output by its identity
        ctx.save_for_backward(*(replaced.get(id(x), x) for x in saved))
    outputs = tuple(replaced.get(id(x), x) for x in outputs)
    return outputs if isinstance(result, tuple) else outputs[0]


def _gradients_by_use(
    cls: Any, ctx: Any, saved: tuple[Any, ...], args: Sequence[Any], outputs: Sequence[Any],
    cotangents: dict[int, Tensor], materialized: bool, where: str,
) -> dict[int, list[Tensor | None]]:  # fmt: skip
    """Run a backward; return the gradient of every argument, None without one.

    Args:
        cls: the custom function.
        ctx: the context of its forward.
        saved: the tensors that it saved.
        args: the arguments of its forward.
        outputs: the results of its forward.
        cotangents: cotangents of the differentiable outputs, by their index.
        materialized: False for a backward that gets None for outputs that are not used.
        where: name of the traced function in errors.

    Returns:
        By the outputs that are used, a bit for each: first all, and if they are not materialized
        the sets for which the backward does not raise.
    """
    everything = (1 << len(cotangents)) - 1
    gradients: dict[int, list[Tensor | None]] = {}
    for mask in [everything, *([] if materialized else range(1, everything))]:
        used = {at for place, at in enumerate(cotangents) if mask >> place & 1}
        zeros = [torch.zeros_like(x) if materialized and isinstance(x, Tensor) else None
                 for x in outputs]  # fmt: skip
        given = [cotangents[at] if at in used else x for at, x in enumerate(zeros)]
        context = type(cls.__name__, (type(ctx),), dict.fromkeys(SAVED_NAMES, _SAVED))()
        vars(context).update(vars(ctx), _fshard_saved=saved)
        context.needs_input_grad = ctx.needs_input_grad
        try:
            with _running_backward(cls, where):
                row = _run(f"{cls.__name__}.backward", where, context.apply, *given)
        except ShardingError:
            if mask == everything:
                raise
            continue
        row = row if isinstance(row, tuple) else (row,)
        columns = zip_longest(args, row[: len(args)], ctx.needs_input_grad)
        gradients[mask] = [
            _like(x, g) if need and g is not None else None for x, g, need in columns
        ]
    return gradients


@contextmanager
def _running_backward(cls: type, where: str) -> Iterator[None]:
    """Trace the backward of a function in the block; refuse one that leads to itself."""
    running = RUNNING_BACKWARDS.get()
    if cls in running:
        fail(
            where,
            f"{cls.__name__}.backward, which calls {cls.__name__} again",
            "a backward is traced with those of the functions that it calls, which must end",
            "write the backward in operations of PyTorch; or torch.library.custom_op, "
            "register_autograd and fs.register_rule, whose gradient is not traced",
        )
    token = RUNNING_BACKWARDS.set((*running, cls))
    try:
        yield
    finally:
        RUNNING_BACKWARDS.reset(token)


_ONCE = once_differentiable(lambda ctx: None).__code__
_SAVED = property(lambda context: context._fshard_saved)
"""Saved tensors of a context; a class that had them itself would be a reference cycle."""
SAVED_NAMES = ("saved_tensors", "saved_variables")
"""Names of the saved tensors of a context; the second one is deprecated."""


def _like(x: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in the shape and dtype of its tensor, as autograd does."""
    if gradient.shape != x.shape:
        gradient = gradient.sum_to_size(x.shape)
    return gradient if gradient.dtype == x.dtype else gradient.to(x.dtype)


def _run(name: str, where: str, fn: Any, *args: Any) -> Any:
    """Call a part of a custom function; errors name it."""
    try:
        return fn(*args)
    except (ShardingError, StopRecomputation):
        raise
    except Exception as error:  # noqa: BLE001 - it is the user's function that ran
        cause = one_line(error)
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            cause = f"{error.func} needs a tensor's values"
        fail(
            f"{where}{raise_line(error.__traceback__)}",
            f"{name}: {cause}",
            "the forward and the backward of a custom autograd.Function are traced as the "
            "operations of PyTorch that they run",
            "make a call of other code an operation: torch.library.custom_op, "
            "register_autograd and fs.register_rule",
        )
