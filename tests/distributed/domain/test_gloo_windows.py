"""Windowed operations and a UNet on four processes: the values and gradients of one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.gloo.harness import run_ranks
from tests.helpers.ops.blocks import image, unet

F64 = torch.float64
SIZES = {2: (2, 7), 3: (6, 1)}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any], list[tuple[int, ...]]]] = {
    "conv2d": ((None, 2, 1), {}, [(3, 2, 3, 3)]),
    "conv_transpose2d": ((None, 2, 1, 1), {}, [(2, 3, 4, 3)]),
    "avg_pool2d": ((3, 2, 1), {"ceil_mode": True}, []),
    "max_pool2d": ((3, 1, 1), {"dilation": 2}, []),
    "adaptive_avg_pool2d": (((4, 3),), {}, []),
    "interpolate": ((), {"scale_factor": 1.5, "mode": "bicubic"}, []),
    "pad": (((2, 1, 1, 2),), {"mode": "reflect"}, []),
}


def errors_on_rank() -> dict[str, float]:
    """Return the largest differences to one device of values and gradients, by function."""
    mesh = Mesh(h=2, w=2)
    fs.init(mesh)
    x = torch.randn(2, 2, 9, 7, dtype=F64, requires_grad=True)
    spec = Spec(mesh, P(None, None, "h", "w"), shape=x.shape, dtype=F64, sizes=SIZES)
    errors = {}
    for name, (args, options, shapes) in CALLS.items():
        tensors = [x, *(torch.randn(s, dtype=F64, requires_grad=True) for s in shapes)]
        pair = getattr(fs.domain, name)(fs.shard(x, spec), *tensors[1:], *args, **options)
        errors[name] = difference(fs.unshard(pair), getattr(F, name)(*tensors, *args, **options),
                                  tensors)  # fmt: skip
    queries = [torch.randn(1, 9, 7, 2, 3, dtype=F64, requires_grad=True) for _ in range(3)]
    rows = Spec(mesh, P(None, "h", "w"), shape=queries[0].shape, dtype=F64,
                sizes={1: SIZES[2], 2: SIZES[3]})  # fmt: skip
    na2d: Any = fs.domain.na2d
    attended = fs.unshard(
        na2d(*[fs.shard(q, rows) for q in queries], (3, 5), is_causal=(True, False))
    )
    expected = na2d(*queries, (3, 5), is_causal=(True, False))
    errors["na2d"] = difference(attended, expected, queries)
    model, batch = unet(), image(12, 8)
    batch_spec = Spec(mesh, P(None, None, "h", "w"), shape=batch.shape, dtype=F64,
                      sizes={2: (5, 7), 3: (2, 6)})  # fmt: skip
    part = fs.partition(model, mesh=mesh, params=P(), in_specs=batch_spec)
    params = dict(model.named_parameters())
    errors["UNet"] = difference(part(params, batch), model(batch), [*params.values()])
    return errors


def difference(actual: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> float:
    weight = torch.arange(float(expected.numel()), dtype=F64).view(expected.shape).cos()
    grads = [torch.autograd.grad((y * weight).sum(), inputs) for y in (actual, expected)]
    pairs = [(actual, expected), *zip(*grads, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def test_four_processes() -> None:
    for errors in run_ranks(4, errors_on_rank):
        assert {*errors} == {*CALLS, "na2d", "UNet"}
        assert max(errors.values()) < 1e-9, errors


def repeated_errors_on_rank() -> float:
    """Return the largest error of a convolution's gradients, of both orders, in repeated calls.

    From the third call on its collectives are replayed, those of its parameters between two nodes.
    """
    mesh = Mesh(h=4)
    fs.init(mesh)
    spec = Spec(mesh, P(None, None, "h"), shape=(2, 2, 9, 4), dtype=F64, uneven="chunk")
    x = fs.random.normal(fs.random.key(0), spec.shape, dtype=F64).requires_grad_()
    weight = fs.random.normal(fs.random.key(1), (3, 2, 3, 3), dtype=F64).requires_grad_()
    bias = torch.ones(3, dtype=F64, requires_grad=True)
    inputs = [x, weight, bias]

    def gradients(run: Any) -> list[torch.Tensor]:
        y = run()
        first = torch.autograd.grad(y.cos().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        (again,) = torch.autograd.grad(run().cos().sum(), [weight])
        return [y, *first, *second, again]

    errors = [0.0]
    expected = gradients(lambda: F.conv2d(*inputs, padding=1))
    for _ in range(5):
        actual = gradients(
            lambda: fs.unshard(fs.domain.conv2d(fs.shard(x, spec), weight, bias, padding=1))
        )
        errors += [float((a - b).detach().abs().max())
                   for a, b in zip(actual, expected, strict=True)]  # fmt: skip
    return max(errors)


def test_repeated_convolutions() -> None:
    assert max(run_ranks(4, repeated_errors_on_rank)) < 1e-10
