"""The spatial functions of PyTorch over sharded space: which send halos, and which gather, and why.

Every function runs in a partitioned function with one sharded dim, with two, and with two in uneven
shards of which one is empty; values and gradients equal one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P, Spec

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:nn.functional.upsample is deprecated")


def rand(*shape: int) -> torch.Tensor:
    values: torch.Tensor = fs.random.normal(fs.random.key(sum(shape)), shape, dtype=F64)
    return values


def line() -> torch.Tensor:
    return rand(2, 4, 9)


def plane() -> torch.Tensor:
    return rand(2, 4, 9, 8)


def volume() -> torch.Tensor:
    return rand(1, 2, 9, 8, 6)


def integers() -> torch.Tensor:
    return torch.arange(576).mul(37).remainder(101).view(2, 4, 9, 8) - 50


def unpooled(n: int) -> Callable[..., torch.Tensor]:
    """Return the unpooling of what was pooled, to the size before."""

    def run(x: torch.Tensor) -> torch.Tensor:
        pooled, indices = getattr(F, f"max_pool{n}d")(x, 2, return_indices=True)
        result: torch.Tensor = getattr(F, f"max_unpool{n}d")(
            pooled, indices, 2, output_size=list(x.shape[-n:])
        )
        return result

    return run


def call(function: Any, *args: Any, **options: Any) -> Callable[..., torch.Tensor]:
    return lambda *xs: function(*xs, *args, **options)


Row = tuple[Callable[..., Any], Callable[[], torch.Tensor], tuple[tuple[int, ...], ...]]
"""The function, its input, and the shapes of its other tensors."""
HALO: dict[str, Row] = {
    "conv1d": (call(F.conv1d, padding=1), line, ((3, 4, 3),)),
    "conv2d": (call(F.conv2d, padding=1, stride=2), plane, ((3, 4, 3, 3),)),
    "conv3d": (call(F.conv3d, padding="same", dilation=2), volume, ((3, 2, 2, 2, 2),)),
    "conv_transpose1d": (
        call(F.conv_transpose1d, stride=2, padding=1, output_padding=1, dilation=2), line,
        ((4, 2, 4),),
    ),
    "conv_transpose2d": (
        call(F.conv_transpose2d, stride=3, padding=1, output_padding=2, groups=2, dilation=2),
        plane, ((4, 3, 3, 3),),
    ),
    "conv_transpose3d": (
        call(F.conv_transpose3d, stride=2, output_padding=1, dilation=2), volume,
        ((2, 3, 3, 3, 3),),
    ),
    "avg_pool1d": (call(F.avg_pool1d, 3, 2, 1), line, ()),
    "avg_pool2d": (call(F.avg_pool2d, 3, 2, 1, True, False), plane, ()),
    "avg_pool3d": (call(F.avg_pool3d, 2, 1), volume, ()),
    "max_pool1d": (call(F.max_pool1d, 3, 2, 1), line, ()),
    "max_pool2d": (call(F.max_pool2d, 3, 2, 1, 2), plane, ()),
    "max_pool2d of integers": (call(F.max_pool2d, 3, 2, 1), integers, ()),
    "max_pool3d": (call(F.max_pool3d, 2, 1), volume, ()),
    "lp_pool1d": (call(F.lp_pool1d, 2.0, 3, 2), line, ()),
    "lp_pool2d": (call(F.lp_pool2d, 2.0, 3, 2), plane, ()),
    "lp_pool3d": (call(F.lp_pool3d, 2.0, 3, 2), volume, ()),
    "adaptive_max_pool1d": (call(F.adaptive_max_pool1d, 4), line, ()),
    "adaptive_max_pool2d": (call(F.adaptive_max_pool2d, 4), plane, ()),
    "adaptive_max_pool3d": (call(F.adaptive_max_pool3d, 4), volume, ()),
    "adaptive_avg_pool1d": (call(F.adaptive_avg_pool1d, 4), line, ()),
    "adaptive_avg_pool2d": (call(F.adaptive_avg_pool2d, 4), plane, ()),
    "adaptive_avg_pool3d": (call(F.adaptive_avg_pool3d, 4), volume, ()),
    "pad by constants": (call(F.pad, (1, 2, 2, 1)), plane, ()),
    "pad by reflection": (call(F.pad, (1, 2, 2, 1), mode="reflect"), plane, ()),
    "pad by repetition": (call(F.pad, (1, 2, 2, 1), mode="replicate"), plane, ()),
    "pad periodically": (call(F.pad, (1, 2, 2, 1), mode="circular"), plane, ()),
    "nearest": (call(F.interpolate, scale_factor=2.0), plane, ()),
    "nearest-exact": (call(F.interpolate, (7, 13), mode="nearest-exact"), plane, ()),
    "linear": (call(F.interpolate, 13, mode="linear"), line, ()),
    "bilinear": (call(F.interpolate, (7, 13), mode="bilinear"), plane, ()),
    "bilinear, antialiased": (
        call(F.interpolate, (5, 4), mode="bilinear", antialias=True), plane, ()
    ),
    "bicubic": (call(F.interpolate, (7, 13), mode="bicubic", align_corners=True), plane, ()),
    "bicubic, antialiased": (
        call(F.interpolate, (5, 13), mode="bicubic", antialias=True), plane, ()
    ),
    "lanczos, antialiased": (
        call(F.interpolate, (5, 13), mode="lanczos", antialias=True), plane, ()
    ),
    "trilinear": (call(F.interpolate, (7, 5, 9), mode="trilinear"), volume, ()),
    "area": (call(F.interpolate, (4, 3), mode="area"), plane, ()),
    "pixel_shuffle": (call(F.pixel_shuffle, 2), plane, ()),
    "channel_shuffle": (call(F.channel_shuffle, 2), plane, ()),
    "local_response_norm": (call(F.local_response_norm, 3), plane, ()),
    "unfold along a dim": (lambda x: x.unfold(2, 3, 1), plane, ()),
    "flip": (lambda x: x.flip(2, 3), plane, ()),
    "rot90": (lambda x: x.rot90(1, (2, 3)), plane, ()),
    "roll": (lambda x: x.roll((2, -3), (2, 3)), plane, ()),
    "gradient": (lambda x: torch.gradient(x, dim=(2, 3), edge_order=2)[1], plane, ()),
    "gradient of first order": (lambda x: torch.gradient(x, spacing=0.5, dim=2)[0], plane, ()),
    "wide stencil": (
        call(lambda x, w: F.conv2d(F.pad(x, (2, 2, 2, 2), "reflect"), w, groups=4)), plane,
        ((4, 1, 5, 5),),
    ),
}  # fmt: skip
"""Functions that send the elements of windows that a rank lacks, or nothing."""
EXCHANGE: dict[str, Row] = {
    "diff": (lambda x: x.diff(n=2, dim=2), plane, ()),
    "shifted slices": (lambda x: x[:, :, 2:] - 2 * x[:, :, 1:-1] + x[:, :, :-2], plane, ()),
    "pixel_unshuffle": (call(F.pixel_unshuffle, 2), lambda: rand(2, 4, 8, 8), ()),
    "trapezoid": (lambda x: torch.trapezoid(x, torch.arange(9.0, dtype=F64), dim=2), plane, ()),
    "trapezoid of planes of points": (
        lambda x: torch.trapezoid(x, torch.arange(72.0, dtype=F64).view(9, 8).sin(), dim=2),
        plane,
        (),
    ),
}
"""Functions of parts of a dim, which send the elements by which the parts are apart."""
REDUCE: dict[str, Row] = {
    "adaptive_avg_pool2d to one element": (call(F.adaptive_avg_pool2d, 1), plane, ()),
    "instance_norm": (call(F.instance_norm), plane, ()),
    "group_norm": (call(F.group_norm, 2), plane, ()),
    "batch_norm": (call(F.batch_norm, None, None, training=True), plane, ()),
    "layer_norm": (call(F.layer_norm, (9, 8)), plane, ()),
    "rms_norm": (call(F.rms_norm, (9, 8)), plane, ()),
    "softmax": (call(F.softmax, dim=2), plane, ()),
    "log_softmax": (call(F.log_softmax, dim=2), plane, ()),
    "trapezoid of even points": (lambda x: torch.trapezoid(x, dim=2), plane, ()),
}
"""Functions that send reductions alone."""
ENDS: dict[str, Row] = {
    "cumsum": (lambda x: x.cumsum(2), plane, ()),
    "cumprod": (lambda x: x.cumprod(3), plane, ()),
    "logcumsumexp": (lambda x: x.logcumsumexp(2), plane, ()),
    "cummax": (lambda x: x.cummax(2)[0], plane, ()),
    "cummin": (lambda x: x.cummin(3)[0], plane, ()),
}
"""Scans, of which the ends of shards are gathered: two planes of numbers at most for each rank."""
MOVE: dict[str, Row] = {"unfold": (call(F.unfold, 3, padding=1), plane, ())}
"""Functions that move each element once at most: all windows of a row are next to each other in the
result, so no shard of it has a part of each row, and other dims are sharded in place of columns."""
GATHER: dict[str, tuple[Row, str]] = {
    "avg_pool2d of integers": (
        (call(F.avg_pool2d, 3, 2, 1, True, False), integers, ()),
        "sums of integers are divided by counts that shards do not have"),
    "max_unpool1d": ((unpooled(1), line, ()), "positions are values of indices"),
    "max_unpool2d": ((unpooled(2), plane, ()), "positions are values of indices"),
    "max_unpool3d": ((unpooled(3), volume, ()), "positions are values of indices"),
    "fractional_max_pool2d": (
        (lambda x: F.fractional_max_pool2d(x, 2, (4, 4), _random_samples=x.detach().new_full(
            (2, 4, 2), 0.3)), plane, ()), "windows depend on the values of random samples"),
    "fractional_max_pool3d": (
        (lambda x: F.fractional_max_pool3d(x, 2, (4, 4, 3), _random_samples=x.detach().new_full(
            (1, 2, 3), 0.3)), volume, ()), "windows depend on the values of random samples"),
    "grid_sample": (
        (lambda x: F.grid_sample(x, rand(2, 5, 6, 2).tanh(), align_corners=False), plane, ()),
        "positions are values of the grid"),
}  # fmt: skip
"""Functions whose spatial dims are unsharded, and the reasons; other dims are sharded instead."""


def layout(x: torch.Tensor, kind: str) -> Spec:
    """Return a layout of the dims from 2 on."""
    last = min(x.ndim, 4)
    if kind == "one dim":
        return Spec(Mesh(h=2), P(None, None, "h"), shape=x.shape, dtype=x.dtype, uneven="chunk")
    mesh = Mesh(h=3 if kind == "uneven" else 2, w=2)
    sizes = {2: (x.shape[2] - 4, 0, 4), 3: (2, x.shape[-1] - 2 if x.ndim < 5 else 6)}
    entries = (None, None, *("h", "w")[: last - 2])
    if kind == "uneven":
        return Spec(mesh, P(*entries), shape=x.shape, dtype=x.dtype,
                    sizes={dim: s for dim, s in sizes.items() if dim < last})  # fmt: skip
    return Spec(mesh, P(*entries), shape=x.shape, dtype=x.dtype, uneven="chunk")


def sent(row: Row, kind: str) -> dict[str, int]:
    """Return the bytes of a call by collective, after comparison of values and gradients."""
    function, make, shapes = row
    x = make().requires_grad_(make().is_floating_point())
    others = [rand(*shape) for shape in shapes]
    spec, expected = layout(x, kind), function(x, *others)
    part = fs.partition(function, mesh=spec.mesh, in_specs=(spec, *[P()] * len(others)))
    pairs = [fs.shard(x, spec), *(fs.shard(y, spec.mesh, P()) for y in others)]
    with fs.comm_log() as log:
        out = part(*pairs)
    y = fs.unshard(out)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    if x.requires_grad:
        cotangent = rand(*expected.shape)
        grads = [torch.autograd.grad(z, x, cotangent)[0] for z in (y, expected)]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    return {name: bytes_ for (name, _), bytes_ in log.bytes.items()}


def check_row(name: str, kind: str) -> None:
    """Run one function in a layout, and compare what it sends with its part of the table."""
    if name in HALO:
        assert {*sent(HALO[name], kind)} <= {"halo_exchange"}
    elif name in EXCHANGE:
        assert {*sent(EXCHANGE[name], kind)} <= {"exchange"}
    elif name in REDUCE:
        assert {*sent(REDUCE[name], kind)} <= {"all_reduce"}
    elif name in ENDS:
        collectives = sent(ENDS[name], kind)
        assert {*collectives} <= {"all_gather", "exchange"}
        assert sum(collectives.values()) <= 2 * 2 * 4 * 9 * 16
    elif name in MOVE:
        collectives = sent(MOVE[name], kind)
        own = layout(plane(), kind)
        assert {*collectives} <= {"all_to_all", "exchange", "halo_exchange"}
        halo = collectives.pop("halo_exchange", 0)
        assert sum(collectives.values()) <= max(map(own.local_nbytes, own.mesh.ranks))
        assert halo <= 2 * (2 * 4 * 8) * 8
    else:
        row, reason = GATHER[name]
        names = {*sent(row, kind)}
        assert names & {"all_gather", "all_to_all", "exchange"}, reason


@pytest.mark.parametrize(
    ("columns", "moved", "rows"),
    [((16, 24, 24, 8), 0, 2), ((20, 20, 0, 32), 4, 2), ((0, 72, 0, 0), 0, 0)],
)
def test_fold_adds_rows_in_halos(columns: tuple[int, ...], moved: int, rows: int) -> None:
    """Columns are moved to shards of 9 rows of 8; a rank adds a row to each of its neighbours."""
    x = rand(2, 18, 72).requires_grad_()
    spec = Spec(Mesh(h=4), P(None, None, "h"), shape=x.shape, dtype=x.dtype, sizes={2: columns})
    fold = call(F.fold, (9, 8), 3, padding=1)
    with fs.comm_log() as log:
        y = fs.partition(fold, mesh=spec.mesh, in_specs=spec)(fs.shard(x, spec))
    assert log.bytes.get(("halo_reduce", "h"), 0) == rows * (2 * 2 * 8) * 8
    assert log.bytes.get(("exchange", "h"), 0) == moved * (2 * 18) * 8
    expected, cotangent = fold(x), rand(2, 2, 9, 8)
    values = [(z, *torch.autograd.grad(z, x, cotangent)) for z in (fs.unshard(y), expected)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)


NAMES = [*HALO, *EXCHANGE, *REDUCE, *ENDS, *MOVE, *GATHER]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_two_dims_in_uneven_shards(name: str) -> None:
    check_row(name, "uneven")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one dim", "two dims"])
@pytest.mark.parametrize("name", NAMES)
def test_even_shards(name: str, kind: str) -> None:
    check_row(name, kind)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.gradient(x, spacing=0.0, dim=2)[0],
        lambda x: torch.trapezoid(x[:, :, :0], dim=2),
    ],
    ids=["gradient at no distance", "trapezoid of no points"],
)
def test_degenerate_points(function: Callable[..., torch.Tensor]) -> None:
    x = plane()
    pair = fs.shard(x, layout(x, "uneven"))
    y = fs.unshard(fs.partition(function, mesh=pair.spec.mesh)(pair))
    torch.testing.assert_close(y, function(x), rtol=0, atol=0)


def heat(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        n = F.pad(x, (0, 0, 1, 1), mode="replicate")
        x = x + 0.1 * (n[:, :, 2:] - 2 * x + n[:, :, :-2])
    return x


def edge_preserving(x: torch.Tensor) -> torch.Tensor:
    """Diffuse by Perona and Malik's first flux (IEEE PAMI 12, 1990)."""
    for _ in range(3):
        n = F.pad(x, (0, 0, 1, 1), mode="replicate")
        differences = n[:, :, :-2] - x, n[:, :, 2:] - x
        x = x + 0.2 * sum(torch.exp(-(d.square())) * d for d in differences)
    return x


@pytest.mark.parametrize("function", [heat, edge_preserving])
def test_stencils_of_shifted_slices_keep_the_layout(function: Callable[..., Any]) -> None:
    """Each step sends the row that a neighbour lacks, at both ends, and shards stay as they are."""
    x = rand(1, 2, 16, 8).requires_grad_()
    spec = Spec(Mesh(h=4), P(None, None, "h"), shape=x.shape, dtype=x.dtype)
    with fs.comm_log() as log:
        y = fs.partition(function, mesh=spec.mesh, in_specs=spec)(fs.shard(x, spec))
    assert y.spec == spec
    assert log.bytes == {("exchange", "h"): 3 * 2 * (2 * 8) * 8}
    expected, cotangent = function(x), rand(1, 2, 16, 8)
    values = [(z, *torch.autograd.grad(z, x, cotangent)) for z in (fs.unshard(y), expected)]
    torch.testing.assert_close(*values, rtol=1e-12, atol=1e-12)
