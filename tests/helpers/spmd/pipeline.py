"""A pipeline of stages, one per rank, fed with micro-batches that every rank holds."""

from __future__ import annotations

import torch

import fshard as fs
from fshard import Mesh, P

Check = bool | str


def pipeline(mesh: Mesh, check: Check, *, cast: bool) -> list[torch.Tensor]:
    """Return results of a pipeline, and the gradients of its weights and its micro-batches.

    `cast` has the body cast the micro-batches to varying before the first stage reads them.
    """
    n, weights, batches = mesh.size, *inputs(mesh)

    def stages(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        index, outputs, state = fs.axis_index("i"), [], torch.zeros((), dtype=x.dtype)
        x = fs.pcast(x, "i", to="varying") if cast else x
        for step in range(len(x) + n - 1):
            y = torch.tanh(w[0] * torch.where(index == 0, x[min(step, len(x) - 1)], state))
            if step >= n - 1:
                outputs.append(torch.where(index == n - 1, y, 0.0))
            state = fs.ppermute(y, "i", [(i, i + 1) for i in range(n - 1)])
        return fs.psum(torch.stack(outputs), "i")

    specs = (P("i"), P())
    y = fs.shard_map(stages, mesh=mesh, in_specs=specs, out_specs=P(), check=check)(
        weights, batches
    )
    return [y.detach(), *torch.autograd.grad(y.sum(), (weights, batches))]


def inputs(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.linspace(0.5, 1.0, mesh.size, dtype=torch.float64)
    batches = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return weights.requires_grad_(), batches.requires_grad_()


def on_one_device(mesh: Mesh) -> list[torch.Tensor]:
    """Return the expected results of `pipeline`, of all stages in turn."""
    weights, batches = inputs(mesh)
    y = batches
    for w in weights:
        y = torch.tanh(w * y)
    return [y.detach(), *torch.autograd.grad(y.sum(), (weights, batches))]
