"""Windowed operations on sharded dims: PyTorch's values and gradients over sizes and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import Mesh, P, Spec
from tests.helpers.strategies import shard_sizes

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
F64 = torch.float64
EXAMPLES = 6
"""Drawn calls of each family by default."""


def tensor(shape: Sequence[int], seed: int) -> torch.Tensor:
    values: torch.Tensor = fs.random.normal(fs.random.key(seed), tuple(shape), dtype=F64)
    return values.requires_grad_()


@st.composite
def layouts(draw: Any, shape: Sequence[int], dims: int) -> Spec:
    """Draw a layout of which one or two of the last `dims` dims are sharded, in any sizes."""
    axes = draw(st.integers(1, min(2, dims)))
    mesh = Mesh({axis: draw(st.integers(1, 4)) for axis in "hw"[:axes]})
    sharded = draw(st.permutations(range(len(shape) - dims, len(shape))))[:axes]
    entries: list[Any] = [None] * len(shape)
    sizes = {}
    for axis, dim in zip(mesh.axes, sharded, strict=True):
        entries[dim] = axis
        sizes[dim] = draw(shard_sizes(shape[dim], mesh.shape[axis]))
    return Spec(mesh, P(*entries), shape=shape, dtype=F64, sizes=sizes)


Call = tuple[str, tuple[Any, ...], dict[str, Any], list[tuple[int, ...]]]
"""Name of a function, arguments after its tensors, options, and the shapes of the tensors."""


def numbers(draw: Any, n: int, low: int, high: int) -> list[int]:
    return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))  # type: ignore[no-any-return]


def spatial(draw: Any, extents: Sequence[int], pads: Sequence[int], most: int) -> list[int]:
    """Draw sizes for which windows of these extents fit into the padded dims."""
    return [
        draw(st.integers(max(1, extent - 2 * pad), max(most, extent - 2 * pad)))
        for extent, pad in zip(extents, pads, strict=True)
    ]


def convolution(draw: Any, n: int, most: int) -> Call:
    kernel, stride, dilation, padding = (
        numbers(draw, n, *ends) for ends in ((1, 4), (1, 3), (1, 2), (0, 3))
    )
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    groups, ins, outs = draw(st.sampled_from([(1, 2, 3), (2, 4, 2), (3, 3, 3)]))
    bias = [(outs,)] if draw(st.booleans()) else []
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups}
    if draw(st.booleans()):
        sizes = numbers(draw, n, 1, most)
        more = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        for i, size in enumerate(sizes):
            made = (size - 1) * stride[i] + extents[i] + more[i]
            padding[i] = min(padding[i], (made - 1) // 2)
        options |= {"output_padding": more, "padding": padding}
        weight = (ins, outs // groups, *kernel)
        return f"conv_transpose{n}d", (), options, [(2, ins, *sizes), weight, *bias]
    options["padding"] = padding
    if draw(st.integers(0, 3)) == 0:
        options["padding"] = "same" if all(s == 1 for s in stride) else "valid"
        padding = [0] * n
    weight = (outs, ins // groups, *kernel)
    sizes = spatial(draw, extents, padding, most)
    return f"conv{n}d", (), options, [(2, ins, *sizes), weight, *bias]


def pooling(draw: Any, n: int, most: int) -> Call:
    kernel, stride = numbers(draw, n, 1, 4), numbers(draw, n, 1, 4)
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    options: dict[str, Any] = {"ceil_mode": draw(st.booleans())}
    kind = draw(st.sampled_from(["avg", "max"]))
    dilation = numbers(draw, n, 1, 2) if kind == "max" else [1] * n
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    # PyTorch refuses volumes that are smaller than the kernel, also if they are padded.
    sizes = spatial(draw, extents, padding if n < 3 else [0] * n, most)
    if kind == "max":
        options |= {"dilation": dilation, "return_indices": draw(st.booleans())}
    else:
        options["count_include_pad"] = draw(st.booleans())
        if n > 1 and draw(st.booleans()):
            options["divisor_override"] = 3
    return f"{kind}_pool{n}d", (kernel, stride, padding), options, [(2, 3, *sizes)]


def adaptive(draw: Any, n: int, most: int) -> Call:
    kind, size = draw(st.sampled_from(["avg", "max"])), numbers(draw, n, 1, 5)
    options = {"return_indices": draw(st.booleans())} if kind == "max" else {}
    return f"adaptive_{kind}_pool{n}d", (size,), options, [(2, 3, *numbers(draw, n, 1, most))]


MODES = ("linear",), ("bilinear", "bicubic"), ("trilinear",)


def interpolation(draw: Any, n: int, most: int) -> Call:
    mode, sizes = (
        draw(st.sampled_from(("nearest", "nearest-exact", *MODES[n - 1]))),
        numbers(draw, n, 1, most),
    )
    options: dict[str, Any] = {"mode": mode}
    if draw(st.booleans()):
        options["size"] = numbers(draw, n, 1, 2 * most)
    else:
        scales = [1.0, 2.0, 3.0, 0.5, 1.5, 1.7, 0.7]
        options["scale_factor"] = [draw(st.sampled_from(scales)) for _ in range(n)]
        sizes = [max(size, 2) for size in sizes]
    if "near" not in mode:
        options["align_corners"] = draw(st.booleans())
    if mode in ("bilinear", "bicubic"):
        options["antialias"] = draw(st.booleans())
        if options["antialias"]:  # PyTorch's result of one column is wrong
            sizes = [max(size, 2) for size in sizes]
            if "size" in options:
                options["size"] = [max(size, 2) for size in options["size"]]
            else:
                options["scale_factor"] = [max(s, 1.0) for s in options["scale_factor"]]
    return "interpolate", (), options, [(2, 2, *sizes)]


def padding(draw: Any, n: int, most: int) -> Call:
    mode = draw(st.sampled_from(["constant", "reflect", "replicate", "circular"]))
    sizes = numbers(draw, n, 3, most)
    least = -1 if mode == "constant" else 0
    pairs = [size for pair in (numbers(draw, 2, least, 2) for _ in range(n)) for size in pair]
    return "pad", (pairs,), {"mode": mode}, [(2, 2, *sizes)]


def unfolding(draw: Any, n: int, most: int) -> Call:
    kernel, stride = numbers(draw, 2, 1, 3), numbers(draw, 2, 1, 3)
    dilation, padding = numbers(draw, 2, 1, 2), numbers(draw, 2, 0, 2)
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    sizes = spatial(draw, extents, padding, most)
    options = {"kernel_size": kernel, "dilation": dilation, "padding": padding, "stride": stride}
    if draw(st.booleans()):
        return "unfold", (), options, [(2, 2, *sizes)]
    counts = [
        (size + 2 * p - e) // s + 1
        for size, p, e, s in zip(sizes, padding, extents, stride, strict=True)
    ]
    columns = (2, 2 * kernel[0] * kernel[1], counts[0] * counts[1])
    return "fold", (sizes,), options, [columns]


FAMILIES: dict[str, Callable[[Any, int, int], Call]] = {
    "convolution": convolution, "pooling": pooling, "adaptive": adaptive,
    "interpolation": interpolation, "padding": padding, "unfolding": unfolding,
}  # fmt: skip


def tensors_of(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


def close(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    torch.testing.assert_close(list(actual), list(expected), rtol=1e-10, atol=1e-10)


def check(data: st.DataObject, family: str, most: int) -> None:
    """Draw a call, and compare values and all gradients with one device."""
    n = 2 if family == "unfolding" else data.draw(st.sampled_from([1, 2, 2, 3]))
    name, args, options, shapes = FAMILIES[family](data.draw, n, most)
    tensors = [tensor(shape, i) for i, shape in enumerate(shapes)]
    dims = 1 if name == "fold" else n
    spec = data.draw(layouts(shapes[0], dims))
    expected = tensors_of(getattr(F, name)(*tensors, *args, **options))
    run = getattr(fs.domain, name)
    out = run(fs.shard(tensors[0], spec), *tensors[1:], *args, **options)
    pairs = [out] if isinstance(out, fs.Sharded) else list(out)
    actual = [fs.unshard(pair) for pair in pairs]
    close(actual, expected)
    weight = tensor(expected[0].shape, 9).detach()
    grads = [torch.autograd.grad((x[0] * weight).sum(), tensors) for x in (actual, expected)]
    close(*grads)

    def step(*tensors: torch.Tensor) -> Any:
        y = tensors_of(getattr(F, name)(*tensors, *args, **options))[0]
        return torch.autograd.grad((y * weight).sum(), tensors)

    specs = (spec, *[P()] * len(tensors[1:]))
    traced = fs.partition(step, mesh=spec.mesh, in_specs=specs)(*tensors)
    close(traced, grads[1])


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_drawn_calls_equal_one_device(family: str, data: st.DataObject) -> None:
    check(data, family, 7)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=300)
@given(data=st.data())
def test_larger_space_equals_one_device(family: str, data: st.DataObject) -> None:
    check(data, family, 12)
