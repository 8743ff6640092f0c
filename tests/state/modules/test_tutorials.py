"""Programs of PyTorch's tutorials on FSDP2, tensor parallelism and DCP, against one device.

The models are those of the tutorials, in float64. Each step of a tutorial has its counterpart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import fshard as fs
from fshard import Mesh, P
from fshard.state import colwise, prepare_input, rowwise, sequence

pytest.importorskip("safetensors")
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 16, 8, 16, 4, 1
STEPS = 2


class Attention(nn.Module):
    """Attention of the tutorials' Llama 2, with rotary embeddings as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in "qkvo")

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS))
                   for layer in (self.wq, self.wk, self.wv))  # fmt: skip
        q, k = (torch.view_as_real(
            torch.view_as_complex(y.unflatten(-1, (-1, 2))) * rotations[:, None]).flatten(-2)
            for y in (q, k))  # fmt: skip
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.wo(y.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    """Gated layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """Block before norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        out: torch.Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Transformer(nn.Module):
    """Model of the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -torch.linspace(0, 0.5, 2))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.freqs_cis)
        out: torch.Tensor = self.output(self.norm(x))
        return out


@pytest.fixture(scope="module", autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (8, LENGTH), generator=generator) for _ in range(STEPS)]


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def one_device(model: nn.Module) -> list[float]:
    """Return the losses of a training of the module on one device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for tokens in batches():
        loss = cross_entropy(model(tokens), tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(distributed: fs.state.DistributedModule) -> tuple[list[float], Any, Any]:
    """Return the losses of the same training, the state and the parameters."""

    def loss_fn(params: Any, tokens: Any) -> Any:
        logits, _ = distributed(params, distributed.buffers, tokens)
        return fs.apply(cross_entropy, logits, tokens, mode="auto")

    optimizer = fs.state.adamw(0.01)
    params, losses = distributed.params, []
    state = optimizer.init(params)
    for tokens in batches():
        pair = fs.shard(tokens, distributed.mesh, P("dp"))
        loss, grads = fs.state.value_and_grad(loss_fn)(params, pair)
        grads, _ = fs.state.clip_by_global_norm(grads, 1.0)
        state, params = optimizer.update(grads, state, params)
        losses.append(float(loss))
    return losses, state, params


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_fsdp2_and_its_checkpoints(tmp_path: Path) -> None:
    """`fully_shard`, clipping, AdamW; DCP's AppState; a load on one process and from torch.save."""
    model = transformer()
    distributed = fs.state.distribute_module(model, Mesh(dp=4), fsdp="dp", in_specs=P("dp"))
    losses, state, params = trained(distributed)
    assert losses == pytest.approx(one_device(model), abs=1e-10)
    expected = model.state_dict()
    for name, pair in params.items():
        torch.testing.assert_close(fs.unshard(pair), expected[name], rtol=1e-10, atol=1e-10)
    fs.interop.save_dcp(tmp_path / "dcp", {"app": {"model": params, "optim": state}})
    loaded = {"app": {"model": {name: torch.zeros_like(x) for name, x in expected.items()
                                if name in params}}}  # fmt: skip
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", tmp_path / "again")
    whole = torch.load(tmp_path / "state.pt")["app"]
    of_optimizer = {"step": P(), "mean": P("x"), "square": P("x")}
    specs = {"app": {"model": P("x"), "optim": of_optimizer}}
    resumed = fs.state.load(tmp_path / "again", specs, mesh=Mesh(x=2))["app"]
    for name, pair in params.items():
        value = fs.unshard(pair)
        assert torch.equal(loaded["app"]["model"][name], value)
        assert torch.equal(whole["model"][name], value)
        assert torch.equal(fs.unshard(resumed["model"][name]), value)
        mean = fs.unshard(resumed["optim"]["mean"][name])
        assert torch.equal(mean, fs.unshard(state["mean"][name]))


PLAN = {
    "tok_embeddings": rowwise("tp", output=1),
    "norm": sequence("tp"),
    "output": colwise("tp", output=None),
    r"layers\.\d+": prepare_input("tp", {0: 1}),
    r"layers\.\d+\.(attention_norm|ffn_norm)": sequence("tp"),
    r"layers\.\d+\.(attention|feed_forward)": prepare_input("tp", {0: None}),
    r"layers\.\d+\.attention\.w[qkv]": colwise("tp"),
    r"layers\.\d+\.attention\.wo": rowwise("tp", output=1),
    r"layers\.\d+\.feed_forward\.w[13]": colwise("tp"),
    r"layers\.\d+\.feed_forward\.w2": rowwise("tp", output=1),
}
"""Plan of the tutorial: tensor and sequence parallel."""


def test_tensor_and_sequence_parallel_with_fsdp() -> None:
    model, mesh = transformer(), Mesh(dp=2, tp=2)
    distributed = fs.state.distribute_module(model, mesh, styles=PLAN, fsdp="dp", in_specs=P("dp"))
    assert str(distributed.specs["params"]["layers.0.attention.wo.weight"]) == "f64[16@dp,16@tp]"
    losses, _, _ = trained(distributed)
    assert losses == pytest.approx(one_device(model), abs=1e-10)
