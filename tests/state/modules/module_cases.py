"""Modules of one device, and their comparison with the distributed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs

TOLERANCE = 1e-10


class TiedLanguageModel(nn.Module):
    """Embedding, a norm and a layer in nested containers, and logits by the tied embedding."""

    def __init__(self, words: int = 12, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(width), "mlp": mlp(width)}) for _ in range(2)
        )
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, text: Tensor, *, shift: float = 0.0) -> dict[str, Any]:
        x = self.embed(text) + shift
        hidden = []
        for block in self.blocks:
            x = x + self.scale * block["mlp"](block["norm"](x))
            hidden.append(x)
        return {"logits": self.out(x), "hidden": hidden, "length": text.shape[1], "none": None}


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class BatchNormNet(nn.Module):
    """Convolution and batch norms, whose running statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
            nn.Linear(128, 8), nn.BatchNorm1d(8, momentum=0.3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


class Counter(nn.Module):
    """Module that writes one buffer in place, and replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().mean(0)
        return x * self.weight


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def words(*shape: int, vocabulary: int = 12) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(1))


def objective(output: Any) -> Any:
    """Return a scalar of a module's floating-point results, tensors or pairs, that uses all."""
    leaves = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, Tensor)]
    return torch.stack([(0.7 * x + 0.3 * x.square()).sin().sum() for x in leaves]).sum()


def check_equals_one_device(
    distributed: fs.state.DistributedModule,
    inputs: Mapping[str, Any],
    loss_of: Callable[[Any], Any] = objective,
) -> None:
    """Compare results, gradients of all parameters and buffers with the module on one device."""
    module = distributed.module
    form = fs.state.functional(module)
    tracked = {name: x.detach().clone().requires_grad_() for name, x in form.params.items()}
    expected, expected_buffers = form.fn(tracked, form.buffers, **inputs)
    loss = loss_of(expected)
    expected_grads = torch.autograd.grad(loss, list(tracked.values()), materialize_grads=True)

    def run(params: Any) -> Any:
        output, buffers = distributed(params, distributed.buffers, **inputs)
        return loss_of(fs.state.tree_unshard(output)), buffers

    (value, buffers), grads = fs.state.value_and_grad(run, has_aux=True)(distributed.params)
    assert_close(value, loss.detach())
    for (name, grad), other in zip(grads.items(), expected_grads, strict=True):
        assert grad.spec == distributed.params[name].spec.dual
        assert_close(fs.unshard(grad), other, name)
    for name, buffer in buffers.items():
        assert buffer.spec == distributed.buffers[name].spec
        assert_close(fs.unshard(buffer), expected_buffers[name], name)


def assert_close(actual: Tensor, expected: Tensor, name: str = "") -> None:
    """Compare to rounding of float64, relative to the largest element."""
    assert actual.shape == expected.shape, name
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), name
    elif expected.numel():
        difference, largest = ((x.detach().abs().max()) for x in (actual - expected, expected))
        error = float(difference) / max(float(largest), 1e-3)
        assert error <= TOLERANCE, f"{name}: {error:.1e}"
