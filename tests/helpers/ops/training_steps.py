"""A loss of two layers, their parameters, and a training step that writes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.helpers.ops.block_cases import sample
from tests.helpers.ops.blocks import Params


def layer_params() -> Params:
    """Return the parameters of two layers."""
    return {"a": sample(4, 8).detach(), "b": sample(8, 4).detach()}


def loss(p: Params, x: Tensor) -> Tensor:
    """Return the mean square of two layers' outputs."""
    return ((x @ p["a"]).relu() @ p["b"]).square().mean()


def in_place_step(p: Params, x: Tensor) -> Any:
    """Write the parameters by a gradient step, and return the loss."""
    value = loss(p, x)
    grads = torch.autograd.grad(value, list(p.values()))
    with torch.no_grad():
        for param, grad in zip(p.values(), grads, strict=True):
            param.sub_(0.1 * grad)
    return value.detach()
