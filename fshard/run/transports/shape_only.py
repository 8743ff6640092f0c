"""Transport for meta and fake tensors: results have the right shape and dtype, nothing is sent.

A model can therefore be traced without ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from fshard._torch.fake_tensors import FakeTensor, is_recording
from fshard._util.errors import fail
from fshard.layout.mesh import Mesh
from fshard.run.transports.base import LABEL, Finish, Group, current_transport

_META_IS_REAL: ContextVar[bool] = ContextVar("fshard_meta_is_real", default=False)


@contextmanager
def meta_as_real() -> Iterator[None]:
    """Treat meta tensors as real ones in the block, since their operations are recorded."""
    token = _META_IS_REAL.set(True)
    try:
        yield
    finally:
        _META_IS_REAL.reset(token)


def is_abstract(x: torch.Tensor) -> bool:
    """Return True if `x` is a meta or fake tensor that no recording treats as a real one.

    >>> is_abstract(torch.empty(2, device="meta")), is_abstract(torch.empty(2))
    (True, False)
    """
    if not x.is_meta and not isinstance(x, FakeTensor):
        return False
    return not _META_IS_REAL.get() and not torch.compiler.is_compiling()


@dataclass(frozen=True, slots=True)
class ShapeTransport:
    """Transport that sends nothing: every result is zeros of the right shape."""

    rank: int

    def accepts(self, device: torch.device) -> bool:
        """Return True: it accepts tensors of every device."""
        return True

    def all_gather(self, x: torch.Tensor, group: Group) -> Finish:
        """Return a tensor with a new dim 0, one row per rank."""
        return lambda: x.new_zeros((len(group), *x.shape))

    def all_reduce(
        self, x: torch.Tensor, reduction: str, group: Group, *, owned: bool = False
    ) -> Finish:
        """Return a tensor of the same shape."""
        return lambda: x.new_zeros(x.shape)

    def reduce_scatter(self, x: torch.Tensor, reduction: str, group: Group) -> Finish:
        """Return a tensor of the shape without dim 0."""
        return lambda: x.new_zeros(x.shape[1:])

    def all_to_all(
        self, x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Finish:
        """Return a flat tensor of `sum(receive)` elements."""
        return lambda: x.new_zeros(sum(receive))


def shape_transport(mesh: Mesh, where: str) -> ShapeTransport:
    """Return the transport for abstract tensors on this rank, or on the mesh's first rank.

    Raises:
        ShardingError: while a graph is recorded, whose constants the zeros would be.
    """
    if is_recording():
        label = LABEL.get()
        fail(
            where if label is None else label.name,
            f"communication over {mesh} in a function that is traced",
            "a traced function must compute on global tensors; its collectives are planned for it",
            "fs.shard_map(body, mesh=mesh, in_specs=..., out_specs=...)(x) in it, whose body calls "
            "the collective",
        )
    transport = current_transport()
    return ShapeTransport(mesh.ranks[0] if transport is None else transport.rank)
