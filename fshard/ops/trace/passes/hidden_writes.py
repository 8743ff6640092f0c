"""Writes that autograd does not see: under `no_grad`, or through `detach()`.

Autograd ignores such a write, while a graph without writes has the gradients of the written values.
`keep_gradients` therefore gives every detached tensor memory of its own, and repeats each write in
all memories that eager PyTorch would change, with the gradients from before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from operator import getitem
from typing import Any

import torch
from torch import fx

from fshard._torch.autograd_state import SET_GRAD_ENABLED
from fshard.ops.trace.custom_functions import COTANGENT, CUSTOM_GRADIENT
from fshard.ops.trace.functionalize import (
    aliases,
    base_of,
    has_inexact_value,
    has_no_gradient,
    refuse_closure_write,
    statistics_of,
    writes,
)

_NONE: frozenset[int] = frozenset()
_CLOSURE: frozenset[int] = frozenset((-1,))
"""The index of tensors that the function closes over and that require grad."""
_CLONE = torch.ops.aten.clone.default
_DETACH = torch.ops.aten.detach.default


def keep_gradients(
    graph: fx.GraphModule, requires_grad: Sequence[bool], *, grad: bool
) -> frozenset[int]:
    """Give tensors that hidden writes change the gradients that they have in eager PyTorch.

    Args:
        graph: the graph with writes, which is changed.
        requires_grad: for every argument, if its gradient is requested.
        grad: if gradients are tracked at the beginning of the graph.

    Returns:
        The indices of the arguments written while gradients are tracked, if values with gradients
        are written or overwritten.

    Raises:
        ShardingError: for writes to tensors that the function closes over.
    """
    arguments = enumerate(graph.graph.find_nodes(op="placeholder"))
    indices = {x: frozenset((i,)) for i, x in arguments if has_inexact_value(x)}
    requested = {i for i, requires in enumerate(requires_grad) if requires}
    sources = {x: index & requested for x, index in indices.items()}
    _detach_views(_grad_modes(graph.graph, grad))
    modes = _grad_modes(graph.graph, grad)
    writers = {node: targets for node in modes if (targets := _writes(node))}
    written = {_history(x) for targets in writers.values() for x in targets}
    tracked, misread = _NONE, dict[fx.Node, None]()
    for node, mode in modes.items():
        if node.op == "get_attr" and getattr(graph, str(node.target)).requires_grad:
            sources[node] = _CLOSURE
        if node.op != "call_function":
            continue
        is_tracked = mode and not has_no_gradient(node.target)
        union = _NONE.union(*(sources.get(x, _NONE) for x in node.all_input_nodes if is_tracked))
        statistics = statistics_of(node) if is_tracked else []  # which have no gradient
        for target in writers.get(node, ()):
            memory = aliases(target)
            if memory[0].op == "get_attr":
                refuse_closure_write(node.name)
            if target in statistics:
                continue
            is_seen = is_tracked and _history(target) is memory[0]
            tracked |= indices.get(memory[0], _NONE) if is_seen and union else _NONE
            # Others than the tensor that a seen write is for have other gradients than its result.
            others = written - {memory[0]} if is_seen else written | {memory[0]}
            if (union or sources.get(memory[0])) and _are_read(memory, others, node, modes):
                misread[memory[0]] = None
            sources.update((x, sources.get(x, _NONE) | union) for x in memory)
        if node in writers and (base := base_of(node)) is not None:
            sources[node] = sources[base]
        else:
            sources[node] = union if has_inexact_value(node) else _NONE
    for root in misread:
        _Memory(graph.graph, root, modes).separate(writers)
    _undo_detach({x: n for n, targets in writers.items() for x in targets
                  if aliases(x)[0] not in misread})  # fmt: skip
    return tracked


def copy_overwritten(graph: fx.GraphModule, tracked: Set[int]) -> None:
    """Copy the arguments that are written with gradients; operations of `graph` read the copies.

    The arguments get their new values after all operations, which may have saved the old ones for
    their gradients. In eager PyTorch `x.mul_(y)` saves such a copy itself.
    """
    arguments = graph.graph.find_nodes(op="placeholder")
    with graph.graph.inserting_after(arguments[-1]):
        for x in [arguments[index] for index in sorted(tracked)]:
            users = [*x.users]
            copy = graph.graph.call_function(_CLONE, (x,))
            copy.meta["val"] = x.meta["val"].clone()
            for user in users:
                user.replace_input_with(x, copy)


def _detach_views(modes: Mapping[fx.Node, bool]) -> None:
    """Detach the bases of views under `no_grad` that are used where gradients are tracked.

    Functionalization takes views of a memory that is written again, in the mode of their use.
    """
    written = {aliases(x)[0] for node in modes for x in _writes(node)}
    for node, mode in modes.items():
        view: Any = node.args[0] if node.target is getitem else node
        base = None if mode or _writes(view) or has_no_gradient(view.target) else base_of(view)
        if base is None or base.target is _DETACH or aliases(base)[0] not in written:
            continue
        if any(modes[user] or user.op == "output" for user in node.users):
            with view.graph.inserting_before(view):
                detached = view.graph.call_function(_DETACH, (base,))
            detached.meta["val"] = base.meta["val"].clone()
            view.replace_input_with(base, detached)


def _undo_detach(writers: Mapping[fx.Node, fx.Node]) -> None:
    """Write operands in the place of their detached aliases that are of no other use.

    `writers` are the operations that write each operand.
    """
    for target, node in writers.items():
        base = base_of(target)
        if base is not None and has_no_gradient(target.target) and {*target.users} == {node}:
            node.replace_input_with(target, base)
            target.graph.erase_node(target)


def _grad_modes(graph: fx.Graph, grad: bool) -> dict[fx.Node, bool]:
    """Return the grad mode of every node, in order; `grad` is the initial one."""
    modes = {}
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            grad = node.args[0]
        modes[node] = grad
    return modes


def _writes(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose values an operation changes."""
    return [] if has_no_gradient(node.target) else writes(node)


def _history(node: fx.Node) -> fx.Node:
    """Return the node whose gradients a tensor has: a detached alias, or the root of its memory."""
    while (base := base_of(node)) is not None and not has_no_gradient(node.target):
        node = base
    return node


def _are_read(
    memory: Sequence[fx.Node],
    histories: Set[fx.Node],
    node: fx.Node,
    modes: Mapping[fx.Node, bool],
) -> bool:
    """Return True if tensors in a memory with one of `histories` are read after `node`.

    Operations that take a view read nothing, nor do those that no gradient passes.
    """

    def reads(user: fx.Node, x: fx.Node) -> bool:
        if user.op == "output":
            return True
        is_view = user.target is getitem or base_of(user) is x
        return node < user and modes[user] and not is_view and not has_no_gradient(user.target)

    return any(_history(x) in histories and any(reads(user, x) for user in x.users) for x in memory)


class _Memory:
    """Tensors that share memory in a graph: one for each history of gradients.

    Args:
        graph: the graph.
        root: the node whose memory it is.
        modes: the grad mode of every node of the graph.
    """

    def __init__(self, graph: fx.Graph, root: fx.Node, modes: Mapping[fx.Node, bool]) -> None:
        self.graph, self.modes = graph, modes
        self.roots = [root]
        self.links: list[tuple[fx.Node, fx.Node]] = []
        """Tensors that were detached, with the memories of the results."""

    def separate(self, writers: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
        """Give detached tensors their own memories, and repeat writes in all of them."""
        shared = aliases(self.roots[0])
        for node in shared:
            if has_no_gradient(node.target):
                self._copy(node)
        for node, targets in writers.items():
            if not {*shared}.isdisjoint(targets):
                self._repeat(node)

    def _copy(self, detached: fx.Node) -> None:
        """Replace a detached tensor by a copy, with memory of its own."""
        with self.graph.inserting_after(detached):
            copy = self._call(_CLONE, detached, like=detached)
        detached.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        copy.meta, detached.meta = detached.meta, copy.meta  # views are in the memory of the copy
        base = base_of(detached)
        assert base is not None
        self.roots.append(copy)
        self.links.append((base, copy))

    def _repeat(self, node: fx.Node) -> None:
        """Repeat the writes of `node` to some of the memories in all others."""
        changed = {root: None for x in _writes(node) if (root := aliases(x)[0]) in self.roots}
        hidden = [] if self.modes[node] else [*changed]
        with self._with_gradients(node, node):
            before = [self._call(_CLONE, root, like=root) for root in hidden]
        with self._with_gradients(node.next, node):
            for root, old in zip(hidden, before, strict=True):
                self._overwrite(root, old, root)
            links = [link for link in self.links if link[1] < node]
            while links:
                links = [link for link in links if not self._synchronize(*link, changed)]

    def _synchronize(self, base: fx.Node, copy: fx.Node, changed: dict[fx.Node, None]) -> bool:
        """Write the tensor of a link that has changed to the other; return False if none has."""
        root = aliases(base)[0]
        if root in changed and copy not in changed:
            self._overwrite(copy, copy, base)
        elif copy in changed and root not in changed:
            self._overwrite(base, base, copy)
        elif root not in changed:
            return False
        changed.update({root: None, copy: None})
        return True

    def _overwrite(self, target: fx.Node, before: fx.Node, value: fx.Node) -> None:
        """Write values to a tensor, which gets the gradient of `before`."""
        if has_inexact_value(target):
            value = self._call(_DETACH, value, like=value)
            cotangent = self._call(COTANGENT, value, like=value)
            gradient = [before], [value], [cotangent], [cotangent], [1], True, False, "x.data"
            tied = self.graph.call_function(CUSTOM_GRADIENT, gradient)
            tied.meta["val"] = [value.meta["val"].clone()]
            value = self._call(getitem, tied, 0, like=value)
        self._call(torch.ops.aten.copy_.default, target, value, like=target)

    @contextmanager
    def _with_gradients(self, place: fx.Node, node: fx.Node) -> Iterator[None]:
        """Insert in the block before `place`, where the grad mode is that of `node`."""
        mode = self.modes[node]
        with self.graph.inserting_before(place):
            if not mode:
                self.graph.call_function(SET_GRAD_ENABLED, (True,))
            yield
            if not mode:
                self.graph.call_function(SET_GRAD_ENABLED, (False,))

    def _call(self, op: Any, *args: Any, like: fx.Node) -> fx.Node:
        """Insert an operation whose result is like a tensor."""
        node = self.graph.call_function(op, args)
        node.meta["val"] = like.meta["val"].clone()
        return node
