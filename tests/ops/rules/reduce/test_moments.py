"""Statistics over sharded dims: one launch in each pass, and the precision of one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P

MESH = fs.Mesh(h=3)
SLOW = fs.Topology.of({"h": fs.Link(latency=1e-7, bandwidth=1e6)})
"""Bytes cost more than launches, so that nothing is gathered."""
SIZES = [(8, 8, 8), (15, 9, 0)]

NORMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "group_norm": (lambda x: F.group_norm(x, 2), (2, 4, 24, 3), 2),
    "instance_norm": (F.instance_norm, (2, 4, 24, 3), 2),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), (2, 4, 24, 3), 2),
    "layer_norm": (lambda x: F.layer_norm(x, (24,)), (4, 24), 1),
    "layer_norm of two dims": (lambda x: F.layer_norm(x, (24, 3)), (4, 24, 3), 1),
    "rms_norm": (lambda x: F.rms_norm(x, (24,)), (4, 24), 1),
    "var": (lambda x: torch.var(x, 0), (24, 3), 0),
    "std_mean": (lambda x: torch.std_mean(x, correction=0), (24, 3), 0),
}


def pair_of(x: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> fs.Sharded:
    """Return a tensor with a dim sharded over `h`."""
    partition = P(*(None,) * dim, "h")
    return fs.shard(x, fs.Spec(MESH, partition, shape=x.shape, dtype=x.dtype, sizes={dim: sizes}))


def partitioned(norm: Callable[..., Any], x: fs.Sharded) -> Callable[..., Any]:
    """Return the norm partitioned for the layout of `x`."""
    return fs.partition(norm, mesh=MESH, in_specs=x.spec, topology=SLOW)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_one_launch_in_each_pass(name: str, sizes: tuple[int, ...]) -> None:
    norm, shape, dim = NORMS[name]
    x = pair_of(torch.randn(shape, generator=torch.Generator().manual_seed(0)), dim, sizes)
    call = partitioned(norm, x)
    with fs.comm_log() as log:
        leaf = fs.Sharded(tuple(local.detach().requires_grad_() for local in x.local), x.spec)
        outputs = call(leaf)
        first = outputs if isinstance(outputs, fs.Sharded) else outputs[0]
        torch.autograd.backward(first.local, [torch.randn_like(y) for y in first.local])
    assert log.forward.counts.total() == 1
    assert log.backward.counts.total() <= 1


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_to_second_order(name: str, sizes: tuple[int, ...]) -> None:
    norm, shape, dim = NORMS[name]
    generator = torch.Generator().manual_seed(1)
    x = pair_of(torch.randn(shape, generator=generator, dtype=torch.float64), dim, sizes)
    fs.testing.assert_like_one_device(
        partitioned(norm, x), norm, (x,), second_order=True, rtol=1e-10, atol=1e-10
    )


@settings(max_examples=40, deadline=None)
@given(
    exponent=st.integers(0, 23),
    cuts=st.lists(st.integers(0, 999), min_size=2, max_size=2),
    drift=st.sampled_from([0, 1]),
    is_double=st.booleans(),
    seed=st.integers(0, 9),
)
def test_moments_are_as_precise_as_on_one_device(
    exponent: int, cuts: list[int], drift: int, is_double: bool, seed: int
) -> None:
    """The ratio of mean and deviation is up to 1e7, in shards of any sizes."""
    dtype = torch.float64 if is_double else torch.float32
    generator, (a, b) = torch.Generator().manual_seed(seed), sorted(cuts)
    bits = 20 if is_double else 0  # so that the values are exact
    noise = torch.randint(-(1 << bits), (1 << bits) + 1, (999, 2), generator=generator) / 2**bits
    values = (noise + drift * (torch.arange(999) // 333)[:, None]).double()
    x = (values + 2.0**exponent).to(dtype)
    pair = pair_of(x, 0, (a, b - a, 999 - b))
    results = partitioned(lambda x: torch.var_mean(x, 0), pair)(pair)
    dense, exact = torch.var_mean(x, 0), torch.var_mean(values, 0)
    roundings = torch.finfo(dtype).eps * 2.0**exponent
    for result, one, right, scale in zip(results, dense, exact, (2, 1), strict=True):
        shift = 2.0**exponent if scale == 1 else 0.0
        error = ((fs.unshard(result) - shift).double() - right).abs().max()
        bound = ((one - shift).double() - right).abs().max()
        assert error <= 10 * max(bound, roundings)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("offset", [0.0, 2.0**10, 2.0**20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_are_as_precise_as_on_one_device(
    name: str, dtype: torch.dtype, offset: float
) -> None:
    """Sums of squares would lose all digits where the mean exceeds the deviation."""
    norm, shape, dim = NORMS[name]
    generator = torch.Generator().manual_seed(2)
    noise = torch.randint(-16, 17, shape, generator=generator, dtype=torch.float64) / 4
    x = (noise + offset).to(dtype)
    reference = x.double() if name == "rms_norm" else x.double() - offset

    def outcome(fn: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        outputs = fn(leaf)
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        cotangent = torch.linspace(-3, 2, first.numel(), dtype=x.dtype).sin().view_as(first)
        return [first.detach(), *torch.autograd.grad(first, leaf, cotangent)]

    part = fs.partition(norm, mesh=MESH, in_specs=pair_of(x, dim, (15, 9, 0)).spec, topology=SLOW)
    for value, dense, right in zip(
        outcome(part, x), outcome(norm, x), outcome(norm, reference), strict=True
    ):
        error = (value.double() - right).abs().max()
        bound = (dense.double() - right).abs().max()
        rounding = torch.finfo(dtype).eps * max(offset, 1.0) * right.abs().max()
        assert error <= 10 * max(bound, rounding)


def test_variance_of_doubles_is_exact_for_large_means() -> None:
    values = torch.tensor([1e8, 1e8 + 1, 1e8 + 2, 1e8 + 5], dtype=torch.float64).repeat(3)
    x = pair_of(values, 0, (4, 4, 4))
    result = partitioned(torch.var, x)(x)
    torch.testing.assert_close(fs.unshard(result), torch.var(values), rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("sizes", [(1, 5, 0), (2, 2, 2)], ids=str)
def test_values_that_are_not_finite(value: float, sizes: tuple[int, ...]) -> None:
    values = torch.tensor([[1.0, 3.0, 2.0, 4.0, 5.0, 9.0], [1.0, 3.0, value, 4.0, 5.0, 9.0]]).T
    x = pair_of(values, 0, sizes)
    call = partitioned(lambda x: torch.var_mean(x, 0), x)
    torch.testing.assert_close(
        tuple(map(fs.unshard, call(x))), torch.var_mean(values, 0), equal_nan=True
    )


@pytest.mark.parametrize("name", NORMS)
def test_the_backward_pass_keeps_only_values_and_statistics(name: str) -> None:
    norm, shape, dim = NORMS[name]
    shape = tuple(8 * size if i == dim else size for i, size in enumerate(shape))
    shape = (16, 192) if len(shape) == 2 and dim else shape
    if name.startswith("layer_norm") or name == "rms_norm":
        norm = {"rms_norm": F.rms_norm}.get(name, F.layer_norm)
        norm = functools.partial(norm, normalized_shape=shape[1:])
    x = torch.randn(shape, requires_grad=True)
    part = fs.partition(norm, mesh=MESH, in_specs=P(*(None,) * dim, "h"), topology=SLOW)
    call = part.trace(x)
    assert "all_gather" not in str(call.explain()) or name in ("var", "std_mean")
    assert call.saved_bytes().total <= x.nbytes / MESH.size / 4  # beside the argument


@pytest.mark.parametrize("name", NORMS)
def test_tangents(name: str) -> None:
    norm, shape, dim = NORMS[name]
    generator = torch.Generator().manual_seed(3)
    x, t = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    spec = pair_of(x, dim, (15, 9, 0)).spec
    part = fs.partition(norm, mesh=MESH, in_specs=spec, topology=SLOW)
    results = [torch.func.jvp(f, (x,), (t,)) for f in (part, norm)]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


# -- softmaxes ---------------------------------------------------------------------------------

SOFTMAXES: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: torch.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "safe_softmax": lambda x: torch.ops.aten._safe_softmax.default(x, 1),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.full((x.shape[0],), 7), reduction="none"),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(
        x, torch.full((x.shape[0],), 7), label_smoothing=0.1, reduction="none"
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes_of_large_logits(name: str, scale: float, dtype: torch.dtype) -> None:
    """One row has logits of minus infinity, and one no others."""
    norm, generator = SOFTMAXES[name], torch.Generator().manual_seed(4)
    x = (torch.randn(6, 24, generator=generator, dtype=torch.float64) * scale).to(dtype)
    x[1, 3:6] = x[1, 20:] = x[2] = -torch.inf
    if name == "cross_entropy, smoothed":
        x[1] = 0.0  # infinite otherwise
    if name == "logsumexp":
        x[2] = 0.0  # the gradient for no terms is zero here, and NaN on one device
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    part = fs.partition(norm, mesh=MESH, in_specs=pair_of(x, 1, (15, 9, 0)).spec, topology=SLOW)
    assert part.trace(leaves[0]).cost().bytes_sent <= 6 * len(x) * x.itemsize  # reduced rows alone
    results = [f(leaf) for f, leaf in zip((part, norm), leaves, strict=True)]
    cotangent = torch.linspace(-3, 2, results[0].numel(), dtype=dtype).sin()
    grads = [
        torch.autograd.grad(y, leaf, cotangent.view_as(y))[0]
        for y, leaf in zip(results, leaves, strict=True)
    ]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for pair in (results, grads):
        torch.testing.assert_close(*pair, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in SOFTMAXES if "smoothed" not in name])
def test_softmaxes_keep_as_much_as_one_device(name: str) -> None:
    x = torch.randn(16, 192, requires_grad=True)
    part = fs.partition(SOFTMAXES[name], mesh=MESH, in_specs=P(None, "h"), topology=SLOW)
    assert part.trace(x).saved_bytes().total <= 1.2 * x.nbytes / MESH.size
