"""Models of transformers without rules of their own in fshard, distributed by five rules alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from tests.state.modules.module_cases import assert_close, words

transformers = pytest.importorskip("transformers", reason="the extra `models` is not installed")

WORDS = 32
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": WORDS,
}  # fmt: skip
LONG: dict[str, Any] = {**SMALL, "intermediate_size": 32, "max_position_embeddings": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi": ("ForCausalLM", LONG),
    "GPTNeoX": ("ForCausalLM", LONG | {"bos_token_id": 0, "eos_token_id": 0}),
    "OPT": ("ForCausalLM", SMALL | {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "Bloom": ("ForCausalLM", SMALL),
    "Falcon": ("ForCausalLM", SMALL),
    "Bert": ("ForMaskedLM", LONG | {"hidden_dropout_prob": 0.0}),
}
RULES = [
    (r".*([qkv]_proj|fc1|query|key|value|query_key_value|dense_h_to_4h)\.weight", P("tp")),
    (r".*intermediate\.dense\.weight", P("tp")),
    (r".*(out_proj|fc2|dense_4h_to_h|output\.dense)\.weight", P(None, "tp")),
    (r".*(embed_tokens|embed_in|embed_out|word_embeddings|lm_head)\.weight", P("tp")),
    (r".*", P()),
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_run_from_rules_alone(family: str) -> None:
    task, options = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**options, use_cache=False)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{task}")(config).double().eval()
    text = words(4, 8) % WORDS
    with torch.no_grad():
        expected = model(text).logits
    names = [name for name, _ in model.named_parameters()]
    used = {
        next(i for i, rule in enumerate(RULES) if re.fullmatch(rule[0], name)) for name in names
    }
    distributed = fs.state.distribute_module(
        model, Mesh(dp=2, tp=2), partition=[RULES[i] for i in sorted(used)], hold="tp", fsdp="dp",
        in_specs=P("dp"),
    )  # fmt: skip
    output, _ = distributed(distributed.params, distributed.buffers, text)
    assert_close(fs.unshard(output["logits"]), expected)
