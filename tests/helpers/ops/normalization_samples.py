"""Sample calls of normalizations."""

from __future__ import annotations

import itertools

import torch

from tests.helpers.ops.samples import Sample
from tests.helpers.ops.samples import positive as rand

__all__ = ["BATCHES", "GROUPS", "LAYERS", "OTHERS", "WITH_RUNNING", "running", "weights"]

aten = torch.ops.aten


def weights(channels: int, given: str) -> list[torch.Tensor | None]:
    """Return weight and bias, None unless `given` contains "w" or "b"."""
    return [rand(channels, seed=i) if word in given else None for i, word in enumerate("wb")]


AFFINE = ("wb", "w", "b", "")

LAYERS: dict[str, Sample] = {
    **{f"layer_norm {g}": lambda g=g: (aten.layer_norm.default, rand(3, 2, 4), [4], *weights(4, g))
       for g in AFFINE},
    "layer_norm 2":
        lambda: (aten.layer_norm.default, rand(3, 2, 4), [2, 4], rand(2, 4), rand(2, 4)),
    "layer_norm all": lambda: (aten.layer_norm.default, rand(4), [4], rand(4), None),
    "layer_norm empty": lambda: (aten.layer_norm.default, rand(0, 4), [4], rand(4), rand(4)),
    **{f"native_layer_norm {g}":
       lambda g=g: (aten.native_layer_norm.default, rand(3, 4), [4], *weights(4, g), 1e-5)
       for g in AFFINE},
    "rms_norm": lambda: (aten.rms_norm.default, rand(3, 2, 4), [4], rand(4)),
    "rms_norm eps": lambda: (aten.rms_norm.default, rand(3, 2, 4), [2, 4], None, 1e-3),
    "fused rms_norm": lambda: (aten._fused_rms_norm.default, rand(3, 4), [4], rand(4), 1e-6),
    **{f"native_layer_norm_backward {mask}": lambda mask=mask: (
        aten.native_layer_norm_backward.default, rand(3, 2, 4), rand(3, 2, 4, seed=1), [4],
        rand(3, 2, 1), rand(3, 2, 1, seed=2), rand(4), rand(4), list(mask))
       for mask in itertools.product((True, False), repeat=3) if any(mask)},
}  # fmt: skip

GROUPS: dict[str, Sample] = {
    **{f"group_norm {g}": lambda g=g: (aten.group_norm.default, rand(2, 6, 3), 3, *weights(6, g))
       for g in ("wb", "w", "")},
    "group_norm 2d": lambda: (aten.group_norm.default, rand(3, 8), 2, rand(8), rand(8)),
    "group_norm 4d": lambda: (aten.group_norm.default, rand(2, 4, 2, 3), 4),
    "group_norm of one": lambda: (aten.group_norm.default, rand(2, 4, 3), 1, rand(4)),
    "native_group_norm":
        lambda: (aten.native_group_norm.default, rand(2, 6, 2, 2), rand(6), rand(6), 2, 6, 4, 3,
                 1e-5),
    **{f"native_group_norm_backward {mask}": lambda mask=mask: (
        aten.native_group_norm_backward.default, rand(2, 6, 2), rand(2, 6, 2, seed=1), rand(2, 3),
        rand(2, 3, seed=1), rand(6), 2, 6, 2, 3, list(mask))
       for mask in ((True, True, True), (True, False, False), (False, True, True))},
}  # fmt: skip


def running(channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a running mean and variance."""
    return rand(channels, seed=3), rand(channels, seed=4)


BATCHES: dict[str, Sample] = {
    **{f"batch_norm {g} {shape}": lambda g=g, shape=shape: (
        aten.batch_norm.default, rand(*shape), *weights(3, g), None, None, True, 0.1, 1e-5, False)
       for g in ("wb", "") for shape in ((4, 3), (2, 3, 2), (2, 3, 1, 2))},
    "native_batch_norm": lambda: (
        aten.native_batch_norm.default, rand(4, 3), rand(3), rand(3), None, None, True, 0.1, 1e-5),
    "legit no_stats": lambda: (
        aten._native_batch_norm_legit.no_stats, rand(4, 3, 2), rand(3), None, True, 0.1, 1e-5),
    "instance_norm": lambda: (
        aten.instance_norm.default, rand(2, 3, 4), rand(3), rand(3), None, None, True, 0.1, 1e-5,
        False),
    **{f"native_batch_norm_backward {train}": lambda train=train: (
        aten.native_batch_norm_backward.default, rand(3, 2, 2), rand(3, 2, 2, seed=1), rand(2),
        *running(2), *(running(2) if train else (None, None)), train, 1e-5, [True, True, True])
       for train in (True, False)},
}  # fmt: skip

WITH_RUNNING: dict[str, Sample] = {
    **{f"batch_norm {train} {g}": lambda g=g, train=train: (
        aten.batch_norm.default, rand(4, 3, 2), *weights(3, g), *running(3), train, 0.1, 1e-5,
        False)
       for g in ("wb", "b", "") for train in (True, False)},
    **{f"instance_norm {own}": lambda own=own: (
        aten.instance_norm.default, rand(3, 2, 4), rand(2), rand(2), *running(2), own, 0.1, 1e-5,
        False)
       for own in (True, False)},
    "functional": lambda: (
        aten._native_batch_norm_legit_functional.default, rand(4, 3), rand(3), rand(3),
        *running(3), True, 0.1, 1e-5),
    "in place": lambda: (
        aten._native_batch_norm_legit.default, rand(4, 3), rand(3), rand(3), *running(3), True,
        0.1, 1e-5),
    "with update": lambda: (
        aten._batch_norm_with_update_functional.default, rand(4, 3), rand(3), rand(3),
        *running(3), 0.1, 1e-5),
}  # fmt: skip

OTHERS: dict[str, Sample] = {
    "renorm": lambda: (aten.renorm.default, rand(3, 4, 2), 2, 1, 0.5),
    "renorm 1": lambda: (aten.renorm.default, rand(3, 4), 1, -1, 5.0),
    "cosine": lambda: (aten.cosine_similarity.default, rand(3, 4), rand(3, 4, seed=1)),
    "cosine spread": lambda: (aten.cosine_similarity.default, rand(3, 1, 4), rand(2, 4), -1),
    "cosine of zeros": lambda: (aten.cosine_similarity.default, rand(3, 4) * 0, rand(3, 4), 0),
    "cosine 1d": lambda: (aten.cosine_similarity.default, rand(4), rand(4, seed=1), 0),
    "_weight_norm": lambda: (aten._weight_norm.default, rand(3, 4), rand(3, 1)),
    "_weight_norm last": lambda: (aten._weight_norm.default, rand(3, 2, 4), rand(1, 1, 4), 2),
    "interface": lambda: (aten._weight_norm_interface.default, rand(3, 4), rand(3, 1), 0),
    "norm_except_dim": lambda: (aten.norm_except_dim.default, rand(3, 4, 2), 2, 1),
    "norm_except none": lambda: (aten.norm_except_dim.default, rand(3, 4), 2, -1),
}  # fmt: skip
