"""Collectives that a backward pass will launch, compared between ranks that may have diverged.

After the host has read varying values, ranks may have recorded other graphs. Their backward passes
would wait for each other for ever, or add gradients of different tensors. A graph is therefore
described by its collectives in the order in which PyTorch's engine runs them, each by the inputs
whose gradients it reaches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from fshard._torch.autograd_state import sequence_number
from fshard._torch.functorch import wrapped_tensors
from fshard._torch.memory import innermost
from fshard.run.autograd.linear_function import ProgramGroup
from fshard.spmd.closure_inputs import Edge, edge_of, edges_in_graph, next_edges
from fshard.spmd.tracking.control_casts import EnterControl, ExitControl, LeaveControl, PickFirst
from fshard.spmd.tracking.tracker import Tracker


def inner_gradient_sums(
    tracker: Tracker, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> str:
    """Return the collectives of a gradient in the body as text; inputs count by their position."""
    with tracker.pause():
        edges = edges_in_graph(outputs, inputs)
        names = {edge: str(i) for i, edge in enumerate(edges) if edge is not None}
        return _sums(outputs, names, set(edges_in_graph(outputs, tracker.outside)))


def outer_gradient_sums(tracker: Tracker, results: Iterable[torch.Tensor]) -> str:
    """Return the collectives of gradients of the body's results with respect to tensors outside.

    Tensors that the body used before its first read count by their position, which is the same on
    every rank; others by their shape and a sample of their values. Under `torch.func` the gradients
    are those of every level.
    """
    with tracker.pause():
        ys = list(chain.from_iterable(map(wrapped_tensors, results)))
        levels = [(i, x) for i, y in enumerate(tracker.outside) for x in wrapped_tensors(y)]
        edges = edges_in_graph(ys, [x for _, x in levels])
        names = {
            edge: str(i) if i < tracker.num_outside_at_read else _sample_text(x)
            for edge, (i, x) in zip(edges, levels, strict=True)
            if edge is not None
        }
        return _sums(ys, names, names.keys())


def _sample_text(x: torch.Tensor) -> str:
    flat = innermost(x).detach().reshape(-1)
    return f"{tuple(x.shape)} {flat[:: max(1, len(flat) // 4)].tolist()}"


def _sums(
    outputs: Iterable[torch.Tensor], names: Mapping[Edge, str], ends: Collection[Edge | None]
) -> str:
    """Return the collectives between outputs and named edges; graphs are followed up to `ends`."""
    bits = {edge: 1 << i for i, edge in enumerate(names)}
    roots = [edge_of(y) for y in outputs if y.requires_grad]
    masks = _reached([edge[0] for edge in roots if edge not in ends], bits, ends)
    senders = [node for node, mask in masks.items() if mask and _sends_backward(node)]
    texts = []
    for node in sorted(senders, key=sequence_number, reverse=True):
        reached = sorted(name for edge, name in names.items() if masks[node] & bits[edge])
        texts.append(" ".join(reached))
    return "; ".join(texts)


def _reached(
    roots: Iterable[Any], bits: Mapping[Edge, int], ends: Collection[Edge | None]
) -> dict[Any, int]:
    """Return for each node of a graph the bits of the edges that its cotangents reach."""
    masks: dict[Any, int] = {}
    todo = list(roots)
    while todo:
        node = todo[-1]
        edges = [] if node in masks else next_edges((node, 0))
        missing = [e[0] for e in edges if e not in ends and e[0] not in masks]
        if not missing:
            todo.pop()
            mask = masks.get(node, 0)
            for edge in edges:
                mask |= bits.get(edge, 0) | (0 if edge in ends else masks[edge[0]])
            masks[node] = mask
        todo += missing
    return masks


def _sends_backward(node: Any) -> bool:
    """Return True for the node of a collective whose transpose sends values."""
    function = getattr(node, "_forward_cls", None)
    if function is None or not function.__module__.startswith(("fshard.run.", "fshard.spmd.")):
        return False
    op = getattr(node, "op", None)
    match None if op is None else op.T:
        case ProgramGroup(progs=progs):
            return any(not prog.is_local for prog in progs)
        case ExitControl(sums=sums):
            return bool(sums)
        case LeaveControl(sums=sums, summed=summed):
            return bool(sums or summed)
        case EnterControl() | PickFirst():
            return False
    return True
