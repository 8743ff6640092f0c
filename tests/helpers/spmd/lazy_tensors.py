"""Collectives on tensors whose values are not their bytes in memory, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

import fshard as fs
from fshard import Mesh

MESH = Mesh(i=2)
Op = Callable[[torch.Tensor], torch.Tensor]

OPERANDS: dict[str, Op] = {
    "conjugate": lambda z: z.conj(),
    "negative": lambda z: z.conj().imag,
    "expanded": lambda z: z[:1].expand(2),
    "strided": lambda z: z.repeat(2)[::2],
    "adjoint": lambda z: torch.stack([z, z]).mH,
    "conjugate column": lambda z: torch.stack([z, z], 1)[:, 0].conj(),
}
OPERATIONS: dict[str, Op] = {
    "psum": lambda y: fs.psum(y, "i", mesh=MESH),
    "pmean": lambda y: fs.pmean(y, "i", mesh=MESH),
    "pprod": lambda y: fs.pprod(y, "i", mesh=MESH),
    "ppermute": lambda y: fs.ppermute(y, "i", [(0, 1), (1, 0)], mesh=MESH),
    "pbroadcast": lambda y: fs.pbroadcast(y, "i", 0, mesh=MESH),
    "pcast": lambda y: fs.pcast(y, "i", to="varying", mesh=MESH),
    "all_gather": lambda y: fs.all_gather(y, "i", mesh=MESH),
    "all_to_all": lambda y: fs.all_to_all(y, "i", 0, 0, tiled=True, mesh=MESH),
    "psum_scatter": lambda y: fs.psum_scatter(y, "i", tiled=True, mesh=MESH),
}


def results() -> dict[str, list[torch.Tensor]]:
    """Return values, gradients, and gradients of lazy cotangents; of the last of three calls."""
    outputs = {}
    for (operand, view), (name, op) in (
        (a, b) for a in OPERANDS.items() for b in OPERATIONS.items() for _ in range(3)
    ):
        z = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128, requires_grad=True)
        y = op(view(z))
        ones = torch.ones_like(y)
        lazy = ones.conj() if y.is_complex() else torch.complex(ones, -ones).conj().imag
        values = [
            y.detach(),
            *torch.autograd.grad(y.abs().square().sum(), z, retain_graph=True),
            *torch.autograd.grad(y, z, lazy),
        ]
        outputs[f"{name} of {operand}"] = [x.resolve_conj().resolve_neg() for x in values]
    return outputs


def on_rank() -> dict[str, list[torch.Tensor]]:
    fs.init(MESH)
    return results()
