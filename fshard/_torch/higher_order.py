"""Operators that take functions, such as `torch.cond` and `flex_attention`, as plain Python.

PyTorch's own implementations hide the tensors that the functions close over from function modes,
and have gradients for functions that are compiled. The ones here run the operations one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import associative_scan_op, generic_associative_scan
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

Function = Callable[..., Any]
Tensors = Sequence[torch.Tensor]


def _cond(pred: Any, true_fn: Function, false_fn: Function, operands: Tensors) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(cond_fn: Function, body_fn: Function, carry: Tensors, others: Tensors) -> Any:
    tree: Any = None
    while cond_fn(*carry, *others):
        tree = body_fn(*carry, *others)
        carry = tree_leaves(tree)
    # Without an iteration only the body knows the tree of the flat tensors.
    return tree_unflatten(carry, tree_structure(tree or body_fn(*carry, *others)))


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
_CALL = HigherOrderOperator.__call__


def _call(self: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
    plain = None if torch.compiler.is_compiling() else PLAIN.get(self)
    return (plain or partial(_CALL, self))(*args, **kwargs)


def run_as_plain_functions(enabled: bool) -> None:
    """Run the operators in `PLAIN` as plain functions, in all threads, or as PyTorch does."""
    HigherOrderOperator.__call__ = _call if enabled else _CALL  # type: ignore[method-assign]
