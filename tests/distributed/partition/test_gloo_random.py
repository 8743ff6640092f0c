"""Draws by key on processes: each rank draws its shard of the global draw."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import fshard as fs
from fshard import P
from tests.helpers.gloo.harness import run_ranks

SHAPE = (5, 6)
LAYOUTS = (
    P("dp", "tp"), P(None, ("tp", "dp")), P(), P("tp", unreduced={"dp"}), P(reduced={"dp"}),
    P("dp", unreduced={"tp": "max"}),
)  # fmt: skip


def draws() -> dict[str, Any]:
    """Return the draws of this rank, and results computed from them."""
    mesh = fs.Mesh(dp=2, tp=2)
    fs.init(mesh)
    key = fs.random.key(5)
    specs = [fs.Spec(mesh, p, shape=SHAPE, uneven="chunk") for p in LAYOUTS]
    results: dict[str, Any] = {str(spec): fs.random.normal(key, spec).local for spec in specs}

    def loss(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return F.dropout(x, 0.5).square().sum()

    x = torch.ones(4, 6, requires_grad=True)
    part = fs.partition(loss, mesh=mesh, in_specs=(P(), P("dp", "tp")), out_specs=P())
    results["loss"] = part(key, x)
    results["gradient"] = torch.autograd.grad(results["loss"], x)[0]

    def body(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(fs.random.fold_in(key, fs.axis_index(("dp", "tp")))):
            return F.dropout(x, 0.5)

    mapped = fs.shard_map(body, mesh=mesh, in_specs=(P(), P(("dp", "tp"))),
                          out_specs=P(("dp", "tp")))  # fmt: skip
    results["mapped"] = mapped(key, x)
    with fs.random.keyed(key):
        torch.rand(2)
        results["applied"] = fs.unshard(fs.apply(F.dropout, fs.shard(x, mesh, P("dp", "tp"))))
        results["after"] = torch.rand(2)
    return {name: x.detach() for name, x in results.items()}


def test_ranks_draw_their_shards() -> None:
    key, mesh = fs.random.key(5), fs.Mesh(dp=2, tp=2)
    ranks = run_ranks(4, draws)
    expected = fs.random.normal(key, SHAPE)
    for p in LAYOUTS:
        spec = fs.Spec(mesh, p, shape=SHAPE, uneven="chunk")
        for results, shard in zip(ranks, fs.shard(expected, spec).local, strict=True):
            assert torch.equal(results[str(spec)], shard)
    x = torch.ones(4, 6, requires_grad=True)
    mask = fs.random.dropout_mask(fs.random.fold_in(key, 0), x, 0.5)
    loss = (x * mask).square().sum()
    (grad,) = torch.autograd.grad(loss, x)
    with fs.random.keyed(key):
        torch.rand(2)
        applied, after = F.dropout(x), torch.rand(2)
    keys = [fs.random.fold_in(fs.random.fold_in(key, rank), 0) for rank in range(4)]
    mapped = torch.cat([fs.random.dropout_mask(k, (1, 6), 0.5) for k in keys])
    for results in ranks:
        assert torch.equal(results["loss"], loss.detach())
        assert torch.equal(results["gradient"], grad)
        assert torch.equal(results["mapped"], mapped)
        assert torch.equal(results["applied"], applied.detach())
        assert torch.equal(results["after"], after)
