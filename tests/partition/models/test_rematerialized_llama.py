"""A Llama of transformers with recomputed values equals one device; skipped if not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import Mesh, P

CASES = [
    ("gathers", True),
    *(pytest.param(remat, False, marks=pytest.mark.slow) for remat in ("gathers", "all")),
]


def llama(checkpointed: bool) -> Any:
    """Return a tiny model in float64, its layers checkpointed by its own option."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    return model


@pytest.mark.filterwarnings("ignore")  # the package's own
@pytest.mark.parametrize(("remat", "checkpointed"), CASES)
def test_llama_equals_one_device(remat: str, checkpointed: bool) -> None:
    words = torch.arange(16 * 64).reshape(16, 64) ** 2 % 61
    plain, model = llama(False), llama(checkpointed)
    logits = plain(input_ids=words).logits
    expected = torch.autograd.grad(logits.square().mean(), [*plain.parameters()])

    def square(params: dict[str, Tensor], words: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(model, params, (), {"input_ids": words}).logits
        return out.square().mean(), out

    params = dict(model.named_parameters())
    options: dict[str, Any] = {"mesh": Mesh(x=2), "params": P("x"), "in_specs": P("x")}
    part = fs.partition(square, remat=remat, out_specs=(P(), P("x")), **options)
    loss, out = part(params, words)
    grads = torch.autograd.grad(loss, [*params.values()])
    torch.testing.assert_close(out, logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(grads, expected, rtol=0, atol=1e-10)
    again, kept = (
        fs.partition(square, remat=policy, **options).trace(params, words).saved_bytes()
        for policy in (remat, None)
    )
    assert again.gathered == 0 < kept.gathered
    assert again.activations == (0 if remat == "all" else kept.activations)
