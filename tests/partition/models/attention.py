"""Attention and its variants, diffusion, and medical images: packages of few models."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.partition.models.model_checks import Model
from tests.partition.models.zoo import (
    BATCH,
    COLUMNS,
    ROWS,
    Call,
    image_of,
    noise,
    register,
    text_of,
    words,
)


@register
def x_transformers_rotary() -> Model:
    from x_transformers import Decoder, TransformerWrapper

    return text_of(
        TransformerWrapper(
            num_tokens=32,
            max_seq_len=16,
            attn_layers=Decoder(
                dim=16,
                depth=2,
                heads=4,
                attn_dim_head=4,
                rotary_pos_emb=True,
                rotary_emb_dim=4,
                ff_glu=True,
            ),
        )
    )


@register
def x_transformers_alibi() -> Model:
    from x_transformers import Decoder, TransformerWrapper

    return text_of(
        TransformerWrapper(
            num_tokens=32,
            max_seq_len=16,
            attn_layers=Decoder(
                dim=16,
                depth=2,
                heads=4,
                attn_dim_head=4,
                alibi_pos_bias=True,
                use_rmsnorm=True,
                attn_qk_norm=True,
                attn_dropout=0.1,
            ),
        )
    )


@register
def x_transformers_encoder_decoder() -> Model:
    from x_transformers import XTransformer

    module = XTransformer(
        dim=16,
        enc_num_tokens=32,
        enc_depth=1,
        enc_heads=4,
        enc_max_seq_len=16,
        dec_num_tokens=32,
        dec_depth=1,
        dec_heads=4,
        dec_max_seq_len=16,
    )
    return Model(module, {"src": words(BATCH, 8), "tgt": words(BATCH, 8)}, COLUMNS, ROWS)


@register
def x_transformers_continuous() -> Model:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    module = ContinuousTransformerWrapper(
        dim_in=8,
        dim_out=4,
        max_seq_len=16,
        attn_layers=Encoder(dim=16, depth=2, heads=4, attn_dim_head=4, rel_pos_bias=True),
    )
    return Model(module, {"x": noise(BATCH, 8, 8)}, COLUMNS, ROWS)


IMAGE = {"image_size": 32, "num_classes": 10, "dim": 16, "depth": 2, "heads": 4, "mlp_dim": 32}


def _vit(path: str, kind: str, **options: Any) -> Model:
    return image_of(
        Call(
            getattr(importlib.import_module(f"vit_pytorch.{path}"), kind)(**options),
            lambda module, img: module(img),
        )
    )


@register
def vit_pytorch_deepvit() -> Model:
    return _vit("deepvit", "DeepViT", patch_size=8, **IMAGE)


@register
def vit_pytorch_cait() -> Model:
    return _vit("cait", "CaiT", patch_size=8, cls_depth=1, dropout=0.1, **IMAGE)


@register
def vit_pytorch_t2t() -> Model:
    return _vit("t2t", "T2TViT", t2t_layers=((7, 4), (3, 2)), **IMAGE)


@register
def vit_pytorch_cvt() -> Model:
    return _vit(
        "cvt",
        "CvT",
        num_classes=10,
        s1_emb_dim=16,
        s2_emb_dim=16,
        s3_emb_dim=16,
        s3_depth=1,
        s1_heads=1,
        s2_heads=2,
        s3_heads=2,
    )


@register
def vit_pytorch_twins() -> Model:
    return _vit(
        "twins_svt",
        "TwinsSVT",
        num_classes=10,
        s1_emb_dim=16,
        s1_local_patch_size=2,
        s1_global_k=2,
        s2_emb_dim=16,
        s2_local_patch_size=2,
        s2_global_k=2,
        s3_emb_dim=16,
        s3_local_patch_size=1,
        s3_global_k=1,
        s3_depth=1,
        s4_emb_dim=16,
        s4_local_patch_size=1,
        s4_global_k=1,
        s4_patch_size=1,
        s4_depth=1,
    )


@register
def vit_pytorch_max_vit() -> Model:
    return _vit(
        "max_vit",
        "MaxViT",
        num_classes=10,
        dim=8,
        depth=(1, 1),
        dim_head=4,
        window_size=4,
        dim_conv_stem=8,
    )


@register
def vit_pytorch_rvt() -> Model:
    return _vit("rvt", "RvT", patch_size=8, **IMAGE)


@register
def vit_pytorch_3d() -> Model:
    from vit_pytorch.vit_3d import ViT

    module = ViT(image_patch_size=8, frames=4, frame_patch_size=2, **IMAGE)
    return Model(module, {"video": noise(BATCH, 3, 4, 32, 32)}, COLUMNS, ROWS)


@register
def local_attention() -> Model:
    from local_attention import LocalTransformer

    return text_of(
        LocalTransformer(
            num_tokens=32,
            dim=16,
            depth=2,
            max_seq_len=16,
            heads=4,
            dim_head=4,
            local_attn_window_size=4,
            causal=True,
        )
    )


@register
def performer() -> Model:
    from performer_pytorch import PerformerLM

    return text_of(
        PerformerLM(
            num_tokens=32, max_seq_len=8, dim=16, depth=2, heads=4, dim_head=4, nb_features=8
        )
    )


@register
def linformer() -> Model:
    from linformer import LinformerLM

    return text_of(LinformerLM(num_tokens=32, dim=16, seq_len=8, depth=2, heads=4, k=4))


@register
def nystrom_attention() -> Model:
    from nystrom_attention import Nystromformer

    return Model(
        Nystromformer(dim=16, depth=1, heads=4, dim_head=4, num_landmarks=4),
        {"x": noise(BATCH, 8, 16)},
        COLUMNS,
        ROWS,
    )


@register
def linear_attention() -> Model:
    from linear_attention_transformer import LinearAttentionTransformerLM

    return text_of(
        LinearAttentionTransformerLM(num_tokens=32, dim=16, heads=4, depth=1, max_seq_len=8)
    )


@register
def perceiver() -> Model:
    from perceiver_pytorch import Perceiver

    module = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=2,
        max_freq=4.0,
        depth=2,
        num_latents=4,
        latent_dim=16,
        num_classes=10,
        latent_heads=4,
        latent_dim_head=4,
        cross_dim_head=4,
    )
    return Model(module, {"data": noise(BATCH, 8, 8, 3)}, COLUMNS, ROWS)


@register
def reformer_pytorch() -> Model:
    from reformer_pytorch import ReformerLM

    return text_of(
        ReformerLM(
            num_tokens=32, dim=16, depth=1, heads=4, max_seq_len=8, bucket_size=2, causal=True
        )
    )


@register
def mlp_mixer() -> Model:
    from mlp_mixer_pytorch import MLPMixer

    net = MLPMixer(image_size=32, channels=3, patch_size=8, dim=16, depth=2, num_classes=10)
    return image_of(Call(net, lambda net, img: net(img)))


@register
def denoising_diffusion() -> Model:
    from denoising_diffusion_pytorch import Unet

    return Model(
        Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2),
        {"x": noise(BATCH, 3, 16, 16), "time": torch.tensor([1, 5, 9, 3])},
    )


@register
def gaussian_diffusion() -> Model:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    net = Unet(dim=8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2)
    return image_of(GaussianDiffusion(net, image_size=16, timesteps=10), size=16)


def _monai(name: str, *shape: int, **options: Any) -> Model:
    import monai.networks.nets as nets

    net = getattr(nets, name)(**options)
    return Model(Call(net, lambda net, x: net(x)), {"x": noise(*shape)})


@register
def monai_unet() -> Model:
    return _monai(
        "UNet",
        BATCH,
        1,
        16,
        16,
        16,
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 8),
        strides=(2, 2),
        num_res_units=1,
    )


@register
def monai_segresnet() -> Model:
    return _monai("SegResNet", BATCH, 1, 16, 16, spatial_dims=2, init_filters=8, out_channels=2)


@register
def monai_unetr() -> Model:
    return _monai(
        "UNETR",
        BATCH,
        1,
        32,
        32,
        in_channels=1,
        out_channels=2,
        img_size=32,
        feature_size=4,
        hidden_size=16,
        mlp_dim=32,
        num_heads=4,
        spatial_dims=2,
    )


@register
def monai_swin_unetr() -> Model:
    return _monai(
        "SwinUNETR",
        BATCH,
        1,
        64,
        64,
        in_channels=1,
        out_channels=2,
        feature_size=12,
        spatial_dims=2,
    )


@register
def monai_attention_unet() -> Model:
    return _monai(
        "AttentionUnet",
        BATCH,
        1,
        16,
        16,
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 8),
        strides=(2, 2),
    )
