"""Statistics over sharded dims: one launch in each pass, and the precision of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import P

MESH = fs.Mesh(h=3)
SLOW = fs.Topology.of({"h": fs.Link(latency=1e-7, bandwidth=1e6)})
"""Bytes cost more than launches, so that nothing is gathered."""
SIZES = [(8, 8, 8), (15, 9, 0)]

NORMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "group_norm": (lambda x: F.group_norm(x, 2), (2, 4, 24, 3), 2),
    "instance_norm": (F.instance_norm, (2, 4, 24, 3), 2),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (2, 4, 24, 3), 2),
    "layer_norm": (lambda x: F.layer_norm(x, (24,)), (4, 24), 1),
    "layer_norm of two dims": (lambda x: F.layer_norm(x, (24, 3)), (4, 24, 3), 1),
    "rms_norm": (lambda x: F.rms_norm(x, (24,)), (4, 24), 1),
    "var": (lambda x: torch.var(x, 0), (24, 3), 0),
    "std_mean": (lambda x: torch.std_mean(x, correction=0), (24, 3), 0),
}


def pair_of(x: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> fs.Sharded:
    """Return a tensor with a dim sharded over `h`."""
    partition = P(*(None,) * dim, "h")
    return fs.shard(x, fs.Spec(MESH, partition, shape=x.shape, dtype=x.dtype, sizes={dim: sizes}))


def partitioned(norm: Callable[..., Any], x: fs.Sharded) -> Callable[..., Any]:
    """Return the norm partitioned for the layout of `x`."""
    return fs.partition(norm, mesh=MESH, in_specs=x.spec, topology=SLOW)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_one_launch_in_each_pass(name: str, sizes: tuple[int, ...]) -> None:
    norm, shape, dim = NORMS[name]
    x = pair_of(torch.randn(shape, generator=torch.Generator().manual_seed(0)), dim, sizes)
    call = partitioned(norm, x)
    with fs.comm_log() as log:
        leaf = fs.Sharded(tuple(local.detach().requires_grad_() for local in x.local), x.spec)
        outputs = call(leaf)
        first = outputs if isinstance(outputs, fs.Sharded) else outputs[0]
        torch.autograd.backward(first.local, [torch.randn_like(y) for y in first.local])
    assert log.forward.counts == {("all_reduce", "h"): 1}
    assert log.backward.counts.total() <= 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_to_second_order(name: str, sizes: tuple[int, ...]) -> None:
    norm, shape, dim = NORMS[name]
    generator = torch.Generator().manual_seed(1)
    x = pair_of(torch.randn(shape, generator=generator, dtype=torch.float64), dim, sizes)
    fs.testing.assert_like_one_device(
        partitioned(norm, x), norm, (x,), second_order=True, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_are_as_precise_as_on_one_device(
    name: str, dtype: torch.dtype, offset: float
) -> None:
    """Sums of squares in `dtype` would lose all digits where the mean exceeds the deviation."""
    norm, shape, dim = NORMS[name]
    generator = torch.Generator().manual_seed(2)
    values = (torch.randn(shape, generator=generator, dtype=torch.float64) + offset).to(dtype)
    x = pair_of(values, dim, (15, 9, 0))
    calls = (partitioned(norm, x)(x), norm(values), norm(values.double()))
    results = [call if isinstance(call, tuple) else (call,) for call in calls]
    for result, dense, reference in zip(*results, strict=True):
        error = (fs.unshard(result).double() - reference).abs().max()
        bound = (dense.double() - reference).abs().max()
        rounding = torch.finfo(dtype).eps * (offset + 16 * reference.abs().max())
        assert error <= 4 * bound + rounding + 2e-15 * offset**2


def test_variance_of_doubles_is_exact_for_large_means() -> None:
    values = torch.tensor([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 5], dtype=torch.float64).repeat(3)
    x = pair_of(values, 0, (4, 4, 4))
    result = partitioned(torch.var, x)(x)
    torch.testing.assert_close(fs.unshard(result), torch.var(values), rtol=1e-14, atol=0)
