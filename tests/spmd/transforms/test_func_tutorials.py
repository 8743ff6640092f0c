"""Computations of PyTorch's tutorials of `torch.func`, with sharded batches and models.

A gradient for an invariant value is the sum over the ranks, as in JAX; that of each rank's own
samples is the gradient for a varying copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import functional as autograd_functional
from torch.func import (
    functional_call,
    grad,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
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


# -- around a model whose features are sharded ----------------------------------------------------


def predict(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    return functional.linear(x, weight, bias).tanh()


def mapped_predict(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    features = P(*[None] * (x.ndim - 1), "x")
    specs = P("x"), P("x"), P()
    mapped = fs.shard_map(predict, mesh=MESH, in_specs=specs, out_specs=features)
    result: Tensor = mapped(weight, bias, x)
    return result


D = 4
ROWS = torch.randn(3, D, dtype=torch.float64)
WEIGHT, BIAS, ROW = torch.randn(D, D, dtype=torch.float64), ROWS[1].cos(), ROWS[0]
ARGS = WEIGHT, BIAS, ROW
PREDICTIONS: dict[str, Callable[..., Tensor]] = {
    "mapped": mapped_predict,
    "partition": fs.partition(predict, mesh=MESH, in_specs=(P("x"), P("x"), P())),
}


def by_rows(f: Any) -> Tensor:
    x = ROW.clone().requires_grad_()
    y = f(WEIGHT, BIAS, x)
    eye = torch.eye(D, dtype=y.dtype)
    return torch.stack([torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in eye])


def scalar(f: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: f(WEIGHT, BIAS, x).sin().sum()


JACOBIANS: dict[str, Callable[[Any], Any]] = {
    "rows": by_rows,
    "vmap of vjp": lambda f: vmap(vjp(partial(f, WEIGHT, BIAS), ROW)[1])(torch.eye(D).double()),
    "jacrev": lambda f: jacrev(f, (0, 1))(*ARGS),
    "jacfwd": lambda f: jacfwd(f, (0, 1, 2))(*ARGS),
    "hessian": lambda f: hessian(f, (0, 1, 2))(*ARGS),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f, 2), 2)(*ARGS),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f, 2), 2)(*ARGS),
    "summed batch": lambda f: jacrev(lambda x: f(WEIGHT, BIAS, x).sum(0))(ROWS).movedim(1, 0),
    "batch": lambda f: vmap(jacrev(f, 2, chunk_size=2), (None, None, 0))(WEIGHT, BIAS, ROWS),
    "batch of hessians": lambda f: vmap(hessian(f, 2), (None, None, 0))(WEIGHT, BIAS, ROWS),
    "batch of hvp": lambda f: vmap(lambda t: jvp(grad(scalar(f)), (ROW,), (t,))[1])(ROWS),
    "hvp by vjp": lambda f: vjp(grad(scalar(f)), ROW)[1](ROWS[1]),
    "jacrev with values": lambda f: jacrev(lambda x: (f(WEIGHT, BIAS, x),) * 2, has_aux=True)(ROW),
    "vhp": lambda f: autograd_functional.vhp(scalar(f), ROW, ROWS[1]),
    "hvp": lambda f: autograd_functional.hvp(scalar(f), ROW, ROWS[1]),
    "vectorized": lambda f: autograd_functional.hessian(scalar(f), ROW, vectorize=True),
}


@pytest.mark.parametrize("place", PREDICTIONS)
@pytest.mark.parametrize("name", JACOBIANS)
def test_jacobians_of_sharded_features(name: str, place: str) -> None:
    close(JACOBIANS[name](PREDICTIONS[place]), JACOBIANS[name](predict))


@pytest.mark.parametrize("place", PREDICTIONS)
def test_batches_of_tangents_of_the_older_vmap_are_refused(place: str) -> None:
    f, forward = scalar(PREDICTIONS[place]), "forward-mode"
    for run in (
        lambda: autograd_functional.jacobian(f, ROW, vectorize=True, strategy=forward),
        lambda: autograd_functional.hessian(
            f, ROW, vectorize=True, outer_jacobian_strategy=forward
        ),
    ):
        with pytest.raises(fs.ShardingError, match=r"torch.func.jacfwd\(f\)\(x\)"):
            run()


def classify(params: Any, x: Tensor) -> Tensor:
    logits: Tensor = functional_call(NETS[0], params, (x,))
    return logits


CLASSES = {name: P("x") if name.startswith("fc") else P() for name in PARAMS}
CLASSIFIERS: dict[str, Callable[..., Tensor]] = {
    "mapped": fs.shard_map(
        lambda params, x: functional_call(NETS[0], params, (x,)),
        mesh=MESH, in_specs=(CLASSES, P()), out_specs=P(None, "x"),
    ),
    "partition": fs.partition(classify, mesh=MESH, in_specs=(CLASSES, P())),
}  # fmt: skip


@pytest.mark.parametrize("place", CLASSIFIERS)
def test_transforms_around_sharded_classifiers(place: str) -> None:
    params, _ = stack_module_state(NETS)  # type: ignore[arg-type]
    ensemble = {name: p.detach() for name, p in params.items()}

    def results(f: Any) -> list[Any]:
        one = lambda p, x: f(p, x[None])[0]  # noqa: E731
        loss = lambda p, x, y: functional.cross_entropy(one(p, x), y)  # noqa: E731
        total = lambda p: functional.cross_entropy(f(p, IMAGES), LABELS)  # noqa: E731
        return [
            vmap(grad(loss), (None, 0, 0))(PARAMS, IMAGES, LABELS),
            vmap(f, (0, None))(ensemble, IMAGES),
            vmap(grad(total))(ensemble),
            jvp(grad(total), (PARAMS,), (PARAMS,)),
            tangent_kernel(one, PARAMS, IMAGES, IMAGES[:2]),
            kernel_by_products(one, PARAMS, IMAGES[:2], IMAGES[:2]),
        ]

    close(results(CLASSIFIERS[place]), results(classify))
