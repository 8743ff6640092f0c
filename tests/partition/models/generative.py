"""Models that generate and segment: diffusers, torchvision, segmentation_models_pytorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.partition.models.model_checks import Model
from tests.partition.models.zoo import BATCH, MODELS, noise

COLUMNS = (
    r"\b(to_q|to_k|to_v|add_[qkv]_proj|q_proj|k_proj|v_proj|linear_1|net\.0\.proj|"
    r"fc1|in_proj_weight|mlp\.0|linear1)\b"
)
ROWS = r"\b(to_out\.0|to_add_out|linear_2|net\.2|fc2|out_proj|mlp\.3|linear2)\.weight"
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


def steps() -> Tensor:
    """Return a time step for every sample."""
    return torch.tensor([1, 5, 9, 3])


def diffuser(kind: str, inputs: Callable[[], dict[str, Any]], **config: Any) -> Model:
    """Return the model of diffusers whose class has this name."""
    import diffusers

    return Model(getattr(diffusers, kind)(**config), inputs(), COLUMNS, ROWS)


def image(channels: int = 4, size: int = 8) -> Callable[[], dict[str, Any]]:
    return lambda: {"sample": noise(BATCH, channels, size, size)}


def denoised(channels: int = 4, size: int = 8, text: int = 16, **rest: Any) -> Any:
    """Return inputs of a denoiser: an image, time steps and embedded text."""
    return lambda: {
        "sample": noise(BATCH, channels, size, size),
        "timestep": steps(),
        **({"encoder_hidden_states": noise(BATCH, 6, text)} if text else {}),
        **rest,
    }


DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
DIT = {
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "in_channels": 4,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
}
AE = {
    **BLOCKS,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}

for name, kind, inputs, config in (
    (
        "unet2d",
        "UNet2DModel",
        denoised(3, 16, 0),
        {
            **BLOCKS,
            "in_channels": 3,
            "out_channels": 3,
            "attention_head_dim": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
    ),
    (
        "unet2d_condition",
        "UNet2DConditionModel",
        denoised(),
        {
            **BLOCKS,
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "down_block_types": DOWN,
            "up_block_types": UP,
        },
    ),
    (
        "unet3d",
        "UNet3DConditionModel",
        lambda: {
            "sample": noise(2, 4, 4, 8, 8),
            "timestep": steps()[:2],
            "encoder_hidden_states": noise(2, 6, 16),
        },
        {
            **BLOCKS,
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
    ),
    ("autoencoder_kl", "AutoencoderKL", image(3, 16), AE),
    (
        "vq_model",
        "VQModel",
        image(3, 16),
        {
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "latent_channels": 4,
            "num_vq_embeddings": 8,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
    ),
    (
        "dit",
        "DiTTransformer2DModel",
        lambda: {
            "hidden_states": noise(BATCH, 4, 8, 8),
            "timestep": steps(),
            "class_labels": steps(),
        },
        {**DIT, "num_embeds_ada_norm": 10, "norm_num_groups": 4},
    ),
    (
        "pixart",
        "PixArtTransformer2DModel",
        lambda: {
            "hidden_states": noise(BATCH, 4, 8, 8),
            "timestep": steps(),
            "encoder_hidden_states": noise(BATCH, 6, 32),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        {
            **DIT,
            "caption_channels": 32,
            "cross_attention_dim": 32,
            "out_channels": 8,
            "use_additional_conditions": False,
        },
    ),
    (
        "sd3",
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": noise(BATCH, 4, 8, 8),
            "timestep": steps(),
            "encoder_hidden_states": noise(BATCH, 6, 16),
            "pooled_projections": noise(BATCH, 8),
        },
        {
            **DIT,
            "joint_attention_dim": 16,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 8,
            "out_channels": 4,
        },
    ),
    (
        "flux",
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": noise(BATCH, 16, 4),
            "encoder_hidden_states": noise(BATCH, 6, 16),
            "pooled_projections": noise(BATCH, 8),
            "timestep": steps(),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(6, 3),
        },
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (2, 2, 4),
        },
    ),
    (
        "wan",
        "WanTransformer3DModel",
        lambda: {
            "hidden_states": noise(BATCH, 4, 2, 4, 4),
            "timestep": steps(),
            "encoder_hidden_states": noise(BATCH, 6, 16),
        },
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 16,
            "freq_dim": 16,
            "ffn_dim": 32,
            "num_layers": 1,
            "rope_max_seq_len": 16,
        },
    ),
    (
        "prior",
        "PriorTransformer",
        lambda: {
            "hidden_states": noise(BATCH, 8),
            "timestep": steps(),
            "proj_embedding": noise(BATCH, 8),
            "encoder_hidden_states": noise(BATCH, 6, 8),
        },
        {
            "num_attention_heads": 2,
            "attention_head_dim": 4,
            "num_layers": 2,
            "embedding_dim": 8,
            "num_embeddings": 6,
            "additional_embeddings": 4,
        },
    ),
    (
        "controlnet",
        "ControlNetModel",
        lambda: {**denoised()(), "controlnet_cond": noise(BATCH, 3, 64, 64)},
        {
            **BLOCKS,
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
            "down_block_types": DOWN,
            "conditioning_embedding_out_channels": (4, 8, 8, 8),
        },
    ),
    (
        "latte",
        "LatteTransformer3DModel",
        lambda: {
            "hidden_states": noise(BATCH, 4, 2, 8, 8),
            "timestep": steps(),
            "encoder_hidden_states": noise(BATCH, 6, 16),
        },
        {**DIT, "cross_attention_dim": 32, "caption_channels": 16, "video_length": 2},
    ),
    (
        "sana",
        "SanaTransformer2DModel",
        lambda: {
            "hidden_states": noise(BATCH, 4, 4, 4),
            "timestep": steps(),
            "encoder_hidden_states": noise(BATCH, 6, 16),
        },
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 1,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8,
            "cross_attention_dim": 16,
            "caption_channels": 16,
            "sample_size": 4,
        },
    ),
    (
        "cogvideox",
        "CogVideoXTransformer3DModel",
        lambda: {
            "hidden_states": noise(BATCH, 2, 4, 8, 8),
            "timestep": steps(),
            "encoder_hidden_states": noise(BATCH, 6, 16),
        },
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 6,
        },
    ),
):
    MODELS[f"diffusers_{name}"] = partial(diffuser, kind, inputs, **config)


def torchvision_model(name: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> Model:
    """Return a model of torchvision, without pretrained weights."""
    from torchvision import models

    module = models.get_model(name, weights=None, **options)
    columns = COLUMNS if "vit" in name or "swin" in name else ""
    return Model(module, inputs(), columns, ROWS)


def picture(size: int = 32, batch: int = BATCH) -> Callable[[], dict[str, Any]]:
    return lambda: {"x": noise(batch, 3, size, size)}


VIT = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 16,
    "mlp_dim": 32,
}
for name, inputs, options in (
    ("resnet18", picture(), {}),
    ("alexnet", picture(64), {}),
    ("squeezenet1_1", picture(), {}),
    ("googlenet", picture(64), {"init_weights": False, "aux_logits": False}),
    ("shufflenet_v2_x0_5", picture(), {}),
    ("mobilenet_v3_small", picture(), {}),
    ("mnasnet0_5", picture(), {}),
    ("regnet_x_400mf", picture(), {}),
    ("convnext_tiny", picture(), {}),
    ("swin_v2_t", picture(), {}),
    ("deeplabv3_mobilenet_v3_large", picture(64), {"weights_backbone": None}),
    ("r3d_18", lambda: {"x": noise(BATCH, 3, 4, 16, 16)}, {}),
    ("swin3d_t", lambda: {"x": noise(2, 3, 4, 32, 32)}, {}),
    (
        "raft_small",
        lambda: {
            "image1": noise(2, 3, 128, 128),
            "image2": noise(2, 3, 128, 128) + 0.1,
            "num_flow_updates": 2,
        },
        {},
    ),
):
    MODELS[f"torchvision_{name}"] = partial(torchvision_model, name, inputs, **options)


def torchvision_vit() -> Model:
    from torchvision.models import VisionTransformer

    return Model(VisionTransformer(**VIT), picture()(), COLUMNS, ROWS)


MODELS["torchvision_vit"] = torchvision_vit


def segmentation_model(name: str, encoder: str = "resnet18", **options: Any) -> Model:
    """Return a model of segmentation_models_pytorch."""
    import segmentation_models_pytorch as smp

    module = getattr(smp, name)(encoder, encoder_weights=None, classes=3, **options)
    return Model(module, picture(64)())


for name, options in (
    ("Unet", {}),
    ("UnetPlusPlus", {}),
    ("FPN", {}),
    ("PSPNet", {}),
    ("DeepLabV3Plus", {}),
    ("Linknet", {}),
    ("MAnet", {}),
    ("UPerNet", {}),
    ("Segformer", {"encoder": "mit_b0"}),
    ("DPT", {"encoder": "tu-vit_tiny_patch16_224", "dynamic_img_size": True}),
):
    MODELS[f"segmentation_{name}"] = partial(segmentation_model, name, **options)
