"""Programs on locals whose sizes are symbols, in graphs of `torch.compile`: they move blocks.

A program of even shards does to a long dim what it does to a short one, with blocks of equal size
in the place of elements: on sizes that are r times as long it is the same program, times the
identity on blocks of r. Specs, plans and caches therefore have integers only: a symbol is one block
(or one for each shard), and the size of blocks is the symbol that tensors have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from fshard._torch.symbolic_numbers import has_symbolic_sizes
from fshard.program.program import Program
from fshard.run.collective import Wire
from fshard.run.interpreter import stages
from fshard.run.transports.base import Finish, Transport, stacked
from fshard.run.transports.observed_calls import notify_collective

Sizes = Sequence[int]
"""Sizes of dims, integers or symbols."""
NO_COUNTS: Mapping[int, int] = {}


def block_shape(x: torch.Tensor, counts: Mapping[int, int] = NO_COUNTS) -> torch.Size:
    """Return the shape with which programs on `x` are planned.

    Args:
        x: the local, or the global tensor.
        counts: the numbers of blocks of dims, which divide their sizes; of others it is one.

    Returns:
        The shape of `x` itself if all sizes are integers, else the numbers of blocks.

    >>> block_shape(torch.zeros(4, 3), {0: 2})
    torch.Size([4, 3])
    """
    if not has_symbolic_sizes(x):
        return x.shape
    return torch.Size([counts.get(dim, 1) for dim in range(x.ndim)])


def launch_on_blocks(prog: Program, transport: Transport, x: torch.Tensor) -> Finish:
    """Run a program on this rank's local, in blocks, up to the start of its last collective.

    The sizes of the program's local divide those of `x`.
    """
    counts = prog.src.local_shape(transport.rank)
    sizes = [size // count for size, count in zip(x.shape, counts, strict=True)]
    blocks = _split(x, counts, sizes)
    finish: Finish = lambda: blocks  # noqa: E731
    for stage in stages(prog, transport.rank):
        if isinstance(stage, Wire):
            finish = _launch_wire(stage, finish(), sizes, transport)
        else:
            finish = partial(_apply, _on_blocks(stage, sizes), finish)
    return lambda: _merge(finish(), sizes)


def _apply(function: Callable[..., torch.Tensor], finish: Finish) -> torch.Tensor:
    return function(finish())


def _split(x: torch.Tensor, counts: Sizes, sizes: Sizes) -> torch.Tensor:
    """Split each dim into blocks; the numbers of blocks are the first dims, sizes the last ones."""
    for dim in reversed(range(x.ndim)):
        is_one = counts[dim] == 1
        x = x.unsqueeze(dim) if is_one else x.unflatten(dim, (counts[dim], sizes[dim]))
    return x.permute(*range(0, x.ndim, 2), *range(1, x.ndim, 2))


def _merge(y: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Merge blocks into dims: the inverse of `_split`, for a program's result."""
    n = len(sizes)
    order = chain.from_iterable(zip(range(n), range(n, 2 * n), strict=True))
    shape = [count * size for count, size in zip(y.shape[:n], sizes, strict=True)]
    return y.permute(*order).reshape(shape)


def _on_blocks(function: Callable[..., Any], sizes: Sizes) -> Callable[..., Any]:
    """Return a function of tensors of the blocks' numbers, mapped over the last dims."""
    for _ in sizes:
        function = torch.func.vmap(function, -1, -1)
    return function


def _launch_wire(wire: Wire, x: torch.Tensor, sizes: Sizes, transport: Transport) -> Finish:
    """Launch a collective on blocks; see `launch_wire`."""
    payload = _on_blocks(wire.pack, sizes)(x)
    shape, size = payload.shape, math.prod(sizes)
    sent = wire.sent * size * x.element_size()
    notify_collective(wire.name, wire.axes, sent, transport.rank)
    moved: Callable[[], Any]
    match wire.op:
        case "all_gather":
            gathered = transport.all_gather(payload, wire.group)
            moved = lambda: stacked(gathered(), shape)  # noqa: E731
        case "all_reduce":
            reduced = transport.all_reduce(payload, wire.reduction, wire.group)
            moved = lambda: reduced().view(shape)  # noqa: E731
        case "reduce_scatter":
            scattered = transport.reduce_scatter(payload, wire.reduction, wire.group)
            moved = lambda: scattered().view(shape[1:])  # noqa: E731
        case "all_to_all":
            send, receive = ([n * size for n in ns] for ns in (wire.send, wire.receive))
            received = transport.all_to_all(payload.reshape(-1), send, receive, wire.group)
            moved = lambda: received().view(sum(wire.receive), *sizes)  # noqa: E731
    unpack = _on_blocks(wire.unpack, sizes)
    return lambda: unpack(moved(), x)
