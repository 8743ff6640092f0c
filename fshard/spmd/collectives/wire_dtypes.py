"""The dtypes that a collective sends: one forward, one in its transpose.

The option of `redistribute`, for collectives: what is sent is cast once before and once after,
sums are formed in the dtype that is sent, results have the dtype of the argument. A direction
in which nothing is sent is not cast at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fshard._util.errors import Problem, raise_if
from fshard.layout.mesh import Mesh
from fshard.program.program import carries
from fshard.run.autograd.linear_function import FinishAll, Linear, Shards
from fshard.run.transports.base import Transport

__all__ = ["NO_WIRE_DTYPES", "WireDtypes", "check_wires", "send_in", "wire_problems"]

WireDtypes = tuple[torch.dtype | None, torch.dtype | None]
"""What is sent forward and in the transpose; `None` is the tensor's own dtype."""

NO_WIRE_DTYPES: WireDtypes = (None, None)


def wire_problems(dtype: torch.dtype, wires: WireDtypes) -> list[Problem]:
    """What is wrong with dtypes that do not hold the values of one of `dtype`."""
    words = zip(("forward_dtype", "backward_dtype"), wires, strict=True)
    return [
        Problem(
            f"{word}={wire!r} of a tensor of {dtype}",
            "what is sent holds the values: floating for floating, integers for integers",
            f"leave {word} out, or cast the tensor first",
        )
        for word, wire in words
        if wire is not None and not carries(wire, dtype)
    ]


def check_wires(where: str, dtype: torch.dtype, wires: WireDtypes) -> None:
    """Raise `ShardingError` for dtypes that do not hold the values of one of `dtype`."""
    if wires != NO_WIRE_DTYPES:
        raise_if(where, wire_problems(dtype, wires))


@dataclass(frozen=True, slots=True)
class _Sent:
    """A linear operation whose locals travel in other dtypes."""

    op: Linear
    wires: WireDtypes

    @property
    def mesh(self) -> Mesh:
        return self.op.mesh

    @property
    def T(self) -> _Sent:  # noqa: N802 - the mathematical name
        return _Sent(self.op.T, self.wires[::-1])

    def wider(self, n: int) -> _Sent:
        return _Sent(self.op.wider(n), self.wires)

    def launch(self, transport: Transport, xs: Shards) -> FinishAll:
        wire = self.wires[0]
        if wire is None:
            return self.op.launch(transport, xs)
        moved = self.op.launch(transport, tuple(x.to(wire) for x in xs))
        dtypes = [x.dtype for x in xs]
        return lambda: tuple(y.to(dtype) for y, dtype in zip(moved(), dtypes, strict=True))


def send_in(op: Linear, wires: WireDtypes) -> Linear:
    """`op` with its locals sent in other dtypes; a program takes them itself."""
    return op if wires == NO_WIRE_DTYPES else _Sent(op, wires)
