"""Parts of public training scripts: nanoGPT's loop, LoRA by parametrizations, averaged weights.

Each is trained on one device and distributed, in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fshard as fs
from fshard import Mesh, P
from fshard.state import colwise, rowwise

MESH = Mesh(dp=2, tp=2)
TP: dict[str, Any] = {
    "styles": {"0": colwise("tp"), "2": rowwise("tp")}, "in_specs": P("dp"),
}  # fmt: skip


def mlp(wrap: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(wrap(nn.Linear(4, 8)), nn.Tanh(), wrap(nn.Linear(8, 4))).double()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(count)]


def loss_of(distributed: fs.state.DistributedModule) -> Callable[..., Any]:
    """Return a mean square as a function of parameters, buffers and a batch, with new buffers."""

    def loss(params: Any, buffers: Any, x: Any) -> Any:
        y, buffers = distributed(params, buffers, x)
        return fs.apply(lambda y: y.square().mean(), y, mode="auto"), buffers

    return loss


def test_nanogpt_decays_matrices_alone_clips_accumulates_and_follows_a_schedule() -> None:
    """Groups of parameters are optimizers of parts of the tree; a rate may be a function."""
    model, xs, losses = mlp(), batches(6), list[float]()
    distributed = fs.state.distribute_module(model, MESH, **TP, fsdp="dp")
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() >= 2) == decays],
         "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]  # fmt: skip
    one_device = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))

    def rate(step: int) -> float:
        return 0.05 * (1 + math.cos(math.pi * step / 3))

    for step in (1, 2, 3):
        for group in one_device.param_groups:
            group["lr"] = rate(step)
        for x in xs[2 * step - 2 : 2 * step]:
            loss = model(x).square().mean()
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        one_device.step()
        one_device.zero_grad(set_to_none=True)
        losses.append(loss.item())

    params, grad_of = (
        distributed.params,
        fs.state.value_and_grad(loss_of(distributed), has_aux=True),
    )

    def parts(tree: Any) -> list[Any]:
        return [{n: x for n, x in tree.items() if (len(params[n].shape) >= 2) == decays}
                for decays in (True, False)]  # fmt: skip

    optimizers = [
        fs.state.adamw(rate, betas=(0.9, 0.95), weight_decay=decay) for decay in (0.1, 0.0)
    ]
    states = [o.init(part) for o, part in zip(optimizers, parts(params), strict=True)]
    for step in range(3):
        total = None
        for x in xs[2 * step : 2 * step + 2]:
            (value, _), grads = grad_of(params, distributed.buffers, fs.shard(x, MESH, P("dp")))
            total = fs.state.accumulate(total, grads, weight=0.5)
        total, _ = fs.state.clip_by_global_norm(total, 0.1)
        columns = parts(total), states, parts(params)
        updated = [o.update(*rest) for o, *rest in zip(optimizers, *columns, strict=True)]
        states = [state for state, _ in updated]
        params = updated[0][1] | updated[1][1]
        assert value.item() == pytest.approx(losses[step], abs=1e-12)
    for name, p in model.named_parameters():
        torch.testing.assert_close(fs.unshard(params[name]), p.detach(), rtol=1e-10, atol=1e-10)


class Lora(nn.Module):
    """Low-rank addition to a weight, as in minLoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        rows, columns = layer.weight.shape
        self.lora_A = nn.Parameter(torch.randn(2, columns))
        self.lora_B = nn.Parameter(torch.randn(rows, 2))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.lora_B @ self.lora_A


def with_lora(layer: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Lora(layer))


WRAPS: dict[str, tuple[Callable[[nn.Linear], nn.Module], dict[str, str]]] = {
    "LoRA": (with_lora, {
        "0.parametrizations.weight.original": "f64[8@tp,4]",
        "0.parametrizations.weight.0.lora_A": "f64[2,4]",
        "0.parametrizations.weight.0.lora_B": "f64[8@tp,2]",
        "2.parametrizations.weight.original": "f64[4,8@tp]",
        "2.parametrizations.weight.0.lora_A": "f64[2,8@tp]",
        "2.parametrizations.weight.0.lora_B": "f64[4,2]",
    }),
    "weight norm": (parametrizations.weight_norm, {
        "0.parametrizations.weight.original0": "f64[8@tp,1]",
        "0.parametrizations.weight.original1": "f64[8@tp,4]",
        "2.parametrizations.weight.original0": "f64[4,1]",
        "2.parametrizations.weight.original1": "f64[4,8@tp]",
    }),
    "spectral norm": (parametrizations.spectral_norm, {
        "0.parametrizations.weight.original": "f64[8@tp,4]",
        "2.parametrizations.weight.original": "f64[4,8@tp]",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPS)
def test_parametrized_layers_have_the_layout_of_their_style(name: str) -> None:
    wrap, layouts = WRAPS[name]
    model = mlp(wrap)
    distributed = fs.state.distribute_module(model, MESH, **TP)
    specs = {n: str(spec) for n, spec in distributed.specs["params"].items() if "bias" not in n}
    assert specs == layouts
    if name == "LoRA":
        for n, p in model.named_parameters():
            p.requires_grad_("lora_" in n)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    one_device = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    frozen = {n: pair for n, pair in distributed.params.items() if n not in trained}
    params, buffers = {n: distributed.params[n] for n in trained}, distributed.buffers
    loss_fn, optimizer = loss_of(distributed), fs.state.sgd(0.1)
    state = optimizer.init(params)
    for x in batches(2):
        loss = model(x).square().mean()
        loss.backward()
        one_device.step()
        one_device.zero_grad()
        (value, buffers), grads = fs.state.value_and_grad(
            lambda p, b, x: loss_fn(p | frozen, b, x), has_aux=True
        )(params, buffers, fs.shard(x, MESH, P("dp")))
        state, params = optimizer.update(grads, state, params)
        assert value.item() == pytest.approx(loss.item(), abs=1e-12)
    for n, p in model.named_parameters():
        if n in trained:
            torch.testing.assert_close(fs.unshard(params[n]), p.detach(), rtol=1e-9, atol=1e-9)


def test_averages_of_weights_and_buffers_are_those_of_an_averaged_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()
    distributed = fs.state.distribute_module(model, MESH, fsdp="dp", in_specs=P("dp"))
    reference = copy.deepcopy(model)
    ema = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    one_device = torch.optim.SGD(reference.parameters(), 0.1)
    params, buffers, optimizer = distributed.params, distributed.buffers, fs.state.sgd(0.1)
    state, average = optimizer.init(params), dict[str, Any]()
    grad_of = fs.state.value_and_grad(loss_of(distributed), has_aux=True)
    for x in batches(3):
        reference(x).square().mean().backward()
        one_device.step()
        one_device.zero_grad()
        ema.update_parameters(reference)
        (_, buffers), grads = grad_of(params, buffers, fs.shard(x, MESH, P("dp")))
        state, params = optimizer.update(grads, state, params)
        average = {
            n: fs.apply(torch.lerp, average.get(n, pair), pair, 1 - 0.9)
            for n, pair in (params | buffers).items() if pair.dtype.is_floating_point
        }  # fmt: skip
    expected = dict(ema.module.named_parameters()) | dict(ema.module.named_buffers())
    for n, pair in average.items():
        torch.testing.assert_close(fs.unshard(pair), expected[n].detach(), rtol=1e-9, atol=1e-9)
