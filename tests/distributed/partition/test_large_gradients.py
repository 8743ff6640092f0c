"""Large gradients are reduced in place where nothing else has them, and copied elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks

MESH = Mesh(x=2)
OUT, IN = SHAPE = (1024, 2048)
"""Shape of a weight of 8 MiB in float32."""
SHAPES = {"first": (IN, OUT), "second": SHAPE, "third": SHAPE, "bias": (OUT,)}
Gradients = dict[str, torch.Tensor]


def parameters() -> Gradients:
    generator = torch.Generator().manual_seed(2)
    return {k: torch.randn(s, generator=generator) / 32 for k, s in SHAPES.items()}


def batch() -> torch.Tensor:
    return torch.randn(4, IN, generator=torch.Generator().manual_seed(3))


def loss(params: Gradients, x: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradients of the first two weights are one tensor and its transpose."""
    shared = (params["first"].T + params["second"]) * x.mean()
    return shared.square().sum() + F.linear(x, params["third"], params["bias"]).square().sum()


def partitioned() -> tuple[Gradients, torch.Tensor]:
    """Return parameters of this rank and their loss, partitioned by the batch."""
    fs.init(MESH)
    params = {k: x.requires_grad_() for k, x in parameters().items()}
    pairs = {k: fs.Sharded(x, fs.Spec(MESH, P(), shape=x.shape)) for k, x in params.items()}
    part = fs.partition(loss, mesh=MESH, in_specs=(P(), P("x")), out_specs=P())
    return params, part(pairs, fs.shard(batch(), fs.Spec(MESH, P("x"), shape=(4, IN)))).local


def check(grads: Gradients) -> None:
    wants = {k: x.requires_grad_() for k, x in parameters().items()}
    loss(wants, batch()).backward()
    for name, want in wants.items():
        torch.testing.assert_close(grads[name], want.grad, rtol=1e-4, atol=1e-4)


def gradients_and_copies() -> tuple[Gradients, list[str]]:
    """Return the gradients, and the operations that copied a weight in the backward pass."""
    params, total = partitioned()
    total.backward(retain_graph=True)
    for x in params.values():
        x.grad = None
    with torch.profiler.profile(record_shapes=True) as profile:
        total.backward()
    names = [
        event.name
        for event in profile.events() or ()
        if event.name in ("aten::copy_", "aten::_foreach_copy_")  # a clone has one, too
        and [*SHAPE] in event.input_shapes
    ]
    return {k: x.grad for k, x in params.items() if x.grad is not None}, names


def test_a_gradient_that_nothing_else_has_is_reduced_in_place() -> None:
    for grads, copies in run_ranks(2, gradients_and_copies):
        check(grads)
        # The first two are one tensor and its transpose, and are copied, as the square in their
        # derivative; the third is not.
        assert len(copies) == 3, copies


def gradient_of_given_cotangents() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return cotangents before and after a backward pass that hands them on, and the gradient."""
    fs.init(MESH)
    weight = parameters()["second"].requires_grad_()
    pair = fs.Sharded(weight, fs.Spec(MESH, P(), shape=SHAPE))
    part = fs.partition(lambda w, x: w + x, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
    x = fs.shard(torch.zeros(2, *SHAPE), fs.Spec(MESH, P("x"), shape=(2, *SHAPE)))
    y = part(pair, x).local
    cotangents = torch.ones_like(y)
    kept = cotangents.clone()
    y.backward(cotangents)
    assert weight.grad is not None
    return kept, cotangents, weight.grad


def test_given_cotangents_are_not_written() -> None:
    for kept, cotangents, grad in run_ranks(2, gradient_of_given_cotangents):
        assert torch.equal(kept, cotangents)
        assert torch.equal(grad, torch.full(SHAPE, 2.0))


def test_a_step_in_which_gradients_are_reduced_in_place_holds_them_once() -> None:
    spec = lambda p, *shape: fs.Spec(MESH, p, shape=shape)  # noqa: E731
    part = fs.partition(lambda w, x: F.linear(x, w).square().sum(), mesh=MESH)
    weights, rows = spec(P(), *SHAPE), spec(P("x"), 4, IN)
    memory = part.trace(weights, rows).memory()
    assert memory.peak < 2.1 * weights.local_nbytes(0)
