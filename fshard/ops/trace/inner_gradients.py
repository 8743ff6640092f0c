"""Gradients and transforms within a traced function: `torch.autograd.grad`, `torch.func`, `vmap`.

Functions are traced above autograd, which then differentiates the graph; calls of autograd by the
function itself are not visible there. A function that makes such calls is traced again, below
autograd: its gradients are then operations like all others, and whole training steps can be
partitioned. Results without a graph of their own (`create_graph=False`) are detached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import gt
from typing import Any, NoReturn

import torch
from torch import fx
from torch.autograd import function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import BackwardHook

from fshard._torch.autograd_state import (
    GRAD_FN,
    SET_GRAD_ENABLED,
    graph_task_id,
    is_any_autocast_enabled,
)
from fshard._torch.fake_tensors import DataDependentOutputException, FakeTensor
from fshard._torch.functorch import (
    forward_ad_level,
    function_metaclasses,
    is_batched,
    levels_without_gradients,
    transform_level,
)
from fshard._torch.memory import innermost, storage_address
from fshard._torch.modes import DisableTorchFunction, function_modes
from fshard._util.dtypes import is_inexact
from fshard._util.errors import fail, raise_if
from fshard.layout.tree import tensors_in
from fshard.ops.core.call import name_of
from fshard.ops.core.window_arguments import argument_problems
from fshard.ops.trace.constants import (
    READS,
    read_constants,
    with_known_ints,
    with_known_sizes,
)
from fshard.ops.trace.custom_functions import ForwardLookups, apply_in_transform, has_own_backward
from fshard.ops.trace.functionalize import drops_nothing, writes
from fshard.ops.trace.fused_updates import FUSED_STEPS
from fshard.ops.trace.grad_modes import (
    DETACH,
    FUNCTION_MODE,
    AutogradRecord,
    as_traced,
    node_of,
    within_mode,
)
from fshard.ops.trace.source_places import note_gradients, note_place
from fshard.ops.trace.traced_positions import TracedPositions
from fshard.ops.trace.unread_values import WITHOUT_READS
from fshard.run.transports.divergence_report import user_line
from fshard.spmd.closure_inputs import graph_leaves
from fshard.spmd.tracking.torch_effects import Action, effect_of

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REPLACED = {**WITHOUT_READS, **FUSED_STEPS, _SET_DATA: lambda x, y: None}
"""Functions that cannot be traced, with others that compute the same."""
AUTOGRAD_CALLS = {
    torch.autograd.grad, torch.Tensor.backward, torch.Tensor.requires_grad_,
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    torch.Tensor.register_hook, torch.Tensor.retain_grad,
    GRAD_FN,
}  # fmt: skip
"""Calls of a function that takes gradients itself."""


READ = "fshard_read"
"""Attribute of an error with the function that raised it, and the nodes of its operands."""


class TakesGradients(BaseException):
    """Raised by a function that takes gradients, uses `vmap` or autocast: it is traced below.

    Not an `Exception`, since the function may catch those.
    """


class ReadsBatchedTensor(BaseException):
    """Raised by a trace outside of a `vmap` for a closed-over tensor that has its batch dim.

    Not an `Exception`, since the function may catch those.
    """


def _levels() -> tuple[int, int]:
    """Return the levels of `torch.func` transforms and of forward-mode differentiation."""
    return transform_level() or 0, forward_ad_level()


class TraceMode(TorchFunctionMode):
    """Mode that refuses calls no graph can hold; `where` is the name in its errors.

    `requires_grad` says for every argument if its gradient is requested, `outside` if the trace is
    outside of the transforms of `torch.func` around the call.
    """

    def __init__(self, where: str, requires_grad: Sequence[bool], *, outside: bool) -> None:
        super().__init__()
        self.where, self.needed, self.requires_grad = where, requires_grad, any(requires_grad)
        self.closures: list[torch.Tensor] = []
        self.autograd = AutogradRecord()
        self.outside = outside
        self.positions = TracedPositions(
            lambda func, *args: self.__torch_function__(func, (), args, {}),  # type: ignore[no-untyped-call]
            self.read,
        )

    def read(self, func: Any, args: Sequence[Any], kwargs: Any) -> tuple[Any, ...]:
        """Return the value that a function reads of constants, in a tuple, or ()."""
        values, closures = read_constants(func, args, kwargs or {}, node_of, _closed_over())
        self.closures += closures
        return values

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function; raise `ShardingError` for arguments of windows that it refuses."""
        self.positions.refresh(tensors_in((args, kwargs)))
        try:
            try:
                out = _REPLACED.get(func, func)(*as_traced(func, args), **kwargs)
            except DataDependentOutputException:
                out = self._run_with_ints(func, args, kwargs)
            self.positions.put_back()
            return out
        except Exception as error:
            setattr(error, READ, (func, [*map(node_of, tensors_in((args, kwargs)))]))
            problems = argument_problems(func, args, kwargs)
            if not problems:
                raise
        raise_if(f"{self.where}{user_line(None, None)}: {name_of(func)}", problems)

    def _run_with_ints(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function that has read a tensor, as a size, with the value of a constant."""
        operand = args[:1] if getattr(torch.Tensor, name_of(func), None) is func else ()
        others = [with_known_ints(arg, self.read) for arg in args[len(operand) :]]
        named = {name: with_known_ints(arg, self.read) for name, arg in kwargs.items()}
        return _REPLACED.get(func, func)(*operand, *others, **named)

    def refuse(self, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Raise `ShardingError` for calls that cannot be traced.

        Raises:
            ReadsBatchedTensor: for a call that must be traced within the transforms.
        """
        if self.outside:
            tensors = tensors_in((args, kwargs or {}))
            if any(is_batched(x) and not isinstance(innermost(x), FakeTensor) for x in tensors):
                raise ReadsBatchedTensor
        if func == _SET_DATA and not is_itself(*args):
            fail(self.where, "an assignment to `x.data`, which cannot be traced",
                 "a function is traced as the operations that it runs",
                 "x.data.copy_(y), or use y")  # fmt: skip
        if func in _HOOKS and self.requires_grad and torch.is_grad_enabled():
            fail(self.where, f"{_HOOKS[func]}, with gradients", GRADIENT_OF_TRACE + "hooks would "
                 "be left out",
                 "s * y + ((1 - s) * y).detach() scales the gradient of y by s; other changes "
                 "where gradients come out")  # fmt: skip


def is_itself(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if two tensors are the same memory, as after `x.data *= mask`."""
    first, second = ((z.shape, z.stride(), z.storage_offset(), z.dtype) for z in (x, y))
    return first == second and storage_address(x) == storage_address(y)


_HOOKS = {torch.Tensor.register_hook: "x.register_hook(...)", GRAD_FN: "x.grad_fn"}
GRADIENT_OF_TRACE = (
    "a function is traced as the operations it runs, and the gradient is that of the trace: "
)


class AboveAutograd(TraceMode):
    """Mode of a trace above autograd; raises `TakesGradients` for calls that need one below.

    Tensors do not require grad there; `x.requires_grad` returns the value it would have.
    """

    def __init__(self, where: str, requires_grad: Sequence[bool], *, outside: bool) -> None:
        super().__init__(where, requires_grad, outside=outside)
        self.levels = _levels()
        self.leaves: set[fx.Node | None] = set()
        """Nodes of tensors on which `requires_grad_` was called."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == GRAD_FN and (node_of(args[0]) in self.leaves or not self._reaches(args[0])):
            return None  # as modules read of their new parameters
        self.refuse(func, args, kwargs)
        note_place()
        # The casts of autocast are operations below it, as gradients are.
        is_above = any(map(gt, _levels(), self.levels)) or is_any_autocast_enabled()
        if func == torch.Tensor.requires_grad_ and _requires(*args[1:], **(kwargs or {})):
            self.leaves.add(node_of(args[0]))
            return args[0]  # a gradient that is taken of it raises
        if func in AUTOGRAD_CALLS or is_above:
            raise TakesGradients
        if func in READS and (values := self.read(func, args, kwargs)):
            return values[0]
        func, args, kwargs = with_known_sizes(func, args, kwargs or {}, self.read)
        if (replaced := self.positions.replaced(func, args, kwargs)) is not None:
            return replaced()
        with _returned_operands_keep_nodes((args, kwargs)):
            out = self.run(func, args, kwargs)
        node = node_of(out) if isinstance(out, torch.Tensor) else None
        if node is not None and drops_nothing(node):  # PyTorch's trace makes a new tensor
            return next(tensors_in((args, kwargs)))
        if func == torch.Tensor.requires_grad.__get__ and not out:  # type: ignore[attr-defined]
            return torch.is_grad_enabled() and is_inexact(args[0]) and self._reaches(args[0])
        return out

    def _reaches(self, x: torch.Tensor) -> bool:
        """Return True if gradients of a tensor reach a requested or a closed-over one."""
        node = node_of(x)
        if node is None:
            return False
        nodes, closed_over = _tracked_nodes(node.graph), _closed_over()
        needed = dict(zip(node.graph.find_nodes(op="placeholder"), self.needed, strict=False))
        seen, todo = set[fx.Node](), [node]
        while todo:
            node = todo.pop()
            if node in self.leaves:
                return True
            if node in seen or node not in nodes:
                continue
            seen.add(node)
            todo += node.all_input_nodes
            is_closed = node.op == "get_attr" and closed_over(str(node.target)).requires_grad
            if needed.get(node, False) or is_closed:
                return True
        return False


def _requires(requires_grad: bool = True) -> bool:
    """Return the argument of `requires_grad_`."""
    return requires_grad


class BelowAutograd(TraceMode):
    """Mode of a trace below autograd, whose graph gets no gradients where eager PyTorch has none.

    These are gradients without `create_graph`, and operations under `no_grad`. With `tracked`
    False nothing around the function has a gradient, and this makes no difference.
    """

    def __init__(
        self, where: str, requires_grad: Sequence[bool], tracked: bool, *, outside: bool
    ) -> None:
        super().__init__(where, requires_grad, outside=outside)
        self.tracked = tracked

    def __enter__(self) -> BelowAutograd:
        self.outer = FUNCTION_MODE.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        FUNCTION_MODE.reset(self.outer)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == GRAD_FN and args[0].is_leaf:
            return None
        self.refuse(func, args, kwargs)
        note_place()
        if func in READS and (values := self.read(func, args, kwargs)):
            return values[0]
        func, args, kwargs = with_known_sizes(func, args, kwargs or {}, self.read)
        if (replaced := self.positions.replaced(func, args, kwargs)) is not None:
            return replaced()
        with self.autograd.during(
            detaches=self.tracked and not self._has_gradients(func, kwargs),
            unpacks=name_of(func) != "detach",
        ):
            out = self.run(func, args, kwargs)
        if torch.is_grad_enabled():
            note_gradients(out)
        return out

    def _has_gradients(self, func: Any, kwargs: Mapping[str, Any]) -> bool:
        """Return True if eager PyTorch has gradients of the results of a call."""
        is_initialisation = getattr(func, "__module__", "") == "torch.nn.init"  # under no_grad
        if is_initialisation or levels_without_gradients():
            return False
        if func in (torch.autograd.grad, torch.Tensor.backward):
            return bool(kwargs.get("create_graph"))
        return torch.is_grad_enabled() or effect_of(func).action in _UNTRACKED


_UNTRACKED = frozenset(
    (Action.NONE, Action.SAME, Action.GRAD, Action.SET_GRAD, Action.GRADIENTS, Action.BACKWARD)
)
"""Actions of functions on tensors themselves, and on their gradients."""


def _tracked_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that pass gradients on: all but those under no_grad, and detached ones."""
    tracks, nodes = True, set()
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            (tracks,) = node.args
        elif node.op != "call_function" or (tracks and node.target != DETACH):
            nodes.add(node)
    return nodes


def _closed_over() -> Callable[[str], torch.Tensor]:
    """Return the function from names to closed-over tensors of the graph that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return lambda name: getattr(mode.tracer.root, name)


@contextmanager
def _returned_operands_keep_nodes(operands: Any) -> Iterator[None]:
    """Give operands that a function under `no_grad` returns their nodes back.

    `x.contiguous()` or `x.to(dtype)` may return `x` itself, which has its gradient still: the node
    of the call would pass none on.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot

    mode: Any = None if torch.is_grad_enabled() else get_proxy_mode()
    tensors = [] if mode is None else [innermost(x) for x in tensors_in(operands)]
    slots: list[Any] = [get_proxy_slot(x, mode.tracer, None) for x in tensors]
    yield
    for x, slot in zip(tensors, slots, strict=True):
        node = None if slot is None else node_of(x)
        if node is not None and node is not slot.proxy.node and not writes(node):
            set_proxy_slot(x, mode.tracer, slot)


# -- entry points that no mode sees -------------------------------------------------------------


def refuse_grads(action: str, where: str) -> NoReturn:
    """Raise `ShardingError` for an action that leaves gradients in tensors from outside."""
    fail(where, action, "a traced function must return its results, gradients too",
         "torch.autograd.grad(loss, w) returns it; or backward() to w.detach().requires_grad_(), "
         "made within")  # fmt: skip


@contextmanager
def refuse_hidden_gradients(
    requires_grad: Sequence[bool],
    depth: Callable[[], int],
    outer_level: Callable[[], int | None],
    where: str,
) -> Iterator[None]:
    """Refuse in the block everything that has gradients which no graph of operations has.

    These are backward hooks of modules, hooks of saved tensors, and `backward()` to tensors that
    the function closes over. The backward of a custom `autograd.Function` is traced.

    Args:
        requires_grad: for every argument, if its gradient is requested.
        depth: returns 0 in threads that do not trace.
        outer_level: returns the level of the transforms of `torch.func` around the trace, None for
            a trace outside of them; levels within the function are others.
        where: name of the function in errors.
    """
    metaclasses = function_metaclasses()
    patched = [*_PATCHED, *((owner, "__getattribute__") for owner in metaclasses)]
    original = {owner: vars(owner).get(name) for owner, name in patched}

    def is_traced(cls: Any) -> bool:
        return depth() > 0 and transform_level() is None and has_own_backward(cls)

    lookups = ForwardLookups(is_traced, lambda args: any(requires_grad) or _reaches_outside(args),
                             any(requires_grad), where)  # fmt: skip

    def under_transform(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if depth() and transform_level() == outer_level() and has_own_backward(cls):
            return apply_in_transform(cls, args, where)
        return original[function](cls, *args, **kwargs)

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, AboveAutograd) for mode in function_modes()):
            raise TakesGradients
        # As within torch.autograd.grad.
        with DisableTorchFunction(), _recording_backward(*args, **kwargs):
            if depth() and _reaches_outside(tensors):
                action = "backward() fills .grad of a tensor that the function closes over"
                refuse_grads(action, where)
            return original[torch.autograd](tensors, *args, **kwargs)

    def hook(self: Any, *args: Any) -> None:
        if depth() and (any(requires_grad) or torch.is_grad_enabled()):
            fail(where, "a module with backward hooks", GRADIENT_OF_TRACE + "hooks would be left "
                 "out",
                 "take gradients within the function, or change them where they come "
                 "out")  # fmt: skip
        original[BackwardHook](self, *args)

    def enter(self: Any) -> None:
        is_users = type(self).__module__ != "torch.utils.checkpoint"
        if is_users and depth() and any(requires_grad) and torch.is_grad_enabled():
            fail(where, f"torch.autograd.graph.{type(self).__name__}, with gradients",
                 GRADIENT_OF_TRACE + "hooks would be left out",
                 f"with torch.autograd.graph.{type(self).__name__}(...) around the call: its "
                 "hooks get the saved locals")  # fmt: skip
        original[saved_tensors_hooks](self)

    for owner in metaclasses:
        owner.__getattribute__ = _traced_lookups(lookups, original[owner], depth)
    vars(function)["custom_function_call"] = under_transform
    torch.autograd.backward = backward
    BackwardHook.__init__ = hook  # type: ignore[method-assign, assignment]
    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        for owner, name in patched:
            if original[owner] is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original[owner])


def _recording_backward(
    grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False, **_: Any
) -> AbstractContextManager[None]:
    """Return the context of `torch.autograd.backward` with these options in a trace."""
    mode = FUNCTION_MODE.get(None)
    if not isinstance(mode, BelowAutograd):
        return nullcontext()
    return mode.autograd.during(detaches=mode.tracked and not create_graph)


def _traced_lookups(
    lookups: ForwardLookups, original: Any, depth: Callable[[], int]
) -> Callable[[Any, str], Any]:
    """Return the `__getattribute__` of a metaclass of custom functions during a trace.

    Args:
        lookups: finds forwards.
        original: the one that is replaced, None for a metaclass without its own.
        depth: returns 0 in threads that do not trace.
    """
    find = original or type.__getattribute__

    def attribute(cls: Any, name: str) -> Any:  # a function, which is bound to the class
        value = lookups.attribute(cls, name, find(cls, name))
        runs = depth() > 0 and graph_task_id() != -1 and name in ("backward", "vjp")
        # PyTorch compares those that are not defined by identity.
        return within_mode(value) if runs and not any(value is x for x in _UNDEFINED) else value

    return attribute


_UNDEFINED = (torch.autograd.Function.backward, torch.autograd.Function.vjp)
"""Backwards of functions that define none."""
_PATCHED: tuple[tuple[Any, str], ...] = (
    (function, "custom_function_call"), (torch.autograd, "backward"), (BackwardHook, "__init__"),
    (saved_tensors_hooks, "__enter__"),
)  # fmt: skip


def _reaches_outside(tensors: Any) -> bool:
    """Return True if a gradient would reach a tensor from outside of the traced function."""
    leaves = graph_leaves([*tensors_in(tensors)])
    return any(not isinstance(leaf, FakeTensor) for leaf in leaves)
