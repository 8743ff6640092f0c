"""Rules for tensor parallel parameters of models of transformers: Megatron-LM's layouts.

Attention is sharded over heads, feed-forward layers over their hidden units, embeddings and logits
over the vocabulary; norms, and biases that are added to sums, are replicated (arXiv 1909.08053).
"""

from __future__ import annotations

import re

import torch

from fshard._util.errors import did_you_mean, fail
from fshard.layout.mesh import Axes, as_axes
from fshard.layout.partition_spec import PartitionSpec

LLAMA = (
    (r".*\.(q|k|v|gate|up)_proj\.(weight|bias)", 0),
    (r".*\.(o|down)_proj\.weight", 1),
    (r"(.*\.)?(embed_tokens|lm_head)\.weight", 0),
)
GPT2 = (  # a Conv1D has a weight of inputs by outputs
    (r".*\.(c_attn|q_attn|c_fc)\.weight", 1),
    (r".*\.(c_attn|q_attn|c_fc)\.bias", 0),
    (r".*\.c_proj\.weight", 0),
    (r"(.*\.)?(wte|lm_head)\.weight", 0),
)
VIT = ((r".*\.([qkv]_proj|fc1)\.(weight|bias)", 0), (r".*\.(o_proj|fc2)\.weight", 1))
T5 = (
    (r".*Attention\.[qkv]\.weight|.*\.wi(_\d)?\.weight", 0),
    (r".*Attention\.o\.weight|.*\.wo\.weight|.*\.relative_attention_bias\.weight", 1),
    (r"(.*\.)?(shared|embed_tokens|lm_head)\.weight", 0),
)
RULES = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), LLAMA
    ),
    "gpt2": GPT2,
    "vit": VIT,
    "t5": T5,
}
"""Patterns of parameters and the dim that is sharded, by `config.model_type`."""


def model_rules(model: torch.nn.Module, axes: Axes, /) -> list[tuple[str, PartitionSpec]]:
    r"""Return rules for the parameters of a model of transformers, tensor parallel over axes.

    With `hold=axes`, `fs.state.distribute_module` then sends what Megatron-LM does: an all-reduce
    for each attention and each feed-forward layer, and one for the embedding, each way. GPT-2 has
    one fused weight of queries, keys and values, sharded by columns, whose result is exchanged once
    more per layer.

    Args:
        model: a model of the types llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, gpt2,
            vit or t5, by its `config.model_type`.
        axes: mesh axis, or axes major to minor.

    Returns:
        Rules for `fs.state.match_rules`, each matching some parameter of the model; the last one
        replicates all others.

    Raises:
        ShardingError: the model has another type.

    >>> import fshard as fs
    >>> import torch, types
    >>> model = torch.nn.ModuleDict({"lm_head": torch.nn.Linear(2, 4, bias=False)})
    >>> model.config = types.SimpleNamespace(model_type="llama")
    >>> fs.state.model_rules(model, "tp")
    [('(.*\\.)?(embed_tokens|lm_head)\\.weight', P('tp'))]
    """
    where = "fs.state.model_rules"
    names = as_axes(axes, where)
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in RULES:
        fail(where, f"a {type(model).__name__} of type {kind!r}",
             f"config.model_type must be one of {', '.join(RULES)}",
             did_you_mean(str(kind), list(RULES), 'rules of your own, as [(r".*\\.weight", '
                                                  'fs.P("tp")), (".*", fs.P())]'))  # fmt: skip
    rules = [(pattern, PartitionSpec(*(None,) * dim, names)) for pattern, dim in RULES[kind]]
    rules.append((".*", PartitionSpec()))
    matches = (
        next(rule for rule in rules if re.fullmatch(rule[0], name))
        for name, _ in model.named_parameters()
    )
    used = set(matches)
    return [rule for rule in rules if rule in used]
