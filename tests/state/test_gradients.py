"""Gradients of trees of pairs: beside a loss, accumulated, and clipped by their joint norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P

MESH = Mesh(dp=2, tp=3)
LAYOUTS = {
    "w": (P("dp"), (4, 6)),
    "v": (P(None, ("dp", "tp")), (3, 6)),
    "replicated": (P(), (5,)),
    "uneven": (P("tp"), (4,)),
}


def tree() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, (_, shape) in LAYOUTS.items()
    }


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clip_has_the_values_of_torch_and_one_scalar_reduction(max_norm: float) -> None:
    grads = fs.state.tree_shard(tree(), {n: p for n, (p, _) in LAYOUTS.items()}, mesh=MESH)
    with fs.comm_log() as log:
        clipped, norm = fs.state.clip_by_global_norm(grads, max_norm)
    params = [torch.nn.Parameter(x) for x in tree().values()]
    for param, grad in zip(params, tree().values(), strict=True):
        param.grad = grad
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for (name, pair), param in zip(clipped.items(), params, strict=True):
        assert pair.spec == grads[name].spec
        torch.testing.assert_close(fs.unshard(pair), param.grad, rtol=1e-12, atol=0)
    assert sum(log.forward.counts.values()) == 1
    assert sum(log.forward.bytes.values()) <= 2 * 8


def test_clip_refuses_unreduced_gradients() -> None:
    spec = fs.Spec(MESH, P(unreduced={"dp"}), shape=(2,))
    grads = {"w": fs.shard(torch.ones(2), spec)}
    with pytest.raises(fs.ShardingError, match="gradients must be reduced before"):
        fs.state.clip_by_global_norm(grads, 1.0)
    fixed = fs.state.tree_reshard(grads, P("dp"))
    assert fs.state.clip_by_global_norm(fixed, 1.0)[1].item() == pytest.approx(2**0.5)


def test_accumulation_reduces_once() -> None:
    mesh = Mesh(dp=2)
    params = fs.state.tree_shard({"w": torch.ones(4, 2)}, P(reduced={"dp"}), mesh=mesh)
    loss_fn = fs.partition(
        lambda p, x: (x @ p["w"]).square().sum(), mesh=mesh, in_specs=(None, P("dp"))
    )
    batches = [torch.arange(8.0).view(2, 4) + i for i in range(3)]
    grad_of = fs.state.value_and_grad(loss_fn)
    total: Any = None
    with fs.comm_log() as log:
        for x in batches:
            _, grads = grad_of(params, fs.shard(x, mesh, P("dp")))
            total = fs.state.accumulate(total, grads, weight=1 / 3)
        reduced = fs.state.tree_reshard(total, P("dp"))
    assert log.forward.counts["reduce_scatter", "dp"] == 1
    assert sum(log.backward.counts.values()) == 0
    w = torch.ones(4, 2, requires_grad=True)
    sum((x @ w).square().sum() / 3 for x in batches).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(fs.unshard(reduced["w"]), w.grad)


def test_accumulate_refuses_other_layouts() -> None:
    total, grads = (fs.state.tree_shard([torch.ones(2)], p, mesh=MESH) for p in (P("dp"), P()))
    with pytest.raises(fs.ShardingError, match=r"f32\[2\] added to f32\[2@dp\]"):
        fs.state.accumulate(total, grads)


def test_value_and_grad_returns_aux_and_none_for_integers() -> None:
    params = {"w": torch.ones(2), "count": torch.tensor([3, 4])}
    pairs = fs.state.tree_shard(params, P("dp"), mesh=MESH)
    fn = fs.partition(lambda p: ((p["w"] * p["count"]).sum(), p["count"]), mesh=MESH)
    (value, aux), grads = fs.state.value_and_grad(fn, has_aux=True)(pairs)
    assert value.item() == 7
    assert fs.unshard(aux).tolist() == [3, 4]
    assert fs.unshard(grads["w"]).tolist() == [3, 4]
    assert grads["count"] is None
    with pytest.raises(fs.ShardingError, match="must be a tree with pairs"):
        fs.state.value_and_grad(fn)({"w": torch.ones(2)})
