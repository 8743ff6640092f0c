"""Mixtures of experts as users write them, with `nonzero` dispatch, on data and expert axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import P

MESH = fs.Mesh(dp=2, ep=2)
TOKENS, WIDTH, HIDDEN, EXPERTS, TOP = 8, 4, 6, 4, 2
Params = dict[str, torch.Tensor]


def params() -> Params:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "gate": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(4, TOKENS // 4, WIDTH, generator=generator, dtype=torch.float64)


def expert(up: torch.Tensor, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ up) @ down


def top_k(
    up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    first: int = 0,
) -> torch.Tensor:
    """Return the sum of the experts' outputs, as the blocks of Mixtral and Qwen2-MoE do."""
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=EXPERTS).permute(2, 1, 0)
    for index in range(len(up)):
        slot, rows = torch.where(mask[first + index])
        current = expert(up[index], down[index], x[None, rows].reshape(-1, WIDTH))
        out.index_add_(0, rows, current * weights[rows, slot, None])
    return out


def routed(experts: Callable[..., torch.Tensor]) -> Callable[[Params, torch.Tensor], torch.Tensor]:
    def run(p: Params, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = torch.topk(F.softmax(flat @ p["gate"], -1), TOP, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return experts(p["up"], p["down"], flat, weights, chosen).reshape(x.shape)

    return run


def switch(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs of one expert for each token."""
    flat = x.reshape(-1, WIDTH)
    router = flat @ p["gate"]
    out = torch.zeros_like(flat)
    for e in range(EXPERTS):
        idx = (router.argmax(-1) == e).nonzero().squeeze(-1)
        out = out.index_add(0, idx, expert(p["up"][e], p["down"][e], flat[idx]))
    return (out * router.softmax(-1).amax(-1, keepdim=True)).reshape(x.shape)


def switch_with_capacity(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Return those of `switch` with a stated size; the padding reads and writes a row more."""
    flat = x.reshape(-1, WIDTH)
    router = flat @ p["gate"]
    padded = F.pad(flat, (0, 0, 0, 1))
    out = torch.zeros_like(padded)
    for e in range(EXPERTS):
        (idx,) = fs.nonzero(router.argmax(-1) == e, size=TOKENS, fill_value=TOKENS)
        out = out.index_add(0, idx, expert(p["up"][e], p["down"][e], padded[idx]))
    return (out[:-1] * router.softmax(-1).amax(-1, keepdim=True)).reshape(x.shape)


def outcome(run: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the loss and its gradients."""
    p, x = params(), tokens().requires_grad_()
    loss = run(p, x).sin().sum()
    return loss.detach(), *torch.autograd.grad(loss, [*p.values(), x])


EXPERT_PARALLEL = {"gate": P(), "up": P("ep"), "down": P("ep")}


@pytest.mark.parametrize("batch", [P("dp"), P(("dp", "ep")), P(None, "ep")])
@pytest.mark.parametrize("weights", [P(), P("ep"), EXPERT_PARALLEL])
def test_top_k_region_equals_one_device(weights: Any, batch: P) -> None:
    def local(*args: torch.Tensor) -> torch.Tensor:
        return fs.psum(top_k(*args, first=int(fs.axis_index("ep")) * len(args[0])), "ep")

    specs = P("ep"), P("ep"), P("dp"), P("dp"), P("dp")
    mapped = fs.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P("dp"))
    part = fs.partition(routed(mapped), mesh=MESH, params=weights, in_specs=batch)
    torch.testing.assert_close(outcome(part), outcome(routed(top_k)))
    cost = part.trace(params(), tokens().requires_grad_()).cost()
    assert cost.bytes_sent >= TOKENS // 2 * WIDTH * 8  # the sum over ep


@pytest.mark.parametrize("batch", [P("dp"), P(("dp", "ep")), P()])
@pytest.mark.parametrize("weights", [P(), EXPERT_PARALLEL])
def test_stated_capacity_equals_nonzero_dispatch(weights: Any, batch: P) -> None:
    part = fs.partition(switch_with_capacity, mesh=MESH, params=weights, in_specs=batch)
    torch.testing.assert_close(outcome(part), outcome(switch))


@pytest.mark.parametrize(("check", "launches"), [(False, 0), (True, 2)])
def test_switch_region_on_the_data_axis_equals_one_device(check: bool, launches: int) -> None:
    """The function as it is, on the tokens of every rank.

    With a check, torchrun compares the result along `ep` by value, since `nonzero` reads values.
    """

    def local(p: Params, x: torch.Tensor) -> torch.Tensor:
        return switch(fs.pcast(p, "dp", to="varying"), x)

    mapped = fs.shard_map(local, mesh=MESH, in_specs=(P(), P("dp")), out_specs=P("dp"), check=check)
    part = fs.partition(lambda p, x: mapped(p, x.tanh()), mesh=MESH, in_specs=(P(), P("dp")))
    expected = outcome(lambda p, x: switch(p, x.tanh()))
    torch.testing.assert_close(outcome(part), expected)
    call = part.trace(params(), tokens().requires_grad_())
    assert call.cost().launches == launches
    assert call.cost(backward=True).launches == 1  # all parameters
