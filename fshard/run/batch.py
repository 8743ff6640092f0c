"""Several locals in one launch: laid side by side, moved as one, and taken apart again.

A program that is elementwise, or that touches the first dims alone, does to tensors laid side
by side what it does to each: so a tree of locals costs one collective. PyTorch's coalesced
collectives do the same inside of a backend; here it is a property of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from fshard.partition import PartitionSpec
from fshard.program.program import Program
from fshard.spec import Spec

__all__ = ["join", "joined", "part"]


def join(xs: Sequence[torch.Tensor], keep: int = 0) -> torch.Tensor:
    """Tensors of one dtype side by side: the first `keep` dims are common, the rest lies flat.

    >>> join([torch.zeros(2, 3), torch.zeros(2)], keep=1).shape
    torch.Size([2, 4])
    """
    flat = [x.reshape(*x.shape[:keep], math.prod(x.shape[keep:])) for x in xs]
    return flat[0] if len(flat) == 1 else torch.cat(flat, keep)


def part(
    flat: torch.Tensor, shapes: Sequence[Sequence[int]], keep: int = 0
) -> tuple[torch.Tensor, ...]:
    """What `join` laid side by side, taken apart; several are in memory of their own each."""
    if len(shapes) == 1:
        return (flat.reshape(tuple(shapes[0])),)
    widths = [math.prod(shape[keep:]) for shape in shapes]
    return tuple(
        piece.clone(memory_format=torch.contiguous_format).view(tuple(shape))
        for piece, shape in zip(flat.split(widths, keep), shapes, strict=True)
    )


@lru_cache(maxsize=1024)
def joined(progs: tuple[Program, ...], keep: int) -> Program:
    """The one program that does to locals laid side by side what `progs` do to each.

    They differ only in the dims from `keep` on, which none of their steps touches.
    """
    first = progs[0]
    src, p = first.src, first.src.partition
    width = sum(math.prod(prog.src.shape[keep:]) for prog in progs)
    sides = PartitionSpec._of((*p.dims[:keep], ()), p.unreduced_kinds, p.reduced_kinds)
    shape, sizes = (*src.shape[:keep], width), (*src.sizes[:keep], None)
    whole = Spec._of(src.mesh, sides, shape, src.dtype, sizes)
    return Program(
        whole,
        first.steps,
        forward_dtype=first.forward_dtype,
        backward_dtype=first.backward_dtype,
    )
