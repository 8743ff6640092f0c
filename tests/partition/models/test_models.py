"""Ten models of other packages equal one device in every layout; skipped if not installed."""

from __future__ import annotations

import pytest
import torch

from tests.partition.models import (  # noqa: F401
    attention,
    generative,
    graphs,
    language,
    structures,
    vision,
)
from tests.partition.models.model_checks import LAYOUTS, check
from tests.partition.models.zoo import MODELS

TEN = (
    "gemma3",
    "t5",
    "mamba2",
    "timm_convnextv2_atto",
    "timm_xcit_nano_12_p16_224",
    "diffusers_unet2d_condition",
    "pyg_GIN",
    "vit_pytorch_deepvit",
    "mambapy",
    "zuko_nsf",
)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")  # the packages' own
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TEN)
def test_model_equals_one_device(name: str, layout: str) -> None:
    torch.manual_seed(0)
    try:
        model = MODELS[name]()
    except ImportError as error:
        pytest.skip(f"the extra `models` is not installed: {error}")
    if layout in ("tensor", "hybrid") and not model.columns:
        pytest.skip("its parameters have no layout for tensor parallelism")
    outcome = check(model, layout)
    assert outcome.status == "works", f"{outcome.error:.1e} {outcome.reason}"
    assert outcome.traffic.forward > 0
