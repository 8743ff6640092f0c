"""Collectives of tensors without numbers: shapes and dtypes, and nothing is sent.

Meta and fake tensors go through the same programs as others, over a transport that makes an
empty result of the right shape. So a model can be traced without ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fshard.layout.mesh import Mesh
from fshard.run.transports.base import Finish, Group, current_transport

__all__ = ["Shapes", "is_abstract", "shapes_of", "standing_in"]

_STANDING_IN: ContextVar[bool] = ContextVar("fshard_standing_in", default=False)


@contextmanager
def standing_in() -> Iterator[None]:
    """Take tensors without numbers for real ones in the block: its operations are recorded."""
    token = _STANDING_IN.set(True)
    try:
        yield
    finally:
        _STANDING_IN.reset(token)


def is_abstract(x: torch.Tensor) -> bool:
    """Whether a tensor has a shape and a dtype but no numbers, and stands for nothing but them.

    Where operations are recorded to run later, by `torch.compile` too, it stands for a real one.

    >>> is_abstract(torch.empty(2, device="meta")), is_abstract(torch.empty(2))
    (True, False)
    """
    if not x.is_meta and not isinstance(x, FakeTensor):
        return False
    return not _STANDING_IN.get() and not torch.compiler.is_compiling()


@dataclass(frozen=True, slots=True)
class Shapes:
    """A transport that moves nothing: every result is an empty tensor of the right shape."""

    rank: int

    def moves(self, device: torch.device) -> bool:
        """Whether it can move tensors of a device: all of them."""
        return True

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        """As many as there are ranks, along a new dim 0."""
        return lambda: x.new_empty((len(group), *x.shape))

    def all_reduce(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        """The same shape."""
        return lambda: x.new_empty(x.shape)

    def reduce_scatter(self, x: torch.Tensor, op: str, group: Group) -> Finish:
        """The shape without dim 0."""
        return lambda: x.new_empty(x.shape[1:])

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """As many elements as are received."""
        return lambda: x.new_empty(sum(receive))


def shapes_of(mesh: Mesh) -> Shapes:
    """The transport for abstract tensors: of this rank, outside of ranks of the mesh's first."""
    transport = current_transport()
    return Shapes(mesh.ranks[0] if transport is None else transport.rank)
