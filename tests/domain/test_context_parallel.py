"""`context_parallel`: modules of other packages over a sharded sequence equal one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError

F64 = torch.float64
MESH = Mesh(cp=4)


def compare(ring: Any, plain: Any, x: torch.Tensor, module: torch.nn.Module) -> None:
    """Compare values and the gradients of all parameters."""
    weights = torch.linspace(-1, 1, plain(x).numel(), dtype=F64)
    grads = []
    for run in (ring, plain):
        y = run(x)
        total = (y.flatten() * weights).sum()
        grads.append([y, *torch.autograd.grad(total, list(module.parameters()))])
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_llama_of_transformers_equals_one_device(order: str) -> None:
    """Grouped heads, a causal mask, positions as a sharded argument; one ring for each layer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=32, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaModel(config).double()
    n = 16
    index = fs.domain.zigzag_order(n, 4) if order == "zigzag" else torch.arange(n)
    x, positions = torch.randn(2, n, 16, dtype=F64), torch.arange(n)[None]

    def layers(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if order == "contiguous":
            out = model(inputs_embeds=x, position_ids=positions, use_cache=False)
            hidden: torch.Tensor = out.last_hidden_state
            return hidden
        # The model itself takes positions that are not consecutive for packed sequences.
        embeddings = model.rotary_emb(x, positions)
        for layer in model.layers:
            x = layer(x, position_embeddings=embeddings, position_ids=positions)
        normed: torch.Tensor = model.norm(x)
        return normed

    mapped = fs.shard_map(
        fs.domain.context_parallel(layers, "cp", order=order), mesh=MESH, in_specs=P(None, "cp"),
        out_specs=P(None, "cp"),
    )  # fmt: skip

    def ring(x: torch.Tensor) -> Any:
        return mapped(x[:, index], positions[:, index])[:, index.argsort()]

    layers_only = torch.nn.ModuleList([*model.layers, model.norm])
    compare(ring, lambda x: layers(x, positions), x, layers_only)
    with fs.comm_log() as log, torch.no_grad():
        ring(x)
    assert log.counts["ppermute", "cp"] == 2 * 3


@pytest.mark.parametrize("sizes", [None, (3, 0, 7, 2)])
def test_transformer_encoder_of_torch_equals_one_device(sizes: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).double()
    uneven = {1: sizes} if sizes else None
    spec = fs.Spec(MESH, P(None, "cp"), shape=(2, 12, 8), dtype=F64, sizes=uneven)
    ring = fs.shard_map(
        fs.domain.context_parallel(layer, "cp", sizes=sizes), mesh=MESH, in_specs=spec,
        out_specs=spec,
    )  # fmt: skip
    compare(ring, layer, torch.randn(2, 12, 8, dtype=F64), layer)


def test_errors() -> None:
    with pytest.raises(ShardingError, match="order must be 'contiguous' or 'zigzag'"):
        fs.domain.context_parallel(abs, "cp", order="ring")
    with pytest.raises(ShardingError, match="the first argument must be a function"):
        fs.domain.context_parallel(3, "cp")  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="axis names are bound inside shard_map"):
        fs.domain.context_parallel(torch.sin, "cp")(torch.ones(2))
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    body = fs.domain.context_parallel(lambda x: attention(x, x, x)[0], "cp")
    mapped = fs.shard_map(body, mesh=MESH, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
    with pytest.raises(ShardingError, match="need_weights must be False"):
        mapped(torch.randn(1, 8, 8))
