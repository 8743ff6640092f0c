"""Registry of models: `MODELS[name]()` builds one, tiny and randomly initialized."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.partition.models.model_checks import Model

Build = Callable[[], Model]
MODELS: dict[str, Build] = {}
BATCH = 4
COLUMNS = r"\b(to_q|to_k|to_v|to_kv|to_qkv|w1|fc1|net\.0|net\.1|0\.0|ff\.0\.0|linear1)\b.*weight"
ROWS = r"\b(to_out|to_out\.0|w2|fc2|net\.3|net\.4|ff\.2|linear2)\.weight"


def register(build: Build) -> Build:
    """Register a function that builds a model under the function's name."""
    assert build.__name__ not in MODELS, build.__name__
    MODELS[build.__name__] = build
    return build


def words(*shape: int, vocabulary: int = 32) -> Tensor:
    """Return random word indices; ids below 4 are left out, as they often have a meaning."""
    return torch.randint(4, vocabulary, shape, generator=torch.Generator().manual_seed(1))


def noise(*shape: int) -> Tensor:
    """Return normal samples."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Call(nn.Module):
    """Module whose forward calls a function of the module that it holds."""

    def __init__(self, module: nn.Module, call: Any) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, **inputs: Any) -> Any:
        return self.call(self.module, **inputs)


def text_of(module: nn.Module, name: str = "x", length: int = 8) -> Model:
    return Model(module, {name: words(BATCH, length)}, COLUMNS, ROWS)


def image_of(module: nn.Module, name: str = "img", size: int = 32) -> Model:
    return Model(module, {name: noise(BATCH, 3, size, size)}, COLUMNS, ROWS)


def import_torchvision() -> None:
    """Import torchvision even if its library was compiled for another build of PyTorch.

    Its models in Python need none of the operators whose shapes it declares on import.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        with mock.patch.object(torch.library, "register_fake", return_value=lambda fn: fn):
            importlib.import_module("torchvision")
    except ImportError:
        return


import_torchvision()
