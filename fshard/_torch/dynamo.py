"""Functions that `torch.compile` skips, calls while tracing, or takes as one node; its pytrees.

PyTorch's own decorators for this import the compiler, which takes a second.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getclosurevars, getmembers, isfunction
from typing import Any, NamedTuple, TypeVar

import torch
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._library import opaque_object
from torch._library.opaque_object import MemberType
from torch._ops import HigherOrderOperator
from torch.utils._pytree import (
    SUPPORTED_NODES,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from fshard._util.tracebacks import hiding_frames

__all__ = [
    "PytreeNode", "call_in_graph", "call_while_tracing", "compiled_functions_inlined",
    "compiler_of", "end_graph",
    "graph_constant", "last_graph_of", "one_node",
    "register_pytree_node", "registered_node", "run_uncompiled", "skip_frame", "skip_frames_below",
    "tree_flatten", "tree_map", "tree_unflatten", "without_compiler",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def skip_frame(reason: str) -> Callable[[F], F]:
    """Return a decorator that ends graphs before a function; `reason` is in the error message.

    The equivalent of `torch.compiler.disable(recursive=False)`.
    """

    def mark(fn: F) -> F:
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return fn

    return mark


def run_uncompiled(fn: F) -> F:
    """Run a function and its callees uncompiled, unless a graph contains its call (a decorator).

    Graphs that end before the call, or in it, do not begin again in the callees.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))

    def entry(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    # `torch.compile(fn)` compiles this in its place. Graphs are counted by code object.
    entry.__code__ = entry.__code__.replace()
    fn._torchdynamo_orig_callable = entry  # type: ignore[attr-defined]
    fn._torchdynamo_wrapper_id = id(fn)  # type: ignore[attr-defined]
    return fn


# Wrappers of backward passes, which autograd calls from outside of any call here, share their code.
run_uncompiled(hiding_frames(lambda: None))


def skip_frames_below(reason: str) -> Callable[[F], F]:
    """Return a decorator that ends graphs before a function, whose callees are not compiled either.

    The equivalent of `torch.compiler.disable`, for functions that plan with sizes as keys of
    caches: sizes that the graph before holds as symbols are plain ints in them.
    """
    return lambda fn: skip_frame(reason)(run_uncompiled(fn))


def call_while_tracing(fn: F) -> F:
    """Make the tracer call `fn` and take its result as a constant (a decorator).

    The equivalent of `torch.compiler.assume_constant_result`.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def graph_constant(cls: C) -> C:
    """Make the instances of an immutable class constants of graphs (a decorator).

    A graph is compiled again for an instance that is not equal. The constructor and methods are
    called while tracing, and their arguments must be constants, too.
    """

    def text(value: Any) -> tuple[str, dict[str, Any]]:
        name = f"{cls.__name__}_{hash(value) % 2**64}"  # equal values have one name
        return name, {name: value}

    cls.__fx_repr__ = text  # type: ignore[attr-defined]
    methods = [name for name, _ in getmembers(cls, isfunction) if name[0] != "_"]
    members = dict.fromkeys(methods, MemberType.USE_REAL)
    if hasattr(opaque_object, "register_custom_class"):  # PyTorch 2.14 and newer
        opaque_object.register_custom_class(cls, typ="constant", members=members)
    else:
        opaque_object.register_opaque_type(cls, typ="value", members=members)
    return cls


def one_node(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as one node of a graph, which is not traced into."""
    traced: Callable[..., Any] = torch._dynamo.nonstrict_trace(fn)
    return traced


# -- operators that take functions -------------------------------------------------------------
# PyTorch's own implementations hide the tensors that the functions close over from function modes,
# and have gradients for functions that are compiled. These run the operations one by one.

Function = Callable[..., Any]
Tensors = Sequence[torch.Tensor]


def _cond(pred: Any, true_fn: Function, false_fn: Function, operands: Tensors) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(cond_fn: Function, body_fn: Function, carry: Tensors, others: Tensors) -> Any:
    tree: Any = None
    while cond_fn(*carry, *others):
        tree = body_fn(*carry, *others)
        carry = tree_leaves(tree)
    if tree is None:  # the flat tensors of the start: its functions close over their tree
        tree, _ = tree_unflatten(carry, getclosurevars(cond_fn).nonlocals["in_spec"])
    return tree


def _map(fn: Function, xs: Tensors, others: Tensors) -> Any:
    return _stack([fn(*row, *others) for row in zip(*xs, strict=True)])


def _scan(combine_fn: Function, init: Tensors, xs: Tensors, additional_inputs: Tensors) -> Any:
    carry: Any = init
    rows = list[Any]()
    for row in zip(*xs, strict=True):
        carry, out = combine_fn(*tree_leaves(carry), *row, *additional_inputs)
        rows.append(out)
    return carry, _stack(rows)


def _stack(rows: Sequence[Any]) -> Any:
    """Stack the tensors at each place of equal trees; other leaves are None."""
    return tree_map(lambda *xs: None if xs[0] is None else torch.stack(xs), *rows)


PLAIN: dict[HigherOrderOperator, Function] = {
    cond_op: _cond,
    while_loop_op: _while_loop,
    map_impl: _map,
    scan_op: _scan,
    associative_scan_op: generic_associative_scan,
    flex_attention: math_attention,
}
_CALL: Callable[..., Any] = HigherOrderOperator.__call__


def _call(self: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
    plain = None if torch.compiler.is_compiling() else PLAIN.get(self)
    if plain is None:
        return _CALL(self, *args, **kwargs)
    kwargs.pop("mutated_arg_indices", None)  # PyTorch 2.14's, for functions that are graphs
    return plain(*args, **kwargs)


def _run_as_plain_functions(enabled: bool) -> None:
    """Run the operators in `PLAIN` as plain functions, in all threads, or as PyTorch does."""
    HigherOrderOperator.__call__ = _call if enabled else _CALL  # type: ignore[method-assign]


_STANCES: list[Any] = []
"""One entry for each running block of `without_compiler`, first the stance before, once known."""
_STANCE_LOCK = threading.Lock()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run compiled functions, and operators that take functions, as plain Python in all threads."""
    with _STANCE_LOCK:
        _STANCES.append(None)
        _disable_compiler()
    try:
        yield
    finally:
        with _STANCE_LOCK:  # blocks of several threads end in any order: the last one restores
            if len(_STANCES) == 1:
                _enable_compiler(_STANCES[0])
            _STANCES.pop()


def _disable_compiler() -> None:
    """Set the stance of a compiler that is imported, else that of the one that is imported next."""
    _run_as_plain_functions(True)
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:  # nothing is compiled yet
        vars(torch)["compile"] = _compile_first
        return
    _STANCES[0] = _STANCES[0] or eval_frame._stance
    eval_frame._stance = eval_frame.DynamoStance("force_eager")


def _enable_compiler(stance: Any) -> None:
    """Restore what `_disable_compiler` has changed."""
    vars(torch)["compile"] = _COMPILE
    _run_as_plain_functions(False)
    if stance is not None:
        sys.modules["torch._dynamo.eval_frame"]._stance = stance  # type: ignore[attr-defined]


_COMPILE = torch.compile


def _compile_first(*args: Any, **kwargs: Any) -> Any:
    """Run the first `torch.compile` of a process, which imports the compiler, and disable it."""
    vars(torch)["compile"] = _COMPILE
    importlib.import_module("torch._dynamo.eval_frame")
    with _STANCE_LOCK:
        if _STANCES:
            _disable_compiler()
    return _COMPILE(*args, **kwargs)


@contextmanager
def compiled_functions_inlined() -> Iterator[None]:
    """Trace compiled functions in the block as the functions that they were compiled from."""
    config: Any = sys.modules.get("torch._dynamo.config")
    with without_compiler():
        if config is None:  # nothing is compiled yet
            yield
        else:
            with config.patch(error_on_nested_fx_trace=False):
                yield


def last_graph_of() -> int | None:
    """Return the limit of a function's graphs while its last one is traced, else None."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    if compile_id is None or compile_id.frame_compile_id is None:
        return None
    limit: int = torch._dynamo.config.recompile_limit
    return limit if compile_id.frame_compile_id + 1 == limit else None


def end_graph(reason: str) -> None:
    """End the graph before the call that is traced, unless the function must be one graph."""
    from torch._dynamo import exc, symbolic_convert

    tracer = getattr(symbolic_convert.tls, "current_tx", None)
    if tracer is not None and not (tracer.one_graph or tracer.error_on_graph_break):
        exc.unimplemented(gb_type="fshard", context="", explanation=reason, hints=[])


def call_in_graph(wrapper: Callable[..., Any], fn: Callable[..., Any], *args: Any) -> Any:
    """Return `wrapper(fn)(*args)` in a graph: `fn` is traced first, with what it closes over.

    `wrapper` gets the graph of `fn` where autograd is traced.
    """
    return torch.ops.higher_order.dynamo_bypassing_wrapper(wrapper, fn, *args)


def compiler_of(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return what a compiled function or module was compiled from, and the function that did it.

    The function compiles others in the same way. None for a function that is not compiled.
    """
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return None
    if isinstance(fn, eval_frame.OptimizedModule):
        return fn._orig_mod, fn.dynamo_ctx
    if not hasattr(fn, "get_compiler_config"):
        return None
    context = getclosurevars(fn).nonlocals["self"]
    return fn._torchdynamo_orig_callable, context  # type: ignore[attr-defined]


class PytreeNode(NamedTuple):
    """Functions of a container's class.

    Attributes:
        flatten: from an instance to its children, its context, and the text of each child's key.
        unflatten: from the context and the children to an instance.
    """

    flatten: Callable[[Any], tuple[Iterable[Any], Any, Iterable[str]]]
    unflatten: Callable[[Any, Iterable[Any]], Any]


def registered_node(kind: type) -> PytreeNode | None:
    """Return the functions with which a class is registered in `torch.utils._pytree`, or None."""
    node = SUPPORTED_NODES.get(kind)
    if node is None:
        return None

    def flatten(tree: Any) -> tuple[Iterable[Any], Any, Iterable[str]]:
        children, context = node.flatten_fn(tree)
        if node.flatten_with_keys_fn is not None:  # its context is not always the same
            return children, context, [str(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]
        by_name = isinstance(tree, Mapping) and len(tree) == len(children)
        return (
            children,
            context,
            [f"[{key!r}]" for key in (tree if by_name else range(len(children)))],
        )

    return PytreeNode(flatten, lambda context, children: node.unflatten_fn([*children], context))
