"""Rules of normalizations: correctness for every role, texts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fshard as fs
from fshard import Mesh, P
from tests.helpers.ops.normalization_samples import (
    BATCHES,
    GROUPS,
    LAYERS,
    OTHERS,
    WITH_RUNNING,
    running,
    weights,
)
from tests.helpers.ops.op_checks import call_with, check_call
from tests.helpers.ops.samples import positive

aten = torch.ops.aten
SAMPLES = {**LAYERS, **GROUPS, **BATCHES, **OTHERS}


@pytest.mark.parametrize("name", SAMPLES)
def test_rules_are_right(name: str) -> None:
    op, *args = SAMPLES[name]()
    # PyTorch lacks formulas for some second derivatives.
    first = op._schema.name.endswith("norm_backward")
    assert check_call(op, *args, grad=not first) == []


@pytest.mark.parametrize("name", WITH_RUNNING)
def test_rules_with_running_statistics_are_right(name: str) -> None:
    # The running statistics have no gradient.
    op, *args = WITH_RUNNING[name]()
    assert check_call(op, *args, grad=False) == []


def test_rules_on_two_axes() -> None:
    args = positive(4, 6, 4), [4], positive(4), positive(4)
    assert check_call(aten.layer_norm.default, *args, two_axes=True) == []
    assert (
        check_call(aten.group_norm.default, positive(4, 6, 2), 3, *weights(6, "wb"), two_axes=True)
        == []
    )


TEXTS = {
    "layer_norm w": "d0 d1 d2,d2->d0 d1 d2  {d2 unsharded; unreduced 1 sum; unreduced 1 avg}",
    "layer_norm b": "d0 d1 d2,d2->d0 d1 d2  {d2 unsharded; unreduced 1 avg}",
    "native_layer_norm_backward (True, True, True)":
        "d0 d1 d2,d0 d1 d2,d0 d1 (),d0 d1 (),d2,d2->d0 d1 d2,d2,d2"
        "  {d0 sum; d1 sum; d2 unsharded; unreduced 0 sum; unreduced 0 avg}",
    "group_norm ": "n (g c) d0->n (g c) d0  {c unsharded; d0 unsharded}",
    "native_batch_norm_backward False":
        "n c d0,n c d0,c,c,c->n c d0,c,c  {n sum; d0 sum; unreduced 0 sum; unreduced 0 avg}",
    "native_batch_norm_backward True":
        "n c d0,n c d0,c,c,c,c,c->n c d0,c,c"
        "  {n unsharded; d0 unsharded; unreduced 0 sum; unreduced 0 avg}",
    "renorm": "d0 d1 d2->d0 d1 d2  {d0 unsharded; d2 unsharded}",
    "cosine spread": "d0 () d2,d1 d2->d0 d1  {d2 unsharded}",
    "_weight_norm": "d0 d1,d0 ()->d0 d1  {d1 unsharded; unreduced 1 sum; unreduced 1 avg}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_rule_texts(name: str) -> None:
    op, *args = SAMPLES[name]()
    assert str(call_with(op, args, {})[1]) == TEXTS[name]


def test_rule_text_of_a_gradient_without_a_cpu_kernel() -> None:
    args = positive(3, 2, 4), positive(3, 2, 4), [4], positive(3, 2, 1), positive(4), [True, True]
    assert str(call_with(aten._fused_rms_norm_backward.default, args, {})[1]) == (
        "d0 d1 d2,d0 d1 d2,d0 d1 (),d2->d0 d1 d2,d2"
        "  {d0 sum; d1 sum; d2 unsharded; unreduced 0 sum; unreduced 0 avg}"
    )


@pytest.mark.parametrize("partition", [P(), P(None, "x")], ids=str)
def test_norms_of_empty_batches_have_gradients(partition: P) -> None:
    x = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.ones(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    pair = fs.shard(x, Mesh(x=2), partition)
    y = fs.unshard(fs.on_pairs(F.group_norm, mode="auto")(pair, 2, scale, shift))
    assert torch.equal(y, F.group_norm(x, 2, scale, shift))
    gradients = torch.autograd.grad(y.sum(), (x, scale, shift))
    torch.testing.assert_close(gradients, tuple(map(torch.zeros_like, (x, scale, shift))))


def test_running_statistics_are_not_written() -> None:
    mesh, full, (mean, var) = fs.Mesh(x=2), positive(4, 2), running(2)
    x = fs.shard(full, fs.Spec(mesh, fs.P(None, "x"), shape=(4, 2), dtype=torch.float64))
    before = mean.clone(), var.clone()
    result = fs.apply(aten.batch_norm.default, x, None, None, mean, var, True, 0.1, 1e-5, False)
    statistics = fs.apply(
        aten._native_batch_norm_legit_functional.default, x, None, None, mean, var, True, 0.1, 1e-5
    )
    torch.testing.assert_close((mean, var), before)
    expected = torch.nn.functional.batch_norm(full, mean, var, training=True)
    torch.testing.assert_close(fs.unshard(result), expected)
    torch.testing.assert_close((fs.unshard(statistics[3]), fs.unshard(statistics[4])), (mean, var))


SLOW = fs.Topology.of({"dp": fs.Link(latency=1e-5, bandwidth=1e8)})


@pytest.mark.parametrize("offset", [0.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_batch_norm_reduces_its_statistics_in_one_launch(dtype: torch.dtype, offset: float) -> None:
    """Shifted sums in double precision lose no digits where the mean exceeds the deviation."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(16, 3, 24, 24, generator=generator, dtype=torch.float64) + offset).to(dtype)
    norm = lambda x: F.batch_norm(x, None, None, training=True)  # noqa: E731
    spec = fs.Spec(fs.Mesh(dp=2), P("dp"), shape=x.shape, dtype=dtype)
    part = fs.partition(norm, mesh=spec.mesh, in_specs=P("dp"), out_specs=P("dp"), topology=SLOW)
    with fs.comm_log() as log:
        y = fs.unshard(part(fs.shard(x, spec)))
    assert log.forward.counts["all_reduce", "dp"] == 1
    exact = norm(x.double())
    error = (y.double() - exact).abs().max()
    one_device = (norm(x).double() - exact).abs().max()
    assert error <= 16 * one_device + 1e-10


@pytest.mark.parametrize("partition", [P(None, "x"), P("x")], ids=str)
def test_gradients_of_complex_rms_norms_equal_one_device(partition: P) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, cotangent = (
        torch.randn(shape, dtype=torch.complex128, generator=generator).requires_grad_()
        for shape in ((2, 4), (4,), (2, 4))
    )
    expected = F.rms_norm(x, (4,), weight)
    pair = fs.shard(x, Mesh(x=2), partition)
    y = fs.unshard(fs.on_pairs(F.rms_norm, mode="auto")(pair, (4,), weight))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y, (x, weight), cotangent),
        torch.autograd.grad(expected, (x, weight), cotangent),
    )
