"""`fs.constrain` along some axes, and gathers whose transposes are reduce-scatters."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import Mesh, P
from tests.helpers.ops.block_cases import collectives_of

MESH = Mesh(dp=2, tp=2)


def test_constraints_along_some_axes_keep_the_layout_along_others() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = fs.constrain(x, P("tp"), axes="tp")
        return rows, fs.constrain(rows, P(), axes="dp"), fs.constrain(rows * 2, P(), axes=["tp"])

    part = fs.partition(fn, mesh=MESH, in_specs=P("dp"))
    specs = part.trace(torch.empty(8, 4)).out_specs
    assert [*map(str, specs)] == ["f32[8@(dp,tp),4]", "f32[8@tp,4]", "f32[8@dp,4]"]
    x = torch.randn(8, 4)
    for y, expected in zip(part(x), (x, x, 2 * x), strict=True):
        assert torch.equal(y, expected)


def test_constraints_keep_partial_sums_along_other_axes() -> None:
    part = fs.partition(
        lambda x, w: fs.constrain(x @ w, P(None, "tp"), axes="tp"),
        mesh=MESH,
        in_specs=(P(None, "dp"), P("dp")),
    )
    (spec,) = part.trace(torch.empty(8, 4), torch.empty(4, 8)).out_specs
    assert str(spec) == "f32[8,8@tp]{unreduced: dp}"


def test_partitions_have_the_axes_of_the_constraint() -> None:
    with pytest.raises(fs.ShardingError, match="the axes of the partition must be among axes"):
        fs.constrain(torch.ones(2), P("dp"), axes="tp")
    part = fs.partition(lambda x: fs.constrain(x, P(), axes="x"), mesh=MESH)
    with pytest.raises(fs.ShardingError, match="an axis must be one of dp, tp"):
        part(torch.ones(2))


def test_the_gradient_of_a_gathered_sequence_is_reduce_scattered() -> None:
    """Sequence parallelism: what leaves a gather is multiplied by sharded columns."""

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fs.constrain(x, P(), axes="tp") @ w

    part = fs.partition(fn, mesh=Mesh(tp=2), in_specs=(P("tp"), P(None, "tp")))
    args = torch.empty(4096, 64, requires_grad=True), torch.empty(64, 64, requires_grad=True)
    forward, backward = collectives_of(part.trace(*args))
    assert forward == {("AllGather", ("tp",)): 1}
    assert backward == {("ReduceScatter", ("tp",)): 1}
    x, w = torch.randn(8, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    grads = torch.autograd.grad(part(x, w).sin().sum(), (x, w))
    expected = torch.autograd.grad((x @ w).sin().sum(), (x, w))
    torch.testing.assert_close(grads, expected)
