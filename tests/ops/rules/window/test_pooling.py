"""Rules of pooling, interpolation, padding and windows: correctness for every role, texts."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.ops.samples import Sample, rand, rule_errors, rule_factors, rule_text

aten = torch.ops.aten
ONE, TWO, THREE = (2, 3, 6), (2, 3, 6, 6), (2, 3, 4, 4, 4)
GRID, SPACE = (2, 4, 5, 2), (2, 3, 2, 3, 3)


def grid(*shape: int) -> torch.Tensor:
    return rand(*shape).tanh()


def of_dims(n: int) -> tuple[int, ...]:
    return (ONE, TWO, THREE)[n - 1]


FORWARD: dict[str, Sample] = {
    **{f"avg_pool{n}d": lambda n=n: (getattr(aten, f"avg_pool{n}d"), rand(*of_dims(n)), [2] * n)
       for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d of an int": lambda n=n, kind=kind: (
        getattr(aten, f"{kind}_pool{n}d"), rand(*of_dims(n)), 2, 2, 1)
       for n in (1, 2, 3) for kind in ("avg", "max")},
    **{f"max_pool{n}d": lambda n=n: (getattr(aten, f"max_pool{n}d"), rand(*of_dims(n)), [2] * n)
       for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": lambda n=n: (
        getattr(aten, f"max_pool{n}d_with_indices"), rand(*of_dims(n)), [2] * n, [1] * n)
       for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": lambda n=n, kind=kind: (
        getattr(aten, f"adaptive_{kind}_pool{n}d"), rand(*of_dims(n)), [2, 3, 2][:n])
       for n in (1, 2, 3) for kind in ("avg", "max")},
    **{f"{kind}_pad{n}d": lambda n=n, kind=kind: (
        getattr(aten, f"{kind}_pad{n}d"), rand(*of_dims(n)), [1, 2] * n)
       for n in (1, 2, 3) for kind in ("reflection", "replication")},
    **{f"pad {mode}": lambda mode=mode: (aten.pad, rand(*TWO), [1, 2, 0, 1], mode)
       for mode in ("constant", "reflect", "replicate", "circular")},
    **{f"{kind}_pool2d of overlapping ones": lambda kind=kind: (
        getattr(aten, f"{kind}_pool2d"), rand(*TWO), [3, 3], [2, 2], [1, 1])
       for kind in ("avg", "max")},
    "avg_pool2d of one": lambda: (aten.avg_pool2d, rand(3, 6, 6), [2, 2]),
    "avg_pool1d of none": lambda: (aten.avg_pool1d, rand(0, 3, 6), [2]),
    "avg_pool1d of integers": lambda: (aten.avg_pool1d, rand(2, 3, 6, dtype=torch.int64), [2]),
    "max_unpool2d": lambda: (aten.max_unpool2d,
                             *aten.max_pool2d_with_indices(rand(*TWO), [2, 2]), [6, 6]),
    "constant_pad_nd": lambda: (aten.constant_pad_nd, rand(*TWO), [1, 0, 0, 0, 1, 1]),
    "constant_pad_nd of ones": lambda: (aten.constant_pad_nd, rand(*TWO), [1, -1, 2, 3], 1.0),
    "constant_pad_nd of nothing": lambda: (aten.constant_pad_nd, rand(3, 0), [1, 2], 1.0),
    "constant_pad_nd of integers":
        lambda: (aten.constant_pad_nd, rand(4, 3, dtype=torch.int64), [1, 1], 3),
    "im2col": lambda: (aten.im2col, rand(*TWO), [2, 2], [1, 1], [1, 0], [2, 1]),
    "im2col of one": lambda: (aten.im2col, rand(3, 6, 6), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": lambda: (aten.col2im, rand(2, 12, 25), [6, 6], [2, 2], [1, 1], [0, 0], [1, 1]),
    "grid_sampler": lambda: (aten.grid_sampler, rand(*TWO), grid(*GRID), 0, 0, False),
    "grid_sampler_2d": lambda: (aten.grid_sampler_2d, rand(*TWO), grid(*GRID), 2, 2, True),
    "grid_sampler_3d":
        lambda: (aten.grid_sampler_3d, rand(*THREE), grid(2, 2, 3, 3, 3), 0, 0, False),
    "affine_grid_generator":
        lambda: (aten.affine_grid_generator, rand(2, 2, 3), [2, 3, 4, 5], False),
}  # fmt: skip

RESAMPLED: dict[str, Sample] = {
    "upsample_nearest1d": lambda: (aten.upsample_nearest1d, rand(*ONE), [9]),
    "upsample_nearest2d": lambda: (aten.upsample_nearest2d.vec, rand(*TWO), None, [2.0, 2.0]),
    "upsample_nearest2d by a fraction": lambda: (aten.upsample_nearest2d, rand(*TWO), [8, 9]),
    "upsample_nearest2d by twice":
        lambda: (aten.upsample_nearest2d, rand(*TWO), [12, 18], 2.0, 3.0),
    "upsample_nearest1d of bytes":
        lambda: (aten.upsample_nearest1d, rand(*ONE).abs().to(torch.uint8), [12]),
    "_upsample_nearest_exact1d": lambda: (aten._upsample_nearest_exact1d, rand(*ONE), [12]),
    "upsample_nearest3d": lambda: (aten.upsample_nearest3d, rand(*THREE), [6, 6, 6]),
    "_upsample_nearest_exact2d": lambda: (aten._upsample_nearest_exact2d, rand(*TWO), [8, 8]),
    "upsample_linear1d": lambda: (aten.upsample_linear1d, rand(*ONE), [9], False),
    "upsample_bilinear2d": lambda: (aten.upsample_bilinear2d.vec, rand(*TWO), [8, 8], True, None),
    "upsample_trilinear3d": lambda: (aten.upsample_trilinear3d, rand(*THREE), [6, 6, 6], False),
    "upsample_bicubic2d": lambda: (aten.upsample_bicubic2d, rand(*TWO), [8, 8], False),
    "_upsample_bilinear2d_aa": lambda: (aten._upsample_bilinear2d_aa, rand(*TWO), [4, 4], False),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FORWARD)
def test_pooling_of_planes_equals_one_device(name: str) -> None:
    assert rule_errors(FORWARD[name]) == []


@pytest.mark.parametrize("name", RESAMPLED)
def test_upsampling_equals_one_device(name: str) -> None:
    assert rule_errors(RESAMPLED[name]) == []


@pytest.mark.parametrize("n", [2, 3])
def test_fractional_pooling(n: int) -> None:
    draws = rand(2, 3, n).sigmoid()
    op = getattr(aten, f"fractional_max_pool{n}d")
    for x, samples in (rand(*of_dims(n)), draws), (rand(*of_dims(n))[0], draws[:1]):
        assert rule_errors(lambda x=x, u=samples: (op, x, [2] * n, [2] * n, u), grad=False) == []  # type: ignore[misc]


BACKWARD: dict[str, Sample] = {
    "avg_pool2d": lambda: (aten.avg_pool2d_backward, rand(2, 3, 3, 3), rand(*TWO), [2, 2], [2, 2],
                           [0, 0], False, True, None),
    "avg_pool3d": lambda: (aten.avg_pool3d_backward, rand(2, 3, 2, 2, 2), rand(*THREE), [2, 2, 2],
                           [2, 2, 2], [0, 0, 0], False, True, None),
    "_adaptive_avg_pool2d":
        lambda: (aten._adaptive_avg_pool2d_backward, rand(2, 3, 2, 2), rand(*TWO)),
    "_adaptive_avg_pool3d":
        lambda: (aten._adaptive_avg_pool3d_backward, rand(2, 3, 2, 2, 2), rand(*THREE)),
    "max_pool2d": lambda: (
        aten.max_pool2d_with_indices_backward, rand(2, 3, 3, 3), rand(*TWO), [2, 2], [2, 2], [0, 0],
        [1, 1], False, aten.max_pool2d_with_indices(rand(*TWO), [2, 2])[1]),
    "max_pool3d": lambda: (
        aten.max_pool3d_with_indices_backward, rand(2, 3, 2, 2, 2), rand(*THREE), [2] * 3, [2] * 3,
        [0] * 3, [1] * 3, False, aten.max_pool3d_with_indices(rand(*THREE), [2] * 3)[1]),
    "adaptive_max_pool2d": lambda: (
        aten.adaptive_max_pool2d_backward, rand(2, 3, 2, 2), rand(*TWO),
        aten.adaptive_max_pool2d(rand(*TWO), [2, 2])[1]),
    "reflection_pad2d":
        lambda: (aten.reflection_pad2d_backward, rand(2, 3, 8, 8), rand(*TWO), [1, 1, 1, 1]),
    "replication_pad1d":
        lambda: (aten.replication_pad1d_backward, rand(2, 3, 8), rand(*ONE), [1, 1]),
    "upsample_nearest2d":
        lambda: (aten.upsample_nearest2d_backward, rand(2, 3, 8, 8), [8, 8], [2, 3, 6, 6]),
    "upsample_linear1d":
        lambda: (aten.upsample_linear1d_backward, rand(2, 3, 9), [9], [2, 3, 6], False),
    "affine_grid_generator":
        lambda: (aten.affine_grid_generator_backward, rand(2, 4, 5, 2), [2, 3, 4, 5], False),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_equal_one_device(name: str) -> None:
    assert rule_errors(BACKWARD[name]) == []


@pytest.mark.parametrize("mask", [[True, True], [False, True]])
def test_gradients_of_grids(mask: list[bool]) -> None:
    flat = aten.grid_sampler_2d_backward, rand(2, 3, 4, 5), rand(*TWO), grid(*GRID)
    deep = aten.grid_sampler_3d_backward, rand(*SPACE), rand(*THREE), grid(2, 2, 3, 3, 3)
    assert rule_errors(lambda: (*flat, 0, 0, False, mask), grad=False) == []
    assert rule_errors(lambda: (*deep, 0, 0, False, mask), grad=False) == []


def test_rule_texts() -> None:
    assert rule_text(aten.avg_pool2d, rand(*TWO), [2, 2], [1, 1]) == (
        "ncbd->ncef  {e b[i..i+1]; f d[i..i+1]; unreduced 0 sum; unreduced 0 avg}"
    )
    assert rule_text(aten.max_pool2d, rand(*TWO), [3, 4]) == (
        "ncbd->ncef  {e b[3i..3i+2]; f d[4i..4i+3]; unreduced 0 max}"
    )
    assert rule_text(aten.avg_pool1d, rand(*ONE, dtype=torch.int64), [2]) == ("nc1->nc1")
    assert rule_text(aten.constant_pad_nd, rand(*TWO), [0, 0, 1, 1], 1.0) == (
        "bcde->bche  {h d[-1:7]; unreduced 0 avg; unreduced 0 max; unreduced 0 min}"
    )
    twice = rule_text(*RESAMPLED["upsample_nearest2d by twice"]())
    assert twice.startswith("ncbd->ncef  {e b[i/2..i/2]; f d[i/3..i/3]; ")
    cubic = rule_text(*RESAMPLED["upsample_bicubic2d"]())
    assert cubic.startswith("ncbd->ncef  {e b[(6i-9)/8..(6i+15)/8]; ")
    assert rule_text(*FORWARD["im2col"]()) == (
        "ncbd->n(ck)(ef)  "
        "{d unsharded; k unsharded; e b[2i-1..2i]; f d[i..i+1]; unreduced 0 sum; unreduced 0 avg}"
    )
    assert rule_factors(*FORWARD["grid_sampler_3d"]()) == "nc111,ndhw1->ncdhw"
    assert rule_text(aten.grid_sampler_2d_backward, rand(2, 3, 4, 5), rand(*TWO), grid(*GRID), 0, 0,
                False, [True, True]) == (
        "nchw,nc11,nhw1->nc11,nhw1  "
        "{c sum; h sum; w sum; unreduced 0 sum; unreduced 0 avg}"
    )  # fmt: skip
