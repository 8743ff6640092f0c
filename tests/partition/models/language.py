"""Models of text of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.partition.models.model_checks import Model
from tests.partition.models.zoo import BATCH, MODELS, words

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
COLUMNS = (
    r"\b(q|k|v|up|gate|qkv|gate_up|query|key|value)_proj\.|\b(query|key|value|fc1|fc_in|wi|lin1|"
    r"[qkv]_lin|[qkv]_head|linear_1)\.|\bffn\.(0\.)?(weight|bias)|intermediate\.dense\."
    r"|\.SelfAttention\.[qkv]\.|EncDecAttention\.[qkv]\.|Wqkv|dense_h_to_4h|c_fc"
)
ROWS = (
    r"\b(o|down|out|post)_proj\.weight|output\.dense\.weight|\b(fc2|wo|lin2|out_lin|o|fc_out|linear_2|"
    r"dense_4h_to_h|dense)\.weight|ffn_output\.weight|\bffn\.2\.weight"
)
GROUPED = {"num_key_value_heads": 2, "head_dim": 4}


def text_model(
    name: str, columns: str = COLUMNS, rows: str = ROWS, labels: bool = True, **config: Any
) -> Model:
    """Return the model of transformers whose class has this name."""
    import transformers

    kind = getattr(transformers, name)
    settings = {key: value for key, value in {**SIZES, **config}.items() if value is not None}
    module = kind(kind.config_class(**settings))
    if "num_experts_per_tok" in config:
        module.set_experts_implementation("batched_mm")  # the default has no float64
    text = words(BATCH, 8)
    return Model(module, {"input_ids": text, **({"labels": text} if labels else {})}, columns, rows)


ENCODER_DECODER = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
    "num_hidden_layers": 2,
}
T5 = {
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
MOE = {
    **GROUPED,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}

DELTA = {
    **GROUPED,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
for name, kind, config in (
    ("qwen3", "Qwen3ForCausalLM", GROUPED),
    ("gemma3", "Gemma3ForCausalLM", {**GROUPED, "sliding_window": 4}),
    ("gemma2", "Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4}),
    ("phi3", "Phi3ForCausalLM", GROUPED),
    ("stablelm", "StableLmForCausalLM", GROUPED),
    ("olmo2", "Olmo2ForCausalLM", GROUPED),
    ("cohere", "CohereForCausalLM", GROUPED),
    ("granite", "GraniteForCausalLM", GROUPED),
    ("glm4", "Glm4ForCausalLM", GROUPED),
    ("starcoder2", "Starcoder2ForCausalLM", GROUPED),
    ("nemotron", "NemotronForCausalLM", GROUPED),
    ("smollm3", "SmolLM3ForCausalLM", GROUPED),
    ("falcon", "FalconForCausalLM", {"alibi": True}),
    ("mpt", "MptForCausalLM", {"d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32}),
    ("gptj", "GPTJForCausalLM", {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    ("codegen", "CodeGenForCausalLM", {"n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    (
        "gpt_neo",
        "GPTNeoForCausalLM",
        {
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    ("gpt_bigcode", "GPTBigCodeForCausalLM", {"n_embd": 16, "n_layer": 2, "n_head": 4}),
    ("mixtral", "MixtralForCausalLM", MOE),
    ("qwen3_moe", "Qwen3MoeForCausalLM", MOE),
    (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **MOE,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "num_key_value_heads": 4,
            "moe_layer_freq": 1,
        },
    ),
    ("gpt_oss", "GptOssForCausalLM", {**MOE, "sliding_window": 4}),
    ("olmoe", "OlmoeForCausalLM", MOE),
    ("t5", "T5ForConditionalGeneration", T5),
    ("umt5", "UMT5ForConditionalGeneration", T5),
    (
        "switch_transformers",
        "SwitchTransformersForConditionalGeneration",
        {**T5, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    ("bart", "BartForConditionalGeneration", ENCODER_DECODER),
    ("pegasus", "PegasusForConditionalGeneration", ENCODER_DECODER),
    ("marian", "MarianMTModel", ENCODER_DECODER),
    ("blenderbot", "BlenderbotForConditionalGeneration", ENCODER_DECODER),
    (
        "prophetnet",
        "ProphetNetForConditionalGeneration",
        {
            "hidden_size": 16,
            "num_hidden_layers": None,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "decoder_start_token_id": 2,
        },
    ),
    (
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    ("deberta", "DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    ("albert", "AlbertForMaskedLM", {"embedding_size": 8}),
    ("electra", "ElectraForMaskedLM", {"embedding_size": 8}),
    ("mpnet", "MPNetForMaskedLM", {}),
    ("modernbert", "ModernBertForMaskedLM", {"sliding_window": 4, "local_attention": 4}),
    ("longformer", "LongformerForMaskedLM", {"attention_window": 4}),
    ("big_bird", "BigBirdForMaskedLM", {"attention_type": "original_full"}),
    ("convbert", "ConvBertForMaskedLM", {"embedding_size": 16}),
    ("squeezebert", "SqueezeBertForMaskedLM", {"embedding_size": 16}),
    (
        "mobilebert",
        "MobileBertForMaskedLM",
        {
            "embedding_size": 16,
            "true_hidden_size": 16,
            "intra_bottleneck_size": 16,
            "rows": r"output\.dense\.weight",
        },
    ),
    (
        "nystromformer",
        "NystromformerForMaskedLM",
        {"num_landmarks": 4, "segment_means_seq_len": 8, "conv_kernel_size": 3},
    ),
    ("fnet", "FNetForMaskedLM", {}),
    (
        "funnel",
        "FunnelForMaskedLM",
        {
            "d_model": 16,
            "n_head": 4,
            "d_head": 4,
            "d_inner": 32,
            "block_sizes": [1, 1],
            "num_hidden_layers": None,
            "columns": rf"{COLUMNS}|\br_[rsw]_bias",
            "rows": rf"{ROWS}|\br_kernel|\bseg_embed",
        },
    ),
    (
        "xlnet",
        "XLNetLMHeadModel",
        {"d_model": 16, "n_head": 4, "n_layer": 2, "d_inner": 32, "max_position_embeddings": None},
    ),
    ("xlm", "XLMWithLMHeadModel", {"emb_dim": 16, "n_heads": 4, "n_layers": 2}),
    ("roformer", "RoFormerForMaskedLM", {"embedding_size": 16}),
    ("esm", "EsmForMaskedLM", {"position_embedding_type": "rotary", "mask_token_id": 3}),
    ("ibert", "IBertForMaskedLM", {}),
    ("canine", "CanineModel", {"num_hash_buckets": 16, "local_transformer_stride": 4}),
    (
        "reformer",
        "ReformerModelWithLMHead",
        {
            "attn_layers": ["local", "local"],
            "axial_pos_embds": False,
            "local_attn_chunk_length": 4,
            "feed_forward_size": 32,
            "attention_head_size": 4,
            "is_decoder": True,
        },
    ),
    (
        "mamba2",
        "Mamba2ForCausalLM",
        {
            "num_heads": 4,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 1,
            "chunk_size": 4,
            "expand": 2,
        },
    ),
    ("falcon_mamba", "FalconMambaForCausalLM", {"state_size": 4}),
    (
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        {
            "num_hidden_layers": 3,
            "lru_width": 16,
            "attention_window_size": 4,
            "num_key_value_heads": 1,
        },
    ),
    (
        "bamba",
        "BambaForCausalLM",
        {
            **GROUPED,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
            "attn_layer_indices": [1],
        },
    ),
    ("lfm2", "Lfm2ForCausalLM", {**GROUPED, "full_attn_idxs": [1], "block_ff_dim": 32}),
    ("rwkv", "RwkvForCausalLM", {"attention_hidden_size": 16}),
    (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {
            **MOE,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    ("doge", "DogeForCausalLM", GROUPED),
    ("diffllama", "DiffLlamaForCausalLM", GROUPED),
    ("arcee", "ArceeForCausalLM", GROUPED),
    ("helium", "HeliumForCausalLM", GROUPED),
    ("exaone4", "Exaone4ForCausalLM", {**GROUPED, "sliding_window": 4}),
    ("minimax", "MiniMaxForCausalLM", {**MOE, "block_size": 4}),
    ("ernie", "ErnieForMaskedLM", {}),
    ("luke", "LukeForMaskedLM", {"entity_vocab_size": 8, "entity_emb_size": 8}),
    ("gpt1", "OpenAIGPTLMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    (
        "ctrl",
        "CTRLLMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "dff": 32, "n_positions": 32},
    ),
    ("biogpt", "BioGptForCausalLM", {}),
    (
        "falcon_h1",
        "FalconH1ForCausalLM",
        {
            **GROUPED,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
        },
    ),
    ("olmo_hybrid", "OlmoHybridForCausalLM", DELTA),
    ("qwen3_5", "Qwen3_5ForCausalLM", DELTA),
    ("nanochat", "NanoChatForCausalLM", GROUPED),
    ("glm", "GlmForCausalLM", GROUPED),
    ("mra", "MraForMaskedLM", {"block_per_row": 2}),
    ("rembert", "RemBertForMaskedLM", {"input_embedding_size": 16, "output_embedding_size": 16}),
    ("megatron_bert", "MegatronBertForMaskedLM", {}),
    ("eurobert", "EuroBertForMaskedLM", {"num_key_value_heads": 4}),
    ("nomic_bert", "NomicBertForMaskedLM", {}),
    ("plbart", "PLBartForConditionalGeneration", ENCODER_DECODER),
    (
        "pegasus_x",
        "PegasusXForConditionalGeneration",
        {**ENCODER_DECODER, "num_global_tokens": 2, "block_size": 4},
    ),
    (
        "bigbird_pegasus",
        "BigBirdPegasusForConditionalGeneration",
        {**ENCODER_DECODER, "attention_type": "original_full"},
    ),
):
    extra = {"labels": False} if kind == "CanineModel" else {}
    MODELS[name] = partial(text_model, kind, **extra, **config)
