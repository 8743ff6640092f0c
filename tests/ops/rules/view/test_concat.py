"""Rules of operations that join or create tensors: correctness for every role, texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import Mesh, P, ShardingError, Spec
from fshard.ops.propagate.propagate import propagate
from fshard.partition.apply import apply
from tests.helpers.ops.op_checks import call_with, check_call

A = torch.ops.aten


def tensor(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


WHOLE = torch.arange(6).reshape(2, 3)
CASES: dict[str, tuple[Any, ...]] = {
    "cat": (A.cat.default, [tensor(4, 2), tensor(4, 3)], 1),
    "cat of nothing": (A.cat.default, [tensor(4, 2), tensor(0)]),
    "cat of one": (A.cat.default, [tensor(4, 6)], 1),
    "cat before a sequence": (A.cat.default, [tensor(2, 1, 3), tensor(2, 18, 3)], 1),
    "cat around a sequence": (A.cat.default, [tensor(1, 2), tensor(24, 2), tensor(2, 2)]),
    "cat of integers": (A.cat.default, [torch.arange(3), torch.arange(4)]),
    "concat": (A.concat.default, [tensor(4, 2), torch.arange(8).reshape(4, 2)], 1),
    "stack": (A.stack.default, [tensor(4, 2), tensor(4, 2)], 1),
    "stack of numbers": (A.stack.default, [tensor(), tensor()]),
    "hstack": (A.hstack.default, [tensor(4, 6), tensor(4, 2)]),
    "hstack of vectors": (A.hstack.default, [tensor(4), tensor(3)]),
    "vstack": (A.vstack.default, [tensor(4), tensor(2, 4)]),
    "vstack of numbers": (A.vstack.default, [tensor(), tensor()]),
    "dstack": (A.dstack.default, [tensor(4), tensor(4)]),
    "column_stack": (A.column_stack.default, [tensor(4), tensor(4, 6)]),
    "column_stack of a number": (A.column_stack.default, [tensor(), tensor(1, 5)]),
    "one column": (A.column_stack.default, [tensor(4)]),
    "pad_sequence": (A.pad_sequence.default, [tensor(4, 6), tensor(2, 6)]),
    "pad_sequence by a number": (A.pad_sequence.default, [tensor(4, 6), tensor(2, 6)], True, 1.5),
    "block_diag": (A.block_diag.default, [tensor(2, 3), tensor(4), tensor()]),
    "cartesian_prod": (A.cartesian_prod.default, [tensor(4), tensor(3), tensor(2)]),
    "combinations": (A.combinations.default, tensor(4), 2),
    "broadcast_tensors": (A.broadcast_tensors.default, [tensor(4, 1), tensor(6), tensor()]),
    "zeros_like": (A.zeros_like.default, tensor(4, 6)),
    "full_like": (A.full_like.default, WHOLE, 3),
    "zero_": (A.zero_.default, tensor(4, 6)),
    "fill_": (A.fill_.Scalar, tensor(4, 6), 3.0),
    "new_zeros of the same shape": (A.new_zeros.default, tensor(4, 6), [4, 6]),
    "new_zeros": (A.new_zeros.default, tensor(4, 6), [3]),
    "new_full": (A.new_full.default, tensor(4, 6), [4, 6], 2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_are_right(name: str) -> None:
    op, *args = CASES[name]
    assert check_call(op, *args) == []


@pytest.mark.parametrize("indexing", ["ij", "xy"])
def test_meshgrid_equals_one_device(indexing: str) -> None:
    inputs = [tensor(4), tensor(3), tensor(2)]
    assert check_call(A.meshgrid.indexing, inputs, indexing=indexing) == []


@pytest.mark.parametrize("name", ["cat", "cat around a sequence", "stack", "broadcast_tensors"])
def test_rules_on_two_axes(name: str) -> None:
    op, *args = CASES[name]
    assert check_call(op, *args, grad=False, two_axes=True) == []


TOGETHER = (
    "{unreduced 0+1 sum; unreduced 0+1 avg; unreduced 0+1 max; unreduced 0+1 min; "
    "unreduced 0+1 product}"
)
TEXTS = {
    "cat": f"a1,a1->a1  {TOGETHER}",
    "cat before a sequence": f"a1c,abc->adc  {{d b[-1:18]; {TOGETHER[1:]}",
    "stack": f"ac,ac->a1c  {TOGETHER}",
    "vstack": f"b,1b->1b  {TOGETHER}",
    "pad_sequence by a number":
        "1a,1a->11a  {unreduced 0+1 avg; unreduced 0+1 max; unreduced 0+1 min}",
    "zero_":
        "ab->ab  {unreduced 0 sum -> invariant; unreduced 0 avg -> invariant; "
        "unreduced 0 max -> invariant; unreduced 0 min -> invariant; "
        "unreduced 0 product -> invariant}",
    "new_zeros": "11->1",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_rule_texts(name: str) -> None:
    op, *args = CASES[name]
    assert str(call_with(op, args, {})[1]) == TEXTS[name]


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (0, 9, 7, 0), (3, 5, 2, 6)])
def test_a_token_before_a_sharded_sequence_is_added_to_the_first_shard(
    sizes: tuple[int, ...],
) -> None:
    """Nothing is sent; the gradient of the token is a sum over the ranks."""

    def embed(x: torch.Tensor, token: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        y = torch.cat([token.expand(2, -1, -1), x], 1) + positions
        return y - y.mean(-1, keepdim=True)

    spec = Spec(Mesh(x=4), P(None, "x"), shape=(2, 16, 6), dtype=torch.float64, sizes={1: sizes})
    xs = [x.requires_grad_() for x in (tensor(2, 16, 6), tensor(1, 1, 6), tensor(1, 17, 6))]
    pairs = fs.shard(xs[0], spec), *(fs.shard(x, spec.mesh, P()) for x in xs[1:])
    with fs.comm_log() as log:
        y = fs.partition(embed, mesh=spec.mesh)(*pairs)
    assert not log.counts
    assert y.spec.shard_sizes(1) == (sizes[0] + 1, *sizes[1:])
    expected = embed(*xs)
    torch.testing.assert_close(fs.unshard(y), expected, rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad(z, xs, tensor(*z.shape)) for z in (fs.unshard(y), expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_new_tensors_of_another_shape_accept_any_layout() -> None:
    mesh = Mesh(x=2, y=2)
    for partition in (P("x", "y"), P(("x", "y")), P(unreduced={"x": "max"}), P()):
        spec = Spec(mesh, partition, shape=(4, 6))
        result = propagate(A.new_ones.default, spec, [3])
        assert result.in_specs == (spec,)
        assert result.is_local
        assert result.out_specs == (Spec(mesh, P(), shape=(3,)),)


def test_filled_unreduced_tensors_are_invariant() -> None:
    mesh = Mesh(x=2)
    x = fs.Sharded((torch.ones(4), torch.ones(4)), Spec(mesh, P(unreduced={"x"}), shape=(4,)))
    result = apply(A.fill.Scalar, x, 3.0)
    assert result.spec == Spec(mesh, P(), shape=(4,))
    assert torch.equal(fs.unshard(result), torch.full((4,), 3.0))


def test_numbers_require_unsharded_tensors() -> None:
    mesh = Mesh(x=2)
    addends = fs.Sharded(
        (torch.tensor(1.0), torch.tensor(2.0)), Spec(mesh, P(unreduced={"x"}), shape=())
    )
    assert apply(A.item.default, addends, mode="auto") == 3.0
    x, y = torch.arange(4.0), torch.tensor([0.0, 1.0, 2.0, 4.0])
    actual, expected = (fs.shard(element, Spec(mesh, P("x"), shape=(4,))) for element in (x, y))
    assert apply(torch.equal, actual, fs.shard(x, Spec(mesh, P(), shape=(4,))), mode="auto") is True
    assert apply(torch.equal, actual, expected, mode="auto") is False
    assert apply(torch.allclose, actual, expected, 0.0, 1.0, mode="auto") is True
    with pytest.raises(ShardingError, match="need communication"):
        apply(A.item.default, addends)


@pytest.mark.parametrize("partition", [P("x"), P(None, "x"), P(unreduced={"x"})])
def test_queries_use_global_shapes(partition: P) -> None:
    spec = Spec(Mesh(x=2), partition, shape=(4, 6))
    x = fs.Sharded(tuple(torch.ones(spec.local_shape(rank)) for rank in (0, 1)), spec)
    assert apply(A.is_same_size.default, x, x) is True
    assert apply(A.sym_size.int, x, 1) == 6
    assert apply(A.numel.default, x) == 24
    assert apply(A.is_complex.default, x) is False
    assert apply(A._assert_tensor_metadata.default, x, size=[4, 6]) is None
