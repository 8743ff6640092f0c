"""Wire dtypes of collectives: one for the forward direction, one for the transpose.

They are the options of `redistribute`. Tensors are cast once before they are sent and once after;
sums are computed in the wire dtype, and results have the dtype of the argument. A direction that
sends nothing is not cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fshard._util.errors import Problem, raise_if
from fshard.layout.mesh import Mesh
from fshard.program.program_arguments import can_carry
from fshard.run.autograd.linear_function import FinishAll, LinearOp, Tensors
from fshard.run.transports.base import Transport

WireDtypes = tuple[torch.dtype | None, torch.dtype | None]
"""Dtypes of forward and transpose; None is the tensor's own."""

NO_WIRE_DTYPES: WireDtypes = (None, None)


def wire_dtype_problems(dtype: torch.dtype, wires: WireDtypes) -> list[Problem]:
    """Return a problem for each wire dtype that cannot represent values of `dtype`."""
    options = zip(("forward_dtype", "backward_dtype"), wires, strict=True)
    return [
        Problem(
            f"{option}={wire!r} of a tensor of {dtype}",
            "the dtype sent must be of the same kind: floating for floating, integer for integer",
            f"leave {option} out, or cast the tensor first",
        )
        for option, wire in options
        if wire is not None and not can_carry(wire, dtype)
    ]


def check_wire_dtypes(where: str, dtype: torch.dtype, wires: WireDtypes) -> None:
    """Raise `ShardingError` for wire dtypes that cannot represent values of `dtype`."""
    if wires != NO_WIRE_DTYPES:
        raise_if(where, wire_dtype_problems(dtype, wires))


@dataclass(frozen=True, slots=True)
class CastOp:
    """Linear operation whose locals are sent in other dtypes."""

    op: LinearOp
    wires: WireDtypes

    @property
    def mesh(self) -> Mesh:
        """Mesh whose ranks take part."""
        return self.op.mesh

    @property
    def T(self) -> CastOp:  # noqa: N802 - the mathematical name
        """Return the transpose."""
        return CastOp(self.op.T, self.wires[::-1])

    def wider(self, n: int) -> CastOp:
        """Return the operation on tensors with a last dim of size `n` more."""
        return CastOp(self.op.wider(n), self.wires)

    def launch(self, transport: Transport, xs: Tensors) -> FinishAll:
        """Start the operation on locals of this rank."""
        wire = self.wires[0]
        if wire is None:
            return self.op.launch(transport, xs)
        finish = self.op.launch(transport, tuple(x.to(wire) for x in xs))
        dtypes = [x.dtype for x in xs]
        return lambda: tuple(y.to(dtype) for y, dtype in zip(finish(), dtypes, strict=True))


def send_in(op: LinearOp, wires: WireDtypes) -> LinearOp:
    """Return `op` with its locals sent in other dtypes; programs have options of their own."""
    return op if wires == NO_WIRE_DTYPES else CastOp(op, wires)
