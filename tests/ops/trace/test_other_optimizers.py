"""Optimizers of the package pytorch_optimizer on plain locals and in partitioned functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs

optimizers = pytest.importorskip("pytorch_optimizer", reason="the extra `models` is not installed")

MESH = fs.Mesh(dp=2, tp=2)
LAYOUTS = [fs.P("dp", "tp"), fs.P("tp")]
ELEMENTWISE = ("Lion", "AdaBelief", "Adan", "ScheduleFreeAdamW", "Yogi", "DiffGrad")
OF_TENSORS = ("LARS", "Shampoo", "CAME", "SM3", "NovoGrad", "Fromage")


def run(name: str, params: list[torch.Tensor], *grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters after steps of an optimizer."""
    params = [x.clone().requires_grad_() for x in params]
    optimizer = getattr(optimizers, name)(params, lr=0.01)
    if name.startswith("ScheduleFree"):
        optimizer.train()
    for tensors in grads:
        for x, grad in zip(params, tensors, strict=True):
            x.grad = grad.clone()
        optimizer.step()
    return [x.detach() for x in params]


def values() -> list[list[torch.Tensor]]:
    """Return parameters and the gradients of two steps."""
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(shape, generator=generator, dtype=torch.float64)
             for shape in ((8, 6), (8,))] for _ in range(3)]  # fmt: skip


def sharded(tensors: Any) -> Any:
    return [fs.state.tree_shard(columns, LAYOUTS, mesh=MESH) for columns in tensors]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_step_on_plain_locals(name: str) -> None:
    pairs = sharded(values())
    ranks = [run(name, *([pair.local[rank] for pair in tree] for tree in pairs))
             for rank in range(MESH.size)]  # fmt: skip
    for i, expected in enumerate(run(name, *values())):
        updated = fs.Sharded(tuple(locals_[i] for locals_ in ranks), pairs[0][i].spec)
        assert torch.equal(fs.unshard(updated), expected)


@pytest.mark.parametrize("name", [
    "Lamb", *(pytest.param(name, marks=pytest.mark.slow) for name in OF_TENSORS)
])  # fmt: skip
def test_optimizers_of_norms_and_factors_step_in_partitioned_functions(name: str) -> None:
    part = fs.partition(lambda *trees: run(name, *trees), mesh=MESH, out_specs=LAYOUTS)
    with torch.no_grad():
        results = part(*sharded(values()))
    for pair, expected, layout in zip(results, run(name, *values()), LAYOUTS, strict=True):
        fs.testing.assert_layout(pair, layout)
        torch.testing.assert_close(fs.unshard(pair), expected, rtol=1e-10, atol=1e-10)


def test_steps_on_plain_locals_have_the_norms_of_shards() -> None:
    """An optimizer of norms needs a partitioned function: its values would be others."""
    pairs = sharded(values())
    first = run("Lamb", *([pair.local[0] for pair in tree] for tree in pairs))
    local = fs.shard(run("Lamb", *values())[0], MESH, LAYOUTS[0]).local[0]
    assert not torch.allclose(first[0], local)
