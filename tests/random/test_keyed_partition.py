"""Keyed random functions in partitioned functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fshard as fs
from fshard import P, ShardingError
from tests.helpers.spec_grid import message

KEY, OTHER = fs.random.key(7), fs.random.key(8)
KEY, OTHER = fs.random.key(7), fs.random.key(8)
MESH = fs.Mesh(dp=2, tp=2)
F64 = torch.float64


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=dtype).reshape(shape) / 10


class Block(nn.Module):
    """Transformer block with dropout in attention and after both halves."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        y = self.first(x)
        y = F.scaled_dot_product_attention(
            *(heads(item(y)) for item in (self.q, self.k, self.v)),
            dropout_p=self.p if self.training else 0.0, is_causal=True)  # fmt: skip
        x = x + self.drop(self.o(y.transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.second(x)))))


def test_transformer_block_in_training_is_partitioned() -> None:
    """Values and gradients equal those of one device; dropout adds no communication."""
    with fs.random.keyed(KEY):
        block = Block(16, 4, 0.1).double()
    params = dict(block.named_parameters())
    specs = dict.fromkeys(params, P())
    specs |= {f"{name}.weight": P("tp") for name in ("q", "k", "v", "up")}
    specs |= {f"{name}.bias": P("tp") for name in ("q", "k", "v", "up")}
    specs |= {f"{name}.weight": P(None, "tp") for name in ("o", "down")}

    def loss(params: Any, key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            output: torch.Tensor = torch.func.functional_call(block, params, (x,))
        return output.square().mean()

    part = fs.partition(loss, mesh=MESH, params=specs, in_specs=(P(), P("dp")))
    x = numbers(4, 6, 16, dtype=F64).cos()
    results = {}
    for key in (KEY, OTHER):
        result, reference = part(params, key, x), loss(params, key, x)
        torch.testing.assert_close(result, reference, rtol=1e-13, atol=0.0)
        grads = [torch.autograd.grad(item, list(params.values())) for item in (result, reference)]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-15)
        results[key] = float(result.detach())
    assert len(set(results.values())) == 2
    programs = [
        str(prog.steps) for prog in part.trace(params, KEY, x).programs if not prog.is_local
    ]
    block.eval()
    in_eval = fs.partition(loss, mesh=MESH, params=specs, in_specs=(P(), P("dp")))
    assert programs == [
        str(prog.steps) for prog in in_eval.trace(params, KEY, x).programs if not prog.is_local
    ]


def test_partitioned_draws_are_local() -> None:
    """Each rank draws its shard of a tensor-like draw; other draws get the requested layout."""

    def draws(key: torch.Tensor, x: torch.Tensor) -> Any:
        one, *keys = fs.random.split(key, 6)
        with fs.random.keyed(one):
            noise = x + torch.randn_like(x) * torch.bernoulli(x.sigmoid()) + torch.rand(4, 8)
        return (
            noise, fs.random.uniform(keys[0], x), fs.random.exponential(keys[1], (4, 8)),
            fs.random.randint(keys[2], x, 0, 9, dtype=torch.int32),
            fs.random.permutation(fs.random.fold_in(keys[3], 5), 8),
            fs.random.bits(fs.random.fold_in(keys[4], torch.tensor(3)), x, dtype=torch.int32),
        )  # fmt: skip

    x = numbers(4, 8)
    for p in (P("dp", "tp"), P(None, ("tp", "dp")), P("dp"), P()):
        part = fs.partition(draws, mesh=MESH, in_specs=(P(), p),
                            out_specs=(p, None, P("tp"), None, P("dp"), None))  # fmt: skip
        output = part.trace(KEY, x)
        assert not [prog for prog in output.programs if not prog.is_local]
        assert output.out_specs[1] == fs.Spec(MESH, p, shape=(4, 8), uneven="chunk")
        assert all(map(torch.equal, part(KEY, x), draws(KEY, x)))


def test_dropout_keeps_unreduced_values_unreduced() -> None:
    """Dropout of unreduced values needs no sum: the mask is the same on every rank."""

    def run(key: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with fs.random.keyed(key):
            return F.dropout(x @ w, 0.5)

    x, w = torch.ones(3, 4), torch.ones(4, 5)
    part = fs.partition(run, mesh=MESH, in_specs=(P(), P(None, "tp"), P("tp")))
    spec = part.trace(KEY, x, w).out_specs[0]
    assert spec is not None
    assert spec.partition == P(None, None, unreduced={"tp"})
    assert torch.equal(part(KEY, x, w), run(KEY, x, w))


def test_block_around_a_traced_function_is_refused() -> None:
    x = torch.ones(4, 6)
    part = fs.partition(F.dropout, mesh=MESH)
    with pytest.raises(ShardingError) as error, fs.random.keyed(KEY):
        part(x)
    assert str(error.value) == message(
        "fs.random.keyed", "a block around a traced function",
        "the block must be in the traced function, which runs again with other keys",
        "def f(key, x): and in it with fs.random.keyed(key):; distributed.keyed(key) "
        "for a DistributedModule")  # fmt: skip
    spec = fs.Spec(MESH, P("dp"), shape=(4, 6))
    part = fs.partition(lambda key: fs.random.uniform(key, spec), mesh=MESH)
    with pytest.raises(ShardingError) as error:
        part(KEY)
    assert str(error.value) == message(
        "fs.random.uniform", "f32[4@dp,6] in a traced function",
        "a traced function must create global tensors, whose layouts fs.partition chooses",
        "a shape, or a tensor whose layout to follow; fs.constrain(x, P(...)) requests a "
        "layout")  # fmt: skip


def test_dropout_mask_multiplies_a_pair() -> None:
    """Check the fix that the error of a dropout on pairs suggests."""
    spec = fs.Spec(MESH, P("dp", "tp"), shape=(4, 6))
    x = fs.shard(numbers(4, 6), spec)
    mask = fs.random.dropout_mask(KEY, spec, 0.5)
    output = fs.unshard(fs.apply(torch.mul, x, mask))
    assert torch.equal(output, numbers(4, 6) * fs.random.dropout_mask(KEY, (4, 6), 0.5))
