"""Image models with sharded space: values, gradients, and what they send."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard import HaloExchange, HaloReduce, Mesh, P, Spec
from fshard.partition.ir import Operation, Redistribution
from fshard.partition.partitioned_call import PartitionedCall
from tests.helpers.ops.blocks import image, unet

F64 = torch.float64
MESH = Mesh(dp=1, h=2, w=2)
SPATIAL = P("dp", None, "h", "w")


def sent_by(call: PartitionedCall) -> Counter[str]:
    """Return how many steps of each type send forward."""
    steps: Counter[str] = Counter()
    for prog in call.programs:
        sends = zip(prog.steps, prog.step_bytes, strict=True)
        steps.update(type(step).__name__ for step, sent in sends if sent)
    return steps


def spatial(call: PartitionedCall, least: int) -> tuple[int, int]:
    """Return the numbers of results of four dims of at least `least` elements: sharded, all."""
    specs = [
        spec
        for line in call.lines
        if isinstance(line, Operation)
        for spec in line.strategy.out_specs
        if spec is not None and spec.ndim == 4 and min(spec.shape[2:]) >= least
    ]
    sharded = [spec for spec in specs if all(spec.partition.dims[2:])]
    return len(sharded), len(specs)


def check_model(model: Any, x: torch.Tensor, spec: Spec) -> PartitionedCall:
    """Compare a model's values and gradients with one device; return the partitioned call."""
    params = dict(model.named_parameters())
    part = fs.partition(model, mesh=spec.mesh, params=P(), in_specs=spec)
    inputs = [x.requires_grad_(), *params.values()]
    outputs = part(dict(model.state_dict(keep_vars=True)), x), model(x)
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    weight = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(3), dtype=F64)
    grads = [torch.autograd.grad((y * weight).sum(), inputs) for y in outputs]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)
    return part.trace(dict(model.state_dict(keep_vars=True)), x)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(None, marks=pytest.mark.slow), {2: (9, 7), 3: (3, 9)}],
    ids=["even", "uneven"],
)
def test_unet_sends_halos_and_reductions(sizes: Any) -> None:
    """Every activation stays sharded in space; nothing is gathered."""
    x = image(16, 12)
    spec = Spec(MESH, SPATIAL, shape=x.shape, dtype=F64, sizes=sizes)
    call = check_model(unet(), x, spec)
    sharded, results = spatial(call, 2)
    assert sharded == results > 25
    steps = sent_by(call)
    assert steps.keys() <= {"HaloExchange", "AllReduce", "Exchange"}
    # Tensors of other shard sizes are aligned before they are joined.
    assert steps["Exchange"] <= 4
    backward = {type(step) for prog in call.programs for step in prog.T.steps}
    assert {HaloReduce} <= backward
    assert not any("gathered" in line for line in str(call).splitlines())


def unsharded(call: PartitionedCall, least: int) -> list[str]:
    """Return the results of at least `least` elements that "h" or "w" does not shard.

    Results of two dims, as parameters are, are left out.
    """
    return [
        f"{line.name}: {spec}"
        for line in call.lines
        if isinstance(line, Operation)
        for spec in line.strategy.out_specs
        if spec is not None
        and spec.ndim > 2
        and math.prod(spec.shape) >= least
        and not {"h", "w"} <= {axis for dim in spec.partition.dims for axis in dim}
    ]


class PixelAttention(nn.Module):
    """Attention of all pixels between convolutions, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 2)))
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        batch, channels, height, width = x.shape
        h = self.norm(x).view(batch, channels, height * width).transpose(1, 2)
        q, k, v = self.qkv(h).view(batch, -1, 3, 1, channels).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, channels)
        h = self.out(h).transpose(-1, -2).reshape(batch, channels, height, width)
        result: torch.Tensor = self.last(x + h)
        return result


@pytest.mark.parametrize("sizes", [None, {2: (8, 5), 3: (3, 9)}], ids=["chunk", "sizes"])
def test_pixels_of_two_sharded_dims_stay_sharded_when_they_are_flattened(sizes: Any) -> None:
    """Rows are sharded further instead of channels; heights that do not divide are allowed."""
    x, model = image(13, 12), PixelAttention().double()
    uneven: Any = {"sizes": sizes} if sizes else {"uneven": "chunk"}
    call = check_model(model, x, Spec(MESH, SPATIAL, shape=x.shape, dtype=F64, **uneven))
    assert unsharded(call, 2 * 13 * 12) == []
    tokens = next(line.strategy for line in call.lines if isinstance(line, Operation)
                  and line.name.startswith("view"))  # fmt: skip
    assert tokens.out_specs[0] is not None
    assert tokens.out_specs[0].partition == P("dp", None, ("h", "w"))
    rows = (4, 4, 3, 2) if sizes else (4, 3, 3, 3)
    assert tokens.out_specs[0].shard_sizes(2) == tuple(12 * n for n in rows)
    # Attention gathers keys and values; that is all that is gathered.
    assert sent_by(call).keys() == {"HaloExchange", "AllToAll", "AllReduce", "AllGather"}
    assert sent_by(call)["AllGather"] == 2


class PooledContext(nn.Module):
    """The mean of all pixels, interpolated and joined with the image, as in DeepLab."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.first, self.context = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        context = F.silu(self.context(F.adaptive_avg_pool2d(x, 1)))
        context = F.interpolate(context, size=x.shape[-2:], mode=self.mode)
        result: torch.Tensor = self.last(torch.cat([x, context], 1))
        return result


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_interpolation_of_one_pixel_is_sharded_as_the_image_it_is_joined_with(mode: str) -> None:
    x = image(13, 11)
    spec = Spec(MESH, SPATIAL, shape=x.shape, dtype=F64, uneven="chunk")
    call = check_model(PooledContext(mode).double(), x, spec)
    assert unsharded(call, 2 * 13 * 11) == []
    assert sent_by(call).keys() == {"HaloExchange", "AllReduce"}
    backward = {type(step).__name__ for prog in call.programs for step in prog.T.steps}
    assert backward <= {"HaloReduce", "AllReduce", "InvariantToReduced", "ReplicatedToUnreduced"}


def test_axes_that_may_be_replicated_are_gathered_if_that_is_faster() -> None:
    x, model = image(8, 8), unet()
    for replicate, gathers in ((), False), (("h", "w"), True):
        part = fs.partition(model, mesh=MESH, params=P(), in_specs=SPATIAL, replicate=replicate)
        text = str(part.explain(dict(model.named_parameters()), x))
        assert ("all_gather" in text or "gathered along" in text) == gathers


def test_training_step_of_a_unet() -> None:
    """The gradients that a function computes, by the rules of the backward operations."""
    model, x = unet(), image(8, 12)
    params: dict[str, torch.Tensor] = dict(model.named_parameters())

    def step(params: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
        loss = torch.func.functional_call(model, params, (x,)).square().mean()
        return list(torch.autograd.grad(loss, list(params.values())))

    spec = Spec(MESH, SPATIAL, shape=x.shape, dtype=F64, sizes={2: (3, 5), 3: (4, 8)})
    part = fs.partition(step, mesh=MESH, params=P(), in_specs=spec, out_specs=P())
    torch.testing.assert_close(part(params, x), step(params, x), rtol=1e-9, atol=1e-9)
    steps = sent_by(part.trace(params, x))
    assert steps["HaloReduce"] >= 6
    assert not {"AllToAll", "AllGather"} & steps.keys()
    halos = [
        line for line in part.trace(params, x).lines
        if isinstance(line, Redistribution) and isinstance(line.program.steps[-1], HaloExchange)
    ]  # fmt: skip
    sources = Counter((line.source.value, line.program) for line in halos)
    assert max(sources.values()) == 1  # a window is exchanged once, for forward and backward
