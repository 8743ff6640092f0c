"""Values of traced tensors that depend on no argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fshard._torch.fake_tensors import FakeTensor
from fshard._torch.modes import DisableTorchFunction, disable_dispatch_modes
from fshard._torch.operators import OpOverload
from fshard._util.dtypes import is_inexact
from fshard.layout.tree import tensors_in
from fshard.ops.core.call import map_call
from fshard.ops.trace.functionalize import aliases, writes

Tensor = torch.Tensor
READS: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner, names in (
        (Tensor, "item tolist __bool__ __int__ __float__ __index__ __complex__"),
        (Tensor, "equal allclose is_nonzero"), (torch, "equal allclose is_nonzero"),
    ) for name in names.split()
)  # fmt: skip
"""Functions that return values of tensors."""
SIZED_BY_VALUES: frozenset[Any] = frozenset(
    (
        torch.nonzero,
        Tensor.nonzero,
        torch.argwhere,
        Tensor.argwhere,
        torch.unique,
        Tensor.unique,
        torch.unique_consecutive,
        Tensor.unique_consecutive,
        torch.bincount,
        Tensor.bincount,
        torch.nn.functional.one_hot,
        torch.repeat_interleave,
    )
)
"""Functions of results whose shapes depend on values of all operands."""
_SELECTIONS = (torch.masked_select, Tensor.masked_select)
_REPEATS = (torch.repeat_interleave, Tensor.repeat_interleave)
_FILLS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
)
"""Operations that read the shape, dtype and device of their first argument, and no values of it."""
_DETACH = torch.ops.aten.detach_.default
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


def read_constants(
    func: Any,
    args: Sequence[Any],
    kwargs: Any,
    node_of: Callable[[Tensor], fx.Node | None],
    closed_over: Callable[[str], Tensor],
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return the value that a function reads, in a tuple; () if it depends on an argument.

    Also return the closed-over tensors that the value depends on.

    Args:
        func: one of `READS`.
        args: its arguments.
        kwargs: its keyword arguments.
        node_of: the node of a traced tensor, None for another tensor.
        closed_over: the closed-over tensor of a node, by its target.
    """
    values: dict[fx.Node, Any] = {}
    tensors = [*tensors_in((args, kwargs))]
    nodes = [node_of(x) for x in tensors]
    read: list[Tensor] = []

    def value_of(x: Tensor, node: fx.Node | None) -> Any:
        if node is None:
            read.append(x)
            return x
        return values[node]

    with disable_dispatch_modes(), DisableTorchFunction(), torch.no_grad():
        others = [x for x, node in zip(tensors, nodes, strict=True) if node is None]
        traced = [node for node in nodes if node is not None]
        if any(isinstance(x, FakeTensor) or x.is_inference() for x in others):
            return (), []
        if not _evaluate(traced, values, closed_over):
            return (), []
        real = iter([*map(value_of, tensors, nodes)])
        placed, named = map_call(args, kwargs, Tensor, lambda _: next(real))
        read += [values[node] for node in values if node.op == "get_attr"]
        return (func(*placed, **named),), read


def with_known_sizes(
    func: Any, args: Sequence[Any], kwargs: Any, evaluate: Callable[..., tuple[Any, ...]]
) -> tuple[Any, Sequence[Any], Any]:
    """Return a call of static shapes in the place of one whose shapes depend on constants.

    `x[mask]` becomes `x[mask.nonzero(as_tuple=True)]`, and repeats of elements their indices.
    A call whose shapes depend on an argument's values is returned as it is.

    Args:
        func: a function of PyTorch.
        args: its arguments.
        kwargs: its keyword arguments.
        evaluate: returns the value of a call in a tuple, or () if it is not constant.
    """
    is_where = func is torch.where and len(args) + len(kwargs) == 1
    if (is_where or func in SIZED_BY_VALUES) and (known := evaluate(func, args, kwargs)):
        return lambda: known[0], (), {}
    if func in _INDEXING and (func is Tensor.__getitem__ or isinstance(args[2], Tensor)):
        return func, (args[0], _without_masks(args[1], evaluate), *args[2:]), kwargs
    if func in _SELECTIONS and len(args) == 2 and (known := evaluate(torch.clone, args[1:], {})):
        shape = torch.broadcast_shapes(args[0].shape, known[0].shape)
        index = _without_masks(known[0].expand(shape), evaluate)
        return Tensor.__getitem__, (args[0].expand(shape), index), {}
    if func in _REPEATS and (selected := _selected_rows(*args, **kwargs, evaluate=evaluate)):
        return torch.index_select, selected, {}
    return func, args, kwargs


def with_known_ints(value: Any, evaluate: Callable[..., tuple[Any, ...]]) -> Any:
    """Return an argument with ints in the place of constant int tensors of no dims."""
    if isinstance(value, list | tuple):
        items = [with_known_ints(item, evaluate) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, slice):
        bounds = (value.start, value.stop, value.step)
        return slice(*[with_known_ints(bound, evaluate) for bound in bounds])
    is_int = isinstance(value, Tensor) and not value.ndim and not is_inexact(value)
    known = is_int and value.dtype != torch.bool and evaluate(Tensor.item, (value,), {})
    return known[0] if known else value


def _repeated(repeats: Tensor, size: int) -> Tensor:
    return torch.repeat_interleave(repeats.expand(size))


def _selected_rows(
    x: Tensor, repeats: Any = None, dim: int | None = None, *,
    evaluate: Callable[..., tuple[Any, ...]], **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of the `index_select` that repeats elements, () of unknown repeats."""
    rows, dim = (x.flatten(), 0) if dim is None else (x, dim)
    known = isinstance(repeats, Tensor) and evaluate(_repeated, (repeats, rows.shape[dim]), {})
    return (rows, dim, known[0]) if known else ()


def _without_masks(index: Any, evaluate: Callable[..., tuple[Any, ...]]) -> Any:
    """Return an index with constant masks replaced by the indices of their elements."""
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.ndim
        known = evaluate(Tensor.nonzero, (item,), {"as_tuple": True}) if is_mask else ()
        items += known[0] if known else [item]
    return tuple(items) if isinstance(index, tuple) or len(items) > 1 else items[0]


def _evaluate(
    nodes: Sequence[fx.Node], values: dict[fx.Node, Any], closed_over: Callable[[str], Tensor]
) -> bool:
    """Compute the values that nodes have now, after all writes; return False if one has none."""
    needed, todo = set[fx.Node](), [*nodes]
    while todo:
        node = todo.pop()
        if node in needed:
            continue
        needed.add(node)
        writers = [user for alias in aliases(node) for user in alias.users
                   if user.target is not _DETACH and writes(user)]  # fmt: skip
        if node.op == "get_attr":
            x = closed_over(str(node.target))
            values[node] = x.clone() if writers else x
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if values[node].is_inference() if node in values else is_random or not _is_pure(node):
            return False
        like = node.args[:1] if node.target in _FILLS else ()
        todo += [*writers, *(x for x in node.all_input_nodes if x not in like)]
    for node in sorted(needed - values.keys()):
        like = node.args[:1] if node.target in _FILLS else ()
        args, kwargs = map_call(node.args[len(like) :], node.kwargs, fx.Node, values.__getitem__)
        values[node] = node.target(*map(_blank, like), *args, **kwargs)  # type: ignore[operator]
    return True


def _blank(node: Any) -> Tensor:
    """Return a tensor of the shape and dtype of a node's, of one element in memory."""
    fake: Tensor = node.meta["val"]
    return torch.empty((), dtype=fake.dtype, device=fake.device).expand(fake.shape)


def _is_pure(node: fx.Node) -> bool:
    """Return True for an operation of PyTorch or an item of its results."""
    is_item = getattr(node.target, "__name__", "") == "getitem"
    return node.op == "call_function" and (isinstance(node.target, OpOverload) or is_item)
