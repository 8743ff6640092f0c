"""Faults that reviews of domain-parallel operations have found, beside one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fshard as fs
from fshard import P

F64 = torch.float64


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolation_of_bytes_rounds_as_on_one_device(mode: str) -> None:
    x = torch.randint(0, 255, (1, 3, 8, 8), dtype=torch.uint8)
    pair = fs.shard(x, fs.Mesh(h=2), P(None, None, "h"))
    y = fs.domain.interpolate(pair, scale_factor=2, mode=mode)
    assert torch.equal(fs.unshard(y), F.interpolate(x, scale_factor=2, mode=mode))


@pytest.mark.parametrize("pad", [(-1, 2, -2, 1), (0, 0, -1, 2), (2, -1, 1, 1), (-1, -1, 2, 2)])
def test_circular_padding_wraps_what_is_left_of_a_cropped_dim(pad: tuple[int, ...]) -> None:
    x = torch.randn(1, 2, 8, 8, dtype=F64, requires_grad=True)
    mesh = fs.Mesh(h=2, w=2)
    part = fs.partition(lambda x: F.pad(x, pad, mode="circular"), mesh=mesh,
                        in_specs=P(None, None, "h", "w"))  # fmt: skip
    expected = F.pad(x, pad, mode="circular")
    y = part(x)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad((y * weight).sum(), x),
        torch.autograd.grad((expected * weight).sum(), x),
    )


def test_halos_of_tensors_that_other_axes_shard() -> None:
    x = torch.randn(2, 2, 8, dtype=F64, requires_grad=True)
    layout = P("dp", None, "h")

    def body(x: Tensor) -> Tensor:
        wide = fs.domain.halo_exchange(x, {2: (1, 1)}, axis_name={2: "h"})
        return wide[..., 2:] - wide[..., :-2]

    mapped = fs.shard_map(body, mesh=fs.Mesh(dp=2, h=2), in_specs=layout, out_specs=layout)
    wide = F.pad(x, (1, 1))
    torch.testing.assert_close(mapped(x), wide[..., 2:] - wide[..., :-2])
    assert torch.autograd.gradcheck(mapped, (x,))


@pytest.mark.parametrize("axis_name", [None, "h", {}])
def test_halos_need_the_names_of_axes(axis_name: Any) -> None:
    def body(x: Tensor) -> Tensor:
        result: Tensor = fs.domain.halo_exchange(x, {0: (1, 1)}, axis_name=axis_name)
        return result

    mapped = fs.shard_map(body, mesh=fs.Mesh(h=2), in_specs=P("h"), out_specs=P("h"))
    with pytest.raises(fs.ShardingError, match="in which the axes have names"):
        mapped(torch.ones(4))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("run", ["domain", "partition"])
def test_ring_attention_of_keys_with_a_further_batch_dim(run: str) -> None:
    mesh = fs.Mesh(cp=4)
    q = torch.randn(2, 64, 8, dtype=F64, requires_grad=True)
    k, v = (torch.randn(3, 2, 64, 8, dtype=F64, requires_grad=True) for _ in range(2))
    specs = P(None, "cp"), P(None, None, "cp"), P(None, None, "cp")
    ring: Callable[..., Any] = fs.domain.scaled_dot_product_attention
    if run == "domain":
        pairs = [fs.shard(x, mesh, p) for x, p in zip((q, k, v), specs, strict=True)]
        y = fs.unshard(ring(*pairs))
    else:
        y = fs.partition(attention, mesh=mesh, in_specs=specs)(q, k, v)
    expected = attention(q, k, v)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
    )


def test_weighted_variance_of_integers() -> None:
    x, weights = torch.tensor([1, 2, 3, 6]), torch.tensor([1.0, 0.0, 2.0, 1.0])
    variance, mean = fs.domain.weighted_var_mean(x, weights)
    torch.testing.assert_close((variance, mean), (torch.tensor(3.1875), torch.tensor(3.25)))
