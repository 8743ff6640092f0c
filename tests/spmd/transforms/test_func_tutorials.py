"""Computations of PyTorch's tutorials of `torch.func`, with sharded batches and models.

A gradient for an invariant value is the sum over the ranks, as in JAX; that of each rank's own
samples is the gradient for a varying copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn import functional

import fshard as fs
from fshard import Mesh, P
from tests.helpers.spmd.transform_cases import close

MESH = Mesh(x=2)


class Net(nn.Module):
    """A small convolutional classifier of 8 x 8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 3, 3), nn.Linear(27, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(functional.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1))
        return y


torch.manual_seed(0)
NETS = [Net().double() for _ in range(4)]
PARAMS = {name: p.detach() for name, p in NETS[0].named_parameters()}
IMAGES = torch.randn(4, 1, 8, 8, dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1, 2])


def varying(params: Any) -> Any:
    return fs.pcast(params, "x", to="varying")


def sample_loss(params: Any, image: Tensor, label: Tensor) -> Tensor:
    logits = functional_call(NETS[0], params, (image[None],))
    return functional.cross_entropy(logits, label[None])


def test_per_sample_gradients_of_a_sharded_batch() -> None:
    per_sample = vmap(grad(sample_loss), (None, 0, 0))
    specs = P(), P("x"), P("x")
    body = lambda p, x, y: per_sample(varying(p), x, y)  # noqa: E731
    mapped = fs.shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("x"))
    close(mapped(PARAMS, IMAGES, LABELS), per_sample(PARAMS, IMAGES, LABELS))


def test_ensembles_of_sharded_models() -> None:
    params, buffers = stack_module_state(NETS)  # type: ignore[arg-type]
    plain = {name: p.detach() for name, p in params.items()}
    predict = lambda p, b, x: functional_call(NETS[0], (p, b), (x,))  # noqa: E731
    ensemble = vmap(predict, (0, 0, None))
    mapped = fs.shard_map(ensemble, mesh=MESH, in_specs=(P("x"), P("x"), P()), out_specs=P("x"))
    close(mapped(plain, buffers, IMAGES), ensemble(plain, buffers, IMAGES))
    minibatches = vmap(predict)
    mapped = fs.shard_map(minibatches, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    batches = torch.stack([IMAGES * i for i in range(4)])
    close(mapped(plain, buffers, batches), minibatches(plain, buffers, batches))


def tangent_kernel(f: Any, params: Any, x1: Tensor, x2: Tensor) -> Tensor:
    """Return the kernel as contractions of Jacobians."""
    first, second = (vmap(jacrev(f), (None, 0))(params, x) for x in (x1, x2))
    parts = [
        torch.einsum("Naf,Mbf->NMab", first[name].flatten(2), second[name].flatten(2))
        for name in params
    ]
    return torch.stack(parts).sum(0)


def kernel_by_products(f: Any, params: Any, x1: Tensor, x2: Tensor) -> Tensor:
    """Return the kernel as products of one Jacobian with those of the other."""

    def entry(x1: Tensor, x2: Tensor) -> Tensor:
        output, back = vjp(lambda p: f(p, x1), params)
        eye = torch.eye(len(output), dtype=output.dtype)
        column = lambda v: jvp(lambda p: f(p, x2), (params,), back(v))[1]  # noqa: E731
        result: Tensor = vmap(column)(eye)
        return result

    result: Tensor = vmap(vmap(entry, (None, 0)), (0, None))(x1, x2)
    return result


def test_neural_tangent_kernels_of_sharded_images() -> None:
    one = lambda p, x: functional_call(NETS[0], p, (x[None],))[0]  # noqa: E731
    expected = tangent_kernel(one, PARAMS, IMAGES, IMAGES[:2])
    for kernel in (tangent_kernel, kernel_by_products):
        mapped = fs.shard_map(
            lambda a, b, kernel=kernel: kernel(one, varying(PARAMS), a, b), mesh=MESH,
            in_specs=(P("x"), P()), out_specs=P("x"),
        )  # fmt: skip
        close(mapped(IMAGES, IMAGES[:2]), expected)
