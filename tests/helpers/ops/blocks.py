"""Blocks as in research code: functions of a dict of parameters and an input, and a UNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Params = dict[str, torch.Tensor]
DTYPE = torch.float64


def make_params(shapes: dict[str, tuple[int, ...]], seed: int) -> Params:
    """Return random parameters that require grad."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (
            torch.randn(shape, generator=generator, dtype=DTYPE) / shape[-1] ** 0.5
        ).requires_grad_()
        for name, shape in shapes.items()
    }


def gpt(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Layer norms, attention with biases, a GELU: GPT-2's block, heads of 4."""
    batch, length, width = x.shape
    h = F.layer_norm(x, (width,), p["ln1"], p["ln1b"])
    q, k, v = (
        F.linear(h, p[f"w{c}"], p[f"b{c}"]).view(batch, length, -1, 4).transpose(1, 2)
        for c in "qkv"
    )
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(a.transpose(1, 2).reshape(batch, length, -1), p["wo"], p["bo"])
    h = F.layer_norm(x, (width,), p["ln2"], p["ln2b"])
    return x + F.linear(F.gelu(F.linear(h, p["w1"], p["b1"])), p["w2"], p["b2"])


def gpt_params(width: int = 16, seed: int = 0) -> Params:
    """Return parameters of `gpt`."""
    shapes: dict[str, tuple[int, ...]] = {
        "w1": (4 * width, width), "b1": (4 * width,), "w2": (width, 4 * width), "b2": (width,),
        **{f"w{c}": (width, width) for c in "qkvo"}, **{f"b{c}": (width,) for c in "qkvo"},
        **dict.fromkeys(("ln1", "ln1b", "ln2", "ln2b"), (width,)),
    }  # fmt: skip
    return make_params(shapes, seed)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to a `(batch, heads, length, width)` tensor, halves as pairs."""
    length, width = x.shape[-2:]
    position = torch.arange(length, dtype=x.dtype)
    frequency = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=x.dtype) / width)
    angle = torch.outer(position, frequency)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm of Llama."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def llama(p: Params, x: torch.Tensor) -> torch.Tensor:
    """RMS norms, rotary grouped-query attention, SwiGLU; heads of 4, two for each key head."""
    batch, length, _ = x.shape
    h = rms(x, p["ln1"])
    q, k, v = (F.linear(h, p[f"w{c}"]).view(batch, length, -1, 4).transpose(1, 2) for c in "qkv")
    a = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
    x = x + F.linear(a.transpose(1, 2).reshape(batch, length, -1), p["wo"])
    h = rms(x, p["ln2"])
    return x + F.linear(F.silu(F.linear(h, p["wg"])) * F.linear(h, p["wu"]), p["wd"])


def llama_params(width: int = 32, seed: int = 1) -> Params:
    """Return parameters of `llama`."""
    return make_params({
        "wq": (width, width), "wk": (width // 2, width), "wv": (width // 2, width),
        "wo": (width, width), "wg": (2 * width, width), "wu": (2 * width, width),
        "wd": (width, 2 * width), "ln1": (width,), "ln2": (width,),
    }, seed)  # fmt: skip


def resnet(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Two convolutions with group norms and a shortcut."""
    h = F.relu(F.group_norm(F.conv2d(x, p["c1"], padding=1), 4, p["g1"], p["h1"]))
    h = F.group_norm(F.conv2d(h, p["c2"], padding=1), 4, p["g2"], p["h2"])
    return F.relu(x + h)


def resnet_params(channels: int = 8, seed: int = 2) -> Params:
    """Return parameters of `resnet`."""
    return make_params({
        "c1": (channels, channels, 3, 3), "c2": (channels, channels, 3, 3),
        **{f"{c}{i}": (channels,) for c in "gh" for i in (1, 2)},
    }, seed)  # fmt: skip


def vit(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Patches by a convolution, positions, attention with one matrix for q, k and v, an MLP."""
    h = F.conv2d(x, p["patch"], stride=4).flatten(2).transpose(1, 2) + p["pos"]
    batch, length, width = h.shape
    n = F.layer_norm(h, (width,), p["ln1"])
    q, k, v = F.linear(n, p["qkv"]).view(batch, length, -1, 3, 4).permute(3, 0, 2, 1, 4).unbind(0)
    a = F.scaled_dot_product_attention(q, k, v)
    h = h + F.linear(a.transpose(1, 2).reshape(batch, length, width), p["wo"])
    n = F.layer_norm(h, (width,), p["ln2"])
    return h + F.linear(F.gelu(F.linear(n, p["w1"])), p["w2"])


def vit_params(width: int = 16, seed: int = 3) -> Params:
    """Return parameters of `vit`, for images of 3x8x8."""
    return make_params({
        "patch": (width, 3, 4, 4), "pos": (4, width), "qkv": (3 * width, width),
        "wo": (width, width), "w1": (4 * width, width), "w2": (width, 4 * width),
        "ln1": (width,), "ln2": (width,),
    }, seed)  # fmt: skip


class ResidualBlock(nn.Module):
    """Two convolutions with group norms, and a shortcut."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, ins), nn.GroupNorm(2, outs)])
        self.convs = nn.ModuleList(
            [nn.Conv2d(ins, outs, 3, padding=1), nn.Conv2d(outs, outs, 3, padding=1)]
        )
        self.shortcut = nn.Conv2d(ins, outs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.convs[0](F.silu(self.norms[0](x)))
        result: torch.Tensor = self.shortcut(x) + self.convs[1](F.silu(self.norms[1](h)))
        return result


class UNet(nn.Module):
    """One level down by a strided convolution and pooling, up by interpolation and transposed."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 7, padding=3, padding_mode="circular")
        self.high = ResidualBlock(channels, channels)
        self.down = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.low = ResidualBlock(2 * channels, channels)
        self.up = nn.ConvTranspose2d(channels, channels, 4, stride=2, padding=1)
        self.last = nn.Conv2d(3 * channels, 2, 3, padding=1, padding_mode="reflect")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.high(self.first(x))
        low = self.low(torch.cat([self.down(x), self.pool(x)], 1))
        size = x.shape[-2:]
        smooth = F.interpolate(F.avg_pool2d(low, 2), size=size, mode="bilinear")
        up = F.interpolate(self.up(low), size=size)
        result: torch.Tensor = self.last(torch.cat([x, smooth, up], 1))
        return result


def unet(seed: int = 0) -> UNet:
    """Return a UNet of float64 with fixed parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return UNet().double()


def image(height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Return a random batch of two images."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, height, width, generator=generator, dtype=torch.float64)
