"""Functions that `torch.compile` skips, calls while tracing, or takes as one node; its pytrees.

PyTorch's own decorators for this import the compiler, which takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    register_pytree_node,
    tree_flatten,
    tree_unflatten,
)

__all__ = [
    "PytreeNode", "call_while_tracing", "one_node", "register_pytree_node", "registered_node",
    "skip_frame", "skip_frames_below", "tree_flatten", "tree_unflatten", "without_compiler",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])


def skip_frame(reason: str) -> Callable[[F], F]:
    """Return a decorator that ends graphs before a function; `reason` is in the error message.

    The equivalent of `torch.compiler.disable(recursive=False)`.
    """

    def mark(fn: F) -> F:
        fn._torchdynamo_disable = True  # type: ignore[attr-defined]
        fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return fn

    return mark


def skip_frames_below(reason: str) -> Callable[[F], F]:
    """Return a decorator that ends graphs before a function, whose callees are not compiled either.

    The equivalent of `torch.compiler.disable`, for functions that plan with sizes as keys of
    caches: sizes that the graph before holds as symbols are plain ints in them.
    """

    def mark(fn: F) -> F:
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(skip, skip))
        return skip_frame(reason)(fn)

    return mark


def call_while_tracing(fn: F) -> F:
    """Make the tracer call `fn` and take its result as a constant (a decorator).

    The equivalent of `torch.compiler.assume_constant_result`.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def one_node(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as one node of a graph, which is not traced into."""
    return torch._dynamo.nonstrict_trace(fn)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run compiled functions uncompiled in the block, in all threads."""
    eval_frame: Any = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:  # nothing is compiled yet
        yield
        return
    before, eval_frame._stance = eval_frame._stance, eval_frame.DynamoStance("force_eager")
    try:
        yield
    finally:
        eval_frame._stance = before


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
