"""Models of images, video and several modes: timm, torchvision, segmentation, vit-pytorch."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.partition.models.model_checks import Model
from tests.partition.models.zoo import BATCH, MODELS, noise

COLUMNS = r"(qkv|fc1|to_qkv|to_q|to_kv|to_k|to_v|linear1|in_proj_weight|mlp\.0|net\.1)\b"
ROWS = r"(proj|fc2|to_out\.0|linear2|out_proj|mlp\.3|net\.4)\.weight"


def timm_model(name: str, size: int = 32, **options: Any) -> Model:
    """Return a model of timm of 10 classes."""
    import timm

    size = options.get("img_size", size)
    module = timm.create_model(name, num_classes=10, **options)
    columns = COLUMNS if any("qkv" in n or "fc1" in n for n, _ in module.named_parameters()) else ""
    return Model(module, {"x": noise(BATCH, 3, size, size)}, columns, ROWS)


SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8}
for name, options in (
    ("efficientnet_b0", {}),
    ("convnextv2_atto", {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32)}),
    (
        "swinv2_tiny_window8_256",
        {
            "img_size": 32,
            "window_size": 4,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
    ),
    (
        "coatnet_0_rw_224",
        {"img_size": 64, "embed_dim": (32, 32, 32, 32), "depths": (1, 1, 1, 1), "stem_width": 32},
    ),
    ("regnety_002", {}),
    ("densenet121", {"growth_rate": 4, "block_config": (2, 2)}),
    ("mobilevit_xxs", {}),
    ("edgenext_xx_small", {}),
    ("efficientformer_l1", {"size": 224}),
    ("xcit_nano_12_p16_224", SMALL),
    ("cait_xxs24_224", SMALL),
    ("deit3_small_patch16_224", SMALL),
    ("beit_base_patch16_224", SMALL),
    ("eva02_tiny_patch14_224", SMALL),
    ("levit_128s", {"size": 224}),
    ("pvt_v2_b0", {}),
    ("poolformer_s12", {}),
    ("resmlp_12_224", {"img_size": 32}),
    ("gmlp_s16_224", {"img_size": 32}),
    ("repvgg_a0", {}),
    ("ghostnet_050", {}),
    ("hrnet_w18_small", {}),
    ("dla34", {}),
    ("dpn48b", {}),
    ("twins_svt_small", {}),
    ("tnt_s_patch16_224", {"img_size": 32}),
    ("pit_ti_224", {"img_size": 32}),
    ("visformer_tiny", {"img_size": 32}),
    ("sequencer2d_s", {"img_size": 32}),
    ("focalnet_tiny_srf", {}),
    ("davit_tiny", {}),
    ("mvitv2_tiny", {"img_size": 32}),
    ("nf_resnet50", {}),
    ("rexnet_100", {}),
    ("selecsls42", {}),
    ("hiera_tiny_224", {"img_size": 32}),
    ("fastvit_t8", {}),
    ("mobilenetv4_conv_small", {}),
    ("repghostnet_050", {}),
    ("starnet_s1", {}),
    ("hgnetv2_b0", {}),
    ("xception41", {}),
    ("res2net50_26w_4s", {}),
    ("resnest14d", {}),
    ("skresnet18", {}),
    ("seresnet18", {}),
    ("eca_resnet33ts", {}),
    ("botnet26t_256", {"img_size": 64}),
    ("halonet26t", {"img_size": 64}),
    ("lambda_resnet26t", {"img_size": 64}),
    ("crossvit_9_240", {}),
    ("nest_tiny", {"img_size": 32}),
    ("convit_tiny", SMALL),
    ("coat_tiny", {"img_size": 64}),
    ("mambaout_femto", {}),
    ("repvit_m0_9", {}),
    ("efficientvit_b0", {}),
    ("inception_next_atto", {}),
    ("caformer_s18", {}),
    ("vitamin_small_224", {"img_size": 32}),
    ("vit_small_patch14_reg4_dinov2", SMALL),
    ("samvit_base_patch16", {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 4}),
    ("shvit_s1", {}),
    ("swiftformer_xs", {}),
    ("rdnet_tiny", {}),
    ("test_nfnet", {}),
    ("gcvit_xxtiny", {"img_size": 64}),
    ("efficientformerv2_s0", {"img_size": 64}),
    ("ese_vovnet19b_slim", {}),
    ("tresnet_m", {}),
):
    MODELS[f"timm_{name}"] = partial(timm_model, name, **options)
