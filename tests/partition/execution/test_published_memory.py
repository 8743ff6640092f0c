"""Memory of a step beside published formulas."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fshard as fs

LENGTH, ROWS, WIDTH, HEADS = 128, 2, 256, 8
META = {"device": "meta", "dtype": torch.bfloat16}


class Layer(nn.Module):
    """Transformer layer of Korthikanti et al., whose attention keeps its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = (nn.LayerNorm(WIDTH, **META) for _ in range(2))
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, **META) for _ in range(4)
        )
        self.up, self.down = (
            nn.Linear(WIDTH, 4 * WIDTH, **META),
            nn.Linear(4 * WIDTH, WIDTH, **META),
        )

    def forward(self, key: Tensor, x: Tensor) -> Tensor:
        """Map a `(batch, length, width)` tensor to one of the same shape; the key drops values."""
        with fs.random.keyed(key):
            y = self.before_attention(x)
            q, k, v = (
                layer(y).view(ROWS, LENGTH, HEADS, -1).transpose(1, 2)
                for layer in (self.query, self.key, self.value)
            )
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
            y = F.dropout(scores.softmax(-1), 0.1) @ v
            x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1)
            return x + F.dropout(self.down(F.gelu(self.up(self.before_mlp(x)))), 0.1)


def test_saved_activations_of_a_layer_are_those_of_korthikanti() -> None:
    """Section 4.1 of arXiv 2205.05198: sbh (34 + 5 a s / h) bytes.

    The formula neglects the statistics of norms, and counts the layer's argument, which is kept
    elsewhere.
    """
    tokens = LENGTH * ROWS
    published = tokens * WIDTH * 34 + 5 * HEADS * LENGTH * tokens
    argument, statistics = 2 * tokens * WIDTH, 2 * (2 + 2) * tokens
    layer = Layer()
    part = fs.partition(layer, mesh=fs.Mesh(tp=1))
    x = torch.empty(ROWS, LENGTH, WIDTH, **META, requires_grad=True)
    call = part.trace(dict(layer.named_parameters()), fs.random.key(0), x)
    assert call.saved_bytes(0).total == published - argument + statistics
