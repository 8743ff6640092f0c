"""Models of transformers run distributed from rules alone; skipped if it is not installed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import Mesh, P
from tests.helpers.gloo.harness import run_ranks
from tests.partition.models.model_checks import InFloat64
from tests.state.modules.module_cases import assert_close, check_equals_one_device, noise, words

MESH = Mesh(dp=2, tp=2)
LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 16, "n_layer": LAYERS, "n_head": 4, "n_positions": 32, "vocab_size": 32,
        "bos_token_id": 1, "eos_token_id": 2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": LAYERS, "num_heads": 4,
      "decoder_start_token_id": 0, "dropout_rate": 0.0}  # fmt: skip
VIT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": LAYERS,
       "num_attention_heads": 4, "image_size": 16, "patch_size": 8}  # fmt: skip
TIED = {"tie_word_embeddings": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "llama, tied": ("LlamaForCausalLM", {**SIZES, **TIED}),
    "mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", SIZES),
    "gemma": ("GemmaForCausalLM", SIZES),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "sliding_window": 4}),
    "gemma3": ("Gemma3ForCausalLM", {**SIZES, "sliding_window": 4}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "vit": ("ViTForImageClassification", VIT),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5, gated": (
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": ("dp", "tp"), "in_specs": P(("dp", "tp"))},
    "tensor": {"hold": "tp"},
    "both": {"fsdp": "dp", "hold": "tp", "in_specs": P("dp")},
}
CASES = [
    pytest.param(*case, marks=[] if case[0] == "llama" or case[1] == "both" else pytest.mark.slow)
    for case in itertools.product(MODELS, LAYOUTS)
]
"""By default one model runs in all layouts, the others tensor parallel with FSDP."""


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    pytest.importorskip("transformers", reason="the extra `models` is not installed")
    with warnings.catch_warnings(), InFloat64():
        warnings.simplefilter("ignore")  # of packages that transformers imports
        yield


def model_of(name: str, device: str = "cpu") -> nn.Module:
    """Return a tiny model with random parameters, of one of the package's own classes."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, MODELS[name][0])
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = kind(kind.config_class(**MODELS[name][1]))
    return model.double()


def inputs_of(name: str) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": noise(4, 3, 16, 16), "labels": words(4, vocabulary=2)}
    text = words(4, 8, vocabulary=32)
    return {"input_ids": text, "labels": text, "use_cache": False}


def in_specs_of(name: str, p: Any) -> Any:
    return p if p is None else {key: p if isinstance(value, Tensor) else None
                                for key, value in inputs_of(name).items()}  # fmt: skip


def distributed_of(name: str, layout: str, mesh: Mesh = MESH) -> fs.state.DistributedModule:
    options = dict(LAYOUTS[layout])
    model = model_of(name)
    rules = fs.state.model_rules(model, "tp") if layout != "fsdp" else P()
    options["in_specs"] = in_specs_of(name, options.get("in_specs"))
    return fs.state.distribute_module(model, mesh, partition=rules, **options)


def loss_of(output: Any) -> Any:
    """Return the model's loss and a term of its logits, which have gradients of their own."""
    return output["loss"] + output["logits"].sin().mean()


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_model_equals_one_device(name: str, layout: str) -> None:
    distributed = distributed_of(name, layout)
    check_equals_one_device(distributed, inputs_of(name), loss_of)


def test_more_ranks_than_key_value_heads() -> None:
    distributed = distributed_of("llama", "tensor", Mesh(tp=4))
    check_equals_one_device(distributed, inputs_of("llama"), loss_of)


# -- collectives -----------------------------------------------------------------------------

MEGATRON: dict[str, tuple[int, int]] = {
    # An all-reduce of activations for each attention and each feed-forward layer, each way; of the
    # embeddings forward, of the logits' input backward. T5's decoder has three in a layer; both
    # embeddings are reduced, and so is the gradient of the encoder's result, once for all layers.
    "llama": (2 * LAYERS + 1, 2 * LAYERS + 1),
    "gpt2": (2 * LAYERS + 1, 2 * LAYERS + 1),
    "vit": (2 * LAYERS, 2 * LAYERS),
    "t5": (5 * LAYERS + 2, 5 * LAYERS + 2),
}
ACTIVATION = 4 * 8 * 16 * 8
"""Bytes of an activation of the models of text: batch, length, width, float64."""
VOCABULARY_LOSS = (4 * 8 + 4 * 8 + 1) * 8
"""Bytes of the loss over a sharded vocabulary: maxima and sums of the logits, and their mean."""


@pytest.mark.parametrize("name", MEGATRON)
def test_tensor_parallel_collectives_are_megatrons(name: str) -> None:
    """Bytes count all-reduces, since several may share a launch."""
    distributed = distributed_of(name, "tensor", Mesh(tp=2))
    with fs.comm_log() as log:
        output, _ = distributed(distributed.params, distributed.buffers, **inputs_of(name))
        fs.unshard(output["loss"]).backward()
    nbytes = 4 * 5 * 16 * 8 if name == "vit" else ACTIVATION
    key = ("all_reduce", "tp")
    counts = tuple(phase.bytes[key] // nbytes for phase in (log.forward, log.backward))
    assert counts == MEGATRON[name]
    total = sum(phase.bytes[key] for phase in (log.forward, log.backward))
    assert total == sum(counts) * nbytes + (0 if name == "vit" else VOCABULARY_LOSS)
    assert {op for op, _ in log.counts} - {"all_reduce"} <= EXTRA[name]


EXTRA = {
    # The logits are gathered for the loss of few words; GPT-2's fused projection is exchanged.
    "llama": {"all_gather"},
    "gpt2": {"all_gather", "exchange"},
    "vit": set(),
    "t5": {"all_gather"},
}


# -- plans of the package, checkpoints, creation from a key -----------------------------------

STYLES = {"colwise": fs.state.colwise("tp"), "rowwise": fs.state.rowwise("tp")}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_plans_of_transformers_are_styles(name: str) -> None:
    """`config.base_model_tp_plan` maps paths of modules to the names of two styles."""
    model = model_of(name)
    plan: Mapping[str, str] = model.config.base_model_tp_plan
    styles = {rf"model\.{path}": STYLES[style] for path, style in plan.items() if style in STYLES}
    assert len(styles) == 7
    distributed = fs.state.distribute_module(model, Mesh(tp=2), styles=styles)
    check_equals_one_device(distributed, inputs_of(name), loss_of)
    spec = distributed.params["model.layers.1.mlp.down_proj.weight"].spec
    assert str(spec) == "f64[16,32@tp]"


@pytest.mark.parametrize("name", ["llama", "vit", "t5"])
def test_models_round_trip_into_another_mesh(name: str, tmp_path: Path) -> None:
    source = distributed_of(name, "both")
    fs.state.save(tmp_path, {"params": source.params, "buffers": source.buffers})
    target = distributed_of(name, "tensor", Mesh(tp=4))
    state = fs.state.load(tmp_path, target.specs)
    expected = {**dict(source.module.named_parameters()), **dict(source.module.named_buffers())}
    for key, pair in {**state["params"], **state["buffers"]}.items():
        assert pair.mesh == Mesh(tp=4)
        assert torch.equal(fs.unshard(pair), expected[key])
    output, _ = target(state["params"], state["buffers"], **inputs_of(name))
    assert_close(fs.unshard(output["loss"]), source.module(**inputs_of(name)).loss)


def test_a_meta_llama_is_created_from_a_key() -> None:
    model = model_of("llama", "meta")
    distributed = fs.state.distribute_module(
        model, MESH, partition=fs.state.model_rules(model, "tp"), fsdp="dp", key=fs.random.key(0),
        init_fn=lambda model: model.apply(model._init_weights),
    )  # fmt: skip
    weight = fs.unshard(distributed.params["model.layers.0.mlp.up_proj.weight"])
    assert 0.015 < weight.std() < 0.025  # config.initializer_range is 0.02
    expected = dict(model_of("llama").named_buffers())["model.rotary_emb.inv_freq"]
    assert_close(fs.unshard(distributed.buffers["model.rotary_emb.inv_freq"]), expected)
    output, _ = distributed(distributed.params, distributed.buffers, **inputs_of("llama"))
    assert fs.unshard(output["loss"]).isfinite()


def on_ranks(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    fs.init(MESH)
    with warnings.catch_warnings(), InFloat64():
        warnings.simplefilter("ignore")
        distributed = distributed_of(name, "both")

        def run(params: Any) -> Any:
            output, _ = distributed(params, distributed.buffers, **inputs_of(name))
            return loss_of(fs.state.tree_unshard(output))

        value, grads = fs.state.value_and_grad(run)(distributed.params)
        return value, fs.state.tree_unshard(grads)


def test_a_llama_runs_on_processes() -> None:
    model = model_of("llama")
    loss = loss_of(model(**inputs_of("llama")))
    loss.backward()
    for value, grads in run_ranks(4, on_ranks, "llama"):
        assert_close(value, loss.detach())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert_close(grads[name], parameter.grad, name)


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(fs.ShardingError, match=r"a Linear of type None.*\n.*must be one of llama"):
        fs.state.model_rules(nn.Linear(2, 2), "tp")


def test_caches_in_results_are_refused_with_their_option() -> None:
    distributed = distributed_of("llama", "tensor")
    with pytest.raises(fs.ShardingError, match=r"DynamicCache.*\n.*\n.*use_cache=False"):
        distributed(distributed.params, distributed.buffers, words(4, 8))
